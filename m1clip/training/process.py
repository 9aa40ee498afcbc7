"""The process of a run: its folder and lock, stop signals, and background runs."""

import contextlib
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import psutil

from m1clip.errors import UserError
from m1clip.formatting import one_line
from m1clip.io import (
    RUN_LOCK,
    SPLITS_FILE,
    forget_lock,
    holds_lock,
    lock_content,
    open_for_write,
    open_regular,
    read_owner,
    remember_lock,
)
from m1clip.runlog import ABOUT_LABELS, NAME, PREPARING, PREPARING_PARTIAL
from m1clip.system import HANGUP, STOP_SIGNALS, lock_file, lock_with_children

OUTPUT = "train.log"  # of a background run
STOPPING = "\r\nstopping after this step; Ctrl-C again ends at once, without a checkpoint\n"
WRITTEN_BEFORE_CONFIG = ("tokenizer.json", "environment.json", SPLITS_FILE)  # by a run that begins
START_SECONDS = 30.0  # at most, for imports and creating the folder
FAILURE_SECONDS = 5.0  # after that, to detect a run that fails at once
LAST_OUTPUT = 2**16  # bytes searched for the reason
ERROR_START = "m1clip: "  # of the line with an error; notes may follow it
TRACEBACK_START = "Traceback (most recent call last)"  # of an error that is a defect
NO_REASON = "its process ended without a message, as when memory runs out"


def create_run_folder(path: Path | None, name: str) -> Path:
    if path is not None:
        check_unused(path)
        path.mkdir(parents=True, exist_ok=True)
        return path
    for number in itertools.count(1):
        folder = Path("runs") / (name if number == 1 else f"{name}-{number}")
        with contextlib.suppress(FileExistsError):  # also if another process was faster
            folder.mkdir(parents=True)
            break
    return folder


def check_unused(path: Path) -> None:
    if (path / "config.toml").exists():
        raise UserError(
            f"{path}: already contains a run; continue it with --resume {path}, or choose another"
            " --out"
        )
    if path.exists() and (not path.is_dir() or set(_contents(path)) - {ABOUT_LABELS}):
        raise UserError(f"{path}: exists and is not a run; choose another --out")


def remove_unused_folder(folder: Path) -> None:
    """Remove the folder of a run that did not begin, so that the same command works again.

    Its lock is held, else another process may be preparing a run in it. A run begins with its
    config.toml; on a full disk, only the files before it may be written.
    """
    if not set(_contents(folder)) - set(WRITTEN_BEFORE_CONFIG):
        # The lock last: until then, no other process can begin here.
        for name in (PREPARING, PREPARING_PARTIAL, *WRITTEN_BEFORE_CONFIG, RUN_LOCK):
            (folder / name).unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            folder.rmdir()
            if folder.parent == Path("runs"):
                folder.parent.rmdir()  # fails if it contains other runs


def remove_folder_of_failed_start(folder: Path) -> None:
    """Remove the folder of a process that ended before its run began, unless another is in it."""
    with contextlib.suppress(UserError, OSError), lock_run(folder):
        remove_unused_folder(folder)


def _contents(folder: Path) -> list[str]:
    return [
        item.name
        for item in folder.iterdir()
        if item.name not in (RUN_LOCK, OUTPUT, PREPARING, PREPARING_PARTIAL)
    ]


_locking = threading.Lock()


@contextlib.contextmanager
def lock_run(folder: Path) -> Iterator[None]:
    """Hold the lock of a run; the system releases it when this process ends for any reason."""
    handle = _open_locked(folder)
    try:
        os.truncate(handle, 0)
        os.write(handle, lock_content().encode())
        (folder / PREPARING).unlink(missing_ok=True)  # left by a killed process
        try:
            yield
        finally:
            os.truncate(handle, 0)  # a notebook lives on: stop must not end it
    finally:
        forget_lock(handle)
        os.close(handle)


