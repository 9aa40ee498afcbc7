"""m1clip plan --sizes: each model size with its parameters, predicted memory and a recommended
device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from m1clip import console
from m1clip.bench.decide import PresetBench
from m1clip.bench.steps import Configuration, Result, load_measured, predict, size_of
from m1clip.formatting import duration, size, table
from m1clip.hardware.device import Device, Kind, available
from m1clip.hardware.machine_info import MachineInfo, read_machine_info

# Names of the original project, by the number of parameters below which a model has this size.
SIZE_LIMITS = {"tiny": 10e6, "small": 100e6, "medium": 500e6, "large": float("inf")}
SIZE_MODELS = ("tiny", "original", "200M", "500M", "1B")
SIZE_BATCH = 12  # images per step, as in the original run
GPU_GIGABYTES = (8, 12, 16, 24, 32, 48, 80, 141)  # memory of common GPUs
GPU_ORDER: tuple[Kind, ...] = ("cuda", "mps")
BYTES_OF_FP32 = 4


@dataclass(frozen=True)
class ModelSize:
    """A model, what it needs, and where to train it."""

    model: str
    size: str
    parameters: int
    weight_bytes: int  # in fp32
    cpu_bytes: int  # peak of a training process on the CPU
    gpu_bytes: int  # peak of the tensors of a step
    gpu_gigabytes: int | None  # smallest memory of a common GPU that is enough
    device: str  # of this machine; empty if none has enough memory
    reason: str


def size_name(parameters: float) -> str:
    """The original project's name for a model of this many parameters."""
    return next(name for name, limit in SIZE_LIMITS.items() if parameters < limit)


def smallest_gpu(needed_bytes: float) -> int | None:
    """The memory in GB of the smallest common GPU that holds this; None if none does."""
    return next((gigabytes for gigabytes in GPU_GIGABYTES if gigabytes * 1e9 >= needed_bytes), None)


def recommend_device(
    needed_bytes: Mapping[str, float],
    memory_bytes: Mapping[str, float],
    step_seconds: Mapping[str, float],
) -> tuple[str, str]:
    """Choose a device of a machine for a training step; returns it and the reason.

    All arguments are by device: what the step needs, what the device has, and how long a step
    takes where `m1clip compare` has measured it. The fastest measured device wins; without
    measurements of at least two, a GPU comes before the CPU. ("", reason) if nothing fits.
    """
    fitting = [kind for kind in memory_bytes if needed_bytes[kind] <= memory_bytes[kind]]
    if not fitting:
        largest = max(memory_bytes, key=lambda kind: memory_bytes[kind])
        return "", (
            f"needs {size(needed_bytes[largest])}, {largest} has {size(memory_bytes[largest])}: "
            "use --grad-checkpointing or a smaller --batch-size"
        )
    measured = [kind for kind in fitting if kind in step_seconds]
    if len(measured) > 1:
        fastest = min(measured, key=lambda kind: step_seconds[kind])
        return fastest, f"measured: {duration(step_seconds[fastest])} per step"
    chosen = next((kind for kind in GPU_ORDER if kind in fitting), fitting[0])
    if chosen in step_seconds:
        reason = f"measured: {duration(step_seconds[chosen])} per step"
    else:
        reason = "rule; m1clip compare measures the step"
    if len(memory_bytes) == 1:
        return chosen, f"the only device here; {reason}"
    return chosen, f"enough memory; {reason}"


def list_sizes(
    facts: MachineInfo | None = None,
    models: Sequence[str] = SIZE_MODELS,
    batch_size: int = SIZE_BATCH,
    measured: Sequence[Result] | None = None,
) -> list[ModelSize]:
    """Predict memory and recommend a device for models of each size on a machine."""
    facts = facts or read_machine_info()
    measured = load_measured(facts) if measured is None else measured
    return [_model_size(facts, model, batch_size, measured) for model in models]


def _model_size(
    facts: MachineInfo, model: str, batch_size: int, measured: Sequence[Result]
) -> ModelSize:
    options: dict[str, Any] = {"model": model, "batch_size": batch_size, "steps": 100}
    options |= {"device": "cpu", "precision": "fp32", "optimizer": "adamw"}
    bench = PresetBench(facts, batch_size)
    with console.quiet():
        config = bench.resolve(options).config
    estimate = bench.estimate(config)
    cpu_bytes = estimate.peak(batch_size, checkpointing=False)
    gpu_bytes = estimate.step_bytes(batch_size, checkpointing=False)
    parameters, _ = size_of(Configuration.of(config))
    needed: dict[str, float] = {}
    memory: dict[str, float] = {}
    seconds: dict[str, float] = {}
    for kind in available(facts):
        if kind == "mlx":  # the same memory and GPU as mps
            continue
        needed[kind] = cpu_bytes if kind == "cpu" else gpu_bytes
        memory[kind] = Device(kind, facts).total_bytes()
        configuration = Configuration(model, batch_size, kind, "fp32", optimizer="adamw")
        if prediction := predict(configuration, measured):
            seconds[kind] = prediction[0]
    device, reason = recommend_device(needed, memory, seconds)
    return ModelSize(
        model=model,
        size=size_name(parameters),
        parameters=parameters,
        weight_bytes=BYTES_OF_FP32 * parameters,
        cpu_bytes=cpu_bytes,
        gpu_bytes=gpu_bytes,
        gpu_gigabytes=smallest_gpu(gpu_bytes),
        device=device,
        reason=reason,
    )


def sizes_text(rows: Sequence[ModelSize], batch_size: int = SIZE_BATCH) -> str:
    """The table of `m1clip plan --sizes`."""
    head = ("size", "model", "parameters", "weights", "CPU memory", "GPU memory", "device here")
    cells = [
        (
            row.size,
            row.model,
            f"{row.parameters:,}",
            size(row.weight_bytes),
            size(row.cpu_bytes),
            f"{size(row.gpu_bytes)} (GPU from {row.gpu_gigabytes} GB)"
            if row.gpu_gigabytes
            else f"{size(row.gpu_bytes)} (several GPUs)",
            f"{row.device or 'none'}: {row.reason}",
        )
        for row in rows
    ]
    note = (
        f"Memory is predicted for AdamW in fp32 at batch {batch_size}; bf16 and gradient "
        "checkpointing need less. m1clip plan --model NAME decides one run."
    )
    return f"{table(head, cells)}\n\n{note}"


def as_json(rows: Sequence[ModelSize]) -> list[dict[str, Any]]:
    """The rows as plain values."""
    return [asdict(row) for row in rows]
