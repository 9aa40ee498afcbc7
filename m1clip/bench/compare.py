"""m1clip compare: measure the training step in many configurations within a time budget."""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

from m1clip import __version__, console
from m1clip.bench.decide import default_configuration
from m1clip.bench.loading import Loading, measure_loading
from m1clip.bench.overhead import OVERHEAD_SECONDS, Overhead
from m1clip.bench.page import PAGE_NAME, write_page
from m1clip.bench.report import Comparison, verdict
from m1clip.bench.stability import STABILITY_STEPS, Stability
from m1clip.bench.steps import (
    ASSUMED_GEMM_FRACTION,
    Configuration,
    Result,
    predict,
    save_measured,
    size_of,
)
from m1clip.bench.worker import DeviceMeasurement, Measurement, MeasurementError, Workers
from m1clip.errors import UserError
from m1clip.formatting import did_you_mean, one_line
from m1clip.hardware.device import (
    HYBRIDS,
    Kind,
    Precision,
    available,
    choose_device,
    device_parts,
    hybrids_of,
    rules,
)
from m1clip.hardware.machine_info import MachineInfo, read_machine_info
from m1clip.hardware.timing import timing
from m1clip.io import write_json
from m1clip.model.presets import preset
from m1clip.optimizers import DEFAULT_OPTIMIZER, FLOAT_BYTES, OPTIMIZERS
from m1clip.runlog import json_safe

COMPARISON_FORMAT = "m1clip-comparison"
COMPARED_SECONDS, MIN_STEPS = 10.0, 3  # of one measurement of a configuration
OVERHEAD_STEPS = 12  # warmup and the check of the gradient, in steps
WORKER_START_SECONDS, COMPILE_SECONDS = 6.0, 60.0  # of a worker process; guesses
# A configuration that needs less than this is measured as long as any time is left.
ALWAYS_SECONDS = 2.0
HALF_COPIES_BYTES = 4  # per parameter: the weight and its gradient in half precision
COMPARED_MEMORY_FRACTION = 0.85  # of free memory, for one configuration
PRECISIONS: tuple[Precision, ...] = ("bf16", "fp32", "fp16")  # the likely fastest first
STABILITY_FRACTION = 0.15  # of the time, for the steps that show loss spikes
STABILITY_BATCH_SIZE = 8
MIN_STABILITY_SECONDS = 2.0  # for one precision, even if little time is left
MAX_SLOW_SECONDS = 120.0  # that a worker may take longer than it was given
LOADING_SECONDS = 10.0  # that the measurement of the loader needs; a guess
OVERHEAD_FRACTION = 0.03  # of the time, for the overhead of one device
FINISH_SECONDS, FINISH_FRACTION = 4.0, 0.05  # of the time, for the page at the end: the smaller one
# A measurement that still runs when the time is over is given up after the larger one.
OVERRUN_SECONDS, OVERRUN_FRACTION = 5.0, 0.05
ENOUGH_MARGIN = 1.2  # of the time that would have been enough, as it is an estimate
# A device's slower precisions and variants get this part of the time of its likely fastest one.
LATER_WEIGHT = 0.25

Show = Callable[[str, float], None]  # gets a message and the fraction of the time that is used


@dataclass(frozen=True, kw_only=True)
class CompareOptions:
    """What to compare; no devices or precisions means all."""

    models: Sequence[str] = ("tiny",)
    batch_sizes: Sequence[int] = (64,)
    devices: Sequence[str] = ()
    precisions: Sequence[str] = ()
    optimizer: str = DEFAULT_OPTIMIZER
    minutes: float = 4.7

    def __post_init__(self) -> None:
        for name in self.models:
            preset(name)  # raises for an unknown name
        if not self.batch_sizes or min(self.batch_sizes) < 1:
            raise UserError(
                "--batch-size: give integers of at least 1, such as --batch-size 1 8 64"
            )
        for name in self.precisions:
            if name not in PRECISIONS:
                raise UserError(
                    f"--precision {name}: expected some of {', '.join(PRECISIONS)}"
                    f"{did_you_mean(name, PRECISIONS)}"
                )
        if not self.minutes > 0:
            raise UserError(f"--minutes must be above 0, not {self.minutes:g}")


