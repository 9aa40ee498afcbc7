"""Measured speed of this machine: matrix multiplication in each precision, memory copies, kernel launches."""

from __future__ import annotations

import functools

import torch

from m1clip.hardware.device import Device, Precision
from m1clip.hardware.timing import Timing, alternate

DTYPES: dict[Precision, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def gemm_timings(
    device: Device, precisions: tuple[Precision, ...], size: int = 1536, rounds: int = 5
) -> dict[str, Timing]:
    """Time a square matrix multiplication in each precision, alternating between them."""
    calls = {}
    for precision in precisions:
        a = torch.randn(size, size, device=device.torch).to(DTYPES[precision])
        b = torch.randn(size, size, device=device.torch).to(DTYPES[precision])
        calls[precision] = functools.partial(torch.mm, a, b)
    return alternate(calls, device.synchronize, rounds=rounds, warmup=2)


def gemm_rate(device: Device, precision: Precision, size: int = 1536, rounds: int = 7) -> float:
    """FLOP/s of a large matrix multiplication: the upper bound for a training step."""
    return 2 * size**3 / gemm_timings(device, (precision,), size, rounds)[precision].low


def bf16_speedup(device: Device) -> float:
    """Speedup of bf16 over fp32 matrix multiplication. Takes well under a second on a CPU."""
    times = gemm_timings(device, ("fp32", "bf16"), size=768)
    return times["fp32"].median / times["bf16"].median


COPY_BYTES = {"cpu": 2**28, "mps": 2**28, "cuda": 2**30}  # much larger than any cache


def copy_bandwidth(device: Device, rounds: int = 9, size: int | None = None) -> float:
    """Bytes per second of a copy within the device, counting both reads and writes."""
    size = size or COPY_BYTES[device.kind]
    source = torch.ones(size // 4, device=device.torch)
    target = torch.empty_like(source)
    found = alternate({"copy": lambda: target.copy_(source)}, device.synchronize, rounds=rounds, warmup=2, seconds=2.0)
    return 2 * size / found["copy"].low


LAUNCHES = 200


def launch_seconds(device: Device, rounds: int = 9) -> float:
    """Seconds per launch of a small kernel, averaged over many."""
    one = torch.ones(1, device=device.torch)

    def launch() -> None:
        for _ in range(LAUNCHES):
            one.add_(1.0)

    return alternate({"launch": launch}, device.synchronize, rounds=rounds, warmup=3)["launch"].median / LAUNCHES
