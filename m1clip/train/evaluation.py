"""The held-out figures of a model during and after training."""

from __future__ import annotations

from m1clip.evaluate.dataset import encode_split
from m1clip.evaluate.heldout import held_out
from m1clip.evaluate.metric import Scores
from m1clip.model.clip import Clip
from m1clip.train.finish import BATCH
from m1clip.train.setup import Job


def evaluate(job: Job, model: Clip, split: str) -> Scores:
    """Every retrieval figure of a split, in the precision of the run."""
    data = job.splits[split]
    return held_out(*encode_split(model, data.pictures, data.captions, job.preprocess, BATCH, job.autocast))


def mean_recall(scores: Scores) -> float:
    """The mean of recall@1, @5 and @10 both ways: one number that decides which model is best."""
    values = [value for name, value in scores if "/recall@" in name]
    return sum(values) / len(values)
