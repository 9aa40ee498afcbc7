"""How long does an exact search take? m1clip on float16, in torch if it is loaded, else in numpy.

    python benchmarks/search.py --json docs/results/search.json

In turn with numpy on float32 in memory, and usearch on int8 in memory (not exact) if it is
installed. All sides use all cores, after two queries to warm up. Every result of ours is compared
with brute force in float64.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from m1clip.formatting import duration, table
from m1clip.search.nearest import nearest

DIM, K = 256, 20
IDLE_SECONDS = 0.2  # until the threads of the side before have stopped spinning, which would take a core from this one


def numpy_search(vectors: np.ndarray, query: np.ndarray) -> np.ndarray:
    """The K nearest of float32 vectors in memory."""
    scores = vectors @ query
    best = np.argpartition(scores, -K)[-K:]
    return best[np.argsort(-scores[best])]


def without_torch(vectors: np.ndarray, query: np.ndarray) -> np.ndarray:
    """As in a process that has an ONNX model and did not import torch."""
    hidden = sys.modules.pop("torch")
    try:
        return nearest(vectors, query, K)[0]
    finally:
        sys.modules["torch"] = hidden


def usearch_search(vectors: np.ndarray) -> Callable[[np.ndarray], np.ndarray]:
    """Exact search of usearch over int8, which rounds the vectors."""
    from usearch.index import MetricKind, search

    coarse = np.clip(np.round(vectors * 400), -127, 127).astype(np.int8)
    threads = os.cpu_count() or 1

    def run(query: np.ndarray) -> np.ndarray:
        rounded = np.clip(np.round(query * 400), -127, 127).astype(np.int8)
        return np.asarray(
            search(coarse, rounded, K, MetricKind.IP, exact=True, threads=threads).keys
        )

    return run


def measure(rows: int, rounds: int, folder: Path) -> dict[str, Any]:
    """Seconds of each side for some random unit vectors."""
    rng = np.random.default_rng(rows)
    vectors = rng.standard_normal((rows, DIM), np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    path = folder / "vectors.f16"
    vectors.astype(np.float16).tofile(path)
    ours = np.fromfile(path, np.float16).reshape(-1, DIM)  # `Index` reads them into memory, too
    vectors = ours.astype(np.float32)
    sides: dict[str, Callable[[np.ndarray], np.ndarray]] = {
        "m1clip, torch": lambda query: nearest(ours, query, K)[0],
        "m1clip, numpy": lambda query: without_torch(ours, query),
        "numpy float32": lambda query: numpy_search(vectors, query),
    }
    with contextlib.suppress(ImportError):
        sides["usearch int8"] = usearch_search(vectors)
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    exact = dict.fromkeys(sides, 0)
    for number in range(rounds + 2):
        query = vectors[rng.integers(rows)] + rng.standard_normal(DIM, np.float32) / 10
        query /= np.linalg.norm(query)
        rows_found = {}
        for name, search in sides.items():
            time.sleep(IDLE_SECONDS)
            start = time.perf_counter()
            rows_found[name] = search(query).tolist()
            seconds[name] += [time.perf_counter() - start] if number >= 2 else []
        blocks = (ours[at : at + 65536].astype(np.float64) for at in range(0, rows, 65536))
        true = np.concatenate([block @ query.astype(np.float64) for block in blocks])
        best = np.argpartition(true, -2 * K)[-2 * K :]
        best = best[np.lexsort((best, -true[best]))][:K].tolist()
        exact = {name: count + (rows_found[name] == best) for name, count in exact.items()}
    times = {
        name: [statistics.median(values), min(values), max(values)]
        for name, values in seconds.items()
    }
    return {"rows": rows, "rounds": rounds, "exact": exact, "queries": rounds + 2, "seconds": times}


def main() -> None:
    """Measure both sizes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(os.cpu_count() or 1)
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        results = [measure(rows, options.rounds, Path(folder)) for rows in (100_000, 1_000_000)]
    cells = [
        (
            f"{result['rows']:,} x {DIM}",
            name,
            *map(duration, values),
            f"{result['exact'][name]} of {result['queries']}",
        )
        for result in results
        for name, values in result["seconds"].items()
    ]
    print(table(("vectors", "search", "median", "min", "max", "equal to float64"), cells))
    if options.json:
        record = {
            "results": results,
            "cpus": os.cpu_count(),
            "machine": platform.processor(),
            "load": load,
        }
        options.json.write_text(
            json.dumps({**record, "torch": torch.__version__, "numpy": np.__version__}, indent=2)
            + "\n"
        )


if __name__ == "__main__":
    main()
