"""--device auto, --precision auto: measure the real step on what this machine has, take the fastest that is right."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from m1clip import __version__
from m1clip.config import Config
from m1clip.data.cache_place import user_cache
from m1clip.data.preprocess import Preprocess
from m1clip.errors import UserError
from m1clip.files import read_small, write_json
from m1clip.hardware.clock import BUSY, timing
from m1clip.hardware.device import Device, Kind, Precision, available, rules
from m1clip.hardware.facts import Facts
from m1clip.hardware.heap import map_large_blocks, return_freed_memory
from m1clip.hardware.load import Load
from m1clip.model.attention import AttentionKind
from m1clip.model.clip import Clip
from m1clip.model.shape import ClipShape
from m1clip.train.memory import stand_in
from m1clip.train.parity import PAIRS, TOLERANCE, few, gradient, relative_difference
from m1clip.train.precision import autocast
from m1clip.train.update import Update

MOST_SECONDS = 30.0
SHARE = 0.05  # of --minutes, at most
LEAST_STEPS, MOST_STEPS = 2, 5
CLEAR = 1.5  # times faster: other programs do not make up that much
PROBE_BATCH = 64  # a larger one tells nothing new, and takes longer


@dataclass(frozen=True)
class Tried:
    """One device and precision: its step, or why it is out."""

    device: Kind
    precision: Precision
    step_seconds: float | None
    gradient_difference: float | None
    out: str = ""
    processor_seconds: float | None = None  # of a step, over all threads
    others: float | None = None  # share of the processors that other programs took meanwhile


def paces(tried: Sequence[Tried]) -> tuple[dict[Tried, float], bool]:
    """What those who passed are judged by, and whether the machine was busy.

    Seconds; beside other programs, where only the CPU is tried, its processor time: they were measured one after
    another, and the others may have come in between.
    """
    good = [t for t in tried if t.step_seconds is not None]
    busy = any(t.others is not None and t.others > BUSY for t in good)
    if busy and all(t.device == "cpu" and t.processor_seconds for t in good):
        return {t: t.processor_seconds or 0.0 for t in good}, True
    return {t: t.step_seconds or 0.0 for t in good}, busy


@dataclass(frozen=True)
class Choice:
    """What to use, and the measurements behind it (none where there was nothing to choose)."""

    device: Kind
    precision: Precision
    tried: tuple[Tried, ...] = ()
    batch: int = 0
    cached: bool = False

    @property
    def why(self) -> str:
        """In brackets behind the device's name; empty where nothing was measured."""
        pace, busy = paces(self.tried)
        mine = next((t for t in pace if (t.device, t.precision) == (self.device, self.precision)), None)
        others = [t for t in self.tried if t is not mine]
        if mine is None or not others:
            return ""
        words = []
        for t in others:
            one = f"{t.device} {t.precision}"
            words.append(f"{pace[t] / pace[mine]:.1f}x {one}" if t in pace else f"{one} out: {t.out}")
        when = " before" if self.cached else " beside other programs" if busy else ""
        return f"step of {self.batch} measured{when}: {', '.join(words)}"

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for the run's log and the cache."""
        return {**dataclasses.asdict(self), "tried": [dataclasses.asdict(t) for t in self.tried]}


def candidates(device: str, precision: str, facts: Facts) -> list[tuple[Kind, Precision]]:
    """What may be chosen among: a named device or precision leaves one, and what the rules know is not measured."""
    found: list[tuple[Kind, Precision]] = []
    for kind in available(facts):
        if device not in ("auto", kind):
            continue
        rule = rules(kind, facts)
        usual: list[Precision] = {"yes": ["bf16"], "no": ["fp32"], "measure": ["fp32", "bf16"]}[rule.bf16]  # type: ignore[assignment]
        named = [p for p in rule.precisions if p == precision]
        found += [(kind, p) for p in (usual if precision == "auto" else named)]
    return found


