"""The answers to `auto`: device, precision, batch, and what a memory limit asks for, in this order."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from m1clip.config import Config
from m1clip.data.prepare import Split
from m1clip.hardware.compiler import check_compile
from m1clip.hardware.device import Device, Precision, choose_device, choose_precision, threads
from m1clip.hardware.facts import Facts
from m1clip.model.shape import ClipShape
from m1clip.train.choose import choose
from m1clip.train.fit import choice as fit_choice
from m1clip.train.fit import fit_memory

MOST_CAPTIONS = 5  # of a picture in one step, unless asked for; docs/recipe.md


def usual_captions(config: Config, train: Split) -> int:
    """Captions of a picture in one step, before the device has its say."""
    usual = min(int(np.median(np.diff(train.captions.first))), MOST_CAPTIONS)
    return config.data.captions_per_step or max(1, usual)


def fitted(
    config: Config, shape: ClipShape, eot_id: int, facts: Facts, train: Split, say: Callable[[str], None],
    choices: dict[str, Any],
) -> tuple[Config, Device, Precision]:  # fmt: skip
    """The config with a batch that fits, the device and the precision; says and records why."""
    torch.set_num_threads(threads(config.train.threads, facts))
    longest = min(-(-int(train.captions.lengths.max()) // 8) * 8, shape.context_length)
    several = usual_captions(config, train)
    whole = dataclasses.replace(config, data=dataclasses.replace(config.data, captions_per_step=several))
    auto = "auto" in (config.train.device, config.train.precision)
    found = choose(whole, shape, eot_id, facts, longest) if auto else None
    if found is not None:
        kind, precision = found.device, found.precision
        choices["hardware"] = found.to_dict()
    else:
        kind = choose_device(config.train.device, facts)
        precision = choose_precision(config.train.precision, kind, facts, None)
    device = Device(kind, facts)
    if config.model.compile:
        check_compile(kind)
    say(hardware_line(device, facts, precision, found.why if found else ""))
    fit = fit_memory(whole, shape, device, precision, facts, longest, len(train.pairs))
    if fit is not None:
        choices["memory"] = fit_choice(fit)
        say(f"memory     {fit.why}")
        config = dataclasses.replace(
            config,
            model=dataclasses.replace(config.model, recompute=fit.recompute),
            train=dataclasses.replace(config.train, batch=fit.batch, chunk=fit.chunk),
        )
    return config, device, precision


def hardware_line(device: Device, facts: Facts, precision: Precision, why: str) -> str:
    """What the run computes on, for a person."""
    name = facts.cuda if device.kind == "cuda" else facts.cpu
    cores = f", {torch.get_num_threads()} threads" if device.kind == "cpu" else ""
    return f"device     {device.kind}: {name}{cores}, {precision}{f' ({why})' if why else ''}"
