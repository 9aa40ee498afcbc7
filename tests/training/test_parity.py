"""The gradient check: wrong gradients stop a run, rounding errors do not."""

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from small_run import prepared, small_config
from torch.utils._python_dispatch import TorchDispatchMode

from m1clip import console
from m1clip.data.loader import Batch
from m1clip.errors import UserError
from m1clip.hardware.device import causal_sdpa_is_wrong
from m1clip.model import layers
from m1clip.model.clip import CLIP
from m1clip.model.presets import PRESETS, with_fields
from m1clip.runlog import read_log
from m1clip.training import parity
from m1clip.training import run as runs
from m1clip.training.compose import GradientCheck, TrainStep, compose_step
from m1clip.training.inputs import RunInputs
from m1clip.training.memory import random_batch
from m1clip.training.muon import orthogonalize
from m1clip.training.parity import (
    TOLERANCE,
    check_parity,
    fill_zeros,
    first_samples,
    gradient,
    relative_difference,
)
from m1clip.training.run import train_config
from m1clip.training.step import make_parts


@pytest.fixture(autouse=True)
def _no_step_takes_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine too, the batch is compared with its slices."""
    monkeypatch.setattr(parity, "CHECKED_STEP_SECONDS", math.inf)


def test_relative_difference() -> None:
    b = torch.tensor([3.0, 4.0])
    assert relative_difference(b, b) == 0
    assert relative_difference(b * 1.1, b) == pytest.approx(0.1)
    assert relative_difference(torch.tensor([float("nan"), 4.0]), b) == float("inf")
    assert relative_difference(torch.zeros(2), torch.zeros(2)) == 0


def test_gradients_of_a_large_model_are_subsampled(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = prepared(small_config())
    batch, step = first_samples(inputs.training[0]), inputs.make_step()
    check = step.for_check(step.model)
    _, full = gradient(check, batch)
    grads = [p.grad.flatten() for p in step.model.parameters() if p.grad is not None]
    monkeypatch.setattr(parity, "MOST", len(full) // 7)
    _, some = gradient(check, batch)
    every = -(-len(full) // parity.MOST)
    assert torch.equal(some, torch.cat([g[::every] for g in grads]))
    assert len(grads) <= len(some) < len(full) / 6


def test_zero_initialized_branches_do_not_fail_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """With zero-initialized branches every image has the same class token, and every text the same EOT token."""
    monkeypatch.setitem(
        PRESETS, "tiny", with_fields(PRESETS["tiny"], pooling="cls", text_pooling="eot")
    )
    changes = {"train.precision": "bf16"}
    inputs = prepared(small_config(changes))
    torch.manual_seed(0)
    batch = first_samples(random_batch(inputs.shape, 8, 12))

    def apart(model: CLIP) -> float:
        step = compose_step(
            make_parts(
                model, inputs.config, inputs.device, inputs.precision, inputs.model.preprocess
            )
        )
        check = step.for_check(model)
        _, rough = gradient(check, batch)
        return relative_difference(rough, gradient(parity.on_cpu(check, inputs.facts), batch)[1])

    model = inputs.build_model()
    twin = fill_zeros(copy.deepcopy(model))
    assert apart(copy.deepcopy(model)) > TOLERANCE["bf16"]
    assert apart(twin) < TOLERANCE["bf16"] / 2
    weights = dict(model.named_parameters())
    moved = {name for name, p in twin.named_parameters() if not torch.equal(p, weights[name])}
    assert moved == {name for name, p in weights.items() if p.ndim >= 2 and not p.any()}
    assert moved


def on_mps(**changes: object) -> tuple[RunInputs, TrainStep]:
    """A run whose device calls itself mps, but computes on the CPU."""
    inputs = prepared(small_config(changes))
    step = inputs.make_step()
    inputs.device.kind = "mps"
    return inputs, step


def test_wrong_gradients_stop_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, step = on_mps()
    inputs.device.kind = "cpu"
    assert check_parity(inputs, step) is None, "nothing to compare on the CPU"
    inputs.device.kind = "mps"
    weights = copy.deepcopy(step.model.state_dict())
    assert check_parity(inputs, step) == (0.0, "")
    assert all(p.grad is None for p in step.model.parameters())
    assert all(torch.equal(weights[name], value) for name, value in step.model.state_dict().items())
    monkeypatch.setattr(parity, "relative_difference", lambda *_: TOLERANCE["fp32"] * 1.1)
    with pytest.raises(UserError, match="mps computes gradients"):
        check_parity(inputs, step)


def test_rounding_that_the_cpu_has_too_does_not_stop_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Gradients of a deep network of convolutions in bf16 differ by 25% from those in fp32, on any device."""
    monkeypatch.setitem(parity.TOLERANCE, "bf16", 1e-4)
    inputs, step = on_mps(**{"train.precision": "bf16", "optim.optimizer": "adamw"})
    rounding = check_parity(inputs, step)
    assert rounding is not None
    assert rounding.difference > 1e-4
    monkeypatch.setattr(parity, "MOST_ROUNDING", rounding.difference / 2)
    with pytest.raises(UserError, match="mps computes gradients"):
        check_parity(inputs, step)


