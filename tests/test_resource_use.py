"""What a run used: sums over the lines of its log."""

import pytest

from m1clip.resource_use import ResourceUse, energy_figures, mean_by_kind


def used(*records: dict[str, object]) -> ResourceUse:
    use = ResourceUse()
    for record in records:
        use.add(record)
    return use


def test_energy_of_a_run_is_the_sum_of_its_log() -> None:
    use = used({"joules": 1800.0, "watts": 90.0}, {"joules": 1800.0, "watts": 180.0}, {})
    assert energy_figures(use, epochs=4.0, score=0.5) == pytest.approx(
        {
            "joules": 3600.0,
            "joules_per_epoch": 900.0,
            "mean_watts": 120.0,  # 20 s and 10 s
            "peak_watts": 180.0,
            "recall_per_watt_hour": 0.5,
        }
    )
    assert energy_figures(used({}, {}), 4.0, 0.5) == {}, "no meter, no figure"
    assert "recall_per_watt_hour" not in energy_figures(use, 4.0, None)


def test_cores_are_averaged_by_kind() -> None:
    use = used({"cores": [100, 20]}, {"cores": [80, 0]})
    assert use.core_use == [90.0, 10.0]
    kinds = ["performance", "efficiency"]
    assert mean_by_kind(use.core_use, kinds) == {"performance": 90.0, "efficiency": 10.0}
    use.add({"cores": [50, 50, 50]})  # resumed on another machine
    assert use.core_use == [50.0, 50.0, 50.0]
    assert mean_by_kind(use.core_use, kinds) == {}


def test_heat_and_battery() -> None:
    use = used(
        {"celsius": 60.0, "fan_rpm": 1200.0, "throttled": 0.0, "battery_percent": 90.0},
        {"celsius": 81.0, "fan_rpm": 3000.0, "throttled": 2.0, "battery_percent": 85.0},
        {"celsius": "nan", "battery_percent": 80.0},
    )
    assert (use.peak_celsius, use.peak_fan, use.throttled_lines) == (81.0, 3000.0, 1)
    assert use.battery == [90.0, 80.0]
    assert use.reads_throttling
    assert not used({}).reads_throttling
