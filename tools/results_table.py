"""All stored results as the markdown table of docs/benchmarks.md: each figure with n, spread and machine.

    python tools/results_table.py [FOLDER]       # docs/results by default

A file with an unknown name can define its own rows: a list "rows" of {"what", "figure", "n",
"command"}.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

from same_work import OWN, SIDES
from sides import NO_PEERS, RESULTS, spread
from speedrun import TRACKS, groups, images_seen, mean_spread, recalls

from m1clip.formatting import plural


class Row(NamedTuple):
    """One line of the table."""

    title: str
    figure: str
    n: str
    command: str


def step_rows(result: dict[str, Any]) -> Iterator[Row]:
    """The original project's model against the naive baseline."""
    command = "python benchmarks/step.py"
    n = str(result["ratio"]["n"])
    subject = (
        f"original project's model ({result['parameters'] / 1e6:.1f}M, batch {result['batch']})"
    )
    yield Row(
        f"{subject}: naive baseline / m1clip",
        f"**{spread(result['ratio'])}** times; "
        f"{result['naive']['median']:.2f} s vs. {result['m1clip']['median']:.2f} s",
        n,
        command,
    )
    yield Row(
        f"{subject}: fraction of the {result['precision']} GEMM rate",
        f"{spread(result['gemm_fraction'], '.0%')} of {result['gemm_rate']['median'] / 1e9:.0f}"
        " GFLOP/s",
        n,
        command,
    )
    yield Row(
        f"{subject}: peak memory of `m1clip train`",
        f"{result['peak_bytes'] / 1e9:.2f} GB",
        "1",
        command,
    )


def same_work_rows(result: dict[str, Any]) -> Iterator[Row]:
    """Each implementation against m1clip doing the same work."""
    command = "python benchmarks/same_work.py"
    clock = result.get("clock", "seconds")
    ratio = "ratio" if clock == "seconds" else "ratio_cpu"
    unit = "s" if clock == "seconds" else "CPU s"
    if clock == "cpu_seconds":  # measured in the precision that was asked for
        limits = [f"{key}={value}" for key, value in result["instructions"].items()]
        precision = next(iter(result["jobs"].values()))["precision"]
        command = " ".join([*limits, command, "--precision", precision, "--cpu-seconds"])
    for name, job in result["jobs"].items():
        size = (
            f"{name.partition('-')[0]}, {job['precision']}, batch {job['batch']},"
            f" {job['text_tokens']} tokens"
        )
        subject = f"same work, {size}"
        own = job[clock]["m1clip"]
        version = (job.get("versions") or {}).get("open_clip", "")
        for side, plain in SIDES.items():
            words = plain.replace("open_clip", f"open_clip {version}".strip())
            if side == "m1clip":
                continue
            if side not in job[clock]:
                if side not in result.get("sides", SIDES):
                    continue
                if job["precision"] == "bf16" or not side.endswith("_pure"):
                    yield Row(f"{subject}: {words} / m1clip", NO_PEERS, "0", command)
                continue
            n, theirs = str(own["n"]), job[clock][side]["median"]
            if side in OWN:
                yield Row(
                    f"{subject}: {words}, {job['samples'][side]:.0f} pairs of"
                    f" {job['tokens'][side]:.0f} tokens",
                    f"{theirs:.2f} s, {job['samples'][side] / theirs:.0f} image-caption pairs per"
                    f" second (same work: {job['samples']['m1clip'] / own['median']:.0f})",
                    n,
                    command,
                )
                continue
            yield Row(
                f"{subject}: {words} / m1clip",
                f"**{spread(job[ratio][side])}** times;"
                f" {theirs:.2f} {unit} vs. {own['median']:.2f} {unit}",
                n,
                command,
            )
        if clock != "seconds":
            continue  # the GEMM rate is one of elapsed time
        yield Row(
            f"{subject}: fraction of the GEMM rate",
            spread(job["gemm_fraction"], ".0%"),
            str(own["n"]),
            command,
        )


def speedrun_rows(result: dict[str, Any]) -> Iterator[Row]:
    """Mean recall@10 of each entry; its machine and source are in docs/speedrun.md."""
    for group in groups(result["runs"]):
        first = group[0]
        yield Row(
            f"{first['data']} from random weights, {TRACKS[first['track']].words}:"
            f" {first['version']} (commit {first['machine']['commit']}, entry `{first['entry']}`),"
            " mean of both test recall@10",
            f"**{mean_spread(recalls(group, 'test'))}%**, {images_seen(group)} seen",
            plural(len(group), "seed"),
            f"python benchmarks/speedrun.py DATA --entry {first['entry']}",
        )


def loader_rows(result: dict[str, Any]) -> Iterator[Row]:
    """Ratios of loader throughput."""
    n = str(next(iter(result["images_per_second"].values()))["n"])
    for name, ratio in result["ratios"].items():
        yield Row(
            f"images loaded per second: {name}",
            f"{ratio:,.1f} times",
            n,
            "python benchmarks/loader.py DATA",
        )


