"""Mixed precision: autocast contexts, and the gradient scaler for fp16."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch

from m1clip.hardware.device import Device, Precision
from m1clip.hardware.measure import DTYPES


def autocast(device: Device, precision: Precision) -> Callable[[], AbstractContextManager[object]]:
    """Factory of the autocast context for forward passes; fp32 needs none."""
    if precision == "fp32":
        return contextlib.nullcontext
    return lambda: torch.autocast(device.kind, dtype=DTYPES[precision])


def no_autocast(device: Device, precision: Precision) -> Callable[[], AbstractContextManager[object]]:
    """Factory of a context that disables `autocast` for a backward pass inside it, but keeps its cast weights."""
    if precision == "fp32":
        return contextlib.nullcontext
    return lambda: torch.autocast(device.kind, enabled=False)


def grad_scaler(device: Device, precision: Precision) -> torch.amp.GradScaler | None:
    """The gradient scaler for fp16, whose gradients would underflow; None for other precisions."""
    return torch.amp.GradScaler(device.kind) if precision == "fp16" else None
