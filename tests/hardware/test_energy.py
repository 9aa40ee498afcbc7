"""Energy meters: joules since opened, counters that wrap around, and no value without a meter."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from m1clip.hardware import energy
from m1clip.hardware.energy import EnergyMeter, idle_watts, meter_obstacle, open_meter, open_rapl


def zone(folder: Path, name: str, microjoules: int, max_energy: int = 1_000_000_000) -> Path:
    path = folder / name
    path.mkdir(parents=True)
    (path / "energy_uj").write_text(f"{microjoules}\n")
    (path / "max_energy_range_uj").write_text(f"{max_energy}\n")
    return path / "energy_uj"


def test_meter_starts_at_zero() -> None:
    values = iter([100.0, 103.5, 110.0])
    meter = EnergyMeter("test", "nothing", lambda: next(values))
    assert [meter.joules(), meter.joules()] == [3.5, 10.0]


def test_rapl_sums_packages_without_their_parts(tmp_path: Path) -> None:
    first, second = zone(tmp_path, "intel-rapl:0", 5_000_000), zone(tmp_path, "intel-rapl:1", 0)
    core = zone(tmp_path, "intel-rapl:0:0", 1_000_000)
    meter = open_rapl(tmp_path)
    assert meter is not None
    assert meter.name == "RAPL"
    first.write_text("7000000")
    second.write_text("500000")
    core.write_text("900000000")
    assert meter.joules() == pytest.approx(2.5)


def test_rapl_counter_wraps_around(tmp_path: Path) -> None:
    counter = zone(tmp_path, "intel-rapl:0", 900_000_000, max_energy=1_000_000_000)
    meter = open_rapl(tmp_path)
    assert meter is not None
    for value, joules in (("950000000", 50), ("20000000", 120), ("10000000", 1110)):
        counter.write_text(value)
        assert meter.joules() == pytest.approx(joules)


def test_no_meter_without_a_readable_counter(tmp_path: Path) -> None:
    assert open_rapl(tmp_path) is None
    assert open_rapl(tmp_path / "missing") is None
    zone(tmp_path, "intel-rapl:0", 0).unlink()  # as for a user without permission
    assert open_rapl(tmp_path) is None


def test_apple_meter_sums_the_parts_that_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    readings = [
        SimpleNamespace(cpu_total_mj=1000, gpu_mj=500, dram_mj=None, ane_mj=0, gpu_sram_mj=None),
        SimpleNamespace(cpu_total_mj=3000, gpu_mj=1500, dram_mj=None, ane_mj=0, gpu_sram_mj=None),
    ]
    monitor = SimpleNamespace(get_cumulative_energy=lambda: readings.pop(0))
    library = SimpleNamespace(AppleEnergyMonitor=lambda: monitor)
    monkeypatch.setitem(sys.modules, "zeus_apple_silicon", library)  # type: ignore[arg-type]
    monkeypatch.setattr(sys, "platform", "darwin")
    meter = open_meter("mps")
    assert meter is not None
    assert meter.joules() == pytest.approx(3.0)


class FakeNvml:
    """nvidia-ml-py with one card."""

    NVMLError = type("NVMLError", (Exception,), {})

    def __init__(self, counter: bool = True) -> None:
        self.counter, self.millijoules = counter, 1000

    def nvmlInit(self) -> None:
        """Nothing to do."""

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: str) -> int:
        assert handle == "card"
        if not self.counter:
            raise self.NVMLError
        return self.millijoules


@pytest.mark.parametrize("counter", [True, False])
def test_gpu_with_and_without_an_energy_counter(
    monkeypatch: pytest.MonkeyPatch, counter: bool
) -> None:
    nvml = FakeNvml(counter)
    monkeypatch.setattr(energy, "nvml_handle", lambda: (nvml, "card"))
    meter = open_meter("cuda")
    if not counter:
        assert meter is None
        return
    assert meter is not None
    nvml.millijoules = 4500
    assert (meter.joules(), meter.covers) == (3.5, "GPU only")


def test_no_meter_without_its_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setitem(sys.modules, "zeus_apple_silicon", None)
    assert open_meter("cuda") is None
    monkeypatch.setattr(sys, "platform", "darwin")
    assert open_meter("mps") is None


def test_missing_meter_is_explained(tmp_path: Path) -> None:
    assert "no RAPL counters" in meter_obstacle("cpu", "Linux", tmp_path)
    zone(tmp_path, "intel-rapl:0", 0)
    assert "sudo chmod a+r" in meter_obstacle("cpu", "Linux", tmp_path)
    assert "m1clip[energy]" in meter_obstacle("mps", "Darwin")
    assert "nvidia-ml-py" in meter_obstacle("cuda", "Linux")
    assert "Windows" in meter_obstacle("cpu", "Windows")


def test_idle_power_is_joules_by_seconds_of_waiting() -> None:
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    meter = EnergyMeter("test", "nothing", lambda: 7.5 * now[0])
    assert idle_watts(meter, 2.0, sleep, lambda: now[0]) == pytest.approx(7.5)
