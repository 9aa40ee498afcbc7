"""The sections of the comparison's report: each a function from the document to HTML."""

from __future__ import annotations

from html import escape
from typing import Any

from m1clip.bench.candidate import Candidate
from m1clip.bench.html import percent, rate, seconds, share, size, table
from m1clip.bench.usage import BATCHES

Document = dict[str, Any]


def verdict(document: Document) -> str:
    """The conclusions, in sentences."""
    lines = "".join(f"<li>{escape(line)}</li>" for line in document["verdict"])
    partial = "" if document["complete"] else "<p class='bad'>Not finished: what was measured so far.</p>"
    return f'<div class="verdict">{partial}<ul>{lines}</ul></div>'


def results(document: Document) -> str:
    """Every figure."""
    rows = []
    for r in document["results"]:
        t, parity = r["seconds"], r["parity"]
        agrees = (
            "-"
            if parity is None
            else (
                f'<span class="{"good" if parity["ok"] else "bad"}">{percent(parity["gradient_difference"])}</span>'
            )
        )
        memory = size(r["memory"]["total"]) if r["memory"] and r["memory"]["known"] else "-"
        joules = f"{rate(r['joules_per_step'])} J" if r["joules_per_step"] is not None else "not measured"
        rows.append([
            escape(Candidate(**r["candidate"]).label), seconds(t["median"]),
            f"{seconds(t['low'])} - {seconds(t['high'])}",
            str(t["n"]), rate(r["pairs_per_second"]), share(r["gemm_share"]), memory, joules, agrees,
            escape("; ".join(r["remarks"])),
        ])  # fmt: skip
    head = ("candidate", "a step", "quartiles", "n", "pairs/s", "of GEMM rate", "peak memory", "energy a step",
            "gradient error", "remarks")  # fmt: skip
    note = (
        "<p class='dim'>Gradient error: relative difference of the whole gradient from the CPU's in fp32, on the same "
        "pairs. Of GEMM rate: the model's operations a second, as a share of a large matrix product's on that "
        "device.</p>"
    )
    return f"<h2>All figures</h2>{table(head, rows, range(1, 9))}{note}"


def usage(document: Document) -> str:
    """When to use which."""
    rows = [[escape(row["size"]), *(escape(cell) for cell in row["cells"])] for row in document["usage"]]
    return "<h2>When to use which</h2>" + table(("parameters", *(name for name, _, _ in BATCHES)), rows)


def models(document: Document) -> str:
    """The cost models, with their error on sizes that they had not seen."""
    if not document["cost_models"]:
        return ""
    rows = []
    for f in document["cost_models"]:
        errors = sorted(abs(e) for values in f["left_out"].values() for e in values)
        unseen = (
            f"{errors[len(errors) // 2]:.0%} median, {errors[-1]:.0%} worst" if errors else "one size only"
        )
        rate = f"{1 / f['per_flop'] / 1e12:.3g} TFLOP/s" if f["per_flop"] else "-"
        per = f"{seconds(f['per_parameter'] * 1e8)}" if f["per_parameter"] else "0"
        rows.append([f"{f['device']} {f['precision']}", seconds(f["fixed"]) if f["fixed"] else "0", per, rate,
                     str(f["points"]), f"{f['median_error']:.0%}", unseen])  # fmt: skip
    head = (
        "way",
        "fixed",
        "for 100M weights",
        "rate",
        "points",
        "error of the fit",
        "error on a size left out",
    )
    words = "<p>seconds of a step = fixed + a cost for each weight (the optimizer) + operations / rate.</p>"
    return f"<h2>Cost model</h2>{words}{table(head, rows, range(1, 7))}"


def devices(document: Document) -> str:
    """Each device by itself."""
    rows = []
    for d in document["devices"]:
        rates = ", ".join(f"{name} {rate / 1e12:.3g} TFLOP/s" for name, rate in d["gemm"].items())
        o = d["overheads"]
        compile_time = (
            seconds(d["first_compile_seconds"])
            if d["first_compile_seconds"]
            else escape(d["compile_obstacle"])
        )
        rows.append(
            [
                escape(f"{d['device']}: {d['name']}"),
                rates,
                f"{d['bandwidth'] / 1e9:,.0f} GB/s",
                *(seconds(o[k]["median"]) for k in ("launch", "synchronize", "round_trip", "allocate")),
                compile_time,
            ]
        )
    head = (
        "device",
        "matrix products",
        "memory copy",
        "launch",
        "synchronise",
        "launch and wait",
        "allocate 4 MB",
        "first compile",
    )
    copies = [
        [escape(d["device"]), size(c["bytes"]),
         *(f"{seconds(c[k]['median'])} ({c['bytes'] / c[k]['median'] / 1e9:.3g} GB/s)"
                                                  for k in ("to_device", "to_host"))]
        for d in document["devices"] for c in d["copies"]
    ]  # fmt: skip
    more = table(("device", "bytes", "to the device", "back"), copies, (1, 2, 3)) if copies else ""
    return f"<h2>Before it computes</h2>{table(head, rows)}{more}"


def micro(document: Document) -> str:
    """The prior art's micro-benchmark, and why it misleads."""
    rows = []
    for d in document["devices"]:
        m = d["small_matmul"]
        wait = d["overheads"]["synchronize"]["median"]
        rate = m["flops"] / m["once"]["median"]
        best = max(d["gemm"].values())
        rows.append([escape(d["device"]), seconds(m["each"]["median"]), seconds(m["once"]["median"]), seconds(wait),
                     f"{rate / 1e9:.3g} GFLOP/s ({rate / best:.2%} of the device's rate)"])  # fmt: skip
    words = (
        "<p>A 16 x 512 by 512 x 16 product is 0.26 MFLOP: an accelerator is done with it before the call that "
        "starts it has returned. Timed with a wait after every call, it shows what a launch and a wait cost, and "
        "nothing about training. Timed over many calls with one wait it shows the launch alone. Neither comes near "
        "the device's rate, and the CPU, which has nothing to launch, looks fast in both. The steps above are what "
        "training does.</p>"
    )
    head = ("device", "wait after each call", "one wait after 200 calls", "a wait alone", "rate reached")
    return f"<h2>The micro-benchmark that misled</h2>{words}{table(head, rows, (1, 2, 3, 4))}"


def left_out(document: Document) -> str:
    """What was not measured, with the reason."""
    if not document["left_out"]:
        return ""
    rows = [
        [escape(item["label"]), escape(item["kind"]), escape(item["why"])] for item in document["left_out"]
    ]
    return f"<h2>Left out</h2>{table(('candidate', 'reason', 'in words'), rows)}"


def method() -> str:
    """How it was measured."""
    return (
        "<h2>How it was measured</h2><p>Each figure is the product's own training step: batch from the loader, copy, "
        "forward, backward, clipping, optimizer; on synthetic pictures, one caption each. The device is "
        "synchronised after each step. Steps repeat until two agree, then candidates take turns in alternating "
        "order. Medians with quartiles. Memory: resident memory of a process of its own on the CPU, the allocator's "
        "peak on an accelerator; one more step, not timed, is watched tensor by tensor to say what it was made of. "
        "</p>"
    )
