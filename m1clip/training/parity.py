"""Checks before a run: gradients on an accelerator, and that no text position sees later tokens.

A few samples are compared with the CPU. The run's real batch is compared with the same batch in
small slices, which finds errors that depend on the size (pytorch#193487), and would take minutes on
the CPU.
"""

from __future__ import annotations

import copy
import functools
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from m1clip.data.loader import Batch
from m1clip.errors import UserError
from m1clip.formatting import ceil_div, duration
from m1clip.hardware.device import Device, Precision
from m1clip.hardware.machine_info import MachineInfo
from m1clip.model.clip import CLIP
from m1clip.model.members import MemberTowers
from m1clip.model.towers import TextTower
from m1clip.training.compose import GradientCheck, TrainStep, compose_step
from m1clip.training.muon import Muon, orthogonalize
from m1clip.training.oom import OOMHandler, StepAttempts
from m1clip.training.step import make_parts

if TYPE_CHECKING:  # workbench imports this module too
    from m1clip.training.inputs import RunInputs

Module = TypeVar("Module", bound=nn.Module)
PAIRS = 8
SLICE, MOST_SLICES = 32, 8  # images, at least; more slices would take longer than they show
CHECKED_STEP_SECONDS = 3.0  # of a step that is repeated in slices, which takes about twice as long
LEAK = 1e-3  # relative change of text features; exact kernels give 0
# Gradient entries to compare: several copies of a complete gradient would be the memory peak of a
# run.
MOST = 1 << 22
# Relative error of the complete gradient. A wrong kernel gives errors near or above 1; rounding
# stays far below these, except in deep networks of convolutions in bf16: 0.25 in EfficientNet-Lite,
# on a GPU as on the CPU.
TOLERANCE: dict[Precision, float] = {"fp32": 0.02, "bf16": 0.15, "fp16": 0.05}
MOST_ROUNDING = 0.5


class Parity(NamedTuple):
    """The largest relative difference found, and what was not compared and why ("" if everything
    was).
    """

    difference: float
    skipped: str = ""


def check_parity(inputs: RunInputs, train_step: TrainStep) -> Parity | None:
    """Compare gradients and updates with the CPU's; UserError if they differ too much.

    None on the CPU.
    """
    device, precision, batch = inputs.device, inputs.precision, inputs.training[0]
    kind = device.name if device.is_hybrid else device.kind
    model = inputs.complete_model(train_step)
    check_causality(model, kind, inputs.autocast)
    if kind == "cpu":
        return None
    check = train_step.for_check(fill_zeros(copy.deepcopy(model)))
    few = first_samples(batch)
    with ThreadPoolExecutor(1, "parity") as cpu:  # at the same time as the device
        reference_gradient = cpu.submit(
            gradient, on_cpu(check.without_teacher(), inputs.facts), few
        )
        at_size = size_difference(check, batch)
        products = optimizer_difference(train_step)
        check = check.without_teacher()
        on_device = gradient(check, few)
        reference = reference_gradient.result()
    differences = {
        "computes gradients that differ from the CPU's": max(
            map(relative_difference, on_device, reference)
        ),
        f"computes gradients of a batch of {len(batch)} that differ from those of its slices": (
            at_size.difference
        ),
        "computes updates of the optimizer that differ from the CPU's": products,
    }
    for number, (finding, difference) in enumerate(differences.items()):
        allowed = TOLERANCE[precision]
        if precision == "bf16" and number == 0 and difference > allowed:
            rounded = gradient(on_cpu(check, inputs.facts, precision), few)
            allowed = max(
                allowed, min(MOST_ROUNDING, 2 * max(map(relative_difference, rounded, reference)))
            )
        if difference > allowed:
            raise UserError(
                f"{kind} {finding} by {difference:.1%} ({precision} allows {allowed:.0%}): a kernel"
                " gives wrong results for this model; use --device cpu, another --precision, or"
                f" another version of {'mlx' if kind == 'mlx' else 'torch'} (m1clip doctor lists"
                " known errors)"
            )
    return Parity(max(differences.values()), at_size.skipped)


