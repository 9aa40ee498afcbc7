"""`train --init MODEL`: the same loop from somebody's weights, with parts held still, LoRA, and a mix at the end."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from m1clip.config import Config, DataConfig, ModelConfig
from m1clip.data.keep import DecodePlan
from m1clip.data.pair import Source
from m1clip.data.prepare import Split, load_split, open_data
from m1clip.errors import UserError
from m1clip.evaluate.bundle import read_parts
from m1clip.hardware.facts import Facts
from m1clip.model.clip import Clip
from m1clip.model.lora import open_tower
from m1clip.model.pretrained.shape import TowerShape
from m1clip.model.shape import ClipShape
from m1clip.model.weights import assign_weights, fit_positions, other_tokens
from m1clip.text import BpeTokenizer, Tokenizer
from m1clip.text.vocabulary import row_sources
from m1clip.train.forgetting import Base, with_base
from m1clip.train.mixing import mix
from m1clip.train.setup import Job, prepare
from m1clip.train.unfreeze import prepare_unfrozen


@dataclass(frozen=True)
class InitJob(Job):
    """A run that starts from weights."""

    start: dict[str, Tensor] = dataclasses.field(kw_only=True)
    base: Base | None = dataclasses.field(kw_only=True, default=None)  # what must not be forgotten

    def build_model(self) -> Clip:
        """The model with the weights it starts from; what is to stand still does."""
        model = super().build_model()
        weights = {name: t.to(self.device.torch) for name, t in self.start.items()}
        assign_weights(model, weights, self.config.transfer.init or "")
        transfer = self.config.transfer
        lora = (transfer.lora_rank, transfer.lora_alpha, transfer.lora_targets)
        open_tower(model.image, transfer.train_image, "--transfer.train-image", *lora)
        open_tower(model.text, transfer.train_text, "--transfer.train-text", *lora)
        return model

    def describe_model(self) -> str:
        """Where it starts, and how much of it moves."""
        model = self.build_model()
        moving = sum(p.numel() for p in model.parameters() if p.requires_grad)
        whole = sum(p.numel() for p in model.parameters())
        return f"from {self.config.transfer.init}: {moving:,} of {whole:,} parameters to train"

    def polish(self, folder: Path, say: Callable[[str], None], write: Callable[..., Any]) -> None:
        """Mix old and new weights as asked, and say what was kept of what the model could do before."""
        mix(self, self.start, self.base, folder, say, write)

    def also_measured(self, model: Clip, say: Callable[[str], None]) -> dict[str, Any]:
        """The base set, where there is one."""
        return {} if self.base is None else self.base.figures(model, say)


def prepare_init(
    config: Config, say: Callable[[str], None], decode: Callable[[Facts], DecodePlan], saved: Any = None
) -> Job:
    """Answer every question of a run that starts from a model; `saved` as in setup.prepare."""
    init, config = Path(config.transfer.init or ""), _gently(config)
    parts = read_parts(init, config.transfer.activation)
    if isinstance(parts.shape, TowerShape):
        return prepare_unfrozen(config, say, decode, parts)
    if parts.preprocess.resize == "squash":
        raise UserError(f"{init}: squashes pictures, which training from --init does not do")
    shape = parts.shape
    with tempfile.TemporaryDirectory() as folder:
        _tokenizer(parts.tokenizer, config).save(Path(folder))
        shaped = dataclasses.replace(config, model=_model_config(config.model, shape))
        job = prepare(shaped, say, decode, saved=saved or Path(folder))
    weights = fitted(parts.weights, shape, job.shape, parts.tokenizer, job.tokenizer)
    preprocess = dataclasses.replace(
        parts.preprocess, image_size=job.shape.image_size, resize=job.preprocess.resize
    )
    values = {item.name: getattr(job, item.name) for item in dataclasses.fields(Job)}
    made = InitJob(**{**values, "preprocess": preprocess}, start=weights)

    def load_base(source: Source, split: str, data: DataConfig) -> Split:
        context = job.shape.context_length
        return load_split(source, split, data, job.tokenizer, context, preprocess, 1.0, decode(job.facts))

    return with_base(made, load_base)


def _gently(config: Config) -> Config:
    """What helps random weights against learning by heart would only disturb trained ones: off unless asked for."""
    data, train = config.data, config.train
    return dataclasses.replace(
        config,
        data=dataclasses.replace(
            data, word_dropout=data.word_dropout or 0.0, patch_dropout=data.patch_dropout or 0.0
        ),
        train=dataclasses.replace(train, text_contrast=train.text_contrast or 0.0),
    )


def fitted(
    weights: dict[str, Tensor], trained: ClipShape, shape: ClipShape, old: Tokenizer, new: Tokenizer
) -> dict[str, Tensor]:
    """The weights for the shape of the run: another image size, another vocabulary."""
    weights = dict(weights)
    fit_positions(weights, trained, shape)
    if isinstance(old, BpeTokenizer) and isinstance(new, BpeTokenizer) and old != new:
        weights = other_tokens(weights, row_sources(old, new))
    return weights


def _tokenizer(old: Tokenizer, config: Config) -> Tokenizer:
    if config.transfer.vocabulary == "keep":
        return old
    if not isinstance(old, BpeTokenizer):
        raise UserError("--transfer.vocabulary cut goes with CLIP's pieces, not with another tokenizer")
    source = open_data(config.data, 32, config.seed)
    return BpeTokenizer().cut_to(caption for pair in source.pairs("train") for caption in pair.captions)


def _model_config(config: ModelConfig, shape: ClipShape) -> ModelConfig:
    """The shape of the model it starts from; only the image size may be another."""
    names = {item.name for item in dataclasses.fields(ModelConfig)} & set(shape.to_dict()) - {"dropout"}
    values = {name: getattr(shape, name) for name in names}
    if config.image_size is not None:
        values["image_size"] = config.image_size
    return dataclasses.replace(config, **values)
