"""m1clip plan: predict the memory and time of a training run."""

from __future__ import annotations

from typing import Any

import torch

from m1clip.bench.steps import (
    ASSUMED_GEMM_FRACTION,
    Configuration,
    default_configuration,
    load_measured,
    model_shape,
    predict,
    size_of,
)
from m1clip.bench.worker import GEMM_SIZE
from m1clip.data.cache import RAM_FRACTION
from m1clip.errors import UserError
from m1clip.formatting import amount, clock, duration, size
from m1clip.hardware.device import Device, choose_device, choose_precision, threads
from m1clip.hardware.facts import Facts, read_facts
from m1clip.hardware.timing import bf16_speedup, gemm_rate
from m1clip.training.memory import MemoryEstimate
from m1clip.training.transfer import Start

MAX_BATCH_SIZE = 65_536


def make_plan(
    model: str = "tiny",
    batch_size: int = 64,
    images: int = 8000,
    epochs: float = 10.0,
    device_name: str = "auto",
    precision_name: str = "auto",
    optimizer: str = "muon",
    memory: str | None = None,
) -> dict[str, Any]:
    """Predict what a run will need; `memory` is a limit such as 8GB, by default all memory of the device."""
    for option, value, least in (("batch-size", batch_size, 2), ("images", images, 2), ("epochs", epochs, 1e-9)):
        if not value >= least:
            raise UserError(f"--{option} must be at least {least:g}, not {value:g}")
    limit = amount(memory, "B", "--memory") if memory else None
    facts = read_facts()
    torch.set_num_threads(threads(0, facts))
    device = Device(choose_device(device_name, facts), facts)
    measure = precision_name == "auto" and device.rules.bf16 == "measure"
    precision = choose_precision(precision_name, device.kind, facts, bf16_speedup(device) if measure else None)
    c = default_configuration(model, batch_size, device.kind, precision, optimizer)
    shape, tokens = model_shape(model)
    parameters, flops = size_of(c)
    step_seconds, source = step_time(c, facts, device)
    steps = max(1, round(epochs * images / batch_size))

    data = images * shape.image_size**2 * 3
    in_memory = device.kind == "cpu" and data <= RAM_FRACTION * facts.memory_bytes  # else on disk, or on the device
    estimate = MemoryEstimate(
        c.train_config(), Start(shape), facts, device, precision, tokens, data if in_memory else 0
    )
    limit = limit or float(device.total_bytes())
    return {
        "model": model,
        "parameters": parameters,
        "flops_per_image": flops / batch_size,
        "text_tokens": tokens,
        "batch_size": batch_size,
        "device": device.kind,
        "precision": precision,
        "optimizer": optimizer,
        "memory_bytes": estimate.peak(batch_size, False),
        "memory_limit": limit,
        "max_batch_size": estimate.largest(limit, MAX_BATCH_SIZE, False),
        "max_batch_size_checkpointing": estimate.largest(limit, MAX_BATCH_SIZE, True),
        "step_seconds": step_seconds,
        "time_source": source,
        "steps": steps,
        "seconds": steps * step_seconds,
    }


def step_time(c: Configuration, facts: Facts, device: Device) -> tuple[float, str]:
    """Step seconds and their source: steps measured on this machine, or else a fraction of the GEMM rate."""
    if found := predict(c, load_measured(facts)):
        return found[0], f"{found[1]} on this machine"
    rate = gemm_rate(device, c.precision, GEMM_SIZE[device.kind])
    source = f"assuming {ASSUMED_GEMM_FRACTION:.0%} of {rate / 1e12:.3g} TFLOP/s measured on this machine"
    return size_of(c)[1] / (rate * ASSUMED_GEMM_FRACTION), f"{source}; m1clip compare measures the step itself"


def plan_text(plan: dict[str, Any]) -> str:
    """A plan as text."""
    fits = "fits" if plan["memory_bytes"] <= plan["memory_limit"] else "does NOT fit"
    return (
        f"model      {plan['model']}: {plan['parameters']:,} parameters, {plan['flops_per_image'] / 1e9:,.1f} GFLOP "
        f"per image and caption of {plan['text_tokens']} tokens\n"
        f"memory     {size(plan['memory_bytes'])} at batch {plan['batch_size']} in {plan['precision']} with "
        f"{plan['optimizer']}: {fits} in {size(plan['memory_limit'])}\n"
        f"           largest batch {plan['max_batch_size']:,}, {plan['max_batch_size_checkpointing']:,} with gradient "
        "checkpointing, any with --micro-batch\n"
        f"time       {duration(plan['step_seconds'])} per step, {plan['steps']:,} steps: {clock(plan['seconds'])} "
        f"({plan['time_source']})"
    )
