"""A device by itself: its arithmetic rate, its memory, and what it costs before it computes."""

from __future__ import annotations

import time
from typing import Any

import torch

from m1clip.errors import UserError
from m1clip.hardware.bandwidth import copy_bandwidth
from m1clip.hardware.compiler import check_compile
from m1clip.hardware.device import Device, threads
from m1clip.hardware.facts import Facts
from m1clip.hardware.measure import gemm_rate
from m1clip.hardware.overhead import copies, first_compile, overheads, small_matmul

GEMM_SIZE = {"cpu": 1536, "mps": 4096, "cuda": 8192}  # large enough to reach the device's rate


def probe_device(
    kind: Any, facts: Facts, precisions: list[Any], compile: bool, seconds: float = 30.0
) -> dict[str, Any]:
    """Everything about a device that needs no model; a busy machine gets fewer rounds, and no compiling last."""
    begin = time.monotonic()
    device = Device(kind, facts)
    torch.set_num_threads(threads(0, facts))
    found: dict[str, Any] = {
        "device": kind,
        "name": facts.cuda if kind == "cuda" else facts.cpu,
        "threads": torch.get_num_threads(),
        "memory_bytes": device.total_bytes(),
        "gemm": {name: gemm_rate(device, name, GEMM_SIZE[kind], rounds=5) for name in precisions},
        "overheads": overheads(device, rounds=9),
        "small_matmul": small_matmul(device, rounds=5),
        "bandwidth": copy_bandwidth(device, rounds=5),
        "copies": copies(device) if kind != "cpu" else [],
    }
    late = time.monotonic() - begin > seconds
    obstacle = "no time left for it" if late else compile_obstacle(kind) if compile else "not asked for"
    found["compile_obstacle"] = obstacle
    found["first_compile_seconds"] = None if obstacle else first_compile(device)
    return found


def compile_obstacle(kind: str) -> str:
    """Why torch.compile cannot be tried on a device; empty when it can."""
    try:
        check_compile(kind)
    except UserError as error:
        return str(error)
    return ""
