"""What CLIP ViT-B/32 costs on 10 million to a billion pairs, from measured rates; and the order of a billion samples.

    python benchmarks/scale_arithmetic.py                     # the tables of docs/lab-scale.md
    python benchmarks/scale_arithmetic.py --simulate 1e9      # also the shuffle and the shards of an epoch

Measured: the step (docs/results/cuda_step.json), decoding (--decode, --nvjpeg), bytes of a file.
Assumed, and printed: cores and network of a node. Nothing here was run on more than one GPU.
"""

from __future__ import annotations

import argparse
import itertools
import json
import resource
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from sides import RESULTS, machine, write

from m1clip.data.randomness import windowed_order
from m1clip.formatting import number, size
from m1clip.model.clip import count_parameters
from m1clip.model.presets import PRESETS

MODEL = "ViT-B-32"
GPUS_PER_NODE = 8
SAMPLES = (10_000_000, 100_000_000, 1_000_000_000)
GPUS = (1, 8, 64)
BLOCK_SAMPLES, SHARD_SAMPLES = 1024, 10_000
INDEX_BYTES = 39.1  # of a sample, measured by benchmarks/streaming.py


@dataclass(frozen=True)
class Rates:
    """Per GPU, unless stated otherwise."""

    step: float  # images per second, without waiting for data
    batch: int
    core: float  # images per second that one core decodes
    cores: int
    nvjpeg: float  # images per second that the GPU decodes, if it does nothing else
    file_bytes: float
    storage: float  # bytes per second that a node reads
    link: float  # bytes per second between the GPUs of a node
    network: float  # bytes per second of each GPU to other nodes
    on_gpu: bool = False  # nvJPEG instead of the cores


