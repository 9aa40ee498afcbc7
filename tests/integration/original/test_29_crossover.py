"""MISSION 29: crossover and the predicted time of sizes that were not measured."""

from m1clip.bench.report import verdict
from m1clip.bench.steps import Configuration, Result, predict, size_of
from m1clip.hardware.timing import timing


def sweep(gpu_fixed: float) -> list[Result]:
    """Steps of a CPU and of a GPU with a fixed cost."""
    results = []
    for batch_size in (1, 4, 16, 64):
        for device, seconds in (("cpu", 0.002 * batch_size), ("cuda", gpu_fixed)):
            c = Configuration("tiny", batch_size, device, "fp32", cuda_graph=device == "cuda")  # type: ignore[arg-type]
            parameters, flops = size_of(c)
            times = timing([seconds, seconds])
            results.append(Result(c, parameters, flops, times, 0.5, 10**9, None, None, 0.0))
    return results


def test_crossover_and_prediction_follow_the_measurements() -> None:
    late, early = ("\n".join(verdict(sweep(fixed))) for fixed in (0.05, 0.005))
    assert "the CPU is faster up to batch 16, cuda from batch 64" in late
    assert "the CPU is faster up to batch 1, cuda from batch 4" in early
    other = Configuration("tiny", 128, "cpu", "fp32")
    predicted = predict(other, sweep(0.05))
    assert predicted is not None
    assert abs(predicted[0] - 0.256) < 1e-6
    assert predicted[1] == "measured at batch 64"
