"""The results of a comparison as tables and in words."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from m1clip import __version__
from m1clip.bench.loading import Loading
from m1clip.bench.overhead import Overhead, matmul_crossover
from m1clip.bench.stability import Stability
from m1clip.bench.steps import Result, crossing, fit
from m1clip.formatting import MISSING, duration, number, percent, size, table
from m1clip.hardware.choices import MAX_OTHERS
from m1clip.hardware.machine_info import MachineInfo
from m1clip.hardware.timing import Timing

COLUMN_TITLES = (
    "configuration",
    "step",
    "quartiles",
    "spread",
    "n",
    "vs. fastest",
    "images/s",
    "of GEMM",
    "memory",
    "energy",
    "gradient",
    "note",
)
OVERHEAD_TITLES = ("operation", "time", "quartiles", "n", "rate")
STAGE_TITLES = ("configuration", "stages of a synchronized step")
STABILITY_TITLES = ("model, device, precision", "trained", "spikes", "skipped", "steps", "loss")
LOADING_TITLES = ("workers", "images/s", "quartiles", "n", "vs. none")
THREAD_TITLES = ("threads", "step", "quartiles", "n", "vs. default")
# Models and batch sizes described individually; beyond that, only each model's largest batch.
DETAILED = 4


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Everything that a comparison measured."""

    facts: MachineInfo
    results: Sequence[Result]
    skipped: Mapping[str, str] = field(default_factory=dict)  # what was not measured, and why
    overheads: Mapping[str, Sequence[Overhead]] = field(default_factory=dict)  # by device
    stability: Mapping[str, Stability] = field(default_factory=dict)
    loading: Sequence[Loading] = ()
    date: str = ""
    folder: Path | None = None  # with comparison.json and comparison.html

    @property
    def verdict(self) -> list[str]:
        """The conclusions, one sentence or two each."""
        return verdict(self.results)

    def __str__(self) -> str:
        return text(self)


def by_model_and_batch(results: Sequence[Result]) -> dict[tuple[str, int], list[Result]]:
    groups: dict[tuple[str, int], list[Result]] = {}
    for r in sorted(results, key=lambda r: r.seconds.median):
        groups.setdefault((r.configuration.model, r.configuration.batch_size), []).append(r)
    return dict(sorted(groups.items()))


def verdict(results: Sequence[Result]) -> list[str]:
    lines = [
        f"{r.configuration.label}: gradients differ from the CPU's in fp32 by"
        f" {r.gradient_difference:.1%}, so it is excluded from the verdict."
        for r in results
        if not r.gradient_is_right
    ]
    right = [r for r in results if r.gradient_is_right]
    lines += crossovers(right)
    groups = by_model_and_batch(right)
    if len(groups) > DETAILED:
        groups = {
            key: groups[key]
            for key in {model: (model, batch_size) for model, batch_size in groups}.values()
        }
    for group in groups.values():
        lines += _fastest(group)
    if results and {r.configuration.device for r in results} == {"cpu"}:
        lines.append("Only the CPU was measured.")
    return lines


def _fastest(group: list[Result]) -> Iterator[str]:
    best, *others = group
    c, t = best.configuration, best.seconds
    yield (
        f"{c.model}, batch {c.batch_size}: {c.variant} is the fastest of {len(group)},"
        f" {duration(t.median)} per step [{duration(t.low)}, {duration(t.high)}], n={t.n},"
        f" {best.images_per_second:,.1f} images/s."
    )
    rivals = {
        r.configuration.device: r for r in reversed(others) if r.configuration.device != c.device
    }
    for device, r in rivals.items():
        ratios = (r.seconds.median / t.median, r.seconds.low / t.high, r.seconds.high / t.low)
        middle, low, high = (f"{ratio:.2g}" if ratio < 10 else f"{ratio:,.0f}" for ratio in ratios)
        yield (
            f"It is {middle} times as fast [{low}, {high}] as {r.configuration.variant}, the"
            f" fastest on {device}."
        )
    if rivals:
        yield f"Use --device {c.device} --precision {c.precision} for it."


