"""Example results for tests of the report and the cost model."""

from typing import Any

from m1clip.bench.steps import Configuration, Result
from m1clip.hardware.timing import timing

PARAMETERS = {"tiny": 8e6, "original": 77e6, "ViT-B-32": 151e6, "200M": 200e6, "1B": 1e9}
FLOPS_PER_IMAGE = {"tiny": 2e9, "original": 66e9, "ViT-B-32": 30e9, "200M": 190e9, "1B": 9e11}


def configuration(
    model: str = "tiny", batch_size: int = 8, device: Any = "cpu", precision: Any = "bf16"
) -> Configuration:
    return Configuration(model, batch_size, device, precision, cuda_graph=device == "cuda")


def result(
    c: Configuration, seconds: float, gradient: float = 0.001, other_load: float = 0.0
) -> Result:
    """A configuration with five measured steps around a median."""
    times = [seconds * (1 + 0.02 * (i / 2 - 1)) for i in range(5)]
    work = FLOPS_PER_IMAGE[c.model] * c.batch_size
    fraction = work / seconds / 1e12
    return Result(
        c,
        int(PARAMETERS[c.model]),
        work,
        timing(times),
        fraction,
        10**9,
        None,
        other_load,
        gradient,
    )


def sweep_results(
    cpu_rate: float = 1e12, gpu_rate: float = 1e14, gpu_fixed: float = 0.02
) -> list[Result]:
    """Steps that follow a cost model: the GPU has a fixed cost and is faster."""
    results = []
    for model in ("tiny", "original", "ViT-B-32"):
        for batch_size in (1, 4, 16, 64, 256):
            work = FLOPS_PER_IMAGE[model] * batch_size
            results.append(result(configuration(model, batch_size, "cpu"), work / cpu_rate + 1e-4))
            results.append(
                result(configuration(model, batch_size, "cuda"), gpu_fixed + work / gpu_rate)
            )
    return results