@torch.no_grad()
def check_causality(
    model: CLIP, kind: str, context: Callable[[], AbstractContextManager[object]]
) -> None:
    """Raise UserError if text features change with tokens after the EOT token."""
    text_tower: torch.nn.Module = model.text_tower
    if isinstance(text_tower, MemberTowers):
        text_tower = text_tower.parts[0]  # they have the same shape
    if not isinstance(text_tower, TextTower):
        return
    tower = fill_zeros(copy.deepcopy(text_tower)).eval()
    length, end = tower.config.context_length, tower.config.eot_id
    other = [token for token in range(min(tower.config.vocab_size, 3)) if token != end][:2]
    positions = torch.arange(length)
    # Five positions in sequence: kernels work on groups of four or more (pytorch#195910).
    ends = torch.arange(length // 2 - 2, length // 2 + 3).clamp(0, length - 2)[:, None]
    tokens = torch.where(positions == ends, end, other[0])
    changed = torch.where(positions > ends, other[-1], tokens)
    with context():
        device = next(tower.parameters()).device
        before, after = (tower(rows.to(device)).float() for rows in (tokens, changed))
    difference = float(((after - before).norm(dim=1) / before.norm(dim=1).clamp(min=1e-12)).max())
    if not difference <= LEAK:
        raise UserError(
            f"{kind}: text features change by {difference:.1%} with tokens after the end of the"
            " text, so attention sees later tokens; use --precision fp32, --device cpu or another"
            " version of torch"
        )


def size_difference(check: GradientCheck, batch: Batch) -> Parity:
    """Difference of loss and gradients between a batch as the run computes it and the same in small
    slices.

    0 for a batch that is one slice; not compared if a step takes too long to be repeated.
    """

    def run(micro_batch: int) -> tuple[Tensor, Tensor]:
        """Loss and gradients, with a smaller micro-batch where memory is short."""
        clear = functools.partial(check.parts.model.zero_grad, set_to_none=True)
        attempts = StepAttempts(clear=clear)
        attempts.handler = OOMHandler(micro_batch, check.parts.device.memory_bytes)
        clear()
        loss = attempts.repeat(check.plain, batch, 0).loss
        return loss.float().cpu(), flat_gradient(check.parts.model)

    begin = time.monotonic()
    complete = run(check.parts.config.train.micro_batch)
    seconds = time.monotonic() - begin
    if len(batch) <= SLICE:
        return Parity(0.0)
    if seconds > CHECKED_STEP_SECONDS:
        too_long = f"one step takes {duration(seconds)}, more than {duration(CHECKED_STEP_SECONDS)}"
        return Parity(
            0.0, f"the batch of {len(batch)} was not compared with its slices: {too_long}"
        )
    slices = run(max(SLICE, ceil_div(len(batch), MOST_SLICES)))
    return Parity(max(map(relative_difference, complete, slices)))


def optimizer_difference(train_step: TrainStep) -> float:
    """Relative difference of Muon's products from the CPU's, for one matrix of each shape.

    0 without Muon.
    """
    max_difference = 0.0
    for muon in train_step.optimizer.parts.values():
        if isinstance(muon, Muon):
            sides = {
                tuple(sorted(p.flatten(1).shape))
                for group in muon.param_groups
                for p in group["params"]
            }
            for shape in sides:
                x = torch.randn(1, *shape, generator=torch.Generator().manual_seed(0))
                there = train_step.orthogonalize(x.to(muon.dtype))
                max_difference = max(max_difference, relative_difference(there, orthogonalize(x)))
    return max_difference


@torch.no_grad()
def fill_zeros(model: Module) -> Module:
    """The model with small random values in matrices that are all zero, such as zero-initialized
    residual branches.

    With such branches the class token is the same for every image: the true gradient is then almost
    zero, and the difference between devices is all rounding error.
    """
    draw = torch.Generator().manual_seed(0)
    for p in model.parameters():
        if p.ndim >= 2 and not bool(p.any()):
            p.copy_(torch.randn(p.shape, generator=draw) * p.shape[-1] ** -0.5)
    return model


def relative_difference(a: Tensor, b: Tensor) -> float:
    """|a - b| / |b| of two vectors; infinite if anything is not finite."""
    difference = float((a - b).norm() / b.norm().clamp(min=1e-12))
    return difference if difference == difference else float("inf")


def on_cpu(
    check: GradientCheck, facts: MachineInfo, precision: Precision = "fp32"
) -> GradientCheck:
    """The same step on the CPU, with a copy of the model."""
    eager = check.parts.config.with_values(compile=False)
    model = copy_to_cpu(check.parts.model)
    parts = make_parts(
        model, eager, Device("cpu", facts), precision, check.parts.encoder.preprocess
    )
    return compose_step(parts).for_check(model)


def copy_to_cpu(model: Module) -> Module:
    """A copy of a model on the CPU, without one on its device."""
    tensors: dict[int, Any] = {
        id(p): nn.Parameter(p.detach().to("cpu", copy=True), p.requires_grad)
        for p in model.parameters()
    }
    tensors |= {id(buffer): buffer.to("cpu", copy=True) for buffer in model.buffers()}
    return copy.deepcopy(model, tensors)


def gradient(check: GradientCheck, batch: Batch) -> tuple[Tensor, Tensor]:
    """The loss of a step and its gradient as one vector, in float32 on the CPU."""
    check.parts.model.zero_grad(set_to_none=True)
    loss = check.compute_gradients(batch, 0)
    return loss.float().cpu(), flat_gradient(check.parts.model)


def flat_gradient(model: CLIP) -> Tensor:
    """The gradient of a model as one vector, in float32 on the CPU.

    Subsampled for a large model.
    """
    grads = [p.grad.detach().flatten() for p in model.parameters() if p.grad is not None]
    every = ceil_div(sum(g.numel() for g in grads), MOST)
    return torch.cat([g[::every].float().cpu() for g in grads])


def first_samples(batch: Batch, samples: int = PAIRS) -> Batch:
    """The first captions of a batch, which are its shortest, with their images."""
    index, tensors = batch.image_index[:samples], batch.tensors()
    fields: dict[str, Any] = {
        name: tensors[name][index]
        for name in ("sample_ids", "image_features", "views")
        if name in tensors
    }
    fields |= {
        name: tensors[name][:samples]
        for name in ("caption_ids", "text_features")
        if name in tensors
    }
    return Batch(
        image_index=torch.arange(len(index)),
        images=batch.pixels(index) if batch.image_features is None else None,
        tokens=batch.texts(slice(0, samples)) if batch.text_features is None else None,
        lengths=batch.lengths[:samples],
        **fields,
    )
