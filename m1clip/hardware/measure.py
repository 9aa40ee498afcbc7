"""What this machine's arithmetic can do, measured: the matrix product rate in each precision."""

from __future__ import annotations

import functools

import torch

from m1clip.hardware.clock import Timing, alternate
from m1clip.hardware.device import Device, Precision

DTYPES: dict[Precision, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def gemm_timings(
    device: Device, precisions: tuple[Precision, ...], size: int = 1536, rounds: int = 5
) -> dict[str, Timing]:
    """Time a square matrix product in each precision, in turn."""
    calls = {}
    for precision in precisions:
        a = torch.randn(size, size, device=device.torch).to(DTYPES[precision])
        b = torch.randn(size, size, device=device.torch).to(DTYPES[precision])
        calls[precision] = functools.partial(torch.mm, a, b)
    return alternate(calls, device.synchronize, rounds=rounds, warmup=2)


def gemm_rate(device: Device, precision: Precision, size: int = 1536, rounds: int = 7) -> float:
    """Floating-point operations a second of a large matrix product: the ceiling for a training step."""
    return 2 * size**3 / gemm_timings(device, (precision,), size, rounds)[precision].low


def bf16_speedup(device: Device) -> float:
    """How many times faster a bf16 product is than an fp32 one. Takes well under a second on a CPU."""
    times = gemm_timings(device, ("fp32", "bf16"), size=768)
    return times["fp32"].median / times["bf16"].median
