"""How much more captions would help, for any data that `--data` accepts: `m1clip data howmany`."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np

from m1clip import console
from m1clip.config import Config, DataConfig, load_config
from m1clip.data.decoding import decode_options
from m1clip.data.image_cache import cache_folder, data_folders
from m1clip.data.prepare import open_data
from m1clip.data.types import Sample, Source
from m1clip.errors import UserError
from m1clip.hardware.device import Device, choose_device, choose_precision
from m1clip.hardware.machine_info import read_machine_info
from m1clip.inference import load
from m1clip.inference.feature_cache import FeatureCache, FrozenTower
from m1clip.inference.model import Model
from m1clip.model.clip import CLIP
from m1clip.model.named import GENERAL, require_towers
from m1clip.model.weights import weights_hash
from m1clip.training.learning_curve import MAX_LABELS, MORE, LearningCurve, learning_curve

NEW_HEADS = "towers"  # new heads on pretrained towers, as --recipe frozen
_MAX_UNREADABLE = 0.5  # of the photos


def how_many(
    data: str | Path | Sequence[str | Path],
    *,
    model: str | Path | Model | None = None,
    more: Sequence[int] = MORE,
    captions: Literal["all", "person"] = "person",
    seed: int = 0,
    device: str = "auto",
) -> LearningCurve:
    """Predict what more captions would add to the recall of a model that is trained on these.

    data: photos with captions, or a run, whose data and initial model are used then. model: a CLIP
    model that the captions are to improve, or `towers` for new heads on pretrained towers; default:
    that of the run, or `general`.
    """
    if any(count < 1 for count in more):
        raise UserError("--more: expected numbers of photos, from 1")
    config, model = _settings(data, model, captions)
    if model == NEW_HEADS:
        require_towers(GENERAL)
    loaded = model if isinstance(model, Model) else load(GENERAL if model == NEW_HEADS else model)
    loaded.encoder.use_device(device)
    source = open_data(config.data, loaded.preprocess.image_size, config.seed)
    samples = [sample for split in source.splits() for sample in source.samples(split)]
    if source.class_captions:
        raise UserError(f"{source.name}: classes, not captions: there is no curve of captions")
    order = np.random.default_rng(seed).permutation(len(samples))[:MAX_LABELS]
    chosen = [samples[index] for index in np.sort(order)]
    is_aligned = model != NEW_HEADS
    cache = _feature_cache(loaded.clip, loaded, source, config, device, is_aligned)
    images, texts, image_index = _features(cache, chosen)
    return learning_curve(
        images, texts, image_index, aligned=is_aligned, more=more, seed=seed, labels=len(samples)
    )


def _settings(
    data: str | Path | Sequence[str | Path],
    model: str | Path | Model | None,
    captions: Literal["all", "person"],
) -> tuple[Config, str | Path | Model]:
    """Return the settings that say what the data is, and the model to improve."""
    sources = [data] if isinstance(data, str | Path) else list(data)
    run = Path(sources[0])
    if len(sources) == 1 and (run / "config.toml").is_file():
        config = load_config(run / "config.toml")
        # The trained model has seen these captions: the curve begins where its training began.
        initial = model or config.transfer.init or NEW_HEADS
        return config.with_values(captions=captions), initial
    return Config(
        data=DataConfig(source=tuple(map(str, sources)), captions=captions)
    ), model or GENERAL


def _feature_cache(
    clip: CLIP, model: Model, source: Source, config: Config, device_name: str, is_aligned: bool
) -> FeatureCache:
    """The cache of a model's vectors, or of the features of its towers, which training shares."""
    facts = read_machine_info()
    device = Device(choose_device(device_name, facts), facts)
    shape = clip.config
    if is_aligned:
        key = (
            weights_hash(clip.state_dict()),
            json.dumps(shape.to_dict(), sort_keys=True),
            "unit vectors",
        )
        image = FrozenTower(clip.encode_image, shape.embed_dim, key)
        text = FrozenTower(clip.encode_text, shape.embed_dim, key)
    else:
        image, text = (
            FrozenTower(
                tower,
                tower.width,
                (
                    weights_hash(tower.state_dict()),
                    json.dumps(dataclasses.asdict(settings), sort_keys=True),
                ),
            )
            for tower, settings in (
                (clip.image_tower, shape.image_tower),
                (clip.text_tower, shape.text_tower),
            )
        )
    folders = data_folders(source)
    return FeatureCache(
        image,
        text,
        model.tokenizer,
        shape.context_length,
        model.preprocess,
        cache_folder(config.data.cache_dir, folders),
        folders,
        device.torch,
        choose_precision("auto", device.name, facts),
        decode_options(facts),
    )


def _features(
    cache: FeatureCache, samples: Sequence[Sample]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return features of the photos that can be read, of their captions, and each
    caption's photo.
    """
    _, images, readable, failures = cache.images(samples, "captioned", _MAX_UNREADABLE)
    if failures:
        console.warn(f"{len(failures):,} photos cannot be read; m1clip data lint lists them")
    table = cache.captions(readable, "captioned")
    assert table.features is not None
    rows = np.arange(len(table.image_index))
    return (
        images.read(np.arange(len(readable))).astype(np.float32),
        table.features.read(rows).astype(np.float32),
        np.asarray(table.image_index),
    )
