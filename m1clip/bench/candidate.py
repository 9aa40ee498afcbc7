"""One way of doing the same training step: what is compared."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from m1clip.config import Config, DataConfig, ModelConfig, OptimConfig, TextConfig, TrainConfig
from m1clip.data.cache import user_cache
from m1clip.errors import UserError
from m1clip.hardware.device import available, rules
from m1clip.hardware.facts import Facts
from m1clip.io import read_small, write_json
from m1clip.model.presets import preset

PRIOR_ART_ALPHABET = "abcdefghijklmnopqrstuvwxyz ,."  # with the four marks: its vocabulary of 33
PROBE_PAIRS = 64  # images drawn for a measurement, at least


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A model and a batch on a device, and how its arithmetic is done there."""

    model: str
    batch: int
    device: str  # cpu, mps, cuda, or hybrid: image tower on the accelerator, text tower on the CPU
    precision: str
    attention: str = "sdpa"
    compile: bool = False
    graph: bool = False  # CUDA: the step is recorded and replayed, as `train` does with a small model
    threads: int = 0  # 0 = one a physical core
    recompute: bool = False
    optimizer: str = "muon"

    @property
    def label(self) -> str:
        """A short name, unique within a comparison: only what differs from the usual is said."""
        words = [self.model, f"batch {self.batch}", self.device, self.precision, self.attention]
        words += ["compiled"] if self.compile else []
        words += ["replayed"] if self.graph else []
        words += [f"{self.threads} thread{'s' * (self.threads > 1)}"] if self.threads else []
        words += ["recompute"] if self.recompute else []
        return " ".join(words)

    @property
    def way(self) -> str:
        """The label without model and batch."""
        return self.label.removeprefix(f"{self.model} batch {self.batch} ")

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)


def text_config(model: str) -> TextConfig:
    """The tokenizer that gives a preset the vocabulary of its table; `tiny` has no fixed one and takes train's."""
    if preset(model).vocab_size == len(PRIOR_ART_ALPHABET) + 4:
        return TextConfig(tokenizer="char", alphabet=PRIOR_ART_ALPHABET)
    return TextConfig(tokenizer="bpe-cut" if model == "tiny" else "bpe")


def config_of(candidate: Candidate, images: int) -> Config:
    """The run's config for a candidate, on synthetic images."""
    batch = max(candidate.batch, 2)  # batch 1 has no contrast: the worker cuts a batch of 2
    device: Any = candidate.device
    attention: Any = candidate.attention
    return Config(
        model=ModelConfig(
            preset=candidate.model,
            attention_image=attention,
            attention_text=attention,
            recompute=candidate.recompute,
            compile=candidate.compile,
            graph=candidate.graph,
        ),
        text=text_config(candidate.model),
        data=DataConfig(train_count=max(images, batch), val_count=1, test_count=1, cache="ram", captions_per_step=1),
        optim=OptimConfig(name=candidate.optimizer),  # type: ignore[arg-type]
        train=TrainConfig(
            batch=batch,
            device=device if device != "hybrid" else "cpu",
            precision=candidate.precision,  # type: ignore[arg-type]
            threads=candidate.threads,
            steps=10_000,
        ),
    )


def with_batch(config: Config, batch: int) -> Config:
    """The same run with another batch."""
    return dataclasses.replace(config, train=dataclasses.replace(config.train, batch=max(batch, 2)))


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
        extras.append(dataclasses.replace(likely, compile=True))  # last: the compiler alone takes a minute or two
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


KEPT = ("parameters", "flops", "joules_per_step", "gemm_share")


def machine_key(facts: Facts) -> str:
    """A machine with its torch: figures of another one say nothing here."""
    values = facts.to_dict()
    values.pop("python")
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]


def remember(facts: Facts, results: list[dict[str, Any]], folder: Path | None = None) -> None:
    """Keep the results; newer ones of the same candidate take the place of older ones."""
    path = _path(facts, folder)
    kept = {json.dumps(item["candidate"], sort_keys=True): item for item in recall(facts, folder)}
    for r in results:
        line = {"candidate": r["candidate"], "seconds": r["seconds"]["median"], **{key: r[key] for key in KEPT}}
        kept[json.dumps(r["candidate"], sort_keys=True)] = line
    try:
        write_json(path, {"results": list(kept.values())})
    except OSError:
        return  # a home that cannot be written: the comparison itself stands in its own folder


def recall(facts: Facts, folder: Path | None = None) -> list[dict[str, Any]]:
    """What is known of this machine; empty where nothing is."""
    try:
        return list(json.loads(read_small(_path(facts, folder), 2**26))["results"])
    except (OSError, ValueError, KeyError, TypeError):
        return []


def _path(facts: Facts, folder: Path | None) -> Path:
    return (folder or user_cache()) / "compare" / f"{machine_key(facts)}.json"
