"""Comparisons made by hand, for tests of what is concluded from them."""

from __future__ import annotations

from typing import Any

from m1clip.bench.compare import Open, summarize
from m1clip.bench.configurations import Configuration, default_configuration
from m1clip.bench.cost_model import cost_models, crossovers
from m1clip.hardware.facts import Facts

MACHINE = Facts(
    system="Linux",
    machine="x86_64",
    cpu="A CPU",
    cores=8,
    performance_cores=8,
    memory_bytes=64 * 2**30,
    cuda="A card",
    cuda_capability=(9, 0),
    torch="2.13.0",
    python="3.12.1",
)
LAPTOP = Facts(
    system="Darwin", machine="arm64", cpu="Apple M1", cores=8, performance_cores=4, memory_bytes=2**33, mps=True
)
PARAMETERS = {"tiny": 8e6, "small": 77e6, "ViT-B-32": 151e6, "200M": 200e6}
FLOPS_PER_IMAGE = {"tiny": 2e9, "small": 66e9, "ViT-B-32": 30e9, "200M": 190e9}


def configuration(
    model: str = "tiny", batch_size: int = 8, device: Any = "cpu", precision: Any = "bf16"
) -> Configuration:
    return default_configuration(model, batch_size, device, precision, "muon")


def result(c: Configuration, seconds: float, spread: float = 0.02, gradient: float | None = 0.001) -> dict[str, Any]:
    """A measured configuration with five steps around a median."""
    times = [seconds * (1 + spread * (i / 2 - 1)) for i in range(5)]
    samples = [{"seconds": t, "forward": 0.3 * t, "backward": 0.6 * t, "optimizer": 0.1 * t} for t in times]
    work = FLOPS_PER_IMAGE[c.model] * c.batch_size
    facts = {"parameters": PARAMETERS[c.model], "flops": work, "threads": 8}
    measured = {"samples": samples, "joules": None, "other_load": 0.0, "peak_bytes": 10**9}
    item = Open(c, None, facts, [measured])  # type: ignore[arg-type]
    return summarize(item, gradient, gemm_flops=1e12)


def sweep_results(cpu_rate: float = 1e12, gpu_rate: float = 1e14, gpu_fixed: float = 0.02) -> list[dict[str, Any]]:
    """Steps that follow a cost model: the GPU has a fixed cost and is faster."""
    found = []
    for model in ("tiny", "small", "ViT-B-32"):
        for batch_size in (1, 4, 16, 64, 256):
            work = FLOPS_PER_IMAGE[model] * batch_size
            found.append(result(configuration(model, batch_size, "cpu"), work / cpu_rate + 1e-4))
            found.append(result(configuration(model, batch_size, "cuda"), gpu_fixed + work / gpu_rate))
    return found


def document(results: list[dict[str, Any]]) -> dict[str, Any]:
    """A comparison on a machine with a card."""
    rates = {"fp32": 1e12, "bf16": 2e12}
    device = {"memory_bytes": 2**36, "gemm_flops": rates, "bandwidth": 1e11, "launch_seconds": 1e-6}
    models = cost_models(results)
    return {
        "facts": MACHINE.to_dict(),
        "m1clip": "1",
        "date": "today",
        "command": ["m1clip", "compare"],
        "devices": [{"device": kind, "name": f"the {kind}", **device} for kind in ("cpu", "cuda")],
        "absent": {"mps": "no Apple GPU (MPS) that torch can use"},
        "results": results,
        "skipped": [],
        "cost_models": models,
        "crossovers": crossovers(results, models),
        "verdict": [],
    }