def crossovers(results: Sequence[Result]) -> Iterator[str]:
    """Up to which batch size the CPU is faster than each accelerator, by model and precision.

    Times count as different only where their quartiles do not overlap; the cost models predict
    where they are equal.
    """
    series: dict[tuple[str, str], list[Result]] = {}  # by device and precision
    for r in results:
        if r.configuration.is_default:
            series.setdefault((r.configuration.device, r.configuration.precision), []).append(r)
    for (device, precision), members in series.items():
        others = series.get(("cpu", precision), [])
        for model in dict.fromkeys(r.configuration.model for r in members if device != "cpu"):
            gpu, cpu = (
                {r.configuration.batch_size: r for r in group if r.configuration.model == model}
                for group in (members, others)
            )
            if shared := sorted(set(gpu) & set(cpu)):
                equal, largest, fits = None, gpu[shared[0]], (fit(others), fit(members))
                if fits[0] and fits[1]:
                    equal = crossing(
                        fits[0], fits[1], largest.parameters, largest.flops / shared[0]
                    )
                note = (
                    f" (the cost model predicts equal times at batch {equal:.2g})" if equal else ""
                )
                pairs = {batch: (cpu[batch].seconds, gpu[batch].seconds) for batch in shared}
                yield f"{model} in {precision}: {_crossover(device, pairs)}{note}."


def _crossover(device: str, pairs: dict[int, tuple[Timing, Timing]]) -> str:
    """The crossover in words, from the times of the CPU and of the device by batch size."""
    wins = [batch for batch, (cpu, gpu) in pairs.items() if cpu.high < gpu.low]
    losses = [batch for batch, (cpu, gpu) in pairs.items() if cpu.low > gpu.high]
    if wins and losses:
        return f"the CPU is faster up to batch {max(wins)}, {device} from batch {min(losses)}"
    if wins:
        return f"the CPU is faster than {device} at every batch size measured, up to {max(wins)}"
    if losses:
        ratios = [
            f"{cpu.median / gpu.median:.1f} times at {batch}" for batch, (cpu, gpu) in pairs.items()
        ]
        return (
            f"{device} is faster than the CPU at every batch size measured, {ratios[0]},"
            f" {ratios[-1]}"
        )
    return f"no clear difference between the CPU and {device} at the batch sizes measured"


def rows(results: Sequence[Result], skipped: Mapping[str, str] = {}) -> list[list[str]]:
    """All results as table rows with the columns `COLUMN_TITLES`, the fastest of each model and
    batch size first.

    What was not measured follows, with the reason as its note.
    """
    cells = [_row(r, group[0]) for group in by_model_and_batch(results).values() for r in group]
    for label, reason in skipped.items():
        empty = [MISSING] * (len(COLUMN_TITLES) - 2)
        cells.append([label, *empty, f"not measured: {reason}"])
    return cells


def _row(r: Result, fastest: Result) -> list[str]:
    energy = "not measured" if r.joules_per_step is None else f"{number(r.joules_per_step)} J"
    notes = []
    if not r.gradient_is_right:
        notes.append("wrong gradient")
    if (r.other_load or 0.0) > MAX_OTHERS:
        notes.append(f"other programs used {r.other_load:.0%} of the CPU")
    return [
        r.configuration.label,
        duration(r.seconds.median),
        f"{duration(r.seconds.low)} to {duration(r.seconds.high)}",
        percent(r.spread, 0),
        str(r.seconds.n),
        f"{r.seconds.median / fastest.seconds.median:.2f}",
        number(r.images_per_second),
        percent(r.gemm_fraction, 0),
        size(r.peak_bytes),
        energy,
        percent(r.gradient_difference),
        "; ".join(notes),
    ]


