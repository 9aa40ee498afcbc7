"""One picture of a run for a terminal of any size: a pure function from what is known to lines."""

from __future__ import annotations

from dataclasses import dataclass

from m1clip.runlog import SELECTION
from m1clip.watch import eta
from m1clip.watch.chart import chart, meter
from m1clip.watch.history import History
from m1clip.watch.line import Line, fit, side_by_side
from m1clip.watch.panels import events, figures, machine, split, titled
from m1clip.watch.state import Status
from m1clip.watch.verdicts import verdicts
from m1clip.watch.words import clock, percent, when

LEFT = (
    ("loss", "loss"), ("grad_norm", "gradient norm"), ("temperature", "temperature"), ("lr", "learning rate"),
    ("pairs_per_second", "pairs a second"), ("step_seconds", "seconds a step"), ("data_share", "share spent on data"),
    ("memory_bytes", "memory in bytes"), ("watts", "watts"), ("celsius", "degrees Celsius"),
)  # fmt: skip
RIGHT = (
    ("text_to_image/recall@1", "recall@1, %"), ("image_to_text/recall@1", "recall@1 image > text, %"),
    ("text_to_image/recall@10", "recall@10, %"),
    ("analysis/modality_gap", "gap between pictures and captions"), ("analysis/alignment", "alignment"),
    ("analysis/difficulty/hard", "accuracy against similar captions, %"),
)  # fmt: skip
SMALLEST = (40, 10)
BADGES = {"running": "good", "preparing": "note", "finished": "accent", "stopped": "note", "died": "bad"}
HELP = (
    "q  quit (the run goes on)", "p  pause and go on: the picture stands still, the run does not",
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
        return _filled(
            [[("window too small", "bad")], [(f"needs {SMALLEST[0]}x{SMALLEST[1]}", "")]], width, height
        )
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
    picture = _charts(history, view, width, charts, wide)
    rule: Line = [(("─" if view.unicode else "-") * width, "dim")]
    return _filled([*top, *picture, *numbers, *clockwork, *state, rule, *told, *said], width, height, bottom)


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


def _row(
    history: History, view: View, wanted: list[tuple[str, str, bool]], width: int, height: int
) -> list[Line]:
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
