"""Training in MLX: the numbers of the torch step, and runs that move between devices."""

import copy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import on_ranks
from small_run import figures_of, prepared, run_small, small_config, tensors_of
from torch import Tensor
from tower_run import frozen_changes, patch_towers

import m1clip
from m1clip import console
from m1clip.errors import UserError
from m1clip.hardware.device import Device
from m1clip.losses.registry import LOSSES, Ids
from m1clip.losses.run_loss import TORCH, RunLoss
from m1clip.model.clip import Features
from m1clip.optimizers import ADAMW, MUON, OPTIMIZERS
from m1clip.training import parity
from m1clip.training.checkpoint import checkpoint_tensors
from m1clip.training.compose import TrainStep, compose_step
from m1clip.training.distributed import Ranks
from m1clip.training.inputs import RunInputs
from m1clip.training.process import Stopped
from m1clip.training.run import resume
from m1clip.training.step import compute_gradients, make_parts
from m1clip.training.step_analyses import StepView, layer_grad_norms

mx = pytest.importorskip(
    "mlx.core", reason="mlx is not installed: make test-mlx", exc_type=ImportError
)
mlx_step = pytest.importorskip("m1clip.mlx.step")

SCRATCH = {
    "data.crop_min": 0.5,
    "data.flip": 0.5,
    "train.text_contrast": 0.2,
    "train.steps": 20,
    "train.device": "mlx",
}
RECIPES: dict[str, dict[str, Any]] = {
    **{
        f"scratch, {name}": {"optim.optimizer": name}
        for name, entry in OPTIMIZERS.items()
        if entry.in_mlx
    },
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


def two_steps(changes: dict[str, Any]) -> tuple[RunInputs, TrainStep, Any]:
    """A run, its step on the CPU and its step in MLX, from the same weights, none of which is 0."""
    inputs = prepared(small_config(changes))
    model = inputs.build_model()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.05 * torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())))
    cpu = compose_step(
        make_parts(
            copy.deepcopy(model),
            inputs.config,
            Device("cpu", inputs.facts),
            "fp32",
            inputs.model.preprocess,
        )
    )
    settings = (inputs.config, inputs.device, inputs.precision, inputs.model.preprocess)
    return inputs, cpu, compose_step(make_parts(model, *settings))


