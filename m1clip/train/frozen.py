"""The frozen recipe: towers of others stand still, their features are made once, and only the heads are trained.

With a tower of ours (`vit`, `text`) beside a pretrained one, ours is trained from random weights (LiT).
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from m1clip.config import Config, ModelConfig
from m1clip.data.keep import DecodePlan
from m1clip.data.preprocess import Preprocess
from m1clip.errors import UserError
from m1clip.files import read_small
from m1clip.hardware.facts import Facts, read_facts
from m1clip.hardware.measure import DTYPES
from m1clip.model.build import resolved, shape_of
from m1clip.model.choose import choose_attention
from m1clip.model.foreign.files import read_json
from m1clip.model.pretrained.build import own_config, own_shape
from m1clip.model.pretrained.clip import TowerClip
from m1clip.model.pretrained.hugging_face import load_tower, tower_file
from m1clip.model.pretrained.load import FILES, OWN_IMAGE, OWN_TEXT, tower_weights, wordpieces
from m1clip.model.pretrained.shape import TowerShape
from m1clip.model.pretrained.timm_tower import PREFIX, TIMM, load_timm
from m1clip.model.shape import ClipShape
from m1clip.model.weights import assign_weights
from m1clip.text import MAX_BYTES as MAX_TOKENIZER_BYTES
from m1clip.text import FastTokenizer, WordPieceTokenizer, make_tokenizer
from m1clip.text.base import Tokenizer
from m1clip.train.auto import usual_captions
from m1clip.train.fit import USUAL_BATCH, open_training_data, with_batch
from m1clip.train.setup import choose_hardware, device_line
from m1clip.train.sides import (
    Moving,
    augmentation_for,
    look_at,
    maker_of,
    side_splits,
    training_set,
)
from m1clip.train.tower_job import TowerJob

HALF = (0.5, 0.5, 0.5)  # EfficientNet-Lite was trained on pixels between -1 and 1


def prepare_frozen(
    config: Config, say: Callable[[str], None], decode: Callable[[Facts], DecodePlan]
) -> TowerJob:
    """Answer every question of a frozen run; this is where the towers work, once for each picture and caption."""
    transfer = config.transfer
    moving = Moving(transfer.image_tower == OWN_IMAGE, transfer.text_tower == OWN_TEXT)
    if all(moving):
        raise UserError(
            "--image-tower vit --text-tower text: nothing is pretrained; that is --recipe scratch"
        )
    source = open_training_data(config, transfer.image_size, decode(read_facts()))
    captions = (caption for pair in source.pairs("train") for caption in pair.captions)
    started = pretrained_towers(config, captions)
    return prepare_towers(config, say, decode, source, started, moving, fresh=True)


class Started(NamedTuple):
    """A model on towers, its tokenizer, and what its pictures must be."""

    model: TowerClip
    tokenizer: Tokenizer
    preprocess: Preprocess


def prepare_towers(
    config: Config, say: Callable[[str], None], decode: Callable[[Facts], DecodePlan], source: Any, started: Started,
    moving: Moving, fresh: bool,
) -> TowerJob:  # fmt: skip
    """The run on these towers, from features on the sides that stand still."""
    facts = read_facts()
    device, precision, speedup = choose_hardware(config, facts)
    say(device_line(device, facts, precision, speedup))
    towers = started.model.to(device.torch).eval()
    maker = maker_of(
        towers, started.tokenizer, started.preprocess, config, source, device, precision, decode(facts)
    )
    lint = look_at(config, source, maker, say)
    augmentation = augmentation_for(config, source, towers, started.tokenizer, moving)
    splits = side_splits(maker, config, source, moving, augmentation)
    seen: dict[str, Any] = {"captions_per_step": usual_captions(config, splits["train"])}
    if any(moving):
        seen |= dataclasses.asdict(augmentation)
    usual = USUAL_BATCH["frozen" if fresh else "unfreeze"]
    config = with_batch(config, usual, len(splits["train"].pairs))
    own = (own_shape(towers.shape.image_config), own_shape(towers.shape.text_config))
    kinds: dict[str, Any] = {}
    if own[0] is not None and moving.image:
        asked = (own[0].vision_heads, own[0].image_tokens, own[0].vision_width // own[0].vision_heads, False)
        kinds["attention_image"] = choose_attention(
            config.model.attention_image, device, DTYPES[precision], config.train.batch or 0, *asked
        )[0]
    if own[1] is not None and moving.text:
        asked = (own[1].text_heads, own[1].context_length, own[1].text_width // own[1].text_heads, True)
        kinds["attention_text"] = choose_attention(
            config.model.attention_text, device, DTYPES[precision], config.train.batch or 0, *asked
        )[0]
    config = dataclasses.replace(
        config,
        model=dataclasses.replace(_shape_told(config.model, *own), **kinds),
        data=dataclasses.replace(config.data, **seen),
        train=dataclasses.replace(config.train, device=device.kind, precision=precision),
    )
    patches = own[0].grid ** 2 if own[0] is not None else 0
    full_length = device.rules.fixed_shapes or config.model.compile
    choices: dict[str, Any] = {"bf16_speedup": speedup, "features": str(maker.folder), "lint": lint}
    return TowerJob(
        config=config, facts=facts, device=device, precision=precision, shape=cast(Any, towers.shape),
        tokenizer=started.tokenizer, preprocess=started.preprocess, source=source, splits=splits, choices=choices,
        training=training_set(config, splits["train"], augmentation, patches, full_length), autocast=maker.autocast,
        towers=towers, moving=moving, fresh=fresh,
    )  # fmt: skip


def _shape_told(config: ModelConfig, image: ClipShape | None, text: ClipShape | None) -> ModelConfig:
    """The config with the shape of the tower that is ours, so that it says the same when the table changes."""
    shape = image or text
    if shape is None:
        return config
    told = resolved(config, shape, config.attention_image, config.attention_text)  # type: ignore[arg-type]
    # Beside a text tower of ours the pictures are those of somebody else's tower.
    return told if image is not None else dataclasses.replace(told, image_size=config.image_size)


def pretrained_towers(config: Config, captions: Iterable[str]) -> Started:
    """A model with its makers' weights in the towers and new heads; a tower of ours starts from the seed."""
    transfer = config.transfer
    image_config, image_weights, seen = _image_side(config)
    text_config, text_weights, tokenizer = _text_side(config, captions)
    shape = TowerShape(
        image_tower=transfer.image_tower, text_tower=transfer.text_tower, image_size=seen.image_size,
        image_config=image_config, text_config=text_config,
        context_length=transfer.context_length, vocab_size=tokenizer.vocab_size, embed_dim=transfer.embed_dim,
        head=transfer.head, hidden=transfer.hidden, dropout=transfer.dropout,
        logit_bias=config.train.objective == "sigmoid",
    )  # fmt: skip
    torch.manual_seed(config.seed)
    model = TowerClip(shape, tokenizer.pad_id)
    if image_weights is not None:
        assign_weights(model.image, image_weights, shape.image_tower)
    if text_weights is not None:
        assign_weights(model.text, text_weights, shape.text_tower)
    return Started(model, tokenizer, seen)


