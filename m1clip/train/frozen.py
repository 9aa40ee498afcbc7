"""The frozen recipe: towers of others stand still, their features are made once, and only the heads are trained."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from m1clip.config import Config
from m1clip.data.cache_place import cache_folder
from m1clip.data.keep import DecodePlan, data_folders
from m1clip.data.loader import BatchPlan
from m1clip.data.pair import identities
from m1clip.data.prepare import Split, is_synthetic, look_first, open_data
from m1clip.data.preprocess import Preprocess
from m1clip.errors import UserError
from m1clip.features.split import Maker, feature_split
from m1clip.features.tables import FeatureCaptions, FeaturePictures, FeatureSet
from m1clip.hardware.facts import Facts, read_facts
from m1clip.model.clip import Clip
from m1clip.model.foreign.files import read_json
from m1clip.model.heads import Head
from m1clip.model.pretrained.clip import TowerClip
from m1clip.model.pretrained.hugging_face import load_tower, tower_file
from m1clip.model.pretrained.load import FILES, tower_weights, weights_hash, wordpieces
from m1clip.model.pretrained.shape import TowerShape
from m1clip.model.weights import assign_weights
from m1clip.text import FastTokenizer, WordPieceTokenizer
from m1clip.text.base import Tokenizer
from m1clip.train.precision import autocast
from m1clip.train.setup import Job, choose_hardware, device_line

HALF = (0.5, 0.5, 0.5)  # EfficientNet-Lite was trained on pixels between -1 and 1
MOST_CAPTIONS = 5  # of a picture in one step
SAMPLE = 50_000  # rows from which mean and deviation are taken
TEST_VIEWS = 1


@dataclass(frozen=True)
class FrozenJob(Job):
    """A run on features."""

    towers: TowerClip = dataclasses.field(kw_only=True)

    def build_model(self) -> Clip:
        """New heads from the seed on the same towers, told the mean and deviation of the training features."""
        torch.manual_seed(self.config.seed)
        model = TowerClip(self.towers.shape, self.tokenizer.pad_id).to(self.device.torch)
        model.image, model.text = self.towers.image, self.towers.text
        pictures = cast(FeaturePictures, self.splits["train"].pictures)
        captions = cast(FeatureCaptions, self.splits["train"].captions)
        cast(Head, model.image_projection).standardise(*moments(pictures.table, pictures.at[:, 0]))
        cast(Head, model.text_projection).standardise(*moments(captions.table, captions.at))
        return model

    def describe_model(self) -> str:
        """The towers that stand still and the heads that are trained."""
        shape, trained = (
            self.towers.shape,
            sum(p.numel() for p in self.towers.parameters() if p.requires_grad),
        )
        still = sum(p.numel() for p in self.towers.parameters()) - trained
        return (
            f"{shape.image_tower} and {shape.text_tower}, frozen ({still:,} parameters), "
            f"{shape.head} heads to {shape.embed_dim} ({trained:,} to train)"
        )


def moments(table: np.ndarray, at: np.ndarray) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of each feature over the rows `at`, or an even sample of many."""
    chosen = at[:: max(1, len(at) // SAMPLE)]
    rows = torch.from_numpy(table[np.sort(chosen)].astype(np.float32))
    return rows.mean(dim=0), rows.std(dim=0, correction=0)


def prepare_frozen(
    config: Config, say: Callable[[str], None], decode: Callable[[Facts], DecodePlan]
) -> FrozenJob:
    """Answer every question of a frozen run; this is where the towers work, once for each picture and caption."""
    transfer = config.transfer
    source = open_data(config.data, transfer.image_size, config.seed)
    if not source.pairs("train"):
        raise UserError(f"{', '.join(config.data.source)}: no training pairs found")
    facts = read_facts()
    device, precision, speedup = choose_hardware(config, facts)
    say(device_line(device, facts, precision, speedup))
    plan = decode(facts)
    towers, tokenizer, preprocess = pretrained_towers(config)
    towers = towers.to(device.torch).eval()
    lint = None
    if not is_synthetic(config.data):
        lint = look_first(source, transfer.image_size, transfer.context_length, say, plan.warn)
    roots, beside = data_folders(source)
    maker = Maker(
        model=towers, tokenizer=tokenizer, views=transfer.views, roots=roots, device=device.torch, precision=precision,
        preprocess=preprocess, folder=cache_folder(config.data.cache_dir, beside), plan=plan,
        autocast=autocast(device, precision), image_hash=weights_hash(towers.image.state_dict()),
        text_hash=weights_hash(towers.text.state_dict()),
    )  # fmt: skip
    splits: dict[str, Split] = {}
    for split in ("train", "val", "test"):
        if split in source.splits():
            wanted = maker if split == "train" else dataclasses.replace(maker, views=TEST_VIEWS)
            splits[split] = feature_split(wanted, source.pairs(split), split, config.data.max_bad)
    several = config.data.captions_per_step or _usual_captions(splits["train"])
    config = dataclasses.replace(
        config,
        data=dataclasses.replace(config.data, captions_per_step=several),
        train=dataclasses.replace(config.train, device=device.kind, precision=precision),
    )
    choices: dict[str, Any] = {"bf16_speedup": speedup, "features": str(maker.folder), "lint": lint}
    return FrozenJob(
        config=config, facts=facts, device=device, precision=precision, shape=cast(Any, towers.shape),
        tokenizer=tokenizer, preprocess=preprocess, source=source, splits=splits, choices=choices,
        training=_training_set(config, splits["train"], several), autocast=maker.autocast, towers=towers,
    )  # fmt: skip


def pretrained_towers(config: Config) -> tuple[TowerClip, Tokenizer, Preprocess]:
    """A model with its makers' weights in the towers and new heads, its tokenizer, and what its pictures must be."""
    transfer = config.transfer
    image = None if transfer.image_tower in FILES else load_tower(transfer.image_tower, "vision")
    text = None if transfer.text_tower in FILES else load_tower(transfer.text_tower, "text")
    tokenizer = (
        WordPieceTokenizer(wordpieces())
        if text is None
        else _their_tokenizer(transfer.text_tower, text.pad_id)
    )
    preprocess = _preprocess(transfer.image_tower if image else None, transfer.image_size)
    shape = TowerShape(
        image_tower=transfer.image_tower, text_tower=transfer.text_tower, image_size=preprocess.image_size,
        image_config=image.config if image else "", text_config=text.config if text else "",
        context_length=transfer.context_length, vocab_size=tokenizer.vocab_size, embed_dim=transfer.embed_dim,
        head=transfer.head, hidden=transfer.hidden, dropout=transfer.dropout,
        logit_bias=config.train.objective == "sigmoid",
    )  # fmt: skip
    model = TowerClip(shape, tokenizer.pad_id)
    assign_weights(
        model.image, image.weights if image else tower_weights(shape.image_tower), shape.image_tower
    )
    assign_weights(model.text, text.weights if text else tower_weights(shape.text_tower), shape.text_tower)
    return model, tokenizer, preprocess


def _their_tokenizer(name: str, pad_id: int) -> Tokenizer:
    path = tower_file(name, "tokenizer.json")
    if path is None:
        raise UserError(f"{name}: has no tokenizer.json; save it with transformers' fast tokenizer first")
    try:
        return FastTokenizer(path.read_text(encoding="utf-8"), pad_id)
    except ValueError as error:
        raise UserError(f"{path}: {error}") from None


def _preprocess(name: str | None, size: int) -> Preprocess:
    """The pixels that a tower was trained on. The whole picture is squashed: a caption tells of its edges too."""
    path = tower_file(name, "preprocessor_config.json") if name else None
    seen = read_json(path) if path else {}
    told = seen.get("crop_size", seen.get("size"))
    told = next(iter(told.values()), None) if isinstance(told, dict) else told
    mean, std = (tuple(seen.get(key, HALF)) for key in ("image_mean", "image_std"))
    return Preprocess(image_size=told if isinstance(told, int) else size, mean=mean, std=std, resize="squash")


def _usual_captions(train: Split) -> int:
    return max(1, min(int(np.median(np.diff(train.captions.first))), MOST_CAPTIONS))


def _training_set(config: Config, train: Split, several: int) -> FeatureSet:
    plan = BatchPlan(len(train.pairs), config.train.batch, config.seed)
    if plan.steps_per_epoch == 0:
        raise UserError(
            f"{plan.pictures} training pictures do not fill one batch of {plan.batch}: "
            f"lower --batch to {max(2, plan.pictures // 2)}, or bring more pictures"
        )
    pictures, captions = cast(FeaturePictures, train.pictures), cast(FeatureCaptions, train.captions)
    return FeatureSet(pictures, captions, plan, identities(train.pairs), several)
