"""Everything that is measured on a held-out set from its features alone."""

from __future__ import annotations

from torch import Tensor

from m1clip.evaluate.inbatch import BATCH, in_batch_accuracy
from m1clip.evaluate.metric import Scores
from m1clip.evaluate.retrieval import retrieval


def held_out(image: Tensor, text: Tensor, owner: Tensor, seed: int = 0) -> Scores:
    """Retrieval both ways, and in-batch accuracy where the set has enough pictures for one batch."""
    scores = retrieval(image, text, owner, seed=seed)
    if len(owner.unique()) >= BATCH:
        scores += Scores((in_batch_accuracy(image, text, owner, seed=seed),))
    return scores
