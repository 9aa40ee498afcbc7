"""Temperature, fan, throttling, battery and kinds of cores, as far as root is not needed.

Everything is a function of a `Host`: a folder like /sys and a function that runs commands. A test
passes its own.
"""

from __future__ import annotations

import contextlib
import platform
import re
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from m1clip.hardware.energy import nvml_handle

Reader = Callable[[], float | None]  # None: no value just now
COMMAND_SECONDS = 5.0  # a command that takes longer counts as missing

# Linux names of temperature sensors of a processor, the best first.
CPU_SENSORS = ("coretemp", "k10temp", "zenpower", "cpu_thermal", "acpitz")
# Quantities, and their field in the log.
CELSIUS = "celsius"
FAN_RPM = "fan_rpm"
FAN_PERCENT = "fan_percent"
THROTTLED = "throttled"  # 0: no; Linux: events since the last reading; macOS: level; NVML: 1
BATTERY = "battery_percent"

POWERMETRICS = {
    "x86_64": "needs powermetrics as root: sudo powermetrics --samplers smc -n 1",
    "arm64": "needs powermetrics as root: sudo powermetrics --samplers thermal,cpu_power -n 1",
}
PRESSURE_COMMAND = ("notifyutil", "-g", "com.apple.system.thermalpressurelevel")
# Reasons of NVML to lower the clock: heat, or the limit of power.
SLOWDOWNS = {"heat": 0x20 | 0x40, "power": 0x04 | 0x80, "hardware": 0x08}


def run_command(words: Sequence[str]) -> str:
    """Run a command of the system and return its output; "" if it is missing or fails."""
    try:
        result = subprocess.run(
            list(words), capture_output=True, text=True, check=False, timeout=COMMAND_SECONDS
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return result.stdout if result.returncode == 0 else ""


def battery_percent() -> float | None:
    """Read the charge of the battery; None without one."""
    battery = None
    with contextlib.suppress(OSError, ValueError, AttributeError):  # AttributeError: no such system
        battery = psutil.sensors_battery()
    return None if battery is None else float(battery.percent)


@dataclass(frozen=True)
class Host:
    """Where sensors are read."""

    system: str = field(default_factory=platform.system)
    machine: str = field(default_factory=platform.machine)
    sys: Path = Path("/sys")
    run: Callable[[Sequence[str]], str] = run_command
    battery: Reader = battery_percent
    nvml: Callable[[], tuple[Any, Any]] = nvml_handle


@dataclass(frozen=True)
class Sensors:
    """The sensors that can be read, by field of the log, and why the others cannot."""

    readers: Mapping[str, Reader]
    not_measured: Mapping[str, str]  # quantity -> reason

    def read(self) -> dict[str, float]:
        """Read every sensor; one that has no value just now is omitted."""
        values = {name: reader() for name, reader in self.readers.items()}
        return {name: round(value, 1) for name, value in values.items() if value is not None}


def open_sensors(kind: str, host: Host) -> Sensors:
    """Find the sensors of a kind of device; of the CPU for MPS and MLX, which share its chip."""
    if kind == "cuda":
        readers, reasons = _nvml_sensors(host)
    elif host.system == "Darwin":
        readers, reasons = _apple_sensors(host)
    elif host.system == "Linux":
        readers, reasons = _linux_sensors(host)
    else:
        reason = f"m1clip reads no sensors on {host.system or 'this system'}"
        readers = {}
        reasons = dict.fromkeys(("temperature", "fan", "throttling"), reason)
    if host.battery() is None:
        reasons["battery"] = "this machine has none, or does not show it"
    else:
        readers[BATTERY] = host.battery
    return Sensors(readers, reasons)


def _linux_sensors(host: Host) -> tuple[dict[str, Reader], dict[str, str]]:
    """Find the sensors under /sys: temperature, fan, and counters of thermal throttling."""
    readers: dict[str, Reader] = {}
    reasons = {}
    temperatures = _temperature_files(host.sys)
    if temperatures:
        readers[CELSIUS] = lambda: _highest(temperatures, 1000.0)
    else:
        reasons["temperature"] = (
            "no processor sensor under /sys/class/hwmon or /sys/class/thermal (usual in a virtual"
            " machine)"
        )
    fans = sorted(host.sys.glob("class/hwmon/hwmon*/fan*_input"))
    if _highest(fans, 1.0) is not None:
        readers[FAN_RPM] = lambda: _highest(fans, 1.0)
    else:
        reasons["fan"] = "no fan under /sys/class/hwmon"
    counters = sorted(host.sys.glob("devices/system/cpu/cpu*/thermal_throttle/*_throttle_count"))
    if _total(counters) is not None:
        readers[THROTTLED] = _Events(counters)
    else:
        reasons["throttling"] = (
            "no counter under /sys/devices/system/cpu/cpu*/thermal_throttle (only Intel processors "
            "have it, outside of virtual machines)"
        )
    return readers, reasons


def _temperature_files(sys: Path) -> list[Path]:
    """The files of the best known sensor of the processor, else of its thermal zone."""
    by_name: dict[str, list[Path]] = {}
    for folder in sorted(sys.glob("class/hwmon/hwmon*")):
        by_name.setdefault(_text(folder / "name"), []).extend(sorted(folder.glob("temp*_input")))
    for zone in sorted(sys.glob("class/thermal/thermal_zone*")):
        kind = _text(zone / "type").replace("-", "_")
        name = "cpu_thermal" if kind.startswith("cpu") or kind == "x86_pkg_temp" else kind
        by_name.setdefault(name, []).append(zone / "temp")
    candidates = (by_name.get(name, []) for name in CPU_SENSORS)
    return next((files for files in candidates if _highest(files, 1000.0) is not None), [])


class _Events:
    """Events of some counters since the last reading."""

    def __init__(self, counters: Sequence[Path]) -> None:
        self._counters = counters
        self._last = _total(counters)

    def __call__(self) -> float | None:
        total = _total(self._counters)
        if total is None or self._last is None:
            return None
        events = total - self._last
        self._last = total
        return max(0.0, events)


def _apple_sensors(host: Host) -> tuple[dict[str, Reader], dict[str, str]]:
    """Read the level of thermal pressure; temperatures and fans would need root."""
    needs_root = POWERMETRICS.get(host.machine, POWERMETRICS["arm64"])
    reasons = {"temperature": needs_root, "fan": needs_root}

    def pressure() -> float | None:
        match = re.search(r"thermalpressurelevel\s+(\d+)", host.run(PRESSURE_COMMAND))
        return float(match[1]) if match else None

    if pressure() is None:
        reasons["throttling"] = f"{' '.join(PRESSURE_COMMAND)} shows no level"
        return {}, reasons
    return {THROTTLED: pressure}, reasons


def _nvml_sensors(host: Host) -> tuple[dict[str, Reader], dict[str, str]]:
    """Sensors of the GPU through nvidia-ml-py.

    Each may be missing (a server card has no fan of its own).
    """
    nvml, handle = host.nvml()
    if nvml is None:
        reason = "needs nvidia-ml-py (pip install 'm1clip[energy]') and NVIDIA's driver"
        return {}, dict.fromkeys(("temperature", "fan", "throttling"), reason)

    def reader(read: Callable[[], float]) -> Reader:
        def guarded() -> float | None:
            try:
                return float(read())
            except (nvml.NVMLError, AttributeError):  # AttributeError: an old nvidia-ml-py
                return None

        return guarded

    mask = sum(SLOWDOWNS.values())
    readers = {
        "temperature": (
            CELSIUS,
            lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
        ),
        "fan": (FAN_PERCENT, lambda: nvml.nvmlDeviceGetFanSpeed(handle)),
        "throttling": (
            THROTTLED,
            lambda: bool(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle) & mask),
        ),
    }
    guarded = {quantity: (name, reader(read)) for quantity, (name, read) in readers.items()}
    missing = {quantity for quantity, (_, read) in guarded.items() if read() is None}
    available = {
        name: read for quantity, (name, read) in guarded.items() if quantity not in missing
    }
    return available, dict.fromkeys(sorted(missing), "this GPU does not report it")


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""


