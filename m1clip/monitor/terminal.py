"""`m1clip monitor`: a run in the terminal, drawn by rich and plotext."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.layout import Layout
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from m1clip.errors import UserError
from m1clip.formatting import clock, duration, number, percent, size, when
from m1clip.monitor.diagnostics import describe, diagnose
from m1clip.monitor.history import PHASES, History, figure_of, numbers
from m1clip.monitor.status import Status, elapsed, seconds_left, status_of
from m1clip.runlog import SELECTION

LEFT = (  # figure of a step, title, factor
    ("loss", "loss", 1.0),
    ("grad_norm", "gradient norm", 1.0),
    ("temperature", "temperature", 1.0),
    ("lr", "learning rate", 1.0),
    ("images_per_second", "images per second", 1.0),
    ("step_seconds", "seconds per step", 1.0),
    ("data_fraction", "loading data, % of a step", 100.0),
    ("memory_bytes", "memory, GB", 1e-9),
    ("watts", "power, W", 1.0),
    ("celsius", "temperature of the machine, °C", 1.0),
)
RIGHT = (  # figure of an evaluation, after the metric that selects the best model
    ("text_to_image/recall@1", "recall@1 text to image, %", 100.0),
    ("image_to_text/recall@1", "recall@1 image to text, %", 100.0),
    ("text_to_image/recall@10", "recall@10 text to image, %", 100.0),
    ("analysis/modality_gap", "modality gap", 1.0),
    ("analysis/alignment", "alignment", 1.0),
    ("analysis/difficulty/hard", "accuracy against similar captions, %", 100.0),
)
SMALLEST = (40, 10)
WIDE = 150  # columns from which four charts are shown
STATE_STYLES = {"running": "green", "preparing": "yellow", "finished": "cyan", "stopped": "yellow", "died": "bold red"}
LEVEL_STYLES = {"good": "green", "warning": "yellow", "error": "bold red"}
PHASE_STYLES = dict(zip(PHASES, ("yellow", "magenta", "cyan", "blue", "green", "cyan", "dim"), strict=True))
KEYS = " q quit   p pause   m metric   r recall   l log scale   n next run   ? help"
HELP = (
    "q  quit; the run continues",
    "p  pause the display; the run continues",
    "m  next metric in the left chart (M: previous)",
    "r  next metric in the right chart",
    "l  logarithmic scale in the left chart",
    "n  next run, b previous run, if several are shown",
    "?  this help",
)
ARROWS = {"\x1b[C": "n", "\x1b[D": "b", "\x1b[A": "M", "\x1b[B": "m", "\t": "m", "\x03": "q", "\x1b": "q", "\x04": "q"}
POLL = 0.25  # seconds between two reads of the log
REDRAW = 2.0  # seconds after which the screen is drawn even if nothing changed


@dataclass
class View:
    """The current display settings."""

    left: int = 0
    right: int = 0
    log: bool = False
    paused: bool = False
    help: bool = False
    place: str = ""  # "2 of 3" if several runs are shown


def line(*parts: str | tuple[str, str]) -> Text:
    """One line of (text, style), truncated to the width, without control characters."""
    text = Text(no_wrap=True, overflow="ellipsis")
    for part in parts:
        content, style = (part, "") if isinstance(part, str) else part
        text.append("".join(char if char.isprintable() else " " for char in content), style)
    return text


def rule(title: str, width: int, unicode: bool) -> Text:
    """A horizontal line, with a title at its start."""
    return line((f"{title} " if title else "", "bold"), (("─" if unicode else "-") * (width - len(title) - 1), "dim"))


def plot(points: Sequence[tuple[float, float]], width: int, height: int, unicode: bool, log: bool) -> str:
    """A curve by plotext, `height` lines of `width` characters."""
    import plotext

    xs, ys = zip(*points, strict=True)
    low, high = min(ys), max(ys)
    if low == high:
        margin = abs(low) / 10 or 1.0
        low, high = low - margin, high + margin
    middle = (low * high) ** 0.5 if log else (low + high) / 2
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
    ticks = [low, middle, high] if height > 6 else [low, high]
    plotext.yticks(ticks, [f"{number(tick)} " for tick in ticks])
    ends = sorted({xs[0], xs[-1]})
    plotext.xticks(ends, [f"{end:,.0f}" for end in ends])
    if log:
        plotext.yscale("log")
    return str(plotext.uncolorize(plotext.build())).rstrip("\n")


@dataclass
class Chart:
    """A titled curve that fills the space it is given."""

    title: str
    points: list[tuple[float, float]]
    style: str = ""
    log: bool = False
    empty: str = "waiting for the first values"

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width, height = options.max_width - 1, (options.height or 8) - 1
        unicode = not options.ascii_only and os.environ.get("TERM") != "linux"
        points = [point for point in self.points if point[1] > 0 or not self.log]
        yield rule(self.title, width, unicode)
        if width < 20 or height < 3:
            return
        if points:
            yield Text(plot(points, width, height, unicode, self.log), self.style, no_wrap=True)
        else:
            yield Text("\n" * (height // 2) + self.empty.center(width), "dim")


def step_chart(history: History, index: int, log: bool) -> Chart:
    """A figure of the steps."""
    name, title, factor = LEFT[index % len(LEFT)]
    points = [(row["step"], factor * row[name]) for row in history.steps if name in row]
    chart = Chart(f"{title} (log)" if log else title, points, log=log)
    return replace(chart, empty="not measured on this machine") if name in ("watts", "celsius") else chart


def evaluation_chart(history: History, index: int) -> Chart:
    """A figure of the evaluations."""
    choices = ((history.metric, f"{SELECTION[history.metric]}, %", 100.0), *RIGHT)
    name, title, factor = choices[index % len(choices)]
    found = [(row["step"], figure_of(row, name)) for row in history.evaluations]
    chance = numbers([history.evaluations.last or {}], f"{name}/chance")
    title += f" (chance {percent(chance[0]).removesuffix('%')})" if chance else ""
    return Chart(title, [(step, factor * value) for step, value in found if value is not None], "cyan")


def charts(history: History, view: View, width: int, height: int) -> Layout:
    """One, two or four charts, depending on the space."""
    shown = [step_chart(history, view.left, view.log), evaluation_chart(history, view.right)]
    if width >= WIDE:
        others = [index for index in range(len(LEFT)) if index != view.left % len(LEFT)][:2]
        shown += [step_chart(history, index, log=False) for index in others]
    rows = [shown[:1]] if width < 70 else [shown[:2], shown[2:]] if len(shown) == 4 and height >= 24 else [shown]
    layout = Layout()
    layout.split_column(*(Layout() for _ in rows))
    for part, row in zip(layout.children, rows, strict=True):
        part.split_row(*(Layout(chart) for chart in row))
    return layout


def title_line(history: History, status: Status, view: View, width: int) -> Text:
    """The run's folder and state."""
    tail = f"* {status.state}  " + (f"run {view.place}  " if view.place else "") + ("PAUSED" if view.paused else "")
    name, room = str(history.run), max(8, width - len(tail) - 12)
    name = name if len(name) <= room else "~" + name[-room + 1 :]  # the end of a path matters more than its start
    return line((" m1clip ", "reverse"), (f" {name}  ", "bold"), (tail, STATE_STYLES[status.state]))


