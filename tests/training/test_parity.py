"""The gradient check: wrong gradients stop a run, rounding errors do not."""

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
from m1clip.training.memory import random_batch
from m1clip.training.parity import TOLERANCE, check_parity, fill_zeros, first_samples, gradient, relative_difference
from m1clip.training.run import decode_plan
from m1clip.training.setup import prepare


def test_relative_difference() -> None:
    b = torch.tensor([3.0, 4.0])
    assert relative_difference(b, b) == 0
    assert relative_difference(b * 1.1, b) == pytest.approx(0.1)
    assert relative_difference(torch.tensor([float("nan"), 4.0]), b) == float("inf")
    assert relative_difference(torch.zeros(2), torch.zeros(2)) == 0


def test_bf16_rounding_passes_and_missing_gradient_fails() -> None:
    gradient = torch.randn(10_000, generator=torch.Generator().manual_seed(0))
    assert relative_difference(gradient.bfloat16().float(), gradient) < TOLERANCE["bf16"]
    broken = gradient.clone()
    broken[:1000] = 0  # a tenth of the parameters got no gradient
    assert relative_difference(broken, gradient) > TOLERANCE["bf16"]


def test_gradients_of_a_large_model_are_subsampled(monkeypatch: pytest.MonkeyPatch) -> None:
    setup = prepare(small_config(), lambda line: None, decode_plan(screen()))
    batch, model = first_samples(setup.training[0]), setup.build_model()
    full = gradient(model, batch, setup.preprocess, nullcontext)
    grads = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    monkeypatch.setattr(parity, "MOST", len(full) // 7)
    model.zero_grad()
    some = gradient(model, batch, setup.preprocess, nullcontext)
    every = -(-len(full) // parity.MOST)
    assert torch.equal(some, torch.cat([g[::every] for g in grads]))
    assert len(grads) <= len(some) < len(full) / 6


def test_zero_initialized_branches_do_not_fail_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """With zero-initialized branches every image has the same class token, and every text the same EOT token."""
    monkeypatch.setitem(PRESETS, "tiny", with_fields(PRESETS["tiny"], pooling="cls"))
    changes = {"train.precision": "bf16"}
    setup = prepare(small_config(changes), lambda line: None, decode_plan(screen()))
    torch.manual_seed(0)
    batch = first_samples(random_batch(setup.shape, 8, 12))

    def apart(model: CLIP) -> float:
        rough = gradient(copy.deepcopy(model), batch, setup.preprocess, setup.autocast)
        return relative_difference(rough, gradient(model, batch, setup.preprocess, nullcontext))

    model = setup.build_model()
    twin = fill_zeros(copy.deepcopy(model))
    assert apart(copy.deepcopy(model)) > TOLERANCE["bf16"]
    assert apart(twin) < TOLERANCE["bf16"] / 2
    weights = dict(model.named_parameters())
    moved = {name for name, p in twin.named_parameters() if not torch.equal(p, weights[name])}
    assert moved == {name for name, p in weights.items() if p.ndim >= 2 and not p.any()}
    assert moved


def test_wrong_gradients_stop_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    setup = prepare(small_config(), lambda line: None, decode_plan(screen()))
    assert check_parity(setup, setup.build_model()) is None, "nothing to compare on the CPU"
    setup.device.kind = "mps"
    assert check_parity(setup, setup.build_model()) == 0.0
    monkeypatch.setattr(parity, "relative_difference", lambda *_: TOLERANCE["fp32"] * 1.1)
    with pytest.raises(UserError, match="mps computes gradients"):
        check_parity(setup, setup.build_model())
