"""Everything that differs between devices: first the rules, as pure functions of facts, then the device itself."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import psutil

from m1clip.errors import UserError
from m1clip.hardware.facts import Facts
from m1clip.hardware.memory import return_freed_memory

Kind = Literal["cpu", "mps", "cuda"]
Precision = Literal["fp32", "bf16", "fp16"]


@dataclass(frozen=True, kw_only=True)
class Rules:
    """How a device wants to be used."""

    precisions: tuple[Precision, ...]  # that work there
    bf16: Literal["yes", "no", "measure"]  # is bf16 faster? known, or to be measured
    attention: Literal["sdpa", "measure"]
    non_blocking: bool  # may copies overlap?
    pin_memory: bool
    fixed_shapes: bool  # every batch the same shape
    fused_optimizer: bool
    worker_start: Literal["fork", "spawn", "forkserver"]
    float64: bool
    graphs: bool = False  # may a whole step be recorded and replayed?
    resident: bool = False  # has it a memory of its own, worth filling with the images?


def available(facts: Facts) -> tuple[Kind, ...]:
    """Devices of this machine, the usual favourite first."""
    kinds: list[Kind] = []
    if facts.cuda:
        kinds.append("cuda")
    if facts.mps:
        kinds.append("mps")
    return (*kinds, "cpu")


def choose_device(asked: str, facts: Facts) -> Kind:
    """The device to use. A named device that is missing is an error: only `auto` may choose."""
    kinds = available(facts)
    if asked == "auto":
        return kinds[0]
    for kind in kinds:
        if kind == asked:
            return kind
    raise UserError(f"--device {asked}: this machine has none (found: {', '.join(kinds)}); use --device auto")


def rules(kind: Kind, facts: Facts) -> Rules:
    """The rules of DESIGN.md for one device of one machine."""
    if kind == "cuda":
        modern = facts.cuda_capability >= (8, 0)  # bf16 tensor cores came with Ampere
        return Rules(
            precisions=("fp32", "bf16", "fp16") if modern else ("fp32", "fp16"),
            bf16="yes" if modern else "no",
            attention="sdpa",
            non_blocking=True,
            pin_memory=True,
            fixed_shapes=False,
            fused_optimizer=True,
            worker_start="forkserver",  # a forked child must not inherit a CUDA context
            float64=True,
            graphs=True,
            resident=True,
        )
    if kind == "mps":
        # Non-blocking copies from pageable memory have corrupted data, and changing shapes leak memory.
        old = any(chip in facts.cpu for chip in ("M1", "M2"))
        return Rules(
            precisions=("fp32", "bf16", "fp16"),
            bf16="no" if old else "measure",
            attention="measure",
            non_blocking=False,
            pin_memory=False,
            fixed_shapes=True,
            fused_optimizer=True,
            worker_start="spawn",
            float64=False,
        )
    return Rules(
        precisions=("fp32", "bf16"),
        bf16="measure",
        attention="measure",
        non_blocking=False,
        pin_memory=False,
        fixed_shapes=False,
        fused_optimizer=True,
        worker_start="fork" if facts.system == "Linux" else "spawn",
        float64=True,
    )


def choose_precision(asked: str, kind: Kind, facts: Facts, bf16_speedup: float | None) -> Precision:
    """`bf16_speedup` is the measured bf16 / fp32 rate where the rules ask for a measurement."""
    rule = rules(kind, facts)
    if asked == "auto":
        faster = rule.bf16 == "yes" or (rule.bf16 == "measure" and (bf16_speedup or 0.0) > 1.1)
        return "bf16" if faster else "fp32"
    for precision in rule.precisions:
        if precision == asked:
            return precision
    raise UserError(f"--precision {asked}: not on {kind} (possible: {', '.join(rule.precisions)}, auto)")


def threads(asked: int, facts: Facts) -> int:
    """One thread a physical core; the fast cores alone where cores differ."""
    return asked or facts.performance_cores


def environment(system: str, current: Mapping[str, str]) -> dict[str, str]:
    """Variables to set before torch is imported, left alone where the person has set them."""
    # Threads that wait by spinning fight any other program for the cores: 2 to 3 times slower on a busy machine.
    wanted = {"OMP_WAIT_POLICY": "passive"}
    if system == "Linux" and current.get("OMP_WAIT_POLICY", "passive").lower() == "passive":
        # Up to about 0.1 ms they may: between the operations of a small model a sleep and a wake-up cost more.
        wanted["GOMP_SPINCOUNT"] = "10000"
    if system == "Darwin":
        wanted["PYTORCH_MPS_HIGH_WATERMARK_RATIO"] = "1.0"  # fail before the whole Mac starts to swap
    return {name: value for name, value in wanted.items() if name not in current}


def peak_of_status(text: str) -> int:
    """The peak in Linux's /proc/PID/status, in bytes."""
    line = next(line for line in text.splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


class Device:
    """One device of this machine, with its rules."""

    def __init__(self, kind: Kind, facts: Facts) -> None:
        import torch

        self.kind: Kind = kind
        self.rules = rules(kind, facts)
        self.torch = torch.device(kind)
        self._backend: Any = {"cuda": torch.cuda, "mps": torch.mps}.get(kind)
        self._most_seen = 0  # MPS keeps no peak: the most that was seen when somebody looked
        self._peak_file: Path | None = None  # Linux, once the peak was reset: rusage never forgets

    def synchronize(self) -> None:
        """Wait until all work given to the device is done; nothing to wait for on the CPU."""
        if self._backend is not None:
            self._backend.synchronize()

    def memory_bytes(self) -> int:
        """Memory in use now: the allocator's on an accelerator, the process's on the CPU."""
        if self.kind == "cuda":
            return int(self._backend.memory_allocated())
        if self.kind == "mps":
            used = int(self._backend.driver_allocated_memory())
            self._most_seen = max(self._most_seen, used)
            return used
        return int(psutil.Process().memory_info().rss)

    def peak_bytes(self) -> int:
        """The most memory used so far by this process, or since `reset_peak` where the system can forget."""
        if self.kind == "cuda":
            return int(self._backend.max_memory_allocated())
        if self.kind == "mps":
            self.memory_bytes()
            return self._most_seen
        if self._peak_file is not None:
            return peak_of_status(self._peak_file.read_text())
        import resource
        import sys

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024  # kilobytes on Linux, bytes on macOS

    def reset_peak(self) -> bool:
        """Give free memory back and begin a new peak; false where only a new process could (CPU, not Linux)."""
        if self._backend is not None:
            self._backend.empty_cache()
            self._most_seen = 0
            if self.kind == "cuda":
                self._backend.reset_peak_memory_stats()
            return True
        return_freed_memory()
        try:
            Path("/proc/self/clear_refs").write_text("5")
            status = Path("/proc/self/status")
            peak_of_status(status.read_text())
        except (OSError, StopIteration):
            return False
        self._peak_file = status
        return True

    def release(self) -> None:
        """Give memory that is free but kept back to the system."""
        if self._backend is not None:
            self._backend.empty_cache()
        else:
            return_freed_memory()

    def total_bytes(self) -> int:
        """All memory of the device; the machine's own for the CPU and for unified memory."""
        if self.kind == "cuda":
            return int(self._backend.get_device_properties(self.torch).total_memory)
        return int(psutil.virtual_memory().total)

    def free_bytes(self) -> int:
        """Memory that this process could still get."""
        if self.kind == "cuda":
            return int(self._backend.mem_get_info()[0])
        return int(psutil.virtual_memory().available)


def compile_obstacle(kind: str, torch_folder: str, compiler: str | None, triton: bool) -> str:
    """Why torch.compile cannot work for a device, in words; empty when nothing is known against it."""
    if kind == "cuda" and not triton:
        return "it needs triton, which torch brings on Linux (Windows: pip install triton-windows)"
    if kind != "cpu":
        return ""  # Metal brings its own compiler
    if compiler is None:
        return "it needs a C++ compiler, and none is installed (Linux: g++; macOS: xcode-select --install)"
    if any(letter.isspace() for letter in torch_folder):
        return f"torch hands its own path to the linker, and {torch_folder} has a space in it"
    return ""


def check_compile(kind: str) -> None:
    """Refuse --compile where it would fail."""
    import torch

    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    triton = importlib.util.find_spec("triton") is not None
    obstacle = compile_obstacle(kind, os.path.dirname(torch.__file__), compiler, triton)
    if obstacle:
        raise UserError(f"--compile cannot work here: {obstacle}; leave it out, or mend that")
