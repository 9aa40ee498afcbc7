"""Streamed shards: samples are written, indexed and read once; then the order of 10 million samples is simulated.

    python benchmarks/streaming.py --samples 1000000 --folder /tmp/streaming

Needs about 3 kB of disk per sample; the folder is deleted at the end.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import shutil
import tarfile
import time
from hashlib import blake2b
from pathlib import Path

import numpy as np
import psutil
from PIL import Image

from m1clip.config import DataConfig
from m1clip.data.augment import Augmentation
from m1clip.data.decoding import DecodeOptions
from m1clip.data.images import Preprocess
from m1clip.data.loader import BatchPlan, TrainingSet, batches
from m1clip.data.prepare import open_data, stream_split
from m1clip.data.randomness import windowed_order
from m1clip.data.sources.base import Options
from m1clip.data.sources.shards import list_shards
from m1clip.data.sources.stream import SHUFFLE_BLOCK, ShardSamples, StreamedSource, open_shards
from m1clip.formatting import size
from m1clip.text.bpe import BpeTokenizer

PER_SHARD, BATCH, SIDE = 1_000, 1_000, 32


def caption(number: int) -> str:
    """Each sample has its own."""
    return f"synthetic image number {number}"


def write(folder: Path, samples: int) -> None:
    """train-000000.tar, ... and one shard of val."""
    draw, encoded = np.random.default_rng(0), list[bytes]()
    for _ in range(256):
        stream = io.BytesIO()
        small = Image.fromarray(draw.integers(0, 256, (6, 6, 3), np.uint8))
        small.resize((SIDE, SIDE), Image.Resampling.BICUBIC).save(stream, "JPEG", quality=90)
        encoded.append(stream.getvalue())
    folder.mkdir(parents=True)
    for start in range(0, samples, PER_SHARD):
        write_shard(
            folder / f"train-{start // PER_SHARD:06d}.tar", range(start, start + PER_SHARD), encoded
        )
    write_shard(folder / "val-000000.tar", range(samples, samples + 100), encoded)


def write_shard(path: Path, numbers: range, encoded: list[bytes]) -> None:
    """Samples of a jpg and a txt."""
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
        for number in numbers:
            for name, data in (
                (f"{number:09d}.jpg", encoded[number % 256]),
                (f"{number:09d}.txt", caption(number).encode()),
            ):
                entry = tarfile.TarInfo(name)
                entry.size = len(data)
                tar.addfile(entry, io.BytesIO(data))


def memory() -> int:
    """Bytes that this process and its workers have for themselves."""
    processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
    return sum(process.memory_full_info().uss for process in processes)


def read_once(folder: Path, workers: int) -> dict[str, object]:
    """An epoch of batches, each sample with its own caption."""
    start = time.perf_counter()
    config = DataConfig(source=(str(folder),), cache="stream")
    source = open_data(config, SIDE, 0)
    assert isinstance(source, StreamedSource)
    plan = DecodeOptions(2, 2**33)
    split = stream_split(source, config, BpeTokenizer(), 32, Preprocess(image_size=SIDE), 1.0, plan)
    samples, captions = split.samples, split.lazy_captions
    assert isinstance(samples, ShardSamples)
    assert captions is not None
    data = TrainingSet(
        split.images,
        captions,
        BatchPlan(len(samples), BATCH, 0, blocks=samples.blocks()),
        Augmentation(),
    )
    steps, counts, used = (
        data.plan.steps_per_epoch,
        np.zeros(len(samples), np.uint8),
        dict[str, str](),
    )
    feed = batches(data, 0, steps, workers, "fork", False)
    first = time.perf_counter()
    for step, batch in enumerate(feed):
        if step == 0:
            started = time.perf_counter() - start
            first = time.perf_counter()
        numbers = batch.sample_ids.numpy()
        counts[numbers] += 1
        expected = [
            blake2b(caption(number).encode(), digest_size=8).digest() for number in numbers.tolist()
        ]
        ids = np.frombuffer(b"".join(expected), "<i8")
        assert (batch.caption_ids.numpy() == ids[batch.image_index.numpy()]).all(), (
            "a caption of another image"
        )
        if (step + 1) * 10 % steps < 10:
            used[f"{(step + 1) / steps:.0%}"] = size(memory())
            print(f"  {step + 1} of {steps} batches, {size(memory())}", flush=True)
    seconds = time.perf_counter() - first
    return {
        "samples": len(samples),
        "read exactly once": int((counts == 1).sum()),
        "seconds to the first batch": round(started, 1),
        "samples per second": round((steps - 1) * BATCH / seconds),
        "memory after": used,
    }


def simulate(samples: int, per_shard: int = 10_000, batch: int = 32_768) -> dict[str, object]:
    """The order of an epoch, batch by batch."""
    counts = np.full(samples // per_shard, per_shard)
    blocks = np.concatenate(
        [np.diff([*range(0, count, SHUFFLE_BLOCK), count]) for count in counts.tolist()]
    )
    before, times_read, positions = (
        memory(),
        np.zeros(samples, np.uint8),
        np.zeros(samples, np.int32),
    )
    start, shards = time.perf_counter(), list[int]()
    for first in range(0, samples, batch):
        numbers = windowed_order(0, 0, blocks, first, min(first + batch, samples))
        times_read[numbers] += 1
        positions[numbers] = np.arange(first, first + len(numbers))
        shards.append(len(np.unique(numbers // per_shard)))
    seconds, used = (
        time.perf_counter() - start,
        memory() - before - times_read.nbytes - positions.nbytes,
    )
    apart = np.abs(np.diff(positions.astype(np.int64)))  # of two neighbours in a shard
    far = np.abs(positions.astype(np.int64) - np.arange(samples)).mean() / samples
    return {
        "samples": samples,
        "exactly once": int((times_read == 1).sum()),
        "seconds for all batches": round(seconds, 2),
        "memory for the order": size(max(used, 0)),
        "mean displacement (1/3 of an epoch is a full shuffle)": round(float(far), 3),
        "median distance of two neighbours in a shard": int(np.median(apart)),
        f"shards in a batch of {batch:,} (median)": int(np.median(shards)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--samples", type=int, default=1_000_000)
    parser.add_argument("--folder", type=Path, default=Path("/tmp/streaming"))
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    result: dict[str, object] = {"load": os.getloadavg()[0]}
    try:
        start = time.perf_counter()
        write(options.folder, options.samples)
        disk = sum(file.stat().st_size for file in options.folder.iterdir())
        print(
            f"wrote {options.samples:,} samples, {size(disk)}, in"
            f" {time.perf_counter() - start:.0f} s",
            flush=True,
        )
        start = time.perf_counter()
        shards, made = open_shards(list_shards(str(options.folder)), Options())
        print(f"indexed {made} shards in {time.perf_counter() - start:.0f} s", flush=True)
        start = time.perf_counter()
        open_shards(list_shards(str(options.folder)), Options())
        result["seconds to open the indexes"] = round(time.perf_counter() - start, 2)
        result["bytes of index per sample"] = round(
            sum(s.index.stat().st_size for s in shards) / options.samples, 1
        )
        result["read"] = read_once(options.folder, options.workers)
    finally:
        shutil.rmtree(options.folder, ignore_errors=True)
    result["order"] = simulate(10_000_000)
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
