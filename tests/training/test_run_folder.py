"""A run folder has one owner, and a run that never began leaves none behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from m1clip.errors import UserError
from m1clip.io import LOCK
from m1clip.runlog import NAME, RunLog
from m1clip.training.process import create_run_folder, lock_run, remove_unused_folder

HOLDER = """
import os, sys, time
from pathlib import Path
from m1clip.training.process import lock_run
with lock_run(Path(sys.argv[1])):
    if os.fork() == 0:  # a data worker, which outlives its parent for a while
        time.sleep(60)
        os._exit(0)
    print("held", flush=True)
    sys.stdin.readline()
"""


def test_names_are_claimed_one_after_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert [create_run_folder(None, "tiny").name for _ in range(3)] == ["tiny", "tiny-2", "tiny-3"]


def test_a_folder_with_other_things_is_refused_and_an_empty_one_taken(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    assert create_run_folder(tmp_path / "mine", "x") == tmp_path / "mine"
    (tmp_path / "mine" / "photo.jpg").touch()
    with pytest.raises(UserError, match="exists and is not a run"):
        create_run_folder(tmp_path / "mine", "x")
    (tmp_path / "mine" / "config.toml").touch()
    with pytest.raises(UserError, match="already contains a run"):
        create_run_folder(tmp_path / "mine", "x")


def test_a_run_that_never_began_gives_its_folder_back(tmp_path: Path) -> None:
    folder = create_run_folder(tmp_path / "run", "x")
    with lock_run(folder):
        remove_unused_folder(folder)
    assert not folder.exists()
    kept = create_run_folder(tmp_path / "kept", "x")
    (kept / "run.jsonl").touch()
    remove_unused_folder(kept)
    assert (kept / "run.jsonl").exists()


def test_a_second_writer_is_told_who_holds_the_run_and_a_dead_one_holds_nothing(tmp_path: Path) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    with pytest.raises(UserError, match=f"process {holder.pid} is training there"), lock_run(tmp_path):
        pass
    holder.kill()
    holder.wait(timeout=30)
    with lock_run(tmp_path):
        assert (tmp_path / LOCK).read_text().splitlines()[0] == str(os.getpid())
    with contextlib.suppress(ProcessLookupError):
        os.killpg(holder.pid, signal.SIGKILL)


def test_nothing_is_written_through_a_link(tmp_path: Path) -> None:
    """A lock or log that leads elsewhere, as a folder from a stranger may have it."""
    precious = tmp_path / "precious.txt"
    precious.write_text("mine")
    run = tmp_path / "run"
    run.mkdir()
    for name, opened in ((LOCK, lambda: lock_run(run).__enter__()), (NAME, lambda: RunLog(run))):
        (run / name).symlink_to(precious)
        with pytest.raises(UserError, match=rf"{name}: is a link"):
            opened()
    assert precious.read_text() == "mine"
