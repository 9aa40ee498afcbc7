"""m1clip compare: measure the training step in many configurations within a time budget."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

from m1clip import __version__
from m1clip.bench.configurations import Configuration, groups, model_shape, precisions_of
from m1clip.bench.cost_model import Result, cost_models, crossovers, save_measured
from m1clip.bench.options import CompareOptions
from m1clip.bench.verdict import verdict
from m1clip.bench.worker import MeasurementError, Worker
from m1clip.errors import UserError
from m1clip.hardware.device import available
from m1clip.hardware.facts import Facts, read_facts
from m1clip.hardware.timing import remarks, timing
from m1clip.io import write_json
from m1clip.model.clip import count_parameters
from m1clip.model.presets import flops_per_pair, preset
from m1clip.runlog import json_safe

FORMAT, VERSION = "m1clip-comparison", 2
ABSENT = {"cuda": "no CUDA GPU that torch can use", "mps": "no Apple GPU (MPS) that torch can use"}
MAX_STEPS = 20  # per round
MIN_ROUNDS, MAX_ROUNDS, MAX_SWEEP_ROUNDS = 3, 15, 4
ROUND_SECONDS, SWEEP_ROUND_SECONDS = 1.0, 0.3  # per configuration in one round: one slow step, or many fast ones
COMPILE_SECONDS = 60.0  # a guess
ALWAYS_SECONDS = 2.0  # a configuration that needs less than this is measured as long as any time is left
ASSUMED_GEMM_FRACTION = 0.3  # of the GEMM rate, until a model has been measured on a device
BYTES_PER_PARAMETER = 20  # weights, gradients, optimizer state and a half-precision copy
MAX_MEMORY, MIN_FREE_MEMORY = 0.85, 0.35  # of free memory, for one configuration; of total memory, to open another one


def compare(options: CompareOptions, folder: Path, show: Callable[[str, float], None]) -> dict[str, Any]:
    """Run a comparison and write comparison.json; `show` receives a message and the fraction of time used."""
    facts = read_facts()
    for name in options.model:
        preset(name)  # raises for an unknown name
    for name in options.device:
        if name not in available(facts):
            raise UserError(f"--device {name}: not available on this machine (found: {', '.join(available(facts))})")
    folder.mkdir(parents=True, exist_ok=True)
    session = Session(options, facts, folder, show)
    try:
        session.run()
    finally:
        for worker in session.workers.values():
            worker.close()
    document = session.document
    if not document["results"]:
        reasons = "; ".join(dict.fromkeys(item["reason"] for item in document["skipped"]))
        raise UserError(f"nothing could be measured within {options.minutes:g} minutes: {reasons}")
    session.write(complete=True)
    save_measured(facts, document["results"])
    return document


@dataclass
class Open:
    """A configuration loaded in its worker process."""

    configuration: Configuration
    worker: Worker
    facts: dict[str, Any]
    rounds: list[dict[str, Any]] = field(default_factory=list)

    @property
    def samples(self) -> list[dict[str, float]]:
        """All timed steps."""
        return [sample for found in self.rounds for sample in found["samples"]]

    @property
    def step_seconds(self) -> float:
        """The most recent step time."""
        return self.samples[-1]["seconds"] if self.rounds else self.facts["last_warm_step_seconds"]


class Session:
    """One comparison: the results, the time budget, and a worker process for each variant."""

    def __init__(self, options: CompareOptions, facts: Facts, folder: Path, show: Callable[[str, float], None]) -> None:
        self.options, self.facts, self.folder = options, facts, folder
        self.begin, self.seconds = time.monotonic(), 60 * options.minutes
        self.show = lambda text: show(text, 1 - self.left / self.seconds)
        self.log = folder / "workers.log"
        self.log.write_bytes(b"")
        self.workers: dict[str, Worker] = {}
        self.start_seconds = 6.0  # from process start to first step: a guess, then the last measured one
        self.measured: dict[tuple[str, str], list[Result]] = {}  # by model and variant, from small batches to large
        self.failed: dict[tuple[str, str], int] = {}  # the batch size that did not fit
        missing = {"cuda": facts.cuda is None, "mps": not facts.mps}
        self.document: dict[str, Any] = {
            "format": FORMAT,
            "version": VERSION,
            "m1clip": __version__,
            "command": ["m1clip", *sys.argv[1:]],
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "facts": facts.to_dict(),
            "devices": [],
            "absent": {kind: reason for kind, reason in ABSENT.items() if missing[kind] and not options.device},
            "results": [],
            "skipped": [],
            "complete": False,
        }

    @property
    def left(self) -> float:
        """Seconds left in the budget."""
        return self.seconds - (time.monotonic() - self.begin)

    def device(self, kind: str) -> dict[str, Any]:
        """The results of `probe` for a device."""
        return next(device for device in self.document["devices"] if device["device"] == kind)

    def run(self) -> None:
        """Measure the devices, then each group of configurations."""
        for kind in available(self.facts):
            if kind in (self.options.device or available(self.facts)):
                self.probe(kind, precisions_of(self.facts, kind, self.options.precision))
        todo = groups(self.facts, self.options, [probe["device"] for probe in self.document["devices"]])
        waiting = sum(map(len, todo))
        for index, group in enumerate(todo):
            later = {c.variant for other in todo[index + 1 :] for c in other}
            rest = group
            while rest:
                opened, rest, waiting = self.open_group(rest, waiting)
                fair = self.left * len(opened) / max(1, len(opened) + waiting)
                self.measure(opened, fair, is_sweep=len(todo) > 1)
                for variant in [v for v in self.workers if v not in later]:
                    self.workers.pop(variant).close()

    def probe(self, kind: str, precisions: Sequence[str]) -> None:
        """Measure raw device speed."""
        self.show(f"{kind}: matrix multiplication, memory bandwidth, kernel launch")
        worker = Worker(self.log)
        try:
            self.document["devices"].append(worker.call("probe", max(60.0, self.left), kind, precisions))
        except MeasurementError as error:
            self.document["absent"][kind] = f"it could not be measured ({error.reason})"
        finally:
            worker.close()

    def open_group(self, group: list[Configuration], waiting: int) -> tuple[list[Open], list[Configuration], int]:
        """Open as many configurations as fit in memory together; also returns the rest and the number still waiting."""
        opened: list[Open] = []
        for index, configuration in enumerate(group):
            memory = psutil.virtual_memory()
            if opened and memory.available < MIN_FREE_MEMORY * memory.total:
                return opened, group[index:], waiting
            reason = self.obstacle(configuration, self.left / max(1, waiting))
            waiting -= 1
            if reason:
                self.skip(configuration, *reason)
            elif item := self.open(configuration):
                opened.append(item)
        return opened, [], waiting

    def obstacle(self, c: Configuration, fair: float) -> tuple[str, str] | None:
        """Why to skip a configuration: (kind, reason); `fair` is the average time left per waiting configuration."""
        if (failed := self.failed.get((c.model, c.variant))) is not None:
            return "memory", f"batch {failed} did not fit"
        seconds, size = self.predict(c)
        memory = psutil.virtual_memory().available if c.device == "cpu" else self.device(c.device)["memory_bytes"]
        if size > MAX_MEMORY * memory:
            return "memory", f"needs about {size / 1e9:.0f} GB of {memory / 1e9:.0f} GB"
        needed = seconds * (MIN_ROUNDS + 2) + COMPILE_SECONDS * c.compile
        needed += 0 if c.variant in self.workers else self.start_seconds
        is_needed = len(self.document["results"]) + len(self.workers) < 2  # a comparison needs two
        allowed = self.left if is_needed else max(2 * fair, min(ALWAYS_SECONDS, self.left))
        if needed > allowed:
            return "time", f"needs about {needed:.0f} s: too long for --minutes {self.options.minutes:g}"
        return None

    def predict(self, c: Configuration) -> tuple[float, float]:
        """Predicted step seconds and peak bytes, from smaller batches of the same model or from its FLOPs."""
        shape, tokens = model_shape(c.model)
        rate = ASSUMED_GEMM_FRACTION * self.device(c.device)["gemm_flops"][c.precision]
        seconds = c.batch_size * flops_per_pair(shape, tokens) / rate
        size = float(BYTES_PER_PARAMETER * count_parameters(shape))
        if before := self.measured.get((c.model, c.variant)):
            taken, grow = before[-1]["seconds"]["median"], c.batch_size / before[-1]["configuration"]["batch_size"]
            # A small step is mostly fixed cost: it grows with its FLOPs, at most in proportion.
            seconds = min(grow * taken, taken + seconds * (1 - 1 / grow))
            size += grow * max(0.0, (before[-1]["peak_bytes"] or 0) - size)
        return seconds, size

    def open(self, configuration: Configuration) -> Open | None:
        """Open a configuration in its worker and warm it up; None, with the reason recorded, if it fails."""
        self.show(f"{configuration.label}: first steps")
        worker, begin = self.workers.get(configuration.variant), time.monotonic()
        is_new = worker is None or not worker.alive
        if worker is None or not worker.alive:
            worker = self.workers[configuration.variant] = Worker(self.log)
        try:
            facts = worker.call("open", max(60.0, self.left), configuration, 0.1 * self.left)
        except MeasurementError as error:
            self.skip(configuration, error.kind, error.reason)
            return None
        if is_new and not configuration.compile:
            self.start_seconds = time.monotonic() - begin
        return Open(configuration, worker, facts)

    def measure(self, group: list[Open], seconds: float, is_sweep: bool) -> None:
        """Run at least three rounds in alternating order, more within `seconds`; then check the gradients."""
        deadline = self.left - seconds
        for number in range(MAX_SWEEP_ROUNDS if is_sweep else MAX_ROUNDS):
            needed = sum(max(1.0, item.step_seconds) for item in group)
            # The gradients take about as long as two rounds.
            if number and self.left - 3 * needed < (deadline if number >= MIN_ROUNDS else 0):
                break
            for item in list(group)[:: 1 if number % 2 == 0 else -1]:
                self.show(f"{item.configuration.label}: round {number + 1}")
                most = SWEEP_ROUND_SECONDS if is_sweep else ROUND_SECONDS
                count = max(1, min(MAX_STEPS, round(most / max(item.step_seconds, 1e-4))))
                timeout = max(60.0, 10 * count * item.step_seconds)
                try:
                    item.rounds.append(item.worker.call("steps", timeout, count, most))
                except MeasurementError as error:
                    self.skip(item.configuration, error.kind, error.reason)
                    group.remove(item)
        for item in group:
            self.finish(item)

    def finish(self, item: Open) -> None:
        """Check the gradient once for each model and variant, and write the result."""
        c = item.configuration
        earlier = self.measured.setdefault((c.model, c.variant), [])
        difference = earlier[0]["gradient_difference"] if earlier else None
        if difference is None and self.left > 0:
            self.show(f"{c.label}: gradient")
            try:
                difference = item.worker.call("gradient_difference", max(60.0, 60 * item.step_seconds))
            except MeasurementError as error:
                self.skip(c, error.kind, f"gradient: {error.reason}")
        earlier.append(summarize(item, difference, self.device(c.device)["gemm_flops"][c.precision]))
        self.document["results"].append(earlier[-1])
        self.write()

    def skip(self, configuration: Configuration, kind: str, reason: str) -> None:
        """Record why a configuration was not measured."""
        if kind == "memory":
            self.failed.setdefault((configuration.model, configuration.variant), configuration.batch_size)
        self.document["skipped"].append({"label": configuration.label, "kind": kind, "reason": reason})
        self.write()

    def write(self, complete: bool = False) -> None:
        """Write all results so far, with their verdict."""
        document = self.document
        document["complete"] = complete
        document["cost_models"] = cost_models(document["results"])
        document["crossovers"] = crossovers(document["results"], document["cost_models"])
        document["verdict"] = verdict(document)
        write_json(self.folder / "comparison.json", json_safe(document))


def summarize(item: Open, gradient_difference: float | None, gemm_flops: float) -> Result:
    """One result."""
    seconds = [sample["seconds"] for sample in item.samples]
    taken = timing(seconds)
    joules = [found["joules"] for found in item.rounds if found["joules"] is not None]
    load = [found["other_load"] for found in item.rounds if found["other_load"] is not None]
    phases = {name: statistics.median(s.get(name, 0.0) for s in item.samples) for name in item.samples[0]}
    return {
        "configuration": item.configuration.to_dict(),
        **item.facts,
        "seconds": asdict(taken),
        "phases": {name: value for name, value in phases.items() if name != "seconds"},
        "images_per_second": item.configuration.batch_size / taken.median,
        "gemm_fraction": item.facts["flops"] / taken.median / gemm_flops,
        "peak_bytes": item.rounds[-1]["peak_bytes"],
        "joules_per_step": sum(joules) / len(seconds) if joules else None,
        "gradient_difference": gradient_difference,
        "warnings": remarks(seconds, statistics.median(load) if load else None),
    }