def choose(
    config: Config, shape: ClipShape, eot_id: int, facts: Facts, text_tokens: int, folder: Path | None = None,
    measure: Callable[..., Tried] | None = None,
) -> Choice:  # fmt: skip
    """The fastest device and precision for this model; measured for at most half a minute, or read from the cache."""
    options = candidates(config.train.device, config.train.precision, facts)
    if len(options) == 1:
        return Choice(*options[0])
    # Half of the run's: fp32 keeps twice as much as bf16, and measuring should not take more memory than the run.
    batch = min(-(-(config.train.batch or 0) // 2) or PROBE_BATCH, PROBE_BATCH)
    path = (
        (folder or user_cache())
        / "choices"
        / f"{_key(config, shape, facts, batch, text_tokens, options)}.json"
    )
    kept = _read(path, options)
    if kept is not None:
        return kept
    if measure is not None:
        tried = [measure(config, shape, eot_id, facts, kind, precision) for kind, precision in options]
    else:
        minutes = config.train.minutes
        most = MOST_SECONDS if minutes is None else min(MOST_SECONDS, SHARE * 60 * minutes)
        found = _measured(config, shape, eot_id, facts, options, text_tokens, batch, most)
        if found is None:
            return Choice(*options[0])
        tried, batch = found
    pace, busy = paces(tried)
    if not pace:
        raise UserError(
            f"no device passed its test: {'; '.join(f'{t.device} {t.precision}: {t.out}' for t in tried)}"
        )
    best = min(pace, key=lambda t: pace[t])
    choice = Choice(best.device, best.precision, tuple(tried), batch)
    clear = all(seconds >= CLEAR * pace[best] for t, seconds in pace.items() if t is not best)
    if clear or not busy:  # else it holds for this run, and the next one measures again
        with contextlib.suppress(OSError):  # a home that cannot be written: it will be measured again
            write_json(path, choice.to_dict())
    return choice


def affordable(batch: int, pair_seconds: float, options: int, seconds: float = MOST_SECONDS) -> int:
    """A batch small enough for three steps of each option within the time, if all were as slow as the CPU in fp32."""
    most = int(seconds / (3 * options) / max(pair_seconds, 1e-9))
    return max(min(batch, PAIRS), min(batch, most))


def _measured(
    config: Config, shape: ClipShape, eot_id: int, facts: Facts, options: list[tuple[Kind, Precision]],
    text_tokens: int, batch: int, most: float,
) -> tuple[list[Tried], int] | None:  # fmt: skip
    """Gradients of all candidates first, then their steps: so the peak of memory is that of a step.

    None where the gradients alone would take more than `most` seconds.
    """
    begin = time.monotonic()
    map_large_blocks()
    several = config.data.captions_per_step or 1
    torch.manual_seed(config.seed)
    pairs = stand_in(shape, PAIRS, text_tokens, eot_id, several)
    truth = _reference(config, shape, eot_id, facts, pairs)
    spent = time.monotonic() - begin
    if spent * (1 + len(options)) > most:
        return None
    batch = affordable(batch, spent / PAIRS, len(options), most)
    checked = [
        check_gradient(config, shape, eot_id, facts, kind, precision, pairs, truth)
        for kind, precision in options
    ]
    del truth
    return_freed_memory()
    work = stand_in(shape, batch, text_tokens, eot_id, several)
    tried = []
    for index, candidate in enumerate(checked):
        share = (most - (time.monotonic() - begin)) / (len(checked) - index)
        tried.append(
            candidate if candidate.out else time_step(config, shape, eot_id, facts, candidate, work, share)
        )
    return tried, batch


def check_gradient(
    config: Config, shape: ClipShape, eot_id: int, facts: Facts, kind: Kind, precision: Precision, pairs: Any,
    truth: torch.Tensor,
) -> Tried:  # fmt: skip
    """A candidate, with how far its gradient is from the true one; out where that is too far."""
    device = Device(kind, facts)

    def apart() -> float:
        model = _model(config, shape, eot_id, device, precision)
        here = gradient(
            model, few(pairs), Preprocess(image_size=shape.image_size), autocast(device, precision)
        )
        del model
        return relative_difference(here, truth)

    found = _within_reason(device, precision, lambda: Tried(kind, precision, None, apart()))
    if found.gradient_difference is not None and found.gradient_difference > TOLERANCE[precision]:
        return dataclasses.replace(found, out=f"gradients {found.gradient_difference:.0%} off the CPU's")
    return found


def time_step(
    config: Config, shape: ClipShape, eot_id: int, facts: Facts, candidate: Tried, work: Any, seconds: float
) -> Tried:
    """The real step of a candidate, as many times as fit."""
    kind, precision = candidate.device, candidate.precision
    device = Device(kind, facts)
    plain = dataclasses.replace(config, model=dataclasses.replace(config.model, compile=False))
    if not plain.train.batch:
        plain = dataclasses.replace(plain, train=dataclasses.replace(plain.train, batch=len(work.pixels)))

    def timed() -> Tried:
        model = _model(config, shape, eot_id, device, precision)
        preprocess = Preprocess(image_size=shape.image_size)
        update = Update(model, plain, device, precision, preprocess, autocast(device, precision))
        update.settles = (
            False  # blocks stay mapped one by one: kept ones would lie scattered when the run begins
        )
        load = Load()
        taken, used = _timed(update, work, device, seconds)
        return dataclasses.replace(
            candidate, step_seconds=taken, processor_seconds=used, others=load.others()
        )

    return _within_reason(device, precision, timed)


def _within_reason(device: Device, precision: Precision, work: Callable[[], Tried]) -> Tried:
    """What comes of it, or why a device cannot do it; its memory is given back, and its peak forgotten."""
    try:
        return work()
    except torch.OutOfMemoryError:
        return Tried(device.kind, precision, None, None, "does not fit its memory")
    except RuntimeError as error:
        return Tried(device.kind, precision, None, None, str(error).strip().splitlines()[0][:120])
    finally:
        return_freed_memory()
        device.reset_peak()  # the run reports its own


def _timed(update: Update, pairs: Any, device: Device, seconds: float) -> tuple[float, float]:
    """Seconds and processor seconds of a step."""
    begin, taken, used = time.monotonic(), [], []
    for number in range(1 + MOST_STEPS):
        start, before = time.perf_counter(), time.process_time()
        update(pairs, number + 1, 100, 10_000)
        device.synchronize()
        taken.append(time.perf_counter() - start)
        used.append(time.process_time() - before)
        # The first is cold; it counts only where there is no time for another.
        if len(taken) > LEAST_STEPS and time.monotonic() - begin + taken[-1] > seconds:
            break
        if time.monotonic() - begin > seconds:
            break
    # On a busy machine the low quartile says more about the device than the median.
    return timing(taken[1:] or taken).low, timing(used[1:] or used).low


def _model(config: Config, shape: ClipShape, eot_id: int, device: Device, precision: Precision) -> Clip:
    torch.manual_seed(config.seed)
    attention: AttentionKind = "sdpa" if device.kind != "cpu" or precision == "fp32" else "bmm"
    # CLIP's start values, not zeros: behind silent branches the gradient is nothing but rounding (parity.stirred).
    model = Clip(dataclasses.replace(shape, dropout=0.0, init="clip"), eot_id).to(device.torch)
    model.set_attention(attention, attention)
    model.set_recompute(config.model.recompute)
    return model


def _reference(config: Config, shape: ClipShape, eot_id: int, facts: Facts, pairs: Any) -> torch.Tensor:
    """The gradient that the others must have: the CPU's in fp32."""
    host = _model(config, shape, eot_id, Device("cpu", facts), "fp32")
    return gradient(host, few(pairs), Preprocess(image_size=shape.image_size), contextlib.nullcontext)


def _key(
    config: Config,
    shape: ClipShape,
    facts: Facts,
    batch: int,
    text_tokens: int,
    options: list[tuple[Kind, Precision]],
) -> str:
    """This machine, this model, these versions: anything else measures anew."""
    values = {
        "format": 2,  # choices of the first may have been made beside other programs
        "facts": facts.to_dict(), "shape": shape.to_dict(), "batch": batch, "tokens": text_tokens,
        "options": options, "optim": config.optim.name, "recompute": config.model.recompute,
        "chunk": config.train.chunk, "several": config.data.captions_per_step,
        "threads": torch.get_num_threads(), "m1clip": __version__,
    }  # fmt: skip
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:24]


def _read(path: Path, options: list[tuple[Kind, Precision]]) -> Choice | None:
    try:
        values = json.loads(read_small(path))
        tried = tuple(Tried(**item) for item in values["tried"])
        chosen, batch = (values["device"], values["precision"]), int(values["batch"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return Choice(*chosen, tried, batch, cached=True) if chosen in options else None
