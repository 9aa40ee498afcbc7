"""`train --init MODEL`: the same loop from somebody's weights, with parts held still, LoRA, and a mix at the end."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from m1clip.config import Config, ModelConfig
from m1clip.config_transfer import TransferConfig
from m1clip.data.keep import DecodePlan
from m1clip.data.prepare import Split, load_split, open_data
from m1clip.errors import UserError
from m1clip.evaluate.bundle import Bundle, load, read_parts
from m1clip.evaluate.dataset import encode_split
from m1clip.evaluate.heldout import held_out
from m1clip.evaluate.metric import Scores
from m1clip.hardware.facts import Facts
from m1clip.model.clip import Clip
from m1clip.model.freeze import train_last
from m1clip.model.lora import add_lora
from m1clip.model.pretrained.shape import TowerShape
from m1clip.model.shape import ClipShape
from m1clip.model.weights import assign_weights, fit_positions, other_tokens
from m1clip.text import BpeTokenizer, Tokenizer
from m1clip.text.vocabulary import row_sources
from m1clip.train.setup import Job, prepare

BATCH = 128  # pictures encoded at once
GRID = (0.0, 0.25, 0.5, 0.75, 1.0)  # shares of the new weights that `--wise search` tries


@dataclass(frozen=True)
class InitJob(Job):
    """A run that starts from weights."""

    start: dict[str, Tensor] = dataclasses.field(kw_only=True)
    base: Split | None = dataclasses.field(kw_only=True)  # what must not be forgotten

    def build_model(self) -> Clip:
        """The model with the weights it starts from; what is to stand still does."""
        model = super().build_model()
        assign_weights(
            model,
            {name: t.to(self.device.torch) for name, t in self.start.items()},
            self.config.transfer.init or "",
        )
        transfer = self.config.transfer
        for tower, count, name in (
            (model.image, transfer.train_image, "--transfer.train-image"),
            (model.text, transfer.train_text, "--transfer.train-text"),
        ):
            train_last(tower, tower.transformer.blocks, count, name)
            if transfer.lora_rank:
                add_lora(tower, transfer.lora_rank, transfer.lora_alpha, transfer.lora_targets)
        return model

    def describe_model(self) -> str:
        """Where it starts, and how much of it moves."""
        model = self.build_model()
        moving = sum(p.numel() for p in model.parameters() if p.requires_grad)
        whole = sum(p.numel() for p in model.parameters())
        return f"from {self.config.transfer.init}: {moving:,} of {whole:,} parameters to train"

    def polish(self, folder: Path, say: Callable[[str], None], write: Callable[..., Any]) -> None:
        """Mix old and new weights as asked, and say what was kept of what the model could do before."""
        best, wish = load(folder, device=self.device.kind), self.config.transfer.wise
        new = {name: tensor.clone() for name, tensor in best.model.state_dict().items()}
        tried = GRID if wish == "search" else (1.0,) if wish == "off" else (float(wish),)
        found: list[tuple[float, float]] = []
        for share in tried:
            best.model.load_state_dict(mixed(self.start, new, share))
            own = self._recall(best, self.splits["val"]) if "val" in self.splits else 0.0
            found.append((own, share))
            if wish != "off":
                write("wise", share=share, val_mean_recall=own)
        own, share = max(found)
        weights = mixed(self.start, new, share)
        best.model.load_state_dict(weights)
        if wish != "off":
            parts = f"{share:.2f} of the new weights, {1 - share:.2f} of the old"
            say(f"wise       {parts}: validation mean recall {100 * own:.1f}%")
            best.save(folder / "best")
        if self.base is not None:
            after = self._recall(best, self.base)
            best.model.load_state_dict({name: t.to(self.device.torch) for name, t in self.start.items()})
            before = self._recall(best, self.base)
            write("forgetting", before=before, after=after)
            where, change = ", ".join(self.config.transfer.base), f"{before:.1%} before, {after:.1%} after"
            say(f"forgetting mean recall on {where}: {change}")

    def _recall(self, bundle: Bundle, split: Split) -> float:
        features = encode_split(
            bundle.model, split.pictures, split.captions, bundle.preprocess, BATCH, self.autocast
        )
        return _mean_recall(held_out(*features))


def mixed(old: dict[str, Tensor], new: dict[str, Tensor], share: float) -> dict[str, Tensor]:
    """WiSE-FT: each weight on the line from the old (0) to the new (1)."""
    return {name: old[name].to(tensor).lerp(tensor, share) for name, tensor in new.items()}


def prepare_init(
    config: Config, say: Callable[[str], None], decode: Callable[[Facts], DecodePlan], saved: Any = None
) -> InitJob:
    """Answer every question of a run that starts from a model; `saved` as in setup.prepare."""
    init = Path(config.transfer.init or "")
    parts = read_parts(init, config.transfer.activation)
    if isinstance(parts.shape, TowerShape):
        raise UserError(
            f"{init}: a model on frozen towers; train it again with --recipe frozen, its features are kept"
        )
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
    base = _base(config.transfer, job, decode) if config.transfer.base else None
    values = {item.name: getattr(job, item.name) for item in dataclasses.fields(Job)}
    return InitJob(**{**values, "preprocess": preprocess}, start=weights, base=base)


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


def _base(transfer: TransferConfig, job: Job, decode: Callable[[Facts], DecodePlan]) -> Split:
    """The set on which forgetting is measured: its test split, or what it has instead."""
    data = dataclasses.replace(job.config.data, source=transfer.base)
    source = open_data(data, job.shape.image_size, job.config.seed)
    split = next(name for name in ("test", "val", "train") if name in source.splits())
    context = job.shape.context_length
    return load_split(source, split, data, job.tokenizer, context, job.preprocess, 1.0, decode(job.facts))


def _mean_recall(scores: Scores) -> float:
    values = [value for name, value in scores if "/recall@" in name]
    return sum(values) / len(values)