def progress_line(history: History, status: Status, now: float) -> Table:
    """A bar, the steps and the time left."""
    fraction = history.step / history.total if history.total else 0.0
    words = f"{percent(fraction, 0)}  step {history.step:,} of {history.total:,}"
    if not history.total or status.state == "preparing":
        words = status.message
    left, spent = seconds_left(history), elapsed(history)
    if status.state == "running" and left is not None:
        words += f"  {clock(left)} left, until {when(now + left)}"
    elif history.last_time:
        words += f"  last line {when(history.last_time)}"
    if spent is not None:
        words += f"  {clock(spent)} trained"
    row = Table.grid(expand=True, padding=(0, 1, 0, 0))
    row.add_column(ratio=1)
    row.add_column(no_wrap=True)
    row.add_row(ProgressBar(completed=100 * fraction, complete_style="green", finished_style="green"), line(words))
    return row


def value_lines(history: History, width: int) -> list[Text]:
    """The newest values: in one line if the terminal is wide, else in two."""
    last, evaluation, best, metric = history.newest, history.evaluations.last or {}, history.best(), history.metric
    first = [*_value("loss", last.get("loss"), number), *_value(SELECTION[metric], evaluation.get(metric), percent)]
    low, high = (evaluation.get(f"{metric}/{end}") for end in ("low", "high"))
    if low is not None and high is not None:
        first.append((f"[{100 * low:.1f}, {100 * high:.1f}] ", "dim"))
    if best is not None and best["step"] != evaluation.get("step"):
        first += _value(f"best (step {best['step']:,})", best.get(metric), percent)
    first += _value("speed", last.get("images_per_second"), lambda value: f"{value:,.0f} images/s")
    second = [
        *_value("learning rate", last.get("lr"), number),
        *_value("temperature", last.get("temperature"), number),
        *_value("gradient norm", last.get("grad_norm"), number),
        *_value("epoch", last.get("epoch"), lambda value: f"{value:.1f}"),
    ]
    return [line(*first, *second)] if width >= WIDE else [line(*first), line(*second)]


