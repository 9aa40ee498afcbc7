"""m1clip plan: predict the memory and time of a training run."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

from m1clip import console
from m1clip.bench.decide import PresetBench, reject_minutes
from m1clip.bench.steps import (
    ASSUMED_GEMM_FRACTION,
    Configuration,
    load_measured,
    model_shape,
    predict,
    size_of,
)
from m1clip.bench.worker import GEMM_SIZE
from m1clip.config import DataConfig, to_dict
from m1clip.errors import UserError
from m1clip.formatting import amount, ceil_div, clock, duration, size
from m1clip.hardware.device import Device, Precision
from m1clip.hardware.machine_info import MachineInfo, read_machine_info
from m1clip.hardware.timing import gemm_rate
from m1clip.optimizers import MUON, OPTIMIZERS
from m1clip.training.distributed import Ranks, connect
from m1clip.training.memory import process_bytes
from m1clip.training.spec import DecidedConfig, Settings, setting

MAX_BATCH_SIZE = 65_536
# Settings of the decided run that the plan repeats at the top level.
PLANNED_SETTINGS = (
    *("batch_size", "micro_batch", "grad_checkpointing", "device", "precision", "optimizer"),
    "fsdp",
)
# Settings of the decided run that the plan shows, with who chose them.
SHOWN = (
    *("batch_size", "micro_batch", "grad_checkpointing", "steps"),
    *("device", "precision", "fsdp", "optimizer"),
)


def make_plan(
    options: Mapping[str, Any] | None = None,
    images: int = DataConfig.synthetic_images,
    ranks: int | None = None,
    bandwidth: str | None = None,
) -> dict[str, Any]:
    """Decide a run as `train` does with the same options, and predict what it will need.

    `images` is the number of training images, with one caption each. `ranks` is the number of
    ranks, by default that of torchrun; `bandwidth` is what each rank sends in a second.
    """
    options = options or {}
    _check_counts(images, ranks)
    config = Settings(options).config  # an error for a value that train would reject
    if config.train.minutes is not None:
        reject_minutes(config)  # before anything is measured
    connected = connect(config.train.device)
    count = _rank_count(ranks, connected.size, bandwidth)
    facts = read_machine_info()
    process_bytes(facts)  # before measurements, which add to the memory of this process
    bench = PresetBench(facts, images, count)
    with console.capture() as reasons:
        spec = connected.on_rank0(lambda: bench.resolve(options))
    device = Device(spec.config.train.device, facts)
    configuration = Configuration.of(spec.config)
    step_seconds, source = step_time(configuration, facts, device)
    by_ranks: dict[str, Any] = {}
    if count > 1:
        by_ranks = _plan_ranks(spec.config, count, connected, facts, device, bandwidth)
        own_seconds = by_ranks["compute_seconds"] + by_ranks["exchange_seconds"]
        by_ranks["efficiency"] = step_seconds / (count * own_seconds)
        step_seconds = own_seconds
    steps = spec.config.train.steps
    return {
        **_plan_model(configuration),
        **{name: setting(spec.config, name) for name in PLANNED_SETTINGS},
        **_plan_memory(bench, spec.config, device, count),
        "step_seconds": step_seconds,
        "time_source": source,
        "steps": steps,
        "seconds": steps * step_seconds,
        "ranks": by_ranks,
        "reasons": reasons.getvalue().splitlines(),
        "config": to_dict(spec.config),
        "chosen_by": dict(spec.chosen_by),
        "decided": [
            f"{name} {setting(spec.config, name)} ({spec.chosen_by.get(name, 'default')})"
            for name in SHOWN
        ],
    }


def _check_counts(images: int, ranks: int | None) -> None:
    """Raise UserError for too few images or ranks."""
    for option, value, minimum in (("images", images, 2), ("ranks", ranks, 1)):
        if value is not None and not value >= minimum:
            raise UserError(f"--{option} must be at least {minimum:g}, not {value:g}")


def _plan_model(configuration: Configuration) -> dict[str, Any]:
    """The size of the model, and the work of an image."""
    parameters, flops = size_of(configuration)
    _, tokens = model_shape(configuration.model)
    return {
        "model": configuration.model,
        "parameters": parameters,
        "flops_per_image": flops / configuration.batch_size,
        "text_tokens": tokens,
    }


def _plan_memory(
    bench: PresetBench, config: DecidedConfig, device: Device, count: int
) -> dict[str, Any]:
    """The memory of a rank, its limit, and the largest batches that fit."""
    estimate = bench.estimate(config)
    limit = float(device.total_bytes())
    if config.train.memory is not None:
        limit = amount(config.train.memory, "B", "--memory")
    own_images = ceil_div(config.train.batch_size, count)
    encoded_together = min(config.train.micro_batch or own_images, own_images)
    return {
        "memory_bytes": estimate.peak(encoded_together, config.model.grad_checkpointing),
        "memory_limit": limit,
        "max_batch_size": estimate.largest(limit, MAX_BATCH_SIZE, False),
        "max_batch_size_checkpointing": estimate.largest(limit, MAX_BATCH_SIZE, True),
    }


def _plan_ranks(
    config: DecidedConfig,
    count: int,
    connected: Ranks,
    facts: MachineInfo,
    device: Device,
    bandwidth: str | None,
) -> dict[str, Any]:
    """The part of a step that each of `count` ranks computes, and what it sends."""
    speed = _bandwidth(bandwidth, connected, device)
    configuration = Configuration.of(config)
    own_images = ceil_div(config.train.batch_size, count)
    own_configuration = dataclasses.replace(configuration, batch_size=own_images)
    own_seconds, _ = step_time(own_configuration, facts, device)
    parameters, _ = size_of(configuration)
    shape, _ = model_shape(config.model.name)
    sent = sent_bytes(
        parameters,
        config.train.batch_size,
        shape.embed_dim,
        count,
        config.optim.optimizer,
        config.train.precision,
    )
    is_shared = bandwidth is None and connected.host is not None and device.kind != "cuda"
    return {
        "count": count,
        "batch_size": own_images,
        "compute_seconds": own_seconds,
        "exchange_seconds": sent / speed,
        "sent_bytes": sent,
        "bandwidth": speed,
        "measured_ranks": 0 if bandwidth else connected.size,
        "in_shared_memory": is_shared,
        "fsdp": config.train.fsdp,
    }


def _bandwidth(bandwidth: str | None, connected: Ranks, device: Device) -> float:
    """Bytes per second that each rank sends: as given, or measured."""
    if bandwidth is not None:
        return amount(bandwidth, "B", "--bandwidth")
    return connected.bandwidth(device.torch)


def _rank_count(ranks: int | None, connected: int, bandwidth: str | None) -> int:
    """The number of ranks to plan for; UserError if their bandwidth is not known."""
    count = ranks or connected
    if count > connected == 1 and bandwidth is None:
        raise UserError(
            f"--ranks {count} needs --bandwidth, such as 10GB (per second and rank); to measure it"
            f" between two: torchrun --nproc-per-node 2 -m m1clip plan --ranks {count}"
        )
    return count


def sent_bytes(
    parameters: int, batch_size: int, embed_dim: int, ranks: int, optimizer: str, precision: str
) -> float:
    """What each rank sends in a step, if gradients are added in a ring: gradients, features, Muon's
    updates.
    """
    # Of images and captions: gathered, and their gradients added.
    features = 2 * 2 * 4 * batch_size * embed_dim
    has_muon = MUON in OPTIMIZERS[optimizer].parts
    updates = parameters * (2 if precision == "bf16" else 4) if has_muon else 0
    return (ranks - 1) / ranks * (2 * 4 * parameters + features + updates)


def step_time(c: Configuration, facts: MachineInfo, device: Device) -> tuple[float, str]:
    """Step seconds and their source: steps measured on this machine, or else a fraction of the GEMM
    rate.
    """
    if prediction := predict(c, load_measured(facts)):
        return prediction[0], f"{prediction[1]} on this machine"
    rate = _gemm_rate(device, c.precision)
    source = (
        f"assuming {ASSUMED_GEMM_FRACTION:.0%} of {rate / 1e12:.3g} TFLOP/s measured on this"
        " machine"
    )
    return (
        size_of(c)[1] / (rate * ASSUMED_GEMM_FRACTION),
        f"{source}; m1clip compare measures the step itself",
    )


@functools.cache  # one rate for one rank and for several
def _gemm_rate(device: Device, precision: Precision) -> float:
    return gemm_rate(device, precision, GEMM_SIZE[device.kind])


def plan_text(plan: dict[str, Any]) -> str:
    fits = "fits" if plan["memory_bytes"] <= plan["memory_limit"] else "does NOT fit"
    by_ranks, batch, lines, batch_title = plan["ranks"], plan["batch_size"], "", "largest batch"
    how = f" in micro-batches of {plan['micro_batch']}" if plan["micro_batch"] else ""
    how += " with gradient checkpointing" if plan["grad_checkpointing"] else ""
    reasons = "".join(f"{line}\n" for line in plan["reasons"])
    if by_ranks:
        n, source = by_ranks["count"], "as given"
        unsharded = " (all figures are without it)" if by_ranks["fsdp"] == "on" else ""
        batch, batch_title = (
            f"{batch}, {by_ranks['batch_size']} on each of {n} ranks,",
            "largest batch of a rank",
        )
        if by_ranks["measured_ranks"]:
            source = f"measured between {by_ranks['measured_ranks']} ranks"
            if by_ranks["in_shared_memory"]:
                source += " of this host, in shared memory; other hosts are slower"
        lines = (
            f"\nranks      {n}, PREDICTED:"
            f" {plan['batch_size'] / plan['step_seconds']:,.0f} images/s,"
            f" {by_ranks['efficiency']:.0%} of {n} times one rank;"
            f" --fsdp auto: {by_ranks['fsdp']}{unsharded}\n"
            f"           {duration(by_ranks['compute_seconds'])} to compute, then "
            f"{duration(by_ranks['exchange_seconds'])} to send {size(by_ranks['sent_bytes'])} at "
            f"{size(by_ranks['bandwidth'])}/s ({source})"
        )
    return (
        f"{reasons}"
        f"model      {plan['model']}: {plan['parameters']:,} parameters,"
        f" {plan['flops_per_image'] / 1e9:,.1f} GFLOP per image and caption"
        f" of {plan['text_tokens']} tokens\n"
        f"memory     {size(plan['memory_bytes'])} at batch {batch}{how}"
        f" in {plan['precision']} with {plan['optimizer']}: {fits} in {size(plan['memory_limit'])}\n"
        f"           {batch_title} {plan['max_batch_size']:,},"
        f" {plan['max_batch_size_checkpointing']:,} with gradient checkpointing,"
        " any with --micro-batch\n"
        f"time       {duration(plan['step_seconds'])} per step,"
        f" {plan['steps']:,} steps: {clock(plan['seconds'])} ({plan['time_source']}){lines}\n"
        f"decided    {', '.join(plan['decided'])}"
    )
