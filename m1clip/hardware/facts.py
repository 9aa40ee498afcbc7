"""A description of this machine as one record. Rules elsewhere are pure functions of it, which makes them testable."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil


@dataclass(frozen=True, kw_only=True)
class Facts:
    """The machine and its torch build, as far as rules depend on them."""

    system: str  # "Darwin", "Linux", "Windows"
    machine: str  # "arm64", "x86_64"
    cpu: str  # product name
    cores: int  # physical
    performance_cores: int  # all cores if they do not differ
    memory_bytes: int
    cuda: str | None = None  # GPU name
    cuda_capability: tuple[int, int] = (0, 0)
    mps: bool = False
    torch: str = ""
    python: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for environment.json."""
        return asdict(self)


def read_facts() -> Facts:
    """Inspect this machine. Imports torch."""
    import torch

    cuda = torch.cuda.is_available()
    cores = min(psutil.cpu_count(logical=False) or 1, usable_cpus())
    return Facts(
        system=platform.system(),
        machine=platform.machine(),
        cpu=_cpu_name(),
        cores=cores,
        performance_cores=min(_sysctl_int("hw.perflevel0.physicalcpu") or cores, cores),
        memory_bytes=psutil.virtual_memory().total,
        cuda=torch.cuda.get_device_name() if cuda else None,
        cuda_capability=torch.cuda.get_device_capability() if cuda else (0, 0),
        mps=torch.backends.mps.is_available(),
        torch=torch.__version__,
        python=platform.python_version(),
    )


def usable_cpus() -> int:
    """CPUs available to this process: containers and batch systems often allow fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _cpu_name() -> str:
    if sys.platform == "darwin":
        return _sysctl("machdep.cpu.brand_string") or platform.processor()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def _sysctl(name: str) -> str:
    if sys.platform != "darwin":
        return ""
    result = subprocess.run(["/usr/sbin/sysctl", "-n", name], capture_output=True, text=True, check=False)
    return result.stdout.strip()


def _sysctl_int(name: str) -> int:
    text = _sysctl(name)
    return int(text) if text.isdigit() else 0
