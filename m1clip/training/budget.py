"""How long a run should be and how strongly it should be regularized, given its data and its time.

Pure functions, fitted on our own runs (docs/recipe.md, "More time"). A model that sees an image
many times overfits, so the more epochs a run has, the stronger its augmentation; and beyond some
number of epochs, more do not help.
"""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple


class Strength(NamedTuple):
    """How strongly a run from random weights is regularized."""

    crop_min: float  # minimum area fraction of random crops
    word_dropout: float  # fraction of caption tokens dropped
    cutmix: float = 0.0  # probability of a box of another image
    label_smoothing: float = 0.0  # part of the targets that is spread over the batch


MILD = Strength(crop_min=0.6, word_dropout=0.3)
# Epochs of a run from random weights -> the best augmentation of those that were measured.
STRENGTHS = {
    12.0: MILD,
    18.0: Strength(crop_min=0.5, word_dropout=0.4),
    37.0: Strength(crop_min=0.42, word_dropout=0.42, cutmix=0.5, label_smoothing=0.1),
    74.0: Strength(crop_min=0.35, word_dropout=0.45, cutmix=0.5, label_smoothing=0.1),
}
# The last part of the steps of a run from random weights, in which augmentation is weaker.
MILD_PART = 0.2
# Passes over the images, by recipe, after which more time does not give a better model.
MAX_EPOCHS = {"scratch": 37.0, "frozen": 8.0, "finetune": 20.0}
MAX_EPOCHS_WITHOUT_CUTMIX = 18.0  # from random weights
# From random weights, fewer steps are too few however often each image is seen; with 1,500 images,
# 500 were as good as 18 epochs, and with fewer images more than 18 epochs were not measured.
ENOUGH_STEPS = 500

# With twice as many passes or more, several models that see each image at least so often are better
# than one that sees it more often (model/members.py). Measured with one preset.
MEMBER_EPOCHS = 25.0
MAX_MEMBERS = 4
MEMBER_MODEL = "tiny"


def max_epochs(recipe: str, steps_per_epoch: int, can_mix: bool = True) -> float:
    """The passes over the images after which more time does not give a better model.

    `can_mix`: whether a run from random weights can have CutMix.
    """
    epochs = MAX_EPOCHS[recipe]
    if recipe == "scratch":
        epochs = epochs if can_mix else MAX_EPOCHS_WITHOUT_CUTMIX
        epochs = max(epochs, round(ENOUGH_STEPS / steps_per_epoch, 1))
    return epochs


def best_members(steps: int, steps_per_epoch: int) -> int:
    """How many models to train side by side in the time in which one would make so many steps."""
    enough = max(MEMBER_EPOCHS * steps_per_epoch, ENOUGH_STEPS)
    return min(MAX_MEMBERS, max(1, int(steps / enough)))


def steps_of_epochs(epochs: float, steps_per_epoch: int) -> int:
    """The steps of so many passes over the images, at least one."""
    return max(1, round(epochs * steps_per_epoch))


def augmentation_strength(epochs: float) -> Strength:
    """The augmentation of a run from random weights: interpolated over the logarithm of its epochs."""
    measured = list(STRENGTHS)
    epochs = min(max(epochs, measured[0]), measured[-1])
    for low, high in itertools.pairwise(measured):
        if epochs <= high:
            part = math.log(epochs / low) / math.log(high / low)
            mixed = [
                round(weaker + part * (stronger - weaker), 2)
                for weaker, stronger in zip(STRENGTHS[low], STRENGTHS[high], strict=True)
            ]
            return Strength(*mixed)
    raise AssertionError("epochs are within the measured range")
