"""The training step: micro-batches, checkpointing, dropout, precision and compilation."""

import sys
import traceback
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from ranks import on_ranks
from small_run import prepared, run_small, small_config
from torch import Tensor, nn

from m1clip.config import Config, ModelConfig
from m1clip.data.augment import render
from m1clip.data.loader import Batch
from m1clip.losses import run_loss
from m1clip.losses.registry import LOSSES, SAME_IMAGE_OR_CAPTION, Array, Ids, Loss, Ops
from m1clip.model.clip import CLIP, Features
from m1clip.optimizers import OPTIMIZERS
from m1clip.training.compose import TrainStep, compose_step
from m1clip.training.distributed import Ranks
from m1clip.training.encode import ChunkedTower, EncodedInChunks, TowerCall, ignore_mark, split
from m1clip.training.inputs import RunInputs
from m1clip.training.step import compute_gradients, make_parts, uses_kernels
from m1clip.training.step_analyses import StepView

AUGMENTED = {"data.crop_min": 0.5, "data.flip": 0.5, "data.color_jitter": 0.3}
PHASES = {"copy", "preprocess", "forward", "backward", "optimizer"}


def make(changes: dict[str, Any] | None = None) -> tuple[RunInputs, TrainStep]:
    inputs = prepared(small_config({**AUGMENTED, **(changes or {})}))
    model = inputs.build_model()
    with torch.no_grad():  # no parameter at an initial value that would hide its gradient
        for p in model.parameters():
            noise = torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel()))
            p.add_(noise.to(p.device) * 0.05)
    return inputs, compose_step(
        make_parts(model, inputs.config, inputs.device, inputs.precision, inputs.model.preprocess)
    )


def gradients(update: TrainStep, batch: Batch, step: int = 3) -> tuple[Tensor, dict[str, Tensor]]:
    loss = compute_gradients(update.parts, batch, step)
    gradient_of = {
        name: p.grad.clone() if p.grad is not None else torch.zeros_like(p)
        for name, p in update.model.named_parameters()
    }
    update.optimizer.zero_grad()
    return loss, gradient_of


