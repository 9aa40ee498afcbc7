"""Evaluation during training: score and analyze the validation split, save the best model."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple

from m1clip.errors import first_line
from m1clip.evaluation.evaluate import Evaluator, other_class_vectors
from m1clip.evaluation.examples import write_snapshot
from m1clip.evaluation.retrieval import retrieval
from m1clip.evaluation.split_analyses import analyze
from m1clip.evaluation.statistics import ENOUGH_TO_JUDGE, Metric, selection_metric
from m1clip.inference.features import SplitFeatures, encode_split
from m1clip.model.clip import CLIP
from m1clip.training.checkpoint import disk_errors
from m1clip.training.oom import is_out_of_memory
from m1clip.training.saving import save_best

if TYPE_CHECKING:
    from m1clip.training.context import RunContext
    from m1clip.training.inputs import RunInputs


def encode(inputs: RunInputs, model: CLIP, split: str, images: int | None = None) -> SplitFeatures:
    """Features of a split, or of its first `images`, in the precision of the run.

    Each rank encodes a part.
    """
    ranks, data = inputs.ranks, inputs.splits[split]
    if ranks.size > (len(data.images) if images is None else images):
        return encode_split(inputs.to_model(model), data, images)
    return encode_split(
        inputs.to_model(model), data, images, (ranks.rank, ranks.size), ranks.concatenate_rows
    )


class BestSoFar(NamedTuple):
    """The best model so far, after an evaluation."""

    best: float  # its score
    best_step: int
    stale: int  # evaluations since the score last improved
    metric: str  # label of the metric that selects the best model


def evaluate(run: RunContext) -> BestSoFar:
    """Score and analyze the validation split, and save the best model.

    All ranks encode, rank 0 scores.
    """
    began = time.perf_counter()
    model = run.inputs.complete_model(run.train_step)
    features = encode(run.inputs, model, "val")
    return run.ranks.on_rank0(lambda: _score(run, model, features, began))


def improves(metric: Metric, best: float, later_wins: bool) -> bool:
    """Whether a score is the best so far.

    A split of very few images gives many equal scores. With `later_wins`, the model that was
    trained longer is then the better one; otherwise the one that training has changed least.
    """
    is_tie = metric.value == best and metric.n < ENOUGH_TO_JUDGE
    return metric.value > best or (is_tie and later_wins)


def _score(run: RunContext, model: CLIP, features: SplitFeatures, began: float) -> BestSoFar:
    """Score the features, log all metrics, and save the model if it is the best so far."""
    state = run.state
    data = run.inputs.splits["val"]
    scores = retrieval(*features, other_class_vectors(run.inputs.to_model(model), data))
    seconds = time.perf_counter() - began
    metric = selection_metric(scores)
    batch_size = run.inputs.training.plan.batch
    evaluator = Evaluator(
        run.inputs.to_model(model), run.inputs.source, "val", data, batch_size=batch_size
    )

    def leave_out(name: str, error: Exception) -> None:
        if not is_out_of_memory(error):
            raise error
        run.warn(f"analysis {name} of step {state.step:,} skipped: {first_line(error)}")

    analysis = analyze(features, evaluator, leave_out)
    with disk_errors(run.log, run.folder / "snapshots", state.step):
        write_snapshot(run.folder, state.step, "val", data, features)
    values = {
        "split": "val",
        "seconds": round(seconds, 4),
        "analysis": analysis,
        **scores.as_dict(),
    }
    run.log.write("eval", step=state.step, **values)
    may_only_harm = run.config.transfer.init is not None or run.inputs.model.init.new_heads
    is_best = improves(metric, state.best, later_wins=not may_only_harm)
    earlier = None if is_best else (state.best, state.best_step)
    run.display.evaluation(state.step, scores, metric, earlier)
    if earlier is not None:
        return BestSoFar(state.best, state.best_step, state.stale + 1, metric.label)
    save_best(run, model)
    is_better = metric.value > state.best  # the patience of a run counts equal scores
    return BestSoFar(metric.value, state.step, 0 if is_better else state.stale + 1, metric.label)