def step_seconds(rates: Rates, gpus: int) -> dict[str, float]:
    """Seconds of a step by what takes them, if nothing overlapped.

    The batch grows with the GPUs.
    """
    nodes = max(1, gpus // GPUS_PER_NODE)
    own = min(gpus, GPUS_PER_NODE)
    shape = PRESETS[MODEL]
    gradients = 4 * count_parameters(shape)
    features = 4 * 2 * rates.batch * shape.embed_dim  # of one GPU, both towers; and their gradients
    bandwidth = rates.link if nodes == 1 else rates.network
    sent = 2 * (gpus - 1) / gpus * gradients + 2 * (gpus - 1) * features
    return {
        "compute": rates.batch / rates.step,
        "decoding": rates.batch / (rates.nvjpeg if rates.on_gpu else rates.core * rates.cores),
        "reading": own * rates.batch * rates.file_bytes / rates.storage,
        "network": sent / bandwidth if gpus > 1 else 0.0,
    }


def throughput(rates: Rates, gpus: int) -> tuple[float, str]:
    """(images per second of all GPUs, the bottleneck): parts overlap, except for nvJPEG, which takes from the GPU."""
    parts = step_seconds(rates, gpus)
    if rates.on_gpu:
        parts = {**parts, "compute": parts["compute"] + parts["decoding"], "decoding": 0.0}
    bottleneck = max(parts, key=lambda name: parts[name])
    return gpus * rates.batch / parts[bottleneck], bottleneck


def simulate(samples: int, batch: int) -> dict[str, Any]:
    """The order of the first batches of an epoch, the shards that they read, and opening the indexes of all shards."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    begin = time.perf_counter()
    of_shard = np.diff([*range(0, SHARD_SAMPLES, BLOCK_SAMPLES), SHARD_SAMPLES])
    order_blocks = np.tile(of_shard, samples // SHARD_SAMPLES)
    first = windowed_order(0, 0, order_blocks, 0, batch)
    first_seconds = time.perf_counter() - begin
    begin = time.perf_counter()
    tested = 8
    spread = []
    for position in np.linspace(batch, samples - batch, tested).astype(np.int64).tolist():
        chosen = windowed_order(0, 0, order_blocks, position, position + batch)
        assert len(np.unique(chosen)) == batch
        spread.append(len(np.unique(chosen // SHARD_SAMPLES)))
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return {
        "samples": samples,
        "shards": samples // SHARD_SAMPLES,
        "seconds to the first batch's order": round(first_seconds, 3),
        "seconds for the order of another batch": round((time.perf_counter() - begin) / tested, 4),
        "memory for the order": used * 1024,
        "shards in a batch (median)": int(np.median(spread)),
        "first batch is without repeats": len(np.unique(first)) == batch,
        "bytes of index on disk": INDEX_BYTES * samples,
        "seconds to open the indexes": open_indexes(samples // SHARD_SAMPLES),
    }


def open_indexes(shards: int) -> float:
    """Seconds to open and close as many small files as there are shards, from a sample of 2,000."""
    some = min(shards, 2000)
    with tempfile.TemporaryDirectory() as temporary:
        paths = [Path(temporary) / f"{shard:06}.index" for shard in range(some)]
        for path in paths:
            path.write_bytes(bytes(64))
        begin = time.perf_counter()
        for path in paths:
            with path.open("rb") as file:
                file.read(64)
        return round((time.perf_counter() - begin) / some * shards, 2)


def measured_step(default: float) -> float:
    """Images per second of the compiled step on the GPU, from the stored result."""
    path = RESULTS / "cuda_step.json"
    try:
        lines = json.loads(path.read_text())["models"][MODEL]["lines"]
    except (OSError, KeyError):
        return default
    own = [line for line in lines if line.get("side") == "m1clip" and "images_per_second" in line]
    return max((line["images_per_second"] for line in own), default=default)


def main() -> None:
    """Print the tables, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batch", type=int, default=1024, help="of one GPU")
    parser.add_argument("--step", type=float, default=measured_step(11_310))
    parser.add_argument(
        "--decode", type=float, default=2961 / 16, help="images/s of one core, 500 x 375 JPEG"
    )
    parser.add_argument("--nvjpeg", type=float, default=12_419, help="images/s of one GPU")
    parser.add_argument("--file-bytes", type=float, default=52_000)
    parser.add_argument("--cores", type=int, default=16, help="of each GPU")
    parser.add_argument("--storage", type=float, default=5e9, help="bytes/s that a node reads")
    parser.add_argument("--link", type=float, default=300e9, help="bytes/s between GPUs of a node")
    parser.add_argument(
        "--network", type=float, default=40e9, help="bytes/s of a GPU to other nodes"
    )
    parser.add_argument("--passes", type=float, default=1, help="over the data")
    parser.add_argument("--simulate", type=float, default=0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    result: dict[str, Any] = {
        "machine": machine(),
        "options": {**vars(options), "json": None},
        "table": [],
    }
    print(
        f"{MODEL}: {options.step:,.0f} images/s of a GPU in steps of {options.batch}, "
        f"{options.decode:,.0f} decoded by a core, {options.nvjpeg:,.0f} by nvJPEG; "
        f"assumed: {options.cores} cores for each GPU, {size(options.storage)}/s from storage, "
        f"{size(options.link)}/s between GPUs, {size(options.network)}/s between nodes"
    )
    parts_shown = "ms: compute, decoding, reading, network"
    print(f"| pairs | GPUs | decoder | images/s | hours | GPU hours | bottleneck | {parts_shown} |")
    print("|---|---|---|---|---|---|---|---|")
    for samples, gpus, on_gpu in itertools.product(SAMPLES, GPUS, (False, True)):
        rates = Rates(
            step=options.step,
            batch=options.batch,
            core=options.decode,
            cores=options.cores,
            nvjpeg=options.nvjpeg,
            file_bytes=options.file_bytes,
            storage=options.storage,
            link=options.link,
            network=options.network,
            on_gpu=on_gpu,
        )
        speed, bottleneck = throughput(rates, gpus)
        hours = options.passes * samples / speed / 3600
        parts = step_seconds(rates, gpus)
        decoder = "nvJPEG" if on_gpu else "CPU"
        row = {
            "samples": samples,
            "gpus": gpus,
            "decoder": decoder,
            "images_per_second": speed,
            "hours": hours,
            "bottleneck": bottleneck,
            "parts": parts,
        }
        result["table"].append(row)
        shown = ", ".join(f"{1e3 * value:.0f}" for value in parts.values())
        cells = [f"{samples // 10**6:,}M", f"{gpus}", decoder, f"{speed:,.0f}", number(hours)]
        cells += [number(hours * gpus), bottleneck, shown]
        print(f"| {' | '.join(cells)} |")
    if options.simulate:
        result["order"] = simulate(int(options.simulate), 32_768)
        print(json.dumps(result["order"], indent=1))
    if options.json:
        write(options.json, result)


if __name__ == "__main__":
    main()