class WrongFrom(TorchDispatchMode):
    """Adds to every product whose reduction has at least some length, as MPS does from 32,767 on."""

    def __init__(self, reduction: int) -> None:
        super().__init__()
        self.reduction = reduction

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        is_matmul = func.overloadpacket.__name__ in ("mm", "bmm", "_linear_pointwise")
        if is_matmul and args[0].shape[-1] >= self.reduction:
            result = result * 1.5
        return result


def test_error_that_depends_on_the_size_is_found_at_the_real_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(parity, "SLICE", 4)
    inputs, step = on_mps(**{"data.captions_per_step": 1})
    assert check_parity(inputs, step).difference < 1e-3  # type: ignore[union-attr]
    with (
        WrongFrom(16 * 16),
        pytest.raises(UserError, match="of a batch of 16 that differ from those of its slices"),
    ):
        check_parity(inputs, step)
    monkeypatch.setattr(parity, "PAIRS", 2)
    monkeypatch.setattr(parity, "SLICE", 16)  # only a few samples, as before: nothing is found
    with WrongFrom(16 * 16):
        assert check_parity(inputs, step) == (0.0, "")


def test_skipped_comparison_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(parity, "SLICE", 4)
    monkeypatch.setattr(parity, "CHECKED_STEP_SECONDS", 0.0)
    original = runs.check_parity

    def as_on_mps(inputs: RunInputs, step: TrainStep) -> parity.Parity | None:
        inputs.device.kind = "mps"
        try:
            return original(inputs, step)
        finally:
            inputs.device.kind = "cpu"

    monkeypatch.setattr(runs, "check_parity", as_on_mps)
    with console.capture() as output:
        train_config(small_config({"train.steps": 1}), tmp_path / "run")
    note = "the batch of 16 was not compared with its slices: one step takes"
    assert note in output.getvalue()
    (record,) = [record for record in read_log(tmp_path / "run") if record["kind"] == "parity"]
    assert note in record["skipped"]


def test_memory_error_in_the_check_takes_smaller_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parity, "SLICE", 4)
    inputs, step = on_mps()
    original, sizes = TrainStep.for_check, []

    def for_check(self: TrainStep, model: CLIP) -> GradientCheck:
        check = original(self, model)

        def short(batch: Batch, number: int, micro_batch: int | None = None, *rest: Any) -> Any:
            sizes.append((len(batch), micro_batch))
            size = micro_batch or len(batch)
            if check.parts.device.kind == "mps" and size > 8:
                raise torch.OutOfMemoryError("out of memory")
            return check.plain(batch, number, micro_batch, *rest)

        return GradientCheck(check.parts, short)

    monkeypatch.setattr(TrainStep, "for_check", for_check)
    assert check_parity(inputs, step).difference < 1e-3  # type: ignore[union-attr]
    few = (8, None)  # here, and at the same time on the CPU
    assert [size for size in sizes if size != few] == [(16, 0), (16, 8), (16, 4)], (
        "the batch, half, slices"
    )
    assert sizes.count(few) == 2


def test_wrong_update_of_the_optimizer_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, step = on_mps(**{"optim.optimizer": "muon"})
    assert parity.optimizer_difference(step) < 1e-6
    monkeypatch.setattr(step, "orthogonalize", lambda x: orthogonalize(x) + 0.1)
    with pytest.raises(UserError, match="updates of the optimizer that differ"):
        check_parity(inputs, step)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", ["bmm", "sdpa"])
def test_leak_from_later_tokens_stops_the_run(
    precision: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs, step = on_mps(**{"train.precision": precision})
    step.model.set_attention(kind)  # type: ignore[arg-type]
    parity.check_causality(step.model, "cpu", inputs.autocast)
    original = layers.attention
    # The mask once per group of four queries, as in pytorch#195910.
    mask = (torch.arange(64)[:, None] // 4 * 4 + 3 >= torch.arange(64)).float().log()

    def leaks(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, kind: str
    ) -> torch.Tensor:
        length = q.shape[2]
        if not causal:
            return original(q, k, v, causal, kind)  # type: ignore[arg-type]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:length, :length].to(q.dtype))

    monkeypatch.setattr(layers, "attention", leaks)
    with pytest.raises(UserError, match="attention sees later tokens"):
        check_parity(inputs, step)


def test_half_precision_on_mps_uses_no_causal_sdpa(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = torch.randn(3, 2, 4, 9, 16).bfloat16()
    expected = layers.attention(q, k, v, True, "sdpa")
    monkeypatch.setattr(
        layers, "causal_sdpa_is_wrong", lambda kind, dtype: causal_sdpa_is_wrong("mps", dtype)
    )
    monkeypatch.setattr(F, "scaled_dot_product_attention", None)
    assert torch.allclose(layers.attention(q, k, v, True, "sdpa"), expected, atol=0.03)
    with pytest.raises(TypeError):
        layers.attention(q, k, v, False, "sdpa")
    with pytest.raises(TypeError):
        layers.attention(q.float(), k.float(), v.float(), True, "sdpa")
