"""Messages and progress: on standard output by default, and wherever Python's logging sends them."""

import importlib
import io
import logging
import multiprocessing
import os
import pty
import subprocess
import sys
import threading
import time
import types
from pathlib import Path
from typing import Any

import pytest
from small_run import TIMEOUT, environment, exit_code

from m1clip import console
from m1clip.cli import main
from m1clip.data import failures

LOGGER = logging.getLogger("m1clip")


class Records(logging.Handler):
    """A handler of another program."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


@pytest.fixture
def records() -> list[logging.LogRecord]:
    """What a handler of another program receives; conftest.py restores the logger."""
    theirs = Records()
    LOGGER.addHandler(theirs)
    return theirs.records


@pytest.mark.parametrize("words", [["eval", "x", "--json"], ["eval", "x"]])
def test_standard_output_of_a_command_with_json_is_for_the_json_alone(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a slow machine too, where progress is printed."""

    is_shown = threading.Event()

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "computing: 1 of 100" in record.getMessage():
                is_shown.set()

    def command(*_: Any, **__: Any) -> None:
        with console.progress("computing") as refresh:
            refresh(1, 100)
            assert is_shown.wait(TIMEOUT)
        console.warn("an image was skipped")
        print("{}")

    LOGGER.addHandler(Listener())
    monkeypatch.setattr(console, "PROGRESS_SECONDS", 0.01)
    monkeypatch.setattr(main, "app", command)
    assert exit_code(*words) == 0
    printed = capsys.readouterr()
    messages = printed.err if "--json" in words else printed.out
    assert "computing: 1 of 100" in messages
    assert "warning: an image was skipped" in messages
    assert (printed.out == "{}\n") is ("--json" in words)


def test_slow_imports_are_announced_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    written = list[str]()
    announced = threading.Event()

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

        def write(self, text: str) -> int:
            written.append(text)
            announced.set()
            return len(text)

    (tmp_path / "slow_library.py").write_text("import slow_gate; slow_gate.wait()\n")
    gate = types.ModuleType("slow_gate")
    gate.wait = lambda: announced.wait(TIMEOUT)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "slow_gate", gate)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(console, "_has_output", threading.Event())
    monkeypatch.setattr(console, "IMPORT_CHECKS", (0.01,) * 100_000)
    monkeypatch.setattr(sys, "stderr", Terminal())
    console.watch_imports()
    importlib.import_module("slow_library")
    assert written == ["starting   loading libraries\n"]


