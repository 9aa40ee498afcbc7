"""Evaluation during training: score the validation split, analyze it within a time budget, save the best model."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from m1clip.evaluation.evaluate import NEGATIVE_IMAGES, Evaluator
from m1clip.evaluation.retrieval import retrieval
from m1clip.evaluation.snapshot import write_snapshot
from m1clip.evaluation.statistics import Metric, selection_metric
from m1clip.inference.encoder import SplitFeatures, encode_split
from m1clip.model.clip import CLIP
from m1clip.runlog import RunLog
from m1clip.training.checkpoint import TrainState, disk_errors
from m1clip.training.process import Interrupted, StopRequest
from m1clip.training.progress import Screen
from m1clip.training.setup import Setup
from m1clip.training.step import TrainStep

ANALYSIS_FRACTION = 0.015  # of the training time, for encoding generated captions
CAPTIONS_PER_IMAGE = 13  # six hard negatives, three medium, three easy, and the true one
MIN_IMAGES = 4
CHEAP_SECONDS = 0.25


def encode(setup: Setup, model: CLIP, split: str, images: int | None = None) -> SplitFeatures:
    """Features of a split, or of its first `images`, in the precision of the run."""
    return encode_split(setup.bundle(model), setup.splits[split], images)


@dataclass
class AnalysisBudget:
    """Limits the expensive part of the analysis, encoding generated captions, to a fraction of the training time."""

    trained_before: float  # seconds, in earlier sessions
    spent: float = 0.0  # seconds of analysis in this session

    def images(self, trained: float, seconds_per_caption: float) -> int:
        """Number of images to analyze now; a few cheap ones are always allowed."""
        each = max(seconds_per_caption, 1e-9) * CAPTIONS_PER_IMAGE
        left = ANALYSIS_FRACTION * (trained - self.trained_before) - self.spent
        least = MIN_IMAGES if MIN_IMAGES * each < CHEAP_SECONDS else 0
        count = max(least, min(NEGATIVE_IMAGES, int(left / each)))
        return count if count >= MIN_IMAGES else 0


class Validator:
    """Evaluates a run while it trains."""

    def __init__(
        self, setup: Setup, train_step: TrainStep, state: TrainState, run: Path, log: RunLog, screen: Screen
    ) -> None:
        self.setup, self.train_step, self.state, self.run = setup, train_step, state, run
        self.log, self.screen = log, screen
        self.budget = AnalysisBudget(trained_before=state.seconds)
        self.metric_label = ""  # of the metric that selects the best model

    def run_due(self, stop: StopRequest) -> None:
        """Evaluate, using the averaged weights if any; if interrupted by a signal, the evaluation stays due."""
        ema, model = self.train_step.ema, self.train_step.model
        if ema is not None:
            ema.swap(model)
        try:
            with stop.interrupting():
                if "val" in self.setup.splits:
                    self._save_if_best(self._score())
            self.state.evaluation_due = False
        except Interrupted:
            model.train()
        finally:
            if ema is not None:
                ema.swap(model)

    def _score(self) -> Metric:
        """Score the validation split; all metrics are logged. Returns the one that selects the best model."""
        setup, state, model, data = self.setup, self.state, self.train_step.model, self.setup.splits["val"]
        begin = time.perf_counter()
        features = encode(setup, model, "val")
        seconds_per_caption = (time.perf_counter() - begin) / len(features[1])
        scores = retrieval(*features)
        seconds = time.perf_counter() - begin
        metric = selection_metric(scores)
        self.metric_label = metric.label
        found: dict[str, Any] = {}
        images = self.budget.images(state.seconds, seconds_per_caption)
        begin, training = time.perf_counter(), model.training
        with disk_errors(self.log, self.run / "snapshots", state.step):
            found["analysis"] = Evaluator(setup.bundle(model), setup.source, "val", data).analysis(features, images)
            model.train(training)
            write_snapshot(self.run, state.step, "val", data, features)
        found["analysis_seconds"] = round(time.perf_counter() - begin, 4)
        self.budget.spent += found["analysis_seconds"]
        found |= setup.evaluate_retention(model, self.screen.say)
        values = {"split": "val", "seconds": round(seconds, 4), **found, **scores.as_dict()}
        self.log.write("eval", step=state.step, **values)
        better = None if metric.value > state.best else (state.best, state.best_step)
        self.screen.evaluation(state.step, scores, metric, better)
        return metric

    def _save_if_best(self, metric: Metric) -> None:
        """Save the model if it is the best so far."""
        state, setup = self.state, self.setup
        if metric.value <= state.best:
            state.stale += 1
            return
        with disk_errors(self.log, self.run / "best", state.step):
            setup.bundle(self.train_step.model).save(self.run / "best")
            state.best, state.best_step, state.stale = metric.value, state.step, 0
