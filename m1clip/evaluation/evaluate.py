"""Evaluating a model on a split."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from m1clip import console
from m1clip.config import Config, load_config
from m1clip.data.decoding import decode_options
from m1clip.data.prepare import Split, load_split, open_data
from m1clip.data.sources.folders import class_name
from m1clip.data.split_record import keep_splits, recorded_splits
from m1clip.data.synthetic.captions import negatives
from m1clip.data.synthetic.source import SyntheticSource
from m1clip.data.types import Source
from m1clip.errors import UserError
from m1clip.evaluation.retrieval import class_accuracies, retrieval
from m1clip.evaluation.split_analyses import negatives_accuracy
from m1clip.evaluation.statistics import Scores
from m1clip.hardware.machine_info import read_machine_info
from m1clip.inference import load
from m1clip.inference.features import SplitFeatures, encode_split
from m1clip.inference.model import Model


def evaluate(
    model: Model | str | Path,
    data: str | Path | Sequence[str | Path],
    split: str = "test",
    device: str = "auto",
) -> Scores:
    """Compute the scores of a model, or of the model at a path, on a split of any data."""
    sources = [data] if isinstance(data, str | Path) else data
    with console.quiet():
        evaluator = open_split(model, tuple(map(str, sources)), split, device)
        return evaluator.scores(evaluator.encode())


def open_split(
    model: Model | str | Path,
    data: tuple[str, ...] = (),
    split: str = "test",
    device_name: str = "auto",
) -> Evaluator:
    """A model on the device, and a split of `data` or of the data its run was trained on."""
    run = None if isinstance(model, Model) else Path(model)
    loaded = model if isinstance(model, Model) else load(model)
    trained = run is not None and (run / "config.toml").is_file()
    if not trained and not data:
        raise UserError(
            f"{run}: no config.toml, so the training data is unknown; specify data with --data"
        )
    config = load_config(run / "config.toml") if run is not None and trained else Config()
    sources = dataclasses.replace(config.data, source=data) if data else config.data
    loaded.encoder.use_device(device_name, config.train if trained else None)
    source = open_data(sources, loaded.preprocess.image_size, config.seed)
    record = {} if run is None else recorded_splits(run, sources.source)
    excluded = keep_splits(source, record)[split]
    if split not in source.splits():
        raise UserError(
            f"{', '.join(sources.source)}: has no {split} split, only {', '.join(source.splits())};"
            f" choose one with --split"
        )
    samples = load_split(
        source,
        split,
        sources,
        loaded.tokenizer,
        loaded.context_length,
        loaded.preprocess,
        1.0,
        decode_options(read_machine_info(gpu=False)),
    )
    batch_size = config.train.batch_size_or(0) if trained else 0
    return Evaluator(loaded, source, split, samples, batch_size, excluded)


@dataclass(frozen=True)
class Evaluator:
    """A model and the split it is evaluated on."""

    model: Model
    source: Source
    split: str
    data: Split
    batch_size: int = 0  # images of a training batch; 0: unknown
    excluded: int = 0  # images of the split now that the run had in another split

    @property
    def categories(self) -> list[str]:
        """The category of each image, "" for none."""
        return [self.source.category(sample.id) for sample in self.data.samples]

    def encode(self) -> SplitFeatures:
        """Vectors of every image and caption of the split."""
        return encode_split(self.model, self.data)

    def scores(self, features: SplitFeatures) -> Scores:
        """Retrieval; for synthetic images also the accuracy against negative captions."""
        others = other_class_vectors(self.model, self.data)
        scores = retrieval(*features, others)
        if features.labels is not None:
            scores += class_accuracies(features, others, self.class_names(features.labels))
        return (
            scores + self.negative_scores(features[0])
            if isinstance(self.source, SyntheticSource)
            else scores
        )

    def class_names(self, labels: np.ndarray) -> list[str]:
        """The name of each class with an image in the split, by label."""
        captions = dict(
            zip(labels.tolist(), (sample.captions[0] for sample in self.data.samples), strict=False)
        )
        return [class_name(captions[label]) for label in sorted(captions)]

    def negative_scores(self, image: np.ndarray, rows: Sequence[int] | None = None) -> Scores:
        """How often the true caption of a synthetic image beats one with a changed attribute.

        `rows` are the images to use; None: all.
        """
        assert isinstance(self.source, SyntheticSource)
        samples = self.data.samples
        pairs = [
            (index, negative)
            for index in (range(len(samples)) if rows is None else rows)
            for negative in negatives(self.source.scene_of[samples[index].id], seed=index)
        ]
        # The negatives of an image share one true caption, which is encoded once.
        texts = list(
            dict.fromkeys(
                text for _, negative in pairs for text in (negative.truth, negative.caption)
            )
        )
        row = {text: number for number, text in enumerate(texts)}
        vectors = np.asarray(self.model.encode_text(texts))
        return negatives_accuracy(
            image,
            vectors[[row[negative.truth] for _, negative in pairs]],
            vectors[[row[negative.caption] for _, negative in pairs]],
            np.array([index for index, _ in pairs]),
            [negative.changed for _, negative in pairs],
        )


def other_class_vectors(model: Model, data: Split) -> np.ndarray | None:
    """(n, d) vectors of the classes without an image in a split, which are candidates too."""
    captions = data.captions.other_classes
    if captions is None:
        return None
    return np.asarray(model.encoder.captions(captions, range(len(captions.tokens))))