def _value(name: str, value: Any, words: Callable[[float], str]) -> list[tuple[str, str]]:
    if value is None:
        return []
    return [(f" {name} ", "dim"), (words(value) if isinstance(value, int | float) else str(value), "bold"), (" ", "")]


def split_lines(history: History, width: int, color: bool) -> list[Text]:
    """Step time by phase: percentages and a bar (of initials without colors)."""
    rows = [record["seconds"] for record in list(history.recent)[-10:] if isinstance(record.get("seconds"), dict)]
    seconds = {name: sum(row.get(name, 0.0) for row in rows) for name in PHASES if any(name in row for row in rows)}
    total = sum(seconds.values())
    if total <= 0:
        return []
    words, bar, done, before = [(f" {duration(total / len(rows))} ", "bold")], [(" ", "")], 0, 0.0
    for name, value in seconds.items():
        before += value
        cells = round(before / total * (width - 2)) - done
        done += cells
        bar.append((("█" if color else name[0].upper()) * cells, PHASE_STYLES[name]))
        words += [(f" {name} ", PHASE_STYLES[name]), (percent(value / total, 0), "")]
    return [line(*words), line(*bar)]


def machine_line(history: History, unicode: bool) -> list[Text]:
    """Memory, cores, power and temperature, or that they were not measured."""
    last, facts = history.newest, history.environment.get("facts")
    parts: list[tuple[str, str]] = []
    if used := numbers([last], "memory_bytes"):
        total = numbers([facts], "memory_bytes") if isinstance(facts, dict) else []
        of = f" of {size(total[0])}" if total and history.setting("train", "device", str) == "cpu" else ""
        parts += [(" memory ", "dim"), (size(used[0]), "bold"), (of, "dim")]
    if cores := [value for value in last.get("cores") or [] if isinstance(value, int | float)]:
        heights = " ▁▂▃▄▅▆▇█" if unicode else " .:-=+*#@"
        levels = "".join(heights[min(8, max(0, round(value / 12.5)))] for value in cores)
        parts += [("  cores ", "dim"), (levels, ""), (f" {sum(cores) / len(cores):.0f}%", "bold")]
    missing = []
    for name, key, unit in (("power", "watts", "W"), ("temperature", "celsius", "°C")):
        if found := numbers([last], key):
            parts += [(f"  {name} ", "dim"), (f"{found[0]:.0f} {unit}", "bold")]
        else:
            missing.append(name)
    if last and missing:
        parts.append((f"  {' and '.join(missing)} not measured", "dim"))
    return [line(*parts)] if parts else []


def event_lines(history: History, most: int) -> list[Text]:
    """Recent events, the newest first."""
    rows = [*history.events, *list(history.evaluations)[-most:], *([history.end] if history.end else [])]
    rows.sort(key=lambda record: record.get("time") or 0.0, reverse=True)
    return [
        line((f" {when(record.get('time') or 0.0):>5} ", "dim"), (describe(record), _event_style(record["kind"])))
        for record in rows[:most]
    ]


def _event_style(kind: str) -> str:
    return "yellow" if kind in ("warning", "skipped") else ""


