"""Images per second of decoding 500 x 375 JPEG files to squares: threads, processes, simplejpeg, nvJPEG, and batches.

    python benchmarks/decoding.py --json docs/results/decoding.json
    python benchmarks/decoding.py --images 24000 --json ...     # the set of docs/lab-scale.md
    python benchmarks/decoding.py --colors          # what the interpolation of colors changes, by size

The files are made by the script (photo_set.py). Each row decodes all of them once, the rounds
alternate; files are in the page cache. `batches` are those of `m1clip train --cache off --workers
N`, with captions, over two epochs.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from photo_set import caption, write_set
from PIL import Image
from sides import figures, machine, spread, write

from m1clip.data import images as image_module
from m1clip.data.augment import Augmentation
from m1clip.data.cache import Computed, RowCache, RowWriter, row_key
from m1clip.data.captions import tokenize_captions
from m1clip.data.decoding import (
    DecodeMethod,
    DecodeOptions,
    LazyImages,
    decode_images,
    decode_to_rows,
)
from m1clip.data.images import FileImage
from m1clip.data.loader import BatchPlan, TrainingSet, batches
from m1clip.data.nvjpeg import gpu_decoder
from m1clip.hardware.device import Device, rules
from m1clip.hardware.machine_info import decode_threads, read_machine_info, usable_cpus
from m1clip.text.tokenizers import make_tokenizer

SIDE = 224
REDUCTIONS = (1.0, 1.2, 1.4, 1.5, 1.7, 2.0, 3.0)  # shorter side of a file / that of the square
COLOR_FILES = 40


def through(refs: list[FileImage], **how: Any) -> float:
    """Images per second of decoding to the calling process."""
    begin = time.perf_counter()
    count = sum(
        len(indices)
        for indices, _ in decode_images(refs, SIDE, "shortest", {}, DecodeMethod(**how))
    )
    assert count == len(refs)
    return count / (time.perf_counter() - begin)


def to_cache(refs: list[FileImage], options: DecodeOptions, folder: Path, gpu: Any = None) -> float:
    """Images per second of filling the cache on disk, until all rows are synced."""
    cache = RowCache(folder / "cache", "images", "benchmark", (SIDE, SIDE, 3), np.uint8)
    keys = [row_key(str(ref)) for ref in refs]

    def decode(wanted: list[int], failed: dict[int, str], writer: RowWriter) -> Computed:
        chosen = [refs[item] for item in wanted]
        return decode_to_rows(chosen, SIDE, "shortest", failed, writer, options, gpu=gpu)

    try:
        begin = time.perf_counter()
        cache.fill(keys, decode)
        seconds = time.perf_counter() - begin
        assert not cache.missing(keys)
    finally:
        shutil.rmtree(folder / "cache")
    return len(refs) / seconds


def loader(refs: list[FileImage], batch: int, workers: int, on_gpu: bool) -> dict[str, float]:
    """Seconds to the first batch, and images per second over two epochs with that wait."""
    texts = [(caption(number),) for number in range(len(refs))]
    tokens = tokenize_captions(texts, make_tokenizer("char", [t[0] for t in texts]), 77)
    plan = BatchPlan(len(refs), min(batch, len(refs)), 0)
    images = LazyImages(refs, SIDE, on_gpu=on_gpu)
    data = TrainingSet(images, tokens, plan, Augmentation(crop_min=0.6, flip=0.5))
    facts = read_machine_info()
    kind = "cuda" if facts.cuda else "cpu"
    rule = rules(kind, facts)
    device = Device(kind, facts)
    steps = 2 * plan.steps_per_epoch
    begin = time.perf_counter()
    feed = batches(data, 0, steps, workers, rule.worker_start, rule.pin_memory)
    next(feed)
    first = time.perf_counter() - begin
    count = 1 + sum(1 for _ in feed)
    assert count == steps
    device.synchronize()
    return {
        "first_batch_seconds": first,
        "images_per_second": steps * plan.batch / (time.perf_counter() - begin),
    }


def difference(refs: list[FileImage], gpu: Any) -> dict[str, float]:
    """How far the squares of nvJPEG are from those of the CPU, in levels of 255."""
    own = np.concatenate(
        [p for _, p in decode_images(refs, SIDE, "shortest", {}, DecodeMethod(gpu=gpu))]
    )
    cpu = np.concatenate([p for _, p in decode_images(refs, SIDE, "shortest", {}, DecodeMethod(4))])
    levels = np.abs(own.astype(np.int16) - cpu)
    shares = {f"above {limit}": float((levels > limit).mean()) for limit in (1, 4, 16)}
    return {"mean": float(levels.mean()), "max": float(levels.max()), **shares}


def color_differences(files: Sequence[Path]) -> list[dict[str, float]]:
    """How far images whose colors are repeated, as by nvJPEG, are from those of m1clip on a CPU.

    In levels of 255, after scaling down by each reduction.
    """
    import simplejpeg

    rows = []
    for reduction in REDUCTIONS:
        levels = []
        for file in files:
            smooth, repeated = (
                Image.fromarray(simplejpeg.decode_jpeg(file.read_bytes(), fastupsample=is_fast))
                for is_fast in (False, True)
            )
            size = round(smooth.width / reduction), round(smooth.height / reduction)
            pixels = [
                np.asarray(image.resize(size, Image.Resampling.BICUBIC), np.int16)
                for image in (smooth, repeated)
            ]
            levels.append(np.abs(pixels[0] - pixels[1]).ravel())
        difference = np.concatenate(levels)
        shares = {f"above {limit}": float((difference > limit).mean()) for limit in (1, 4)}
        rows.append({"reduction": reduction, "mean": float(difference.mean()), **shares})
    return rows


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--images", type=int, default=3000)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=1024)
    parser.add_argument("--workers", type=int, default=usable_cpus())
    parser.add_argument(
        "--photos", type=Path, help="folder of the set; made there if it is missing"
    )
    parser.add_argument(
        "--colors", action="store_true", help="only the difference by the interpolation of colors"
    )
    parser.add_argument("--few", action="store_true", help="only what the product does")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    result: dict[str, Any] = {"machine": machine(), "options": vars(options) | {"json": None}}
    result["options"]["photos"] = None
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        files = write_set(options.photos or folder / "photos", options.images)
        if options.colors:
            for row in color_differences(files[:COLOR_FILES]):
                print(
                    f"  scaled down {row['reduction']:.2f} times: {row['mean']:.2f} levels,"
                    f" {row['above 1']:.1%} of the values by more than one"
                )
            return
        refs = [FileImage(str(path)) for path in files]
        some = refs[: max(500, len(refs) // 8)]  # of what is slow
        cpus, gpu = usable_cpus(), gpu_decoder()
        with_jpeg = image_module._simplejpeg() is not None

        def without_simplejpeg(work: Callable[[], float]) -> float:
            """As if it was not installed, in processes too: they get this process's path."""
            (folder / "simplejpeg.py").write_text("raise ImportError('not used here')")
            sys.path.insert(0, str(folder))
            sys.modules.pop("simplejpeg", None)
            image_module._simplejpeg.cache_clear()
            try:
                return work()
            finally:
                sys.path.remove(str(folder))
                image_module._simplejpeg.cache_clear()

        name = "simplejpeg" if with_jpeg else "Pillow"
        cpu_options = DecodeOptions(decode_threads(), 0, cpus)
        work: dict[str, Callable[[], float]] = {}
        if not options.few:
            work["Pillow, 1 thread"] = lambda: without_simplejpeg(lambda: through(some, threads=1))
            work[f"Pillow, {decode_threads()} threads, as before"] = lambda: without_simplejpeg(
                lambda: through(some, threads=decode_threads())
            )
            work[f"{name}, 1 thread"] = lambda: through(some, threads=1)
            work[f"{name}, {cpus} threads"] = lambda: through(some, threads=cpus)
            work[f"Pillow, {cpus} processes"] = lambda: without_simplejpeg(
                lambda: through(refs, processes=cpus)
            )
            work[f"{name}, {cpus} processes, to the caller"] = lambda: through(refs, processes=cpus)
        work[f"{name}, {cpus} processes, to the cache"] = lambda: to_cache(
            refs, cpu_options, folder
        )
        if gpu is not None:
            work["nvJPEG, to the caller"] = lambda: through(refs, gpu=gpu, processes=cpus)
            work["nvJPEG, to the cache"] = lambda: to_cache(refs, cpu_options, folder, gpu)
            result["difference of nvJPEG"] = difference(some[:500], gpu)
        rates: dict[str, list[float]] = {key: [] for key in work}
        for _ in range(options.rounds):
            for key, measure in work.items():
                rates[key].append(measure())
        result["images_per_second"] = {key: figures(values) for key, values in rates.items()}
        result["batches"] = {
            "GPU" if on_gpu else f"{options.workers} processes": loader(
                refs, options.batch_size, options.workers, on_gpu
            )
            for on_gpu in ([False] if gpu is None else [False, True])
        }
    command = f"python benchmarks/decoding.py --images {options.images} --rounds {options.rounds}"
    result["rows"] = [
        {"what": f"decode 500 x 375 JPEG to 224 px: {key}",
         "figure": f"{spread(values, ',.0f')} images/s", "n": str(options.rounds), "command": command}
        for key, values in result["images_per_second"].items()
    ]  # fmt: skip
    for row in result["rows"]:
        print(f"  {row['what']}: {row['figure']}")
    for decoder, b in result["batches"].items():
        print(f"  batches of {options.batch_size} without a cache, decoded by {decoder}: first after "
              f"{b['first_batch_seconds']:.2f} s, {b['images_per_second']:,.0f} images/s over two epochs")  # fmt: skip
    if "difference of nvJPEG" in result:
        print(f"  difference of nvJPEG from libjpeg-turbo: {result['difference of nvJPEG']}")
    if options.json:
        write(options.json, result)


if __name__ == "__main__":
    main()
