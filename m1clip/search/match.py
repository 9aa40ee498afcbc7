"""How likely an image matches a text: from its score, and those of everyday words."""

from pathlib import Path

import numpy as np

from m1clip.config import load_config
from m1clip.data.split_record import run_of
from m1clip.errors import UserError
from m1clip.model.named import GENERAL, boxed_name, exported_from

# The probability of a match: a logistic function of its z-score (constant, slope). Fitted with the
# model general on the validation splits of Flickr8k and COCO by benchmarks/search_cutoff.py. The
# right results of other models have other z-scores (`has_probabilities`).
MATCH_WEIGHTS = (-4.43, 0.84)
CUTOFF = 0.5  # results below it do not count as matches
# Results above it are listed if there is no match: on validation, half of the top ones are correct.
UNSURE = 0.2
LAST_MODEL = "model"  # folder of a run with the model of its last step
MAX_ANCESTORS = 8  # of a model: each was adapted from another, or exported

# (dim,) mean and (dim, dim) covariance of the library's vectors.
LibraryStats = tuple[np.ndarray, np.ndarray]


def zscore(scores: np.ndarray, reference: np.ndarray, library_stats: LibraryStats) -> np.ndarray:
    """(n,) how far scores are above those of everyday words, in standard deviations of these.

    `reference` has the vectors of the words. A mean and spread of the query's own scores would hide
    matching images: both are larger if the library has many. The spread is that over the images;
    where they are too few or too similar to show it, that over the words.
    """
    mean, covariance = library_stats
    of_words = reference @ mean
    over_images = (reference @ covariance * reference).sum(axis=1).mean()
    spread = float(np.sqrt(max(over_images, of_words.var())))
    return np.asarray((scores - of_words.mean()) / max(spread, 1e-6))


def has_probabilities(model: str | Path, steps: int = MAX_ANCESTORS) -> bool:
    """Whether the weights hold for a model: for general, its exports, and heads adapted from it.

    The best model of a run keeps the z-scores; the last one may have been trained for too long
    (docs/lab-search.md).
    """
    if boxed_name(model) == GENERAL:
        return True
    source = exported_from(model)
    run = run_of(model)
    if source is None and run is not None and Path(model).name != LAST_MODEL:
        try:
            transfer = load_config(run / "config.toml").transfer
        except UserError:
            return False
        if transfer.recipe == "frozen":
            source = transfer.init or transfer.heads
    return source is not None and steps > 0 and has_probabilities(source, steps - 1)


def probabilities(zscores: np.ndarray, weights: tuple[float, ...] = MATCH_WEIGHTS) -> np.ndarray:
    """(n,) probability that each image matches."""
    return np.asarray(1 / (1 + np.exp(-weights[0] - weights[1] * zscores)))
