"""What is varied on the sides of a run on towers: by whose tower it is, and by which of them move."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from tower_run import PIECES

from m1clip.config import Config, DataConfig
from m1clip.data.augment import Augmentation
from m1clip.model.presets import CLIPConfig, PretrainedImageConfig, PretrainedTextConfig, with_fields
from m1clip.text.tokenizers import CharTokenizer, WordPieceTokenizer
from m1clip.training.setup import Moving, augmentation_for

BOTH, TEXT, IMAGE = Moving(True, True), Moving(False, True), Moving(True, False)
SOURCE: Any = SimpleNamespace(samples=lambda split: [SimpleNamespace(captions=("a dog runs", "the dog"))])
VIT, CONV = (with_fields(CLIPConfig(), stem=stem).image_tower for stem in ("patch", "conv"))
OURS = CLIPConfig().text_tower


def seen(moving: Moving, image: Any = None, text: Any = None, letters: bool = False, **asked: Any) -> Augmentation:
    tokenizer: Any = CharTokenizer("ab") if letters else WordPieceTokenizer(PIECES)
    model: Any = SimpleNamespace(
        config=CLIPConfig(image_tower=image or PretrainedImageConfig(), text_tower=text or PretrainedTextConfig())
    )
    config = Config(data=DataConfig(source=("photos",), **asked))
    return augmentation_for(config, SOURCE, model, tokenizer, moving)


def test_towers_of_others_see_whole_captions_and_images() -> None:
    found = seen(BOTH)
    assert (found.patch_dropout, found.word_dropout) == (0.0, 0.0)
    assert (found.crop_min, found.flip) == (0.6, 0.5)


@pytest.mark.parametrize(
    ("found", "patches", "words"),
    [
        (seen(BOTH, image=VIT), 0.5, 0.0),
        (seen(BOTH, image=CONV), 0.0, 0.0),
        (seen(BOTH, image=CONV, patch_dropout=0.4), 0.4, 0.0),
        (seen(BOTH, text=OURS), 0.0, 0.3),
        (seen(BOTH, text=OURS, letters=True), 0.0, 0.0),
        (seen(BOTH, word_dropout=0.2), 0.0, 0.2),
        (seen(IMAGE, text=OURS), 0.0, 0.0),
    ],
)
def test_towers_of_ours_and_what_was_asked_for(found: Augmentation, patches: float, words: float) -> None:
    assert (found.patch_dropout, found.word_dropout) == (patches, words)


def test_where_only_the_text_moves_only_words_are_varied() -> None:
    assert seen(TEXT, word_dropout=0.2, crop_min=0.5) == Augmentation(word_dropout=0.2)
    assert seen(TEXT, image=VIT, text=OURS) == Augmentation(word_dropout=0.3)
