"""Sensors: temperature, fan, throttling, battery and kinds of cores, from made folders and commands."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from m1clip.hardware.sensors import Host, core_kinds, open_sensors, run_command


def write(folder: Path, files: dict[str, Any]) -> Path:
    for name, value in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{value}\n")
    return folder


def host(sys: Path, battery: float | None = None, **values: Any) -> Host:
    values_of_host = {"system": "Linux", "machine": "x86_64", **values}
    return Host(sys=sys, battery=lambda: battery, **values_of_host)


def test_linux_sensors_are_read_from_the_files_of_sys(tmp_path: Path) -> None:
    sys = write(
        tmp_path,
        {
            "class/hwmon/hwmon0/name": "nvme",
            "class/hwmon/hwmon0/temp1_input": 88_000,
            "class/hwmon/hwmon1/name": "coretemp",
            "class/hwmon/hwmon1/temp1_input": 61_500,
            "class/hwmon/hwmon1/temp2_input": 59_000,
            "class/hwmon/hwmon2/name": "thinkpad",
            "class/hwmon/hwmon2/fan1_input": 2400,
            "devices/system/cpu/cpu0/thermal_throttle/core_throttle_count": 5,
            "devices/system/cpu/cpu1/thermal_throttle/core_throttle_count": 2,
        },
    )
    sensors = open_sensors("cpu", host(sys, battery=73.0))
    expected = {"celsius": 61.5, "fan_rpm": 2400.0, "throttled": 0.0, "battery_percent": 73.0}
    assert sensors.read() == expected
    assert sensors.not_measured == {}
    write(sys, {"devices/system/cpu/cpu1/thermal_throttle/core_throttle_count": 9})
    assert sensors.read()["throttled"] == 7.0, "events since the last reading"
    assert sensors.read()["throttled"] == 0.0
    (sys / "class/hwmon/hwmon2/fan1_input").unlink()  # unplugged during the run
    assert "fan_rpm" not in sensors.read()


def test_thermal_zone_of_the_processor_is_used_without_hwmon(tmp_path: Path) -> None:
    zone = "class/thermal/thermal_zone0"
    sys = write(tmp_path, {f"{zone}/type": "x86_pkg_temp", f"{zone}/temp": 47_000})
    assert open_sensors("cpu", host(sys)).read() == {"celsius": 47.0}


def test_missing_sensors_are_named_with_the_reason(tmp_path: Path) -> None:
    write(tmp_path, {"class/hwmon/hwmon0/name": "coretemp"})
    (tmp_path / "class/hwmon/hwmon0/temp1_input").write_text("garbage")
    sensors = open_sensors("cpu", host(tmp_path))
    assert sensors.read() == {}
    assert set(sensors.not_measured) == {"temperature", "fan", "throttling", "battery"}
    assert "hwmon" in sensors.not_measured["temperature"]
    other = open_sensors("cpu", host(tmp_path, system="Windows"))
    assert "Windows" in other.not_measured["fan"]


@pytest.mark.parametrize("machine", ["arm64", "x86_64"])
def test_mac_shows_pressure_without_root_and_names_the_command_for_the_rest(
    tmp_path: Path, machine: str
) -> None:
    levels = ["0", "2"]

    def run(words: Sequence[str]) -> str:
        assert words[0] == "notifyutil"
        return f"{words[-1]} {levels.pop(0)}\n"

    sensors = open_sensors("mps", host(tmp_path, system="Darwin", machine=machine, run=run))
    assert sensors.read() == {"throttled": 2.0}
    for quantity in ("temperature", "fan"):
        reason = sensors.not_measured[quantity]
        assert reason.startswith("needs powermetrics as root: sudo powermetrics --samplers ")
    silent = open_sensors("mps", host(tmp_path, system="Darwin", run=lambda words: ""))
    assert "notifyutil" in silent.not_measured["throttling"]


class FakeNvml:
    """nvidia-ml-py with one card without a fan of its own."""

    NVMLError = type("NVMLError", (Exception,), {})
    NVML_TEMPERATURE_GPU = 0
    reasons = 0

    def nvmlDeviceGetTemperature(self, handle: str, kind: int) -> int:
        return 61

    def nvmlDeviceGetFanSpeed(self, handle: str) -> int:
        raise self.NVMLError

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: str) -> int:
        return self.reasons


def test_gpu_sensors(tmp_path: Path) -> None:
    nvml = FakeNvml()
    sensors = open_sensors("cuda", host(tmp_path, nvml=lambda: (nvml, "card")))
    assert sensors.read() == {"celsius": 61.0, "throttled": 0.0}
    assert sensors.not_measured["fan"] == "this GPU does not report it"
    nvml.reasons = 0x1  # idle: not a slowdown
    assert sensors.read()["throttled"] == 0.0
    nvml.reasons = 0x40  # heat
    assert sensors.read()["throttled"] == 1.0
    missing = open_sensors("cuda", host(tmp_path, nvml=lambda: (None, None)))
    assert missing.read() == {}
    assert "nvidia-ml-py" in missing.not_measured["temperature"]


def test_kinds_of_cores(tmp_path: Path) -> None:
    def sysctl(words: Sequence[str]) -> str:
        return "4\n"

    mac = host(tmp_path, system="Darwin", run=sysctl)
    assert core_kinds(range(6), mac) == ["efficiency"] * 4 + ["performance"] * 2
    old_mac = host(tmp_path, system="Darwin", run=lambda words: "")
    assert core_kinds(range(2), old_mac) == ["core", "core"]
    intel = host(write(tmp_path / "intel", {"devices/cpu_atom/cpus": "2-3,5"}))
    kinds = core_kinds([0, 2, 5], intel)
    assert kinds == ["performance", "efficiency", "efficiency"]
    capacities = {f"devices/system/cpu/cpu{n}/cpu_capacity": c for n, c in enumerate((446, 1024))}
    arm = host(write(tmp_path / "arm", capacities))
    assert core_kinds([0, 1], arm) == ["efficiency", "performance"]
    assert core_kinds([0, 1], host(tmp_path / "plain")) == ["core", "core"]


def test_command_that_is_missing_or_fails_has_no_output() -> None:
    assert run_command(["m1clip-has-no-such-command"]) == ""
    assert run_command(["false"]) == ""


def test_battery_is_read_with_psutil(monkeypatch: pytest.MonkeyPatch) -> None:
    from m1clip.hardware.sensors import battery_percent

    for battery, expected in ((SimpleNamespace(percent=81), 81.0), (None, None)):
        monkeypatch.setattr(
            "psutil.sensors_battery", lambda battery=battery: battery, raising=False
        )
        assert battery_percent() == expected
