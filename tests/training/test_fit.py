"""The batch of a run: the recipe's where the user named none, and no more than fits the images."""

from __future__ import annotations

from pathlib import Path

import pytest
from small_run import run_small

from m1clip.config import Config, TrainConfig, load_config
from m1clip.errors import UserError
from m1clip.training.autotune import with_batch


@pytest.mark.parametrize(
    ("images", "usual", "batch"), [(3, 64, 3), (20, 512, 8), (274, 512, 32), (5_000, 512, 512), (5_000, 64, 64)]
)
def test_the_batch_fits_the_images(images: int, usual: int, batch: int) -> None:
    assert with_batch(Config(), usual, images).train.batch_size == batch
    named = Config(train=TrainConfig(batch_size=2))
    assert with_batch(named, usual, images) == named


def test_few_images_train_from_scratch_and_one_cannot(tmp_path: Path) -> None:
    changes = {"train.batch_size": None, "data.train_count": 20, "train.steps": 2}
    assert load_config(run_small(tmp_path / "run", changes).run / "config.toml").train.batch_size == 8
    with pytest.raises(UserError, match="one training image; training compares images"):
        run_small(tmp_path / "one", {**changes, "data.train_count": 1})
    assert not (tmp_path / "one").exists()
