"""How fast memory is, measured: bytes read and written in a large copy."""

from __future__ import annotations

import torch

from m1clip.hardware.clock import alternate
from m1clip.hardware.device import Device

COPY_BYTES = {"cpu": 2**28, "mps": 2**28, "cuda": 2**30}  # well beyond any cache


def copy_bandwidth(device: Device, rounds: int = 9, size: int | None = None) -> float:
    """Bytes a second of a copy within the device: what is read and what is written both count."""
    size = size or COPY_BYTES[device.kind]
    source = torch.ones(size // 4, device=device.torch)
    target = torch.empty_like(source)
    found = alternate(
        {"copy": lambda: target.copy_(source)}, device.synchronize, rounds=rounds, warmup=2, seconds=2.0
    )
    return 2 * size / found["copy"].low
