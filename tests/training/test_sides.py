"""Augmentation of a run on pretrained towers: by the kind of tower, and by which of them are trained."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from tower_run import PIECES

from m1clip.config import Config, DataConfig
from m1clip.data.augment import Augmentation
from m1clip.model.presets import CLIPConfig, HeadConfig, PretrainedImageConfig, PretrainedTextConfig, VisionTowerConfig
from m1clip.text.tokenizers import CharTokenizer, wordpiece_tokenizer
from m1clip.training.transfer import Start, Trainable, augmentation_for

BOTH, TEXT, IMAGE = Trainable(), Trainable(image=False), Trainable(text=False)
THEIRS = CLIPConfig(
    image_tower=PretrainedImageConfig(),
    text_tower=PretrainedTextConfig(),
    image_head=HeadConfig(kind="adapter", hidden=8),
)
VIT = dataclasses.replace(THEIRS, image_tower=VisionTowerConfig())
CONV = dataclasses.replace(THEIRS, image_tower=VisionTowerConfig(stem="conv"))
OURS = dataclasses.replace(THEIRS, text_tower=CLIPConfig().text_tower)


def seen(trainable: Trainable, config: CLIPConfig = THEIRS, letters: bool = False, **asked: Any) -> Augmentation:
    tokenizer: Any = CharTokenizer("ab") if letters else wordpiece_tokenizer(PIECES)
    start = Start(config, trainable=trainable, new_heads=True)
    settings = Config(data=DataConfig(source=("photos",), **asked))
    return augmentation_for(settings, ["a dog runs", "the dog"], start, tokenizer)


def test_third_party_towers_see_complete_captions_and_images() -> None:
    found = seen(BOTH)
    assert (found.patch_dropout, found.word_dropout) == (0.0, 0.0)
    assert (found.crop_min, found.flip) == (0.6, 0.5)


@pytest.mark.parametrize(
    ("found", "patches", "words"),
    [
        (seen(BOTH, VIT), 0.5, 0.0),
        (seen(BOTH, CONV), 0.0, 0.0),
        (seen(BOTH, CONV, patch_dropout=0.4), 0.4, 0.0),
        (seen(BOTH, OURS), 0.0, 0.3),
        (seen(BOTH, OURS, letters=True), 0.0, 0.0),
        (seen(BOTH, word_dropout=0.2), 0.0, 0.2),
        (seen(IMAGE, OURS), 0.0, 0.0),
    ],
)
def test_own_towers_and_what_was_asked_for(found: Augmentation, patches: float, words: float) -> None:
    assert (found.patch_dropout, found.word_dropout) == (patches, words)


def test_with_a_frozen_image_tower_only_words_are_varied() -> None:
    assert seen(TEXT, word_dropout=0.2, crop_min=0.5) == Augmentation(word_dropout=0.2)
    assert seen(TEXT, OURS) == Augmentation(word_dropout=0.3)
