"""What a model gains on new data, and what it forgets of a general set that the user names."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from m1clip import console
from m1clip.config import Config
from m1clip.data.decoding import decode_options
from m1clip.data.prepare import Split, load_split, open_data
from m1clip.data.synthetic.drawing import MAX_SCENE_SIZE
from m1clip.data.types import Source
from m1clip.errors import UserError
from m1clip.evaluation.evaluate import Evaluator, other_class_vectors
from m1clip.evaluation.retrieval import retrieval
from m1clip.evaluation.statistics import Metric, selection_metric
from m1clip.formatting import one_line, table
from m1clip.hardware.device import Precision
from m1clip.hardware.machine_info import read_machine_info
from m1clip.inference import load
from m1clip.inference.features import encode_split
from m1clip.inference.model import Model

GENERAL_IMAGES = 5_000  # of the general set, at most
EVALUATED_SPLITS = ("test", "val", "train")  # the first that the data has is evaluated


@dataclass(frozen=True)
class GeneralData:
    """A set that the model knew before."""

    name: str
    source: Source
    split: str


@dataclass(frozen=True)
class Change:
    """A score of a model before and after it was adapted."""

    role: str  # new or general
    data: str
    split: str
    before: Metric
    after: Metric

    def as_record(self) -> dict[str, Any]:
        """For run.jsonl."""
        return {
            "role": self.role,
            "data": self.data,
            "split": self.split,
            "metric": self.after.name,
            "score_before": self.before.value,
            "score_after": self.after.value,
            "images": self.after.n,
        }


def open_general_data(config: Config) -> GeneralData | None:
    """Open the data of --general-data, before anything is prepared, so that an error costs no time.

    None without it.
    """
    names = config.transfer.general_data
    if not names:
        return None
    # Its columns are detected: those of the user are for the new data.
    settings = dataclasses.replace(
        config.data, source=names, image_column=None, caption_column=(), cache="off"
    )
    try:
        source = open_data(settings, MAX_SCENE_SIZE, config.seed)
        if source.streamed:
            raise UserError("shards that are streamed cannot be evaluated; name local data")
    except UserError as error:
        raise UserError(f"--general-data: {error}") from None
    split = next(name for name in EVALUATED_SPLITS if name in source.splits())
    return GeneralData(", ".join(names), source, split)


def measure_forgetting(
    config: Config, general: GeneralData, new: Evaluator, after: Metric, precision: Precision
) -> list[Change]:
    """Scores before and after on the new data, where the latter is known already, and on the
    general set.
    """
    best = new.model
    start = load(
        Path(config.transfer.init or ""),
        device=str(best.device),
        image_size=best.preprocess.image_size,
        precision=precision,
    )
    before = score(start, new.data)
    changes = [Change("new", ", ".join(config.data.source), new.split, before, after)]
    with console.progress("measuring what was forgotten"):
        data = load_split(
            general.source,
            general.split,
            dataclasses.replace(config.data, cache="off"),
            best.tokenizer,
            best.context_length,
            best.preprocess,
            1.0,
            decode_options(read_machine_info(gpu=False)),
        )
        scores = [score(model, data) for model in (start, best)]
    return [*changes, Change("general", general.name, general.split, *scores)]


def score(model: Model, data: Split) -> Metric:
    """The metric that selects models, on a split or its first images."""
    features = encode_split(model, data, min(len(data.images), GENERAL_IMAGES))
    return selection_metric(retrieval(*features, other_class_vectors(model, data)))


def describe_changes(changes: list[Change]) -> str:
    """A table of the scores before and after."""
    rows = []
    for change in changes:
        difference = 100 * (change.after.value - change.before.value)
        rows.append(
            (
                f"{change.role} data, {one_line(change.data)}, {change.split} split",
                f"{100 * change.before.value:.1f}%",
                f"{100 * change.after.value:.1f}%",
                f"{difference:+.1f}",
                f"{change.after.n:,}",
            )
        )
    head = (changes[0].after.label, "before", "after", "change", "images")
    return table(head, rows)
