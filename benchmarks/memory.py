"""Peak memory of `m1clip train` by setting: each a fresh process, set-up, steps, evaluation and final report included.

    python benchmarks/memory.py --json docs/results/memory.json

The 76.7M job is `--preset prior-art` (batch 12); the large batch is the same model with a batch of 1024 in chunks. The
first run of a model measures its precision before it begins; the other rows have that behind them.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from sides import machine, peak_memory, write

PRIOR_ART = "--preset prior-art --steps 4"
ROWS = {  # name: (words, flags of m1clip train)
    "default": ("76.7M, batch 12", PRIOR_ART),
    "checkpointing": ("the same, gradient checkpointing", f"{PRIOR_ART} --grad-checkpointing"),
    "micro-batch": ("the same, --micro-batch 4", f"{PRIOR_ART} --micro-batch 4"),
    "first": ("76.7M, batch 12, first run of a model", PRIOR_ART),
    "first-checkpointing": (
        "the same, gradient checkpointing",
        f"{PRIOR_ART} --grad-checkpointing",
    ),
    "large": (
        "small, batch 1024, --micro-batch 16",
        "--model small --batch-size 1024 --micro-batch 16 --steps 2 --synthetic-images 1100",
    ),
}
QUICK = (
    "--model tiny --vision-layers 1 --text-layers 1 --steps 1 --batch-size 8 --synthetic-images 16"
)


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--rows",
        default="default,checkpointing,micro-batch",
        help=f"of {', '.join(ROWS)}; 'large' takes long",
    )
    parser.add_argument("--repeats", type=int, default=2, help="fresh processes for each row")
    parser.add_argument("--quick", action="store_true", help="one tiny run: a smoke test")
    parser.add_argument("--json", type=Path, help="write the figures there")
    options = parser.parse_args()
    rows = {"quick": ("a tiny run", QUICK)} if options.quick else ROWS
    chosen = list(rows) if options.quick else options.rows.split(",")
    unknown = [name for name in chosen if name not in rows]
    if unknown:
        parser.error(f"--rows {','.join(unknown)}: choose from {', '.join(rows)}")
    result: dict[str, Any] = {"machine": machine(), "quick": options.quick, "rows": {}}
    place, repeats = result["machine"], 1 if options.quick else options.repeats
    print(
        f"{place['cpu']}, {place['cores']} cores, torch {place['torch']}, commit {place['commit']}"
    )
    for name in chosen:
        words, flags = rows[name]
        peaks = [
            peak_memory(flags.split(), own_cache=name.startswith("first")) for _ in range(repeats)
        ]
        result["rows"][name] = {"flags": flags, "peak_bytes": peaks}
        print(
            f"  {words:38} {max(peaks) / 1e9:.2f} GB, the most of n={len(peaks)} "
            f"({', '.join(f'{peak / 1e9:.2f}' for peak in peaks)})",
            flush=True,
        )
    if options.json:
        write(options.json, result)


if __name__ == "__main__":
    main()
