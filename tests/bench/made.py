"""Comparisons made by hand, for the tests of what is concluded from them."""

from __future__ import annotations

from typing import Any

from m1clip.bench.candidate import Candidate
from m1clip.bench.compare import new_document
from m1clip.bench.verdict import summarise
from m1clip.hardware.facts import Facts

MACHINE = Facts(system="Linux", machine="x86_64", cpu="A CPU", cores=8, performance_cores=8, memory_bytes=64 * 2**30,
                cuda="A card", cuda_capability=(9, 0), torch="2.13.0", python="3.12.1")  # fmt: skip
PARAMETERS = {"tiny": 8e6, "small": 77e6, "ViT-B-32": 151e6, "200M": 200e6}
PER_PAIR = {"tiny": 2e9, "small": 66e9, "ViT-B-32": 30e9, "200M": 190e9}


def result(
    candidate: Candidate, seconds: float, spread: float = 0.02, gradient: float | None = 0.001, n: int = 5
) -> dict[str, Any]:
    """A measured candidate whose steps lie evenly around a median."""
    times = [seconds * (1 + spread * (2 * i / (n - 1) - 1)) for i in range(n)]
    samples = [{"seconds": t, "data": 0.01 * t, "copy": 0.0, "forward": 0.3 * t, "backward": 0.6 * t,
                "optimizer": 0.05 * t} for t in times]  # fmt: skip
    parts = {
        "weights": 100,
        "gradients": 0,
        "optimizer": 200,
        "activations": 600,
        "batch": 10,
        "temporaries": 0,
        "rest": 90,
    }
    work = PER_PAIR[candidate.model] * candidate.batch
    opened = {"parameters": PARAMETERS[candidate.model], "text_tokens": 24, "flops": work,
              "threads": 8, "first_step_seconds": 2 * seconds, "meter": None}  # fmt: skip
    visits = [{"samples": samples, "joules": None, "others": 0.0, "temperature": None}]
    parity = None if gradient is None else {"samples": 8, "loss_difference": 1e-6, "gradient_difference": gradient}
    memory = {"total": 1000, "parts": parts, "known": True}
    return summarise(candidate.to_dict(), opened, visits, memory, parity, gemm_rate=1e12)


def probe(kind: str) -> dict[str, Any]:
    """A device by itself."""
    cost = {"median": 1e-6, "low": 1e-6, "high": 1e-6, "n": 5}
    return {
        "device": kind, "name": f"the {kind}", "threads": 8, "memory_bytes": 2**36,
        "gemm": {"fp32": 1e12, "bf16": 2e12},
        "bandwidth": 1e11, "overheads": dict.fromkeys(("launch", "round_trip", "allocate", "synchronize"), cost),
        "copies": [] if kind == "cpu" else [{"bytes": 4096, "to_device": cost, "to_host": cost}],
        "small_matmul": {"calls": 200, "flops": 262144, "each": cost, "once": cost},
        "first_compile_seconds": None, "compile_obstacle": "not asked for",
    }  # fmt: skip


def document(results: list[dict[str, Any]]) -> dict[str, Any]:
    """A comparison of a machine with a card."""
    made = new_document(MACHINE.to_dict(), {"mps": "no Apple GPU (MPS) that torch can use"})
    made["results"], made["devices"] = results, [probe("cpu"), probe("cuda")]
    return made


def sweep_results(cpu_rate: float = 1e12, card_rate: float = 1e14, card_fixed: float = 0.02) -> list[dict[str, Any]]:
    """Steps that follow a cost model: the CPU has no fixed cost, the card has one, and is faster."""
    found = []
    for model in ("tiny", "small", "ViT-B-32"):
        for batch in (1, 4, 16, 64, 256):
            work = PER_PAIR[model] * batch
            for device, seconds in (("cpu", work / cpu_rate + 1e-4), ("cuda", card_fixed + work / card_rate)):
                made = Candidate(model=model, batch=batch, device=device, precision="bf16", graph=device == "cuda")
                found.append(result(made, seconds))
    return found
