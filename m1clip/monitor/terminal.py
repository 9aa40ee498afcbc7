"""`m1clip monitor`: the loop that polls, draws and listens to keys."""

from __future__ import annotations

import contextlib
import math
import os
import select
import shutil
import signal
import sys
import termios
import time
import tty
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from rich.cells import cell_len, set_cell_size

from m1clip.errors import UserError
from m1clip.formatting import clock, duration, number, percent, size, when
from m1clip.monitor import status as eta
from m1clip.monitor.diagnostics import verdicts
from m1clip.monitor.history import PHASES, History
from m1clip.monitor.status import Status, status_of
from m1clip.runlog import SELECTION, Record, selection_metric

Point = tuple[float, float]
DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # [row][column] of a braille letter
BRAILLE = 0x2800
BLOCKS = " ▁▂▃▄▅▆▇█"
PLAIN_BLOCKS = " .:-=+*#@"


def chart(points: Sequence[Point], width: int, height: int, braille: bool = True, log: bool = False) -> list[str]:
    """`height` lines of `width` letters: a scale at the left, the curve beside it, first and last step below."""
    finite = [(x, y) for x, y in points if math.isfinite(x) and math.isfinite(y) and (y > 0 or not log)]
    if width < 12 or height < 2:
        return [" " * width] * height
    if not finite:
        blank = [" " * width for _ in range(height)]
        blank[height // 2] = "waiting for the first figures".center(width)[:width]
        return blank
    low, high = min(y for _, y in finite), max(y for _, y in finite)
    if high - low < 1e-12 * max(1.0, abs(high)):
        low, high = (low - abs(low) * 0.1 - 1e-9, high + abs(high) * 0.1 + 1e-9) if not log else (low / 2, high * 2)
    labels = [number(high), number(_middle(low, high, log)), number(low)]
    gutter = max(len(label) for label in labels) + 1
    rows = height - 1
    body = _plot(finite, width - gutter, rows, low, high, braille, log)
    lines = []
    for row in range(rows):
        label = labels[0] if row == 0 else labels[2] if row == rows - 1 else ""
        if row == rows // 2 and rows > 4:
            label = labels[1]
        lines.append(f"{label:>{gutter - 1}} {body[row]}")
    first, last = f"{min(x for x, _ in finite):,.0f}", f"step {max(x for x, _ in finite):,.0f}"
    room = width - gutter
    axis = f"{first}{last:>{room - len(first)}}" if room > len(first) + len(last) else last.rjust(room)
    return [*lines, " " * gutter + axis[:room]]


def _middle(low: float, high: float, log: bool) -> float:
    return math.sqrt(low * high) if log else (low + high) / 2


def _plot(
    points: Sequence[Point], width: int, height: int, low: float, high: float, braille: bool, log: bool
) -> list[str]:
    across, down = (2, 4) if braille else (1, 1)
    columns, rows = width * across, height * down
    left, right = min(x for x, _ in points), max(x for x, _ in points)

    def place(y: float) -> int:
        share = (math.log(y / low) / math.log(high / low)) if log else (y - low) / (high - low)
        return round((1 - min(1.0, max(0.0, share))) * (rows - 1))

    dots = [[False] * columns for _ in range(rows)]
    before: tuple[int, int] | None = None
    for x, y in points:
        column = round((x - left) / (right - left) * (columns - 1)) if right > left else 0
        row = place(y)
        if before is not None:
            _line(dots, before, (column, row))
        dots[row][column] = True
        before = (column, row)
    if not braille:
        return ["".join("*" if dot else " " for dot in line) for line in dots]
    # An empty braille letter is drawn as eight faint rings by some fonts: a space is none.
    return [
        "".join(
            chr(BRAILLE + sum(DOTS[r][c] for r in range(4) for c in range(2) if dots[4 * row + r][2 * column + c]))
            for column in range(width)
        ).replace(chr(BRAILLE), " ")
        for row in range(height)
    ]


def _line(dots: list[list[bool]], start: tuple[int, int], stop: tuple[int, int]) -> None:
    steps = max(abs(stop[0] - start[0]), abs(stop[1] - start[1]))
    for index in range(1, steps):
        column = round(start[0] + (stop[0] - start[0]) * index / steps)
        row = round(start[1] + (stop[1] - start[1]) * index / steps)
        dots[row][column] = True


def meter(share: float, width: int, unicode: bool = True) -> str:
    """A bar of a share between 0 and 1, to the eighth of a letter."""
    share = min(1.0, max(0.0, share))
    if not unicode:
        full = round(share * width)
        return "#" * full + "." * (width - full)
    eighths = round(share * width * 8)
    full, rest = divmod(eighths, 8)
    part = "▏▎▍▌▋▊▉"[rest - 1] if rest else ""
    return "█" * full + part + "░" * (width - full - len(part))


def sparks(values: Sequence[float], top: float = 1.0, unicode: bool = True) -> str:
    """One letter a value, by its height."""
    blocks = BLOCKS if unicode else PLAIN_BLOCKS
    return "".join(blocks[min(8, max(0, round(8 * value / top)))] if top else " " for value in values)


Piece = tuple[str, str]  # text, style
Line = list[Piece]

COLOURS = {
    "": "", "bold": "1", "dim": "2", "good": "32", "bad": "1;31", "note": "33", "accent": "36", "title": "1;36",
    "data": "33", "copy": "35", "forward": "36", "backward": "34", "optimizer": "32", "step": "36",
    "rest": "2", "invert": "7",
}  # fmt: skip
PLAIN = {"bold": "1", "title": "1", "bad": "1", "dim": "2", "invert": "7"}  # NO_COLOR forbids colours, not weight


def fit(line: Line, width: int) -> Line:
    """Exactly `width` cells; what is too long ends in dots. Letters that would move the cursor are taken out."""
    out: Line = []
    room = width
    for raw, style in line:
        text = "".join(letter if letter.isprintable() else " " for letter in raw)
        cells = cell_len(text)
        if cells > room:
            cut = set_cell_size(text, room)
            out.append((cut[:-1] + "…" if room > 1 and cell_len(cut[-1:]) == 1 else cut, style))
            return out
        out.append((text, style))
        room -= cells
    return [*out, (" " * room, "")] if room else out


def side_by_side(left: list[Line], right: list[Line], width: int, gap: int = 2) -> list[Line]:
    """Two blocks of equal height, the left one `width` cells wide."""
    return [[*fit(a, width), (" " * gap, ""), *b] for a, b in zip(left, right, strict=True)]


def ansi(line: Line, colour: bool) -> str:
    """The line with its escape codes."""
    codes = COLOURS if colour else PLAIN
    return "".join(f"\x1b[{codes[style]}m{text}\x1b[0m" if codes.get(style) else text for text, style in line)


def plain(lines: Iterable[Line]) -> str:
    """The text alone."""
    return "\n".join("".join(text for text, _ in line).rstrip() for line in lines)


ENTER, LEAVE = "\x1b[?1049h\x1b[?25l\x1b[2J", "\x1b[0m\x1b[?25h\x1b[?1049l"
ARROWS = {"\x1b[C": "n", "\x1b[D": "b", "\x1b[A": "M", "\x1b[B": "m", "\t": "m", "\x03": "q", "\x1b": "q", "\x04": "q"}


def is_utf8() -> bool:
    """Whether standard output takes every letter."""
    return (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"


class Terminal:
    """Draws only the lines that changed: little to send over a slow ssh line."""

    def __init__(self) -> None:
        self.colour = not os.environ.get("NO_COLOR") and os.environ.get("TERM") not in ("dumb", "unknown")
        self.unicode = is_utf8() and os.environ.get("TERM") != "linux"
        self._shown: list[str] = []
        self._size = (0, 0)

    def size(self) -> tuple[int, int]:
        """Width and height now."""
        width, height = shutil.get_terminal_size((80, 24))
        with contextlib.suppress(OSError):
            width, height = os.get_terminal_size(sys.stdout.fileno())  # COLUMNS would hide a resize
        return max(1, width), max(1, height)

    def show(self, lines: list[Line]) -> None:
        """Bring the screen to these lines."""
        size = self.size()
        if size != self._size:
            self._shown, self._size = [], size
            sys.stdout.write("\x1b[2J")
        rows = [ansi(line, self.colour) for line in lines]
        out = []
        for line_no, row in enumerate(rows):
            if line_no >= len(self._shown) or self._shown[line_no] != row:
                out.append(f"\x1b[{line_no + 1};1H{row}\x1b[0m")
        self._shown = rows
        if out:
            sys.stdout.write("".join(out))
            sys.stdout.flush()

    def key(self, seconds: float) -> str | None:
        """The next key within some time, arrows as letters; None when nothing was pressed (or the size changed)."""
        try:
            ready, _, _ = select.select([sys.stdin], [], [], seconds)
        except InterruptedError:
            return None
        if not ready:
            return None
        pressed = os.read(sys.stdin.fileno(), 32).decode("utf-8", "ignore")
        if not pressed:
            return "q"  # the terminal is gone
        return ARROWS.get(pressed, pressed[0])


@contextlib.contextmanager
def full_screen() -> Iterator[Terminal]:
    """A terminal in full-screen mode; a signal or an error leaves it as clean as `q` does."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise UserError("the monitor needs a terminal; --once prints one image, --web shows a page")
    before = termios.tcgetattr(sys.stdin)

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    def resized(number: int, frame: FrameType | None) -> None:
        """Only so that waiting for a key ends."""

    usual = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    usual[signal.SIGWINCH] = signal.signal(signal.SIGWINCH, resized)
    try:
        tty.setcbreak(sys.stdin)
        sys.stdout.write(ENTER)
        sys.stdout.flush()
        yield Terminal()
    finally:
        with contextlib.suppress(OSError):  # a closed window cannot be tidied
            sys.stdout.write(LEAVE)
            sys.stdout.flush()
            termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)
        for number, handler in usual.items():
            signal.signal(number, handler)


SHOWN_CORES = 8  # with a bar each; more are one letter each


def titled(words: str, width: int, unicode: bool) -> Line:
    """A rule with a name in it."""
    dash = "─" if unicode else "-"
    return [(f"{dash} ", "dim"), (words, "bold"), (f" {dash * max(0, width - len(words) - 3)}", "dim")]


def figures(history: History, width: int) -> list[Line]:
    """The newest numbers: in one line where it is wide, else in two."""
    last: Record = history.recent[-1] if history.recent else (history.steps.last or {})
    evaluation = history.evaluations.last or {}
    best = history.best()
    speed = _figure("speed", last.get("images_per_second"), lambda value: f"{value:,.0f} samples/s")
    first: Line = [*_figure("loss", last.get("loss"), number), *_score(history.metric, evaluation)]
    if best is not None and best.get("step") != evaluation.get("step"):
        first += _figure(f"best so far (step {best['step']:,})", best.get(history.metric), percent)
    first += speed
    second = [
        *_figure("learning rate", last.get("lr"), number),
        *_figure("temperature", last.get("temperature"), number),
        *_figure("gradient", last.get("grad_norm"), number),
        *_figure("epoch", last.get("epoch"), lambda value: f"{value:.1f}"),
    ]
    return [[*first, *second]] if width >= 150 else [first, second]


def _figure(name: str, value: Any, words: Any) -> Line:
    if value is None:
        return []
    shown = words(value) if isinstance(value, int | float) else str(value)
    return [(f" {name} ", "dim"), (shown, "bold"), (" ", "")]


def _score(name: str, row: dict[str, Any]) -> Line:
    if not isinstance(row.get(name), int | float):
        return []
    low, high = row.get(f"{name}/low"), row.get(f"{name}/high")
    span = f" [{100 * low:.1f}, {100 * high:.1f}]" if low is not None and high is not None else ""
    return [(f" {SELECTION[name]} ", "dim"), (percent(row[name]), "bold"), (f"{span} ", "dim")]


def split(history: History, width: int, solid: bool) -> list[Line]:
    """Where the time of a step goes: a bar in which each part is as wide as its share, and the shares.

    `solid` needs colours to tell the parts apart; without them each is drawn with its first letter.
    """
    rows = [record["seconds"] for record in list(history.recent)[-10:] if isinstance(record.get("seconds"), dict)]
    mean = {
        name: sum(row.get(name, 0.0) for row in rows) / len(rows)
        for name in PHASES
        if any(name in row for row in rows)
    } if rows else {}  # fmt: skip
    total = sum(mean.values())
    if total <= 0:
        return []
    words: Line = [(f" {duration(total)} ", "bold")]
    for name, value in mean.items():
        words += [(f" {name} ", name), (percent(value / total, 0), "")]
    bar: Line = [(" ", "")]
    done = 0
    begin = 0.0
    for name, value in mean.items():
        begin += value
        cells = round(begin / total * (width - 2)) - done
        bar.append((("█" if solid else name[0].upper()) * cells, name))
        done += cells
    return [words, bar]


def machine(history: History, width: int, unicode: bool) -> list[Line]:
    """Memory, cores, power and heat; what has no meter is said to have none."""
    last: Record = history.recent[-1] if history.recent else {}
    line: Line = []
    used = last.get("memory_bytes")
    facts = history.environment.get("facts")
    total = facts.get("memory_bytes") if isinstance(facts, dict) else None
    if isinstance(used, int | float):
        line += [(" memory ", "dim"), (size(used), "bold")]
        if isinstance(total, int | float) and history.setting("train", "device", str) == "cpu":
            line.append((f" of {size(total)}", "dim"))
    cores = [value for value in last.get("cores") or [] if isinstance(value, int | float)]
    if cores:
        line.append(("  cores ", "dim"))
        if len(cores) <= SHOWN_CORES and width >= 60 + 11 * len(cores):
            for value in cores:
                line += [(meter(value / 100, 5, unicode), ""), (f" {value:.0f}% ", "dim")]
        else:
            line += [(sparks([value / 100 for value in cores], unicode=unicode), ""),
                     (f" {sum(cores) / len(cores):.0f}% ", "dim")]  # fmt: skip
    watts, celsius = last.get("watts"), last.get("celsius")
    if isinstance(watts, int | float):
        line += [("  power ", "dim"), (f"{watts:.1f} W", "bold")]
    if isinstance(celsius, int | float):
        line += [("  heat ", "dim"), (f"{celsius:.0f} °C", "bold")]
    missing = [name for name, value in (("power", watts), ("heat", celsius)) if not isinstance(value, int | float)]
    if last and missing:
        line.append((f"  {' and '.join(missing)} not measured", "dim"))
    return [line] if line else []


def events(history: History, most: int, width: int) -> list[Line]:
    """What happened last, the newest at the top."""
    lines: list[Line] = []
    rows = [*history.events, *list(history.evaluations)[-most:], *([history.end] if history.end else [])]
    rows.sort(key=lambda record: record.get("time") or 0.0, reverse=True)
    for record in rows[:most]:
        moment = record.get("time")
        stamp = when(moment) if isinstance(moment, int | float) and math.isfinite(moment) else "?"
        lines.append(
            [(f" {stamp:>5} ", "dim"), (told(record), "note" if record["kind"] in ("warning", "skipped") else "")]
        )
    return lines + [[] for _ in range(most - len(lines))]


def told(record: Record) -> str:
    """An event in words."""
    kind, step = record["kind"], record.get("step")
    at = f" at step {step:,}" if isinstance(step, int) else ""
    if kind == "eval":
        return f"evaluated{at}" + _told_score(record, ": ")
    if kind == "start":
        return f"started{at if step else ''}, {record.get('steps', '?'):,} steps in all" if isinstance(
            record.get("steps"), int) else f"started{at}"  # fmt: skip
    if kind == "checkpoint":
        return f"checkpoint saved{at}"
    if kind == "end":
        where = f": {record.get('split')} "
        return f"finished{at}{_told_score(record, where)}"
    if kind == "event":
        reason = f": {record['reason']}" if "reason" in record else ""
        return f"{record.get('event', 'event')}{at}{reason}"
    if kind == "warning":
        return f"warning: {record.get('text', '')}"
    if kind == "skipped":
        return f"could not read {record.get('where', 'an image')}"
    if kind == "parity":
        difference = record.get("gradient_difference")
        return f"gradients differ from the CPU's by {difference}" if difference is not None else "parity checked"
    return kind


def _told_score(record: Record, before: str) -> str:
    name = selection_metric(record)
    value = record.get(name)
    return f"{before}{SELECTION[name]} {percent(value)}" if isinstance(value, int | float) else ""


LEFT = (
    ("loss", "loss"), ("grad_norm", "gradient norm"), ("temperature", "temperature"), ("lr", "learning rate"),
    ("images_per_second", "samples a second"), ("step_seconds", "seconds a step"), ("data_fraction", "data"),
    ("memory_bytes", "memory in bytes"), ("watts", "watts"), ("celsius", "degrees Celsius"),
)  # fmt: skip
RIGHT = (
    ("text_to_image/recall@1", "recall@1, %"), ("image_to_text/recall@1", "recall@1 image > text, %"),
    ("text_to_image/recall@10", "recall@10, %"),
    ("analysis/modality_gap", "gap between images and captions"), ("analysis/alignment", "alignment"),
    ("analysis/difficulty/hard", "accuracy against similar captions, %"),
)  # fmt: skip
SMALLEST = (40, 10)
BADGES = {"running": "good", "preparing": "note", "finished": "accent", "stopped": "note", "died": "bad"}
HELP = (
    "q  quit (the run goes on)", "p  pause and go on: the image stands still, the run does not",
    "m  next figure in the left chart (M: the one before)", "r  next figure in the right chart",
    "l  logarithmic scale on the left", "n  next run, b the one before, where several are watched", "?  this help",
)  # fmt: skip


@dataclass
class View:
    """What the person has chosen to see, and what the terminal can show."""

    width: int = 80
    height: int = 24
    unicode: bool = True
    colour: bool = True
    left: int = 0
    right: int = 0
    log: bool = False
    paused: bool = False
    help: bool = False
    place: str = ""  # "2 of 3" where several runs are watched


def frame(history: History, status: Status, view: View, now: float) -> list[Line]:
    """Exactly `view.height` lines of `view.width` cells."""
    width, height = view.width, view.height
    if width < SMALLEST[0] or height < SMALLEST[1]:
        return _filled([[("window too small", "bad")], [(f"needs {SMALLEST[0]}x{SMALLEST[1]}", "")]], width, height)
    top = [_title(history, status, view), _progress(history, status, view, now)]
    bottom = [[(_keys(view), "dim")]]
    if view.help:
        body: list[Line] = [[], [("keys", "bold")], *[[(f"  {line}", "")] for line in HELP]]
        return _filled([*top, *body], width, height, bottom)
    dot = "● " if view.unicode else "* "
    told: list[Line] = [
        [(dot, verdict.level), (verdict.words, "bad" if verdict.level == "bad" else "")]
        for verdict in verdicts(history, now, status.state)
    ]
    wide = width >= 150
    numbers = figures(history, width)
    clockwork = split(history, width, view.unicode and view.colour)
    state = machine(history, width, view.unicode)
    fixed = len(top) + len(numbers) + len(clockwork) + len(state) + len(bottom) + 1
    spare = height - fixed
    told = told[: max(1, min(len(told) or 1, spare // 5))]
    said = events(history, max(2, min(10, spare // 5)), width)
    charts = max(4, height - fixed - len(told) - len(said))
    image = _charts(history, view, width, charts, wide)
    rule: Line = [(("─" if view.unicode else "-") * width, "dim")]
    return _filled([*top, *image, *numbers, *clockwork, *state, rule, *told, *said], width, height, bottom)


def _title(history: History, status: Status, view: View) -> Line:
    badge: Line = [(f" {'●' if view.unicode else '*'} {status.state} ", BADGES[status.state])]
    if view.place:
        badge.append((f" run {view.place} ", "dim"))
    if view.paused:
        badge.append((" PAUSED ", "note"))
    room = view.width - len(" m1clip ") - sum(len(text) for text, _ in badge) - 2
    name = str(history.run)
    if len(name) > room:  # the end of a path says more than its beginning
        name = ("…" if view.unicode else "~") + name[len(name) - max(1, room - 1) :]
    return [(" m1clip ", "invert"), (f" {name} ", "bold"), *badge]


def _progress(history: History, status: Status, view: View, now: float) -> Line:
    total, step = history.total, history.step
    share = step / total if total else 0.0
    words = f" {percent(share, 0)}  step {step:,} of {total:,}"
    if not total or status.state == "preparing":
        words = f" {status.words}"
    left = eta.seconds_left(history)
    spent = eta.elapsed(history)
    if status.state == "running" and left is not None:
        words += f"  {clock(left)} left, until {when(now + left)}"
    elif history.last_time:
        words += f"  last line {when(history.last_time)}"
    if spent is not None:
        words += f"  {clock(spent)} trained"
    return [(meter(share, max(6, view.width - len(words) - 1), view.unicode), "good"), (words, "")]


def _charts(history: History, view: View, width: int, height: int, wide: bool) -> list[Line]:
    name, title = LEFT[view.left % len(LEFT)]
    wanted = [(name, title, False)]
    right = ((history.metric, f"{SELECTION[history.metric]}, %"), *RIGHT)
    wanted.append((*right[view.right % len(right)], True))
    if wide:
        rest = [(*each, False) for each in LEFT if each[0] != name]
        wanted += rest[:2]
    if wide and height >= 24:
        upper = _row(history, view, wanted[:2], width, height // 2)
        return upper + _row(history, view, wanted[2:4], width, height - height // 2)
    if wide:
        return _row(history, view, wanted, width, height)
    if width < 70:
        return _row(history, view, wanted[:1], width, height)
    return _row(history, view, wanted, width, height)


def _row(history: History, view: View, wanted: list[tuple[str, str, bool]], width: int, height: int) -> list[Line]:
    each = (width - 2 * (len(wanted) - 1)) // len(wanted)
    block: list[Line] | None = None
    for place, (name, title, recall) in enumerate(wanted):
        drawn = _one(history, view, name, title, recall, each, height, log=view.log and place == 0)
        block = drawn if block is None else side_by_side(block, drawn, place * (each + 2) - 2)
    return block or []


def _one(
    history: History, view: View, name: str, title: str, recall: bool, width: int, height: int, log: bool
) -> list[Line]:
    if recall:
        share = title.endswith("%")
        points = [(row["step"], value * (100 if share else 1)) for row in history.evaluations
                  if (value := _deep(row, name)) is not None]  # fmt: skip
        last = history.evaluations.last
        level = last.get(f"{name}/chance") if last else None
        if isinstance(level, int | float):
            title = f"{title.removesuffix(', %')}, % (chance {100 * level:.2g})"
    else:
        points = [(row["step"], row[name]) for row in history.steps if name in row]
    lines = chart(points, width, height - 1, braille=view.unicode, log=log)
    if name in ("watts", "celsius") and not points:
        lines = [" " * width] * (height - 1)
        lines[height // 2] = "not measured on this machine".center(width)
    head = titled(f"{title}{' (log)' if log else ''}", width, view.unicode)
    return [head, *[[(line, "accent" if recall else "")] for line in lines]]


def _deep(row: dict[str, object], name: str) -> float | None:
    """A figure by its name, or one inside the analysis; of a [share, n] the share."""
    value: object = row.get(name)
    if value is None and "/" in name:
        value = row
        for part in name.split("/"):
            value = value.get(part) if isinstance(value, dict) else None
    if isinstance(value, list) and value:
        value = value[0]
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _keys(view: View) -> str:
    return " q quit   p pause   m metric   r recall   l log scale   n next run   ? help"


def _filled(lines: list[Line], width: int, height: int, bottom: list[Line] | None = None) -> list[Line]:
    bottom = bottom or []
    room = height - len(bottom)
    body = (lines + [[] for _ in range(room)])[:room]
    return [fit(line, width) for line in [*body, *bottom]]


REFRESH = 0.25  # seconds between two looks at the log
STATE = 1.0  # and at the process


class Watched:
    """One run with its state, looked at no more often than needed."""

    def __init__(self, run: Path) -> None:
        self.history = History(run)
        self._status: Status | None = None
        self._looked = 0.0

    def poll(self) -> bool:
        """Take in what is new."""
        return self.history.poll()

    @property
    def status(self) -> Status:
        """The state, at most a second old."""
        if self._status is None or time.monotonic() - self._looked > STATE:
            self._status, self._looked = status_of(self.history), time.monotonic()
        return self._status


def monitor(runs: Sequence[Path]) -> None:
    """Watch runs in the terminal until `q`."""
    watched: dict[Path, Watched] = {}
    view, place = View(), 0
    with full_screen() as terminal:
        view.unicode, view.colour = terminal.unicode, terminal.colour
        while True:
            run = runs[place]
            if run not in watched:
                watched[run] = Watched(run)
            current = watched[run]
            if not view.paused:
                current.poll()
            view.place = f"{place + 1} of {len(runs)}" if len(runs) > 1 else ""
            _show(terminal, view, current)
            # A long log is looked through bit by bit while nobody presses a key.
            key = terminal.key(REFRESH if current.history.follower.complete else 0.01)
            if key in ("q", "Q"):
                return
            place = _press(key, view, place, len(runs))


def _show(terminal: Terminal, view: View, current: Watched) -> None:
    view.width, view.height = terminal.size()
    terminal.show(frame(current.history, current.status, view, time.time()))


def _press(key: str | None, view: View, place: int, count: int) -> int:
    """Act on a key; gives the run to show."""
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


def once(run: Path) -> str:
    """One image as plain text, for a pipe or a log."""
    watched = Watched(run)
    watched.history.poll_all()
    width, height = shutil.get_terminal_size((100, 30))
    view = View(width=width, height=height, colour=False, unicode=is_utf8())
    return plain(frame(watched.history, watched.status, view, time.time()))
