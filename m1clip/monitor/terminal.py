"""`m1clip monitor`: a run in the terminal, drawn by rich and plotext."""

import contextlib
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.layout import Layout
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from m1clip.errors import UserError
from m1clip.formatting import clock, duration, number, percent, size, when
from m1clip.monitor.diagnostics import describe, diagnose
from m1clip.monitor.history import PHASES, History, numbers
from m1clip.monitor.status import Status, elapsed, find_runs, newest_run, seconds_left, status_of
from m1clip.runlog import FIELDS, SELECTION, Record
from m1clip.system import STOP_SIGNALS

SMALLEST_TERMINAL = (40, 10)
STYLES = {
    **{
        "running": "green",
        "preparing": "yellow",
        "finished": "cyan",
        "stopped": "yellow",
        "crashed": "bold red",
    },
    **{"good": "green", "warning": "yellow", "error": "bold red", "skipped": "yellow"},
}
PHASE_STYLES = dict(
    zip(
        PHASES,
        ("yellow", "magenta", "white", "cyan", "blue", "red", "green", "cyan", "dim"),
        strict=True,
    )
)
ALL_METRICS = "All metrics: m1clip monitor --web"
RANK_FIGURES, SHOWN_RANKS = ("images_per_second", "step_seconds"), 8
POLL = 0.25  # seconds between two reads of the log
REDRAW = 2.0  # seconds after which the screen is drawn even if nothing changed
Part = tuple[str, str]  # text and style


def line(*parts: str | Part) -> Text:
    """One line of text with styles, truncated to the width, without control characters."""
    text = Text(no_wrap=True, overflow="ellipsis")
    for part in parts:
        content, style = (part, "") if isinstance(part, str) else part
        text.append("".join(char if char.isprintable() else " " for char in content), style)
    return text


def plot(points: Sequence[tuple[float, float]], width: int, height: int, unicode: bool) -> str:
    """A curve by plotext, `height` lines of `width` characters."""
    import plotext

    xs, ys = zip(*points, strict=True)
    low, high = min(ys), max(ys)
    if low == high:
        margin = abs(low) / 10 or 1.0
        low, high = low - margin, high + margin
    plotext.clear_figure()
    plotext.theme("clear")
    plotext.limitsize(False, False)
    plotext.plotsize(width, height)
    plotext.plot(xs, ys, marker="braille" if unicode else "*")
    plotext.frame(False)
    if unicode:
        plotext.xaxes(True, False)
        plotext.yaxes(True, False)
    plotext.ylim(low, high)
    ticks = [low, (low + high) / 2, high] if height > 6 else [low, high]
    plotext.yticks(ticks, [f"{number(tick)} " for tick in ticks])
    ends = sorted({xs[0], xs[-1]})
    plotext.xticks(ends, [f"{end:,.0f}" for end in ends])
    return str(plotext.uncolorize(plotext.build())).rstrip("\n")


