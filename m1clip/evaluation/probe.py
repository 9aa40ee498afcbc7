"""A linear probe: logistic regression on the image vectors of a model, in torch."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from m1clip.errors import UserError
from m1clip.evaluation.statistics import Scores
from m1clip.evaluation.zeroshot import top_k_accuracy

PROBE_TEST_FRACTION = 0.3  # of each class
PROBE_ITERATIONS = 1000


def linear_probe(vectors: np.ndarray, classes: np.ndarray, seed: int = 0) -> Scores:
    """Test accuracy of logistic regression, trained on about 70% of each class."""
    features = torch.from_numpy(vectors)
    labels = torch.from_numpy(classes)
    test = stratified_test_mask(labels, seed)
    if bool(test.all()) or not bool(test.any()):
        raise UserError("the linear probe needs at least two images of some class")
    # The entries of unit vectors are far below one, and weight decay would dominate.
    inputs = features * features.shape[1] ** 0.5
    predict = fit_classifier(inputs[~test], labels[~test])
    return top_k_accuracy(predict(inputs[test]).numpy(), labels[test].numpy(), "linear_probe")


def fit_classifier(
    inputs: Tensor, labels: Tensor, weight_decay: float = 1.0
) -> Callable[[Tensor], Tensor]:
    """Logistic regression in float64: the function from inputs (n, d) to scores (n, classes)."""

    def extended(rows: Tensor) -> Tensor:
        return F.pad(rows.double(), (0, 1), value=1.0)

    extended_inputs = extended(inputs)
    weight = torch.zeros(
        extended_inputs.shape[1], int(labels.max()) + 1, dtype=torch.float64, requires_grad=True
    )
    optimizer = torch.optim.LBFGS(
        [weight], max_iter=PROBE_ITERATIONS, line_search_fn="strong_wolfe"
    )

    def loss() -> Tensor:
        optimizer.zero_grad()
        value = F.cross_entropy(extended_inputs @ weight, labels, reduction="sum")
        value = value + weight_decay * weight[:-1].square().sum() / 2
        value.backward()
        return value

    optimizer.step(loss)
    return lambda rows: extended(rows) @ weight.detach()


def stratified_test_mask(labels: Tensor, seed: int) -> Tensor:
    """(n,) bool: about a third of each class, at least one image of a class that has two."""
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.zeros(len(labels), dtype=torch.bool)
    for label in labels.unique():
        rows = (labels == label).nonzero()[:, 0]
        count = max(round(PROBE_TEST_FRACTION * len(rows)), min(1, len(rows) - 1))
        chosen[rows[torch.randperm(len(rows), generator=generator)[:count]]] = True
    return chosen
