"""Overhead of a device, and the size from which a GPU is faster."""

import pytest
import torch

from m1clip.bench.overhead import Overhead, matmul_crossover, measure_overhead
from m1clip.hardware.device import Device
from m1clip.hardware.machine_info import read_machine_info
from m1clip.hardware.timing import Timing


@pytest.fixture(scope="module")
def cpu_overheads() -> list[Overhead]:
    """The overheads of this machine's CPU, from one round."""
    torch.set_num_threads(1)
    device = Device("cpu", read_machine_info(gpu=False))
    return measure_overhead(device, ["fp32"], rounds=2, seconds=0.0, matmul_sizes=(16, 64))


def test_every_kind_of_overhead_is_measured(cpu_overheads: list[Overhead]) -> None:
    labels = [overhead.label for overhead in cpu_overheads]
    assert labels[:3] == [
        "launch of one operation",
        "synchronize",
        "16 x 512 by 512 x 16 matmul and wait",
    ]
    assert "allocate and clear, 256 KiB" in labels
    assert "copy within memory, 16 MiB" in labels
    assert "memory bandwidth, 64 MiB" in labels
    assert labels[-2:] == ["matmul fp32, 16 x 16", "matmul fp32, 64 x 64"]
    assert all(overhead.seconds.n >= 1 for overhead in cpu_overheads)
    assert all(overhead.per_second > 0 for overhead in cpu_overheads if overhead.unit)


def test_larger_copies_take_longer(cpu_overheads: list[Overhead]) -> None:
    copies = [o.seconds.low for o in cpu_overheads if o.operation == "copy within memory"]
    assert copies[-1] > copies[0]


def matmuls(seconds: dict[int, float]) -> list[Overhead]:
    return [
        Overhead("matmul fp32", rows, Timing(s, 0.9 * s, 1.1 * s, 5), 2 * rows**3 / s, "FLOP/s")
        for rows, s in seconds.items()
    ]


@pytest.mark.parametrize(
    ("cpu", "gpu", "words"),
    [
        (
            {32: 1e-6, 512: 1e-3},
            {32: 1e-5, 512: 1e-4},
            "the CPU is faster up to 32 rows, cuda is faster from 512 rows",
        ),
        ({32: 1e-5, 512: 1e-3}, {32: 1e-6, 512: 1e-4}, "cuda is faster from 32 rows"),
        ({32: 1e-5}, {32: 1.05e-5}, "no clear difference"),
    ],
)
def test_size_from_which_the_gpu_is_faster(
    cpu: dict[int, float], gpu: dict[int, float], words: str
) -> None:
    lines = matmul_crossover({"cuda": matmuls(gpu), "cpu": matmuls(cpu)})
    assert lines == [f"matmul fp32: {words}."]
    assert matmul_crossover({"cpu": matmuls(cpu)}) == []
