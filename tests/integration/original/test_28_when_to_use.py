"""MISSION 28: which device to use for which model and batch size, from measurements."""

from m1clip.bench.report import when_to_use
from m1clip.bench.steps import Configuration, Result
from m1clip.hardware.timing import timing


def measured(device: str, batch_size: int, seconds: float, n: int) -> Result:
    c = Configuration("tiny", batch_size, device, "fp32", cuda_graph=device == "cuda")  # type: ignore[arg-type]
    return Result(c, 8_000_000, 1e9, timing([seconds] * n), 0.5, 10**9, None, None, 0.0)


def test_table_follows_the_measurements_and_has_their_number() -> None:
    cpu = [measured("cpu", 1, 0.01, 7), measured("cpu", 64, 0.64, 3)]
    gpu = [measured("cuda", 1, 0.02, 9), measured("cuda", 64, 0.04, 5)]
    head, rows = when_to_use([*cpu, *gpu])
    assert head == ["model", "batch 1", "batch 64"]
    small, large = rows[0][1:]
    assert small == "cpu fp32, 2x as fast as cuda fp32 CUDA graph, n=7"
    assert large == "cuda fp32 CUDA graph, 16x as fast as cpu fp32, n=5"
    _, rows = when_to_use([*cpu, measured("cuda", 1, 0.001, 9)])
    assert rows[0][1:] == [
        "cuda fp32 CUDA graph, 10x as fast as cpu fp32, n=9",
        "cpu fp32 (nothing else measured), n=3",
    ]
