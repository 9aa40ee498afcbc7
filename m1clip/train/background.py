"""`m1clip train --background`: the same command again, as a process of its own that outlives the terminal."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from m1clip.errors import UserError
from m1clip.files import open_plain, open_regular
from m1clip.owner import read_owner
from m1clip.runlog import NAME
from m1clip.train.folder import OUTPUT, claim_folder, give_back

SLOW_START = 30.0  # seconds until it has imported everything and taken its folder, at most
FIRST_LOOK = 5.0  # seconds after that, in which a run that cannot work is noticed
LAST_WORDS = 2**16  # bytes of its output that can hold the reason


def start_in_background(
    words: list[str], run: Path | None, name: str, resume: Path | None
) -> tuple[Path, int]:
    """Start `m1clip train` with these words (less --background and --run); gives its folder and process number."""
    folder = resume if resume is not None else claim_folder(run, name)
    if resume is not None and not (folder / "config.toml").is_file():
        raise UserError(f"{folder}: no run there (no config.toml)")
    own = without(words, "--background", "--run")
    output = folder / OUTPUT
    with os.fdopen(open_plain(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND), "ab") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "m1clip", *own, *([] if resume is not None else ["--run", str(folder)])],
            stdin=subprocess.DEVNULL, stdout=file, stderr=file,
            start_new_session=True,  # no terminal: closing the window sends it nothing
        )  # fmt: skip
    before = _log_size(folder)
    deadline, begun = time.monotonic() + SLOW_START, False
    while time.monotonic() < deadline and _log_size(folder) == before:
        # Fine-tuning begins with the run of its frozen stage (train/stages.py).
        owners = [read_owner(place) for place in (folder, Path(f"{folder}-frozen"))]
        if not begun and process.pid in [owner.pid for owner in owners if owner is not None]:
            deadline, begun = time.monotonic() + FIRST_LOOK, True
        if process.poll() is not None and process.returncode != 0:
            with open_regular(output) as log:
                log.seek(max(0, output.stat().st_size - LAST_WORDS))
                said = log.read(LAST_WORDS).decode("utf-8", "replace").strip().splitlines()
            if resume is None:
                output.unlink(missing_ok=True)
                give_back(folder)
            raise UserError(
                (said[-1] if said else f"ended with code {process.returncode}").removeprefix("m1clip: ")
            )
        time.sleep(0.05)
    return folder, process.pid


def _log_size(folder: Path) -> int:
    """Grows when the run has begun."""
    log = folder / NAME
    return log.stat().st_size if log.is_file() else 0


def without(words: list[str], *options: str) -> list[str]:
    """A command line less some options and their values; --background has none."""
    kept: list[str] = []
    skip = False
    for word in words:
        if skip:
            skip = False
            continue
        name, equals, _ = word.partition("=")
        if name in options:
            skip = not equals and name != "--background"
            continue
        kept.append(word)
    return kept
