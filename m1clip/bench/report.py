"""A comparison as text and as comparison.html, a self-contained file."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from html import escape
from typing import Any

import numpy as np

from m1clip.bench.configurations import Configuration
from m1clip.bench.cost_model import CostModel, Result, by_device
from m1clip.bench.verdict import gradient_is_right
from m1clip.formatting import duration, number, percent, size, table
from m1clip.monitor.report import Plot, bars, html_page, html_plots, html_table

Document = dict[str, Any]
HEAD = ("configuration", "step", "quartiles", "n", "images/s", "of GEMM", "memory", "energy", "gradient")
MAX_BARS = 16
METHOD = (
    "Each figure is the training step of m1clip train (copy, forward, backward, clipping, optimizer) on random images "
    "with one caption each, preloaded in memory. The device is synchronized after each step. Steps repeat until "
    "two agree within 10%, then configurations alternate. Times are medians with quartiles. Of "
    "GEMM: the model's FLOP/s as a fraction of those of a large matrix multiplication on that device. Memory: the "
    "peak of a process on the CPU, of the allocator on an accelerator. Gradient: its relative difference from the "
    "CPU's in fp32."
)


def rows(document: Document) -> list[list[str]]:
    """All results as table rows with the columns `HEAD`."""
    found = []
    for r in document["results"]:
        t, joules = r["seconds"], r["joules_per_step"]
        quartiles = f"{duration(t['low'])} to {duration(t['high'])}"
        found.append(
            [
                Configuration(**r["configuration"]).label,
                duration(t["median"]),
                quartiles,
                str(t["n"]),
                number(r["images_per_second"]),
                percent(r["gemm_fraction"], 0),
                size(r["peak_bytes"]),
                "not measured" if joules is None else f"{number(joules)} J",
                percent(r["gradient_difference"]) + ("" if gradient_is_right(r) else " (wrong)"),
            ]
        )
    return found


def text(document: Document) -> str:
    """The results, the verdict, warnings and skipped configurations."""
    lines = [table(HEAD, rows(document)), "", *(f"- {line}" for line in document["verdict"])]
    for r in document["results"]:
        label = Configuration(**r["configuration"]).label
        lines += [f"warning: {label}: {warning}" for warning in r["warnings"]]
    return "\n".join(lines + [f"skipped: {item['label']}: {item['reason']}" for item in document["skipped"]])


def page(document: Document) -> str:
    """The report of a comparison."""
    title = f"m1clip compare: {machine(document)}"
    about = f"torch {document['facts']['torch']}, m1clip {document['m1clip']}, {document['date']}"
    warnings = [
        f"{Configuration(**r['configuration']).label}: {warning}"
        for r in document["results"]
        for warning in r["warnings"]
    ]
    skipped = [(item["label"], item["kind"], item["reason"]) for item in document["skipped"]]
    parts = [
        f"<h1>{escape(title)}</h1><p class='hint'>{escape(about)}<br>{escape(' '.join(document['command']))}</p>",
        _list(document["verdict"]),
        html_plots(_plots(document)),
        "<h2>All results</h2>" + html_table(HEAD, rows(document)) + (_list(warnings) if warnings else ""),
        _cost_models(document) if document["cost_models"] else "",
        _devices(document),
        "<h2>Skipped</h2>" + html_table(("configuration", "reason", ""), skipped) if skipped else "",
        f"<h2>Method</h2><p>{escape(METHOD)}</p>",
    ]
    return html_page(title, "".join(parts))


def machine(document: Document) -> str:
    """A short description of the machine."""
    facts = document["facts"]
    return f"{facts['cuda'] + ' + ' if facts['cuda'] else ''}{facts['cpu']}, {facts['cores']} cores"


def _list(lines: Sequence[str]) -> str:
    return f"<ul>{''.join(f'<li>{escape(line)}</li>' for line in lines)}</ul>"


def _cost_models(document: Document) -> str:
    cells = []
    for m in document["cost_models"]:
        held_out = sorted(abs(error) for values in m["held_out_errors"].values() for error in values)
        unseen = (
            f"{held_out[len(held_out) // 2]:.0%} median, {held_out[-1]:.0%} worst" if held_out else "only one model"
        )
        rate = f"{1 / m['per_flop'] / 1e12:.3g} TFLOP/s" if m["per_flop"] else "-"
        cells.append(
            [
                f"{m['device']} {m['precision']}",
                duration(m["fixed"]),
                duration(1e8 * m["per_parameter"]),
                rate,
                str(m["points"]),
                f"{m['median_error']:.0%}",
                unseen,
            ]
        )
    head = ("", "fixed", "per 100M parameters", "rate", "points", "fit error", "leave-one-model-out error")
    words = "<p>Seconds per step = fixed cost + cost per parameter (optimizer) + FLOPs / rate.</p>"
    return f"<h2>Cost model</h2>{words}{html_table(head, cells)}"


def _devices(document: Document) -> str:
    cells = [
        [
            f"{d['device']}: {d['name']}",
            ", ".join(f"{p} {rate / 1e12:.3g} TFLOP/s" for p, rate in d["gemm_flops"].items()),
            f"{d['bandwidth'] / 1e9:,.0f} GB/s",
            duration(d["launch_seconds"]),
        ]
        for d in document["devices"]
    ]
    return "<h2>Devices</h2>" + html_table(("", "matrix multiplication", "memory copy", "kernel launch"), cells)


def _plots(document: Document) -> list[Plot]:
    """Speed of each configuration, and step time by batch size if several were measured."""
    jobs: dict[tuple[str, int], list[Result]] = {}
    for r in document["results"]:
        jobs.setdefault((r["configuration"]["model"], r["configuration"]["batch_size"]), []).append(r)
    plots = []
    for (model, batch_size), members in jobs.items():
        if len(members) > 2 and len(jobs) <= 4:
            title = f"{model}, batch {batch_size}: images per second"
            fastest = sorted(members, key=lambda r: -r["images_per_second"])[:MAX_BARS]
            variants = [(Configuration(**r["configuration"]).variant, r["images_per_second"]) for r in fastest]
            plots += bars(title, [(name, speed, number(speed)) for name, speed in variants])
    for model in dict.fromkeys(model for model, _ in jobs):
        if len({batch_size for name, batch_size in jobs if name == model}) > 1:
            title = f"{model}: seconds per step; dashed: cost model"
            plots.append(Plot(title, "see the table below", partial(_growth, document=document, model=model)))
    return plots


def _growth(axes: Any, document: Document, model: str) -> None:
    fits = {
        (m["device"], m["precision"]): CostModel(m["fixed"], m["per_parameter"], m["per_flop"])
        for m in document["cost_models"]
    }
    for key, members in by_device(document["results"]).items():
        mine = [r for r in members if r["configuration"]["model"] == model]
        if not mine:
            continue
        x = np.array([r["configuration"]["batch_size"] for r in mine])
        values = np.array([[r["seconds"][name] for name in ("median", "low", "high")] for r in mine])
        line = axes.errorbar(x, values[:, 0], np.abs(values[:, 1:] - values[:, :1]).T, marker="o", label=" ".join(key))
        if key in fits:
            curve = np.geomspace(x.min(), x.max(), 25)
            flops = mine[0]["flops"] / x[0]
            predicted = [fits[key].seconds(mine[0]["parameters"], flops * b) for b in curve]
            axes.plot(curve, predicted, "--", color=line.lines[0].get_color())
    axes.set(xscale="log", yscale="log", xlabel="batch size", ylabel="seconds")
    axes.legend()
