"""Tensors of a checkpoint that are not those of the model: one line, and nothing is changed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from small_run import assert_same_bits
from test_step import make

from m1clip.errors import UserError
from m1clip.training.checkpoint import TensorGroups, TrainState, checkpoint_tensors, restore
from m1clip.training.step import TrainStep

QKV = "image_tower.transformer.blocks.0.attn.qkv.weight"


@dataclass(frozen=True)
class Damage:
    """What is done to a checkpoint, and what is said of it."""

    do: Callable[[TensorGroups], object]
    words: str


DAMAGES = (
    Damage(lambda kept: kept["weights"].pop(QKV), f"weights: {QKV} is missing"),
    Damage(lambda kept: kept["weights"].update(x=torch.ones(1)), "weights: x is unknown"),
    Damage(lambda kept: kept["weights"].update({QKV: torch.ones(2)}), r"has the shape \(2,\), not"),
    Damage(lambda kept: kept.pop("ema"), "ema: .* is missing"),
    Damage(lambda kept: kept["optimizer"].pop(f"adamw/{QKV}/step"), f"optimizer: adamw/{QKV}/step is missing"),
    Damage(lambda kept: kept["optimizer"].update({f"adamw/{QKV}/exp_avg": torch.ones(2)}), "or has another shape"),
)  # fmt: skip


@pytest.fixture(scope="module")
def update() -> TrainStep:
    job, made = make({"optim.optimizer": "adamw", "optim.ema": 0.9})
    made(job.training[0], 0)
    return made


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.words)
def test_a_checkpoint_that_does_not_fit_is_one_line(update: TrainStep, damage: Damage) -> None:
    kept = {name: dict(tensors) for name, tensors in checkpoint_tensors(update, TrainState()).items()}
    before = {name: t.clone() for name, t in update.model.state_dict().items()}
    restore(update, TrainState(step=7), kept)
    damage.do(kept)
    with pytest.raises(UserError, match=rf"checkpoint of step 7 does not fit the run: .*{damage.words}"):
        restore(update, TrainState(step=7), kept)
    assert_same_bits(dict(update.model.state_dict()), before)
