"""The folder of a run: claimed by one process alone, and given back if the run never began."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from m1clip.errors import UserError
from m1clip.io import LOCK, lock_content, open_for_write, open_regular, read_owner
from m1clip.runlog import NAME, PREPARING, PREPARING_PARTIAL

OUTPUT = "train.log"  # what a run in the background says


def create_run_folder(asked: Path | None, name: str) -> Path:
    """Make a folder that holds no run yet: the one asked for, or runs/NAME, runs/NAME-2, ..."""
    if asked is not None:
        check_unused(asked)
        asked.mkdir(parents=True, exist_ok=True)
        return asked
    number = 1
    while True:
        folder = Path("runs") / (name if number == 1 else f"{name}-{number}")
        try:
            folder.mkdir(parents=True)  # fails if another process was quicker
        except FileExistsError:
            number += 1
        else:
            return folder


def check_unused(asked: Path) -> None:
    """Refuse a folder that holds a run, or anything else."""
    if (asked / "config.toml").exists():
        raise UserError(f"{asked}: holds a run already; continue it with --resume {asked}, or choose another --run")
    if asked.exists() and (not asked.is_dir() or _contents(asked)):
        raise UserError(f"{asked}: exists and is not a run; choose another --run")


def remove_unused_folder(folder: Path) -> None:
    """Remove a claimed folder in which nothing was written, so that the same command works again."""
    if not _contents(folder):
        for name in (LOCK, PREPARING, PREPARING_PARTIAL):
            (folder / name).unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            folder.rmdir()
            if folder.parent == Path("runs"):
                folder.parent.rmdir()  # fails, and stays, when it holds other runs


@contextlib.contextmanager
def lock_run(folder: Path) -> Iterator[None]:
    """Be the only writer of a run; the system lets go of it when this process ends, however it ends."""
    handle = open_for_write(folder / LOCK, os.O_RDWR | os.O_CREAT)
    try:
        try:
            # Not flock: forked data workers would share it, and outlive a killed parent by some seconds.
            fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            holder = os.read(handle, 64).decode("utf-8", "replace").partition("\n")[0].strip() or "unknown"
            raise UserError(f"{folder}: process {holder} is training there; wait for it, or stop it first") from None
        except OSError:
            pass  # a disk without locks (some network mounts): then no one can be kept out
        os.truncate(handle, 0)
        os.write(handle, lock_content().encode())
        (folder / PREPARING).unlink(missing_ok=True)  # of a killed process
        yield
    finally:
        os.close(handle)


def _contents(folder: Path) -> list[str]:
    return [item.name for item in folder.iterdir() if item.name not in (LOCK, OUTPUT, PREPARING, PREPARING_PARTIAL)]


SLOW_START = 30.0  # seconds until it has imported everything and taken its folder, at most
FIRST_LOOK = 5.0  # seconds after that, in which a run that cannot work is noticed
LAST_WORDS = 2**16  # bytes of its output that can hold the reason


def start_in_background(words: list[str], run: Path | None, name: str, resume: Path | None) -> tuple[Path, int]:
    """Start `m1clip train` with these words (less --background and --run); gives its folder and process number."""
    folder = resume if resume is not None else create_run_folder(run, name)
    if resume is not None and not (folder / "config.toml").is_file():
        raise UserError(f"{folder}: no run there (no config.toml)")
    own = without(words, "--background", "--run")
    output = folder / OUTPUT
    with os.fdopen(open_for_write(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND), "ab") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "m1clip", *own, *([] if resume is not None else ["--run", str(folder)])],
            stdin=subprocess.DEVNULL, stdout=file, stderr=file,
            start_new_session=True,  # no terminal: closing the window sends it nothing
        )  # fmt: skip
    before = _log_size(folder)
    deadline, begun = time.monotonic() + SLOW_START, False
    while time.monotonic() < deadline and _log_size(folder) == before:
        # Fine-tuning begins with the run of its frozen stage (train/stages.py).
        image_index = [read_owner(place) for place in (folder, Path(f"{folder}-frozen"))]
        if not begun and process.pid in [owner.pid for owner in image_index if owner is not None]:
            deadline, begun = time.monotonic() + FIRST_LOOK, True
        if process.poll() is not None and process.returncode != 0:
            with open_regular(output) as log:
                log.seek(max(0, output.stat().st_size - LAST_WORDS))
                said = log.read(LAST_WORDS).decode("utf-8", "replace").strip().splitlines()
            if resume is None:
                output.unlink(missing_ok=True)
                remove_unused_folder(folder)
            raise UserError((said[-1] if said else f"ended with code {process.returncode}").removeprefix("m1clip: "))
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


class Stopped(Exception):
    """The run was asked to stop; a checkpoint of its last step is saved."""

    def __init__(self, run: str, step: int, number: int) -> None:
        super().__init__(f"stopped at step {step:,}; continue with: m1clip train --resume {run}")
        self.exit_code = 128 + number  # as a shell reports a signal


class Interrupted(KeyboardInterrupt):
    """A signal came where there is no step to finish: while data is prepared, or a model evaluated."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by signal {number}")
        self.number = number
        self.exit_code = 128 + number


class StopRequest:
    """Holds the number of the signal that asked, or 0; and whether somebody will look at it soon."""

    def __init__(self) -> None:
        self.signal = 0
        self.patient = False

    @contextlib.contextmanager
    def looked_at(self) -> Iterator[None]:
        """The block looks at `signal` itself, so that a step and a save are finished first."""
        before, self.patient = self.patient, True
        try:
            yield
        finally:
            self.patient = before

    @contextlib.contextmanager
    def at_once(self) -> Iterator[None]:
        """A signal breaks the block off with `Interrupted`: it may be long, and can be done again."""
        before, self.patient = self.patient, False
        try:
            if self.signal:
                raise Interrupted(self.signal)
            yield
        finally:
            self.patient = before


@contextlib.contextmanager
def stop_on_signals() -> Iterator[StopRequest]:
    """Catch the first SIGINT, SIGTERM or SIGHUP while the block runs; the second has its usual effect."""
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request  # Python allows handlers in the main thread alone
        return

    owner = os.getpid()

    def ask(number: int, frame: FrameType | None) -> None:
        if os.getpid() != owner:  # a forked helper has inherited this: for it a signal has its usual effect
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        request.signal = number
        for each, usual in before.items():
            signal.signal(each, usual)
        if not request.patient:
            raise Interrupted(number)

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    if before[signal.SIGHUP] == signal.SIG_IGN:  # started with nohup: a closed terminal changes nothing
        del before[signal.SIGHUP]
    for number in before:
        signal.signal(number, ask)
    try:
        yield request
    finally:
        for number, usual in before.items():
            signal.signal(number, usual)
