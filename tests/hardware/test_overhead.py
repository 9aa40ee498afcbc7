"""What a device costs before it computes, exercised on the CPU: the same code runs on an accelerator."""

from __future__ import annotations

import pytest
import torch

from m1clip.hardware import measure as overhead
from m1clip.hardware.device import Device, peak_of_status
from m1clip.hardware.facts import read_facts
from m1clip.hardware.measure import copies, copy_bandwidth, overheads, small_matmul
from m1clip.hardware.timing import Load


@pytest.fixture
def cpu() -> Device:
    return Device("cpu", read_facts())


def test_each_cost_is_a_timing_of_one_operation(cpu: Device) -> None:
    found = overheads(cpu, rounds=3)
    assert set(found) == {"launch", "round_trip", "allocate", "synchronize"}
    for value in found.values():
        assert 0 < value["low"] <= value["median"] <= value["high"]
    assert found["launch"]["n"] == 3


def test_copies_go_each_way_by_size(cpu: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overhead, "COPY_BYTES", (1024, 4096))
    found = copies(cpu, rounds=2)
    assert [item["bytes"] for item in found] == [1024, 4096]
    assert all(item[way]["n"] == 2 for item in found for way in ("to_device", "to_host"))


def test_the_small_product_waits_as_often_as_it_says(cpu: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    waits = []
    monkeypatch.setattr(cpu, "synchronize", lambda: waits.append(1))
    found = small_matmul(cpu, calls=10, rounds=3)
    # Per warm-up or round: 10 waits inside one of the two loops; the clock adds one after each timed call.
    assert len(waits) == (2 + 3) * 10 + 1 + 3 * 2
    assert found["flops"] == 2 * 16 * 512 * 16
    assert found["each"]["n"] == found["once"]["n"] == 3


def test_bandwidth_counts_both_ways(cpu: Device) -> None:
    assert copy_bandwidth(cpu, rounds=2, size=2**20) > 1e6


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
