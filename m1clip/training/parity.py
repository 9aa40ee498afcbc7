"""Checks before a run: gradients on an accelerator, and that no text position sees later tokens.

A few samples are compared with the CPU. The run's real batch is compared with the same batch in small slices, which
finds errors that depend on the size (pytorch#193487), and would take minutes on the CPU.
"""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor, nn

from m1clip.data.images import Preprocess
from m1clip.data.loader import Batch
from m1clip.errors import UserError
from m1clip.hardware.device import Precision
from m1clip.losses import infonce, same_pairs
from m1clip.model.clip import CLIP, Features
from m1clip.model.towers import TextTower
from m1clip.training.distributed import Ranks
from m1clip.training.muon import Muon, orthogonalize
from m1clip.training.oom import OOMHandler
from m1clip.training.step import TrainStep, normalized_pixels

if TYPE_CHECKING:  # setup imports this module too
    from m1clip.training.setup import Setup

Module = TypeVar("Module", bound=nn.Module)
PAIRS = 8
SLICE = 32  # images
MAX_SECONDS = 3.0  # of a step that is repeated in slices, which takes about twice as long
LEAK = 1e-3  # relative change of text features; exact kernels give 0
MOST = 1 << 22  # gradient entries to compare: several copies of a complete gradient would be the memory peak of a run
# Relative error of the complete gradient. A wrong kernel gives errors near or above 1; rounding stays far below these.
TOLERANCE: dict[Precision, float] = {"fp32": 0.02, "bf16": 0.15, "fp16": 0.05}


def check_parity(setup: Setup, train_step: TrainStep) -> float | None:
    """The largest relative difference found; UserError if it is too large. None on the CPU."""
    device, precision, batch = setup.device, setup.precision, setup.training[0]
    kind = device.kind
    check_causality(train_step.model, kind, setup.autocast)
    if kind == "cpu":
        return None
    twin = fill_zeros(copy.deepcopy(train_step.model)).eval()  # dropout masks would differ between devices
    at_size = size_difference(train_step, twin, batch)
    twin.zero_grad(set_to_none=True)
    products = optimizer_difference(train_step)
    few = first_samples(batch)
    on_device = gradient(twin, few, setup.preprocess, setup.autocast)
    twin.zero_grad(set_to_none=True)
    on_cpu = gradient(twin.to("cpu"), few, setup.preprocess, contextlib.nullcontext)
    found = {
        "computes gradients that differ from the CPU's": relative_difference(on_device, on_cpu),
        f"computes gradients of a batch of {len(batch)} that differ from those of its slices": at_size,
        "computes updates of the optimizer that differ from the CPU's": products,
    }
    for what, difference in found.items():
        if difference > TOLERANCE[precision]:
            raise UserError(
                f"{kind} {what} by {difference:.1%} ({precision} allows {TOLERANCE[precision]:.0%}): a kernel gives "
                f"wrong results for this model; use --device cpu, another --precision, or another version of torch "
                f"(m1clip doctor lists known errors)"
            )
    return max(found.values())