def compare(
    model: str | Sequence[str] = "tiny",
    batch_size: int | Sequence[int] = 64,
    device: str | Sequence[str] = (),
    precision: str | Sequence[str] = (),
    *,
    optimizer: str = DEFAULT_OPTIMIZER,
    minutes: float = CompareOptions.minutes,
    out: str | Path = "comparison",
) -> Comparison:
    """Measure the training step on each device of this machine, in each precision.

    Takes the options of `m1clip compare`; several values are given as a list. Writes
    comparison.json and comparison.html into `out`; print the result to see its tables.
    """
    options = CompareOptions(
        models=_as_tuple(model),
        batch_sizes=_as_tuple(batch_size),
        devices=_as_tuple(device),
        precisions=_as_tuple(precision),
        optimizer=optimizer,
        minutes=minutes,
    )
    return run_comparison(options, Path(out), print_progress)


def _as_tuple(value: Any) -> tuple[Any, ...]:
    return (value,) if isinstance(value, str | int) else tuple(value)


def print_progress(message: str, used: float) -> None:
    """Report what is measured next, and the fraction of the time that is used."""
    console.print(f"{min(used, 1.0):4.0%}  {message}")


def run_comparison(
    options: CompareOptions, folder: Path, show: Show, used_seconds: float = 0.0
) -> Comparison:
    """Run a comparison and write comparison.json and comparison.html.

    `show` receives a message and the fraction of time used; `used_seconds` have passed already.
    """
    facts = read_machine_info()
    devices = [choose_device(name, facts) for name in options.devices]  # raises for a missing one
    options = replace(options, devices=devices)
    folder.mkdir(parents=True, exist_ok=True)
    session = Session(options, facts, folder, show, used_seconds)
    try:
        session.run()
    finally:
        session.workers.close()
    if not session.steps.results:
        raise UserError(session.why_nothing)
    save_measured(facts, session.steps.results)
    comparison = session.comparison
    write_page(comparison, folder / PAGE_NAME)
    return comparison


def configurations(
    facts: MachineInfo, options: CompareOptions, devices: Sequence[Kind]
) -> list[Configuration]:
    """Every device and precision for each model and batch size, from small to large.

    All devices come in their likely fastest precision before any comes in another one: if the time
    is short, devices are compared, not the precisions of the first device. A single model is also
    measured with one change at a time from the likely fastest configuration of each device.
    """
    precisions = {device: precisions_of(facts, device, options.precisions) for device in devices}
    listed = [
        default_configuration(
            facts, model, batch_size, device, precisions[device][rank], options.optimizer
        )
        for rank in range(len(PRECISIONS))
        for model in options.models
        for batch_size in sorted(options.batch_sizes)
        for device in devices
        if rank < len(precisions[device])
    ]
    if len(options.models) > 1:
        return listed
    smallest = [c for c in listed if c.batch_size == min(options.batch_sizes)]
    return [*listed, *_one_change_each(facts, smallest)]


def second_round(first: Sequence[Configuration]) -> list[Configuration]:
    """All configurations again in reverse order, so a machine that becomes slower affects all of
    them alike.

    Compiling takes too long to be repeated.
    """
    return [c for c in reversed(first) if not c.compile]


def precisions_of(facts: MachineInfo, device: Kind, requested: Sequence[str]) -> list[Precision]:
    """The precisions to measure on a device, the likely fastest first."""
    supported = rules(device, facts).precisions
    return [name for name in PRECISIONS if name in supported and name in (requested or PRECISIONS)]


def unsupported_precisions(
    facts: MachineInfo, device: Kind, requested: Sequence[str]
) -> list[Precision]:
    """The precisions that a device does not have."""
    supported = rules(device, facts).precisions
    return [
        name for name in PRECISIONS if name not in supported and name in (requested or PRECISIONS)
    ]