@dataclass
class Chart:
    """A titled curve that fills the space it is given."""

    title: str
    points: Sequence[tuple[float, float]]
    style: str = ""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width, height = options.max_width - 1, (options.height or 8) - 1
        unicode = not options.ascii_only and os.environ.get("TERM") != "linux"
        rule = Rule(
            line((self.title, "bold")),
            align="left",
            style="dim",
            characters="─" if unicode else "-",
        )
        yield from console.render(rule, options.update_width(width))
        if width < 20 or height < 3:
            return
        if self.points:
            yield Text(plot(self.points, width, height, unicode), self.style, no_wrap=True)
        else:
            yield Text("\n" * (height // 2) + "waiting for the first values".center(width), "dim")


def charts(history: History, width: int) -> Layout:
    """The loss and, if there is space, the metric that selects the best model."""
    loss = FIELDS["loss"]
    shown = [Chart(loss.title, history.curve(loss.name, loss.factor))]
    if width >= 70:
        chance = numbers([history.evaluations.last or {}], f"{history.metric}/chance")
        words = f" (chance {percent(chance[0]).removesuffix('%')})" if chance else ""
        title = f"{SELECTION[history.metric].capitalize()}, %{words}"
        shown.append(Chart(title, history.curve(history.metric, 100.0), "cyan"))
    layout = Layout()
    layout.split_row(*(Layout(chart) for chart in shown))
    return layout


def head_lines(history: History, status: Status, width: int, now: float) -> list[RenderableType]:
    tail = f"* {status.state}"
    name, space = str(history.run), max(8, width - len(tail) - 12)
    # The end of a path matters more than its start.
    name = name if len(name) <= space else "~" + name[-space + 1 :]
    fraction = history.step / history.total if history.total else 0.0
    words = f"{percent(fraction, 0)}  step {history.step:,} of {history.total:,}"
    if not history.total or status.state == "preparing":
        words = status.message
    remaining, spent = seconds_left(history), elapsed(history)
    if status.state == "running" and remaining is not None:
        words += f"  {clock(remaining)} left, until {when(now + remaining)}"
    elif history.last_time:
        words += f"  last line {when(history.last_time)}"
    if spent is not None:
        words += f"  {clock(spent)} trained"
    row = Table.grid(expand=True, padding=(0, 1, 0, 0))
    row.add_column(ratio=1)
    row.add_column(no_wrap=True)
    row.add_row(
        ProgressBar(completed=100 * fraction, complete_style="green", finished_style="green"),
        line(words),
    )
    return [
        line((" m1clip ", "reverse"), (f" {name}  ", "bold"), (tail, STYLES[status.state])),
        row,
    ]


def values(row: Record, *figures: tuple[str, str, Callable[[float], str]]) -> list[Part]:
    """(name, label, format) of the figures that a record has, as text."""
    parts: list[Part] = []
    for name, label, words in figures:
        if (value := row.get(name)) is not None:
            # The log writes NaN as text.
            text = words(value) if isinstance(value, int | float) else str(value)
            parts += [(f" {label} ", "dim"), (f"{text} ", "bold")]
    return parts


def value_lines(history: History) -> list[Text]:
    last, evaluation, best, metric = (
        history.newest,
        history.evaluations.last or {},
        history.best(),
        history.metric,
    )
    first = [
        *values(last, ("loss", "loss", number)),
        *values(evaluation, (metric, SELECTION[metric], percent)),
    ]
    if f"{metric}/low" in evaluation:
        first.append(
            (
                (
                    f"[{100 * evaluation[f'{metric}/low']:.1f},"
                    f" {100 * evaluation[f'{metric}/high']:.1f}] "
                ),
                "dim",
            )
        )
    if best and best["step"] != evaluation["step"]:
        first += values(best, (metric, f"best (step {best['step']:,})", percent))
    first += values(last, ("images_per_second", "speed", lambda value: f"{value:,.0f} images/s"))
    figures = (
        ("lr", "learning rate"),
        ("temperature", "temperature"),
        ("grad_norm", "gradient norm"),
    )
    epoch = ("epoch", "epoch", lambda value: f"{value:.1f}")
    return [line(*first), line(*values(last, *((*figure, number) for figure in figures), epoch))]


def time_line(history: History) -> list[Text]:
    rows = [
        record["seconds"] for record in list(history.latest.steps)[-10:] if record.get("seconds")
    ]
    seconds = {
        name: sum(row.get(name, 0.0) for row in rows)
        for name in PHASES
        if any(name in row for row in rows)
    }
    if (total := sum(seconds.values())) <= 0:
        return []
    parts = [
        (f" {name} {percent(value / total, 0)}", PHASE_STYLES[name])
        for name, value in seconds.items()
    ]
    return [line((" step ", "dim"), (f"{duration(total / len(rows))} ", "bold"), *parts)]


def rank_line(history: History) -> list[Text]:
    """The speed of each rank without the time in which it waits for others, the slowest first."""
    last = history.newest
    seconds, speed, step = (
        last.get("rank_seconds") or [],
        *(numbers([last], name) for name in RANK_FIGURES),
    )
    if len(seconds) < 2 or min(seconds) <= 0 or not (speed and step):
        return []
    images = speed[0] * step[0] / len(seconds)  # of each rank in a step
    slowest = sorted(range(len(seconds)), key=lambda rank: -seconds[rank])[:SHOWN_RANKS]
    speeds = ", ".join(f"{rank}: {images / seconds[rank]:,.0f}" for rank in slowest)
    more = f", ... to {images / min(seconds):,.0f}" if len(seconds) > SHOWN_RANKS else ""
    return [
        line((" ranks ", "dim"), (f"{len(seconds)} ", "bold"), f" images/s of each: {speeds}{more}")
    ]


def machine_line(history: History) -> list[Text]:
    last, total = history.newest, history.files.machine_memory
    if not last:
        return []
    cores = last.get("cores") or []
    usage = {"usage": sum(cores) / len(cores)} if cores else {}
    parts = [
        *values(
            last,
            (
                "memory_bytes",
                "memory",
                lambda used: size(used) + (f" of {size(total)}" if total else ""),
            ),
        ),
        *values(usage, ("usage", "cores", lambda percents: f"{len(cores)} at {percents:.0f}%")),
        *values(last, ("watts", "power", lambda watts: f"{watts:.0f} W")),
        *values(last, ("celsius", "temperature", lambda degrees: f"{degrees:.0f} °C")),
    ]
    missing = [
        label
        for name, label in (("watts", "power"), ("celsius", "temperature"))
        if last.get(name) is None
    ]
    return [line(*parts, (f" {' and '.join(missing)} not measured" if missing else "", "dim"))]


def event_lines(history: History, max_rows: int) -> list[Text]:
    rows = [
        *history.latest.events,
        *list(history.evaluations)[-max_rows:],
        *([history.end] if history.end else []),
    ]
    rows.sort(key=lambda record: record.get("time") or 0.0, reverse=True)
    return [
        line(
            (f" {when(record.get('time') or 0.0):>5} ", "dim"),
            (describe(record), STYLES.get(record["kind"], "")),
        )
        for record in rows[:max_rows]
    ]


def footer(status: Status, live: bool) -> str:
    """What the keys do.

    A screen that is printed once has none, and only a run with a process continues.
    """
    if not live:
        return f" {ALL_METRICS}"
    continues = "; the run continues" if status.state in ("running", "preparing") else ""
    return f" Ctrl-C closes the monitor{continues}. {ALL_METRICS}"


def frame(
    history: History, status: Status, now: float, console: Console, live: bool = True
) -> RenderableType:
    width, height = console.size
    if width < SMALLEST_TERMINAL[0] or height < SMALLEST_TERMINAL[1]:
        return Text(
            f"window too small\nneeds {SMALLEST_TERMINAL[0]}x{SMALLEST_TERMINAL[1]}", "bold red"
        )
    top = head_lines(history, status, width, now)
    lower: list[RenderableType] = [
        *value_lines(history),
        *time_line(history),
        *rank_line(history),
        *machine_line(history),
    ]
    spare = (height - len(top) - len(lower) - 1) // 5  # most of the screen is for the charts
    diagnoses = diagnose(history, now, status.state)[: max(1, spare)]
    for diagnosis in diagnoses:
        level = f"{diagnosis.level:>8}"
        lower.append(line((level, STYLES[diagnosis.level]), f" {diagnosis.message}"))
    lower += [*event_lines(history, max(2, min(10, spare))), line((footer(status, live), "dim"))]
    screen = Layout()
    screen.split_column(
        Layout(Group(*top), size=len(top)),
        Layout(charts(history, width)),
        Layout(Group(*lower), size=len(lower)),
    )
    return screen


def wait_for_run(folder: Path) -> Path | None:
    """Wait for the first run in a folder, and return it; None after Ctrl-C."""
    print(f"{folder}: no runs yet; waiting for one to start (Ctrl-C ends this)", flush=True)
    with contextlib.suppress(KeyboardInterrupt):
        while not find_runs(folder):
            time.sleep(POLL)
        return newest_run(folder)
    return None


def monitor(run: Path) -> None:
    if not sys.stdout.isatty():
        raise UserError(
            "the monitor needs a terminal; --once prints the screen once, --web opens a page"
        )
    for name in ("COLUMNS", "LINES"):
        os.environ.pop(name, None)  # they would prevent resizing
    for signal_number in STOP_SIGNALS:
        if signal_number != signal.SIGINT:
            signal.signal(signal_number, lambda received, _: sys.exit(128 + received))
    history, drawn, console = History(run), None, Console(highlight=False)
    with (
        contextlib.suppress(KeyboardInterrupt),
        Live(console=console, screen=True, auto_refresh=False) as live,
    ):
        while True:
            status, now = status_of(history.poll()), time.time()
            state = (status, console.size, history.last_time, history.step, now // REDRAW)
            if state != drawn:
                live.update(frame(history, status, now, console), refresh=True)
                drawn = state
            time.sleep(POLL)


def once(run: Path, window: tuple[int, int] | None = None) -> str:
    """The screen as text, for a pipe or a log."""
    width, height = window or shutil.get_terminal_size((100, 30))
    console = Console(width=width, height=height, highlight=False, no_color=True)
    history = History(run).poll()
    with console.capture() as capture:
        console.print(frame(history, status_of(history), time.time(), console, live=False))
    return "\n".join(text.rstrip() for text in capture.get().rstrip().split("\n"))
