"""Evaluation during training: score and analyze the validation split, save the best model."""

import time
from pathlib import Path

from m1clip.evaluation.analysis import analyze
from m1clip.evaluation.evaluate import other_class_vectors
from m1clip.evaluation.examples import write_snapshot
from m1clip.evaluation.retrieval import retrieval
from m1clip.evaluation.statistics import selection_metric
from m1clip.inference.features import SplitFeatures, encode_split
from m1clip.model.clip import CLIP
from m1clip.runlog import RunLog
from m1clip.training.checkpoint import TrainState, disk_errors
from m1clip.training.process import Interrupted, StopRequest
from m1clip.training.progress import Screen
from m1clip.training.setup import Setup
from m1clip.training.step import TrainStep


def encode(setup: Setup, model: CLIP, split: str, images: int | None = None) -> SplitFeatures:
    """Features of a split, or of its first `images`, in the precision of the run; each rank encodes a part."""
    ranks, data = setup.ranks, setup.splits[split]
    if ranks.size > (len(data.images) if images is None else images):
        return encode_split(setup.bundle(model), data, images)
    return encode_split(setup.bundle(model), data, images, (ranks.rank, ranks.size), ranks.concatenated)


class Validator:
    def __init__(
        self, setup: Setup, train_step: TrainStep, state: TrainState, run: Path, log: RunLog, screen: Screen
    ) -> None:
        self.setup, self.train_step, self.state, self.run = setup, train_step, state, run
        self.log, self.screen = log, screen
        self.metric_label = ""  # of the metric that selects the best model

    def run_due(self, stop: StopRequest) -> None:
        """Evaluate; if interrupted by a signal, the evaluation stays due."""
        state, ranks = self.state, self.setup.ranks
        try:
            with stop.interrupting(ranks.size == 1):  # one rank alone must not leave an exchange
                if "val" in self.setup.splits:
                    begin = time.perf_counter()
                    model = self.setup.complete_model(self.train_step)
                    features = encode(self.setup, model, "val")
                    state.best, state.best_step, state.stale, self.metric_label = ranks.first(
                        lambda: self._score(model, features, begin)
                    )
            state.evaluation_due = False
        except Interrupted:
            self.train_step.model.train()

    def _score(self, model: CLIP, features: SplitFeatures, begin: float) -> tuple[float, int, int, str]:
        """Score the validation split, log all metrics, save the best model.

        Returns the best score, its step, the evaluations since then, and the label of the metric.
        """
        state, data = self.state, self.setup.splits["val"]
        scores = retrieval(*features, other_class_vectors(self.setup.bundle(model), data))
        seconds = time.perf_counter() - begin
        metric = selection_metric(scores)
        analysis = analyze(*features[:4])
        with disk_errors(self.log, self.run / "snapshots", state.step):
            write_snapshot(self.run, state.step, "val", data, features)
        values = {"split": "val", "seconds": round(seconds, 4), "analysis": analysis, **scores.as_dict()}
        self.log.write("eval", step=state.step, **values)
        earlier = None if metric.value > state.best else (state.best, state.best_step)
        self.screen.evaluation(state.step, scores, metric, earlier)
        if earlier is not None:
            state.stale += 1
        else:
            with disk_errors(self.log, self.run / "best", state.step):
                self.setup.bundle(model).save(self.run / "best")
                state.best, state.best_step, state.stale = metric.value, state.step, 0
        return state.best, state.best_step, state.stale, metric.label
