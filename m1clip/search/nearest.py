"""Exact search over float16 vectors."""

import sys

import numpy as np

MAX_LENGTH = 1.01  # of a unit vector rounded to float16
NEAREST_BLOCK = 4096  # rows converted at a time
SAMPLE = 4096  # rows from which a threshold is estimated
# All but the three bits of an exponent that float16 does not have.
HALF_BITS = np.int32(-0x70000001)
HALF_SCALE = np.float32(2.0**112)  # the exponent of float16 is lower by 112


def nearest(
    vectors: np.ndarray, query: np.ndarray, count: int, rows: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """(rows, scores) with the largest products with a query in float64, the largest first.

    Ties by row.

    A fast pass computes every product up to a known error e. The row with the count-th largest fast
    score c has a true score of at least c - e, so each of the true nearest has a fast score of at
    least c - 2 e; these rows are rescored. Raises FloatingPointError for products that are not
    finite.
    """
    count = min(count, len(vectors) if rows is None else len(rows))
    if count == 0:
        return np.zeros(0, np.int64), np.zeros(0)
    for scorer in (_fast_scores, _exact_scores):
        fast, error = scorer(vectors, query)
        fast = fast if rows is None else fast[rows]
        largest = np.abs(fast).max()
        if scorer is _fast_scores and not largest <= MAX_LENGTH * np.linalg.norm(query) + error:
            # Not finite, or not unit vectors, for which the bound of the error does not hold.
            continue
        if not np.isfinite(largest):
            raise FloatingPointError("products that are not finite")
        candidates = np.flatnonzero(fast >= _kth_largest(fast, count) - 2 * error)
        chosen = candidates if rows is None else rows[candidates]
        exact = vectors[chosen].astype(np.float64) @ query.astype(np.float64)
        # False where torch accumulates in float16.
        if np.abs(exact - fast[candidates]).max() <= error:
            break
    order = np.lexsort((chosen, -exact))[:count]
    return chosen[order], exact[order]


def _fast_scores(vectors: np.ndarray, query: np.ndarray) -> tuple[np.ndarray, float]:
    """(n,) products, and a bound of their error for unit vectors."""
    length = MAX_LENGTH * float(np.linalg.norm(query))
    rounding = len(query) * 2**-23
    # It runs the model; reads float16, adds up float32, and returns float16.
    if torch := sys.modules.get("torch"):
        half = query.astype(np.float16)
        scores = torch.mv(torch.from_numpy(vectors), torch.from_numpy(half)).float().numpy()
        lost = MAX_LENGTH * float(np.linalg.norm(query.astype(np.float64) - half))
        return scores, lost + length * (2**-11 + rounding)
    scores = np.empty(len(vectors), np.float32)
    scaled = query.astype(np.float32) * HALF_SCALE
    block = np.empty((NEAREST_BLOCK, len(query)), np.int32)
    for start in range(0, len(vectors), NEAREST_BLOCK):
        part = vectors[start : start + NEAREST_BLOCK]
        widened = _widen(part, block[: len(part)])
        # In one thread: those of a BLAS would wait for each other on a busy machine.
        np.einsum("nd,d->n", widened, scaled, out=scores[start : start + NEAREST_BLOCK])
    return scores, length * rounding


def _widen(halves: np.ndarray, out: np.ndarray) -> np.ndarray:
    """Return float16 divided by HALF_SCALE as float32, in the memory of `out` (int32), faster than
    `astype`.

    The bits of a number move to where float32 has its sign, exponent and mantissa. Infinity and NaN
    become large.
    """
    np.copyto(out, halves.view(np.int16))  # copies of the sign fill the bits on the left
    np.left_shift(out, 13, out=out)
    np.bitwise_and(out, HALF_BITS, out=out)
    return out.view(np.float32)


def _exact_scores(vectors: np.ndarray, query: np.ndarray) -> tuple[np.ndarray, float]:
    blocks = [
        vectors[start : start + NEAREST_BLOCK] for start in range(0, len(vectors), NEAREST_BLOCK)
    ]
    scores = np.concatenate(
        [block.astype(np.float64) @ query.astype(np.float64) for block in blocks]
    )
    return scores, 1e-12 * max(
        MAX_LENGTH * float(np.linalg.norm(query)), float(np.abs(scores).max())
    )


def _kth_largest(values: np.ndarray, k: int) -> float:
    step = max(1, len(values) // SAMPLE)
    sample = values[::step]
    rank = min(len(sample), 2 * k // step + 16)
    guess = np.partition(sample, -rank)[-rank]
    top = values[values >= guess]  # comparing is faster than a partition of all
    values = top if len(top) >= k else values
    return float(np.partition(values, -k)[-k])
