"""MISSION 24: temperature, throttling and fan, or the reason why they are not measured."""

from pathlib import Path

from monitor.made_runs import append, line, make_run, step
from small_run import finished_run

from m1clip.hardware.sensors import Host, open_sensors
from m1clip.monitor.diagnostics import throttling
from m1clip.monitor.history import History
from m1clip.monitor.resources import heat_rows


def test_every_quantity_is_measured_or_has_a_reason() -> None:
    rows = dict(heat_rows(History(finished_run({"train.eval_every": 5})).poll()))
    assert set(rows) == {"temperature", "throttling", "fan"}
    for text in rows.values():
        assert text.startswith(("highest ", "none", "yes", "not measured: "))


def test_temperature_and_throttling_are_those_of_the_sensors(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", [line("sensors", not_measured={"fan": "no fan here"})])
    append(run, [step(n, celsius=50.0 + n, throttled=float(n == 2)) for n in (1, 2)])
    rows = dict(heat_rows(History(run).poll()))
    assert rows["temperature"] == "highest 52 °C, now 52 °C"
    assert rows["throttling"] == "yes, in 50% of the lines of the log"
    assert rows["fan"] == "not measured: no fan here"


def test_slow_steps_are_blamed_on_measured_throttling(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", [step(n) for n in range(1, 13)])
    append(run, [step(n, step_seconds=1.0, throttled=1.0) for n in range(13, 30)])
    problem = throttling(History(run).poll())
    assert problem is not None
    assert "according to its sensors" in problem.message


def test_mac_names_the_command_that_would_show_it(tmp_path: Path) -> None:
    mac = Host("Darwin", "arm64", sys=tmp_path, run=lambda words: "", battery=lambda: 50.0)
    reasons = open_sensors("mps", mac).not_measured
    assert reasons["temperature"].startswith("needs powermetrics as root: sudo powermetrics")
