"""Measurements of a device, on the CPU: the same code runs on an accelerator."""

from __future__ import annotations

import pytest
import torch

from m1clip.hardware.device import Device, peak_of_status
from m1clip.hardware.facts import read_facts
from m1clip.hardware.measure import copy_bandwidth, launch_seconds
from m1clip.hardware.timing import Load


@pytest.fixture
def cpu() -> Device:
    return Device("cpu", read_facts())


def test_bandwidth_and_launch_are_plausible(cpu: Device) -> None:
    assert copy_bandwidth(cpu, rounds=2, size=2**20) > 1e6
    assert 0 < launch_seconds(cpu, rounds=2) < 0.1


def test_a_peak_can_begin_again_where_the_system_lets_it(cpu: Device) -> None:
    block = torch.ones(2**25)  # 128 MB
    high = cpu.peak_bytes()
    assert high > block.nbytes
    del block
    if not cpu.reset_peak():
        pytest.skip("this system cannot forget a peak")
    assert cpu.peak_bytes() < high
    block = torch.ones(2**25)
    assert cpu.peak_bytes() > block.nbytes
    assert 0 < cpu.free_bytes() <= cpu.total_bytes()


def test_the_peak_in_proc_is_in_kilobytes() -> None:
    assert peak_of_status("VmPeak:\t  9 kB\nVmHWM:\t  1500 kB\nVmRSS:\t 3 kB\n") == 1500 * 1024


def test_own_work_is_not_somebody_elses(monkeypatch: pytest.MonkeyPatch) -> None:
    from m1clip.hardware import timing as load

    machine, own = iter([(100.0, 40.0), (110.0, 42.0)]), iter([5.0, 11.0])
    monkeypatch.setattr(load, "_machine", lambda: next(machine))
    monkeypatch.setattr(load, "_own", lambda: next(own))
    assert Load().others() == pytest.approx((10 - 2 - 6) / 10)


def test_too_short_to_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    from m1clip.hardware import timing as load

    monkeypatch.setattr(load, "_machine", lambda: (100.0, 50.0))
    assert Load().others() is None