def _numbers(paths: Sequence[Path]) -> list[float]:
    """The numbers in files, without those that cannot be read."""
    values = []
    for path in paths:
        with contextlib.suppress(ValueError):
            values.append(float(_text(path)))
    return values


def _highest(paths: Sequence[Path], divisor: float) -> float | None:
    """The highest number above 0 in files; sensors without a probe show 0."""
    values = [value / divisor for value in _numbers(paths) if value > 0]
    return max(values, default=None)


def _total(paths: Sequence[Path]) -> float | None:
    values = _numbers(paths)
    return sum(values) if values else None


PERFORMANCE = "performance"
EFFICIENCY = "efficiency"
SAME_KIND = "core"  # where cores do not differ


def core_kinds(cpus: Sequence[int], host: Host) -> list[str]:
    """Name the kind of each CPU: performance or efficiency, or `core` where they do not differ."""
    efficient: set[int] = set()
    if host.system == "Darwin":
        # macOS numbers the efficiency cores first.
        count = host.run(("/usr/sbin/sysctl", "-n", "hw.perflevel1.logicalcpu")).strip()
        efficient = set(range(int(count))) if count.isdigit() else set()
    elif host.system == "Linux":
        efficient = _intel_efficiency_cpus(host.sys) or _small_arm_cpus(host.sys)
    if not efficient:
        return [SAME_KIND] * len(cpus)
    return [EFFICIENCY if cpu in efficient else PERFORMANCE for cpu in cpus]


def _intel_efficiency_cpus(sys: Path) -> set[int]:
    """The CPUs of the list in cpu_atom, such as "16-23,31"."""
    cpus: set[int] = set()
    for part in _text(sys / "devices/cpu_atom/cpus").split(","):
        first, _, last = part.partition("-")
        if first.isdigit():
            cpus |= set(range(int(first), int(last or first) + 1))
    return cpus


def _small_arm_cpus(sys: Path) -> set[int]:
    """The CPUs with less capacity than the largest."""
    capacity = {}
    for path in sys.glob("devices/system/cpu/cpu[0-9]*/cpu_capacity"):
        text = _text(path)
        if text.isdigit():
            capacity[int(path.parent.name.removeprefix("cpu"))] = int(text)
    largest = max(capacity.values(), default=0)
    return {cpu for cpu, value in capacity.items() if value < largest}
