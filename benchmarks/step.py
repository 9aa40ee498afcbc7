"""Seconds of one training step of the original project's model: the naive baseline and m1clip, in alternation.

Each side lives in its own process (m1clip changes how its process keeps memory, which must not help
the other) and waits while the other works, so that a busy moment of the machine falls on both
alike.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import tempfile
from pathlib import Path
from typing import Any

from same_work import alternate, job_config
from sides import Side, machine, peak_memory, spread, write

from m1clip.config import to_toml

GOAL_RATIO, GOAL_BYTES = 2.9, 2.0e9
LINES = {"naive": "naive baseline, fp32", "m1clip": "m1clip"}


def measure(config: Path, steps: int) -> dict[str, Any]:
    """All figures of an alternating run."""
    start = [
        sys.executable,
        str(Path(__file__).with_name("same_work.py")),
        "--config",
        str(config),
        "--worker",
    ]
    with Side([*start, "naive"]) as naive, Side([*start, "m1clip"]) as ours:
        facts = ours.ask("default_facts")
        result = alternate(
            {"naive": lambda: naive.ask("naive"), "m1clip": lambda: ours.ask("default")},
            ours,
            steps,
        )
    ratios = {name: result[name]["naive"] for name in ("ratio", "ratio_cpu")}
    rest = {name: result[name] for name in ("gemm_rate", "gemm_fraction", "rounds")}
    return {
        **facts,
        **result["seconds"],
        **ratios,
        **rest,
        "text_tokens": result["tokens"]["m1clip"],
    }


def show(result: dict[str, Any]) -> None:
    """The table."""

    def figure(name: str, form: str = ".2f", unit: str = "") -> str:
        return spread(result[name], form, unit)

    facts = result["machine"]
    print(
        f"{facts['cpu']}, {facts['cores']} cores ({result['threads']} threads), torch"
        f" {facts['torch']}, commit {facts['commit']}, load before {facts['load_before']:.1f}"
    )
    count, n = result["parameters"], result["naive"]["n"]
    print(f"{count:,} parameters, batch {result['batch']}, median [quartiles], n={n}")
    for name, words in LINES.items():
        print(f"  {words:32} {figure(name, unit=' s')} per step")
    print(
        f"  naive / m1clip                   {figure('ratio')} of paired steps (goal {GOAL_RATIO})"
    )
    print(
        f"  the same in processor seconds    {figure('ratio_cpu')} (other programs do not count here)"
    )
    print(
        f"  fraction of the GEMM rate         {figure('gemm_fraction', '.0%')} "
        f"of {result['gemm_rate']['median'] / 1e9:.0f} GFLOP/s in {result['precision']}"
    )
    peak = result["peak_bytes"] / 1e9
    print(f"  peak RSS of m1clip train         {peak:.2f} GB (goal {GOAL_BYTES / 1e9:.1f})")
    print(f"m1clip: {result['precision']}, {result['text_tokens']:.0f} text tokens on average")


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--steps", type=int, default=15, help="rounds to measure, after two that warm up"
    )
    parser.add_argument(
        "--quick", action="store_true", help="a tiny model, two rounds: a smoke test"
    )
    parser.add_argument("--json", type=Path, help="write the figures there")
    options = parser.parse_args()
    config, steps = job_config("76.7M", None, options.quick), 2 if options.quick else options.steps
    # One caption per image, as in the baseline: the step is the same work.
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, captions_per_step=1))
    result: dict[str, Any] = {
        "machine": machine(),
        "batch": config.train.batch_size,
        "quick": options.quick,
    }
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "job.toml"
        path.write_text(to_toml(config), encoding="utf-8")
        result["peak_bytes"] = peak_memory(["--config", str(path), "--steps", "4"])
        result |= measure(path, steps)
    show(result)
    if options.json:
        write(options.json, result)


if __name__ == "__main__":
    main()