def assert_close(actual: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        difference = (actual[name] - value).norm() / value.norm()
        assert difference < tolerance, f"{name}: relative difference {difference:.1e}"


def test_triton_kernels_are_for_bf16_on_cuda_where_they_compile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And where the host need not launch them one by one."""
    name = "m1clip.cuda.kernels"
    cuda: Any = SimpleNamespace(kind="cuda")
    cpu: Any = SimpleNamespace(kind="cpu")
    eager, compiled = Config(), Config(model=ModelConfig(compile=True))
    for compiles in (True, False):
        own = SimpleNamespace(compile_here=lambda compiles=compiles: compiles)
        monkeypatch.setitem(sys.modules, name, own)
        monkeypatch.setattr("m1clip.cuda.kernels", own, raising=False)
        assert uses_kernels(eager, cuda, "bf16", is_captured=True) is compiles
        assert uses_kernels(compiled, cuda, "bf16", is_captured=False) is compiles
        assert not uses_kernels(eager, cuda, "bf16", is_captured=False)
        assert not uses_kernels(compiled, cuda, "fp32", is_captured=True)
        assert not uses_kernels(compiled, cpu, "bf16", is_captured=True)
    monkeypatch.setitem(sys.modules, name, None)  # as without triton
    monkeypatch.delattr("m1clip.cuda.kernels")
    assert not uses_kernels(compiled, cuda, "bf16", is_captured=True)


@pytest.mark.parametrize("objective", LOSSES)
@pytest.mark.parametrize(("micro_batch", "checkpointing"), [(1, False), (5, False), (8, True)])
def test_micro_batches_give_gradient_of_full_batch(
    objective: str, micro_batch: int, checkpointing: bool
) -> None:
    changes = {"train.loss": objective}
    inputs, full = make(changes)
    batch = inputs.training[0]
    loss, expected = gradients(full, batch)
    _, micro_batched = make(
        {**changes, "train.micro_batch": micro_batch, "model.grad_checkpointing": checkpointing}
    )
    micro_batched_loss, actual = gradients(micro_batched, batch)
    torch.testing.assert_close(micro_batched_loss, loss, rtol=1e-6, atol=0)
    assert ("logit_bias" in expected) == LOSSES[objective].needs_bias
    assert_close(actual, expected, 1e-5)


@pytest.mark.parametrize("micro_batch", [1, 5, 8])
@pytest.mark.parametrize("max_logits", [run_loss.MAX_LOGITS, 0])
def test_cutmix_in_micro_batches_and_blocks_gives_the_same_gradient(
    micro_batch: int, max_logits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = {"data.cutmix": 0.8, "train.text_contrast": 0.3}
    inputs, full = make(changes)
    batch = inputs.training[0]
    assert batch.mixed is not None
    assert float(batch.mixed.max()) > 0.1
    loss, expected = gradients(full, batch)
    plain_loss, _ = gradients(full, replace(batch, boxes=None))
    assert abs(float(plain_loss - loss)) > 1e-3
    monkeypatch.setattr(run_loss, "MAX_LOGITS", max_logits)
    monkeypatch.setattr(run_loss, "TERM_LOGITS", 100)
    _, micro_batched = make({**changes, "train.micro_batch": micro_batch})
    found_loss, actual = gradients(micro_batched, batch)
    torch.testing.assert_close(found_loss, loss, rtol=1e-5, atol=0)
    assert_close(actual, expected, 1e-4)


@pytest.mark.parametrize("pairwise", [False, True])
def test_new_loss_works_in_micro_batches_and_blocks(
    pairwise: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loss needs no more than its entry in the registry."""

    def squared_rows(ops: Ops, logits: Array, positive: Array) -> Array:
        return ((logits - 10.0 * ops.cast(positive, logits)) ** 2).sum()

    new = Loss("squared error", squared_rows, SAME_IMAGE_OR_CAPTION, pairwise=pairwise)
    monkeypatch.setitem(LOSSES, "squared", new)
    inputs, _ = make()
    batch = inputs.training[0]
    results = {}
    for micro_batch, max_logits in (
        (0, run_loss.MAX_LOGITS),
        (5, run_loss.MAX_LOGITS),
        (0, 0),
        (5, 0),
    ):
        monkeypatch.setattr(run_loss, "MAX_LOGITS", max_logits)
        monkeypatch.setattr(run_loss, "TERM_LOGITS", 100)
        config = inputs.config.with_values(loss="squared", micro_batch=micro_batch)
        model = inputs.build_model()
        update = compose_step(
            make_parts(model, config, inputs.device, inputs.precision, inputs.model.preprocess)
        )
        results[micro_batch, max_logits] = gradients(update, batch)
    (loss, expected), *others = results.values()
    assert expected["logit_scale"] != 0
    for other_loss, actual in others:
        torch.testing.assert_close(other_loss, loss, rtol=1e-5, atol=0)
        assert_close(
            {n: g for n, g in actual.items() if g.any()},
            {n: g for n, g in expected.items() if g.any()},
            1e-4,
        )


@pytest.mark.parametrize(
    ("precision", "micro_batch", "tolerance"),
    [("fp32", 0, 1e-5), ("bf16", 0, 1e-3), ("bf16", 6, 1e-3)],
)
def test_checkpointing_gives_same_gradient(
    precision: str, micro_batch: int, tolerance: float
) -> None:
    """Autocast caches cast weights.

    One cast without a graph must not be reused in a pass with one.
    """
    changes = {"train.precision": precision, "train.micro_batch": micro_batch}
    inputs, plain = make(changes)
    batch = inputs.training[0]
    _, saving = make({**changes, "model.grad_checkpointing": True})
    assert_close(gradients(saving, batch)[1], gradients(plain, batch)[1], tolerance)


def make_with_dropout(changes: dict[str, Any]) -> tuple[RunInputs, TrainStep]:
    """Dropout after both towers, as third-party towers and heads have it."""
    inputs, plain = make(changes)
    assert not plain.parts.encoder.has_dropout
    for tower in (plain.model.image_tower, plain.model.text_tower):
        tower.thin = nn.Dropout(0.5)
        tower.register_forward_hook(lambda tower, inputs, output: tower.thin(output))
    return inputs, compose_step(
        make_parts(
            plain.model, inputs.config, inputs.device, inputs.precision, inputs.model.preprocess
        )
    )


@pytest.mark.parametrize("checkpointing", [False, True])
def test_dropout_is_same_in_both_passes_of_a_micro_batch(checkpointing: bool) -> None:
    changes = {
        "model.grad_checkpointing": checkpointing,
        "train.text_contrast": 0.0,
        "train.micro_batch": 6,
    }
    inputs, update = make_with_dropout(changes)
    batch = inputs.training[0]
    loss, actual = gradients(update, batch)
    again_loss, again = gradients(update, batch)
    assert torch.equal(loss, again_loss)
    assert all(torch.equal(again[name], value) for name, value in actual.items())
    other_loss, _ = gradients(update, batch, step=4)
    assert not torch.equal(loss, other_loss), "each step has its own mask"
    # Reference: all micro-batches in one graph, each with its own mask.
    wanted_loss = one_graph(update, batch, 6)
    torch.testing.assert_close(loss, wanted_loss.detach(), rtol=1e-6, atol=0)
    wanted_loss.backward()
    expected = {name: p.grad for name, p in update.model.named_parameters() if p.grad is not None}
    assert_close(actual, expected, 1e-5)


def one_graph(update: TrainStep, batch: Batch, micro_batch: int) -> Tensor:
    pixels = render(batch.images, batch.views, update.parts.encoder.preprocess)
    image, text = [], []
    for at in range(0, len(pixels), micro_batch):
        update.parts.encoder._seed_dropout(3, 2 * at)
        image.append(update.model.encode_view(pixels[at : at + micro_batch]))
    captions_per_image = len(batch.tokens) // len(pixels)
    for at in range(0, len(batch.tokens), captions_per_image * micro_batch):
        update.parts.encoder._seed_dropout(3, 2 * at + 1)
        text.append(
            update.model.encode_text(batch.texts(slice(at, at + captions_per_image * micro_batch)))
        )
    features = Features(
        torch.cat(image), torch.cat(text), update.model.scale(), update.model.logit_bias
    )
    return update.parts.loss.value(
        features, Ids(batch.sample_ids, batch.caption_ids, batch.image_index)
    )


@pytest.mark.parametrize("micro_batch", [0, 8])
def test_dropout_of_third_party_tower_depends_only_on_step(micro_batch: int) -> None:
    inputs, thinned = make_with_dropout({"train.micro_batch": micro_batch})
    batch = inputs.training[0]
    (one, expected), (other, actual) = gradients(thinned, batch), gradients(thinned, batch)
    assert one == other != gradients(thinned, batch, step=4)[0]
    assert all(torch.equal(actual[name], value) for name, value in expected.items())


@pytest.mark.skipif(torch.cuda.is_initialized(), reason="seeds are then not queued")
def test_seeding_dropout_leaves_nothing_behind() -> None:
    """torch.manual_seed queues a call for each kind of GPU that has not been used yet."""
    inputs, thinned = make_with_dropout({})
    queued = len(torch.cuda._queued_calls)
    gradients(thinned, inputs.training[0])
    assert len(torch.cuda._queued_calls) == queued


def test_bf16_rounding_error_is_same_with_micro_batches() -> None:
    inputs, exact = make()
    batch = inputs.training[0]
    expected = gradients(exact, batch)[1]
    errors = {}
    for micro_batch in (0, 5):
        _, update = make({"train.precision": "bf16", "train.micro_batch": micro_batch})
        actual = gradients(update, batch)[1]
        errors[micro_batch] = float(
            sum((actual[name] - value).norm() for name, value in expected.items())
            / sum(value.norm() for value in expected.values())
        )
        assert all(value.abs().sum() > 0 for value in actual.values()), (
            "a cast without a graph was reused"
        )
    assert errors[0] > 0
    assert errors[5] < 1.5 * errors[0]


def test_gradients_are_unscaled_before_clipping() -> None:
    """fp16 training needs a GPU, but the gradient scaler also works on the CPU."""
    _, plain = make({"train.micro_batch": 5})
    inputs, scaled = make({"train.micro_batch": 5})
    scaled.parts.update.scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    loss, norm, _ = plain.run(inputs.training[0], 0)
    scaled_loss, scaled_norm, _ = scaled.run(inputs.training[0], 0)
    torch.testing.assert_close(scaled_loss, loss)
    torch.testing.assert_close(scaled_norm, norm, rtol=1e-4, atol=0)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_micro_batched_steps_match_full_batch(optimizer: str) -> None:
    changes = {"optim.optimizer": optimizer}
    inputs, full = make(changes)
    _, micro_batched = make({**changes, "train.micro_batch": 4})
    gradients = [dict[str, Tensor](), dict[str, Tensor]()]

    def keep(view: StepView, weights_: dict[str, Tensor]) -> None:
        weights_.update({name: gradient.clone() for name, gradient in view.gradients.items()})

    for step in range(3):
        # Gradients are compared, not updates: an optimizer may amplify their rounding.
        micro_batched.model.load_state_dict(full.model.state_dict())
        batch = inputs.training[step]
        loss, norm, _ = full.run(batch, step, partial(keep, weights_=gradients[0]))
        other_loss, other_norm, _ = micro_batched.run(
            batch, step, partial(keep, weights_=gradients[1])
        )
        torch.testing.assert_close(other_loss, loss, rtol=1e-4, atol=0)
        torch.testing.assert_close(other_norm, norm, rtol=1e-3, atol=0)
        assert gradients[0].keys() == gradients[1].keys()
        for name, gradient in gradients[0].items():
            assert (gradients[1][name] - gradient).norm() <= 1e-3 * norm, name


def test_only_one_micro_batch_of_activations_is_alive() -> None:
    alive, max_alive = 0, 0

    class Count(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            nonlocal alive, max_alive
            if ctx.needs_input_grad[0]:
                alive += len(x)
                max_alive = max(max_alive, alive)
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            nonlocal alive
            alive -= len(gradient)
            return gradient

    inputs, weight = torch.randn(10, 7), torch.ones(7, requires_grad=True)
    tower = ChunkedTower(
        lambda rows: TowerCall(lambda x: Count.apply(x * weight), (inputs[rows],)),
        split(slice(0, 10), 4),
        idle_calls=2,
    )
    encoded = EncodedInChunks([inputs], [tower], ignore_mark, nullcontext, nullcontext)
    passes: list[bool] = []
    encoded.backward([torch.ones(10, 7)], passes.append)
    assert passes == [False, False, False, False, True], (
        "three chunks and two calls without a result"
    )
    assert (alive, max_alive) == (0, 4)
    torch.testing.assert_close(weight.grad, inputs.sum(dim=0))


@pytest.mark.parametrize("micro_batch", [0, 5])
def test_step_reports_seconds_by_phase(micro_batch: int) -> None:
    inputs, update = make({"train.micro_batch": micro_batch})
    update.run(inputs.training[0], 0)
    phases = update.phases.take()
    assert set(phases) == PHASES
    assert all(seconds >= 0 for seconds in phases.values())
    assert update.phases.take() == {}


@pytest.mark.parametrize("micro_batch", [0, 5])
def test_two_functions_lie_between_the_loop_and_the_model(
    micro_batch: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: set[tuple[str, ...]] = set()
    real = CLIP.encode_view

    def encode(self: CLIP, *args: Any) -> Tensor:
        stack = traceback.extract_stack()[:-1]
        names = [f"{Path(frame.filename).stem}.{frame.name}" for frame in stack]
        if "loop._train_steps" in names and "loop._evaluate" not in names:
            called.add(tuple(names[names.index("loop._train_steps") + 1 :]))
        return real(self, *args)

    monkeypatch.setattr(CLIP, "encode_view", encode)
    run_small(tmp_path, {"train.micro_batch": micro_batch, "train.steps": 2})
    again = {("step.train_step", "world.backward", "encode.backward", "encode._backward_of")}
    expected = {("step.train_step", "encode.forward")} | (again if micro_batch else set())
    assert called == expected


def compiled_and_plain_gradients(_ranks: Ranks) -> list[dict[str, Tensor]]:
    """Without the C++ compiler, which takes a minute: only tracing and the joint graph are tested."""
    with mock.patch.object(torch, "compile", partial(torch.compile, backend="aot_eager")):
        changes = {"model.vision_layers": 1, "model.text_layers": 1, "train.micro_batch": 6}
        inputs, plain = make(changes)
        _, same = make(changes)
        compiled = compose_step(
            make_parts(
                same.model,
                replace(inputs.config, model=replace(inputs.config.model, compile=True)),
                inputs.device,
                inputs.precision,
                inputs.model.preprocess,
            )
        )
        batch = inputs.training[0]
        return [gradients(compiled, batch)[1], gradients(plain, batch)[1]]


@pytest.mark.slow
def test_compiled_micro_batches_give_same_gradient() -> None:
    """In a process of its own: the compiler cannot read code whose lines are counted for coverage."""
    ((compiled, plain),) = on_ranks(1, compiled_and_plain_gradients)
    assert_close(compiled, plain, 1e-5)


@pytest.mark.parametrize("micro_batch", [0, 5])
def test_loss_in_blocks_gives_same_gradient(
    micro_batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = {"train.micro_batch": micro_batch, "train.text_contrast": 0.3}
    inputs, whole = make(changes)
    batch = inputs.training[0]
    loss, expected = gradients(whole, batch)
    monkeypatch.setattr(run_loss, "MAX_LOGITS", 0)
    monkeypatch.setattr(run_loss, "TERM_LOGITS", 100)
    _, in_blocks = make(changes)
    found_loss, actual = gradients(in_blocks, batch)
    torch.testing.assert_close(found_loss, loss, rtol=1e-6, atol=0)
    assert_close(actual, expected, 1e-5)


@pytest.mark.parametrize("micro_batch", [0, 5])
def test_probe_sees_the_gradients_of_the_batch_before_the_update(micro_batch: int) -> None:
    inputs, update = make({"train.micro_batch": micro_batch})
    batch = inputs.training[0]
    _, expected = gradients(update, batch, step=0)
    before = {name: p.detach().clone() for name, p in update.model.named_parameters()}
    by_probe: dict[str, Tensor] = {}

    def probe(view: StepView) -> None:
        by_probe.update({name: grad.clone() for name, grad in view.gradients.items()})
        assert view.weights.keys() == view.gradients.keys()
        assert all(torch.equal(p, before[name]) for name, p in view.weights.items())
        assert all(torch.equal(p, before[name]) for name, p in update.model.named_parameters())

    _, norm, _ = update.run(batch, 0, probe)
    assert by_probe.keys() == expected.keys()
    assert all(torch.equal(by_probe[name], value) for name, value in expected.items())
    torch.testing.assert_close(
        norm, torch.cat([grad.flatten() for grad in by_probe.values()]).norm()
    )
    assert any(not torch.equal(p, before[name]) for name, p in update.model.named_parameters())
    _, unprobed = make({"train.micro_batch": micro_batch})
    unprobed.run(batch, 0)
    assert all(
        torch.equal(p, unprobed.model.get_parameter(name))
        for name, p in update.model.named_parameters()
    )


def test_probe_sees_gradients_without_loss_scale_and_the_update_stays_the_same() -> None:
    """fp16 training needs a GPU, but the gradient scaler also works on the CPU."""
    inputs, plain = make()
    batch = inputs.training[0]
    _, expected = gradients(plain, batch, step=0)
    steps = {}
    by_probe: dict[str, Tensor] = {}

    def probe(view: StepView) -> None:
        by_probe.update({name: grad.clone() for name, grad in view.gradients.items()})

    for name, step_probe in (("probed", probe), ("unprobed", None)):
        _, steps[name] = make()
        steps[name].parts.update.scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
        for step in range(2):  # the scaler is ready for another step
            steps[name].run(inputs.training[step], step, step_probe if step == 0 else None)
    assert_close(by_probe, expected, 1e-6)
    for name, p in steps["probed"].model.named_parameters():
        assert torch.equal(p, steps["unprobed"].model.get_parameter(name)), name


def test_step_does_not_load_the_compiler() -> None:
    """It would take a second and 40 MB; another process, because other tests load it."""
    assert on_ranks(1, modules_of_a_step) == [[]]


def modules_of_a_step(_ranks: Ranks) -> list[str]:
    inputs, step = make({})
    step.run(inputs.training[0], 0)
    return [name for name in ("sympy", "torch._dynamo") if name in sys.modules]


@pytest.mark.parametrize("grad_clip", [0.0, 0.01, 1e6])
def test_gradients_are_clipped_to_the_norm_of_the_option(grad_clip: float) -> None:
    inputs, update = make({"optim.grad_clip": grad_clip})
    loss, expected = gradients(update, inputs.training[0])
    compute_gradients(update.parts, inputs.training[0], 3)
    norm_before = torch.nn.utils.get_total_norm(list(expected.values()))
    assert norm_before > 0.01
    used: list[Tensor] = []

    def record(*_: Any) -> None:
        used.extend(p.grad.clone() for p in update.model.parameters() if p.grad is not None)

    with mock.patch.object(update.optimizer, "step", record):
        grad_norm = update.parts.update(loss)
    torch.testing.assert_close(grad_norm, norm_before, rtol=1e-4, atol=0)  # as it was
    clipped = min(float(norm_before), grad_clip or float("inf"))
    assert float(torch.nn.utils.get_total_norm(used)) == pytest.approx(clipped, rel=1e-3)