def frame(history: History, status: Status, view: View, now: float, console: Console) -> RenderableType:
    """The screen, as large as the console."""
    width, height = console.size
    if width < SMALLEST[0] or height < SMALLEST[1]:
        return Text(f"window too small\nneeds {SMALLEST[0]}x{SMALLEST[1]}", "bold red")
    top: list[RenderableType] = [title_line(history, status, view, width), progress_line(history, status, now)]
    keys = line((KEYS, "dim"))
    screen = Layout()
    if view.help:
        body = Group(*top, Text(), line(("keys", "bold")), *(line(f"  {each}") for each in HELP))
        screen.split_column(Layout(body), Layout(keys, size=1))
        return screen
    unicode = not console.options.ascii_only
    lower: list[RenderableType] = [
        *value_lines(history, width),
        *split_lines(history, width, unicode and console.color_system is not None and not console.no_color),
        *machine_line(history, unicode),
        rule("", width, unicode),
    ]
    spare = (height - len(top) - len(lower) - 1) // 5  # most of the screen is for the charts
    found = diagnose(history, now, status.state)[: max(1, spare)]
    lower += [line((f"{each.level:>8}", LEVEL_STYLES[each.level]), f" {each.message}") for each in found]
    lower += event_lines(history, max(2, min(10, spare)))
    lower.append(keys)
    room = height - len(top) - len(lower)
    screen.split_column(
        Layout(Group(*top), size=len(top)),
        Layout(charts(history, view, width, room)),
        Layout(Group(*lower), size=len(lower)),
    )
    return screen


@contextlib.contextmanager
def key_reader() -> Iterator[Callable[[float], str | None]]:
    """Yield a function that waits up to some seconds for a key press. Signals exit cleanly."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise UserError("the monitor needs a terminal; --once prints the screen once, --web opens a page")
    before = termios.tcgetattr(sys.stdin)

    def read(seconds: float) -> str | None:
        if not select.select([sys.stdin], [], [], seconds)[0]:
            return None
        pressed = os.read(sys.stdin.fileno(), 32).decode("utf-8", "ignore")
        return ARROWS.get(pressed, pressed[0]) if pressed else "q"  # end of input: the terminal is gone

    for number_ in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number_, lambda received, _: sys.exit(128 + received))
    try:
        tty.setcbreak(sys.stdin)
        yield read
    finally:
        with contextlib.suppress(OSError, termios.error):  # the window was closed
            termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def monitor(runs: Sequence[Path]) -> None:
    """Show runs in the terminal until `q`."""
    for name in ("COLUMNS", "LINES"):
        os.environ.pop(name, None)  # they would prevent resizing
    histories: dict[Path, History] = {}
    view, place, drawn = View(), 0, None
    console = Console(highlight=False)
    with key_reader() as read_key, Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            history = histories.setdefault(runs[place], History(runs[place]))
            if not view.paused:
                history.poll()
            view.place = f"{place + 1} of {len(runs)}" if len(runs) > 1 else ""
            status, now = status_of(history), time.time()
            state = (replace(view), place, status, console.size, history.last_time, history.step, now // REDRAW)
            if state != drawn:
                live.update(frame(history, status, view, now, console), refresh=True)
                drawn = state
            key = read_key(POLL)
            if key in ("q", "Q"):
                return
            place = press(key, view, place, len(runs))


def press(key: str | None, view: View, place: int, count: int) -> int:
    """Act on a key; returns the run to show."""
    if key == "p":
        view.paused = not view.paused
    elif key in ("m", "M"):
        view.left += 1 if key == "m" else -1
    elif key == "r":
        view.right += 1
    elif key == "l":
        view.log = not view.log
    elif key in ("?", "h"):
        view.help = not view.help
    elif key in ("n", "b"):
        return (place + (1 if key == "n" else -1)) % count
    return place


def once(run: Path, window: tuple[int, int] | None = None) -> str:
    """The screen as text, for a pipe or a log."""
    width, height = window or shutil.get_terminal_size((100, 30))
    console = Console(width=width, height=height, highlight=False, no_color=True)
    history = History(run).poll()
    with console.capture() as capture:
        console.print(frame(history, status_of(history), View(), time.time(), console))
    return "\n".join(text.rstrip() for text in capture.get().rstrip().split("\n"))
