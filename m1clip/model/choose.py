"""Which attention is faster here: measured for the device, dtype and shape that will run."""

from __future__ import annotations

import functools

import torch

from m1clip.hardware.clock import Timing, alternate
from m1clip.hardware.device import Device
from m1clip.model.attention import AttentionKind, attention

KINDS: tuple[AttentionKind, ...] = ("bmm", "sdpa")


@functools.cache
def attention_timings(
    device: Device, dtype: torch.dtype, batch: int, heads: int, length: int, dim: int, causal: bool
) -> dict[str, Timing]:
    """Forward and backward of each implementation, in turn; a batch beyond 64 tells nothing new."""
    shape = (min(batch, 64), heads, length, dim)
    q, k, v = (torch.randn(shape, device=device.torch, dtype=dtype, requires_grad=True) for _ in range(3))
    cotangent = torch.randn(shape, device=device.torch, dtype=dtype)

    def step(kind: AttentionKind) -> None:
        torch.autograd.grad((attention(q, k, v, causal, kind) * cotangent).sum(), (q, k, v))

    calls = {kind: functools.partial(step, kind) for kind in KINDS}
    return alternate(calls, device.synchronize, rounds=25, warmup=2, seconds=1.0)


def choose_attention(
    asked: str,
    device: Device,
    dtype: torch.dtype,
    batch: int,
    heads: int,
    length: int,
    dim: int,
    causal: bool,
) -> tuple[AttentionKind, dict[str, Timing]]:
    """The implementation to use, and the timings behind it (empty where nothing had to be measured)."""
    for kind in KINDS:
        if asked == kind:
            return kind, {}
    if device.rules.attention == "sdpa":
        return "sdpa", {}
    times = attention_timings(device, dtype, batch, heads, length, dim, causal)
    # The lower quartile: on a busy machine it says more about the code than the median does.
    return min(KINDS, key=lambda kind: times[kind].low), times
