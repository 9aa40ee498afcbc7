"""Gradient check before a run on an accelerator: a few samples, compared with the CPU."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from m1clip.data.images import Preprocess
from m1clip.data.loader import Batch
from m1clip.errors import UserError
from m1clip.hardware.device import Precision
from m1clip.losses import infonce, same_pairs
from m1clip.model.clip import CLIP, Features
from m1clip.training.step import normalized_pixels

if TYPE_CHECKING:  # setup imports this module too
    from m1clip.training.setup import Setup

PAIRS = 8
MOST = 1 << 22  # gradient entries to compare: several copies of a complete gradient would be the memory peak of a run
# Relative error of the complete gradient. A wrong kernel gives errors near or above 1; rounding stays far below these.
TOLERANCE: dict[Precision, float] = {"fp32": 0.02, "bf16": 0.15, "fp16": 0.05}


def check_parity(setup: Setup, model: CLIP) -> float | None:
    """Relative difference of the gradients; UserError if it is too large. None on the CPU."""
    kind, precision = setup.device.kind, setup.precision
    if kind == "cpu":
        return None
    batch = first_samples(setup.training[0])
    twin = fill_zeros(copy.deepcopy(model)).eval()  # dropout masks would differ between devices
    on_device = gradient(twin, batch, setup.preprocess, setup.autocast)
    twin.zero_grad(set_to_none=True)
    on_cpu = gradient(twin.to("cpu"), batch, setup.preprocess, contextlib.nullcontext)
    difference = relative_difference(on_device, on_cpu)
    if difference > TOLERANCE[precision]:
        raise UserError(
            f"{kind} computes gradients that differ from the CPU's by {difference:.1%} ({precision} allows "
            f"{TOLERANCE[precision]:.0%}): a kernel gives wrong results for this model; use --device cpu, another "
            f"--precision, or another version of torch"
        )
    return difference


@torch.no_grad()
def fill_zeros(model: CLIP) -> CLIP:
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
