"""How long does an exact search take? `m1clip.search` on memory-mapped float16, numpy on float32 in memory, in turn.

    python benchmarks/search.py --json docs/results/search.json

Every result of ours is compared with brute force in float64.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from m1clip.formatting import duration, table
from m1clip.search.query import mapped, nearest

DIM, K = 256, 20


def numpy_search(vectors: np.ndarray, query: np.ndarray) -> np.ndarray:
    """The K nearest of float32 vectors in memory."""
    scores = vectors @ query
    best = np.argpartition(scores, -K)[-K:]
    return best[np.argsort(-scores[best])]


def measure(rows: int, rounds: int, folder: Path) -> dict[str, Any]:
    """Seconds of each side for some random unit vectors."""
    rng = np.random.default_rng(rows)
    vectors = rng.standard_normal((rows, DIM), np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    path = folder / "vectors.f16"
    vectors.astype(np.float16).tofile(path)
    ours = mapped(path, DIM)
    vectors = ours.astype(np.float32)
    sides: dict[str, Callable[[np.ndarray], np.ndarray]] = {
        "m1clip": lambda query: nearest(ours, query, K)[0],
        "numpy float32": lambda query: numpy_search(vectors, query),
    }
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    exact = 0
    for number in range(rounds + 2):
        query = vectors[rng.integers(rows)] + rng.standard_normal(DIM, np.float32) / 10
        query /= np.linalg.norm(query)
        for name, search in sides.items():
            start = time.perf_counter()
            found = search(query)
            seconds[name] += [time.perf_counter() - start] if number >= 2 else []
            if name == "m1clip":
                parts = [
                    ours[at : at + 65536].astype(np.float64) @ query.astype(np.float64) for at in range(0, rows, 65536)
                ]
                exact += found.tolist() == np.argsort(-np.concatenate(parts), kind="stable")[:K].tolist()
    found = {name: [statistics.median(each), min(each), max(each)] for name, each in seconds.items()}
    return {"rows": rows, "rounds": rounds, "exact": exact, "queries": rounds + 2, "seconds": found}


def main() -> None:
    """Measure both sizes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(os.cpu_count() or 1)
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        results = [measure(rows, options.rounds, Path(folder)) for rows in (100_000, 1_000_000)]
    cells = [
        (f"{each['rows']:,} x {DIM}", name, *map(duration, values), f"{each['exact']} of {each['queries']}")
        for each in results
        for name, values in each["seconds"].items()
    ]
    print(table(("vectors", "search", "median", "min", "max", "exact (m1clip)"), cells))
    if options.json:
        record = {"results": results, "cpus": os.cpu_count(), "machine": platform.processor(), "load": load}
        options.json.write_text(json.dumps({**record, "torch": torch.__version__}, indent=2) + "\n")


if __name__ == "__main__":
    main()
