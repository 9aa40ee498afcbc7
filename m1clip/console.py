"""Messages, warnings and progress of m1clip, for the command and for Python alike.

Everything that m1clip reports is a record of Python's `logging`: of the logger "m1clip" or one of
its children, which have the names of the modules, such as "m1clip.data.failures". Messages have the
level INFO, warnings WARNING. By default, `handler` prints them on standard output; the records do
not go to the handlers of the root logger. With the `logging` module, a notebook or another program
can change that:

    logger = logging.getLogger("m1clip")
    logger.setLevel(logging.WARNING)  # warnings only, and no progress
    logger.addHandler(logging.FileHandler("m1clip.log"))  # also to a file
    logger.removeHandler(m1clip.console.handler)  # nothing on standard output
    logger.propagate = True  # to the handlers of the program

Longer work shows its progress: as a bar on a terminal or in a notebook with ipywidgets, otherwise
as a message every few seconds. `on_progress` calls a function instead.

Under torchrun, rank 0 prints and the other ranks are silent. Worker processes print on their own.
`quiet`, `capture`, `progress_file`, `record_warnings` and `on_progress` hold for the thread (or
asyncio task) that enters them, so that two runs in two threads do not mix.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import logging
import os
import re
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from pathlib import Path
from types import FrameType
from typing import IO, TYPE_CHECKING, Any, cast

from m1clip.errors import UserError
from m1clip.formatting import clock, printable
from m1clip.io import PARTIAL, open_for_write

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress as Bars
    from rich.progress import TaskID

Refresh = Callable[[int, int], None]  # (items done, items in all)

# Seconds without output until each look at whether a command still imports libraries.
IMPORT_CHECKS = (1.5, 0.5, 0.5, 0.5)
_has_output = threading.Event()
BAR_SECONDS = 0.5  # until work without a count is shown on a terminal
PROGRESS_SECONDS = 8.0  # between two messages about the progress of the same work
LOGGER_NAME = "m1clip"  # of the logger
LINE_LABEL = re.compile(r"[a-z]+ {2,}")  # the first word of a line, padded to a column
TORCHRUN_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"  # variable that torchrun sets for each rank

_is_quiet: ContextVar[bool] = ContextVar("is_quiet", default=False)
_captured: ContextVar[IO[str] | None] = ContextVar("captured", default=None)
_progress_file: ContextVar[Path | None] = ContextVar("progress_file", default=None)
_warnings: ContextVar[tuple[list[str], ...]] = ContextVar("warnings", default=())
_listener: ContextVar[Refresh | None] = ContextVar("listener", default=None)
_refresh: ContextVar[Refresh | None] = ContextVar("refresh", default=None)


def print(text: str) -> None:
    """Report something: a line, or several. Control characters in it are escaped."""
    _log(logging.INFO, text)


def warn(text: str) -> None:
    """Report something that the user should know; it is printed after "warning: "."""
    for recorded in _warnings.get():
        recorded.append(text)
    _log(logging.WARNING, text)


def watch_imports() -> None:
    """On a terminal, print a line if this thread still imports libraries after a second or two.

    On a busy computer that takes long, and nothing else could show that the command has begun.
    """
    if not sys.stderr.isatty():
        return
    thread = threading.get_ident()

    def watch() -> None:
        for seconds in IMPORT_CHECKS:
            if _has_output.wait(seconds):
                return
            if _is_importing(sys._current_frames().get(thread)):
                sys.stderr.write("starting   loading libraries\n")
                return

    threading.Thread(target=watch, daemon=True).start()


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


def tell_torchrun(reason: str) -> None:
    """Under torchrun, write why this rank ends to the file whose text torchrun prints last.

    Its report names the first rank that ended; the others end because of it.
    """
    path = os.environ.get(TORCHRUN_ERROR_FILE)
    if path is None:
        return
    # A second early, so that torchrun takes this rank for the first one.
    details = {"timestamp": str(int(time.time()) - 1)}
    content = {"message": {"message": reason, "extraInfo": details}}
    with contextlib.suppress(OSError):
        Path(path).write_text(json.dumps(content), encoding="utf-8")


def _log(level: int, text: str) -> None:
    """Log a message of the function that called `print` or `warn`, under the name of its module."""
    module = str(sys._getframe(2).f_globals.get("__name__"))
    name = module if module.startswith(f"{LOGGER_NAME}.") else LOGGER_NAME
    logging.getLogger(name).log(level, printable(text), stacklevel=3)


@contextmanager
def progress(
    title: str, as_text: Callable[[float], str] | None = None, beginning: str = ""
) -> Iterator[Refresh]:
    """Show the progress of longer work; call the function that is yielded when the work starts.

    A bar on a terminal, otherwise a message every few seconds. Also written to the file of
    `progress_file`. Functions that are called in this context find it with `current_progress`.
    `as_text` writes an amount of something other than items, such as `formatting.size` for bytes.
    `beginning` is what is done before the first item.
    """
    work = Progress(title, as_text or _count, beginning)
    path = _progress_file.get()
    listener = _listener.get()
    bar = Bar() if has_bars() else None
    ended = threading.Event()

    def refresh(done: int, total: int) -> None:
        work.refresh(done, total)
        if listener is not None:
            listener(done, total)
        if bar is not None:
            bar.show(str(work), done, total)

    def report() -> None:
        # In a thread: a large image or slow disk can delay `refresh` for longer than this.
        before = ""
        began = time.monotonic()
        if path is not None:
            write_progress(path, str(work))
        if bar is not None and not ended.wait(BAR_SECONDS):
            bar.show_first(str(work))
        # Several short works one after the other are not silent either.
        silent = time.monotonic() - handler.last_output
        wait_seconds = max(PROGRESS_SECONDS / 4, PROGRESS_SECONDS - silent)
        while not ended.wait(wait_seconds):
            wait_seconds = PROGRESS_SECONDS
            text = str(work)
            line = text
            if text == before:  # work without a count, or one item that takes long
                line += f" ({clock(time.monotonic() - began)} so far)"
            before = text
            # The file first: when a line appears on the console, `m1clip runs` shows it too.
            if path is not None:
                write_progress(path, line)
            if bar is None:
                print(line)

    thread = threading.Thread(target=copy_context().run, args=(report,), daemon=True)
    thread.start()
    token = _refresh.set(refresh)
    try:
        yield refresh
    finally:
        with contextlib.suppress(ValueError):  # a generator that was closed in another thread
            _refresh.reset(token)
        ended.set()
        thread.join()
        if bar is not None:
            bar.remove()
        if path is not None:
            path.unlink(missing_ok=True)


def current_progress() -> Refresh:
    """The function that refreshes the innermost `progress` here; without one, it does nothing.

    Functions that work through many items call it, so that their caller decides what is shown.
    """
    return _refresh.get() or _ignore


def _ignore(done: int, total: int) -> None:
    """Show nothing."""


def _count(items: float) -> str:
    """A number of items; with a decimal if there are few, as in 2.5 per second."""
    return f"{items:,.{1 if items < 10 and not float(items).is_integer() else 0}f}"


@contextmanager
def on_progress(callback: Refresh) -> Iterator[None]:
    """Call `callback(done, total)` with the progress of everything that is done in this context."""
    listening = _listener.set(callback)
    refreshing = _refresh.set(callback)
    try:
        yield
    finally:
        _refresh.reset(refreshing)
        _listener.reset(listening)


@contextmanager
def quiet() -> Iterator[None]:
    """Print nothing; handlers other than our own still receive the records."""
    token = _is_quiet.set(True)
    try:
        yield
    finally:
        _is_quiet.reset(token)


@contextmanager
def capture() -> Iterator[io.StringIO]:
    """Write to the text that is yielded instead of to standard output."""
    text = io.StringIO()
    token = _captured.set(text)
    try:
        yield text
    finally:
        _captured.reset(token)


@contextmanager
def progress_file(path: Path | None) -> Iterator[None]:
    """Also write the progress to a file, which exists only during the work; None writes none."""
    token = _progress_file.set(path)
    try:
        yield
    finally:
        _progress_file.reset(token)


@contextmanager
def record_warnings() -> Iterator[list[str]]:
    """Yield a list that receives the warnings of this context, also if they are not printed."""
    texts: list[str] = []
    token = _warnings.set((*_warnings.get(), texts))
    try:
        yield texts
    finally:
        _warnings.reset(token)


def write_progress(path: Path, text: str) -> None:
    """Write progress to a file in one step; ignores a missing folder or full disk."""
    partial = Path(f"{path}{PARTIAL}")
    with contextlib.suppress(OSError, UserError):
        handle = open_for_write(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        with os.fdopen(handle, "wb") as file:
            file.write(text.encode())
        partial.replace(path)


class Progress:
    """Progress of work; as text, with an estimate of the time left."""

    def __init__(
        self, title: str, as_text: Callable[[float], str] = _count, beginning: str = ""
    ) -> None:
        self.title = title
        self.beginning = beginning
        self.as_text = as_text
        self.done = 0
        self.total = 0
        self._began = 0.0
        self._before = 0
        self._lock = threading.Lock()  # one thread works, another one prints

    def refresh(self, done: int, total: int) -> None:
        """Report the items done; those of the first call were done before."""
        with self._lock:
            if self.total == 0:
                self._began = time.monotonic()
                self._before = done
            self.done = done
            self.total = total

    def __str__(self) -> str:
        """preparing train images: 640 of 8,000, 98/s, 1:15 left."""
        with self._lock:
            done = self.done
            total = self.total
            done_here = done - self._before
            seconds = time.monotonic() - self._began
        if done_here == 0 and self.beginning:
            return self.beginning
        text = self.title
        if total:
            text = f"{self.title}: {self.as_text(done)} of {self.as_text(total)}"
        if done_here == 0:
            return text
        per_second = done_here / max(seconds, 1e-9)
        remaining = clock((total - done) / per_second)
        return f"{text}, {self.as_text(per_second)}/s, {remaining} left"


class Bar:
    """A row of the live display on a terminal. Any thread may show it."""

    def __init__(self) -> None:
        self._task: TaskID | None = None
        self._is_removed = False

    def show(self, text: str, done: int, total: int) -> None:
        with handler.bars_lock:
            if not self._is_removed:  # by a thread that is late
                self._task = handler.show_bar(self._task, text, done, total)

    def show_first(self, text: str) -> None:
        """Show work that has no count, or none yet."""
        with handler.bars_lock:
            if not self._is_removed and self._task is None:
                self._task = handler.show_bar(None, text, 0, None)

    def remove(self) -> None:
        with handler.bars_lock:
            self._is_removed = True
            if self._task is not None:
                handler.remove_bar(self._task)


def has_bars() -> bool:
    """Whether progress is a live display: on a terminal, or in a notebook with ipywidgets."""
    logger = logging.getLogger(LOGGER_NAME)
    prints_messages = handler in logger.handlers and handler.level <= logging.INFO
    if not prints_messages or not logger.isEnabledFor(logging.INFO):
        return False
    return not _is_silent() and _captured.get() is None and handler.is_interactive()


def _is_silent() -> bool:
    """Whether nothing is printed: in `quiet`, or on a rank of torchrun other than 0."""
    return _is_quiet.get() or os.environ.get("RANK", "0") != "0"


class ConsoleHandler(logging.Handler):
    """Prints records on standard output, above the progress bars if there are any."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(_Formatter())
        self.last_output = time.monotonic()
        self.stream_name = "stdout"
        self.reset()

    def reset(self) -> None:
        """Forget the bars of the process that this one was forked from, and locks that it held."""
        self.bars_lock = threading.RLock()
        self._bars: Bars | None = None
        self._bar_count = 0

    def emit(self, record: logging.LogRecord) -> None:
        if _is_silent():
            return
        text = self.format(record)
        _has_output.set()
        self.last_output = time.monotonic()
        captured = _captured.get()
        if captured is not None:
            captured.write(f"{text}\n")
            return
        with self.bars_lock:
            console = _console() if self._bars is None else self._bars.console
            if console.is_terminal:
                text = wrap_at_words(text, console.width)
            console.print(text, markup=False, soft_wrap=True)

    def is_interactive(self) -> bool:
        console = _console()
        widgets = console.is_jupyter and importlib.util.find_spec("ipywidgets") is not None
        return console.is_terminal or widgets

    def show_bar(self, task: TaskID | None, text: str, done: int, total: int | None) -> TaskID:
        """Add a bar, or change it if it has a task; the caller holds the lock of the bars.

        Without a total it shows only that something is done.
        """
        _has_output.set()
        if self._bars is None:
            self._bars = _new_bars()
            self._bars.start()
            task = None
        if task is None:
            self._bar_count += 1
            return self._bars.add_task(text, total=total, completed=done)
        self._bars.update(task, description=text, total=total, completed=done)
        return task

    def remove_bar(self, task: TaskID) -> None:
        """Remove a bar; with the last one, the display ends."""
        if self._bars is None:
            return
        self._bar_count -= 1
        if self._bar_count == 0:
            self._bars.stop()
            self._bars = None
        else:
            self._bars.remove_task(task)