def _open_locked(folder: Path) -> int:
    """Open the lock file of a run and lock it."""
    with _locking:  # two threads must not open the file at the same time: see `holds_lock`
        if holds_lock(folder):
            raise _in_use(folder, str(os.getpid()))
        path = folder / RUN_LOCK
        if path.exists() and not path.is_file():  # such as a FIFO in the folder of a stranger
            raise UserError(f"{path}: not a regular file; delete it")
        handle = open_for_write(path, os.O_RDWR | os.O_CREAT)
        try:
            _lock_handle(handle, folder)
        except BaseException:
            os.close(handle)
            raise
        remember_lock(handle)
        return handle


def _lock_handle(handle: int, folder: Path) -> None:
    try:
        lock_file(handle)
    except (BlockingIOError, PermissionError):
        pid = os.read(handle, 64).decode("utf-8", "replace").partition("\n")[0].strip()
        raise _in_use(folder, pid or "unknown") from None
    except OSError:
        pass  # a file system without locks (some network mounts)
    with contextlib.suppress(OSError):
        if os.path.samestat(os.fstat(handle), os.stat(folder / RUN_LOCK)):
            return
    # The process that held the lock has deleted its file: this one would protect nothing.
    raise UserError(
        f"{folder}: another process that began here has just removed the folder; run the command"
        " again"
    )


def _in_use(folder: Path, pid: str) -> UserError:
    return UserError(
        f"{folder}: process {pid} is training in this folder; wait for it, or stop it first"
    )


class Stopped(Exception):
    """The run was stopped by a signal; a checkpoint of its last step is saved."""

    def __init__(self, run: str, step: int, signal_number: int) -> None:
        super().__init__(f"stopped at step {step:,}; continue with: m1clip train --resume {run}")
        self.exit_code = 128 + signal_number  # shell convention for signals


class Interrupted(KeyboardInterrupt):
    """A signal arrived outside of a step, during data preparation or evaluation."""

    def __init__(self, signal_number: int) -> None:
        name = "Ctrl-C" if signal_number == signal.SIGINT else f"signal {signal_number}"
        super().__init__(f"stopped by {name}")
        self.number = signal_number
        self.exit_code = 128 + signal_number


class StopRequest:
    """The stop signal received, or 0, and whether it interrupts the running code."""

    def __init__(self) -> None:
        self.signal = 0
        self.interrupts = True

    @contextlib.contextmanager
    def interrupting(self, on: bool = True) -> Iterator[None]:
        """Raise `Interrupted` on a signal, for a block that may take long and can be repeated.

        If off, the block checks `signal` itself, after finishing a step or save.
        """
        before, self.interrupts = self.interrupts, on
        try:
            if on and self.signal:
                raise Interrupted(self.signal)
            yield
        finally:
            self.interrupts = before


@contextlib.contextmanager
def stop_on_signals() -> Iterator[StopRequest]:
    """Catch the first SIGINT, SIGTERM or SIGHUP while the block runs.

    A second one has its default effect.
    """
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request  # Python allows signal handlers in the main thread only
        return

    owner = os.getpid()

    def handle(number: int, frame: FrameType | None) -> None:
        # Inherited by a forked worker, where signals have their default effect.
        if os.getpid() != owner:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        request.signal = number
        for signal_number, usual in before.items():
            signal.signal(signal_number, usual)
        if request.interrupts:
            raise Interrupted(number)
        if number == signal.SIGINT:
            _say_that_a_step_ends()

    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    if before.get(HANGUP) == signal.SIG_IGN:  # started with nohup: ignore a closed terminal
        del before[HANGUP]
    for number in before:
        signal.signal(number, handle)
    try:
        yield request
    finally:
        for number, usual in before.items():
            signal.signal(number, usual)


def _say_that_a_step_ends() -> None:
    """On a terminal, answer Ctrl-C at once: a step may take seconds, and a second one saves nothing."""
    if os.environ.get("RANK", "0") == "0" and sys.stderr is not None and sys.stderr.isatty():
        # Not through `sys.stderr`, in which the signal may have interrupted a write.
        os.write(sys.stderr.fileno(), STOPPING.encode())


