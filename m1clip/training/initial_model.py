"""The model that a run starts from: random weights, a trained model, or pretrained towers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch

from m1clip.config import Config
from m1clip.data.images import Preprocess
from m1clip.data.types import Source
from m1clip.errors import UserError
from m1clip.hardware.machine_info import MachineInfo
from m1clip.losses.registry import DEFAULT_LOSS, LOSSES
from m1clip.model.clip import count_parameters
from m1clip.model.folder import SavedModel, read_model
from m1clip.model.presets import CLIPConfig, HeadConfig, clip_config
from m1clip.model.pretrained.registry import load_image_tower, load_text_tower, tower_image_size
from m1clip.model.weights import check_finite
from m1clip.text.base import Tokenizer
from m1clip.text.tokenizers import load_tokenizer, make_tokenizer
from m1clip.training.distributed import Ranks
from m1clip.training.inputs import ModelParts
from m1clip.training.tower_choice import base_of
from m1clip.training.transfer import ModelInit, Trainable

HEAD_HIDDEN_WIDTH, HEAD_DROPOUT = 512, 0.5  # of the hidden layer of a head
TOWER_CONTEXT, TOWER_EMBED = 64, 256  # defaults on pretrained towers
BYTES_PER_PARAMETER = 12  # weight, gradient and one moment of the optimizer in float32


class InitialModelLoader:
    """The initial model of a run: read once, and made again when the settings that shape it change.

    `open_data` opens the data, from whose captions a tokenizer is made. `run` is the folder of a
    run that is resumed.
    """

    def __init__(
        self, ranks: Ranks, open_data: Callable[[Config], Source], run: Path | None
    ) -> None:
        self._ranks = ranks
        self._open_data = open_data
        self._run = run
        self._saved: SavedModel | None = None
        self._parts: ModelParts | None = None
        self._members = 1  # in the settings that the parts were made from

    def saved(self, config: Config) -> SavedModel:
        """The model of --init as it is saved."""
        if self._saved is None:
            self._saved = self._ranks.rank0_first(lambda: read_init(config))
        return self._saved

    def parts(self, config: Config) -> ModelParts:
        """The model with its tokenizer and preprocessing: the same object until it changes."""
        members = config.model.members or 1
        if self._parts is None or members != self._members:  # decided after the first measurement
            self._parts = self._make(config)
            self._members = members
        init = self._parts.init
        mirror = config.model.mirror
        if mirror not in (None, init.config.mirror):  # decided after the data was read
            init = dataclasses.replace(init, config=dataclasses.replace(init.config, mirror=mirror))
            self._parts = self._parts._replace(init=init)
        return self._parts

    def _make(self, config: Config) -> ModelParts:
        if config.transfer.init is not None:
            saved = self.saved(config)
            return self._ranks.on_all_ranks(lambda: from_model(config, saved))
        source = self._open_data(config)
        if config.transfer.recipe == "frozen":
            return self._ranks.rank0_first(lambda: from_towers(config))
        tokenizer = self._ranks.on_rank0(lambda: own_tokenizer(config, source, self._run))
        return from_random_weights(config, tokenizer)

    def image_size(self, config: Config) -> int:
        """The size of images that the model is trained on, which needs no data."""
        if config.transfer.init is None:
            return image_size_of(config)
        return config.model.image_size or self.saved(config).preprocess.image_size


def own_tokenizer(config: Config, source: Source, saved: Path | None) -> Tokenizer:
    """The tokenizer of a model that starts from random weights.

    `saved` is the folder of a resumed run.
    """
    if saved is not None:
        return load_tokenizer(saved)
    captions = [caption for sample in source.sampled("train") for caption in sample.captions]
    kind = (
        "bpe"
        if source.streamed and config.model.tokenizer == "clip-bpe-pruned"
        else config.model.tokenizer
    )
    return make_tokenizer(kind, captions)


def from_random_weights(config: Config, tokenizer: Tokenizer) -> ModelParts:
    needs_bias = LOSSES[config.train.loss].needs_bias
    model_init = ModelInit(clip_config(config.model, tokenizer, logit_bias=needs_bias))
    # A caption describes the edges of an image too. Models with CLIP's patch layer crop as CLIP
    # does.
    resize: Literal["shortest", "squash"] = (
        "squash" if model_init.config.own_towers[0].stem == "conv" else "shortest"
    )
    return ModelParts(
        model_init, tokenizer, Preprocess(image_size=model_init.config.image_size, resize=resize)
    )


def image_size_of(config: Config) -> int:
    """The image size of a model that does not start from a trained one."""
    if config.transfer.recipe == "frozen":
        return config.model.image_size or tower_image_size(base_of(config.transfer.image_tower))
    return clip_config(config.model).image_size


def read_init(config: Config) -> SavedModel:
    saved = read_model(Path(config.transfer.init or ""))
    check_finite(saved.weights, saved.where)
    return saved


def from_model(config: Config, saved: SavedModel) -> ModelParts:
    transfer = config.transfer
    if saved.config.image_head.kind == "adapter" and config.model.image_size not in (
        None,
        saved.config.image_size,
    ):
        raise UserError(
            f"{transfer.init}: the image size of a model with pretrained towers is fixed,"
            f" {saved.config.image_size}"
        )
    saved = saved.resized(config.model.image_size)
    loss = config.train.loss
    if LOSSES[loss].needs_bias and not saved.config.logit_bias:
        raise UserError(
            f"{transfer.init}: has no logit bias for --loss {loss}; "
            f"use --loss {DEFAULT_LOSS}, or a model trained with {loss}"
        )
    preprocess = saved.preprocess
    if "-floor" in preprocess.resize:
        resize: Any = preprocess.resize.replace("-floor", "")
        preprocess = dataclasses.replace(preprocess, resize=resize)
    if transfer.recipe == "frozen":
        saved = saved.with_projections()
    model_init = ModelInit(
        saved.config,
        saved.weights,
        Trainable(
            transfer.recipe != "frozen" and transfer.unfreeze_image != 0,
            transfer.recipe != "frozen" and transfer.unfreeze_text != 0,
        ),
        (transfer.unfreeze_image, transfer.unfreeze_text),
        transfer.lora,
        None if transfer.adapter == "auto" else transfer.adapter,
    )
    return ModelParts(model_init, saved.tokenizer, preprocess)


def from_towers(config: Config) -> ModelParts:
    transfer, context = config.transfer, config.model.context_length or TOWER_CONTEXT
    image_tower, image, preprocess = load_image_tower(transfer.image_tower, image_size_of(config))
    text_tower, text, tokenizer = load_text_tower(transfer.text_tower, context)
    weights = {f"image_tower.{name}": value for name, value in image.items()}
    weights |= {f"text_tower.{name}": value for name, value in text.items()}
    head = HeadConfig(kind="adapter", hidden=HEAD_HIDDEN_WIDTH, dropout=HEAD_DROPOUT)
    shape = CLIPConfig(
        image_tower=image_tower,
        text_tower=text_tower,
        image_head=head,
        text_head=head,
        embed_dim=config.model.embed_dim or TOWER_EMBED,
        logit_bias=LOSSES[config.train.loss].needs_bias,
    )
    return ModelParts(
        ModelInit(shape, weights, Trainable(False, False), new_heads=True), tokenizer, preprocess
    )


def check_memory(shape: CLIPConfig, facts: MachineInfo) -> None:
    """Raise UserError, before reading the data, for a model that does not fit this machine at any
    batch size.
    """
    count = count_parameters(shape)
    memory = max(facts.memory_bytes, torch.cuda.mem_get_info()[1] if facts.cuda else 0)
    if count * BYTES_PER_PARAMETER > memory:
        raise UserError(
            f"a model of {count / 1e9:,.1f} billion parameters needs"
            f" {count * BYTES_PER_PARAMETER / 1e9:,.0f} GB to train, this machine has"
            f" {memory / 1e9:,.0f} GB: choose a smaller --model"
        )
