"""How fast is `m1clip index`? Against the encoder alone on decoded pixels, and a plain loop with onnxruntime.

    m1clip export runs/frozen --to onnx --out frozen-onnx
    python benchmarks/search_index.py frozen-onnx flickr8k/images --count 500 --json docs/results/search_index.json

Each side is a process of its own, in turn: images per second without loading the model, CPU
seconds, peak memory.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

import m1clip
from m1clip import console
from m1clip.formatting import table
from m1clip.search.index import update_index

SIDES = ("encoder alone", "m1clip index", "plain loop")
BATCH = 64


def encoder_alone(model: Path, paths: list[Path], begin: Callable[[], None]) -> None:
    """Encode pixels that are decoded already."""
    loaded = m1clip.load(model)
    pixels = np.stack([loaded.square(path) for path in paths])
    loaded.encode_image(pixels[:BATCH])
    begin()
    loaded.encode_image(pixels)


def plain_loop(model: Path, paths: list[Path], begin: Callable[[], None]) -> None:
    """Open, resize, crop, stack, run: what one would write first."""
    import onnxruntime

    session = onnxruntime.InferenceSession(
        str(model / "image.onnx"), providers=["CPUExecutionProvider"]
    )
    (graph_input,) = session.get_inputs()
    side, vectors = graph_input.shape[1], []
    begin()
    for start in range(0, len(paths), BATCH):
        batch = []
        for path in paths[start : start + BATCH]:
            image = Image.open(path).convert("RGB")
            scale = side / min(image.size)
            image = image.resize(
                [round(scale * length) for length in image.size], Image.Resampling.BICUBIC
            )
            left, top = (image.width - side) // 2, (image.height - side) // 2
            batch.append(np.asarray(image.crop((left, top, left + side, top + side))))
        vectors.append(session.run(None, {graph_input.name: np.stack(batch)})[0])
    np.save(paths[0].parent / "vectors.npy", np.concatenate(vectors))


def m1clip_index(model: Path, paths: list[Path], begin: Callable[[], None]) -> None:
    """Index the folder."""
    with console.on_progress(lambda done, total: begin() if done == 0 else None):
        update_index(paths[0].parent, model)


def run_side(side: str, model: Path, paths: list[Path]) -> dict[str, float]:
    """In the process of one side: seconds, CPU seconds and peak memory."""
    began: list[float] = []

    def begin() -> None:
        began.extend((time.perf_counter(), time.process_time()))

    {"encoder alone": encoder_alone, "m1clip index": m1clip_index, "plain loop": plain_loop}[side](
        model, paths, begin
    )
    seconds, cpu = time.perf_counter() - began[0], time.process_time() - began[1]
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
        1 if sys.platform == "darwin" else 1024
    )
    return {"images per second": len(paths) / seconds, "CPU seconds": cpu, "peak MB": memory / 1e6}


def main() -> None:
    """Run the sides in turn."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("images", type=Path)
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        print(
            json.dumps(run_side(options.side, options.model, sorted(options.images.glob("*.jpg"))))
        )
        return
    runs_of_side: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
    with tempfile.TemporaryDirectory() as temporary:
        os.environ["XDG_DATA_HOME"] = str(Path(temporary) / "data")
        for side in SIDES * options.rounds:
            photos = Path(temporary) / "photos"
            photos.mkdir()
            for path in sorted(options.images.glob("*.jpg"))[: options.count]:
                shutil.copy(path, photos)
            command = [sys.executable, __file__, str(options.model), str(photos), "--side", side]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            runs_of_side[side].append(json.loads(done.stdout.splitlines()[-1]))
            shutil.rmtree(photos)
    names = list(runs_of_side[SIDES[0]][0])
    rows: dict[str, Any] = {
        side: [[run[name] for run in runs] for name in names] for side, runs in runs_of_side.items()
    }
    cells = [
        (side, *(f"{statistics.median(v):.1f} [{min(v):.1f}, {max(v):.1f}]" for v in values))
        for side, values in rows.items()
    ]
    print(table((f"{options.count:,} images, {options.rounds} runs", *names), cells))
    if options.json:
        options.json.write_text(
            json.dumps({"load": os.getloadavg()[0], **runs_of_side}, indent=2) + "\n"
        )


if __name__ == "__main__":
    main()
