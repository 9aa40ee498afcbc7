"""Temperature, where the system shows one."""

from __future__ import annotations

from typing import Any

import psutil

from m1clip.hardware.energy import nvml_handle

CPU_SENSORS = ("coretemp", "k10temp", "zenpower", "cpu_thermal", "acpitz")  # Linux names, the best first


def temperature(kind: str) -> float | None:
    """Degrees Celsius of a device now; None where nothing can be read (most virtual machines, macOS)."""
    if kind == "cuda":
        nvml, handle = nvml_handle()
        if nvml is None:
            return None
        try:
            return float(nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU))
        except nvml.NVMLError:
            return None
    sensors: dict[str, list[Any]] = getattr(psutil, "sensors_temperatures", dict)()
    return hottest(sensors)


def hottest(sensors: dict[str, list[Any]]) -> float | None:
    """The highest reading of the first known processor sensor."""
    for name in CPU_SENSORS:
        values = [float(item.current) for item in sensors.get(name, ()) if item.current]
        if values:
            return max(values)
    return None
