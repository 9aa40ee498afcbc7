"""What a device costs apart from arithmetic, and from which size of work on it pays.

Small operations, waiting, allocation, transfer and matrix multiplications by size explain why a GPU
loses on small work: each operation has a fixed cost, which only a large one outweighs.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from m1clip.errors import UserError
from m1clip.hardware.device import Device, Precision
from m1clip.hardware.timing import Timing, alternate, matmul_call

QUEUED_OPERATIONS = 100  # small operations started one after another, before one wait
TRANSFER_BYTES = (4_096, 262_144, 16_777_216)  # sizes that are allocated and transferred
COPIED_BYTES = {"cpu": 2**26, "mps": 2**28, "cuda": 2**30}  # of the copy that shows the bandwidth
MATMUL_SIZES = (32, 128, 512, 2048)  # rows and columns
TRIED_MATMUL_SIZE = 32  # the size after this one is always measured
MAX_MATMUL_SECONDS = 0.25  # a size that would take longer is not measured
OVERHEAD_ROUNDS = 20
OVERHEAD_SECONDS = 6.0  # for all operations of a device, once each has been measured


@dataclass(frozen=True)
class Overhead:
    """The time of one small piece of work on a device."""

    operation: str
    size: int  # bytes, or rows of a matrix; 0: the size does not matter
    seconds: Timing
    per_second: float = 0.0  # bytes or operations at the median; 0 where no rate makes sense
    unit: str = ""  # of the rate

    @property
    def label(self) -> str:
        """The operation with its size."""
        if not self.size:
            return self.operation
        if self.unit == "FLOP/s":
            return f"{self.operation}, {self.size} x {self.size}"
        return f"{self.operation}, {_binary(self.size)}"


def _binary(count: int) -> str:
    """4 KiB, 16 MiB."""
    unit, scale = ("MiB", 2**20) if count >= 2**20 else ("KiB", 2**10)
    return f"{count // scale} {unit}"


@dataclass(frozen=True)
class _Work:
    """One call to time, and what it does."""

    operation: str
    call: Callable[[], object]
    size: int = 0
    repeated: int = 1  # how often the call does the operation
    amount: float = 0.0  # bytes or FLOPs of one operation
    unit: str = ""


def measure_overhead(
    device: Device,
    precisions: Sequence[Precision],
    *,
    rounds: int = OVERHEAD_ROUNDS,
    seconds: float = OVERHEAD_SECONDS,
    matmul_sizes: Sequence[int] = MATMUL_SIZES,
) -> list[Overhead]:
    """Time small work on a device, in alternating rounds; each call waits for the device."""
    if device.kind == "mlx":
        raise UserError("not measured: MLX starts a step as a whole, not operation by operation")
    work = [*_fixed_costs(device), *_memory(device), *_matmuls(device, precisions, matmul_sizes)]
    calls = {str(number): item.call for number, item in enumerate(work)}
    timings = alternate(calls, device.synchronize, rounds=rounds, seconds=seconds)
    return [_overhead(item, timing) for item, timing in zip(work, timings.values(), strict=True)]


def _overhead(work: _Work, timing: Timing) -> Overhead:
    per_call = Timing(
        timing.median / work.repeated,
        timing.low / work.repeated,
        timing.high / work.repeated,
        timing.n,
    )
    rate = work.amount / per_call.median if per_call.median > 0 else 0.0
    return Overhead(work.operation, work.size, per_call, rate, work.unit)


def _fixed_costs(device: Device) -> list[_Work]:
    """Costs that do not depend on the size of the work."""
    value = torch.zeros(1, device=device.torch)
    wide = torch.randn(16, 512, device=device.torch)
    tall = torch.randn(512, 16, device=device.torch)

    def queue() -> None:
        for _ in range(QUEUED_OPERATIONS):
            value.add_(1.0)

    def wait() -> None:
        for _ in range(QUEUED_OPERATIONS):
            device.synchronize()

    return [
        _Work("launch of one operation", queue, repeated=QUEUED_OPERATIONS),
        _Work("synchronize", wait, repeated=QUEUED_OPERATIONS),
        # What the original project timed as its comparison of CPU and GPU.
        _Work("16 x 512 by 512 x 16 matmul and wait", functools.partial(torch.mm, wide, tall)),
    ]


def _memory(device: Device) -> list[_Work]:
    """Allocation and transfer by size, and the bandwidth of the device's own memory."""
    work = []
    for count in TRANSFER_BYTES:
        on_cpu = torch.zeros(count, dtype=torch.uint8)
        there = on_cpu.to(device.torch, copy=True)
        allocate = functools.partial(torch.zeros, count, dtype=torch.uint8, device=device.torch)
        work.append(_Work("allocate and clear", allocate, count, amount=count, unit="B/s"))
        pairs: dict[str, tuple[torch.Tensor, torch.Tensor]] = {
            "copy within memory": (on_cpu, there)
        }
        if device.kind != "cpu":
            pairs = {"transfer to the device": (on_cpu, there), "transfer back": (there, on_cpu)}
        for operation, (source, target) in pairs.items():
            call = functools.partial(target.copy_, source)
            work.append(_Work(operation, call, count, amount=count, unit="B/s"))
    large = torch.zeros(COPIED_BYTES[device.kind], dtype=torch.uint8, device=device.torch)
    copied = torch.empty_like(large)
    read_and_written = 2 * large.numel()
    copy = functools.partial(copied.copy_, large)
    work.append(_Work("memory bandwidth", copy, large.numel(), 1, read_and_written, "B/s"))
    return work


def _matmuls(device: Device, precisions: Sequence[Precision], sizes: Sequence[int]) -> list[_Work]:
    """Matrix multiplications by size, as far as one does not take too long."""
    work = []
    for precision in precisions:
        for size in sizes:
            call = matmul_call(device, precision, size)
            work.append(_Work(f"matmul {precision}", call, size, 1, 2.0 * size**3, "FLOP/s"))
            if size <= TRIED_MATMUL_SIZE:
                continue  # too short to predict the next size from it
            next_seconds = 64 * _seconds(call, device)  # four times as many rows
            if next_seconds > MAX_MATMUL_SECONDS:
                break
    return work


def _seconds(call: Callable[[], object], device: Device) -> float:
    """The shorter of two calls."""
    durations = []
    for _ in range(2):
        begin = time.perf_counter()
        call()
        device.synchronize()
        durations.append(time.perf_counter() - begin)
    return min(durations)


def matmul_crossover(overheads: Mapping[str, Sequence[Overhead]]) -> list[str]:
    """From which size of a matrix multiplication each accelerator is faster than the CPU."""
    lines = []
    cpu = _by_size(overheads.get("cpu", []))
    for kind, measured in overheads.items():
        there = _by_size(measured)
        shared = [key for key in there if key in cpu]
        for operation in dict.fromkeys(name for name, _ in shared if kind != "cpu"):
            sizes = [size for name, size in shared if name == operation]
            slower = [n for n in sizes if there[operation, n].low > cpu[operation, n].high]
            faster = [n for n in sizes if there[operation, n].high < cpu[operation, n].low]
            loses = f"the CPU is faster up to {max(slower)} rows" if slower else ""
            wins = f"{kind} is faster from {min(faster)} rows" if faster else ""
            words = ", ".join(part for part in (loses, wins) if part) or "no clear difference"
            lines.append(f"{operation}: {words}.")
    return lines


def _by_size(overheads: Sequence[Overhead]) -> dict[tuple[str, int], Timing]:
    return {(o.operation, o.size): o.seconds for o in overheads if o.unit == "FLOP/s"}
