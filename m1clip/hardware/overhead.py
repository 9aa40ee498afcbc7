"""What a device costs before it computes: handing work over, waiting, allocating, copying, compiling."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch

from m1clip.hardware.clock import alternate, timing
from m1clip.hardware.device import Device

COPY_BYTES = (4_096, 65_536, 1_048_576, 16_777_216, 134_217_728)
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
    for size in COPY_BYTES:
        here = torch.zeros(size, dtype=torch.uint8)
        there = torch.zeros(size, dtype=torch.uint8, device=device.torch)

        def to_device(here: torch.Tensor = here, there: torch.Tensor = there) -> None:
            there.copy_(here)

        def to_host(here: torch.Tensor = here, there: torch.Tensor = there) -> None:
            here.copy_(there)

        times = alternate(
            {"to_device": to_device, "to_host": to_host}, device.synchronize, rounds=rounds, warmup=1
        )
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
        result[name] = {key: getattr(value, key) / calls for key in ("median", "low", "high")} | {
            "n": value.n
        }
    return result


def _timed(call: Callable[[], None], count: int) -> Any:
    call()
    seconds = []
    for _ in range(count):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return timing(seconds)
