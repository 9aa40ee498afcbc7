"""Draw docs/results/scaling.json, the result of benchmarks/scaling.py, as docs/results/scaling.png."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, NullFormatter, NullLocator

INK, GREY, RULE = "#1f2430", "#6b7280", "#e5e7eb"
COLOURS = ("#1d6fb8", "#e07b39", "#2a9d6f", "#8e5bb5")  # most threads first
LIMIT: dict[str, Any] = {"lw": 1.4, "ls": (0, (4, 3)), "alpha": 0.65, "zorder": 2}
PANELS = {
    "batch": ("Batch", "samples in per step"),
    "resolution": ("Resolution", "side of the image in pixels"),
    "tokens": ("Text length", "tokens of a caption"),
    "model": ("Model", ""),
}


def panel_points(result: dict[str, Any], panel: str, threads: int) -> list[dict[str, Any]]:
    """Points of one curve, in the order in which they were measured."""
    return [point for point in result["points"] if point["panel"] == panel and point["threads"] == threads]


def order_of(result: dict[str, Any], panel: str) -> list[Any]:
    """The x values of a panel that were measured: numbers sorted, names from the lightest model to the heaviest."""
    found = {p["x"]: p["flops_per_pair"] for p in result["points"] if p["panel"] == panel}
    return sorted(found, key=found.__getitem__) if panel == "model" else sorted(found)


def share_words(result: dict[str, Any], panel: str) -> str:
    """Between which shares of the limit the points of a panel lie."""
    shares = [
        p["images_per_second"]["median"] * p["flops_per_pair"] / result["gemm_rate"][str(p["threads"])]["median"]
        for p in result["points"]
        if p["panel"] == panel
    ]
    return f"{min(shares):.0%} to {max(shares):.0%} of the limit" if shares else ""


def draw(result: dict[str, Any], path: Path) -> None:
    """One PNG with a panel for each thing that grows."""
    fonts = {
        "font.family": "sans-serif",
        "font.size": 10,
        "text.color": INK,
        "axes.labelcolor": GREY,
        "xtick.color": GREY,
        "ytick.color": GREY,
        "axes.edgecolor": RULE,
    }
    counts = sorted({point["threads"] for point in result["points"]}, reverse=True)
    with plt.rc_context(fonts):
        figure, grid = plt.subplots(2, 2, figsize=(11, 8.2), dpi=150)
        figure.subplots_adjust(left=0.075, right=0.965, top=0.855, bottom=0.135, hspace=0.40, wspace=0.19)
        for axes, panel in zip(grid.flat, PANELS, strict=True):
            _panel(axes, result, panel, counts)
        _words(figure, result, counts)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, facecolor="white")
        plt.close(figure)


def _panel(axes: Axes, result: dict[str, Any], panel: str, counts: list[int]) -> None:
    title, label = PANELS[panel]
    order = order_of(result, panel)
    place = {x: index for index, x in enumerate(order)} if panel == "model" else {x: x for x in order}
    for colour, threads in zip(COLOURS, counts, strict=False):
        own = sorted(panel_points(result, panel, threads), key=lambda point: place[point["x"]])
        if not own:
            continue
        xs = [place[point["x"]] for point in own]
        rate = result["gemm_rate"][str(threads)]["median"]
        limit = [rate / point["flops_per_pair"] for point in own]
        if panel == "model":
            axes.hlines(limit, [x - 0.28 for x in xs], [x + 0.28 for x in xs], color=colour, **LIMIT)
        else:
            axes.plot(xs, limit, color=colour, **LIMIT)
        _curve(axes, xs, own, colour, join=panel != "model")
    axes.set_yscale("log")
    if panel == "batch":
        axes.set_xscale("log", base=2)
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticks([place[x] for x in order], [str(x) for x in order])
    axes.set_title(title, loc="left", fontweight="bold", fontsize=11.5, color=INK, pad=8)
    axes.set_xlabel(label)
    _scale(axes)
    missing = [s for s in result["skipped"] if s["panel"] == panel]
    if missing:
        words = ", ".join(f"{s['x']} ({s['threads']} thr.: {s['reason'].partition(':')[0]})" for s in missing[:4])
        more = f" and {len(missing) - 4} more" if len(missing) > 4 else ""
        axes.text(0.01, 0.025, f"not measured: {words}{more}", transform=axes.transAxes, fontsize=7.5, color=GREY)
    axes.text(1.0, 1.035, share_words(result, panel), transform=axes.transAxes, ha="right", fontsize=9, color=GREY)


def _curve(axes: Axes, xs: list[Any], own: list[dict[str, Any]], colour: str, join: bool) -> None:
    """Medians with their quartiles; hollow where the batch was encoded in chunks."""
    speed = [point["images_per_second"] for point in own]
    middle = [s["median"] for s in speed]
    below = [s["median"] - s["low"] for s in speed]
    above = [s["high"] - s["median"] for s in speed]
    axes.errorbar(
        xs, middle, yerr=[below, above], color=colour, lw=2 if join else 0, elinewidth=1.4, capsize=2.5, zorder=3
    )
    faces = ["white" if point["chunk"] else colour for point in own]
    axes.scatter(xs, middle, s=30, c=faces, edgecolors=colour, linewidths=1.6, zorder=4)


def _scale(axes: Axes) -> None:
    """Round numbers on a logarithmic axis, light rules, no frame."""
    low, high = axes.get_ylim()
    low, high = low / 1.15, high * 1.15
    ticks = [m * 10.0**e for e in range(-3, 7) for m in (1, 2, 5) if low <= m * 10.0**e <= high]
    axes.set_ylim(low, high)
    axes.set_yticks(ticks)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_minor_locator(NullLocator())
    axes.grid(axis="y", color=RULE, lw=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(length=0, pad=5)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


def _words(figure: Any, result: dict[str, Any], counts: list[int]) -> None:
    """Title, legend and where it was measured."""
    figure.text(0.035, 0.955, "Images per second of one training step", fontsize=16, fontweight="bold", color=INK)
    x = 0.037
    for colour, threads in zip(COLOURS, counts, strict=False):
        name = f"{threads} thread{'s' if threads > 1 else ''}"
        rate = result["gemm_rate"][str(threads)]["median"] / 1e9
        figure.text(x, 0.918, f"●  {name}", color=colour, fontsize=10.5, fontweight="bold")
        figure.text(
            x + 0.108, 0.918, f"- - -  its limit: matrix products at {rate:.0f} GFLOP/s", color=colour, fontsize=9.5
        )
        x += 0.415
    place = result["machine"]
    counts_of = sorted({p["images_per_second"]["n"] for p in result["points"]})
    updates = f"{counts_of[0]} to {counts_of[-1]}" if len(counts_of) > 1 else f"{counts_of[0]}"
    figure.text(
        0.035,
        0.028,
        f"tiny (112 px, 32 tokens, batch {result['batch']}) where it is not the thing that varies; "
        f"models at their own size with batch {result['model_batch']}; vocabulary {result['vocabulary']:,}.\n"
        f"Median and quartiles of {updates} updates a point; hollow: encoded in chunks. "
        f"{place['cpu']}, {result['precision']}, torch {place['torch']}, commit {place['commit']}.",
        fontsize=8.5,
        color=GREY,
        linespacing=1.5,
    )


if __name__ == "__main__":
    RESULTS = Path(__file__).parents[1] / "docs" / "results"
    draw(json.loads((RESULTS / "scaling.json").read_text(encoding="utf-8")), RESULTS / "scaling.png")
