"""GFLOP/s of fp32 matmuls on one core, by the BLAS of torch and by oneDNN: the rule of model/layers.py.

    python benchmarks/cpu_matmuls.py --json docs/results/cpu_matmuls.json
    ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2 python benchmarks/cpu_matmuls.py   # as on Zen 3

The matmuls of a linear layer: its output with the bias, and the gradients of its input and of its
weight. The libraries alternate; processor seconds of one thread, so the machine may do something
else. Each figure is the best of its rounds. Takes 15 seconds.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from same_work import ISA_LIMITS
from sides import machine, write
from torch import Tensor

from m1clip.model import layers

# (rows, outputs, inputs) of layers of `original` at batch 12 and of `tiny` at batch 64.
SHAPES = ((2364, 768, 768), (2364, 3072, 768), (924, 512, 2048), (3136, 256, 1024))
LIBRARIES = {"BLAS": False, "oneDNN": True}
Matmul = Callable[[], Tensor]


def matmuls(rows: int, outputs: int, inputs: int) -> dict[str, Matmul]:
    """The three matmuls of a linear layer, as training calls them."""
    x = torch.randn(rows, inputs)
    weight = torch.randn(outputs, inputs)
    bias = torch.randn(outputs)
    grad = torch.randn(rows, outputs)
    return {
        "output": lambda: layers._affine(x, weight, bias, None),
        "input gradient": lambda: layers._input_grad(grad, weight),
        "weight gradient": lambda: layers._weight_grad(grad, x),
    }


def cpu_seconds(matmul: Matmul, by_onednn: bool) -> float:
    """Processor seconds of a matmul by one of the libraries."""
    with (
        mock.patch.object(layers, "_fp32_by_onednn", return_value=by_onednn),
        mock.patch.object(layers, "_fp32_weight_grads_by_onednn", return_value=by_onednn),
    ):
        start = time.thread_time()
        matmul()
        return time.thread_time() - start


def measure(rounds: int) -> list[dict[str, Any]]:
    """GFLOP/s of each library, for each shape and matmul."""
    figures = []
    for shape in SHAPES:
        rows, outputs, inputs = shape
        for name, matmul in matmuls(*shape).items():
            seconds: dict[str, list[float]] = {library: [] for library in LIBRARIES}
            for _ in range(rounds + 1):
                for library, by_onednn in LIBRARIES.items():
                    seconds[library].append(cpu_seconds(matmul, by_onednn))
            operations = 2 * rows * outputs * inputs / 1e9
            # Without the first round, in which oneDNN compiles its kernels.
            rates = {library: operations / min(values[1:]) for library, values in seconds.items()}
            figures.append({"shape": shape, "matmul": name, "gflops": rates})
            shown = ", ".join(f"{library} {rate:.0f}" for library, rate in rates.items())
            print(f"{rows} x {inputs} x {outputs}, {name:16} {shown} GFLOP/s", flush=True)
    return figures


def rows_of(result: dict[str, Any]) -> list[dict[str, str]]:
    """One line for each matmul: the range over the shapes."""
    limits = [f"{name}={value}" for name, value in result["instructions"].items()]
    command = " ".join([*limits, "python benchmarks/cpu_matmuls.py"])
    lines = []
    for name in dict.fromkeys(figure["matmul"] for figure in result["figures"]):
        same = [figure["gflops"] for figure in result["figures"] if figure["matmul"] == name]
        parts = []
        for library in LIBRARIES:
            rates = [gflops[library] for gflops in same]
            parts.append(f"{library} {min(rates):.0f} to {max(rates):.0f}")
        lines.append(
            {
                "what": f"fp32 matmuls of a linear layer on one core, {result['capability']}: {name}",
                "figure": f"{', '.join(parts)} GFLOP/s",
                "n": f"{len(same)} shapes",
                "command": command,
            }
        )
    return lines


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5, help="after one that warms up")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    result: dict[str, Any] = {
        "machine": machine(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "instructions": {name: os.environ[name] for name in ISA_LIMITS if name in os.environ},
        "figures": measure(options.rounds),
    }
    result["rows"] = rows_of(result)
    for row in result["rows"]:
        print(f"{row['what']}: {row['figure']}")
    if options.json:
        write(options.json, result)


if __name__ == "__main__":
    main()
