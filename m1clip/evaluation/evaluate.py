"""Evaluating a model on a split."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from m1clip.config import Config, load_config
from m1clip.data.cache import DecodePlan
from m1clip.data.prepare import Split, load_split, open_data
from m1clip.data.sources.folders import class_name
from m1clip.data.synthetic.captions import negatives
from m1clip.data.synthetic.source import SyntheticSource
from m1clip.data.types import Source
from m1clip.errors import UserError
from m1clip.evaluation.analysis import negatives_accuracy
from m1clip.evaluation.retrieval import class_accuracies, retrieval
from m1clip.evaluation.statistics import Scores
from m1clip.hardware.device import Device, choose_device, choose_precision, threads
from m1clip.hardware.facts import Facts, decode_threads, read_facts
from m1clip.inference import load
from m1clip.inference.encoder import Model, SplitFeatures, encode_split, in_order, split_features
from m1clip.inference.onnx import OnnxModel

ONNX_BATCH = 16  # images


def evaluate(
    model: Model | OnnxModel | str | Path,
    data: str | Path | Sequence[str | Path],
    split: str = "test",
    device: str = "auto",
) -> Scores:
    """Scores of a model, or of the model at a path, on a split of any data that `--data` accepts."""
    sources = [data] if isinstance(data, str | Path) else data
    evaluator = open_split(model, tuple(map(str, sources)), split, device)
    return evaluator.scores(evaluator.encode())


def quiet_decoding(facts: Facts) -> DecodePlan:
    """Decode images without reporting progress."""
    return DecodePlan(decode_threads(), facts.memory_bytes, lambda title: nullcontext(_ignore), _ignore)


def _ignore(*_: object) -> None:
    return None


def open_split(
    model: Model | OnnxModel | str | Path,
    data: tuple[str, ...] = (),
    split: str = "test",
    device_name: str = "auto",
    decoding: Callable[[Facts], DecodePlan] = quiet_decoding,
) -> Evaluator:
    """A model on the device, and a split of `data` or of the data its run was trained on."""
    run = None if isinstance(model, Model | OnnxModel) else Path(model)
    bundle = model if isinstance(model, Model | OnnxModel) else load(model)
    trained = run is not None and (run / "config.toml").is_file()
    if not trained and not data:
        raise UserError(f"{run}: no config.toml, so the training data is unknown; specify data with --data")
    config = load_config(run / "config.toml") if run is not None and trained else Config()
    sources = dataclasses.replace(config.data, source=data) if data else config.data
    facts = read_facts()
    if isinstance(bundle, Model):
        _onto_device(bundle, config, trained, device_name, facts)
    source = open_data(sources, bundle.preprocess.image_size, config.seed)
    if split not in source.splits():
        raise UserError(f"{', '.join(sources.source)}: has no {split} split, only {', '.join(source.splits())}")
    length, plan = bundle.context_length, decoding(facts)
    samples = load_split(source, split, sources, bundle.tokenizer, length, bundle.preprocess, 1.0, plan)
    return Evaluator(bundle, source, split, samples)


def _onto_device(model: Model, config: Config, trained: bool, device_name: str, facts: Facts) -> None:
    """Move the model to the device; set the precision to run it in."""
    device = Device(choose_device(device_name, facts), facts)
    torch.set_num_threads(threads(config.train.threads, facts))
    # On the device of the run, use its settings, so that the scores match those printed in training.
    as_trained = trained and config.train.device != "auto" and device.torch == Device(config.train.device, facts).torch
    model.clip.to(device.torch)
    if as_trained and config.train.precision != "auto":
        model.precision = choose_precision(config.train.precision, device.kind, facts)


@dataclass(frozen=True)
class Evaluator:
    """A model and the split it is evaluated on."""

    model: Model | OnnxModel
    source: Source
    split: str
    data: Split

    def encode(self) -> SplitFeatures:
        """Vectors of every image and caption of the split."""
        if isinstance(self.model, OnnxModel):
            return encode_split_onnx(self.model, self.data)
        return encode_split(self.model, self.data)

    def scores(self, features: SplitFeatures) -> Scores:
        """Retrieval; for synthetic images also the accuracy against negative captions."""
        others = other_class_vectors(self.model, self.data)
        scores = retrieval(*features, others)
        if features.labels is not None:
            scores += class_accuracies(features, others, self.class_names(features.labels))
        return scores + self.negative_scores(features[0]) if isinstance(self.source, SyntheticSource) else scores

    def class_names(self, labels: Tensor) -> list[str]:
        """The name of each class with an image in the split, by label."""
        captions = dict(zip(labels.tolist(), (sample.captions[0] for sample in self.data.samples), strict=False))
        return [class_name(captions[label]) for label in sorted(captions)]

    @torch.inference_mode()
    def negative_scores(self, image: Tensor) -> Scores:
        """How often the true caption of a synthetic image beats one with a changed attribute."""
        assert isinstance(self.source, SyntheticSource)
        asked = [
            (index, negative)
            for index, sample in enumerate(self.data.samples)
            for negative in negatives(self.source.scene_of[sample.id], seed=index)
        ]
        # The negatives of an image share one true caption, which is encoded once.
        texts = list(dict.fromkeys(text for _, negative in asked for text in (negative.truth, negative.caption)))
        row = {text: number for number, text in enumerate(texts)}
        vectors = torch.as_tensor(self.model.encode_text(texts))
        return negatives_accuracy(
            image,
            vectors[[row[negative.truth] for _, negative in asked]],
            vectors[[row[negative.caption] for _, negative in asked]],
            torch.tensor([index for index, _ in asked]),
            [negative.changed for _, negative in asked],
        )


@torch.inference_mode()
def other_class_vectors(model: Model | OnnxModel, data: Split) -> Tensor | None:
    """(n, d) vectors of the classes without an image in a split: all classes are candidates for each image."""
    captions = data.captions.other_classes
    if captions is None:
        return None
    if isinstance(model, OnnxModel):
        return torch.from_numpy(model.tokens(captions.tokens, captions.lengths, 4 * ONNX_BATCH))
    training = model.clip.training
    encoder = model.encoder()
    if captions.features is None:
        vectors = in_order(encoder.tokens(captions.tokens, captions.lengths))
    else:
        features = captions.features.read(np.arange(len(captions.features)))
        with encoder.autocast():
            vectors = model.clip.project_text(torch.from_numpy(features).to(model.device).float()).cpu()
    if training:
        model.clip.train()
    return vectors.float()


def encode_split_onnx(model: OnnxModel, split: Split, image_rows: int | None = None) -> SplitFeatures:
    """`encode_split` for a model in onnxruntime."""
    captions = split.captions
    rows = np.arange(len(split.images) if image_rows is None else image_rows)
    texts = int(captions.first[len(rows)])
    blocks = [model.pixels(split.images.read(rows[at : at + ONNX_BATCH])) for at in range(0, len(rows), ONNX_BATCH)]
    text = model.tokens(captions.tokens[:texts], captions.lengths[:texts], 4 * ONNX_BATCH)
    return split_features(torch.from_numpy(np.concatenate(blocks)), torch.from_numpy(text), captions)
