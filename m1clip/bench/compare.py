"""m1clip compare: measure the training step in many configurations within a time budget."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import psutil

from m1clip import __version__
from m1clip.bench.report import verdict
from m1clip.bench.steps import (
    ASSUMED_GEMM_FRACTION,
    Configuration,
    Result,
    predict,
    save_measured,
    size_of,
)
from m1clip.bench.worker import Measurement, MeasurementError, Worker
from m1clip.errors import UserError
from m1clip.hardware.device import Kind, Precision, available, choose_device, rules
from m1clip.hardware.facts import Facts, read_facts
from m1clip.hardware.timing import timing
from m1clip.io import write_json
from m1clip.model.presets import preset
from m1clip.runlog import json_safe

FORMAT = "m1clip-comparison"
MAX_SECONDS, MIN_STEPS = 10.0, 3  # of one measurement of a configuration
OVERHEAD_STEPS = 12  # warm-up and the check of the gradient, in steps
START_SECONDS, COMPILE_SECONDS = 6.0, 60.0  # of a worker process; guesses
ALWAYS_SECONDS = (
    2.0  # a configuration that needs less than this is measured as long as any time is left
)
BYTES_PER_PARAMETER = 20  # weights, gradients, optimizer state and a half-precision copy
MAX_MEMORY = 0.85  # of free memory, for one configuration


@dataclass(frozen=True, kw_only=True)
class CompareOptions:
    """What to compare; no devices or precisions means all."""

    models: Sequence[str] = ("tiny",)
    batch_sizes: Sequence[int] = (64,)
    devices: Sequence[str] = ()
    precisions: Sequence[str] = ()
    optimizer: str = "muon"
    minutes: float = 4.7

    def __post_init__(self) -> None:
        for name in self.models:
            preset(name)  # raises for an unknown name
        if not self.batch_sizes or min(self.batch_sizes) < 1:
            raise UserError(
                "--batch-size: give integers of at least 1, such as --batch-size 1 8 64"
            )
        if not self.minutes > 0:
            raise UserError(f"--minutes must be above 0, not {self.minutes:g}")


def compare(options: CompareOptions, folder: Path, show: Callable[[str, float], None]) -> Session:
    """Run a comparison and write comparison.json; `show` receives a message and the fraction of time used."""
    facts = read_facts()
    for name in options.devices:
        choose_device(name, facts)  # raises for a missing device
    folder.mkdir(parents=True, exist_ok=True)
    session = Session(options, facts, folder, show)
    try:
        session.run()
    finally:
        session.close()
    if not session.results:
        reasons = "; ".join(dict.fromkeys(session.skipped.values()))
        raise UserError(f"nothing could be measured within {options.minutes:g} minutes: {reasons}")
    save_measured(facts, session.results)
    return session


def configurations(
    facts: Facts, options: CompareOptions, devices: Sequence[Kind]
) -> list[Configuration]:
    """Every device and precision for each model and batch size, from small to large.

    A single model is also measured with one change at a time from the likely fastest configuration of each device, and
    all of this a second time in reverse order, so a machine that becomes slower affects all configurations alike.
    """
    found = [
        Configuration.default(model, batch_size, device, precision, options.optimizer)
        for model in options.models
        for batch_size in sorted(options.batch_sizes)
        for device in devices
        for precision in precisions_of(facts, device, options.precisions)
    ]
    if len(options.models) > 1:
        return found
    found += _one_change_each(facts, [c for c in found if c.batch_size == min(options.batch_sizes)])
    return found + [c for c in reversed(found) if not c.compile]


def precisions_of(facts: Facts, device: Kind, asked: Sequence[str]) -> list[Precision]:
    """The precisions to measure on a device, the likely fastest first; fp16 only if requested."""
    possible = rules(device, facts).precisions[::-1]
    return [name for name in possible if (name in asked if asked else name != "fp16")]


def _one_change_each(facts: Facts, base: list[Configuration]) -> Iterator[Configuration]:
    for likely in {c.device: c for c in reversed(base)}.values():
        yield replace(likely, grad_checkpointing=True)
        if likely.device == "cpu" and facts.performance_cores > 1:
            yield replace(likely, threads=facts.performance_cores // 2)
        if likely.device == "cuda":
            yield replace(likely, cuda_graph=False)
        if likely.device != "mlx":
            yield replace(likely, compile=True)  # last: compiling takes a minute or two


class Session:
    """One comparison: the results, the time budget, and a worker process for each variant."""

    def __init__(
        self,
        options: CompareOptions,
        facts: Facts,
        folder: Path,
        show: Callable[[str, float], None],
    ) -> None:
        self.options, self.facts, self.folder = options, facts, folder
        self.begin, self.seconds = time.monotonic(), 60 * options.minutes
        self.show = lambda text: show(text, 1 - self.left / self.seconds)
        self.log = folder / "workers.log"
        self.log.write_bytes(b"")
        self.workers: dict[str, Worker] = {}
        self.devices: dict[
            Kind, tuple[int, dict[str, float]]
        ] = {}  # memory, and GEMM FLOP/s by precision
        self.measured: dict[Configuration, list[Measurement]] = {}
        self.gradients: dict[
            tuple[str, str], float
        ] = {}  # model and variant -> difference from the CPU's
        self.skipped: dict[str, str] = {}  # label -> reason
        self.failed: dict[
            tuple[str, str], int
        ] = {}  # model and variant -> the smallest batch size that failed
        self.date = datetime.now(UTC).isoformat(timespec="seconds")

    @property
    def left(self) -> float:
        return self.seconds - (time.monotonic() - self.begin)

    @property
    def results(self) -> list[Result]:
        return [self.result(c, measurements) for c, measurements in self.measured.items()]

    def run(self) -> None:
        for kind in available(self.facts):
            # MLX's build for Linux has no GPU: it is measured only on request.
            if kind in self.options.devices or (
                not self.options.devices and (kind != "mlx" or self.facts.mps)
            ):
                self.show(f"{kind}: matrix multiplication")
                precisions = precisions_of(self.facts, kind, self.options.precisions)
                try:
                    self.devices[kind] = self.worker(kind).call(
                        "probe", max(60.0, self.left), kind, precisions
                    )
                except MeasurementError as error:
                    self.skipped[kind] = str(error)
                self.close()
        todo = configurations(self.facts, self.options, list(self.devices))
        for number, c in enumerate(todo):
            # The second pass has the time that the first one leaves.
            waiting = len({*todo[number:]} - self.measured.keys()) or len(todo) - number
            if reason := self.obstacle(c, self.left / waiting):
                self.skipped |= {} if c in self.measured else {c.label: reason}
            else:
                self.measure(c, self.left / waiting)
            self.close({later.variant for later in todo[number + 1 :]})
        self.write(complete=True)

    def obstacle(self, c: Configuration, fair: float) -> str:
        """Why to skip a configuration; `fair` is the average time left per configuration."""
        if (failed := self.failed.get((c.model, c.variant))) is not None:
            return f"batch {failed} failed"
        parameters, flops = size_of(c)
        total, rates = self.devices[c.device]
        memory = psutil.virtual_memory().available if c.device == "cpu" else total
        results = self.results
        fixed = BYTES_PER_PARAMETER * parameters
        bytes_needed = min(
            (
                fixed + c.batch_size / r.configuration.batch_size * max(0, r.peak_bytes - fixed)
                for r in results
                if (r.configuration.model, r.configuration.variant) == (c.model, c.variant)
            ),
            default=fixed,
        )
        if bytes_needed > MAX_MEMORY * memory:
            return f"needs about {bytes_needed / 1e9:.0f} GB of {memory / 1e9:.0f} GB"
        known = predict(c, results)
        step_seconds = known[0] if known else flops / (ASSUMED_GEMM_FRACTION * rates[c.precision])
        needed = step_seconds * (MIN_STEPS + OVERHEAD_STEPS) + COMPILE_SECONDS * c.compile
        needed += 0 if c.variant in self.workers else START_SECONDS
        is_needed = len(results) < 2  # a comparison needs two
        if needed > (self.left if is_needed else max(2 * fair, min(ALWAYS_SECONDS, self.left))):
            return f"needs about {needed:.0f} s: too long for --minutes {self.options.minutes:g}"
        return ""

    def measure(self, c: Configuration, seconds: float) -> None:
        """Time steps of a configuration for at most `seconds`; its gradient is checked once per model and variant."""
        self.show(c.label)
        key = c.model, c.variant
        arguments = c, min(MAX_SECONDS, 0.5 * seconds), MIN_STEPS, key not in self.gradients
        try:
            found: Measurement = self.worker(c.variant).call(
                "measure", max(120.0, self.left), *arguments
            )
        except MeasurementError as error:
            self.skipped[c.label] = str(error)
            self.failed.setdefault(key, c.batch_size)
            return
        if found.gradient_difference is not None:
            self.gradients[key] = found.gradient_difference
        self.measured.setdefault(c, []).append(found)
        self.write()

    def result(self, c: Configuration, measurements: list[Measurement]) -> Result:
        parameters, flops = size_of(c)
        seconds = [value for found in measurements for value in found.seconds]
        joules = [found.joules for found in measurements if found.joules is not None]
        load = [found.other_load for found in measurements if found.other_load is not None]
        taken = timing(seconds)
        return Result(
            c,
            parameters,
            flops,
            taken,
            gemm_fraction=flops / taken.median / self.devices[c.device][1][c.precision],
            peak_bytes=measurements[0].peak_bytes,
            joules_per_step=sum(joules) / len(seconds) if joules else None,
            other_load=max(load, default=None),
            gradient_difference=self.gradients[c.model, c.variant],
        )

    def worker(self, name: str) -> Worker:
        if name not in self.workers or not self.workers[name].alive:
            self.workers[name] = Worker(self.log)
        return self.workers[name]

    def close(self, keep: Collection[str] = ()) -> None:
        for name in [name for name in self.workers if name not in keep]:
            self.workers.pop(name).close()

    def write(self, complete: bool = False) -> None:
        results = self.results
        document = {
            "format": FORMAT,
            "m1clip": __version__,
            "command": ["m1clip", *sys.argv[1:]],
            "date": self.date,
            "facts": asdict(self.facts),
            "gemm_flops": {kind: rates for kind, (_, rates) in self.devices.items()},
            "results": [asdict(r) for r in results],
            "skipped": self.skipped,
            "verdict": verdict(results),
            "complete": complete,
        }
        write_json(self.folder / "comparison.json", json_safe(document))
