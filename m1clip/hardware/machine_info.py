"""A description of this machine as one record.

Rules elsewhere are pure functions of it, which makes them testable.
"""

import importlib.metadata
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil


@dataclass(frozen=True, kw_only=True)
class MachineInfo:
    """The machine and its torch build, as far as rules depend on them."""

    system: str  # "Darwin", "Linux", "Windows"
    machine: str  # "arm64", "x86_64"
    cpu: str  # product name
    cores: int  # physical
    performance_cores: int  # all cores if they do not differ
    memory_bytes: int
    cpu_bf16: bool = False  # the CPU has instructions for bf16 matmuls, and torch uses them
    cuda: str | None = None  # GPU name
    cuda_capability: tuple[int, int] = (0, 0)
    mps: bool = False
    torch: str = ""
    macos: str = ""  # version, "" on other systems
    mlx: str = ""  # version, "" if not installed
    python: str = ""


def read_machine_info(gpu: bool = True) -> MachineInfo:
    """Inspect this machine.

    Imports torch to find a GPU; without `gpu`, those fields keep their defaults.
    """
    cores = max(1, min(psutil.cpu_count(logical=False) or 1, usable_cpus()) // local_ranks())
    return MachineInfo(
        system=platform.system(),
        machine=platform.machine(),
        cpu=_cpu_name(),
        cores=cores,
        performance_cores=min(int(_sysctl("hw.perflevel0.physicalcpu") or cores), cores),
        memory_bytes=psutil.virtual_memory().total // local_ranks(),
        cpu_bf16=_has_bf16_instructions(),
        macos=platform.mac_ver()[0],
        mlx=package_version("mlx"),
        python=platform.python_version(),
        **(_torch_facts() if gpu else {}),
    )


def _torch_facts() -> dict[str, Any]:
    import torch

    cuda = torch.cuda.is_available()
    return {
        "cuda": torch.cuda.get_device_name() if cuda else None,
        "cuda_capability": torch.cuda.get_device_capability() if cuda else (0, 0),
        "mps": torch.backends.mps.is_available(),
        "torch": torch.__version__,
    }


def local_ranks() -> int:
    """Count the processes that torchrun has started on this machine, which divide its resources."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def usable_cpus() -> int:
    """Count the CPUs that this process may use: containers often allow fewer than there are."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def decode_threads() -> int:
    """Return the number of threads that decode images.

    At most 6: with 16, which wait more for the GIL, a fifth fewer images are decoded per second.
    """
    return min(usable_cpus(), 6)


def environment(system: str, current: Mapping[str, str]) -> dict[str, str]:
    """Return environment variables to set before importing torch, unless the user has set them."""
    # Threads that spin while waiting compete with other programs: 2 to 3 times slower on a busy
    # machine.
    defaults = {"OMP_WAIT_POLICY": "passive"}
    if system == "Linux" and current.get("OMP_WAIT_POLICY", "passive").lower() == "passive":
        # Spin for up to about 0.1 ms: between operations of a small model, sleeping costs more.
        defaults["GOMP_SPINCOUNT"] = "10000"
    if system == "Darwin":
        defaults["PYTORCH_MPS_HIGH_WATERMARK_RATIO"] = "1.0"  # fail before the Mac starts to swap
    return {name: value for name, value in defaults.items() if name not in current}


def package_version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _cpu_name() -> str:
    names = [_sysctl("machdep.cpu.brand_string")]
    if sys.platform == "linux":
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return next(filter(None, [*names, platform.processor()]), "")


def has_bf16_flag(cpuinfo: str) -> bool:
    """Whether /proc/cpuinfo lists bf16 matmuls: AVX-512 or AMX on x86, FEAT_BF16 on Arm."""
    flags = {
        flag
        for line in cpuinfo.splitlines()
        if line.startswith(("flags", "Features"))
        for flag in line.partition(":")[2].split()
    }
    return bool(flags & {"avx512_bf16", "amx_bf16", "bf16"})


def _has_bf16_instructions() -> bool:
    # Not on macOS: torch's CPU kernels there have no fast bf16 path that we have measured
    # (docs/apple.md).
    return sys.platform == "linux" and has_bf16_flag(Path("/proc/cpuinfo").read_text())


def _sysctl(name: str) -> str:
    """A value of macOS's sysctl; "" on other systems."""
    if sys.platform != "darwin":
        return ""
    result = subprocess.run(
        ["/usr/sbin/sysctl", "-n", name], capture_output=True, text=True, check=False
    )
    return result.stdout.strip()
