"""m1clip plan: predict the memory, time and energy of a training run."""

from __future__ import annotations

from typing import Any

import torch

from m1clip.bench.configurations import Configuration, default_configuration, model_shape
from m1clip.bench.cost_model import fit, load_measured
from m1clip.bench.options import PlanOptions
from m1clip.bench.worker import GEMM_SIZE
from m1clip.data.cache import RAM_FRACTION
from m1clip.formatting import amount, clock, duration, size
from m1clip.hardware.device import Device, choose_device, choose_precision, threads
from m1clip.hardware.facts import Facts, read_facts
from m1clip.hardware.timing import bf16_speedup, gemm_rate
from m1clip.model.clip import count_parameters
from m1clip.model.presets import flops_per_pair
from m1clip.training.memory import MemoryEstimate
from m1clip.training.transfer import Start

ASSUMED_GEMM_FRACTION = 0.5  # of the GEMM rate, if no step was measured; the plan reports it
MAX_BATCH_SIZE = 65_536


def make_plan(options: PlanOptions) -> dict[str, Any]:
    """Predict what a run will take."""
    rate = amount(options.rate, "FLOP", "--rate") if options.rate else None
    limit = amount(options.memory, "B", "--memory") if options.memory else None
    facts = read_facts()
    torch.set_num_threads(threads(0, facts))
    device = Device(choose_device(options.device, facts), facts)
    measure = options.precision == "auto" and device.rules.bf16 == "measure"
    precision = choose_precision(options.precision, device.kind, facts, bf16_speedup(device) if measure else None)
    configuration = default_configuration(options.model, options.batch_size, device.kind, precision, options.optimizer)
    shape, tokens = model_shape(options.model)
    flops = flops_per_pair(shape, tokens)
    step_seconds, source, joules = step_time(configuration, facts, device, flops * options.batch_size, rate)
    steps = max(1, round(options.epochs * options.images / options.batch_size))
    return {
        "model": options.model,
        "parameters": count_parameters(shape),
        "flops_per_image": flops,
        "text_tokens": tokens,
        "batch_size": options.batch_size,
        "device": device.kind,
        "precision": precision,
        "optimizer": options.optimizer,
        "memory": plan_memory(configuration, device, facts, options.images, limit or float(device.total_bytes())),
        "step_seconds": step_seconds,
        "time_source": source,
        "steps": steps,
        "seconds": steps * step_seconds,
        "energy": energy(joules, options.watts, step_seconds, steps),
    }


def plan_memory(c: Configuration, device: Device, facts: Facts, images: int, limit: float) -> dict[str, Any]:
    """Memory by component, whether it fits, and the largest batch sizes that do."""
    shape, tokens = model_shape(c.model)
    data = images * shape.image_size**2 * 3
    data = data if data <= RAM_FRACTION * facts.memory_bytes else 0  # a larger dataset stays on disk
    data = data if device.kind == "cpu" else 0
    estimate = MemoryEstimate(c.train_config(), Start(shape), facts, device, c.precision, tokens, data)
    parts = estimate.parts(c.batch_size, c.grad_checkpointing)
    total = sum(parts.values())
    return {
        "parts": parts,
        "total": total,
        "limit": limit,
        "fits": total <= limit,
        "max_batch_size": estimate.largest(limit, MAX_BATCH_SIZE, False),
        "max_batch_size_checkpointing": estimate.largest(limit, MAX_BATCH_SIZE, True),
    }


def step_time(
    c: Configuration, facts: Facts, device: Device, flops: float, rate: float | None
) -> tuple[float, str, float | None]:
    """Step seconds, their source, and joules per step if a meter was available."""
    if rate is None:
        same = ("device", "precision", "optimizer", "compile", "grad_checkpointing", "threads")
        alike = [
            r for r in load_measured(facts) if all(getattr(r.configuration, key) == getattr(c, key) for key in same)
        ]
        if exact := [r for r in alike if r.configuration.model == c.model]:
            near = min(exact, key=lambda r: abs(r.configuration.batch_size - c.batch_size))
            scale = flops / near.flops
            joules = None if near.joules_per_step is None else near.joules_per_step * scale
            source = f"measured on this machine at batch {near.configuration.batch_size}"
            return near.seconds.median * scale, source, joules
        if model := fit(alike):
            parameters = count_parameters(model_shape(c.model)[0])
            return model.seconds(parameters, flops), f"cost model of {len(alike)} steps measured on this machine", None
    measured = rate or gemm_rate(device, c.precision, GEMM_SIZE[device.kind])
    source = f"assuming {ASSUMED_GEMM_FRACTION:.0%} of {measured / 1e12:.3g} TFLOP/s"
    source += "" if rate else " measured on this machine; m1clip compare measures the step itself"
    return flops / (measured * ASSUMED_GEMM_FRACTION), source, None


def energy(joules: float | None, watts: float | None, step_seconds: float, steps: int) -> str:
    """Watt-hours from a meter or from --watts; never estimated."""
    if joules is not None:
        return f"{joules * steps / 3600:.3g} Wh (from the joules per step measured by m1clip compare)"
    if watts is not None:
        return f"{watts * step_seconds * steps / 3600:.3g} Wh at the given {watts:g} W"
    return "not measured (no energy meter; set the power with --watts)"


def plan_text(plan: dict[str, Any]) -> str:
    """A plan as text."""
    memory = plan["memory"]
    parts = ", ".join(f"{name} {size(value)}" for name, value in memory["parts"].items() if value >= 5e5)
    fits = "fits" if memory["fits"] else "does NOT fit"
    checkpointing = f"{memory['max_batch_size_checkpointing']:,} with gradient checkpointing"
    return (
        f"model      {plan['model']}: {plan['parameters']:,} parameters, {plan['flops_per_image'] / 1e9:,.1f} GFLOP "
        f"per image and caption of {plan['text_tokens']} tokens\n"
        f"memory     {size(memory['total'])} at batch {plan['batch_size']} in {plan['precision']} with "
        f"{plan['optimizer']}: {parts}\n"
        f"           {fits} in {size(memory['limit'])}; largest batch {memory['max_batch_size']:,}, {checkpointing}, "
        "any with --micro-batch\n"
        f"time       {duration(plan['step_seconds'])} per step, {plan['steps']:,} steps: {clock(plan['seconds'])} "
        f"({plan['time_source']})\n"
        f"energy     {plan['energy']}"
    )
