"""Evaluation during training: score and analyze the validation split, save the best model."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple

from m1clip.evaluation.analysis import analyze
from m1clip.evaluation.evaluate import other_class_vectors
from m1clip.evaluation.examples import write_snapshot
from m1clip.evaluation.retrieval import retrieval
from m1clip.evaluation.statistics import selection_metric
from m1clip.inference.features import SplitFeatures, encode_split
from m1clip.model.clip import CLIP
from m1clip.training.checkpoint import disk_errors

if TYPE_CHECKING:
    from m1clip.training.context import RunContext
    from m1clip.training.setup import Setup


def encode(setup: Setup, model: CLIP, split: str, images: int | None = None) -> SplitFeatures:
    """Features of a split, or of its first `images`, in the precision of the run; each rank encodes a part."""
    ranks, data = setup.ranks, setup.splits[split]
    if ranks.size > (len(data.images) if images is None else images):
        return encode_split(setup.bundle(model), data, images)
    return encode_split(
        setup.bundle(model), data, images, (ranks.rank, ranks.size), ranks.concatenated
    )


class Evaluation(NamedTuple):
    """The best model so far, after an evaluation."""

    best: float  # its score
    best_step: int
    stale: int  # evaluations since the best one
    metric: str  # label of the metric that selects the best model


def evaluate(run: RunContext) -> Evaluation:
    """Score and analyze the validation split, and save the best model; all ranks encode, rank 0 scores."""
    began = time.perf_counter()
    model = run.setup.complete_model(run.train_step)
    features = encode(run.setup, model, "val")
    return run.ranks.first(lambda: _score(run, model, features, began))


def _score(run: RunContext, model: CLIP, features: SplitFeatures, began: float) -> Evaluation:
    """Score the features, log all metrics, and save the model if it is the best so far."""
    state = run.state
    data = run.setup.splits["val"]
    scores = retrieval(*features, other_class_vectors(run.setup.bundle(model), data))
    seconds = time.perf_counter() - began
    metric = selection_metric(scores)
    analysis = analyze(*features[:4])
    with disk_errors(run.log, run.folder / "snapshots", state.step):
        write_snapshot(run.folder, state.step, "val", data, features)
    values = {
        "split": "val",
        "seconds": round(seconds, 4),
        "analysis": analysis,
        **scores.as_dict(),
    }
    run.log.write("eval", step=state.step, **values)
    earlier = None if metric.value > state.best else (state.best, state.best_step)
    run.screen.evaluation(state.step, scores, metric, earlier)
    if earlier is not None:
        return Evaluation(state.best, state.best_step, state.stale + 1, metric.label)
    with disk_errors(run.log, run.folder / "best", state.step):
        run.setup.bundle(model).save(run.folder / "best")
    return Evaluation(metric.value, state.step, 0, metric.label)
