"""Transfer learning: frozen and fine-tuned towers, distillation and WiSE-FT."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from m1clip import console
from m1clip.config import Config
from m1clip.data.augment import render
from m1clip.data.cache import cache_folder, data_folders
from m1clip.data.captions import CaptionTable
from m1clip.data.decoding import DecodeOptions, read_or_replace
from m1clip.data.images import Preprocess
from m1clip.data.prepare import Split, load_split, other_classes, stream_split, with_classes
from m1clip.data.sources.stream import StreamedSource
from m1clip.data.types import Sample, Source
from m1clip.errors import UserError
from m1clip.evaluation.evaluate import other_class_vectors
from m1clip.evaluation.retrieval import retrieval
from m1clip.evaluation.statistics import selection_metric
from m1clip.hardware.device import Device, Precision
from m1clip.inference import load
from m1clip.inference.feature_cache import FeatureCache, FrozenTower
from m1clip.inference.features import encode_split
from m1clip.model.blocks import ALL_BLOCKS, unfreeze
from m1clip.model.clip import CLIP, build_clip
from m1clip.model.heads import Head
from m1clip.model.lora import add_head_lora, add_lora
from m1clip.model.members import MemberTowers
from m1clip.model.presets import CLIPConfig, VisionTowerConfig
from m1clip.model.residual import ResidualKind, add_residual
from m1clip.model.towers import FILTER_SIZE, VisionTower, whitening_filters
from m1clip.model.weights import Tensors, assign_weights, weights_hash
from m1clip.training.cca import fit_projections, image_ridges

if TYPE_CHECKING:  # workbench imports this module too
    from m1clip.training.inputs import ModelParts, RunInputs

WHITENING_IMAGES, WHITENING_PIXELS = 256, 1 << 22  # at most, for the first layer of a conv stem
STATISTICS_ROWS = 50_000  # used to compute the mean and deviation of features
WISE_FT_GRID = (0.0, 0.25, 0.5, 0.75, 1.0)  # interpolation weights that `--wise-ft search` tries


class Trainable(NamedTuple):
    """Which towers are trainable; the features of frozen ones are cached."""

    image: bool = True
    text: bool = True


BOTH = Trainable()


@dataclass(frozen=True)
class ModelInit:
    """The initial model of a run."""

    config: CLIPConfig
    # Of the model, or of its pretrained towers and what is known of new heads; the rest is randomly
    # initialized.
    weights: Tensors = field(default_factory=dict)
    trainable: Trainable = BOTH
    unfreeze: tuple[int, int] = (ALL_BLOCKS, ALL_BLOCKS)  # blocks to train of each trainable tower
    lora: int = 0  # rank of the matrices that are trained instead of these blocks; 0: the blocks
    adapter: ResidualKind | None = None  # on the heads; None: they are trained as they are
    new_heads: bool = (
        False  # on frozen towers; fitted before training, on few images they can be the best model
    )
    stem_filters: Tensor | None = (
        None  # initial filters of a stem's first layer, computed from training images
    )

    def build(self, load_weights: bool = True) -> CLIP:
        """Build the model on the CPU, load its weights and freeze what is not trainable."""
        model = build_clip(self.config)
        if load_weights and self.weights:
            for name in ("image_tower", "text_tower") if self.new_heads else ("",):
                part = {
                    key.removeprefix(f"{name}."): value
                    for key, value in self.weights.items()
                    if key.startswith(name)
                }
                if part:
                    assign_weights(
                        model.get_submodule(name), part, name or "the model to start from"
                    )
            if self.new_heads:
                model.load_state_dict(
                    {
                        key: value
                        for key, value in self.weights.items()
                        if "_head." in key or key == "logit_scale"
                    },
                    strict=False,
                )
        if (
            load_weights
            and self.stem_filters is not None
            and isinstance(model.image_tower, VisionTower | MemberTowers)
        ):
            model.image_tower.set_stem_filters(self.stem_filters)
        options = ("--unfreeze-image", "--unfreeze-text")
        towers = (model.image_tower, model.text_tower)
        for tower, trained, count, option in zip(
            towers, self.trainable, self.unfreeze, options, strict=True
        ):
            if self.lora:
                add_lora(tower, count if trained else 0, self.lora, option)
            else:
                unfreeze(tower, count if trained else 0, option)
        for head in (model.image_head, model.text_head):
            if self.lora:
                add_head_lora(head, self.lora)
            if self.adapter is not None:
                add_residual(head, self.adapter)
            if isinstance(head, Head) and not self.new_heads:
                head.spare_dead_channels()
        return model


def parameter_counts(model_init: ModelInit) -> tuple[int, int]:
    """(trainable, all) parameters of the initial model, without allocating them."""
    with torch.device("meta"):
        model = model_init.build(load_weights=False)
    parameters = list(model.parameters())
    return sum(p.numel() for p in parameters if p.requires_grad), sum(p.numel() for p in parameters)


def fit_heads(config: CLIPConfig, train: Split) -> Tensors:
    """The feature statistics of new heads on frozen towers, and their projections by CCA."""
    heads: dict[str, Head] = {}
    for name, table in (
        ("image_head", train.image_features),
        ("text_head", train.captions.features),
    ):
        assert table is not None
        heads[name] = Head(getattr(config, name), table.array.shape[1], config.embed_dim)
        heads[name].standardize(*mean_and_std(table.array, table.rows))
    ridges = image_ridges(config.image_tower, len(heads["image_head"].mean))
    fit_projections(heads["image_head"], heads["text_head"], train, ridges)
    fitted = ("mean", "deviation", "project.weight", "project.bias")
    return {
        f"{name}.{key}": head.state_dict()[key] for name, head in heads.items() for key in fitted
    }


def fit_stem(config: CLIPConfig, train: Split, preprocess: Preprocess) -> Tensor | None:
    """Whitening filters of the training images for a conv stem; None if the model has none."""
    vision = config.image_tower
    if (
        not isinstance(vision, VisionTowerConfig)
        or vision.stem != "conv"
        or vision.image_size < FILTER_SIZE
    ):
        return None
    count = min(WHITENING_IMAGES, max(2, WHITENING_PIXELS // vision.image_size**2))
    first = np.arange(min(len(train.images), count))
    _, pixels, _ = read_or_replace(train.images, first, seed=0, epoch=0)
    return whitening_filters(
        render(torch.from_numpy(pixels), None, preprocess), vision.stem_channels[0]
    )


def mean_and_std(table: np.ndarray, at: np.ndarray) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of each feature over the rows `at`, subsampled if there
    are many.
    """
    chosen = at[:: max(1, len(at) // STATISTICS_ROWS)]
    rows = torch.from_numpy(table[np.sort(chosen)].astype(np.float32))
    return rows.mean(dim=0), rows.std(dim=0, correction=0)


def open_feature_cache(
    model: CLIP | None,
    parts: ModelParts,
    config: Config,
    source: Source,
    device: Device,
    precision: Precision,
    decoding: DecodeOptions,
) -> FeatureCache:
    """The cache of the features of frozen towers of a model; `model` is None if none is frozen."""
    model_init = parts.init
    if model is not None:
        model.to(device.torch).eval()
    sides = []
    for name, trained in zip(("image_tower", "text_tower"), model_init.trainable, strict=True):
        tower: Any = None if model is None or trained else getattr(model, name)
        settings = json.dumps(dataclasses.asdict(getattr(model_init.config, name)), sort_keys=True)
        key = () if tower is None else (weights_hash(tower.state_dict()), settings)
        sides.append(FrozenTower(tower, 0 if tower is None else tower.width, key))
    folders = data_folders(source)
    where = (
        cache_folder(config.data.cache_dir, folders),
        folders,
        device.torch,
        precision,
        decoding,
    )
    return FeatureCache(
        sides[0],
        sides[1],
        parts.tokenizer,
        model_init.config.context_length,
        parts.preprocess,
        *where,
    )


def load_features(
    cache: FeatureCache,
    config: Config,
    source: Source,
    split: str,
    model_init: ModelInit,
    margin: float = 1.0,
) -> Split:
    """A split of the data, with the features of frozen towers instead of images or tokens."""
    if model_init.trainable.image:
        how = (
            config.data,
            cache.tokenizer,
            cache.context_length,
            cache.preprocess,
            margin,
            cache.decoding,
        )
        if isinstance(source, StreamedSource) and split == "train":
            return stream_split(source, *how)
        loaded = load_split(source, split, *how)
        if model_init.trainable.text:
            return loaded
        return dataclasses.replace(
            loaded, captions=_captions(cache, source, loaded.samples, split, model_init)
        )
    images, features, samples, failures = cache.images(
        source.samples(split), split, config.data.max_unreadable
    )
    captions = _captions(cache, source, samples, split, model_init)
    return Split(images, captions, samples, failures, "features", features)


def _captions(
    cache: FeatureCache,
    source: Source,
    samples: Sequence[Sample],
    split: str,
    model_init: ModelInit,
) -> CaptionTable:
    """The captions of the samples, as tokens or as features of a frozen tower.

    With those of all other classes.
    """
    captions, others = (
        cache.tokens(group)
        if model_init.trainable.text or not group
        else cache.captions(group, split)
        for group in (samples, other_classes(source, samples))
    )
    return with_classes(captions, source, others)


@dataclass(frozen=True)
class Teacher:
    """Distillation: unit vectors of every training image and caption from another model, and its
    temperature.
    """

    image: np.ndarray  # (rows, d) float16
    image_rows: np.ndarray  # (images,) row of each sample id
    text: np.ndarray  # (rows, d) float16
    text_rows: np.ndarray  # (captions,) row of each caption id
    scale: float

    def logits(self, sample_ids: Tensor, caption_ids: Tensor) -> Tensor:
        """(n, m) of the images and captions of a batch, on their device, in float32."""
        image = self.image[self.image_rows[sample_ids.cpu().numpy()]].astype(np.float32)
        text = self.text[self.text_rows[caption_ids.cpu().numpy()]].astype(np.float32)
        device = sample_ids.device
        return self.scale * torch.from_numpy(image).to(device) @ torch.from_numpy(text).to(device).T


def load_teacher(
    config: Config,
    source: Source,
    train: Split,
    device: Device,
    precision: Precision,
    decoding: DecodeOptions,
) -> Teacher:
    transfer = config.transfer
    teacher = load(Path(transfer.teacher or ""), device.kind)
    clip = teacher.clip
    # The config is part of the key: another activation or number of heads changes the vectors.
    key = (
        weights_hash(clip.state_dict()),
        json.dumps(clip.config.to_dict(), sort_keys=True),
        "unit vectors",
    )
    folders = data_folders(source)
    image, text = (
        FrozenTower(encode, clip.config.embed_dim, key)
        for encode in (clip.encode_image, clip.encode_text)
    )
    where = (
        cache_folder(config.data.cache_dir, folders),
        folders,
        device.torch,
        precision,
        decoding,
    )
    cache = FeatureCache(
        image, text, teacher.tokenizer, clip.config.context_length, teacher.preprocess, *where
    )
    _, images, samples, _ = cache.images(train.samples, "train", 0.0)
    if len(samples) != len(train.samples):
        raise UserError(
            f"{transfer.teacher}: cannot read {len(train.samples) - len(samples)} of the training"
            " images"
        )
    texts = cache.captions(train.samples, "train").features
    assert texts is not None
    _, first = np.unique(train.captions.caption_ids, return_index=True)  # keys are 0, 1, 2, ...
    scale = float(clip.scale().detach())
    return Teacher(images.array, images.rows, texts.array, texts.rows[first], scale)


def interpolate_tensors(old: Tensors, new: Tensors, weight: float) -> Tensors:
    """WiSE-FT: linear interpolation of each weight from old (0) to new (1)."""
    return {
        name: old[name].to(tensor).lerp(tensor, weight) if tensor.is_floating_point() else tensor
        for name, tensor in new.items()
    }


def interpolate_weights(inputs: RunInputs, folder: Path, write: Callable[..., Any]) -> None:
    """WiSE-FT of the best model as configured.

    The interpolation with the best validation score replaces it.
    """
    setting, val = inputs.config.transfer.wise_ft, inputs.splits.get("val")
    best = load(folder, device=inputs.device.torch.type, precision=inputs.precision)
    new = {name: tensor.clone() for name, tensor in best.clip.state_dict().items()}
    scores: list[tuple[float, float]] = []
    shown = ""
    for weight in WISE_FT_GRID if setting == "search" else (float(setting),):
        best.clip.load_state_dict(interpolate_tensors(inputs.model.init.weights, new, weight))
        metric = None
        if val is not None:
            metric = selection_metric(
                retrieval(*encode_split(best, val), other_class_vectors(best, val))
            )
        scores.append((0.0 if metric is None else metric.value, weight))
        write(
            "wise_ft",
            new_fraction=weight,
            **({} if metric is None else {f"val_{metric.name}": metric.value}),
        )
        shown = "" if metric is None else f": validation {metric.label} {100 * max(scores)[0]:.1f}%"
    weight = max(scores)[1]
    best.clip.load_state_dict(interpolate_tensors(inputs.model.init.weights, new, weight))
    console.print(f"WiSE-FT    {weight:.2f} of the new weights, {1 - weight:.2f} of the old{shown}")
    best.save(folder / "best")
