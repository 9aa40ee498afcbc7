"""The probability that an image matches a text, from how unusual its score is for this library and for this image.

Two standard scores: of the score among the library's images for this text, and among unrelated captions for this image.
Their weights were fitted by benchmarks/search_cutoff.py on the validation split of Flickr8k, where half of the captions
have their image removed: a result is right if it is the image that the caption was written for.
"""

from __future__ import annotations

import numpy as np

SUBJECTS = (
    *(
        "a dog",
        "two cats",
        "a man in a suit",
        "a woman with a hat",
        "a group of children",
        "a baby",
        "a horse",
        "a bird",
    ),
    *("a red car", "a bicycle", "a train", "an airplane", "a sailing boat", "a plate of food", "a birthday cake"),
    *("a cup of coffee", "a bunch of flowers", "an old building", "a bridge", "a computer", "a page of text", "a map"),
    *("a football player", "a skier", "a swimmer", "a guitar player", "a market stall", "a mountain", "a waterfall"),
    *("a sleeping person", "an empty chair", "a crowd"),
)
PLACES = (
    *(
        "in a kitchen",
        "on a beach",
        "in the snow",
        "on a busy street",
        "in a forest",
        "at night",
        "in front of a house",
    ),
    *("on a table", "in a stadium", "under water", "in a living room", "at a wedding", "in the desert", "in the rain"),
    *("seen from above", "in black and white"),
)
CAPTIONS = tuple(f"{subject} {place}" for subject in SUBJECTS for place in PLACES)  # 512 unrelated captions

WEIGHTS = (-3.03, 2.0, 0.047)  # constant, score among the images, score among the captions
LARGEST = 4.0  # standard scores above it are not more often right
CUTOFF = 0.07  # results below it are not listed: the best F1 on validation

Moments = tuple[np.ndarray, np.ndarray]  # (dim,) mean and (dim, dim) covariance of the library's vectors


def standard_scores(
    scores: np.ndarray, query: np.ndarray, vectors: np.ndarray, moments: Moments, captions: np.ndarray
) -> np.ndarray:
    """(n, 3): 1, and the standard scores of n images with `vectors` (n, dim) for a query."""
    mean, covariance = moments
    among_images = (scores - query @ mean) / max(float(np.sqrt(query @ covariance @ query)), 1e-6)
    among_images = np.minimum(among_images, LARGEST)
    unrelated = vectors @ captions.T  # (n, captions)
    among_captions = (scores - unrelated.mean(axis=1)) / np.maximum(unrelated.std(axis=1), 1e-6)
    return np.stack([np.ones(len(scores)), among_images, among_captions], axis=1)


def probabilities(standard: np.ndarray, library: int, weights: np.ndarray | tuple[float, ...] = WEIGHTS) -> np.ndarray:
    """(n,) probability that each image matches; a priori, that of one in the `library` images."""
    return 1 / (1 + np.exp(-(standard @ np.asarray(weights) - np.log(max(library, 1)))))


def fit_weights(standard: np.ndarray, match: np.ndarray, library: int, counts: np.ndarray) -> np.ndarray:
    """(3,) weights of the most likely logistic regression, by Newton's method; `counts` weighs the rows."""
    weights = np.zeros(standard.shape[1])
    weights[0] = np.log(library * (counts * match).sum() / counts.sum())
    for _ in range(25):
        p = probabilities(standard, library, weights)
        hessian = (standard * (counts * p * (1 - p))[:, None]).T @ standard
        weights -= np.linalg.solve(hessian + 1e-6 * np.eye(len(weights)), standard.T @ (counts * (p - match)))
    return weights
