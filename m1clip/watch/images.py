"""`m1clip report --png`: the plots as PNG files, drawn by matplotlib."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path

from m1clip.errors import UserError
from m1clip.watch.history import PHASES, History
from m1clip.watch.report_plots import BACK, RECALL, best_title, eval_curve, step_curve
from m1clip.watch.report_tables import split_shares
from m1clip.watch.svg import COLOURS, Curve

SIZE, DPI = (7.2, 4.0), 140


def write_images(runs: Sequence[Path], folder: Path) -> list[Path]:
    """One file a plot; what was not measured has none."""
    if importlib.util.find_spec("matplotlib") is None:
        raise UserError("--png: matplotlib is not installed; pip install 'm1clip[plot]', or leave out --png")
    histories = [History(run).poll_all() for run in runs]
    folder.mkdir(parents=True, exist_ok=True)
    many = list(enumerate(histories))
    wanted: list[tuple[str, str, list[Curve], bool]] = [
        (name, title, [step_curve(h, name, i) for i, h in many], log)
        for name, title, log in (
            ("loss", "Loss", True), ("temperature", "Temperature", False), ("lr", "Learning rate", False),
            ("grad_norm", "Gradient norm", True), ("pairs_per_second", "Pairs a second", False),
            ("watts", "Power, watts", False),
        )
    ]  # fmt: skip
    best = [eval_curve(h, h.metric, h.name, i, band=True) for i, h in many]
    wanted.append(("best", f"{best_title(histories)} on the validation split, % (95% interval)", best, False))
    recall = [eval_curve(h, RECALL, f"{h.name}, text to image", 2 * i, band=True) for i, h in many]
    recall += [eval_curve(h, BACK, f"{h.name}, image to text", 2 * i + 1, band=True) for i, h in many]
    wanted.append(("recall", "Recall@1 on the validation split, % (95% interval)", recall, False))
    files = [
        _lines(folder / f"{name}.png", title, curves, log)
        for name, title, curves, log in wanted
        if _any(curves)
    ]
    files += [_split(folder / f"time-split-{h.name}.png", h) for h in histories if split_shares(h)]
    return files


def _any(curves: Sequence[Curve]) -> bool:
    return any(curve.points for curve in curves)


def _lines(path: Path, title: str, curves: Sequence[Curve], log: bool) -> Path:
    from matplotlib.figure import Figure

    figure = Figure(figsize=SIZE, dpi=DPI, layout="constrained")
    axes = figure.add_subplot()
    for curve in (curve for curve in curves if curve.points):
        x, y = zip(*curve.points, strict=True)
        colour = COLOURS[curve.colour % len(COLOURS)]
        axes.plot(x, y, color=colour, label=curve.name, marker="o" if curve.dots else None, markersize=3)
        if curve.band:
            low, high = zip(*curve.band, strict=True)
            axes.fill_between(x, low, high, color=colour, alpha=0.15, linewidth=0)
    if log:
        axes.set_yscale("log")
    axes.set_title(title)
    axes.set_xlabel("step")
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    figure.savefig(path)
    return path


def _split(path: Path, history: History) -> Path:
    from matplotlib.figure import Figure

    shares = split_shares(history)
    names = [name for name in PHASES if name in shares]
    figure = Figure(figsize=(SIZE[0], 2.2), dpi=DPI, layout="constrained")
    axes = figure.add_subplot()
    left = 0.0
    for place, name in enumerate(names):
        axes.barh(
            [0],
            [100 * shares[name]],
            left=left,
            color=COLOURS[place],
            label=f"{name} {100 * shares[name]:.1f}%",
        )
        left += 100 * shares[name]
    axes.set_yticks([])
    axes.set_xlabel("% of a step")
    axes.set_title(f"Where the time of a step goes: {history.name}")
    axes.legend(frameon=False, ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.35))
    figure.savefig(path)
    return path
