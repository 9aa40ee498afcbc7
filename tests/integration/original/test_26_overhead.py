"""MISSION 26: the overhead of a device is measured, and named as the CPU's on a CPU-only machine."""

from machines import XEON

from m1clip.bench.overhead import measure_overhead
from m1clip.bench.report import overhead_note, overhead_rows, overhead_title
from m1clip.hardware.device import Device
from m1clip.hardware.machine_info import read_machine_info


def test_overhead_is_measured_by_size() -> None:
    device = Device("cpu", read_machine_info(gpu=False))
    overheads = measure_overhead(device, ["fp32"], rounds=2, seconds=0.0, matmul_sizes=(8, 128))
    operations = {overhead.operation for overhead in overheads}
    assert operations >= {"launch of one operation", "synchronize", "allocate and clear"}
    assert operations >= {"copy within memory", "memory bandwidth", "matmul fp32"}
    copies = [o.per_second for o in overheads if o.operation == "copy within memory"]
    assert len(set(copies)) == len(copies) == 3, "one rate for each size"
    assert len(overhead_rows(overheads)) == len(overheads)
    assert overhead_title(XEON, "cpu") == f"Overhead of cpu ({XEON.cpu})"
    assert overhead_note(["cpu"]).startswith("Only the CPU was measured")
