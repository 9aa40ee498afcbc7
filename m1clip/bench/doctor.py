"""m1clip doctor: the machine is read in one place, so that every check is a pure function of one
record.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import psutil

from m1clip.errors import first_line
from m1clip.formatting import plural
from m1clip.hardware import choices
from m1clip.hardware.device import Device, available, rules
from m1clip.hardware.energy import open_meter
from m1clip.hardware.machine_info import MachineInfo, read_machine_info, usable_cpus

VARIABLES = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "PYTORCH_ENABLE_MPS_FALLBACK",
    "CUDA_VISIBLE_DEVICES",
)
GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A machine and its software; None if not reported."""

    facts: MachineInfo
    torch_cuda_build: str | None = None
    nvidia_driver: bool = (
        False  # the system has an NVIDIA GPU and driver, regardless of the torch build
    )
    # Device -> "" if its gradient was correct.
    kernel_failures: dict[str, str] = field(default_factory=dict)
    # Device -> error -> "" if it does not occur.
    known_errors: dict[str, dict[str, str]] = field(default_factory=dict)
    # Device -> precision -> FLOP/s.
    gemm_flops: dict[str, dict[str, float]] = field(default_factory=dict)
    variables: dict[str, str] = field(default_factory=dict)
    usable_cpus: int = 1
    cpu_quota: float | None = None  # of a container, in CPUs
    memory_available: int = 0
    disk_free: int = 0
    shared_memory_free: int | None = None
    on_battery: bool | None = None
    low_power: bool = False  # macOS
    rosetta: bool = False
    load: float = 0.0  # load average of the last minute
    meters: dict[str, str | None] = field(default_factory=dict)
    kept_choices: list[str] = field(default_factory=list)  # measured in earlier runs
    # Device -> whether the same computation gives the same bits twice.
    repeatable: dict[str, bool] = field(default_factory=dict)
    threads: int = 0  # of torch's matmuls; 0 if not read


def read_machine() -> Machine:
    """Inspect this machine. Takes a few seconds: a kernel runs on each device."""
    import torch

    from m1clip.bench.known_errors import find_errors
    from m1clip.hardware.timing import gemm_rates

    facts, load = read_machine_info(), os.getloadavg()[0]
    # Each run in MLX checks itself (training/parity.py).
    kinds = [kind for kind in available(facts) if kind != "mlx"]
    failures: dict[str, str] = {kind: try_kernel(Device(kind, facts)) for kind in kinds}
    battery = getattr(psutil, "sensors_battery", lambda: None)()
    low_power = re.search(r"lowpowermode\s+(\d)", _macos("/usr/bin/pmset", "-g"))
    return Machine(
        facts=facts,
        torch_cuda_build=torch.version.cuda,
        nvidia_driver=Path("/proc/driver/nvidia/version").exists()
        or shutil.which("nvidia-smi") is not None,
        kernel_failures=failures,
        known_errors={kind: find_errors(kind) for kind in kinds if not failures[kind]},
        gemm_flops={
            kind: gemm_rates(
                Device(kind, facts),
                rules(kind, facts).precisions,
                1024 if kind == "cpu" else 4096,
                3,
            )
            for kind in kinds
            if not failures[kind]
        },
        variables={name: os.environ[name] for name in VARIABLES if name in os.environ},
        usable_cpus=usable_cpus(),
        cpu_quota=cpu_quota(Path("/sys/fs/cgroup/cpu.max")),
        memory_available=psutil.virtual_memory().available,
        disk_free=shutil.disk_usage(".").free,
        shared_memory_free=shutil.disk_usage("/dev/shm").free
        if Path("/dev/shm").is_dir()
        else None,
        on_battery=None if battery is None else not battery.power_plugged,
        low_power=low_power is not None and low_power.group(1) == "1",
        rosetta=_macos("/usr/sbin/sysctl", "-n", "sysctl.proc_translated").strip() == "1",
        load=load,
        meters={kind: meter.name if (meter := open_meter(kind)) else None for kind in kinds},
        kept_choices=choices.list_saved(),
        repeatable={
            kind: gives_same_bits(Device(kind, facts)) for kind in kinds if not failures[kind]
        },
        threads=torch.get_num_threads(),
    )


def gives_same_bits(device: Device) -> bool:
    """Whether the gradient of an attention-like computation has the same bits twice."""
    import torch

    def gradient() -> torch.Tensor:
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randn(8, 64, 128, generator=generator).to(device.torch).requires_grad_()
        scores = torch.softmax(tokens @ tokens.transpose(1, 2), dim=-1)
        (gradients,) = torch.autograd.grad((scores @ tokens).square().sum(), tokens)
        return gradients.cpu()

    return torch.equal(gradient(), gradient())


def try_kernel(device: Device) -> str:
    """Empty if a matrix multiplication and its gradient match the CPU's; else what happened."""
    import torch

    def gradient(device: torch.device) -> torch.Tensor:
        a = (
            torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
            .to(device)
            .requires_grad_()
        )
        (gradients,) = torch.autograd.grad((a @ a).sum(), a)
        return gradients.cpu()

    try:
        is_right = torch.allclose(
            gradient(device.torch), gradient(torch.device("cpu")), rtol=1e-3, atol=1e-3
        )
    except RuntimeError as error:
        return first_line(error)
    return "" if is_right else "its gradient differs from the CPU's"


def cpu_quota(path: Path) -> float | None:
    try:
        quota, period = path.read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        return None


def _macos(*command: str) -> str:
    """Output of a macOS tool; empty on other systems."""
    if sys.platform != "darwin":
        return ""
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout


Level = Literal["ok", "warning", "problem"]


@dataclass(frozen=True)
class Finding:
    level: Level
    name: str
    text: str
    hint: str = ""  # shown unless the level is ok


def check(m: Machine) -> list[Finding]:
    parts = (
        check_software,
        check_resources,
        check_power,
        check_threads,
        check_devices,
        check_gpu,
        check_choices,
        check_reproducibility,
    )
    return [finding for part in parts for finding in part(m)]


def check_software(m: Machine) -> Iterator[Finding]:
    facts = m.facts
    yield Finding("ok", "python", f"{facts.python}, {facts.system} {facts.machine}")
    if facts.mlx:
        gpu = "" if facts.mps else ", its build for the CPU"
        yield Finding(
            "ok", "mlx", f"{facts.mlx}{gpu}: m1clip train --device mlx; m1clip compare measures it"
        )
    if m.rosetta:
        text = "this is an Intel build of Python, running under Rosetta on Apple silicon"
        yield Finding(
            "problem",
            "rosetta",
            text,
            "install an arm64 Python (python.org, Homebrew) and a new venv",
        )
    if m.nvidia_driver and facts.cuda is None:
        reason = "cannot use the NVIDIA GPU: driver too old, or hidden by CUDA_VISIBLE_DEVICES"
        reason = (
            reason
            if m.torch_cuda_build
            else "was built without CUDA, but this machine has an NVIDIA driver"
        )
        hint = (
            "install the CUDA build of torch that matches the driver (nvidia-smi shows its version)"
        )
        yield Finding("problem", "torch", f"torch {facts.torch} {reason}", hint)
    elif facts.system == "Darwin" and facts.machine == "arm64" and not facts.mps and not m.rosetta:
        text = f"{facts.torch}, without support for the Apple GPU"
        yield Finding("warning", "torch", text, "MPS needs macOS 14 or newer")
    else:
        build = f"CUDA {m.torch_cuda_build}" if m.torch_cuda_build else "no CUDA in this build"
        yield Finding("ok", "torch", f"{facts.torch} ({build})")


def check_resources(m: Machine) -> Iterator[Finding]:
    free, total = m.memory_available / GIB, m.facts.memory_bytes / GIB
    level: Level = "problem" if free < 1 else "warning" if free < 0.25 * total else "ok"
    hint = (
        "close other programs, or train with --memory to set a limit; even the tiny model needs"
        " about 1 GB"
    )
    yield Finding(level, "memory", f"{free:.1f} of {total:.1f} GiB free", hint)
    free = m.disk_free / GIB
    level = "problem" if free < 1 else "warning" if free < 5 else "ok"
    hint = (
        "free some space, or keep fewer checkpoints (--save-total-limit 1): those of `original`"
        " take 0.9 GB each"
    )
    yield Finding(level, "disk", f"{free:.1f} GiB free in this folder", hint)
    if m.shared_memory_free is not None and m.shared_memory_free < GIB // 4:
        text = f"{m.shared_memory_free / 2**20:.0f} MiB in /dev/shm, which workers need for batches"
        yield Finding(
            "warning", "shared memory", text, "docker run --shm-size=2g, or train with --workers 0"
        )


def check_power(m: Machine) -> Iterator[Finding]:
    if m.low_power:
        yield Finding(
            "warning", "power", "Low Power Mode is on, which slows the machine down", "turn it off"
        )
    elif m.on_battery:
        yield Finding(
            "warning", "power", "running on battery", "plug in: many laptops are slower on battery"
        )
    else:
        yield Finding("ok", "power", "not reported" if m.on_battery is None else "plugged in")
    busy = m.load > max(1.0, 0.5 * m.facts.cores)
    text = f"load average {m.load:.1f} in the last minute, on {m.facts.cores} cores"
    yield Finding(
        "warning" if busy else "ok", "load", text, "stop other programs: they compete with training"
    )
    meters = [f"{kind} by {name}" for kind, name in m.meters.items() if name]
    text = (
        "no energy meter available: runs report 'not measured' (pip install 'm1clip[energy]' may"
        " add one)"
    )
    yield Finding("ok", "energy", ", ".join(meters) or text)


def check_threads(m: Machine) -> Iterator[Finding]:
    cores = m.facts.performance_cores
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        value = m.variables.get(name, "")
        if value.isdigit() and int(value) > m.usable_cpus:
            text = f"{name}={value} is more than the {m.usable_cpus} CPUs"
            yield Finding("warning", "environment", text, f"unset {name}")
    if m.cpu_quota is not None and m.cpu_quota < cores:
        text = f"the container is limited to {m.cpu_quota:.1f} CPUs, but {cores} are visible"
        yield Finding(
            "warning", "threads", text, f"train with --threads {max(1, int(m.cpu_quota))}"
        )
    else:
        kind = "fast core" if cores < m.facts.cores else "physical core"
        yield Finding("ok", "threads", f"{cores}, one per {kind}, of {m.usable_cpus} CPUs")


def check_devices(m: Machine) -> Iterator[Finding]:
    """Whether kernels compute correct gradients on each device, and which precision is fastest."""
    if m.facts.mps and m.variables.get("PYTORCH_ENABLE_MPS_FALLBACK") == "1":
        text = "PYTORCH_ENABLE_MPS_FALLBACK=1: operations may silently run on the CPU"
        yield Finding("warning", "environment", text, "unset it: m1clip needs no fallback")
    for kind, failure in m.kernel_failures.items():
        if failure:
            hint = "use --device cpu; or try another torch version, or update the driver"
            yield Finding("problem", kind, f"a kernel failed: {failure}", hint)
            continue
        rates = m.gemm_flops[kind]
        text = ", ".join(f"{name} {rate / 1e12:.3g} TFLOP/s" for name, rate in rates.items())
        name = m.facts.cuda if kind == "cuda" else m.facts.cpu
        yield Finding("ok", kind, f"{name}: gradients are correct; {text}")
        yield from check_known_errors(kind, m.known_errors.get(kind, {}))


def check_gpu(m: Machine) -> Iterator[Finding]:
    """Say whether runs can use a GPU, and if not, why."""
    kinds = [kind for kind in m.kernel_failures if kind != "cpu"]
    working = [kind for kind in kinds if not m.kernel_failures[kind]]
    if working:
        text = f"{working[0]} can be used: --device auto measures it against the CPU"
        on_cpu = [line for line in m.kept_choices if re.search(r": cpu\b", line)]
        if on_cpu:
            text += f"; auto uses the CPU because it was faster ({on_cpu[0]}); --device gpu decides"
        yield Finding("ok", "gpu", text)
        return
    level, text, hint = why_no_gpu(m)
    yield Finding(level, "gpu", text, hint)