def worst(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The largest relative difference of a tensor."""
    assert actual.keys() == expected.keys()
    return max(
        float((actual[n] - t).norm() / t.norm().clamp(min=1e-9)) for n, t in expected.items()
    )


@pytest.mark.parametrize("name", ["log_softmax", "log_sum_exp", "log_sigmoid"])
def test_operations_of_losses_are_those_of_torch(name: str) -> None:
    x = 20 * torch.randn((5, 7), generator=torch.Generator().manual_seed(0))
    actual = mlx_step.to_torch(getattr(mlx_step.MLXOps, name)(mlx_step.to_mlx(x)))
    torch.testing.assert_close(actual, getattr(TORCH, name)(x), rtol=1e-5, atol=1e-5)


def record_norms(views: list[dict[str, dict[str, float]]], view: StepView) -> None:
    weights = view.norms(view.weights, view.layers)
    views.append({"gradients": layer_grad_norms(view), "weights": weights})


@pytest.mark.parametrize("recipe", RECIPES)
def test_gradients_and_updates_are_those_of_torch(
    recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    patch_towers(monkeypatch)
    changes = {**SCRATCH, **RECIPES[recipe]}
    if "transfer.recipe" in changes:  # with the dropout of the heads
        changes = frozen_changes(tmp_path, **{**changes, "train.text_contrast": 0.0})
    inputs, cpu, mlx = two_steps(changes)
    loss = compute_gradients(cpu.parts, inputs.training[0], 0)
    assert mlx.engine.compute_gradients(inputs.training[0], 0).item() == pytest.approx(
        loss.item(), rel=1e-4
    )
    gradients = {name: p.grad for name, p in cpu.model.named_parameters() if p.grad is not None}
    assert (
        worst({name: mlx_step.to_torch(g) for name, g in mlx.engine._grads.items()}, gradients)
        < 1e-4
    )  # type: ignore[arg-type]
    cpu.optimizer.zero_grad()
    for step in range(20):
        # In the third step torch's weights are older than those of MLX.
        views: list[dict[str, dict[str, float]]] = []
        probe = partial(record_norms, views) if step == 2 else None
        batch = inputs.training[step]
        pairs = zip(cpu.run(batch, step, probe), mlx.run(batch, step, probe), strict=True)
        for kind in ("gradients", "weights") if views else ():
            assert views[1][kind] == pytest.approx(views[0][kind], rel=1e-3), kind
        assert all(
            dtype_.tolist() == pytest.approx(expected.tolist(), rel=1e-3)
            for expected, dtype_ in pairs
        )
    expected, actual = (checkpoint_tensors(step) for step in (cpu, mlx))
    assert actual.keys() == expected.keys()
    assert worst(actual["weights"], expected["weights"]) < 1e-3
    assert worst(actual["optimizer"], expected["optimizer"]) < 0.02, (
        "moments of tiny gradients round more"
    )


def test_nonfinite_batch_changes_nothing_and_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, _, mlx = two_steps(SCRATCH)
    mlx.run(inputs.training[0], 0)
    before = copy.deepcopy(checkpoint_tensors(mlx))
    original = mlx_step.MLXStep._inputs

    def broken(self: Any, side: str, *rest: Any) -> Any:
        features = original(self, side, *rest)
        return {**features, "pixels": features["pixels"] * mx.inf} if side == "image" else features

    with monkeypatch.context() as patched:
        patched.setattr(mlx_step.MLXStep, "_inputs", broken)
        loss = mlx.run(inputs.training[1], 1).loss
    assert not loss.isfinite()
    after = checkpoint_tensors(mlx)
    assert all(
        torch.equal(after[group][name], t) for group in before for name, t in before[group].items()
    )
    assert mlx.model is mlx.parts.model
    assert mlx.parts.encoder.nonfinite_rows(inputs.training[1]) == []
    assert mlx.run(inputs.training[1], 1)[0].isfinite()


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
    moved = tmp_path / "moved"
    stop_at(monkeypatch, 4)
    with pytest.raises(Stopped):
        run_small(moved, changes)
    stop_at(monkeypatch, 8)
    with console.capture() as output, pytest.raises(Stopped):
        resume(moved, device="mlx")
    text = output.getvalue()
    assert "without a GPU: its build for the CPU" in text or mx.metal.is_available()
    assert "parity     gradients on mlx differ by at most 0.0" in text
    assert "from step 4 of 12" in text
    resume(moved, device="cpu")
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
@pytest.mark.parametrize(("contrast", "smoothing"), [(0.0, 0.0), (0.3, 0.1)])
def test_losses_are_those_of_torch(name: str, contrast: float, smoothing: float) -> None:
    torch.manual_seed(0)
    image, text = (torch.nn.functional.normalize(torch.randn(n, 8), dim=1) for n in (6, 12))
    caption_ids = torch.tensor([0, 1, 2, 3, 4, 5, 6, 1, 8, 9, 4, 11])
    ids = Ids(torch.tensor([0, 1, 2, 0, 4, 5]), caption_ids, torch.arange(12) % 6)
    objective = LOSSES[name]
    objective = objective.smoothed(smoothing) if objective.takes_targets else objective
    loss = RunLoss(objective, contrast)
    bias = torch.tensor(-2.0) if LOSSES[name].needs_bias else None
    expected, by_features = loss.loss_and_grads(Features(image, text, torch.tensor(7.0), bias), ids)
    labels = mlx_step.loss_labels(loss, ids)

    def value(image: Any, text: Any) -> Any:
        bias = mx.array(-2.0) if LOSSES[name].needs_bias else None
        return mlx_step.run_loss_in_mlx(loss, image, text, mx.array(7.0), bias, labels)

    arrays = [mlx_step.to_mlx(image), mlx_step.to_mlx(text)]
    mlx_loss, gradients = mx.value_and_grad(value, argnums=(0, 1))(*arrays)
    assert mlx_loss.item() == pytest.approx(expected.item(), rel=1e-5)
    for ours, torchs in zip(gradients, by_features, strict=True):
        torch.testing.assert_close(mlx_step.to_torch(ours), torchs, atol=1e-6, rtol=1e-4)


def test_loss_that_needs_a_bias_is_rejected_by_mlx(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that is new in the registry; a new one without a bias is trained."""
    monkeypatch.setitem(LOSSES, "new", replace(LOSSES["infonce"], needs_bias=True))
    monkeypatch.setitem(LOSSES, "new without bias", LOSSES["infonce"])
    inputs = prepared(small_config({"train.device": "mlx"}))
    for name, loss in LOSSES.items():
        config = inputs.config.with_values(loss=name)
        if not loss.needs_bias:
            mlx_step.check_supported(config, inputs.model.init)
            continue
        with pytest.raises(
            UserError, match=f"--device mlx does not support --loss {name}; use --device mps or cpu"
        ):
            mlx_step.check_supported(config, inputs.model.init)


@pytest.mark.parametrize(
    ("changes", "feature"),
    [
        ({"train.loss": "sigmoid"}, "--loss sigmoid"),
        ({"model.compile": True}, "--compile"),
        ({"transfer.teacher": "general"}, "--teacher"),
    ],
)
def test_unsupported_settings_are_refused(
    changes: dict[str, Any], feature: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=f"--device mlx does not support {feature}"):
        run_small(tmp_path / "run", {"train.device": "mlx", **changes})
    with pytest.raises(UserError, match="fp16: not supported on mlx"):
        run_small(tmp_path / "run", {"train.device": "mlx", "train.precision": "fp16"})


def test_optimizer_without_a_form_in_mlx_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sign = replace(ADAMW, name="sign", in_mlx=False)
    monkeypatch.setitem(OPTIMIZERS, "muon", replace(OPTIMIZERS["muon"], parts=(MUON, sign)))
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
    inputs, cpu, mlx = two_steps({**SCRATCH, "train.precision": "bf16"})
    actual, expected = (
        parity.gradient(step.for_check(step.model), inputs.training[0]) for step in (mlx, cpu)
    )
    assert 1e-4 < parity.relative_difference(actual[1], expected[1]) < parity.TOLERANCE["bf16"]


@pytest.mark.parametrize("micro_batch", [0, 5])
def test_synchronized_step_has_the_stages_and_the_same_loss(micro_batch: int) -> None:
    inputs, _, step = two_steps({**SCRATCH, "train.micro_batch": micro_batch})
    _, _, other = two_steps({**SCRATCH, "train.micro_batch": micro_batch})
    batch = inputs.training[0]
    with step.phases.synchronized(mx.synchronize) as stages:
        loss = step.run(batch, 0).loss
    assert {"preprocess", "forward", "backward", "optimizer"} <= set(stages)
    assert all(seconds >= 0 for seconds in stages.values())
    assert torch.equal(loss, other.run(batch, 0).loss)


def train_in_mlx(ranks: Ranks) -> list[dict[str, Any]]:
    """Two steps of 9 images, which two ranks divide unevenly; at once, and in micro-batches."""
    norms_by_step = []
    for micro_batch in (0, 3):
        changes = {**SCRATCH, "train.batch_size": 9, "train.micro_batch": micro_batch}
        inputs = prepared(small_config(changes)).for_rank(ranks)
        step = inputs.make_step()
        norms: list[dict[str, float]] = []

        def probe(view: StepView, norms: list[dict[str, float]] = norms) -> None:
            norms.append(layer_grad_norms(view))

        results = [step.run(inputs.training[number], number, probe) for number in range(2)]
        weights = {name: p.detach().clone() for name, p in step.model.named_parameters()}
        norms_by_step.append({"results": figures_of(results), "norms": norms, "weights": weights})
    return norms_by_step


def test_two_ranks_train_in_mlx_like_one_process() -> None:
    first, second = on_ranks(2, train_in_mlx)
    for expected, *ranks in zip(train_in_mlx(Ranks()), first, second, strict=True):
        for result in ranks:
            torch.testing.assert_close(result["results"], expected["results"], rtol=1e-4, atol=1e-5)
            assert result["norms"][0] == pytest.approx(expected["norms"][0], rel=1e-3, abs=1e-6)
            assert worst(result["weights"], expected["weights"]) < 1e-3
        for name, weight in ranks[0]["weights"].items():
            assert torch.equal(weight, ranks[1]["weights"][name]), f"the ranks differ in {name}"
