"""Energy from the machine's own meters; never estimated."""

import importlib
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

POWERCAP = Path("/sys/class/powercap")  # Linux: RAPL counters of the processor packages
# How long the power of the idle machine is measured; the counter of a GPU changes 10 times a second.
IDLE_POWER_SECONDS = 0.3
APPLE_PARTS = ("cpu_total_mj", "gpu_mj", "gpu_sram_mj", "dram_mj", "ane_mj")


class EnergyMeter:
    """Joules used since it was opened.

    `covers` is what it measures: only the GPU, or the processor packages.
    """

    def __init__(self, name: str, covers: str, read: Callable[[], float]) -> None:
        """`read` returns joules since some fixed moment."""
        self.name = name
        self.covers = covers
        self._read = read
        self._begin = read()

    def joules(self) -> float:
        return self._read() - self._begin


def open_meter(kind: str) -> EnergyMeter | None:
    """The meter for a kind of device (cpu, mps, cuda), or None if none can be read."""
    if kind == "cuda":
        return _open_nvml()
    if sys.platform == "darwin":
        return _open_apple()
    return open_rapl(POWERCAP)


def meter_obstacle(kind: str, system: str, powercap: Path = POWERCAP) -> str:
    """Say why `open_meter` has found no meter, and what would help."""
    if kind == "cuda":
        return "needs nvidia-ml-py (pip install 'm1clip[energy]') and a GPU with an energy counter"
    if system == "Darwin":
        return "needs zeus-apple-silicon (pip install 'm1clip[energy]')"
    if system != "Linux":
        return f"m1clip reads no energy meter on {system or 'this system'}"
    if any(powercap.glob("intel-rapl:*")):
        return f"only root may read RAPL; allow it with: sudo chmod a+r {powercap}/*/energy_uj"
    return f"no RAPL counters in {powercap} (usual in a virtual machine)"


def idle_watts(
    meter: EnergyMeter,
    seconds: float = IDLE_POWER_SECONDS,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> float:
    """Measure the mean power while this process waits: what the machine uses without the run."""
    joules_before = meter.joules()
    began = clock()
    sleep(seconds)
    return (meter.joules() - joules_before) / max(clock() - began, 1e-9)


def open_rapl(folder: Path) -> EnergyMeter | None:
    """Open the counters of all processor packages; None if one cannot be read.

    Often only root can read them.
    """
    # A second colon marks a part of a package, which is already included in it.
    packages = [zone for zone in folder.glob("intel-rapl:*") if zone.name.count(":") == 1]
    try:
        counters = [_Counter(zone) for zone in packages]
        meter = EnergyMeter("RAPL", "processor packages", lambda: sum(c.joules() for c in counters))
    except (OSError, ValueError):
        return None
    return meter if packages else None


class _Counter:
    """One RAPL counter. It wraps around after some minutes of load."""

    def __init__(self, zone: Path) -> None:
        self._file = zone / "energy_uj"
        self._range = int((zone / "max_energy_range_uj").read_text())
        self._last = self._turns = 0

    def joules(self) -> float:
        now = int(self._file.read_text())
        self._turns += now < self._last
        self._last = now
        return (now + self._turns * self._range) / 1e6


def _open_nvml() -> EnergyMeter | None:
    """The GPU's own counter (Volta and later), through nvidia-ml-py."""
    nvml, handle = nvml_handle()
    try:
        return nvml and EnergyMeter(
            "NVML", "GPU only", lambda: nvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1e3
        )
    except nvml.NVMLError:  # an older or virtual GPU
        return None


def nvml_handle() -> tuple[Any, Any]:
    """(the library, the handle of torch's current GPU), or (None, None) if either is missing."""
    import torch

    try:
        nvml = importlib.import_module("pynvml")
        nvml.nvmlInit()
        # By UUID: CUDA_VISIBLE_DEVICES changes what "device 0" means for torch, but not for NVML.
        uuid = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
        name = uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
        return nvml, nvml.nvmlDeviceGetHandleByUUID(name)
    # NVMLError exists only with the library.
    except Exception:  # noqa: BLE001  no library, driver or GPU
        return None, None


def _open_apple() -> EnergyMeter | None:
    """Open the counters of an Apple chip through zeus-apple-silicon, which needs no root."""
    try:
        monitor = importlib.import_module("zeus_apple_silicon").AppleEnergyMonitor()
    except (ImportError, RuntimeError):
        return None

    def read() -> float:
        metrics = monitor.get_cumulative_energy()
        # Components that a chip does not report count as 0.
        return sum(getattr(metrics, part, None) or 0 for part in APPLE_PARTS) / 1e3

    return EnergyMeter("zeus-apple-silicon", "CPU, GPU, memory and neural engine of the chip", read)
