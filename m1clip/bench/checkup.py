"""What the doctor looks at: every fact is read here and nowhere else, so that the checks are functions of a record."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from m1clip.hardware.device import Device, available, rules
from m1clip.hardware.energy import open_meter
from m1clip.hardware.facts import Facts, read_facts, usable_cpus
from m1clip.hardware.heat import temperature

PACKAGES = ("numpy", "pillow", "safetensors", "tokenizers", "ftfy", "cyclopts", "rich", "psutil")
VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "PYTORCH_ENABLE_MPS_FALLBACK", "CUDA_VISIBLE_DEVICES",
             "PYTORCH_CUDA_ALLOC_CONF", "OMP_WAIT_POLICY")  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Checkup:
    """A machine and its software on one day. None: this machine does not tell."""

    facts: Facts
    torch_cuda_build: str | None = None
    nvidia_driver: bool = False  # the system has a card and its driver, whatever torch was built for
    kernels: dict[str, str] = field(
        default_factory=dict
    )  # device -> "" if a product came out right, else what happened
    rates: dict[str, dict[str, float]] = field(default_factory=dict)  # device -> precision -> FLOP/s
    packages: dict[str, str] = field(default_factory=dict)
    variables: dict[str, str] = field(default_factory=dict)
    usable_cpus: int = 1
    cpu_quota: float | None = None  # of a container, in CPUs
    memory_available: int = 0
    disk_free: int = 0
    shared_memory_free: int | None = None
    file_limit: int | None = None
    on_battery: bool | None = None
    low_power: bool | None = None
    speed_limit: int | None = None  # percent, macOS
    temperature: float | None = None
    rosetta: bool = False
    load: float = 0.0  # programs that wanted a processor in the last minute
    compile_obstacle: dict[str, str] = field(default_factory=dict)
    meters: dict[str, str | None] = field(default_factory=dict)


def read_checkup() -> Checkup:
    """Look at this machine. Takes a few seconds: a kernel runs on each device."""
    import torch

    from m1clip.bench.probe import compile_obstacle

    facts, load = read_facts(), os.getloadavg()[0]
    kinds = available(facts)
    kernels: dict[str, str] = {kind: try_kernel(Device(kind, facts)) for kind in kinds}
    battery = getattr(psutil, "sensors_battery", lambda: None)()
    return Checkup(
        facts=facts,
        torch_cuda_build=torch.version.cuda,
        nvidia_driver=Path("/proc/driver/nvidia/version").exists() or shutil.which("nvidia-smi") is not None,
        kernels=kernels,
        rates={kind: _rates(Device(kind, facts), facts) for kind in kinds if not kernels[kind]},
        packages=_versions(),
        variables={name: os.environ[name] for name in VARIABLES if name in os.environ},
        usable_cpus=usable_cpus(),
        cpu_quota=cpu_quota(Path("/sys/fs/cgroup/cpu.max")),
        memory_available=psutil.virtual_memory().available,
        disk_free=shutil.disk_usage(".").free,
        shared_memory_free=shutil.disk_usage("/dev/shm").free if Path("/dev/shm").is_dir() else None,
        file_limit=_file_limit(),
        on_battery=None if battery is None else not battery.power_plugged,
        low_power=_low_power(),
        speed_limit=_speed_limit(),
        temperature=temperature("cpu"),
        rosetta=_tell("/usr/sbin/sysctl", "-n", "sysctl.proc_translated").strip() == "1",
        load=load,
        compile_obstacle={kind: compile_obstacle(kind) for kind in kinds},
        meters={kind: meter.name if (meter := open_meter(kind)) else None for kind in kinds},
    )


def try_kernel(device: Device) -> str:
    """Empty if a product and its gradient come out as on the CPU; else what happened instead."""
    import torch

    try:
        torch.manual_seed(0)
        a = torch.randn(64, 64)
        there = a.to(device.torch, copy=True).requires_grad_()
        (there @ there).sum().backward()
        here = a.clone().requires_grad_()
        (here @ here).sum().backward()
        assert there.grad is not None
        assert here.grad is not None
        wrong = not torch.allclose(there.grad.cpu(), here.grad, rtol=1e-3, atol=1e-3)
    except RuntimeError as error:
        return str(error).strip().splitlines()[0]
    return "its gradient differs from the CPU's" if wrong else ""


def cpu_quota(path: Path) -> float | None:
    """CPUs that a container may use on average (cgroup 2); None without a limit."""
    try:
        quota, period = path.read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        return None


def _rates(device: Device, facts: Facts) -> dict[str, float]:
    from m1clip.hardware.measure import gemm_timings

    size = 1024 if device.kind == "cpu" else 4096
    precisions: Any = rules(device.kind, facts).precisions
    return {name: 2 * size**3 / t.low for name, t in gemm_timings(device, precisions, size, rounds=3).items()}


def _versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = ""
    return found


def _file_limit() -> int | None:
    if sys.platform == "win32":
        return None
    import resource

    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def _low_power() -> bool | None:
    """macOS: Low Power Mode; Linux: a governor or profile that saves power."""
    if sys.platform == "darwin":
        found = re.search(r"lowpowermode\s+(\d)", _tell("/usr/bin/pmset", "-g"))
        return None if found is None else found.group(1) == "1"
    for path in (Path("/sys/firmware/acpi/platform_profile"),
                 Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")):  # fmt: skip
        try:
            return path.read_text().strip() in ("powersave", "low-power", "quiet")
        except OSError:
            continue
    return None


def _speed_limit() -> int | None:
    found = re.search(r"CPU_Speed_Limit\s*=\s*(\d+)", _tell("/usr/bin/pmset", "-g", "therm"))
    return int(found.group(1)) if found else None


def _tell(*command: str) -> str:
    """What a macOS tool prints; nothing elsewhere."""
    if sys.platform != "darwin":
        return ""
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout
