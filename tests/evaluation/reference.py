"""A second implementation, slow and plain: float64 numpy, one query at a time, by sorting."""

from __future__ import annotations

import numpy as np


def reference_ranks(image: np.ndarray, text: np.ndarray, owner: np.ndarray) -> tuple[list[int], list[int | None]]:
    """Ranks of the right image for each text, and of the best own caption for each image."""
    scores = np.round(text.astype(np.float64) @ image.astype(np.float64).T, 5)  # (texts, images)
    to_image = [_best_rank(row, {int(own)}) for row, own in zip(scores, owner, strict=True)]
    to_text: list[int | None] = []
    for number in range(len(image)):
        own = {int(t) for t in np.flatnonzero(owner == number)}
        to_text.append(_best_rank(scores[:, number], own) if own else None)
    return to_image, to_text


def _best_rank(scores: np.ndarray, right: set[int]) -> int:
    """Sort by falling score with the wrong before the right at a tie; then walk to the first right one.

    Own captions passed over do not count as wrong, and the first right one is met first anyway.
    """
    is_right = np.array([index in right for index in range(len(scores))])
    order = np.lexsort((is_right, -scores))
    for place, index in enumerate(order, start=1):
        if index in right:
            return place
    raise AssertionError("no right candidate")
