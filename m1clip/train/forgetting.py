"""What a model could do before and must not lose: recall on another set, or zero-shot accuracy on class folders."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast

import torch

from m1clip.config import DataConfig
from m1clip.data.pair import Source
from m1clip.data.prepare import Split, open_data
from m1clip.data.preprocess import Preprocess
from m1clip.data.sources.class_folders import ClassFolderSource
from m1clip.evaluate.analysis import even_indices
from m1clip.evaluate.bundle import Bundle
from m1clip.evaluate.dataset import encode_split
from m1clip.evaluate.heldout import held_out
from m1clip.evaluate.metric import MEAN_RECALL, TOP1, selection_metric
from m1clip.evaluate.zeroshot import class_folders, class_vectors, encode_readable, top_scores
from m1clip.model.clip import Clip
from m1clip.runlog import SELECTION
from m1clip.text.base import Tokenizer
from m1clip.train.setup import Job

BATCH = 128  # pictures encoded at once
MOST_PICTURES = 1000  # of class folders: they are decoded at each evaluation
Context = Callable[[], AbstractContextManager[object]]
J = TypeVar("J", bound=Job)


class Meter(Protocol):
    """One number of a model on the base set, between 0 and 1."""

    @property
    def name(self) -> str:
        """What the number is, in a person's words."""

    def __call__(self, bundle: Bundle) -> float:
        """Measure a model."""


@dataclass(frozen=True)
class RecallMeter:
    """The figure that chooses the best model, on a split."""

    split: Split
    autocast: Context

    @property
    def metric(self) -> str:
        """Its name in the log."""
        return TOP1 if self.split.captions.classes else MEAN_RECALL

    @property
    def name(self) -> str:
        """Its label."""
        return SELECTION[self.metric]

    def __call__(self, bundle: Bundle) -> float:
        """Features of the split first; sides that stand still bring theirs."""
        data = self.split
        found = encode_split(
            bundle.model, data.pictures, data.captions, bundle.preprocess, BATCH, self.autocast
        )
        return selection_metric(held_out(*found)).value


@dataclass(frozen=True)
class ClassMeter:
    """Zero-shot top-1 over a folder of class folders, or an even sample of it."""

    folder: Path
    autocast: Context
    name: str = "zero-shot top-1"

    def __call__(self, bundle: Bundle) -> float:
        """The names of the folders are the classes."""
        training, data = bundle.model.training, class_folders(self.folder)
        chosen = even_indices(len(data.paths), MOST_PICTURES)
        with self.autocast():
            features, kept, _ = encode_readable(bundle, [data.paths[place] for place in chosen])
            vectors = class_vectors(bundle, data.names).cpu()
        bundle.model.train(training)
        labels = torch.tensor([data.labels[chosen[place]] for place in kept])
        return top_scores(features.float() @ vectors.float().T, labels)["zero_shot/top1"].value


@dataclass(frozen=True)
class Base:
    """The base set of a run, and what the model made of it before the first step."""

    where: str
    meter: Meter
    tokenizer: Tokenizer
    preprocess: Preprocess
    before: float

    def now(self, model: Clip) -> float:
        """What it makes of it now."""
        return self.meter(Bundle(model, self.tokenizer, self.preprocess))

    def figures(self, model: Clip, say: Callable[[str], None]) -> dict[str, Any]:
        """For the line of an evaluation in the run log, and said."""
        now = self.now(model)
        say(f"base        {self.meter.name} on {self.where}: {now:.1%} ({self.before:.1%} before)")
        return {"base": now, "base_before": self.before, "base_metric": self.meter.name}


def with_base(job: J, load: Callable[[Source, str, DataConfig], Split]) -> J:
    """The job with its base set, if it has one, measured before the first step.

    Zero-shot where it is a folder of class folders, else recall on its test split, or what it has instead;
    `load(source, split, settings)` reads a split as the run's model sees it.
    """
    config = job.config
    if not config.transfer.base:
        return job
    data = dataclasses.replace(config.data, source=config.transfer.base)
    source = open_data(data, job.preprocess.image_size, config.seed)
    meter: Meter
    if isinstance(source, ClassFolderSource):
        meter = ClassMeter(Path(config.transfer.base[0]), job.autocast)
    else:
        split = next(name for name in ("test", "val", "train") if name in source.splits())
        meter = RecallMeter(load(source, split, data), job.autocast)
    before = meter(Bundle(job.build_model(), job.tokenizer, job.preprocess))
    where = ", ".join(config.transfer.base)
    base = Base(where, meter, job.tokenizer, job.preprocess, before)
    return dataclasses.replace(cast(Any, job), base=base)  # every job that starts from a model has this field
