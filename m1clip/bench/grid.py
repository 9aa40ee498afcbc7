"""Which candidates a comparison tries, the most telling first: a function of the machine and of what was asked."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from m1clip.bench.candidate import Candidate
from m1clip.errors import UserError
from m1clip.hardware.device import available, rules
from m1clip.hardware.facts import Facts

SIZES = ("tiny", "small", "ViT-B-32", "200M", "500M", "1B")
ATTENTION = {"cpu": ("bmm", "sdpa"), "mps": ("sdpa", "bmm"), "cuda": ("sdpa", "bmm")}  # the usual one first


def devices_of(facts: Facts, asked: Sequence[str]) -> tuple[str, ...]:
    """The devices to compare; one that is asked for and missing is an error."""
    there = available(facts)
    for name in asked:
        if name not in there:
            raise UserError(f"--devices {name}: this machine has none (found: {', '.join(there)})")
    return tuple(asked) or there


def precisions_of(facts: Facts, kind: str, asked: Sequence[str]) -> tuple[str, ...]:
    """The precisions to compare on a device: what it can do, fp16 only when asked for."""
    possible = rules(kind, facts).precisions  # type: ignore[arg-type]
    return tuple(name for name in possible if (name in asked if asked else name != "fp16"))


def graphs(facts: Facts, kind: str) -> bool:
    """Whether `train` replays steps on this device."""
    return rules(kind, facts).graphs  # type: ignore[arg-type]


def focus(
    facts: Facts, model: str, batches: Sequence[int], devices: Sequence[str], precisions: Sequence[str],
    optimizer: str, full: bool = False,
) -> list[Candidate]:  # fmt: skip
    """Every device, precision and batch; then attention, compile, threads and recomputation at the first batch.

    The extras vary one thing at a time from each device's likely best; `full` takes the whole product instead.
    """
    base = []
    for batch in batches:
        for kind in devices:
            for precision in reversed(precisions_of(facts, kind, precisions)):  # bf16 first
                base.append(Candidate(
                    model=model, batch=batch, device=kind, precision=precision, attention=ATTENTION[kind][0],
                    optimizer=optimizer, graph=graphs(facts, kind),
                ))  # fmt: skip
    if full:
        return _unique(_product(base, devices, facts))
    extras = []
    for kind in devices:
        likely = next(c for c in base if c.device == kind)
        plain = [c for c in base if c.device == kind and c.batch == likely.batch]
        extras += [dataclasses.replace(c, attention=ATTENTION[kind][1]) for c in plain]
        if kind == "cpu" and facts.performance_cores > 1:
            extras.append(dataclasses.replace(likely, threads=max(1, facts.performance_cores // 2)))
        if likely.graph:
            extras.append(dataclasses.replace(likely, graph=False))
        if kind == "cuda":
            extras.append(dataclasses.replace(likely, device="hybrid", graph=False))
        extras.append(dataclasses.replace(likely, recompute=True))
        extras.append(
            dataclasses.replace(likely, compile=True)
        )  # last: the compiler alone takes a minute or two
    return _unique([*base, *extras])


def _product(base: list[Candidate], devices: Sequence[str], facts: Facts) -> Iterable[Candidate]:
    for candidate in base:
        for attention in ATTENTION[candidate.device]:
            for compiled in (False, True):
                yield dataclasses.replace(candidate, attention=attention, compile=compiled)


def _unique(candidates: Iterable[Candidate]) -> list[Candidate]:
    return list(dict.fromkeys(candidates))


def sweep(
    facts: Facts, sizes: Sequence[str], batches: Sequence[int], devices: Sequence[str], precisions: Sequence[str],
    optimizer: str,
) -> list[list[Candidate]]:  # fmt: skip
    """For each size, batches from small to large, and in each the ways that are to be measured in turn."""
    groups = []
    for model in sizes:
        for batch in sorted(batches):
            groups.append([
                Candidate(model=model, batch=batch, device=kind, precision=precision, attention=ATTENTION[kind][0],
                          optimizer=optimizer, graph=graphs(facts, kind))
                for precision in sorted({p for kind in devices for p in precisions_of(facts, kind, precisions)})
                for kind in devices
                if precision in precisions_of(facts, kind, precisions)
            ])  # fmt: skip
    return groups
