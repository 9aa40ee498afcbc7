"""Peak memory of `m1clip train` by setting: each a fresh process, set-up, steps, evaluation and final report included.

    python benchmarks/memory.py --json docs/results/memory.json
    python benchmarks/memory.py --components --json docs/results/memory_components.json
    python benchmarks/memory.py --rows lora,last-blocks,all-blocks --repeats 1 --json memory_lora.json

`--components` shows what the peak of three models consists of, as the run logs it (docs/run-log.md,
"The machine").

The 76.7M job is `--preset original` (batch 12) in the default precision; the large batch is the
same model with a batch of 1024 in chunks. The first run of a model measures its precision before it
begins; the other rows have that behind them.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from sides import machine, peak_memory, variables_for, write

from m1clip.runlog import read_log

ORIGINAL = "--preset original --precision auto --workers 0 --steps 4"
VIT = "VIT-B-16-FOLDER"  # replaced by a ViT-B/16 with random weights
ADAPT = (
    f"--synthetic-images 66 --init {VIT} --recipe finetune --batch-size 64 --micro-batch 8 "
    "--grad-checkpointing --steps 2 --eval-every 0 --patience 0 --precision bf16"
)
ROWS = {  # name: (words, flags of m1clip train)
    "lora": ("ViT-B/16, batch 64, --lora 8", f"{ADAPT} --lora 8"),
    "last-blocks": (
        "the same, last three blocks of both towers",
        f"{ADAPT} --unfreeze-image 3 --unfreeze-text 3",
    ),
    "all-blocks": ("the same, all blocks", ADAPT),
    "default": ("76.7M, batch 12", ORIGINAL),
    "checkpointing": ("the same, gradient checkpointing", f"{ORIGINAL} --grad-checkpointing"),
    "micro-batch": ("the same, --micro-batch 4", f"{ORIGINAL} --micro-batch 4"),
    "first": ("76.7M, batch 12, first run of a model", ORIGINAL),
    "first-checkpointing": ("the same, gradient checkpointing", f"{ORIGINAL} --grad-checkpointing"),
    "large": (
        "original, batch 1024, --micro-batch 16",
        "--model original --batch-size 1024 --micro-batch 16 --steps 2 --synthetic-images 1100",
    ),
}
COMPONENTS = {  # name: (words, flags of m1clip train)
    "tiny": (
        "tiny, batch 16",
        "--model tiny --recipe scratch --batch-size 16 --synthetic-images 200 --steps 4",
    ),
    "original": ("76.7M, batch 12", "--preset original --steps 2 --precision fp32"),
    "ViT-B-32": (
        "ViT-B/32, batch 8",
        "--model ViT-B-32 --recipe scratch --batch-size 8 --synthetic-images 48 --steps 2 "
        "--precision fp32",
    ),
}
MAX_REST = 0.20  # of the peak that may stay unexplained
QUICK = (
    "--model tiny --vision-layers 1 --text-layers 1 --steps 1 --batch-size 8 --synthetic-images 16"
)


def write_vit(folder: Path) -> None:
    """Write a ViT-B/16 with random weights."""
    from m1clip.data.images import Preprocess
    from m1clip.model.clip import build_clip
    from m1clip.model.folder import write_model
    from m1clip.model.presets import preset
    from m1clip.text.bpe import BpeTokenizer

    write_model(folder, build_clip(preset("ViT-B-16")), BpeTokenizer(), Preprocess(image_size=224))


def components_of(flags: str) -> dict[str, Any]:
    """Train in a fresh process, and return the newest record of its memory by component."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        command = [sys.executable, "-m", "m1clip", "train", *flags.split(), "--out", str(run)]
        subprocess.run(
            command, env=variables_for(sys.executable), check=True, stdout=subprocess.DEVNULL
        )
        records = [record for record in read_log(run) if record["kind"] == "memory"]
    return {name: value for name, value in records[-1].items() if name not in ("v", "kind", "time")}


def measure_components(rows: dict[str, tuple[str, str]], device: str) -> dict[str, Any]:
    """Measure and print the components of each row."""
    components = {}
    for name, (words, model_flags) in rows.items():
        flags = f"{model_flags} --device {device}"
        parts = components_of(flags)
        peak = parts["peak"]
        components[name] = {"flags": flags, **parts}
        sizes = {
            part: value
            for part, value in parts.items()
            if isinstance(value, int) and part not in ("peak", "overlap")
        }
        text = ", ".join(f"{part} {value / 1e6:.0f}" for part, value in sizes.items())
        fits = "ok" if parts["rest"] <= MAX_REST * peak else f"above {MAX_REST:.0%}"
        print(f"  {words}: peak {peak / 1e6:.0f} MB: {text}", flush=True)
        print(f"    rest {parts['rest'] / peak:.1%} of the peak: {fits}", flush=True)
    return components


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--rows",
        default="default,checkpointing,micro-batch",
        help=f"of {', '.join(ROWS)}; 'large' takes long",
    )
    parser.add_argument("--repeats", type=int, default=2, help="fresh processes for each row")
    parser.add_argument(
        "--components", action="store_true", help="what the peak consists of, for three models"
    )
    parser.add_argument("--device", default="cpu", help="of --components")
    parser.add_argument("--quick", action="store_true", help="one tiny run: a smoke test")
    parser.add_argument("--json", type=Path, help="write the figures there")
    options = parser.parse_args()
    rows = {"quick": ("a tiny run", QUICK)} if options.quick else ROWS
    chosen = list(rows) if options.quick else options.rows.split(",")
    unknown = [name for name in chosen if name not in rows]
    if unknown:
        parser.error(f"--rows {','.join(unknown)}: choose from {', '.join(rows)}")
    result: dict[str, Any] = {"machine": machine(), "quick": options.quick, "rows": {}}
    facts, repeats = result["machine"], 1 if options.quick else options.repeats
    print(
        f"{facts['cpu']}, {facts['cores']} cores, torch {facts['torch']}, commit {facts['commit']}"
    )
    if options.components:
        models = {"quick": ("a tiny run", QUICK)} if options.quick else COMPONENTS
        result["components"] = measure_components(models, options.device)
        chosen = []
    for name in chosen:
        words, flags = rows[name]
        with tempfile.TemporaryDirectory() as folder:
            if VIT in flags:
                write_vit(Path(folder) / "vit")
            typed = [str(Path(folder) / "vit") if word == VIT else word for word in flags.split()]
            own_cache = name.startswith("first")
            peaks = [peak_memory(typed, own_cache=own_cache) for _ in range(repeats)]
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
