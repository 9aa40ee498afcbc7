"""`m1clip eval`: a run's best model on a split of its data, or of other data."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import torch

from m1clip.configfile import load_config
from m1clip.data.prepare import DecodePlan, load_split, open_data
from m1clip.errors import UserError
from m1clip.evaluate.bundle import load
from m1clip.evaluate.metric import Scores
from m1clip.hardware.device import Device, choose_device, choose_precision, threads
from m1clip.hardware.facts import Facts, read_facts
from m1clip.hardware.measure import bf16_speedup
from m1clip.train.finish import Exam, examine
from m1clip.train.precision import autocast


def score_run(
    run: Path,
    split: str,
    device_name: str,
    other_data: tuple[str, ...],
    decode: Callable[[Facts], DecodePlan],
) -> tuple[Scores, Path]:
    """Figures of a split and the path of the picture grid, which goes into the run folder."""
    exam = open_exam(run, split, device_name, other_data, decode)
    grid = run / f"retrieval-{split}{'-other-data' if other_data else ''}.png"
    return examine(exam, grid), grid


def open_exam(
    run: Path,
    split: str,
    device_name: str,
    other_data: tuple[str, ...],
    decode: Callable[[Facts], DecodePlan],
) -> Exam:
    """A run's best model, ready to be asked about a split as it was in training."""
    bundle = load(run)
    if not (run / "config.toml").is_file():
        raise UserError(f"{run}: no config.toml; give the run folder, which says what data it was trained on")
    config = load_config(run / "config.toml")
    data = dataclasses.replace(config.data, source=other_data) if other_data else config.data
    facts = read_facts()
    device = Device(choose_device(device_name, facts), facts)
    torch.set_num_threads(threads(config.train.threads, facts))
    # As in the run, so that the figures are those that training printed; elsewhere what is fast there.
    wish = config.train.precision if device.kind == config.train.device else "auto"
    speedup = bf16_speedup(device) if wish == "auto" and device.rules.bf16 == "measure" else None
    precision = choose_precision(wish, device.kind, facts, speedup)
    bundle.model.to(device.torch)
    if device.kind == config.train.device:
        bundle.model.set_attention(config.model.attention_image, config.model.attention_text)  # type: ignore[arg-type]
    source = open_data(data, bundle.preprocess.image_size, config.seed)
    if split not in source.splits():
        raise UserError(
            f"{', '.join(data.source)}: has no {split} split (there: {', '.join(source.splits())})"
        )
    context = bundle.model.shape.context_length
    pairs = load_split(source, split, data, bundle.tokenizer, context, bundle.preprocess, 1.0, decode(facts))
    return Exam(bundle, source, split, pairs, autocast(device, precision))