def test_nothing_is_announced_after_output_without_an_import_or_in_a_pipe(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(console, "IMPORT_CHECKS", (0.0,))
    before = threading.active_count()
    console.watch_imports()
    assert threading.active_count() == before, "standard error is no terminal"
    monkeypatch.setattr(console, "_has_output", has_output := threading.Event())
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    console.watch_imports()
    for thread in threading.enumerate():
        if thread.name.endswith("(watch)"):
            thread.join(TIMEOUT)
    console.print("done")
    assert has_output.is_set()
    assert capsys.readouterr() == ("done\n", "")


def test_messages_go_to_standard_output_and_to_handlers_of_the_program(
    records: list[logging.LogRecord], capsys: pytest.CaptureFixture[str]
) -> None:
    console.print("100% of 8 images\nin two lines")
    console.warn("skipped \x1b[2J.jpg")
    refs: Any = ["a.jpg"]
    failures.check_failures({0: "gone"}, refs, "train", 1, 1.0)
    assert capsys.readouterr() == (
        "100% of 8 images\nin two lines\nwarning: skipped \\x1b[2J.jpg\n"
        "warning: skipped a.jpg: gone\n",
        "",
    )
    assert [(record.name, record.levelname, record.getMessage()) for record in records] == [
        ("m1clip", "INFO", "100% of 8 images\nin two lines"),
        ("m1clip", "WARNING", "skipped \\x1b[2J.jpg"),
        ("m1clip.data.failures", "WARNING", "skipped a.jpg: gone"),
    ]
    assert [Path(record.pathname).name for record in records[1:]] == [
        "test_console.py",
        "failures.py",
    ]


def test_program_can_redirect_the_output(
    records: list[logging.LogRecord], capsys: pytest.CaptureFixture[str]
) -> None:
    LOGGER.removeHandler(console.handler)
    console.warn("to the program only")
    LOGGER.setLevel(logging.WARNING)
    console.print("too low")
    LOGGER.addHandler(console.handler)
    console.print("too low")
    console.warn("seen")
    assert [record.getMessage() for record in records] == ["to the program only", "seen"]
    assert capsys.readouterr() == ("warning: seen\n", "")


@pytest.mark.parametrize("propagate", [False, True])
def test_program_with_a_root_handler_prints_nothing_twice(
    records: list[logging.LogRecord], capsys: pytest.CaptureFixture[str], propagate: bool
) -> None:
    root = Records()
    logging.getLogger().addHandler(root)
    LOGGER.propagate = propagate
    try:
        console.print("once")
    finally:
        logging.getLogger().removeHandler(root)
    assert len(root.records) == propagate
    assert capsys.readouterr().out == "once\n"


def test_level_of_a_part_can_be_raised(capsys: pytest.CaptureFixture[str]) -> None:
    part = logging.getLogger("m1clip.data.failures")
    part.setLevel(logging.ERROR)
    refs: Any = ["a.jpg"]
    try:
        failures.check_failures({0: "gone"}, refs, "train", 1, 1.0)
        console.warn("another")
    finally:
        part.setLevel(logging.NOTSET)
    assert capsys.readouterr().out == "warning: another\n"


def test_other_ranks_are_silent(
    records: list[logging.LogRecord],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RANK", "1")
    with console.record_warnings() as warnings:
        console.print("from rank 1")
        console.warn("too")
    monkeypatch.setenv("RANK", "0")
    console.print("from rank 0")
    assert capsys.readouterr().out == "from rank 0\n"
    assert (len(records), warnings) == (3, ["too"])


def test_contexts_hold_for_one_thread(capsys: pytest.CaptureFixture[str]) -> None:
    def work() -> None:
        console.warn("in a thread")

    with console.record_warnings() as outer, console.quiet(), console.record_warnings() as warnings:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        console.warn("quiet")
    assert (capsys.readouterr().out, warnings) == ("warning: in a thread\n", ["quiet"])
    assert outer == warnings
    with console.capture() as text, console.capture() as inner:
        console.print("inner")
    assert (text.getvalue(), inner.getvalue(), capsys.readouterr().out) == ("", "inner\n", "")


def test_work_without_a_count_shows_for_how_long_it_has_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(console, "PROGRESS_SECONDS", 0.01)
    with console.capture() as output, console.progress("fitting"):
        deadline = time.monotonic() + TIMEOUT
        while output.getvalue().count("fitting (0:00 so far)") < 2:
            assert time.monotonic() < deadline
    assert output.getvalue().startswith("fitting\nfitting (0:00 so far)\n")


def test_short_works_in_a_row_are_not_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing was printed for longer than between two lines: the next work is shown earlier."""
    waits: list[float] = []

    class Event(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            if timeout is None:  # for a thread to start
                return super().wait()
            waits.append(timeout)
            return super().wait(TIMEOUT)

    monkeypatch.setattr(threading, "Event", Event)
    for seconds, first_wait in ((0, 8), (5, 3), (60, 2)):
        monkeypatch.setattr(console.handler, "last_output", time.monotonic() - seconds)
        with console.progress("fitting"):
            pass
        assert first_wait - 1 < waits[-1] <= first_wait


def test_progress_from_many_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console, "PROGRESS_SECONDS", 0.0)
    counts: list[tuple[int, int]] = []
    with (
        console.capture() as output,
        console.on_progress(lambda *count: counts.append(count)),
        console.progress("packing"),
    ):
        refresh = console.current_progress()
        threads = [
            threading.Thread(target=lambda: [refresh(n, 100) for n in range(100)]) for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(TIMEOUT)
        deadline = time.monotonic() + TIMEOUT
        while "packing: 99 of 100" not in output.getvalue():
            assert time.monotonic() < deadline
    assert len(counts) == 400
    before = output.getvalue()
    refresh(100, 100)
    console.current_progress()(5, 5)
    assert output.getvalue() == before


def test_progress_without_a_display_is_still_reported() -> None:
    counts: list[tuple[int, int]] = []
    with console.on_progress(lambda *count: counts.append(count)):
        console.current_progress()(1, 2)
        with console.quiet(), console.progress("inner") as refresh:
            refresh(2, 2)
            console.current_progress()(3, 3)
    console.current_progress()(4, 4)
    assert counts == [(1, 2), (2, 2), (3, 3)]


def python(text: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a program in a new process."""
    return subprocess.run(
        [sys.executable, "-c", text],
        env=environment(),
        text=True,
        timeout=TIMEOUT,
        check=False,
        **options,
    )


@pytest.mark.parametrize("redirect", ["| head -1", "> /dev/full"])
def test_work_continues_without_its_output(redirect: str, tmp_path: Path) -> None:
    done = tmp_path / "done"
    program = (
        "from m1clip import console; import pathlib\n"
        "for n in range(3000): console.print(f'{n} ' + 'x' * 100)\n"
        f"pathlib.Path({str(done)!r}).touch()"
    )
    result = subprocess.run(
        ["bash", "-c", f'"{sys.executable}" -c "$PROGRAM" {redirect}'],
        env={**environment(), "PROGRAM": program},
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
    )
    assert done.exists(), result
    assert "Traceback" not in result.stderr


def speak(number: int) -> None:
    console.print(f"from worker {number}")
    console.warn(f"warning of worker {number}")


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_print_once(method: str, capfd: pytest.CaptureFixture[str]) -> None:
    sys.stdout.flush()
    with console.progress("working"):
        console.print("before")
        context: Any = multiprocessing.get_context(method)
        # A thread holds the lock of the bars, as while it prints.
        held, release = threading.Event(), threading.Event()

        def hold() -> None:
            with console.handler.bars_lock:
                held.set()
                release.wait(TIMEOUT)

        holder = threading.Thread(target=hold)
        holder.start()
        assert held.wait(TIMEOUT)
        worker = context.Process(target=speak, args=(1,))
        worker.start()
        worker.join(TIMEOUT)
        release.set()
        holder.join()
    assert worker.exitcode == 0
    console.print("after")
    printed = capfd.readouterr().out.splitlines()
    lines = [line for line in printed if line != "working"]  # a slow worker's progress line
    assert lines == ["before", "from worker 1", "warning: warning of worker 1", "after"]


TERMINAL_PROGRAM = """
import os, threading
from m1clip import console
console.print("start")
with console.progress("drawing [b]") as refresh, console.progress("nested") as inner:
    refresh(1, 3)
    inner(1, 5)
    console.warn("above the bar")
    child = os.fork()
    if child == 0:
        console.print("from a child")
        print("plain", flush=True)
        os._exit(0)
    os.waitpid(child, 0)
    refresh(3, 3)
refresh(2, 3)
with console.progress("threads") as late:
    threads = [threading.Thread(target=late, args=(n, 8)) for n in range(8)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
assert console.handler._bars is None, "a late or simultaneous refresh leaves a bar behind"
with console.quiet(), console.progress("hidden") as refresh:
    refresh(1, 3)
console.print("end")
"""


def on_terminal(program: str, stdout: int | None = None) -> str:
    """What a program prints on a terminal; `stdout`, if given, is its standard output instead."""
    main, terminal = pty.openpty()
    env = {**environment(), "TERM": "xterm"}
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=stdout or terminal, stderr=terminal, env=env
    )
    os.close(terminal)
    output = io.BytesIO()
    while True:
        try:
            data = os.read(main, 65536)
        except OSError:  # the other end is closed
            break
        if not data:
            break
        output.write(data)
    os.close(main)
    assert process.wait(TIMEOUT) == 0
    return output.getvalue().decode()


UNCOUNTED_PROGRAM = """
import threading
from m1clip import console
shown = threading.Event()
add_bar = console.handler.show_bar
def show_bar(*values):
    shown.set()
    return add_bar(*values)
console.handler.show_bar = show_bar
console.BAR_SECONDS = 0.01
with console.waiting("loading a model"):
    assert shown.wait(100)
    print("a result")
"""


def test_work_without_a_count_is_shown_on_a_terminal_and_results_stay_on_standard_output(
    tmp_path: Path,
) -> None:
    assert "loading a model" in on_terminal(UNCOUNTED_PROGRAM)
    with (tmp_path / "results.txt").open("wb") as file:
        printed = on_terminal(UNCOUNTED_PROGRAM, file.fileno())
    assert "loading a model" in printed
    assert (tmp_path / "results.txt").read_text() == "a result\n"


def test_waiting_for_results_prints_nothing_where_there_is_no_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(console, "progress", lambda title: pytest.fail("no terminal"))
    with console.waiting("loading a model"):
        print("a result")
    assert capsys.readouterr() == ("a result\n", "")


def test_long_lines_are_wrapped_at_words_on_a_terminal(tmp_path: Path) -> None:
    words = [f"word{number:02}" for number in range(30)]
    print_line = f"console.print('device     {' '.join(words)}')"
    width = "import os; os.environ['COLUMNS'] = '80'"
    program = f"{width}\nfrom m1clip import console\n{print_line}\n"
    lines = [line.rstrip() for line in on_terminal(program).splitlines() if line.strip()]
    assert len(lines) > 2
    assert [word for line in lines for word in line.split()] == ["device", *words]
    assert max(map(len, lines)) <= 80
    assert all(line.startswith(" " * 11 + "word") for line in lines[1:])
    with (tmp_path / "output.txt").open("wb") as file:
        on_terminal(program, file.fileno())
    (line,) = (tmp_path / "output.txt").read_text().splitlines()
    assert line == f"device     {' '.join(words)}", "a file has the line as it is"


def test_wrapping_keeps_short_lines_indents_and_long_words() -> None:
    path = "/a" * 30
    text = f"short  line\n  indented text with {path} and more\n"
    expected = f"short  line\n  indented text with\n  {path}\n  and more\n"
    assert console.wrap_at_words(text, 24) == expected


def test_bars_are_shown_on_a_terminal_only() -> None:
    text = on_terminal(TERMINAL_PROGRAM)
    for part in ("drawing [b]: 1 of 3", "nested: 1 of 5", "drawing [b]: 3 of 3"):
        assert part in text
    for line in ("start", "warning: above the bar", "from a child", "plain", "end"):
        assert text.count(line) == 1, text
    assert "hidden" not in text
    piped = python(TERMINAL_PROGRAM, capture_output=True)
    assert sorted(piped.stdout.splitlines()) == [
        "end",
        "from a child",
        "plain",
        "start",
        "warning: above the bar",
    ]
