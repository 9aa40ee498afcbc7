"""The linear probe: how well a plain classifier reads the classes out of the model's image vectors."""

from __future__ import annotations

import importlib

import torch
from torch import Tensor

from m1clip.errors import UserError
from m1clip.evaluate.metric import Scores
from m1clip.evaluate.zeroshot import top_scores

HELD_OUT = 0.3
ROUNDS = 1000


def linear_probe(features: Tensor, labels: Tensor, seed: int = 0, strength: float = 1.0) -> Scores:
    """Accuracy on a held-out third of each class, after logistic regression on the rest (scikit-learn)."""
    try:
        sklearn = importlib.import_module("sklearn.linear_model")
    except ImportError:
        raise UserError("the linear probe needs scikit-learn: pip install 'm1clip[probe]'") from None
    test = held_out(labels, seed)
    if bool(test.all()) or not bool(test.any()):
        raise UserError("the linear probe needs at least two pictures of some class")
    model = sklearn.LogisticRegression(C=strength, max_iter=ROUNDS)
    # Unit vectors have entries far below one, which the penalty would flatten.
    scaled = features.numpy() * features.shape[1] ** 0.5
    model.fit(scaled[(~test).numpy()], labels[~test].numpy())
    said = torch.full((int(test.sum()), int(labels.max()) + 1), float("-inf"), dtype=torch.float64)
    known = torch.from_numpy(model.predict_log_proba(scaled[test.numpy()])).double()
    said[:, torch.from_numpy(model.classes_)] = known
    return top_scores(said, labels[test], prefix="linear_probe")


def held_out(labels: Tensor, seed: int) -> Tensor:
    """(n,) bool: about a third of each class, at least one where there are two; a function of the seed."""
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.zeros(len(labels), dtype=torch.bool)
    for label in labels.unique():
        places = (labels == label).nonzero()[:, 0]
        order = places[torch.randperm(len(places), generator=generator)]
        count = max(round(HELD_OUT * len(places)), min(1, len(places) - 1))
        chosen[order[:count]] = True
    return chosen
