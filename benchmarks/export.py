"""The tables of docs/lab-export.md: every target for every model, with parity, recall, size and speed.

    python benchmarks/export.py tiny=runs/demo frozen=runs/frozen ViT-B-32=runs/vit --out exports
    python benchmarks/export.py tiny= frozen= ViT-B-32= --out exports      # print what is stored

Exports what has no NAME-TARGET.json in --out yet, and deletes the exported folder: the file is its
export.json, or has the reason why the export was refused. `NAME=RUN,DATA` compares on other data
than the run's.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from m1clip.export.parity import PARITY_RECALL_AT, THROUGHPUT_BATCH, change_text

TARGETS = (
    *(
        "onnx",
        "onnx --int8",
        "onnx --fp16",
        "transformers.js",
        "transformers.js --int8",
        "immich",
        "coreml",
    ),
    *("sentence-transformers", "hf", "openclip"),
)
HEADER = (
    "target",
    "model",
    "smallest cosine (image, text)",
    "recall@1, points",
    "recall@10, points",
    "size (original)",
)
SPEED_HEADER = (
    "model",
    "runtime",
    "ms per image",
    "ms per text",
    f"images/s in batches of {THROUGHPUT_BATCH}",
)


def measured(run: str, target: str, path: Path) -> dict[str, Any]:
    """The stored comparison, made where it is missing."""
    if not path.exists():
        folder, (run, _, data) = path.with_suffix(""), run.partition(",")
        command = [
            sys.executable,
            "-m",
            "m1clip",
            "export",
            run,
            "--to",
            *target.split(),
            "--out",
            str(folder),
        ]
        command += ["--data", data] if data else []
        done = subprocess.run(command, check=False, text=True, stderr=subprocess.PIPE)
        refused = {"refused": done.stderr.strip().splitlines()[-1]} if done.returncode else None
        path.write_text(json.dumps(refused) if refused else (folder / "export.json").read_text())
        shutil.rmtree(folder, ignore_errors=True)
    return dict(json.loads(path.read_text()))


def cells(record: dict[str, Any]) -> list[str]:
    """One row of the first table, from the third column on."""
    if "refused" in record:
        return [f"refused: {record['refused'].removeprefix('m1clip: ')}", "", "", ""]
    torch, *_, made = record["runtimes"].values()
    cosines = ", ".join(f"{made[name]['cosine_min']:.5f}" for name in ("image", "text"))
    size = f"{made['bytes'] / 1e6:.1f} MB ({torch['bytes'] / 1e6:.1f})"
    return [cosines, *(change_text(made.get(f"recall@{k}")) for k in PARITY_RECALL_AT), size]


def speed_rows(name: str, record: dict[str, Any]) -> Iterator[list[str]]:
    """Every runtime that was timed in one comparison."""
    for runtime, entry in record.get("runtimes", {}).items():
        times = (entry[part] for part in ("image_seconds", "text_seconds"))
        shown = [f"{1000 * seconds['median']:.1f}" for seconds in times]
        yield [name, runtime, *shown, f"{entry['images_per_second']:.0f}"]


def markdown(header: Sequence[str], rows: list[list[str]]) -> str:
    """A table."""
    return "\n".join(f"| {' | '.join(row)} |" for row in (header, ["---"] * len(header), *rows))


def main() -> None:
    """Export, and print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="+", metavar="NAME=RUN[,DATA]")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    options.out.mkdir(exist_ok=True)
    rows, speeds = [], []
    for target in TARGETS:
        for name, run in (model.partition("=")[::2] for model in options.models):
            path = options.out / f"{name}-{target.replace(' --', '-')}.json"
            if run or path.exists():
                record = measured(run, target, path)
                rows.append([f"`{target}`", name, *cells(record)])
                speeds += (
                    speed_rows(name, record) if target in ("onnx --int8", "onnx --fp16") else []
                )
    print(markdown(HEADER, rows), markdown(SPEED_HEADER, speeds), sep="\n\n")


if __name__ == "__main__":
    main()