def why_no_gpu(m: Machine) -> tuple[Level, str, str]:
    """The first reason why no GPU can be used: level, what is the case, what to do."""
    facts = m.facts
    hidden = m.variables.get("CUDA_VISIBLE_DEVICES")
    broken = [kind for kind, failure in m.kernel_failures.items() if failure and kind != "cpu"]
    if broken:
        return (
            "problem",
            f"{broken[0]} is not used: its kernels fail",
            "see the line of this device; try another version of torch or of the driver",
        )
    if facts.system == "Darwin":
        if m.rosetta:
            return (
                "problem",
                "not used: an Intel Python cannot use the Apple GPU",
                "install an arm64 Python and create a new virtual environment",
            )
        if facts.machine == "arm64":
            return (
                "warning",
                f"not used: torch {facts.torch} reports no MPS on macOS {facts.macos or 'unknown'}",
                "use macOS 14 or newer and a build of torch for arm64",
            )
        return "ok", "none: an Intel Mac has no GPU that torch supports; runs use the CPU", ""
    if m.nvidia_driver and not m.torch_cuda_build:
        return (
            "problem",
            f"not used: torch {facts.torch} was built without CUDA",
            "pip uninstall torch, then install its CUDA build (pytorch.org, Get started)",
        )
    if m.nvidia_driver and hidden is not None and hidden.strip() in ("", "-1"):
        return (
            "problem",
            f"not used: CUDA_VISIBLE_DEVICES={hidden!r} hides it",
            "unset CUDA_VISIBLE_DEVICES, or list the GPU in it",
        )
    if m.nvidia_driver:
        return (
            "problem",
            f"not used: the driver is older than CUDA {m.torch_cuda_build} of torch, or has no GPU",
            "nvidia-smi shows GPU and driver; update the driver, or install an older CUDA build",
        )
    return "ok", "none: no NVIDIA driver and no Apple chip; runs use the CPU", ""


def check_reproducibility(m: Machine) -> Iterator[Finding]:
    """List what another run needs to give the same result."""
    from m1clip import __version__

    facts = m.facts
    yield Finding(
        "ok",
        "reproduce: versions",
        f"m1clip {__version__}, Python {facts.python}, torch {facts.torch}; "
        "each run writes them to environment.json",
    )
    yield Finding(
        "ok",
        "reproduce: run",
        "seed 0 unless --seed is given; --config RUN/config.toml repeats all decided settings, "
        "and the hash of the training data is checked when a run is resumed",
    )
    for kind, same in m.repeatable.items():
        threads = f" with {plural(m.threads, 'thread')}" if kind == "cpu" and m.threads else ""
        if same:
            text = f"the same step gives the same bits twice{threads}"
            if kind == "cpu":
                text += "; another number of threads or another CPU rounds differently"
            yield Finding("ok", f"reproduce: {kind}", text)
        else:
            yield Finding(
                "warning",
                f"reproduce: {kind}",
                f"the same step gives different bits{threads}",
                "compare runs by their intervals, or use --device cpu for bit-identical runs",
            )


def check_choices(m: Machine) -> Iterator[Finding]:
    """Show what earlier runs measured on a quiet machine and still use."""
    if not m.kept_choices:
        yield Finding(
            "ok", "choices", "no measurements are kept: the next run with --device auto measures"
        )
    for line in m.kept_choices:
        yield Finding("ok", "choice", f"{line} (m1clip doctor --clear-choices measures again)")


def check_known_errors(kind: str, outcomes: dict[str, str]) -> Iterator[Finding]:
    """Which known errors of torch on Apple GPUs this device has.

    M1clip avoids them, other programs may not.
    """
    from m1clip.bench.known_errors import KNOWN_ERRORS

    present = [
        (error, outcome)
        for error, outcome in zip(KNOWN_ERRORS, outcomes.values(), strict=False)
        if outcome
    ]
    if outcomes and not present:
        yield Finding("ok", f"{kind} errors", f"none of {len(outcomes)} known errors of torch")
    for error, outcome in present:
        text = f"pytorch#{error.issue}, {error.title}: {outcome}"
        if kind == "mps":
            yield Finding(
                "warning",
                "mps error",
                text,
                f"m1clip avoids it: {error.avoided}; a newer torch may fix it",
            )
        else:
            yield Finding(
                "problem", f"{kind} error", text, "use another device or version of torch"
            )


def doctor_text(findings: list[Finding]) -> str:
    lines = []
    for finding in findings:
        lines.append(f"{finding.level:8} {finding.name}: {finding.text}")
        lines += [f"         -> {finding.hint}"] if finding.level != "ok" else []
    counts = {level: sum(f.level == level for f in findings) for level in ("problem", "warning")}
    return "\n".join([*lines, ", ".join(plural(count, level) for level, count in counts.items())])
