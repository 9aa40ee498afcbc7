"""The table of docs/export.md: every target for every model, with parity, recall, size and speed.

    python benchmarks/export.py tiny=runs/demo frozen=runs/frozen ViT-B-32=runs/vit --out exports
    python benchmarks/export.py tiny= frozen= ViT-B-32= --out exports      # only print it again

Exports what has no NAME-TARGET.json in --out yet, and deletes the exported folder: the file is its export.json, or has
the reason why the export was refused. `NAME=RUN,DATA` compares on other data than the run's.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from m1clip.export.parity import change_text

TARGETS = (
    *("onnx", "onnx --int8", "onnx --fp16", "transformers.js", "transformers.js --int8", "immich", "coreml"),
    *("sentence-transformers", "hf", "openclip"),
)
HEADER = "target|model|smallest cosine (image, text)|recall@1|recall@10, points (95% interval)|size (original)"
TIMES = "ms per image, text (onnx fp32)|images/s (torch; onnx fp32)"


def measured(run: str, target: str, path: Path) -> dict[str, Any]:
    """The stored comparison, made where it is missing."""
    if not path.exists():
        folder, (run, _, data) = path.with_suffix(""), run.partition(",")
        command = [sys.executable, "-m", "m1clip", "export", run, "--to", *target.split(), "--out", str(folder)]
        command += ["--data", data] if data else []
        done = subprocess.run(command, check=False, text=True, stderr=subprocess.PIPE)
        refused = {"refused": done.stderr.strip().splitlines()[-1]} if done.returncode else None
        path.write_text(json.dumps(refused) if refused else (folder / "export.json").read_text())
        shutil.rmtree(folder, ignore_errors=True)
    return dict(json.loads(path.read_text()))


def cells(record: dict[str, Any]) -> list[str]:
    """One row of the table, from the third column on."""
    if "refused" in record:
        return [record["refused"].removeprefix("error: "), "", "", "", "", ""]
    torch, *fp32, made = record["runtimes"].values()
    cosines = ", ".join(f"{made[name]['cosine_min']:.5f}" for name in ("image", "text"))
    row = [cosines, *(change_text(made.get(f"recall@{k}")) for k in (1, 10))]
    row.append(f"{made['bytes'] / 1e6:.1f} MB ({torch['bytes'] / 1e6:.1f})")
    if "image_seconds" not in made:
        return [*row, "on a Mac only", "on a Mac only"]

    def milliseconds(entry: dict[str, Any]) -> str:
        return ", ".join(f"{1000 * entry[name]['median']:.1f}" for name in ("image_seconds", "text_seconds"))

    speeds = [f"{entry['images_per_second']:.0f}" for entry in (made, torch, *fp32)]
    row.append(" ".join([milliseconds(made), *(f"({milliseconds(entry)})" for entry in fp32)]))
    return [*row, f"{speeds[0]} ({'; '.join(speeds[1:])})"]


def main() -> None:
    """Export, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", metavar="NAME=RUN[,DATA]")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    given.out.mkdir(exist_ok=True)
    models = [model.partition("=")[::2] for model in given.models]
    header = [*HEADER.split("|"), *TIMES.split("|")]
    lines = [header, ["---"] * len(header)]
    for target in TARGETS:
        for name, run in models:
            record = measured(run, target, given.out / f"{name}-{target.replace(' --', '-')}.json")
            lines.append([f"`{target}`" if name == models[0][0] else "", name, *cells(record)])
    print("\n".join(f"| {' | '.join(line)} |" for line in lines))


if __name__ == "__main__":
    main()
