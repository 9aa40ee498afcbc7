"""m1clip compare: measure the training step in many configurations within a time budget."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

from m1clip import __version__
from m1clip.bench.configurations import Configuration, Result, groups, model_shape, precisions_of
from m1clip.bench.cost_model import save_measured
from m1clip.bench.options import CompareOptions
from m1clip.bench.report import verdict
from m1clip.bench.worker import MeasurementError, Worker
from m1clip.errors import UserError
from m1clip.hardware.device import available
from m1clip.hardware.facts import Facts, read_facts
from m1clip.hardware.timing import remarks, timing
from m1clip.io import write_json
from m1clip.model.clip import count_parameters
from m1clip.model.presets import flops_per_pair, preset
from m1clip.runlog import json_safe

FORMAT, VERSION = "m1clip-comparison", 3
MAX_STEPS = 20  # per round
MIN_ROUNDS, MAX_ROUNDS, MAX_SWEEP_ROUNDS = 3, 15, 4
ROUND_SECONDS, SWEEP_ROUND_SECONDS = 1.0, 0.3  # per configuration in one round: one slow step, or many fast ones
START_SECONDS, COMPILE_SECONDS = 6.0, 60.0  # of a worker process; guesses
ALWAYS_SECONDS = 2.0  # a configuration that needs less than this is measured as long as any time is left
ASSUMED_GEMM_FRACTION = 0.3  # of the GEMM rate, until a model has been measured on a device
BYTES_PER_PARAMETER = 20  # weights, gradients, optimizer state and a half-precision copy
MAX_MEMORY, MIN_FREE_MEMORY = 0.85, 0.35  # of free memory, for one configuration; of total memory, to open another one


def compare(options: CompareOptions, folder: Path, show: Callable[[str, float], None]) -> Session:
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
    if not session.results:
        reasons = "; ".join(dict.fromkeys(session.skipped.values()))
        raise UserError(f"nothing could be measured within {options.minutes:g} minutes: {reasons}")
    save_measured(facts, session.results)
    return session


@dataclass
class Open:
    """A configuration loaded in its worker process."""

    configuration: Configuration
    worker: Worker
    parameters: int
    flops: float
    step_seconds: float  # of the most recent step
    rounds: list[dict[str, Any]] = field(default_factory=list)

    def result(self, gradient_difference: float | None, gemm_flops: float) -> Result:
        """The summary of all rounds."""
        seconds = [value for found in self.rounds for value in found["seconds"]]
        joules = [found["joules"] for found in self.rounds if found["joules"] is not None]
        load = [found["other_load"] for found in self.rounds if found["other_load"] is not None]
        taken = timing(seconds)
        return Result(
            self.configuration,
            self.parameters,
            self.flops,
            taken,
            gemm_fraction=self.flops / taken.median / gemm_flops,
            peak_bytes=self.rounds[-1]["peak_bytes"],
            joules_per_step=sum(joules) / len(seconds) if joules else None,
            gradient_difference=gradient_difference,
            warnings=remarks(seconds, statistics.median(load) if load else None),
        )


class Session:
    """One comparison: the results, the time budget, and a worker process for each variant."""

    def __init__(self, options: CompareOptions, facts: Facts, folder: Path, show: Callable[[str, float], None]) -> None:
        self.options, self.facts, self.folder = options, facts, folder
        self.begin, self.seconds = time.monotonic(), 60 * options.minutes
        self.show = lambda text: show(text, 1 - self.left / self.seconds)
        self.log = folder / "workers.log"
        self.log.write_bytes(b"")
        self.workers: dict[str, Worker] = {}
        self.devices: dict[str, tuple[int, dict[str, float]]] = {}  # memory, and GEMM FLOP/s by precision
        self.results: list[Result] = []
        self.skipped: dict[str, str] = {}  # label -> reason
        self.failed: dict[tuple[str, str], int] = {}  # model and variant -> the smallest batch size that failed
        self.date = datetime.now(UTC).isoformat(timespec="seconds")

    @property
    def left(self) -> float:
        """Seconds left in the budget."""
        return self.seconds - (time.monotonic() - self.begin)

    def run(self) -> None:
        """Measure the devices, then each group of configurations."""
        for kind in available(self.facts):
            # MLX's build for Linux has no GPU: it is measured only on request.
            if kind in self.options.device or (not self.options.device and (kind != "mlx" or self.facts.mps)):
                self.probe(kind)
        todo = groups(self.facts, self.options, list(self.devices))  # type: ignore[arg-type]
        is_sweep, waiting = len(todo) > 1, sum(map(len, todo))
        while todo:
            group = todo.pop(0)
            later = {c.variant for other in todo for c in other}
            while group:
                opened = self.open_group(group, waiting)
                waiting = len(group) + sum(map(len, todo))
                fair = self.left * len(opened) / max(1, len(opened) + waiting)
                self.measure(opened, fair, is_sweep)
                for variant in [v for v in self.workers if v not in later]:
                    self.workers.pop(variant).close()
        self.write(complete=True)

    def probe(self, kind: Any) -> None:
        """Measure the speed of matrix multiplication on a device."""
        self.show(f"{kind}: matrix multiplication")
        worker = Worker(self.log)
        precisions = precisions_of(self.facts, kind, self.options.precision)
        try:
            self.devices[kind] = worker.call("probe", max(60.0, self.left), kind, precisions)
        except MeasurementError as error:
            self.skipped[kind] = str(error)
        finally:
            worker.close()

    def open_group(self, group: list[Configuration], waiting: int) -> list[Open]:
        """Take as many configurations from the group as fit in memory together, and open them."""
        opened: list[Open] = []
        while group:
            memory = psutil.virtual_memory()
            if opened and memory.available < MIN_FREE_MEMORY * memory.total:
                break
            configuration = group.pop(0)
            reason = self.obstacle(configuration, self.left / max(1, waiting))
            waiting -= 1
            if reason:
                self.skipped[configuration.label] = reason
            elif item := self.open(configuration):
                opened.append(item)
        return opened

    def obstacle(self, c: Configuration, fair: float) -> str:
        """Why to skip a configuration; `fair` is the average time left per waiting configuration."""
        if (failed := self.failed.get((c.model, c.variant))) is not None:
            return f"batch {failed} failed"
        seconds, size = self.predict(c)
        memory = psutil.virtual_memory().available if c.device == "cpu" else self.devices[c.device][0]
        if size > MAX_MEMORY * memory:
            return f"needs about {size / 1e9:.0f} GB of {memory / 1e9:.0f} GB"
        needed = seconds * (MIN_ROUNDS + 2) + COMPILE_SECONDS * c.compile
        needed += 0 if c.variant in self.workers else START_SECONDS
        is_needed = len(self.results) + len(self.workers) < 2  # a comparison needs two
        if needed > (self.left if is_needed else max(2 * fair, min(ALWAYS_SECONDS, self.left))):
            return f"needs about {needed:.0f} s: too long for --minutes {self.options.minutes:g}"
        return ""

    def predict(self, c: Configuration) -> tuple[float, float]:
        """Predicted step seconds and peak bytes, from smaller batches of the same model or from its FLOPs."""
        shape, tokens = model_shape(c.model)
        rate = ASSUMED_GEMM_FRACTION * self.devices[c.device][1][c.precision]
        seconds = c.batch_size * flops_per_pair(shape, tokens) / rate
        size = float(BYTES_PER_PARAMETER * count_parameters(shape))
        if before := self.measured(c):
            taken, grow = before[-1].seconds.median, c.batch_size / before[-1].configuration.batch_size
            # A small step is mostly fixed cost: it grows with its FLOPs, at most in proportion.
            seconds = min(grow * taken, taken + seconds * (1 - 1 / grow))
            size += grow * max(0.0, (before[-1].peak_bytes or 0) - size)
        return seconds, size

    def measured(self, c: Configuration) -> list[Result]:
        """Results of smaller batches with the same model and variant."""
        return [r for r in self.results if (r.configuration.model, r.configuration.variant) == (c.model, c.variant)]

    def open(self, configuration: Configuration) -> Open | None:
        """Open a configuration in its worker and warm it up; None, with the reason recorded, if it fails."""
        self.show(f"{configuration.label}: first steps")
        worker = self.workers.get(configuration.variant)
        if worker is None or not worker.alive:
            worker = self.workers[configuration.variant] = Worker(self.log)
        try:
            return Open(
                configuration, worker, *worker.call("open", max(60.0, self.left), configuration, 0.1 * self.left)
            )
        except MeasurementError as error:
            self.fail(configuration, str(error))
            return None

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
                try:
                    item.rounds.append(
                        item.worker.call("steps", max(60.0, 10 * count * item.step_seconds), count, most)
                    )
                    item.step_seconds = item.rounds[-1]["seconds"][-1]
                except MeasurementError as error:
                    self.fail(item.configuration, str(error))
                    group.remove(item)
        for item in group:
            self.finish(item)

    def finish(self, item: Open) -> None:
        """Check the gradient once for each model and variant, and write the result."""
        c = item.configuration
        earlier = self.measured(c)
        difference = earlier[0].gradient_difference if earlier else None
        if difference is None and (self.left > 0 or c.device != "cpu"):  # an accelerator is never named unchecked
            self.show(f"{c.label}: gradient")
            try:
                difference = item.worker.call("gradient_difference", max(60.0, 60 * item.step_seconds))
            except MeasurementError as error:
                self.fail(c, f"gradient: {error}")
        self.results.append(item.result(difference, self.devices[c.device][1][c.precision]))
        self.write()

    def fail(self, c: Configuration, reason: str) -> None:
        """Record a failure; larger batches of the same model and variant are not tried."""
        self.skipped[c.label] = reason
        self.failed.setdefault((c.model, c.variant), c.batch_size)

    def write(self, complete: bool = False) -> None:
        """Write all results so far, with their verdict."""
        document = {
            "format": FORMAT,
            "version": VERSION,
            "m1clip": __version__,
            "command": ["m1clip", *sys.argv[1:]],
            "date": self.date,
            "facts": self.facts.to_dict(),
            "gemm_flops": {kind: rates for kind, (_, rates) in self.devices.items()},
            "results": [asdict(r) for r in self.results],
            "skipped": self.skipped,
            "verdict": verdict(self.results),
            "complete": complete,
        }
        write_json(self.folder / "comparison.json", json_safe(document))
