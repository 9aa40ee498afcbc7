"""Count the modules of m1clip that one training run calls, and print how many functions of each.

    python tools/trace_modules.py [OPTIONS OF m1clip train]

Trains two epochs of `tiny` on 48 images listed in a captions.csv, with every part of `train`: data,
checks, steps, evaluation, checkpoints and the retrieval examples. A module counts if one of its
functions is called, in any thread of the command; what runs while a module is imported, such as
the body of a class or a function that builds a table, does not count. docs/design-details.md gives the
number.
"""

from __future__ import annotations

import inspect
import sys
import tempfile
import threading
from collections import defaultdict
from pathlib import Path
from types import FrameType
from typing import Any

import m1clip
from m1clip.cli.main import main as run_command
from m1clip.data.synthetic.source import SyntheticSource

PACKAGE = Path(m1clip.__file__).parent
IMAGES = 48


def write_photos(folder: Path) -> None:
    """Write synthetic images and the captions.csv that lists them."""
    rows = ["image,caption"]
    for number, sample in enumerate(SyntheticSource(64, IMAGES, 1, 1, seed=0).samples("train")):
        sample.image.open().save(folder / f"{number}.png")
        rows += [f'{number}.png,"{caption}"' for caption in sample.captions]
    (folder / "captions.csv").write_text("\n".join(rows) + "\n")


def is_imported(frame: FrameType) -> bool:
    """Whether a function is called while a module of m1clip is imported."""
    caller = frame.f_back
    while caller is not None:
        if caller.f_code.co_name == "<module>" and caller.f_globals.get("__name__") != "__main__":
            return True
        caller = caller.f_back
    return False


def trace(arguments: list[str]) -> dict[str, set[str]]:
    """Run a command in this process: module -> names of its functions that were called."""
    called: dict[str, set[str]] = defaultdict(set)
    counted = set()

    def profile(frame: FrameType, event: str, _argument: Any) -> None:
        code = frame.f_code
        if event != "call" or code in counted:
            return
        is_function = code.co_flags & inspect.CO_OPTIMIZED and code.co_name.isidentifier()
        if is_function and is_imported(frame):
            return  # it may be called later
        counted.add(code)
        path = Path(code.co_filename)
        if is_function and path.is_relative_to(PACKAGE):
            called[path.relative_to(PACKAGE).as_posix()].add(code.co_name)

    threading.setprofile(profile)
    sys.setprofile(profile)
    try:
        run_command(arguments)
    except SystemExit as error:
        if error.code:
            raise
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
    return called


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        photos = Path(folder) / "photos"
        photos.mkdir()
        write_photos(photos)
        arguments = ["train", str(photos), "--model", "tiny", "--epochs", "2", "--workers", "0"]
        arguments += ["--out", f"{folder}/run", *sys.argv[1:]]
        called = trace(arguments)
    for module, functions in sorted(called.items()):
        print(f"{module:40} {len(functions)}")
    print(f"{len(called)} modules, {sum(map(len, called.values()))} functions")


if __name__ == "__main__":
    main()