def large_batch_rows(result: dict[str, Any]) -> Iterator[Row]:
    """The cost of micro-batches in time and accuracy, and of gradient accumulation in open_clip."""
    command = "python benchmarks/large_batch.py"
    subject = f"{result['model']}, batch {result['batch']}, micro-batches of {result['chunk']}"
    n, peak = (
        str(result["ratio"]["n"]),
        {side: value / 1e9 for side, value in result["peak_bytes"].items()},
    )
    yield Row(
        f"{subject}: step with / without micro-batches",
        f"**{spread(result['ratio'])}** times; peak {peak['chunked']:.2f} GB vs."
        f" {peak['plain']:.2f} GB",
        n,
        command,
    )
    if result["peer"] is None:
        yield Row(f"{subject}: open_clip with `--accum-freq`", NO_PEERS, "0", command)
        return
    peer = result["peer"]
    yield Row(
        f"{subject}: open_clip step with / without `--accum-freq`",
        f"{spread(peer['ratio'])} times; the gradient of its "
        f"temperature is {peer['gradients']['temperature_ratio']:.2f} times the correct value",
        n,
        command,
    )


def memory_rows(result: dict[str, Any]) -> Iterator[Row]:
    """Peak memory of complete runs."""
    for name, row in result["rows"].items():
        peaks = [value / 1e9 for value in row["peak_bytes"]]
        first = ", nothing cached" if name.startswith("first") else ""
        suffix = " (maximum)" if len(peaks) > 1 else ""
        yield Row(
            f"peak memory of `m1clip train {row['flags']}`{first}",
            f"{max(peaks):.2f} GB{suffix}",
            str(len(peaks)),
            f"python benchmarks/memory.py --rows {name}",
        )


def cuda_rows(result: dict[str, Any]) -> Iterator[Row]:
    """Steps on a GPU: ratios as worded by cuda_step.py, and the best fraction of the GEMM rate."""
    for model, model_result in result["models"].items():
        done = [line for line in model_result["lines"] if "seconds" in line]
        if not done:
            continue
        counts = [line["seconds"]["n"] for line in done]
        n = f"{min(counts)} to {max(counts)}" if min(counts) < max(counts) else str(counts[0])
        for text in model_result["ratios"]:
            yield Row(f"{model} on a GPU", text, n, "python benchmarks/cuda_step.py")
        best = max(
            (line for line in done if line["side"] == "m1clip"),
            key=lambda line: line["gemm_fraction"],
            default=None,
        )
        if best is not None:
            yield Row(
                f"{model} on a GPU: fraction of the bf16 GEMM rate",
                f"{best['gemm_fraction']:.0%} ({best['variant']}, batch {best['batch']},"
                f" {best['tokens']} tokens, {best['images_per_second']:,.0f} images per second)",
                str(best["seconds"]["n"]),
                "python benchmarks/cuda_step.py",
            )


KNOWN: dict[str, Callable[[dict[str, Any]], Iterator[Row]]] = {
    "step": step_rows,
    "same_work": same_work_rows,
    "same_work_fp32": same_work_rows,
    "same_work_fp32_avx2": same_work_rows,
    "speedrun": speedrun_rows,
    "loader": loader_rows,
    "large_batch": large_batch_rows,
    "memory": memory_rows,
    "cuda_step": cuda_rows,
}


def own_rows(result: dict[str, Any]) -> Iterator[Row]:
    """Rows that a file defines itself."""
    for line in result.get("rows", ()):
        if isinstance(line, dict) and {"what", "figure"} <= line.keys():
            names = ("what", "figure", "n", "command")
            yield Row(*(str(line.get(name, "")) for name in names))


def machine_line(result: dict[str, Any]) -> str:
    """The machine of a result, in one line."""
    if "machine" not in result and "runs" in result:
        return "every run with its machine, options and source, see [speedrun.md](speedrun.md)"
    facts = result.get("machine") or result.get("facts") or "unknown machine"
    if not isinstance(facts, dict):
        return str(facts)
    name = facts.get("cuda") or facts.get("cpu", "unknown machine")
    cores = f", {facts['cores']} cores" if "cores" in facts else ""
    return (
        f"{name}{cores}, torch {facts.get('torch', '?')}, commit {facts.get('commit', 'unknown')}"
    )


def render(folder: Path) -> str:
    """The markdown for all results in a folder."""
    lines: list[list[str]] = [["result", "figure", "n", "command"]]
    notes = []
    for path in sorted(
        folder.glob("*.json"), key=lambda p: ([*KNOWN, p.stem].index(p.stem), p.stem)
    ):
        result = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(result, dict):
            continue
        rows = list(KNOWN.get(path.stem, own_rows)(result))
        if not rows:
            continue
        smoke = " (a smoke test, not a result)" if result.get("quick") else ""
        lines += [
            [row.title + smoke, row.figure, row.n, f"`{row.command}`" if row.command else ""]
            for row in rows
        ]
        notes.append(f"- [{path.name}](results/{path.name}): {machine_line(result)}")
    table = [f"| {' | '.join(cells)} |" for cells in lines]
    return "\n".join([table[0], "|---" * len(lines[0]) + "|", *table[1:], "", *notes])


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", nargs="?", type=Path, default=RESULTS)
    print(render(parser.parse_args().folder))


if __name__ == "__main__":
    main()
