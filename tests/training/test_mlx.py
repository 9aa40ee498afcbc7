"""Training in MLX: the numbers of the torch step, and runs that move between devices."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from small_run import prepared, run_small, screen, small_config, tensors_of
from torch import Tensor
from tower_run import frozen_changes, patch_towers

import m1clip
from m1clip.errors import UserError
from m1clip.hardware.device import Device
from m1clip.losses.registry import LOSSES, Ids
from m1clip.losses.run_loss import RunLoss
from m1clip.model.clip import Features
from m1clip.training import parity
from m1clip.training.checkpoint import checkpoint_tensors
from m1clip.training.optim import OPTIMIZER_PARTS
from m1clip.training.process import Stopped
from m1clip.training.run import resume
from m1clip.training.setup import Setup
from m1clip.training.step import TrainStep, step_class

mx = pytest.importorskip(
    "mlx.core", reason="mlx is not installed: make test-mlx", exc_type=ImportError
)
mlx_step = pytest.importorskip("m1clip.training.mlx_step")

SCRATCH = {
    "data.crop_min": 0.5,
    "data.flip": 0.5,
    "train.text_contrast": 0.2,
    "train.steps": 20,
    "train.device": "mlx",
}
RECIPES: dict[str, dict[str, Any]] = {
    "scratch": {},
    "patches, micro-batches": {
        "model.stem": "patch",
        "data.patch_dropout": 0.5,
        "model.grad_checkpointing": True,
        "train.micro_batch": 5,
        "train.loss": "infonce",
        "optim.optimizer": "adamw",
    },
    "frozen": {"transfer.recipe": "frozen", "optim.optimizer": "muon"},
}


def two_steps(changes: dict[str, Any]) -> tuple[Setup, TrainStep, Any]:
    """A run, its step on the CPU and its step in MLX, from the same weights, none of which is 0."""
    setup = prepared(small_config(changes))
    model = setup.build_model()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.05 * torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())))
    cpu = TrainStep(
        copy.deepcopy(model), setup.config, Device("cpu", setup.facts), "fp32", setup.preprocess
    )
    settings = (setup.config, setup.device, setup.precision, setup.preprocess)
    return setup, cpu, step_class(setup.device)(model, *settings)


def worst(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The largest relative difference of a tensor."""
    assert found.keys() == expected.keys()
    return max(float((found[n] - t).norm() / t.norm().clamp(min=1e-9)) for n, t in expected.items())


