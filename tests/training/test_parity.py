"""A device that computes something else is refused; rounding is not."""

from __future__ import annotations

import copy
from contextlib import nullcontext

import pytest
import torch
from small_run import screen, small_config

from m1clip.errors import UserError
from m1clip.model.clip import CLIP
from m1clip.model.presets import PRESETS, with_fields
from m1clip.training import parity
from m1clip.training.memory import stand_in
from m1clip.training.parity import TOLERANCE, few, gradient, judge, perturbed, relative_difference
from m1clip.training.run import decode_plan
from m1clip.training.setup import prepare


def test_difference_is_relative_and_nan_is_infinitely_far() -> None:
    b = torch.tensor([3.0, 4.0])
    assert relative_difference(b, b) == 0
    assert relative_difference(b * 1.1, b) == pytest.approx(0.1)
    assert relative_difference(torch.tensor([float("nan"), 4.0]), b) == float("inf")
    assert relative_difference(torch.zeros(2), torch.zeros(2)) == 0


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_beyond_the_tolerance_is_refused(precision: str) -> None:
    limit = TOLERANCE[precision]  # type: ignore[index]
    assert judge(limit * 0.9, precision, "mps") == limit * 0.9  # type: ignore[arg-type]
    with pytest.raises(UserError, match="mps computes gradients"):
        judge(limit * 1.1, precision, "mps")  # type: ignore[arg-type]


def test_rounding_to_bf16_passes_and_a_lost_part_does_not() -> None:
    gradient = torch.randn(10_000, generator=torch.Generator().manual_seed(0))
    assert relative_difference(gradient.bfloat16().float(), gradient) < TOLERANCE["bf16"]
    broken = gradient.clone()
    broken[:1000] = 0  # a tenth of the parameters got no gradient
    assert relative_difference(broken, gradient) > TOLERANCE["bf16"]


def test_of_a_large_model_some_numbers_of_every_parameter_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    job = prepare(small_config(), lambda line: None, decode_plan(screen()))
    batch, model = few(job.training[0]), job.build_model()
    whole = gradient(model, batch, job.preprocess, nullcontext)
    grads = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    monkeypatch.setattr(parity, "MOST", len(whole) // 7)
    model.zero_grad()
    some = gradient(model, batch, job.preprocess, nullcontext)
    every = -(-len(whole) // parity.MOST)
    assert torch.equal(some, torch.cat([g[::every] for g in grads]))
    assert len(grads) <= len(some) < len(whole) / 6


def test_a_start_whose_gradient_is_rounding_is_not_held_against_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """With zero-initialized branches every image has the same class token, and every text the same EOT token."""
    monkeypatch.setitem(PRESETS, "tiny", with_fields(PRESETS["tiny"], pooling="cls"))
    changes = {"train.precision": "bf16"}
    job = prepare(small_config(changes), lambda line: None, decode_plan(screen()))
    torch.manual_seed(0)
    batch = few(stand_in(job.shape, 8, 12))

    def apart(model: CLIP) -> float:
        rough = gradient(copy.deepcopy(model), batch, job.preprocess, job.autocast)
        return relative_difference(rough, gradient(model, batch, job.preprocess, nullcontext))

    model = job.build_model()
    twin = perturbed(model)
    assert apart(copy.deepcopy(model)) > TOLERANCE["bf16"]
    assert apart(twin) < TOLERANCE["bf16"] / 2
    weights = dict(model.named_parameters())
    moved = {name for name, p in twin.named_parameters() if not torch.equal(p, weights[name])}
    assert moved == {name for name, p in weights.items() if p.ndim >= 2 and not p.any()}
    assert moved


def test_captions_that_tell_left_from_right_forbid_mirrors() -> None:
    from m1clip.config import DataConfig
    from m1clip.data.prepare import choose_augmentation

    photos = DataConfig(source=("photos",))
    everyday = ["a dog runs"] * 99 + ["a man turns left"]
    assert choose_augmentation(photos, everyday).flip == 0.5
    assert choose_augmentation(photos, ["two cats on the left", "a red car on the right"]).flip == 0.0
    assert choose_augmentation(DataConfig(source=("photos",), flip=0.3), ["on the left"]).flip == 0.3