def thread_counts(facts: MachineInfo) -> list[int]:
    """Numbers of threads to try beside the default of one per performance core: all cores, and
    half.
    """
    tried = {facts.cores, max(1, facts.performance_cores // 2)}
    return sorted(tried - {facts.performance_cores}, reverse=True)


def _one_change_each(facts: MachineInfo, base: list[Configuration]) -> Iterator[Configuration]:
    for likely in {c.device: c for c in reversed(base)}.values():
        if likely.device == "cpu":
            for count in thread_counts(facts):
                yield replace(likely, threads=count)
        yield replace(likely, grad_checkpointing=True)
        if likely.cuda_graph:
            yield replace(likely, cuda_graph=False)
        if likely.device != "mlx" and likely.device not in HYBRIDS:
            yield replace(likely, compile=True)  # last: compiling takes a minute or two


class CompareClock:
    """The time that a comparison may take, and what of it is for what."""

    def __init__(self, seconds: float, used_seconds: float = 0.0) -> None:
        self.seconds = seconds
        self.begin = time.monotonic() - used_seconds
        self.for_page = min(FINISH_SECONDS, FINISH_FRACTION * seconds)
        # For the stability, until it is measured after the first round.
        self.reserved = STABILITY_FRACTION * seconds

    @property
    def used_fraction(self) -> float:
        return 1 - self.remaining / self.seconds

    @property
    def remaining(self) -> float:
        """Seconds until nothing more can be measured."""
        return self.seconds - self.for_page - (time.monotonic() - self.begin)

    @property
    def remaining_for_steps(self) -> float:
        """Seconds that remain for timed steps."""
        return self.remaining - self.reserved

    @property
    def timeout(self) -> float:
        """Seconds after which a measurement is given up: the time is over, and a little more."""
        overrun = max(OVERRUN_SECONDS, OVERRUN_FRACTION * self.seconds)
        return max(0.0, self.remaining) + overrun


class StepMeasurements:
    """The steps that were measured, and what they say about those that were not."""

    def __init__(self) -> None:
        self.devices: dict[Kind, DeviceMeasurement] = {}
        self.measured: dict[Configuration, list[Measurement]] = {}
        # Seconds before the first step by model, and by whether a worker had to be started.
        self.preparation: dict[tuple[str, bool], float] = {}
        # By model and variant: the difference of the gradient from the CPU's.
        self.gradients: dict[tuple[str, str], float] = {}
        # By model and variant: the smallest batch size that failed.
        self.failed: dict[tuple[str, str], int] = {}

    def add(self, c: Configuration, measurement: Measurement) -> None:
        """Add a measurement of a configuration, which may have earlier ones."""
        if measurement.gradient_difference is not None:
            self.gradients[c.model, c.variant] = measurement.gradient_difference
        self.measured.setdefault(c, []).append(measurement)

    @property
    def results(self) -> list[Result]:
        """The measured configurations."""
        return [self.result(c, measurements) for c, measurements in self.measured.items()]

    def result(self, c: Configuration, measurements: list[Measurement]) -> Result:
        parameters, flops = size_of(c)
        seconds = [value for measurement in measurements for value in measurement.seconds]
        joules = [
            measurement.joules for measurement in measurements if measurement.joules is not None
        ]
        load = [
            measurement.other_load
            for measurement in measurements
            if measurement.other_load is not None
        ]
        step_timing = timing(seconds)
        return Result(
            c,
            parameters,
            flops,
            step_timing,
            gemm_fraction=flops
            / step_timing.median
            / self.devices[c.device].gemm_flops[c.precision],
            peak_bytes=measurements[0].peak_bytes,
            joules_per_step=sum(joules) / len(seconds) if joules else None,
            other_load=max(load, default=None),
            gradient_difference=self.gradients[c.model, c.variant],
            stages=next(
                (measurement.stages for measurement in measurements if measurement.stages), {}
            ),
        )

    def step_seconds(self, c: Configuration) -> float:
        """Predicted seconds of a step."""
        predicted = predict(c, self.results)
        if predicted:
            return predicted[0]
        parts = [self.devices.get(part, self.devices[c.device]) for part in device_parts(c.device)]
        slowest = min(device.gemm_flops[c.precision] for device in parts)
        return size_of(c)[1] / (ASSUMED_GEMM_FRACTION * slowest)

    def seconds_of_steps(self, c: Configuration) -> float:
        """Predicted seconds of the fewest steps that show anything."""
        steps = MIN_STEPS + OVERHEAD_STEPS
        return self.step_seconds(c) * steps + COMPILE_SECONDS * c.compile

    def preparation_seconds(self, c: Configuration, starts: bool) -> float:
        """Predicted seconds before the first step: a worker, the model, the check of its gradient.

        The last time that it took for this model, or the longest for any other one.
        """
        if (c.model, starts) in self.preparation:
            return self.preparation[c.model, starts]
        others = [value for (_, started), value in self.preparation.items() if started == starts]
        return max(others, default=WORKER_START_SECONDS if starts else 0.0)

    def bytes_needed(self, c: Configuration) -> float:
        """Predicted bytes of memory: what earlier batches needed, in proportion."""
        parameters, _ = size_of(c)
        bytes_per_parameter = (
            FLOAT_BYTES + OPTIMIZERS[c.optimizer].trained_bytes + HALF_COPIES_BYTES
        )
        fixed = bytes_per_parameter * parameters
        return min(
            (
                fixed + c.batch_size / r.configuration.batch_size * max(0, r.peak_bytes - fixed)
                for r in self.results
                if (r.configuration.model, r.configuration.variant) == (c.model, c.variant)
            ),
            default=fixed,
        )


class Session:
    """One comparison: the results, the time budget, and a worker process for each variant."""

    def __init__(
        self,
        options: CompareOptions,
        facts: MachineInfo,
        folder: Path,
        show: Show,
        used_seconds: float = 0.0,
    ) -> None:
        self.options = options
        self.facts = facts
        self.folder = folder
        self.clock = CompareClock(60 * options.minutes, used_seconds)
        self.show = lambda text: show(text, self.clock.used_fraction)
        self.workers = Workers(folder / "workers.log")
        self.steps = StepMeasurements()
        self.overheads: dict[str, list[Overhead]] = {}  # by device
        self.stability: dict[str, Stability] = {}  # by model, device and precision
        self.loading: list[Loading] = []
        self.skipped: dict[str, str] = {}  # label -> reason
        # Label -> seconds from the start of the comparison that would be enough for it.
        self.enough_seconds: dict[str, float] = {}
        self.date = datetime.now(UTC).isoformat(timespec="seconds")

    @property
    def comparison(self) -> Comparison:
        """Everything that was measured so far."""
        return Comparison(
            facts=self.facts,
            results=self.steps.results,
            skipped=dict(self.skipped),
            overheads=dict(self.overheads),
            stability=dict(self.stability),
            loading=list(self.loading),
            date=self.date,
            folder=self.folder,
        )

    def run(self) -> None:
        """Measure matrix multiplication, then the steps, and the rest in the time that is left.

        The rest is overhead, loading, the stability of each precision, and the steps once more.
        """
        kinds = available(self.facts)
        for kind in (*kinds, *hybrids_of(kinds)):
            # MLX's build for Linux has no GPU: it is measured only on request. So is the CPU twice.
            by_default = (kind != "mlx" or self.facts.mps) and kind != "cpu+cpu"
            if kind in self.options.devices or (not self.options.devices and by_default):
                self.measure_device(kind)
        first = configurations(self.facts, self.options, list(self.steps.devices))
        second = second_round(first)
        self.measure_round(first, {c.variant for c in second})
        for kind in self.steps.devices:
            if kind not in HYBRIDS:  # a pair is its parts
                self.measure_overhead(kind)
        self.measure_loading()
        self.measure_stability(first)
        self.clock.reserved = 0.0
        self.measure_round(second, set())
        self.write(complete=True)

    def measure_device(self, kind: Kind) -> None:
        """Measure a device apart from any model; what fails is reported and skipped."""
        requested = self.options.precisions
        for precision in unsupported_precisions(self.facts, kind, requested):
            self.skipped[f"{kind} {precision}"] = f"{precision} is not supported on {kind}"
        precisions = precisions_of(self.facts, kind, requested)
        if not precisions:
            return
        image, text = device_parts(kind)
        if kind in HYBRIDS and {image, text} <= self.steps.devices.keys():
            self.steps.devices[kind] = self.steps.devices[
                image
            ]  # a pair is its parts, which are measured
            return
        if self.clock.remaining <= 0:
            self.skipped[kind] = self.no_time_left
            return
        self.show(f"{kind}: matrix multiplication")
        try:
            self.steps.devices[kind] = self.workers.get(kind).call(
                "measure_device", self.clock.timeout, kind, precisions
            )
        except MeasurementError as error:
            self.skipped[kind] = str(error)
        finally:
            self.workers.close()

    def measure_overhead(self, kind: Kind) -> None:
        """Measure launch, wait, allocation and transfer of a device, if there is time."""
        name = f"{kind}: overhead"
        seconds = min(OVERHEAD_SECONDS, OVERHEAD_FRACTION * self.clock.seconds)
        if self.clock.remaining_for_steps < WORKER_START_SECONDS + seconds:
            self.skipped[name] = self.no_time_left
            return
        self.show(name)
        precisions = precisions_of(self.facts, kind, self.options.precisions)
        try:
            self.overheads[kind] = self.workers.get(name).call(
                "measure_device_overhead", self.clock.timeout, kind, precisions, seconds
            )
        except MeasurementError as error:
            self.skipped[name] = str(error)
        finally:
            self.workers.close(self.workers.names - {name})

    def measure_loading(self) -> None:
        """Measure the loader with different numbers of workers, if there is time."""
        name = "loading by workers"
        if self.clock.remaining_for_steps < LOADING_SECONDS:
            self.skipped[name] = self.too_long(LOADING_SECONDS)
            return
        self.show(name)
        try:
            self.loading = measure_loading(self.facts, seconds=LOADING_SECONDS)
        except (OSError, RuntimeError, UserError) as error:
            self.skipped[name] = one_line(str(error))

    def measure_round(self, todo: Sequence[Configuration], later_variants: set[str]) -> None:
        """Measure configurations one after another; a fair part of the time for each."""
        for number, c in enumerate(todo):
            rest = todo[number:]
            waiting = [other for other in rest if other not in self.steps.measured] or rest
            weights = sum(map(self.weight, waiting))
            fair = self.weight(c) * self.clock.remaining_for_steps / weights
            sharing = sum(other.variant == c.variant for other in rest)
            reason = self.obstacle(c, fair, sharing)
            if not reason:
                self.measure(c, fair)
            elif c not in self.steps.measured:
                self.skipped.setdefault(c.label, reason)  # the first reason says why it failed
            self.workers.close({later.variant for later in todo[number + 1 :]} | later_variants)

    def weight(self, c: Configuration) -> float:
        """How much of the time a configuration gets, compared with others."""
        precisions = precisions_of(self.facts, c.device, self.options.precisions)
        return 1.0 if c.is_default and c.precision == precisions[0] else LATER_WEIGHT

    def measure_stability(self, configurations: Sequence[Configuration]) -> None:
        """Count loss spikes of each model on each device in each precision.

        The real model trains if its steps fit into the time, otherwise a reduced one, and for
        fewer steps if these are too slow, too. The first models come first in all precisions.
        """
        chosen: dict[str, Configuration] = {}
        for model in self.options.models:
            for c in configurations:
                if c.is_default and c.model == model:
                    name = f"{c.model}, {c.device} {c.precision}"
                    chosen.setdefault(name, replace(c, batch_size=STABILITY_BATCH_SIZE))
        remaining_after = self.clock.remaining - self.clock.reserved  # for the second round
        for number, (name, c) in enumerate(chosen.items()):
            remaining = self.clock.remaining - max(0.0, remaining_after)
            fair = remaining / (len(chosen) - number)
            needed = STABILITY_STEPS * self.steps.step_seconds(c)
            if remaining < MIN_STABILITY_SECONDS + self.steps.preparation_seconds(
                c, starts=c.variant not in self.workers
            ):
                self.skipped[f"{name}: stability"] = self.no_time_left
                continue
            self.show(f"{name}: stability over {STABILITY_STEPS} steps")
            seconds = max(fair, MIN_STABILITY_SECONDS)
            arguments = (c, needed > fair, STABILITY_STEPS, seconds)
            timeout = min(seconds + MAX_SLOW_SECONDS, self.clock.timeout)
            try:
                self.stability[name] = self.workers.get(c.variant).call(
                    "measure_stability", timeout, *arguments
                )
            except MeasurementError as error:
                self.skipped[f"{name}: stability"] = str(error)
            self.write()

    @property
    def no_time_left(self) -> str:
        """Why something is skipped after the time was used."""
        return f"no time left of --minutes {self.options.minutes:g}"

    @property
    def why_nothing(self) -> str:
        """Why no step was timed: what needs how long, and how many minutes would be enough."""
        text = f"no training step could be timed within {self.options.minutes:g} minutes"
        if self.enough_seconds:
            # The first: the likely fastest precision of the first device.
            label, seconds = next(iter(self.enough_seconds.items()))
            minutes = math.ceil(2 * ENOUGH_MARGIN * seconds / 60) / 2
            return f"{text}: {label}: {self.skipped[label]}; --minutes {minutes:g} would be enough"
        reasons = [f"{name}: {reason}" for name, reason in self.skipped.items()]
        return f"{text}: {'; '.join(reasons)}; try --minutes {2 * self.options.minutes:g}"

    def too_long(self, seconds: float) -> str:
        """Why something is skipped that needs so many seconds."""
        return f"needs about {seconds:.0f} s: too long for --minutes {self.options.minutes:g}"

    def obstacle(self, c: Configuration, fair: float, sharing: int = 1) -> str:
        """Why to skip a configuration; `fair` is its part of the time that is left.

        `sharing` configurations, this one included, need the same worker process.
        """
        failed = self.steps.failed.get((c.model, c.variant))
        if failed is not None and c.batch_size >= failed:
            return f"batch {failed} failed"
        device = self.steps.devices[c.device]
        memory = psutil.virtual_memory().available if c.device == "cpu" else device.total_bytes
        bytes_needed = self.steps.bytes_needed(c)
        if bytes_needed > COMPARED_MEMORY_FRACTION * memory:
            return f"needs about {bytes_needed / 1e9:.0f} GB of {memory / 1e9:.0f} GB"
        preparation = self.steps.preparation_seconds(c, starts=c.variant not in self.workers)
        in_steps = self.steps.seconds_of_steps(c)
        needed = preparation + in_steps
        is_needed = len(self.steps.results) < 2  # a comparison needs two
        # The steps that were asked for come before the stability.
        remaining = self.clock.remaining if is_needed else self.clock.remaining_for_steps
        # The start of a worker serves all configurations that share it.
        too_large = in_steps + preparation / sharing > max(2 * fair, ALWAYS_SECONDS)
        if needed > remaining or (too_large and not is_needed):
            used = self.clock.seconds - self.clock.remaining
            self.enough_seconds[c.label] = used + needed
            return self.too_long(needed)
        return ""

    def measure(self, c: Configuration, seconds: float) -> None:
        """Time steps of a configuration for at most `seconds`.

        Its gradient is checked once per model and variant.
        """
        self.show(c.label)
        key = c.model, c.variant
        arguments = (
            c,
            min(COMPARED_SECONDS, 0.5 * seconds),
            MIN_STEPS,
            key not in self.steps.gradients,
        )
        timeout = min(self.clock.timeout, MAX_SLOW_SECONDS + self.steps.seconds_of_steps(c))
        starts = c.variant not in self.workers
        begin = time.monotonic()
        try:
            measurement: Measurement = self.workers.get(c.variant).call(
                "measure", timeout, *arguments
            )
        except MeasurementError as error:
            self.skipped[c.label] = str(error)
            self.steps.failed.setdefault(key, c.batch_size)
            self.write()
            return
        in_steps = sum(measurement.seconds) + OVERHEAD_STEPS * statistics.median(
            measurement.seconds
        )
        if not c.compile:
            elapsed = time.monotonic() - begin
            self.steps.preparation[c.model, starts] = max(0.0, elapsed - in_steps)
        if measurement.stages_problem:
            self.skipped[f"{c.label}: stages"] = measurement.stages_problem
        self.steps.add(c, measurement)
        self.skipped.pop(c.label, None)
        self.write()

    def write(self, complete: bool = False) -> None:
        """Write what was measured so far."""
        comparison = self.comparison
        document = {
            "format": COMPARISON_FORMAT,
            "m1clip": __version__,
            "command": ["m1clip", *sys.argv[1:]],
            "date": self.date,
            "facts": asdict(self.facts),
            "gemm_flops": {kind: device.gemm_flops for kind, device in self.steps.devices.items()},
            "results": [asdict(result) for result in comparison.results],
            "overheads": {
                kind: [asdict(overhead) for overhead in overheads]
                for kind, overheads in comparison.overheads.items()
            },
            "stability": {name: asdict(value) for name, value in comparison.stability.items()},
            "loading": [asdict(loading) for loading in comparison.loading],
            "skipped": self.skipped,
            "verdict": verdict(comparison.results),
            "complete": complete,
        }
        write_json(self.folder / "comparison.json", json_safe(document))
