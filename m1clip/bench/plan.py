"""m1clip plan: predict the memory and time of a training run."""

import dataclasses
import functools
from typing import Any

import torch

from m1clip.bench.steps import (
    ASSUMED_GEMM_FRACTION,
    Configuration,
    load_measured,
    model_shape,
    predict,
    size_of,
)
from m1clip.bench.worker import GEMM_SIZE
from m1clip.data.image_cache import RAM_FRACTION
from m1clip.errors import UserError
from m1clip.formatting import amount, clock, duration, size
from m1clip.hardware.choices import matmul_precision
from m1clip.hardware.device import Device, Precision, choose_device, choose_precision, threads
from m1clip.hardware.facts import Facts, read_facts
from m1clip.hardware.timing import gemm_rate
from m1clip.training.distributed import connect
from m1clip.training.memory import MemoryEstimate
from m1clip.training.setup import MAX_UNSHARDED
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
    ranks: int | None = None,
    bandwidth: str | None = None,
) -> dict[str, Any]:
    """Predict what a run will need; `memory` is a limit such as 8GB, by default all memory of the device.

    `ranks` is the number of ranks, by default that of torchrun; `bandwidth` is what each rank sends in a second.
    """
    given = (
        ("batch-size", batch_size, 2),
        ("images", images, 2),
        ("epochs", epochs, 1e-9),
        ("ranks", ranks, 1),
    )
    for option, value, least in given:
        if value is not None and not value >= least:
            raise UserError(f"--{option} must be at least {least:g}, not {value:g}")
    limit = amount(memory, "B", "--memory") if memory else None
    connected = connect(device_name)
    count = _rank_count(ranks, connected.size, batch_size, bandwidth)
    facts = read_facts()
    torch.set_num_threads(threads(0, facts))
    device = Device(choose_device(device_name, facts), facts)
    if precision_name == "auto":
        precision = matmul_precision(device.kind, facts)
    else:
        precision = choose_precision(precision_name, device.kind, facts)
    c = Configuration.default(model, batch_size, device.kind, precision, optimizer)
    shape, tokens = model_shape(model)
    parameters, flops = size_of(c)
    step_seconds, source = step_time(c, facts, device)
    steps = max(1, round(epochs * images / batch_size))

    data = images * shape.image_size**2 * 3
    # Else on disk, or on the device.
    in_memory = device.kind == "cpu" and data <= RAM_FRACTION * facts.memory_bytes
    estimate = MemoryEstimate(
        c.train_config(), Start(shape), facts, device, precision, tokens, data if in_memory else 0
    )
    limit = limit or float(device.total_bytes())
    own = -(-batch_size // count)  # images of each rank
    peak, by_ranks = estimate.peak(own, False), dict[str, Any]()
    if count > 1:
        speed = (
            amount(bandwidth, "B", "--bandwidth")
            if bandwidth
            else connected.bandwidth(device.torch)
        )
        own_seconds = step_time(dataclasses.replace(c, batch_size=own), facts, device)[0]
        sent = sent_bytes(parameters, batch_size, shape.embed_dim, count, optimizer, precision)
        by_ranks = {
            **{
                "count": count,
                "batch_size": own,
                "compute_seconds": own_seconds,
                "exchange_seconds": sent / speed,
            },
            **{
                "sent_bytes": sent,
                "bandwidth": speed,
                "measured_ranks": 0 if bandwidth else connected.size,
            },
            "efficiency": step_seconds / (count * (own_seconds + sent / speed)),
            "fsdp": "on" if device.kind == "cuda" and peak > MAX_UNSHARDED * limit else "off",
        }
        step_seconds = own_seconds + sent / speed
    return {
        "model": model,
        "parameters": parameters,
        "flops_per_image": flops / batch_size,
        "text_tokens": tokens,
        "batch_size": batch_size,
        "device": device.kind,
        "precision": precision,
        "optimizer": optimizer,
        "memory_bytes": peak,
        "memory_limit": limit,
        "max_batch_size": estimate.largest(limit, MAX_BATCH_SIZE, False),
        "max_batch_size_checkpointing": estimate.largest(limit, MAX_BATCH_SIZE, True),
        "step_seconds": step_seconds,
        "time_source": source,
        "steps": steps,
        "seconds": steps * step_seconds,
        "ranks": by_ranks,
    }


def _rank_count(ranks: int | None, connected: int, batch_size: int, bandwidth: str | None) -> int:
    """The number of ranks to plan for; UserError if that is not possible."""
    count = ranks or connected
    if count > batch_size:
        raise UserError(
            f"--ranks {count}: a batch of {batch_size} has no image for some of them; use a larger batch"
        )
    if count > connected == 1 and bandwidth is None:
        raise UserError(
            f"--ranks {count} needs --bandwidth, such as 10GB (per second and rank); to measure it between two: "
            f"torchrun --nproc-per-node 2 -m m1clip plan --ranks {count}"
        )
    return count


def sent_bytes(
    parameters: int, batch_size: int, embed_dim: int, ranks: int, optimizer: str, precision: str
) -> float:
    """What each rank sends in a step, if gradients are added in a ring: gradients, features, Muon's updates."""
    # Of images and captions: gathered, and their gradients added.
    features = 2 * 2 * 4 * batch_size * embed_dim
    updates = parameters * (2 if precision == "bf16" else 4) if optimizer == "muon" else 0
    return (ranks - 1) / ranks * (2 * 4 * parameters + features + updates)


def step_time(c: Configuration, facts: Facts, device: Device) -> tuple[float, str]:
    """Step seconds and their source: steps measured on this machine, or else a fraction of the GEMM rate."""
    if found := predict(c, load_measured(facts)):
        return found[0], f"{found[1]} on this machine"
    rate = _gemm_rate(device, c.precision)
    source = f"assuming {ASSUMED_GEMM_FRACTION:.0%} of {rate / 1e12:.3g} TFLOP/s measured on this machine"
    return size_of(c)[1] / (
        rate * ASSUMED_GEMM_FRACTION
    ), f"{source}; m1clip compare measures the step itself"


@functools.cache  # one rate for one rank and for several
def _gemm_rate(device: Device, precision: Precision) -> float:
    return gemm_rate(device, precision, GEMM_SIZE[device.kind])


def plan_text(plan: dict[str, Any]) -> str:
    fits = "fits" if plan["memory_bytes"] <= plan["memory_limit"] else "does NOT fit"
    by_ranks, batch, lines, most = plan["ranks"], plan["batch_size"], "", "largest batch"
    if by_ranks:
        n, source = by_ranks["count"], "as given"
        unsharded = " (all figures are without it)" if by_ranks["fsdp"] == "on" else ""
        batch, most = (
            f"{batch}, {by_ranks['batch_size']} on each of {n} ranks,",
            "largest batch of a rank",
        )
        if by_ranks["measured_ranks"]:
            source = f"measured between {by_ranks['measured_ranks']} ranks"
        lines = (
            f"\nranks      {n}, PREDICTED: {plan['batch_size'] / plan['step_seconds']:,.0f} images/s, "
            f"{by_ranks['efficiency']:.0%} of {n} times one rank; --fsdp auto: {by_ranks['fsdp']}{unsharded}\n"
            f"           {duration(by_ranks['compute_seconds'])} to compute, then "
            f"{duration(by_ranks['exchange_seconds'])} to send {size(by_ranks['sent_bytes'])} at "
            f"{size(by_ranks['bandwidth'])}/s ({source})"
        )
    return (
        f"model      {plan['model']}: {plan['parameters']:,} parameters, {plan['flops_per_image'] / 1e9:,.1f} GFLOP "
        f"per image and caption of {plan['text_tokens']} tokens\n"
        f"memory     {size(plan['memory_bytes'])} at batch {batch} in {plan['precision']} with "
        f"{plan['optimizer']}: {fits} in {size(plan['memory_limit'])}\n"
        f"           {most} {plan['max_batch_size']:,}, {plan['max_batch_size_checkpointing']:,} with gradient "
        "checkpointing, any with --micro-batch\n"
        f"time       {duration(plan['step_seconds'])} per step, {plan['steps']:,} steps: {clock(plan['seconds'])} "
        f"({plan['time_source']}){lines}"
    )