@pytest.mark.parametrize("recipe", RECIPES)
def test_gradients_and_updates_are_those_of_torch(
    recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    patch_towers(monkeypatch)
    changes = {**SCRATCH, **RECIPES[recipe]}
    if "transfer.recipe" in changes:  # with the dropout of the heads
        changes = frozen_changes(tmp_path, **{**changes, "train.text_contrast": 0.0})
    setup, cpu, mlx = two_steps(changes)
    loss = cpu.compute_gradients(setup.training[0], 0)
    assert mlx.compute_gradients(setup.training[0], 0).item() == pytest.approx(
        loss.item(), rel=1e-4
    )
    gradients = {name: p.grad for name, p in cpu.model.named_parameters() if p.grad is not None}
    assert worst({name: mlx_step.to_torch(g) for name, g in mlx._grads.items()}, gradients) < 1e-4  # type: ignore[arg-type]
    cpu.optimizer.zero_grad()
    for step in range(20):
        pairs = zip(cpu(setup.training[step], step), mlx(setup.training[step], step), strict=True)
        assert all(
            float(found) == pytest.approx(float(expected), rel=1e-3) for expected, found in pairs
        )
    expected, found = (checkpoint_tensors(step) for step in (cpu, mlx))
    assert found.keys() == expected.keys()
    assert worst(found["weights"], expected["weights"]) < 1e-3
    assert worst(found["optimizer"], expected["optimizer"]) < 0.02, (
        "moments of tiny gradients round more"
    )


def test_nonfinite_batch_changes_nothing_and_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    setup, _, mlx = two_steps(SCRATCH)
    mlx(setup.training[0], 0)
    before = copy.deepcopy(checkpoint_tensors(mlx))
    inputs = type(mlx)._inputs

    def broken(self: Any, side: str, *rest: Any) -> Any:
        found = inputs(self, side, *rest)
        return {**found, "pixels": found["pixels"] * mx.inf} if side == "image" else found

    with monkeypatch.context() as patched:
        patched.setattr(type(mlx), "_inputs", broken)
        loss, _ = mlx(setup.training[1], 1)
    assert not loss.isfinite()
    after = checkpoint_tensors(mlx)
    assert all(
        torch.equal(after[group][name], t) for group in before for name, t in before[group].items()
    )
    assert mlx.nonfinite_rows(setup.training[1]) == []
    assert mlx(setup.training[1], 1)[0].isfinite()


def stop_at(monkeypatch: pytest.MonkeyPatch, last: int) -> None:
    """A signal during step `last`, counted from 1."""
    from m1clip.training import loop
    from m1clip.training.context import RunContext

    between = loop._between_steps

    def stopping(run: RunContext) -> bool:
        if run.state.step == last:
            run.stop.signal = 15
        return between(run)

    monkeypatch.setattr(loop, "_between_steps", stopping)


def test_run_moves_from_cpu_to_mlx_and_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = {"train.steps": 12, "train.save_every": 4}
    run_small(tmp_path / "cpu", changes)
    moved, shown = tmp_path / "moved", screen()
    stop_at(monkeypatch, 4)
    with pytest.raises(Stopped):
        run_small(moved, changes)
    stop_at(monkeypatch, 8)
    with pytest.raises(Stopped):
        resume(moved, shown, device="mlx")
    text = shown.console.file.getvalue()  # type: ignore[attr-defined]
    assert "without a GPU: its build for the CPU" in text or mx.metal.is_available()
    assert "parity     gradients on mlx differ by at most 0.0" in text
    assert "from step 4 of 12" in text
    resume(moved, screen(), device="cpu")
    assert worst(tensors_of(moved, 12), tensors_of(tmp_path / "cpu", 12)) < 0.02
    weights = [
        {k: t for k, t in tensors_of(run, 12).items() if "optimizer" not in k}
        for run in (moved, tmp_path / "cpu")
    ]
    assert worst(*weights) < 1e-3


def test_model_trained_in_mlx_loads_in_torch(tmp_path: Path) -> None:
    first = run_small(tmp_path / "mlx", {"train.device": "mlx", "train.steps": 2})
    saved = tensors_of(first.path, 2)
    model = m1clip.load(first.path / "model", device="cpu")
    assert all(
        torch.equal(t, saved[f"weights:{name}"]) for name, t in model.clip.state_dict().items()
    )
    second = run_small(
        tmp_path / "on", {"train.device": "mlx", "transfer.init": str(first.path), "train.steps": 1}
    )
    assert second.scores


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("contrast", [0.0, 0.3])
def test_losses_are_those_of_torch(name: str, contrast: float) -> None:
    torch.manual_seed(0)
    image, text = (torch.nn.functional.normalize(torch.randn(n, 8), dim=1) for n in (6, 12))
    caption_ids = torch.tensor([0, 1, 2, 3, 4, 5, 6, 1, 8, 9, 4, 11])
    ids = Ids(torch.tensor([0, 1, 2, 0, 4, 5]), caption_ids, torch.arange(12) % 6)
    loss = RunLoss(LOSSES[name], contrast)
    bias = torch.tensor(-2.0) if LOSSES[name].needs_bias else None
    expected, by_features = loss.loss_and_grads(Features(image, text, torch.tensor(7.0), bias), ids)
    labels = mlx_step.loss_labels(loss, ids)

    def value(image: Any, text: Any) -> Any:
        bias = mx.array(-2.0) if LOSSES[name].needs_bias else None
        return mlx_step.run_loss_in_mlx(loss, image, text, mx.array(7.0), bias, labels)

    arrays = [mlx_step.to_mlx(image), mlx_step.to_mlx(text)]
    found, gradients = mx.value_and_grad(value, argnums=(0, 1))(*arrays)
    assert found.item() == pytest.approx(expected.item(), rel=1e-5)
    for ours, torchs in zip(gradients, by_features, strict=True):
        torch.testing.assert_close(mlx_step.to_torch(ours), torchs, atol=1e-6, rtol=1e-4)


def test_loss_that_is_not_in_the_list_of_mlx_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that the registry has just got."""
    monkeypatch.setitem(LOSSES, "new", LOSSES["infonce"])
    setup = prepared(small_config({"train.device": "mlx"}))
    assert set(mlx_step.LOSSES_IN_MLX) < set(LOSSES)
    for name in set(LOSSES) - set(mlx_step.LOSSES_IN_MLX):
        with pytest.raises(
            UserError, match=f"--device mlx does not support --loss {name}; use --device mps or cpu"
        ):
            mlx_step.check_supported(setup.config.changed(loss=name), setup.start)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"train.loss": "sigmoid"}, "--loss sigmoid"),
        ({"model.compile": True}, "--compile"),
        ({"transfer.teacher": "other"}, "--teacher"),
    ],
)
def test_unsupported_settings_are_refused(
    changes: dict[str, Any], what: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=f"--device mlx does not support {what}"):
        run_small(tmp_path / "run", {"train.device": "mlx", **changes})
    with pytest.raises(UserError, match="fp16: not supported on mlx"):
        run_small(tmp_path / "run", {"train.device": "mlx", "train.precision": "fp16"})


def test_optimizer_without_a_form_in_mlx_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(OPTIMIZER_PARTS, "muon", ("muon", "sign"))
    with pytest.raises(UserError, match="--device mlx does not support --optimizer muon"):
        run_small(tmp_path / "run", {"train.device": "mlx"})


def test_wrong_gradients_of_mlx_stop_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = mlx_step.MLXOps.log_softmax
    monkeypatch.setattr(mlx_step.MLXOps, "log_softmax", staticmethod(lambda x: 1.1 * right(x)))
    with pytest.raises(UserError, match="mlx computes gradients that differ from the CPU's"):
        run_small(tmp_path / "run", {"train.device": "mlx", "train.steps": 1})
    monkeypatch.setattr(mlx_step.MLXOps, "log_softmax", staticmethod(right))
    monkeypatch.setattr(mlx_step, "orthogonalize", lambda x: x)
    with pytest.raises(UserError, match="updates of the optimizer"):
        run_small(tmp_path / "other", {"train.device": "mlx", "train.steps": 1})


def test_bf16_stays_within_its_tolerance() -> None:
    setup, cpu, mlx = two_steps({**SCRATCH, "train.precision": "bf16"})
    found, expected = (
        parity.gradient(step.for_check(step.model), setup.training[0]) for step in (mlx, cpu)
    )
    assert 1e-4 < parity.relative_difference(found[1], expected[1]) < parity.TOLERANCE["bf16"]
