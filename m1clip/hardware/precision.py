"""Arithmetic of the towers: a context to run them in, and the scaler that fp16 needs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch

from m1clip.hardware.device import Device, Precision
from m1clip.hardware.measure import DTYPES


def autocast(device: Device, precision: Precision) -> Callable[[], AbstractContextManager[object]]:
    """Makes the context in which forward passes run; fp32 needs none."""
    if precision == "fp32":
        return contextlib.nullcontext
    return lambda: torch.autocast(device.kind, dtype=DTYPES[precision])


def no_autocast(device: Device, precision: Precision) -> Callable[[], AbstractContextManager[object]]:
    """Makes the context for a backward pass inside `autocast`: off, but its cast weights are kept for what follows."""
    if precision == "fp32":
        return contextlib.nullcontext
    return lambda: torch.autocast(device.kind, enabled=False)


def grad_scaler(device: Device, precision: Precision) -> torch.amp.GradScaler | None:
    """fp16 gradients underflow without one; the wider range of bf16 needs none."""
    return torch.amp.GradScaler(device.kind) if precision == "fp16" else None
