"""MISSION 23: energy, with recall per watt-hour, or the reason why it is not measured."""

from pathlib import Path

import pytest
from small_run import finished_run, run_small

from m1clip.hardware.energy import EnergyMeter
from m1clip.monitor.history import History
from m1clip.monitor.resources import energy_rows
from m1clip.runlog import read_log
from m1clip.training import logger


class FakeMeter(EnergyMeter):
    """A meter that counts `joules` more at each reading."""

    def __init__(self, joules: float) -> None:
        self.count = 0
        self.step = joules
        super().__init__("test", "all of it", self.next)

    def next(self) -> float:
        self.count += 1
        return self.step * self.count


def energy_of(folder: Path, joules: float, monkeypatch: pytest.MonkeyPatch) -> History:
    original = logger.Telemetry.__init__

    def with_meter(self: logger.Telemetry, kind: str) -> None:
        original(
            self,
            kind,
            open_energy_meter=lambda kind: FakeMeter(joules),
            measure_idle=lambda meter: 3.5,
        )

    with monkeypatch.context() as patch:
        patch.setattr(logger.Telemetry, "__init__", with_meter)
        run_small(folder, {"train.eval_every": 5})
    return History(folder).poll()


def test_energy_follows_the_meter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    low = energy_of(tmp_path / "low", 10.0, monkeypatch)
    high = energy_of(tmp_path / "high", 40.0, monkeypatch)
    ratio = {"joules": 4.0, "joules_per_epoch": 4.0, "recall_per_watt_hour": 0.25}
    for name, expected in ratio.items():
        assert high.end[name] / low.end[name] == pytest.approx(expected)
    rows = dict(energy_rows(low))
    assert rows["idle power, before the run"] == "3.5 W"
    assert rows["meter"] == "test: all of it"
    assert {"mean power", "peak power", "energy per epoch", "mean recall per watt-hour"} <= set(
        rows
    )


def test_without_a_meter_the_reason_is_shown() -> None:
    run = finished_run({"train.eval_every": 5})
    reasons = next(r["not_measured"] for r in read_log(run) if r["kind"] == "sensors")
    history = History(run).poll()
    if "energy" in reasons:  # this machine has no meter
        assert dict(energy_rows(history))["energy"] == f"not measured: {reasons['energy']}"
    else:
        assert history.end["joules"] > 0