@torch.no_grad()
def check_causality(model: CLIP, kind: str, context: Callable[[], AbstractContextManager[object]]) -> None:
    """Raise UserError if text features change with tokens after the EOT token."""
    if not isinstance(model.text_tower, TextTower):
        return
    tower = fill_zeros(copy.deepcopy(model.text_tower)).eval()
    length, end = tower.config.context_length, tower.config.eot_id
    other = [token for token in range(min(tower.config.vocab_size, 3)) if token != end][:2]
    place = torch.arange(length)
    # Five positions in sequence: kernels work on groups of four or more (pytorch#195910).
    ends = torch.arange(length // 2 - 2, length // 2 + 3).clamp(0, length - 2)[:, None]
    tokens = torch.where(place == ends, end, other[0])
    changed = torch.where(place > ends, other[-1], tokens)
    with context():
        before, after = (tower(rows.to(model.logit_scale.device)).float() for rows in (tokens, changed))
    difference = float(((after - before).norm(dim=1) / before.norm(dim=1).clamp(min=1e-12)).max())
    if not difference <= LEAK:
        raise UserError(
            f"{kind}: text features change by {difference:.1%} with tokens after the end of the text, so attention "
            f"sees later tokens; use --attention bmm, --precision fp32 or another version of torch"
        )


def size_difference(train_step: TrainStep, twin: CLIP, batch: Batch) -> float:
    """Relative difference of loss and gradients between a batch as the run computes it and the same in small slices.

    0 for a batch that is one slice, and for a step that takes too long to be repeated.
    """
    step = copy.copy(train_step)
    step.model, step.has_dropout = twin, False
    step.encode_image, step.encode_text = twin.encode_image, twin.encode_text
    step.project_image, step.project_text = twin.project_image, twin.project_text
    # Gradients that are too small for fp16 are so in both; a scaled loss could overflow.
    step.scale_loss = lambda loss: loss
    step.ranks = Ranks()  # a rank's own rows suffice
    batch = batch.to(step.device.torch)

    def run(micro_batch: int) -> tuple[Tensor, Tensor]:
        """Loss and gradients, with a smaller micro-batch where memory is short."""
        twin.zero_grad(set_to_none=True)
        step.oom = OOMHandler(micro_batch, step.device.memory_bytes)
        clear = lambda: twin.zero_grad(set_to_none=True)  # noqa: E731
        loss = step.oom.run(lambda: step.compute_gradients(batch, 0), clear, len(batch), 0)
        return loss.float().cpu().view(1), flat_gradient(twin)

    begin = time.monotonic()
    whole = run(train_step.micro_batch)
    if len(batch) <= SLICE or time.monotonic() - begin > MAX_SECONDS:
        return 0.0
    return max(relative_difference(a, b) for a, b in zip(whole, run(SLICE), strict=True))


def optimizer_difference(train_step: TrainStep) -> float:
    """Relative difference of Muon's products from the CPU's, for one matrix of each shape; 0 without Muon."""
    found = 0.0
    for muon in train_step.optimizer.parts.values():
        if isinstance(muon, Muon):
            sides = {tuple(sorted(p.flatten(1).shape)) for group in muon.param_groups for p in group["params"]}
            for shape in sides:
                x = torch.randn(1, *shape, generator=torch.Generator().manual_seed(0))
                there = orthogonalize(x.to(train_step.device.torch, muon.dtype)).float().cpu()
                found = max(found, relative_difference(there, orthogonalize(x)))
    return found


@torch.no_grad()
def fill_zeros(model: Module) -> Module:
    """The model with small random values in matrices that are all zero, such as zero-initialized residual branches.

    With such branches the class token is the same for every image: the true gradient is then almost zero, and
    the difference between devices is all rounding error.
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


def gradient(
    model: CLIP, batch: Batch, preprocess: Preprocess, context: Callable[[], AbstractContextManager[object]]
) -> Tensor:
    """The gradient of every parameter as one float32 vector on the CPU; subsampled for a large model."""
    batch = batch.to(model.logit_scale.device)
    with context():
        if batch.image_features is None:
            image = model.encode_image(normalized_pixels(batch, preprocess))
        else:
            image = model.project_image(batch.image_features)
        if batch.text_features is None:
            text = model.encode_text(batch.texts(slice(None)))
        else:
            text = model.project_text(batch.text_features)
        features = Features(image, text, model.scale(), model.logit_bias)
    # Not the run's own objective: this one works for every model and exercises the same kernels.
    infonce(features, same_pairs(batch.sample_ids, batch.caption_ids, batch.image_index)).backward()
    return flat_gradient(model)


def flat_gradient(model: CLIP) -> Tensor:
    """The gradients in `p.grad` as one float32 vector on the CPU; subsampled for a large model."""
    grads = [p.grad.detach().flatten() for p in model.parameters() if p.grad is not None]
    every = -(-sum(g.numel() for g in grads) // MOST)
    return torch.cat([g[::every].float().cpu() for g in grads])


def first_samples(batch: Batch, samples: int = PAIRS) -> Batch:
    """The first captions of a batch, which are its shortest, with their images."""
    image_index = batch.image_index[:samples]
    has_images, has_tokens = batch.image_features is None, batch.text_features is None
    return Batch(
        sample_ids=batch.sample_ids[image_index],
        caption_ids=batch.caption_ids[:samples],
        image_index=torch.arange(len(image_index)),
        images=batch.pixels(image_index) if has_images else None,
        image_features=None if batch.image_features is None else batch.image_features[image_index],
        tokens=batch.texts(slice(0, samples)) if has_tokens else None,
        text_features=None if batch.text_features is None else batch.text_features[:samples],
        views=None if batch.views is None else batch.views[image_index],
        lengths=batch.lengths[:samples],
    )
