"""What the doctor looks at: every fact is read here and nowhere else, so that the checks are functions of a record."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import psutil

from m1clip.hardware.device import Device, available, rules
from m1clip.hardware.energy import open_meter, temperature
from m1clip.hardware.facts import Facts, read_facts, usable_cpus

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

    from m1clip.bench.workload import compile_obstacle

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


Level = Literal["ok", "warning", "problem"]
GIB = 2**30
LEAST_PYTHON, LEAST_TORCH = (3, 11), (2, 10)


@dataclass(frozen=True)
class Finding:
    """One line of the doctor."""

    level: Level
    name: str
    text: str
    remedy: str = ""


def check(c: Checkup) -> list[Finding]:
    """All findings for a machine, in a fixed order."""
    found = [rule(c) for rule in RULES]
    return [finding for finding in found if finding is not None] + kernels(c) + speeds(c)


def version(text: str) -> tuple[int, ...]:
    """The leading numbers of a version: (2, 13, 0) of 2.13.0+cpu."""
    return tuple(int(part) for part in re.findall(r"\d+", text.partition("+")[0])[:3])


def python(c: Checkup) -> Finding:
    """Python is new enough."""
    if version(c.facts.python) < LEAST_PYTHON:
        return Finding("problem", "python", c.facts.python, "m1clip needs Python 3.11 or newer")
    return Finding("ok", "python", f"{c.facts.python}, {c.facts.system} {c.facts.machine}")


def rosetta(c: Checkup) -> Finding | None:
    """An Intel Python on an Apple chip is slow and has no Apple GPU."""
    if not c.rosetta:
        return None
    return Finding(
        "problem",
        "rosetta",
        "this is an Intel Python, translated on an Apple chip",
        "install an arm64 Python (python.org universal2, or Homebrew in /opt/homebrew) and make the venv anew",
    )


def torch_version(c: Checkup) -> Finding:
    """torch is new enough, and built for the card that is there."""
    build = f"CUDA {c.torch_cuda_build}" if c.torch_cuda_build else "no CUDA in this build"
    if version(c.facts.torch) < LEAST_TORCH:
        return Finding("problem", "torch", c.facts.torch, "pip install 'torch>=2.10'")
    if c.nvidia_driver and c.facts.cuda is None:
        why = (
            f"torch {c.facts.torch} was built without CUDA, and this machine has an NVIDIA driver"
            if not c.torch_cuda_build
            else f"torch {c.facts.torch} cannot use the NVIDIA card: driver too old, or CUDA_VISIBLE_DEVICES hides it"
        )
        return Finding(
            "problem", "torch", why, "install the CUDA build of torch that fits the driver (nvidia-smi shows it)"
        )
    if c.facts.system == "Darwin" and c.facts.machine == "arm64" and not c.facts.mps and not c.rosetta:
        return Finding(
            "warning", "torch", f"{c.facts.torch}, without the Apple GPU", "macOS 14 or newer is needed for MPS"
        )
    return Finding("ok", "torch", f"{c.facts.torch} ({build})")


def packages(c: Checkup) -> Finding:
    """Everything is installed, and no known bad sample."""
    missing = [name for name, number in c.packages.items() if not number]
    if missing:
        return Finding("problem", "packages", f"missing: {', '.join(missing)}", "pip install -e . again")
    if version(c.packages.get("numpy", "2")) >= (2, 0) and version(c.facts.torch) < (2, 3):
        return Finding(
            "problem", "packages", "numpy 2 with torch before 2.3: arrays cannot be shared", "pip install 'torch>=2.10'"
        )
    if version(c.packages.get("numpy", "2")) < (1, 26):
        return Finding("problem", "packages", f"numpy {c.packages['numpy']}", "pip install 'numpy>=1.26'")
    return Finding("ok", "packages", ", ".join(f"{name} {number}" for name, number in c.packages.items()))


def memory(c: Checkup) -> Finding:
    """Enough memory is free for a small run."""
    free, total = c.memory_available / GIB, c.facts.memory_bytes / GIB
    text = f"{free:.1f} of {total:.1f} GiB free"
    if free < 1:
        return Finding("problem", "memory", text, "close other programs: even the tiny model needs about 1 GB")
    if free < 0.25 * total:
        return Finding("warning", "memory", text, "close other programs, or train with --memory to stay within a limit")
    return Finding("ok", "memory", text)


def disk(c: Checkup) -> Finding:
    """Enough room for checkpoints."""
    free = c.disk_free / GIB
    if free < 1:
        return Finding(
            "problem", "disk", f"{free:.1f} GiB free here", "make room: checkpoints of `small` take about 0.9 GB each"
        )
    if free < 5:
        return Finding(
            "warning", "disk", f"{free:.1f} GiB free here", "keep fewer checkpoints (--train.keep 1), or make room"
        )
    return Finding("ok", "disk", f"{free:.0f} GiB free here")


def power(c: Checkup) -> Finding | None:
    """Mains, and no power saving."""
    if c.low_power:
        return Finding(
            "warning",
            "power",
            "power saving is on: the machine holds itself back",
            "switch Low Power Mode (or the powersave governor) off",
        )
    if c.on_battery:
        return Finding("warning", "power", "running on battery", "plug in: many laptops slow down on battery")
    if c.on_battery is None and c.low_power is None:
        return Finding("ok", "power", "nothing to read here (a desktop, a server or a virtual machine)")
    return Finding("ok", "power", "plugged in" if c.on_battery is False else "no power saving")


def heat(c: Checkup) -> Finding | None:
    """Not throttled, not hot."""
    if c.speed_limit is not None and c.speed_limit < 100:
        return Finding(
            "warning",
            "heat",
            f"the system limits the processor to {c.speed_limit}%",
            "let it cool; put it on a hard surface",
        )
    if c.temperature is None:
        return Finding("ok", "heat", "no temperature can be read here")
    if c.temperature >= 90:
        return Finding(
            "warning", "heat", f"{c.temperature:.0f} °C", "let it cool before measuring: hot chips slow down"
        )
    return Finding("ok", "heat", f"{c.temperature:.0f} °C")


def load(c: Checkup) -> Finding:
    """Nobody else is computing."""
    if c.load > max(1.0, 0.5 * c.facts.cores):
        return Finding("warning", "load", f"{c.load:.1f} programs wanted {c.facts.cores} cores in the last minute",
                       "stop other programs before measuring; training will share the cores with them")  # fmt: skip
    return Finding("ok", "load", f"{c.load:.1f} in the last minute")


def threads(c: Checkup) -> Finding:
    """One thread a core, and no variable or container in the way."""
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        value = c.variables.get(name, "")
        if value.isdigit() and int(value) > c.usable_cpus:
            return Finding(
                "warning", "threads", f"{name}={value} is more than the {c.usable_cpus} processors", f"unset {name}"
            )
    if c.cpu_quota is not None and c.cpu_quota < c.facts.performance_cores:
        return Finding("warning", "threads",
                       f"the container may use {c.cpu_quota:.1f} CPUs, but {c.facts.performance_cores} are visible",
                       f"train with --train.threads {max(1, int(c.cpu_quota))}")  # fmt: skip
    text = f"{c.facts.performance_cores} of {c.usable_cpus} processors will be used (one a physical core"
    return Finding("ok", "threads", text + (", the fast ones)" if c.facts.performance_cores < c.facts.cores else ")"))


def files(c: Checkup) -> Finding | None:
    """Workers need file handles and shared memory."""
    if c.file_limit is not None and c.file_limit < 1024:
        return Finding(
            "warning",
            "files",
            f"a process may open {c.file_limit} files",
            "ulimit -n 4096 before training with --data.workers",
        )
    if c.shared_memory_free is not None and c.shared_memory_free < GIB // 4:
        return Finding("warning", "shared memory",
                       f"{c.shared_memory_free / 2**20:.0f} MiB in /dev/shm: workers pass batches through it",
                       "docker run --shm-size=2g, or train with --data.workers 0")  # fmt: skip
    limit = "" if c.file_limit is None else f"{c.file_limit} open files"
    room = "" if c.shared_memory_free is None else f", {c.shared_memory_free / GIB:.1f} GiB of shared memory"
    return Finding("ok", "limits", (limit + room).strip(", ") or "nothing to read here")


def fallback(c: Checkup) -> Finding | None:
    """A hidden CPU fallback spoils every figure of the Apple GPU."""
    if c.facts.mps and c.variables.get("PYTORCH_ENABLE_MPS_FALLBACK") == "1":
        return Finding("warning", "fallback", "PYTORCH_ENABLE_MPS_FALLBACK=1: operations may run on the CPU unseen",
                       "unset it: m1clip needs no fallback, and a figure with it is not the GPU's")  # fmt: skip
    return None


def compiler(c: Checkup) -> Finding:
    """torch.compile can work."""
    blocked = {kind: why for kind, why in c.compile_obstacle.items() if why}
    if blocked:
        kind, why = next(iter(blocked.items()))
        return Finding("warning", "compile", f"--model.compile cannot work on {kind}", why.partition(": ")[2] or why)
    return Finding("ok", "compile", "nothing is known against --model.compile")


def energy(c: Checkup) -> Finding:
    """Whether joules can be read."""
    found = {kind: name for kind, name in c.meters.items() if name}
    if found:
        return Finding("ok", "energy", ", ".join(f"{kind} by {name}" for kind, name in found.items()))
    return Finding(
        "ok",
        "energy",
        "no meter can be read: runs will say 'not measured' (pip install 'm1clip[energy]' may bring one)",
    )


def kernels(c: Checkup) -> list[Finding]:
    """A kernel really ran on each device, and gave the right gradient."""
    found = []
    for kind, failure in c.kernels.items():
        if failure:
            found.append(
                Finding(
                    "problem",
                    kind,
                    f"a kernel failed: {failure}",
                    f"do not train on {kind}: use --device cpu; try another torch, or update the driver",
                )
            )
        else:
            name = c.facts.cuda if kind == "cuda" else c.facts.cpu
            found.append(Finding("ok", kind, f"{name}: a product and its gradient came out right"))
    return found


def speeds(c: Checkup) -> list[Finding]:
    """The matrix product rate in each precision: which dtype is fast here."""
    found = []
    for kind, rates in c.rates.items():
        text = ", ".join(f"{name} {rate / 1e12:.3g} TFLOP/s" for name, rate in rates.items())
        best = max(rates, key=lambda name: rates[name])
        found.append(Finding("ok", f"{kind} speed", f"{text}; {best} is the fastest"))
    return found


RULES: tuple[Callable[[Checkup], Finding | None], ...] = (
    python, rosetta, torch_version, packages, memory, disk, power, heat, load, threads, files, fallback, compiler,
    energy,
)  # fmt: skip
