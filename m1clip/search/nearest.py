"""Exact search over float16 vectors."""

import sys
from functools import cache
from typing import Any

import numpy as np

LONGEST = 1.01  # of a unit vector rounded to float16
BLOCK = 16384  # rows converted to float32 at a time
SAMPLE = 4096  # rows from which a threshold is estimated
# An ONNX graph of two nodes, Cast and MatMul: s = float32(h) @ q. The test of it has its source.
GRAPH = (
    b'\x08\x07:P\n\x17\n\x01h\x12\x01f"\x04Cast*\t\n\x02to\x18\x01\xa0\x01\x02\n\x11\n\x01f\n\x01q\x12\x01s"\x06MatMul'
    b"\x12\x01sZ\t\n\x01h\x12\x04\n\x02\x08\nZ\t\n\x01q\x12\x04\n\x02\x08\x01b\t\n\x01s\x12\x04\n\x02\x08\x01B\x04\n\x00\x10\r"
)


def nearest(
    vectors: np.ndarray, query: np.ndarray, count: int, rows: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """(rows, scores) with the largest products with a query in float64, the largest first; ties by row.

    A fast pass computes every product up to a known error e. The row with the count-th largest fast score c has a true
    score of at least c - e, so each of the true nearest has a fast score of at least c - 2 e; these rows are rescored.
    Raises FloatingPointError for products that are not finite.
    """
    count = min(count, len(vectors) if rows is None else len(rows))
    if count == 0:
        return np.zeros(0, np.int64), np.zeros(0)
    for scorer in (_fast_scores, _exact_scores):
        fast, error = scorer(vectors, query)
        fast = fast if rows is None else fast[rows]
        if not np.isfinite(fast).all():
            raise FloatingPointError("products that are not finite")
        places = np.flatnonzero(fast >= _kth_largest(fast, count) - 2 * error)
        chosen = places if rows is None else rows[places]
        exact = vectors[chosen].astype(np.float64) @ query.astype(np.float64)
        if np.abs(exact - fast[places]).max() <= error:  # False where torch accumulates in float16
            break
    order = np.lexsort((chosen, -exact))[:count]
    return chosen[order], exact[order]


def _fast_scores(vectors: np.ndarray, query: np.ndarray) -> tuple[np.ndarray, float]:
    """(n,) products, and a bound of their error, by the library that runs the model: importing another takes longer."""
    length, rounding = LONGEST * float(np.linalg.norm(query)), len(query) * 2**-23
    if torch := sys.modules.get("torch"):  # reads float16 and accumulates in float32; the result is float16
        half = query.astype(np.float16)
        scores = torch.mv(torch.from_numpy(vectors), torch.from_numpy(half)).float().numpy()
        lost = LONGEST * float(np.linalg.norm(query.astype(np.float64) - half))
        return scores, lost + length * (2**-11 + rounding)
    if "onnxruntime" in sys.modules:
        single = query.astype(np.float32)[:, None]
        blocks = [vectors[at : at + BLOCK] for at in range(0, len(vectors), BLOCK)]
        parts = [_session().run(None, {"h": block, "q": single})[0] for block in blocks]
        return np.concatenate(parts)[:, 0], length * rounding
    return _exact_scores(vectors, query)


def _exact_scores(vectors: np.ndarray, query: np.ndarray) -> tuple[np.ndarray, float]:
    blocks = [vectors[at : at + BLOCK] for at in range(0, len(vectors), BLOCK)]
    scores = np.concatenate([block.astype(np.float64) @ query.astype(np.float64) for block in blocks])
    return scores, 1e-12 * LONGEST * float(np.linalg.norm(query))


@cache
def _session() -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return onnxruntime.InferenceSession(GRAPH, options, providers=["CPUExecutionProvider"])


def _kth_largest(values: np.ndarray, k: int) -> float:
    step = max(1, len(values) // SAMPLE)
    sample = values[::step]
    place = min(len(sample), 2 * k // step + 16)
    guess = np.partition(sample, -place)[-place]
    top = values[values >= guess]  # comparing is faster than a partition of all
    values = top if len(top) >= k else values
    return float(np.partition(values, -k)[-k])
