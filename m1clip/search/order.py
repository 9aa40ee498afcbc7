"""The order in which labels help most: photos that stand for many others, and of which the model is
unsure.

Each photo is weighted by how unsure the model is, and photos are chosen one by one so that every
photo of the library is similar to one with a label (facility location). Near-duplicates of a chosen
photo add nothing: they are skipped. A large library is represented by a random sample, which
bounds time and memory.
"""

from __future__ import annotations

import numpy as np

ORDER_SAMPLE = 4096  # photos among which the next ones are chosen: 64 MiB of similarities
COVERED_BLOCK = 1024  # labelled photos compared with the sample at a time
NEAR_DUPLICATE = 0.95  # cosine of two photos of one scene, around the mean of the library
DUPLICATE_GAIN = -np.inf


def uncertainty(photos: np.ndarray, words: np.ndarray) -> np.ndarray:
    """(n,) from 0 to 1: the entropy of the words that a model gives each photo, as its rank in the
    library.

    photos (n, d) and words (m, d) are unit vectors. Scores are compared with those of the same word
    for other photos: some words are near to every photo.
    """
    scores = photos @ words.T
    scores -= scores.mean(axis=0)
    scores /= max(float(scores.std()), 1e-6)
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    weights /= weights.sum(axis=1, keepdims=True)
    entropy = -(weights * np.log(np.maximum(weights, 1e-12))).sum(axis=1)
    return np.argsort(np.argsort(entropy, kind="stable"), kind="stable") / max(1, len(entropy) - 1)


class LabelOrder:
    """Chooses the next photos of a sample.

    `add` tells it what has a label, was skipped, or is shown already.
    """

    def __init__(self, photos: np.ndarray, weights: np.ndarray | None = None) -> None:
        self._mean = photos.mean(axis=0)
        self._photos = photos
        self._centered = around_mean(photos, self._mean)
        self._similarity = np.maximum(self._centered @ self._centered.T, 0)  # (n, n)
        count = len(photos)
        self._weights = (
            np.ones(count, np.float32) if weights is None else weights.astype(np.float32)
        )
        self._covered = np.zeros(count, np.float32)  # similarity to the nearest photo with a label
        # Upper bounds: what a photo adds only shrinks while others are chosen.
        self._gains = self._weights @ self._similarity

    def add(self, photos: np.ndarray) -> None:
        """Count photos (m, d) as covered, also those that are not in the sample."""
        for start in range(0, len(photos), COVERED_BLOCK):
            part = photos[start : start + COVERED_BLOCK].astype(np.float32)
            nearest = (self._centered @ around_mean(part, self._mean).T).max(axis=1)
            np.maximum(self._covered, nearest, out=self._covered)
            self._gains[nearest >= NEAR_DUPLICATE] = DUPLICATE_GAIN

    def next(self) -> int | None:
        """The place of the next photo in the sample, which then counts as covered.

        None if no photo is left.
        """
        while True:
            photo = int(self._gains.argmax())
            bound = float(self._gains[photo])
            if bound == DUPLICATE_GAIN:
                return None
            gain = self._gain(photo)
            self._gains[photo] = gain
            # The bounds of the others hold, so that most of them are never computed again.
            if gain >= bound or gain >= float(self._gains.max()):
                self.add(self._photos[photo : photo + 1])
                self._gains[photo] = DUPLICATE_GAIN
                return photo

    def _gain(self, photo: int) -> float:
        """How much more similar the photos are to a labelled one with this one."""
        added = np.maximum(self._similarity[photo] - self._covered, 0)
        return float(added @ self._weights)


def around_mean(photos: np.ndarray, mean: np.ndarray) -> np.ndarray:
    """(n, dim) unit vectors around the mean of the library: all photos share a large component."""
    centered = photos - mean
    lengths = np.linalg.norm(centered, axis=1, keepdims=True)
    return np.asarray(centered / np.maximum(lengths, 1e-6), np.float32)