def stage_rows(results: Sequence[Result]) -> list[list[str]]:
    """The stages of each configuration with their fraction of the step."""
    return [[r.configuration.label, describe_stages(r)] for r in results if r.stages]


def describe_stages(r: Result) -> str:
    """The stages of a step: forward 40% (12 ms), ..."""
    total = sum(r.stages.values())
    return ", ".join(
        f"{name} {percent(seconds / total, 0)} ({duration(seconds)})"
        for name, seconds in r.stages.items()
    )


def overhead_rows(overheads: Sequence[Overhead]) -> list[list[str]]:
    """The overheads of a device."""
    return [
        [
            overhead.label,
            duration(overhead.seconds.median),
            f"{duration(overhead.seconds.low)} to {duration(overhead.seconds.high)}",
            str(overhead.seconds.n),
            _rate(overhead),
        ]
        for overhead in overheads
    ]


def _rate(overhead: Overhead) -> str:
    if overhead.unit == "B/s":
        return f"{size(overhead.per_second)}/s"
    if overhead.unit == "FLOP/s":
        return f"{number(overhead.per_second / 1e9)} GFLOP/s"
    return MISSING


def stability_rows(stability: Mapping[str, Stability]) -> list[list[str]]:
    """Loss spikes and skipped updates of each model, device and precision."""
    return [
        [
            name,
            f"{stable.model}, batch {stable.batch_size}",
            str(stable.spikes),
            str(stable.skipped),
            str(stable.steps),
            f"{number(stable.first_loss)} to {number(stable.last_loss)}",
        ]
        for name, stable in stability.items()
    ]


def loading_rows(loading: Sequence[Loading]) -> list[list[str]]:
    """Images per second by number of worker processes."""
    if not loading:
        return []
    first = loading[0].images_per_second
    return [
        [
            str(loading_result.workers) if loading_result.workers else "none",
            number(loading_result.images_per_second.median),
            f"{number(loading_result.images_per_second.low)} to {number(loading_result.images_per_second.high)}",
            str(loading_result.images_per_second.n),
            f"{loading_result.images_per_second.median / first.median:.2f}",
        ]
        for loading_result in loading
    ]


def thread_rows(facts: MachineInfo, results: Sequence[Result]) -> list[list[str]]:
    """The step of the CPU by number of threads: only configurations that differ in nothing else."""
    with_threads = [r for r in results if r.configuration.threads]
    thread_cells: list[list[str]] = []
    for r in with_threads:
        default = replace(r.configuration, threads=0)
        base = next((result for result in results if result.configuration == default), None)
        if base is None:
            continue
        if not thread_cells:
            thread_cells.append(_thread_row(facts, base, base))
        thread_cells.append(_thread_row(facts, r, base))
    return thread_cells


