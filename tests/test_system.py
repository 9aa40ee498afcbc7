"""A system without what Windows lacks: all modules can be imported, a run trains, saves, and locks its folder."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from small_run import environment

WITHOUT_POSIX = """
import multiprocessing.connection, os, psutil, signal, subprocess, sys, tempfile, types

locked = []
msvcrt = types.ModuleType("msvcrt")
msvcrt.LK_NBLCK = 2
msvcrt.locking = lambda handle, mode, count: locked.append(os.lseek(handle, 0, os.SEEK_CUR))
sys.modules |= {"fcntl": None, "resource": None, "msvcrt": msvcrt}
for name in ("O_NOFOLLOW", "geteuid", "getuid", "sched_getaffinity", "pread", "pwrite"):
    if hasattr(os, name):
        delattr(os, name)
for name in ("SIGHUP", "pthread_sigmask"):
    delattr(signal, name)
import importlib, pkgutil, m1clip
for found in pkgutil.walk_packages(m1clip.__path__, "m1clip."):
    if found.name != "m1clip.__main__":
        try:
            importlib.import_module(found.name)
        except ModuleNotFoundError as error:  # an optional library
            assert not error.name.startswith("m1clip") and error.name not in ("fcntl", "resource")
from m1clip.cli.main import main
try:
    main(sys.argv[1:])
finally:
    print("locked", locked)
"""


@pytest.mark.slow
def test_all_modules_import_and_training_works_without_posix_modules(tmp_path: Path) -> None:
    words = ["train", "synthetic", "--synthetic-images", "40", "--image-size", "32"]
    words += ["--patch-size", "16", "--vision-layers", "1", "--text-layers", "1", "--steps", "2"]
    words += ["--batch-size", "8", "--device", "cpu", "--precision", "fp32", "--out", "run"]
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_POSIX, *words],
        cwd=tmp_path,
        env=environment() | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "model" / "model.safetensors").is_file()
    # The lock is behind the content of the file, so that others can read who holds it.
    assert f"locked [{2**30}]" in done.stdout
    assert os.stat(tmp_path / "run").st_size
