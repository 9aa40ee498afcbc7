"""The batch of a run: the recipe's where the user named none, and no more than fits the images."""

from __future__ import annotations

from pathlib import Path

import pytest
from small_run import run_small

from m1clip.config import Config, TrainConfig, load_config
from m1clip.errors import UserError
from m1clip.model.presets import CLIPConfig, HeadConfig
from m1clip.training.autotune import choose_batch
from m1clip.training.transfer import Start

HEADS = Start(CLIPConfig(image_head=HeadConfig(kind="adapter", hidden=8)), new_heads=True)


@pytest.mark.parametrize(
    ("images", "start", "batch"),
    [
        (3, Start(CLIPConfig()), 3),
        (20, HEADS, 8),
        (274, HEADS, 32),
        (5_000, HEADS, 512),
        (5_000, Start(CLIPConfig()), 64),
    ],
)
def test_the_batch_fits_the_images(images: int, start: Start, batch: int) -> None:
    assert choose_batch(Config(), start, images).train.batch_size == batch
    named = Config(train=TrainConfig(batch_size=2))
    assert choose_batch(named, start, images) == named


def test_few_images_train_from_scratch_and_one_cannot(tmp_path: Path) -> None:
    changes = {"train.batch_size": None, "data.train_count": 20, "train.steps": 2}
    assert load_config(run_small(tmp_path / "run", changes).path / "config.toml").train.batch_size == 8
    with pytest.raises(UserError, match="only one training image; contrastive training"):
        run_small(tmp_path / "one", {**changes, "data.train_count": 1})
    assert not (tmp_path / "one").exists()