def _thread_row(facts: MachineInfo, r: Result, base: Result) -> list[str]:
    count = r.configuration.threads or facts.performance_cores
    names = []
    if count == facts.cores:
        names.append("all cores")
    if count == facts.performance_cores and facts.performance_cores < facts.cores:
        names.append("performance cores")
    if count == max(1, facts.performance_cores // 2) and count < facts.performance_cores:
        names.append("half")
    if r is base:
        names.append("default")
    return [
        f"{count} ({', '.join(names)})",
        duration(r.seconds.median),
        f"{duration(r.seconds.low)} to {duration(r.seconds.high)}",
        str(r.seconds.n),
        f"{r.seconds.median / base.seconds.median:.2f}",
    ]


def when_to_use(results: Sequence[Result]) -> tuple[list[str], list[list[str]]]:
    """Which device and precision to use by model and batch size, as the head and rows of a table.

    Each cell has the fastest configuration with correct gradients, its factor over the fastest of
    another device (or else of another precision), and its number of measured steps.
    """
    right = [r for r in results if r.gradient_is_right]
    batches = sorted({r.configuration.batch_size for r in right})
    groups = by_model_and_batch(right)
    sizes = {r.configuration.model: r.parameters for r in right}
    head = ["model", *(f"batch {batch}" for batch in batches)]
    table_rows = []
    for model, parameters in sorted(sizes.items(), key=lambda item: item[1]):
        cells = [_use(groups.get((model, batch), [])) for batch in batches]
        table_rows.append([f"{model} ({parameters / 1e6:,.1f}M)", *cells])
    return head, table_rows


def _use(group: Sequence[Result]) -> str:
    """What to use for one model and batch size: cpu bf16, 1.8x cpu fp32, n=12."""
    if not group:
        return "not measured"
    best = group[0]
    c = best.configuration
    others = [r for r in group[1:] if r.configuration.device != c.device]
    others = others or [r for r in group[1:] if r.configuration.precision != c.precision]
    if not others:
        return f"{c.variant} (nothing else measured), n={best.seconds.n}"
    second = others[0]
    name = second.configuration.variant
    if second.seconds.low <= best.seconds.high:
        return f"{c.variant} or {name}: no clear difference, n={best.seconds.n}"
    ratio = second.seconds.median / best.seconds.median
    return f"{c.variant}, {ratio:.2g}x as fast as {name}, n={best.seconds.n}"


def shared(facts: MachineInfo, results: Sequence[Result]) -> dict[str, Any]:
    """The results for the page Machines of the documentation: with chip and versions, without names,
    paths or settings of the user.
    """
    return {
        "chip": facts.cuda or facts.cpu,
        "cores": facts.cores,
        "memory_gib": round(facts.memory_bytes / 2**30),
        "system": f"macOS {facts.macos}" if facts.macos else facts.system,
        "m1clip": __version__,
        "torch": facts.torch,
        "mlx": facts.mlx,
        "results": [
            {
                "configuration": r.configuration.label,
                "images_per_second": round(r.images_per_second, 2),
                "n": r.seconds.n,
                "gradient_difference": r.gradient_difference,
            }
            for r in results
        ],
    }


def overhead_title(facts: MachineInfo, kind: str) -> str:
    """The title of the overheads of a device, with its name."""
    name = {"cuda": facts.cuda, "cpu": facts.cpu, "mps": facts.cpu}.get(kind) or ""
    return f"Overhead of {kind}{f' ({name})' if name else ''}"


def overhead_note(kinds: Sequence[str]) -> str:
    """What the overheads of these devices can say."""
    if list(kinds) == ["cpu"]:
        return "Only the CPU was measured: it has nothing to launch, wait for or transfer to."
    return "A device pays for work whose time is far above its launch and wait."


def text(comparison: Comparison) -> str:
    """All tables of a comparison and its verdict."""
    head, use = when_to_use(comparison.results)
    sections = [
        ("", table(COLUMN_TITLES, rows(comparison.results, comparison.skipped))),
        ("", "\n".join(f"- {line}" for line in comparison.verdict)),
        ("When to use which", table(head, use)),
        ("Time by stage", _table(STAGE_TITLES, stage_rows(comparison.results))),
        ("Threads", _table(THREAD_TITLES, thread_rows(comparison.facts, comparison.results))),
        ("Loading by workers", _table(LOADING_TITLES, loading_rows(comparison.loading))),
        ("Stability: loss spikes", _table(STABILITY_TITLES, stability_rows(comparison.stability))),
    ]
    for kind, overheads in comparison.overheads.items():
        title = overhead_title(comparison.facts, kind)
        sections.append((title, _table(OVERHEAD_TITLES, overhead_rows(overheads))))
    if comparison.overheads:
        lines = [overhead_note(list(comparison.overheads)), *matmul_crossover(comparison.overheads)]
        sections.append(("", "\n".join(f"- {line}" for line in lines)))
    return "\n\n".join(f"{title}\n{body}" if title else body for title, body in sections if body)


def _table(head: Sequence[str], table_rows: Sequence[Sequence[str]]) -> str:
    """A table, or nothing if it has no rows."""
    return table(head, table_rows) if table_rows else ""
