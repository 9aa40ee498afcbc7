"""What this machine's arithmetic can do, measured: the matrix product rate in each precision."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch

from m1clip.hardware.device import Device, Precision
from m1clip.hardware.timing import Timing, alternate, timing

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


COPY_BYTES = {"cpu": 2**28, "mps": 2**28, "cuda": 2**30}  # well beyond any cache


def copy_bandwidth(device: Device, rounds: int = 9, size: int | None = None) -> float:
    """Bytes a second of a copy within the device: what is read and what is written both count."""
    size = size or COPY_BYTES[device.kind]
    source = torch.ones(size // 4, device=device.torch)
    target = torch.empty_like(source)
    found = alternate({"copy": lambda: target.copy_(source)}, device.synchronize, rounds=rounds, warmup=2, seconds=2.0)
    return 2 * size / found["copy"].low


OVERHEAD_COPY_BYTES = (4_096, 65_536, 1_048_576, 16_777_216, 134_217_728)
LAUNCHES = 200


def overheads(device: Device, rounds: int = 15) -> dict[str, Any]:
    """Seconds of each, as Timing dicts: launch (one tiny operation of many), synchronise, allocate."""
    one = torch.ones(1, device=device.torch)

    def launch() -> None:
        for _ in range(LAUNCHES):
            one.add_(1.0)

    def launch_and_wait() -> None:
        one.add_(1.0)

    def allocate() -> None:
        for _ in range(LAUNCHES):
            torch.empty(1_000_000, device=device.torch)

    found = alternate(
        {"launch": launch, "round_trip": launch_and_wait, "allocate": allocate},
        device.synchronize, rounds=rounds, warmup=3,
    )  # fmt: skip
    each = {name: asdict(found[name]) for name in found}
    for name in ("launch", "allocate"):
        for key in ("median", "low", "high"):
            each[name][key] /= LAUNCHES
    each["synchronize"] = asdict(_timed(device.synchronize, rounds * 4))
    return each


def copies(device: Device, rounds: int = 7) -> list[dict[str, Any]]:
    """Seconds to copy so many bytes to the device and back, from pageable memory, by size."""
    found = []
    for size in OVERHEAD_COPY_BYTES:
        here = torch.zeros(size, dtype=torch.uint8)
        there = torch.zeros(size, dtype=torch.uint8, device=device.torch)

        def to_device(here: torch.Tensor = here, there: torch.Tensor = there) -> None:
            there.copy_(here)

        def to_host(here: torch.Tensor = here, there: torch.Tensor = there) -> None:
            here.copy_(there)

        times = alternate({"to_device": to_device, "to_host": to_host}, device.synchronize, rounds=rounds, warmup=1)
        found.append({"bytes": size, **{name: asdict(value) for name, value in times.items()}})
    return found


def first_compile(device: Device) -> float:
    """Seconds from nothing to the first result of a small compiled function, forward and backward."""
    layer = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 64))
    layer.to(device.torch)
    begin = time.perf_counter()
    torch.compile(layer)(torch.ones(8, 64, device=device.torch)).sum().backward()
    device.synchronize()
    return time.perf_counter() - begin


def small_matmul(device: Device, calls: int = 200, rounds: int = 9) -> dict[str, Any]:
    """The prior art's micro-benchmark: a 16 x 512 by 512 x 16 product, with a wait after each call, and after all.

    The two differ by what a wait costs. Neither says anything of training: the product is 0.26 MFLOP.
    """
    a = torch.randn(16, 512, device=device.torch)
    b = torch.randn(512, 16, device=device.torch)

    def wait_each() -> None:
        for _ in range(calls):
            a @ b
            device.synchronize()

    def wait_once() -> None:
        for _ in range(calls):
            a @ b

    found = alternate({"each": wait_each, "once": wait_once}, device.synchronize, rounds=rounds, warmup=2)
    result: dict[str, Any] = {"calls": calls, "flops": 2 * 16 * 512 * 16}
    for name, value in found.items():
        result[name] = {key: getattr(value, key) / calls for key in ("median", "low", "high")} | {"n": value.n}
    return result


def _timed(call: Callable[[], None], count: int) -> Any:
    call()
    seconds = []
    for _ in range(count):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return timing(seconds)