def wrap_at_words(text: str, width: int) -> str:
    """Break lines that are wider than the terminal between words.

    The rest of a line such as "device     cpu: ..." begins below the text after its first word. A
    word that is wider than the terminal, such as a long path, is not broken.
    """
    lines: list[str] = []
    for line in text.split("\n"):
        if len(line) <= width:
            lines.append(line)
            continue
        label = LINE_LABEL.match(line)
        indent = label.end() if label else len(line) - len(line.lstrip())
        lines += textwrap.wrap(
            line,
            width,
            subsequent_indent=" " * min(indent, width // 2),
            expand_tabs=False,
            replace_whitespace=False,
            break_long_words=False,
            break_on_hyphens=False,
        )
    return "\n".join(lines)


class _Formatter(logging.Formatter):
    """A message as it is; warnings and errors with their level before it."""

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        is_message = record.levelno <= logging.INFO
        return text if is_message else f"{record.levelname.lower()}: {text}"


def _console() -> Console:
    """The stream of messages as it is now: a program may replace sys.stdout at any time."""
    from rich.console import Console  # on first use: not needed to import m1clip

    return Console(highlight=False, file=cast(IO[str], _SafeOutput()))


def _new_bars() -> Bars:
    from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, Task, TextColumn
    from rich.text import Text

    class Elapsed(ProgressColumn):
        """The time so far, in words: the text before it may end with the time left."""

        def render(self, task: Task) -> Text:
            return Text(f"({clock(task.elapsed or 0)} so far)", style="progress.elapsed")

    text = TextColumn("{task.description}", markup=False)
    columns = (SpinnerColumn(), BarColumn(bar_width=20), text, Elapsed())
    # Results on standard output stay there while bars are on standard error.
    redirects = handler.stream_name == "stdout"
    return Progress(*columns, console=_console(), transient=True, redirect_stdout=redirects)


class _SafeOutput:
    """Standard output that survives a closed pipe or terminal, or a full disk.

    The work continues, and a run still writes run.jsonl; the rest of the output goes to /dev/null.
    """

    def write(self, text: str) -> int:
        return cast(int, self._call("write", text))

    def flush(self) -> None:
        self._call("flush")

    @property
    def rich_proxied_file(self) -> _SafeOutput:
        """Rich asks for this: the file below the proxy that it installs as sys.stdout."""
        return self

    def __getattr__(self, name: str) -> Any:
        return getattr(_output(), name)

    def _call(self, method: str, *args: str) -> Any:
        try:
            return getattr(_output(), method)(*args)
        except OSError:
            with contextlib.suppress(OSError):  # not backed by a file
                null = os.open(os.devnull, os.O_WRONLY)
                os.dup2(null, _output().fileno())
                os.close(null)


@contextmanager
def on_stderr() -> Iterator[None]:
    """Print messages and progress of this process on standard error.

    The standard output of a command with --json is for the JSON alone.
    """
    before = handler.stream_name  # not of a thread: those that draw the bars print, too
    handler.stream_name = "stderr"
    try:
        yield
    finally:
        handler.stream_name = before


@contextmanager
def waiting(title: str) -> Iterator[None]:
    """Show on a terminal that results are on their way; programs that read them see nothing."""
    if not sys.stderr.isatty():
        yield
        return
    with on_stderr(), progress(title):
        yield


def _output() -> Any:
    """Where messages are printed, below the proxy that Rich installs while bars are shown."""
    stream = getattr(sys, handler.stream_name)
    return getattr(stream, "rich_proxied_file", stream)


def _after_fork() -> None:
    """In a forked process: the bars belong to the parent, whose threads may have held locks."""
    handler.reset()
    sys.stdout = getattr(sys.stdout, "rich_proxied_file", sys.stdout)
    sys.stderr = getattr(sys.stderr, "rich_proxied_file", sys.stderr)


def _set_up_logging() -> None:
    logger = logging.getLogger(LOGGER_NAME)
    if logger.level == logging.NOTSET:  # unless the program has set it
        logger.setLevel(logging.INFO)
    logger.propagate = False  # or a program with handlers of its own would print everything twice
    # Without any handler, logging would print warnings on standard error.
    logger.addHandler(logging.NullHandler())
    logger.addHandler(handler)


handler = ConsoleHandler()
_set_up_logging()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
