"""Log lines about steps: values, time split; nothing is read from the device in between."""

from pathlib import Path
from typing import Any

import pytest
import torch
from small_run import run_small
from torch.utils._python_dispatch import TorchDispatchMode

from m1clip.errors import UserError
from m1clip.hardware.energy import EnergyMeter
from m1clip.hardware.sensors import Host
from m1clip.optimizers import OPTIMIZERS
from m1clip.runlog import read_log
from m1clip.training import duration, loop
from m1clip.training.context import RunContext
from m1clip.training.logger import Telemetry, check_sink, scalars, time_split
from m1clip.training.validation import BestSoFar


class Reads(TorchDispatchMode):
    """Counts reads of tensor values, each of which would synchronize on an accelerator."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            self.count += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_device_is_read_only_for_log_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, optimizer: str
) -> None:
    """The reads of a run do not grow with its steps, only with its lines."""
    real = loop.train
    counts = []

    def counted(run: RunContext) -> None:
        # As on an accelerator: the CPU reads each step, where it costs nothing.
        run.train_step.parts.update.skip = "device"
        with Reads() as reads:
            real(run)
        counts.append(reads.count)

    monkeypatch.setattr(loop, "train", counted)
    # The sigmoid loss is that of accelerators; the CPU's InfoNCE looks at the scale.
    common = {"train.eval_every": 0, "optim.optimizer": optimizer, "train.loss": "sigmoid"}
    common |= {"model.vision_layers": 1, "model.text_layers": 1}
    monkeypatch.setattr(duration, "LOG_EVERY", 20)
    monkeypatch.setattr(loop, "evaluate", lambda run: BestSoFar(0.0, -1, 0, "mean recall"))
    for name, steps, lines in (("a", 10, 1), ("b", 20, 1), ("c", 20, 10)):
        monkeypatch.setattr(duration, "LOG_LINES", lines)
        run_small(tmp_path / name, {**common, "train.steps": steps})
    assert counts[1] - counts[0] <= 2  # ten more steps, no more lines
    assert counts[2] > counts[1]


def test_waiting_for_data_counts_only_while_the_device_is_idle() -> None:
    split = time_split(10.0, waited=4.0, phases={"forward": 4.0, "backward": 5.0})
    assert split == {"data": 1.0, "forward": 4.0, "backward": 5.0, "rest": 0.0}
    idle = time_split(10.0, waited=4.0, phases={"forward": 2.0})
    assert idle == {"data": 4.0, "forward": 2.0, "rest": 4.0}
    assert time_split(10.0, 1.0, {}) == {"data": 1.0, "rest": 9.0}
    over = time_split(10.0, 0.0, {"forward": 12.0})
    assert sum(over.values()) == pytest.approx(10.0)


def test_scalars_of_a_record(monkeypatch: pytest.MonkeyPatch) -> None:
    record = {
        "v": 1,
        "kind": "step",
        "step": 3,
        "time": 1.0,
        "loss": 0.5,
        "seconds": {"data": 0.1},
        "x": "nan",
    }
    assert list(scalars("step", record)) == [("step/loss", 0.5), ("step/seconds/data", 0.1)]
    groups = {"groups": {"color/red": [0.5, 9]}}
    assert list(scalars("eval", groups)) == [("eval/groups/color/red", 0.5)]
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install 'm1clip\[log\]'"):
        check_sink("tensorboard")


def test_tensorboard_has_the_values_of_the_log(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="needs tensorboard (pip install m1clip[log])")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run_small(tmp_path / "run", {"train.report_to": "tensorboard"})
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    logged = {r["step"]: r["loss"] for r in read_log(tmp_path / "run") if r["kind"] == "step"}
    assert {e.step: pytest.approx(e.value) for e in events.Scalars("step/loss")} == logged


def test_telemetry_reads_given_meters_and_sensors(tmp_path: Path) -> None:
    sensor = tmp_path / "class" / "hwmon" / "hwmon0"
    sensor.mkdir(parents=True)
    (sensor / "name").write_text("k10temp")
    (sensor / "temp1_input").write_text("55000")
    now = [0.0]
    joules = [1000.0]
    host = Host(system="Linux", machine="x86_64", sys=tmp_path, battery=lambda: 64.0)
    telemetry = Telemetry(
        "cpu",
        host,
        open_energy_meter=lambda kind: EnergyMeter("test", "all of it", lambda: joules[0]),
        measure_idle=lambda meter: 4.25,
        clock=lambda: now[0],
    )
    described = telemetry.describe()
    assert (described["meter"], described["idle_watts"]) == ("test: all of it", 4.25)
    assert set(described["not_measured"]) == {"fan", "throttling"}
    joules[0] += 30.0
    first = telemetry.read(2.0)
    assert (first["joules"], first["watts"], first["celsius"]) == (30.0, 15.0, 55.0)
    assert first["battery_percent"] == 64.0
    (sensor / "temp1_input").write_text("70000")
    assert telemetry.read(1.0)["celsius"] == 55.0, "read every few seconds"
    now[0] += 60.0
    assert telemetry.read(1.0)["celsius"] == 70.0


def test_telemetry_without_a_meter_says_why(tmp_path: Path) -> None:
    host = Host(system="Linux", machine="x86_64", sys=tmp_path, battery=lambda: None)
    telemetry = Telemetry("cpu", host, open_energy_meter=lambda kind: None)
    reasons = telemetry.describe()["not_measured"]
    assert set(reasons) == {"energy", "temperature", "fan", "throttling", "battery"}
    assert "idle_watts" not in telemetry.describe()
    assert set(telemetry.read(1.0)) == {"cores"}
