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
from m1clip.files import write_json
from m1clip.hardware.clock import BUSY, timing
from m1clip.hardware.device import Device, Kind, Precision, available, rules
from m1clip.hardware.facts import Facts
from m1clip.hardware.heap import return_freed_memory
from m1clip.hardware.load import Load
from m1clip.model.clip import Clip
from m1clip.model.shape import ClipShape
from m1clip.train.memory import stand_in
from m1clip.train.parity import PAIRS, TOLERANCE, few, gradient, relative_difference
from m1clip.train.precision import autocast
from m1clip.train.update import Update

MOST_SECONDS = 30.0
LEAST_STEPS, MOST_STEPS = 2, 5
PROBE_BATCH = 128  # a larger one tells nothing new, and takes longer


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
    batch = min(config.train.batch or PROBE_BATCH, PROBE_BATCH)
    path = (
        (folder or user_cache())
        / "choices"
        / f"{_key(config, shape, facts, batch, text_tokens, options)}.json"
    )
    kept = _read(path, options)
    if kept is not None:
        return kept
    begin, tried = time.monotonic(), []
    several = config.data.captions_per_step or 1
    torch.manual_seed(config.seed)
    pairs = stand_in(shape, PAIRS, text_tokens, eot_id, several)
    truth = _reference(config, shape, eot_id, facts, pairs)
    batch = affordable(batch, (time.monotonic() - begin) / PAIRS, len(options))
    work = stand_in(shape, batch, text_tokens, eot_id, several)
    for index, (kind, precision) in enumerate(options):
        left = MOST_SECONDS - (time.monotonic() - begin)
        share = left / (len(options) - index)
        tried.append(
            (measure or try_step)(config, shape, eot_id, facts, kind, precision, pairs, truth, work, share)
        )
    pace, busy = paces(tried)
    if not pace:
        raise UserError(
            f"no device passed its test: {'; '.join(f'{t.device} {t.precision}: {t.out}' for t in tried)}"
        )
    best = min(pace, key=lambda t: pace[t])
    choice = Choice(best.device, best.precision, tuple(tried), batch)
    if not busy:  # else it holds for this run, and the next one measures again
        with contextlib.suppress(OSError):  # a home that cannot be written: it will be measured again
            write_json(path, choice.to_dict())
    return choice


def affordable(batch: int, pair_seconds: float, options: int) -> int:
    """A batch small enough for three steps of each option within the time, if all were as slow as the CPU in fp32."""
    most = int(MOST_SECONDS / (3 * options) / max(pair_seconds, 1e-9))
    return max(min(batch, PAIRS), min(batch, most))


def try_step(
    config: Config, shape: ClipShape, eot_id: int, facts: Facts, kind: Kind, precision: Precision, pairs: Any,
    truth: torch.Tensor, work: Any, seconds: float,
) -> Tried:  # fmt: skip
    """The real step of one candidate: gradients first, then as many timed steps as fit."""
    device = Device(kind, facts)
    context = autocast(device, precision)
    try:
        model = _model(
            config, shape, eot_id, device, "sdpa" if kind != "cpu" or precision == "fp32" else "bmm"
        )
        apart = relative_difference(
            gradient(model, few(pairs), Preprocess(image_size=shape.image_size), context), truth
        )
        if apart > TOLERANCE[precision]:
            return Tried(kind, precision, None, apart, f"gradients {apart:.0%} off the CPU's")
        model.zero_grad(set_to_none=True)
        plain = dataclasses.replace(config, model=dataclasses.replace(config.model, compile=False))
        if not plain.train.batch:
            plain = dataclasses.replace(
                plain, train=dataclasses.replace(plain.train, batch=len(pairs.pixels))
            )
        update = Update(model, plain, device, precision, Preprocess(image_size=shape.image_size), context)
        load = Load()
        taken, used = _timed(update, work, device, seconds)
        return Tried(kind, precision, taken, apart, processor_seconds=used, others=load.others())
    except torch.OutOfMemoryError:
        return Tried(kind, precision, None, None, "does not fit its memory")
    except RuntimeError as error:
        return Tried(kind, precision, None, None, str(error).strip().splitlines()[0][:120])
    finally:
        update = model = None  # type: ignore[assignment]
        device.reset_peak()
        return_freed_memory()


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


def _model(config: Config, shape: ClipShape, eot_id: int, device: Device, attention: Any) -> Clip:
    torch.manual_seed(config.seed)
    # CLIP's start values, not zeros: behind silent branches the gradient is nothing but rounding (parity.stirred).
    model = Clip(dataclasses.replace(shape, dropout=0.0, init="clip"), eot_id).to(device.torch)
    model.set_attention(attention, attention)
    model.set_recompute(config.model.recompute)
    return model


def _reference(config: Config, shape: ClipShape, eot_id: int, facts: Facts, pairs: Any) -> torch.Tensor:
    """The gradient that the others must have: the CPU's in fp32."""
    host = _model(config, shape, eot_id, Device("cpu", facts), "sdpa")
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
        "facts": facts.to_dict(), "shape": shape.to_dict(), "batch": batch, "tokens": text_tokens,
        "options": options, "optim": config.optim.name, "recompute": config.model.recompute,
        "chunk": config.train.chunk, "several": config.data.captions_per_step,
        "threads": torch.get_num_threads(), "m1clip": __version__,
    }  # fmt: skip
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:24]


def _read(path: Path, options: list[tuple[Kind, Precision]]) -> Choice | None:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        tried = tuple(Tried(**item) for item in values["tried"])
        chosen, batch = (values["device"], values["precision"]), int(values["batch"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return Choice(*chosen, tried, batch, cached=True) if chosen in options else None