def _image_side(config: Config) -> tuple[str, dict[str, Tensor] | None, Preprocess]:
    """(config, weights, preprocessing) of the image tower; weights are None where they start from the seed."""
    transfer, name = config.transfer, config.transfer.image_tower
    if name == OWN_IMAGE:
        shape = shape_of(config.model)
        return own_config(shape), None, Preprocess(image_size=shape.image_size)
    if name in FILES:
        return "", tower_weights(name), _preprocess(None, transfer.image_size)
    if name.startswith(PREFIX):
        told, weights = load_timm(name, transfer.download)
        seen = json.loads(told)[TIMM]["preprocess"]
        mean, std = tuple(seen["mean"]), tuple(seen["std"])
        return told, weights, Preprocess(image_size=seen["image_size"], mean=mean, std=std, resize="squash")
    loaded = load_tower(name, "vision", transfer.download)
    path = tower_file(name, "preprocessor_config.json", transfer.download)
    return loaded.config, loaded.weights, _preprocess(read_json(path) if path else {}, transfer.image_size)


def _text_side(config: Config, captions: Iterable[str]) -> tuple[str, dict[str, Tensor] | None, Tokenizer]:
    """(config, weights, tokenizer) of the text tower; weights are None where they start from the seed."""
    transfer, name = config.transfer, config.transfer.text_tower
    if name == OWN_TEXT:
        tokenizer = make_tokenizer(config.text.tokenizer, list(captions), config.text.alphabet)
        shape = dataclasses.replace(
            shape_of(config.model, tokenizer.vocab_size), context_length=transfer.context_length
        )
        return own_config(shape, tokenizer.eot_id), None, tokenizer
    if name in FILES:
        return "", tower_weights(name), WordPieceTokenizer(wordpieces())
    loaded = load_tower(name, "text", transfer.download)
    return loaded.config, loaded.weights, _their_tokenizer(name, loaded.pad_id, transfer.download)


def _their_tokenizer(name: str, pad_id: int, download: bool) -> Tokenizer:
    path = tower_file(name, "tokenizer.json", download)
    if path is None:
        raise UserError(f"{name}: has no tokenizer.json; save it with transformers' fast tokenizer first")
    try:
        return FastTokenizer(read_small(path, MAX_TOKENIZER_BYTES).decode("utf-8"), pad_id)
    except ValueError as error:
        raise UserError(f"{path}: {error}") from None


def _preprocess(seen: dict[str, Any] | None, size: int) -> Preprocess:
    """The pixels that a tower was trained on. The whole picture is squashed: a caption tells of its edges too."""
    seen = seen or {}
    told = seen.get("crop_size", seen.get("size"))
    told = next(iter(told.values()), None) if isinstance(told, dict) else told
    mean, std = (tuple(seen.get(key, HALF)) for key in ("image_mean", "image_std"))
    return Preprocess(image_size=told if isinstance(told, int) else size, mean=mean, std=std, resize="squash")
