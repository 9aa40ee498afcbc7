"""The probability that an image matches a text, from how far its score is above the mean score of the library.

The weights were fitted by benchmarks/search_cutoff.py on the validation split of Flickr8k: words and pairs of words as
queries, and an image matches if its captions mention them. Scores are divided by the spread of the library's vectors,
not by that of the query's scores: this spread is larger if the library has matching images, and would hide them.
"""

from __future__ import annotations

import numpy as np

WEIGHTS = (-4.41, 0.553)  # constant, height of the score
CUTOFF = 0.5  # results below it are not listed: most correct answers on validation, where the best is 0.52

Moments = tuple[np.ndarray, np.ndarray]  # (dim,) mean and (dim, dim) covariance of the library's vectors


def height(scores: np.ndarray, query: np.ndarray, moments: Moments) -> np.ndarray:
    """(n,) how far scores of a query are above their mean, in standard deviations of one dimension of the library."""
    mean, covariance = moments
    return np.asarray((scores - query @ mean) / max(float(np.sqrt(np.trace(covariance) / len(mean))), 1e-6))


def probabilities(heights: np.ndarray, weights: tuple[float, ...] = WEIGHTS) -> np.ndarray:
    """(n,) probability that each image matches."""
    return np.asarray(1 / (1 + np.exp(-weights[0] - weights[1] * heights)))
