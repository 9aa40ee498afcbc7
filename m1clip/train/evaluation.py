"""The held-out figures of a model during and after training."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from m1clip.evaluate.bundle import Bundle
from m1clip.evaluate.dataset import Features, encode_split
from m1clip.evaluate.heldout import held_out
from m1clip.evaluate.metric import Scores
from m1clip.model.clip import Clip
from m1clip.train.finish import Exam, rows_at_once
from m1clip.train.insight import SAMPLE, analyse
from m1clip.train.setup import Job
from m1clip.train.snapshot import write_snapshot

SHARE = 0.015  # of the training time; the cheap parts and the layers take about as much at most
TEXTS_EACH = 13  # six hard negatives, three medium, three easy, and the truth
FEWEST = 4
SMALL_CHANGE = 0.25  # seconds


def encode(job: Job, model: Clip, split: str, images: int | None = None) -> Features:
    """Features of a split, or of its first `images`, in the precision of the run."""
    data = job.splits[split]
    rows = rows_at_once(model)
    return encode_split(model, data.pictures, data.captions, job.preprocess, rows, job.autocast, images)


def evaluate(job: Job, model: Clip, split: str) -> Scores:
    """Every retrieval figure of a split."""
    return held_out(*encode(job, model, split))


@dataclass
class Budget:
    """Keeps the dear part of the analysis, encoding made-up captions, to a share of the training time."""

    trained_before: float  # seconds, in earlier sessions
    spent: float = 0.0  # on analysis in this one

    def pictures(self, trained: float, per_text: float) -> int:
        """How many pictures may be asked now, each a dozen captions; few cheap ones may always."""
        each = max(per_text, 1e-9) * TEXTS_EACH
        left = SHARE * (trained - self.trained_before) - self.spent
        floor = FEWEST if FEWEST * each < SMALL_CHANGE else 0
        count = max(floor, min(SAMPLE, int(left / each)))
        return count if count >= FEWEST else 0


def look_closer(
    job: Job, model: Clip, features: Features, run: Path, step: int, pictures: int
) -> dict[str, Any]:
    """The analysis of the validation split for the log, and a snapshot of what it finds for those who watch.

    `pictures` are asked about made-up captions; with 0 that part waits for a later evaluation.
    """
    begin, training = time.perf_counter(), model.training
    exam = Exam(
        Bundle(model, job.tokenizer, job.preprocess), job.source, "val", job.splits["val"], job.autocast
    )
    found = analyse(exam, features, pictures)
    model.train(training)
    write_snapshot(run, step, "val", job.splits["val"], features)
    return {"analysis": found, "analysis_seconds": round(time.perf_counter() - begin, 4)}