def start_in_background(
    arguments: list[str], run: Path | None, name: str, resume: Path | None
) -> tuple[Path, int]:
    """Start `m1clip` with these arguments as a background process.

    Returns the run folder and process id.
    """
    folder = resume if resume is not None else create_run_folder(run, name)
    if not folder.exists():
        raise UserError(f"{folder}: no such file or folder")
    if resume is not None and not (folder / "config.toml").is_file():
        raise UserError(f"{folder}: not a run folder (no config.toml)")
    command = [sys.executable, "-m", "m1clip", *arguments]
    command += [] if resume is not None else ["--out", str(folder)]
    output = folder / OUTPUT
    with os.fdopen(open_for_write(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND), "ab") as file:
        _reserve(folder, file.fileno())
        if resume is None:
            check_unused(folder)  # again: another run in it may have begun and ended meanwhile
        before = _log_bytes(folder)
        # A new session has no terminal, so closing the window sends no signal.
        streams = {"stdin": subprocess.DEVNULL, "stdout": file, "stderr": file}
        process = subprocess.Popen(command, start_new_session=True, **streams)  # type: ignore[call-overload]
        if resume is None:
            name_owner(folder, process.pid)
        if _fails_at_once(process, folder, before):
            reason = failure_of(folder) or f"{NO_REASON} (exit code {process.returncode})"
            if resume is None:
                output.unlink(missing_ok=True)
                remove_folder_of_failed_start(folder)
            raise UserError(reason)
    return folder, process.pid


def _reserve(folder: Path, output: int) -> None:
    """Keep other processes from starting a run in a folder.

    The lock of the output is inherited by the run, and ends with it.
    """
    owner = read_owner(folder)
    if owner is not None and owner.process() is not None:
        raise _in_use(folder, str(owner.pid))
    try:
        lock_with_children(output)
    except BlockingIOError:
        raise _in_use(folder, "unknown" if owner is None else str(owner.pid)) from None
    except OSError:
        pass  # a file system without locks


def _fails_at_once(process: subprocess.Popen[bytes], folder: Path, log_bytes: int) -> bool:
    """Wait until a run in the background has begun; returns whether it ended with an error."""
    named = _lock_time(folder)
    deadline, owned = time.monotonic() + START_SECONDS, False
    while time.monotonic() < deadline and _log_bytes(folder) == log_bytes:
        # Fine-tuning begins with the second folder.
        owners = [read_owner(Path(f"{folder}-frozen"))]
        if _lock_time(folder) != named:
            owners.append(read_owner(folder))
        if not owned and any(owner is not None and owner.pid == process.pid for owner in owners):
            deadline, owned = time.monotonic() + FAILURE_SECONDS, True
        if process.poll():
            return True
        time.sleep(0.05)
    return False


def failure_of(folder: Path) -> str:
    """Why a background run ended, from its output; empty if it printed nothing."""
    with open_regular(folder / OUTPUT) as log:
        log.seek(max(0, os.fstat(log.fileno()).st_size - LAST_OUTPUT))
        return error_line(log.read(LAST_OUTPUT))


def error_line(output: bytes) -> str:
    """The error that a program printed: the last line that begins as errors do, or of a traceback.

    Without one, the last line, which may be progress before the process was killed, is named as
    such.
    """
    lines = output.decode("utf-8", "replace").strip().splitlines()
    errors = [line for line in lines if line.startswith(ERROR_START)]
    if errors:
        return one_line(errors[-1].removeprefix(ERROR_START))
    if any(line.startswith(TRACEBACK_START) for line in lines):
        return one_line(lines[-1])
    return one_line(f"{NO_REASON}; the last line of its output: {lines[-1]}") if lines else ""


def name_owner(folder: Path, pid: int) -> None:
    """Write the owner of a run into its lock file, for as long as its process starts.

    On a busy machine, it takes the lock itself only after half a minute of imports. Without this,
    the run would not be listed until then, and could be started twice.
    """
    with contextlib.suppress(OSError, psutil.Error):  # the process has locked it, or has ended
        handle = os.open(folder / RUN_LOCK, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        with os.fdopen(handle, "w", encoding="utf-8") as lock:
            lock.write(lock_content(pid))


def _lock_time(folder: Path) -> int:
    """When the lock file was written; 0 if there is none."""
    try:
        return (folder / RUN_LOCK).stat().st_mtime_ns
    except OSError:
        return 0


def _log_bytes(folder: Path) -> int:
    """Size of the run log; grows once the run has started."""
    log = folder / NAME
    return log.stat().st_size if log.is_file() else 0
