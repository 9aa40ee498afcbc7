"""The results of a comparison as a table and in words."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from m1clip import __version__
from m1clip.bench.steps import Result, crossing, fit
from m1clip.formatting import duration, number, percent, size, table
from m1clip.hardware.choices import MAX_OTHERS
from m1clip.hardware.facts import Facts
from m1clip.hardware.timing import Timing

HEAD = (
    "configuration",
    "step",
    "quartiles",
    "n",
    "vs. fastest",
    "images/s",
    "of GEMM",
    "memory",
    "energy",
    "gradient",
)
DETAILED = (
    4  # models and batch sizes described individually; beyond that, only each model's largest batch
)


def by_model_and_batch(results: Sequence[Result]) -> dict[tuple[str, int], list[Result]]:
    found: dict[tuple[str, int], list[Result]] = {}
    for r in sorted(results, key=lambda r: r.seconds.median):
        found.setdefault((r.configuration.model, r.configuration.batch_size), []).append(r)
    return dict(sorted(found.items()))


def verdict(results: Sequence[Result]) -> list[str]:
    lines = [
        f"{r.configuration.label}: gradients differ from the CPU's in fp32 by {r.gradient_difference:.1%}, so it is "
        "excluded from the verdict."
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
        f"{c.model}, batch {c.batch_size}: {c.variant} is the fastest of {len(group)}, {duration(t.median)} per step "
        f"[{duration(t.low)}, {duration(t.high)}], n={t.n}, {best.images_per_second:,.1f} images/s."
    )
    rivals = {
        r.configuration.device: r for r in reversed(others) if r.configuration.device != c.device
    }
    for device, r in rivals.items():
        ratios = (r.seconds.median / t.median, r.seconds.low / t.high, r.seconds.high / t.low)
        middle, low, high = (f"{ratio:.2g}" if ratio < 10 else f"{ratio:,.0f}" for ratio in ratios)
        yield f"It is {middle} times as fast [{low}, {high}] as {r.configuration.variant}, the fastest on {device}."
    if rivals:
        yield f"Use --device {c.device} --precision {c.precision} for it."


def crossovers(results: Sequence[Result]) -> Iterator[str]:
    """Up to which batch size the CPU is faster than each accelerator, by model and precision.

    Times count as different only where their quartiles do not overlap; the cost models predict where they are equal.
    """
    series: dict[tuple[str, str], list[Result]] = {}  # by device and precision
    for r in results:
        if r.configuration.is_default:
            series.setdefault((r.configuration.device, r.configuration.precision), []).append(r)
    for (device, precision), members in series.items():
        others = series.get(("cpu", precision), [])
        for model in dict.fromkeys(r.configuration.model for r in members if device != "cpu"):
            gpu, cpu = (
                {r.configuration.batch_size: r for r in those if r.configuration.model == model}
                for those in (members, others)
            )
            if shared := sorted(set(gpu) & set(cpu)):
                equal, one, fits = None, gpu[shared[0]], (fit(others), fit(members))
                if fits[0] and fits[1]:
                    equal = crossing(fits[0], fits[1], one.parameters, one.flops / shared[0])
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
        return f"{device} is faster than the CPU at every batch size measured, {ratios[0]}, {ratios[-1]}"
    return f"no clear difference between the CPU and {device} at the batch sizes measured"


def rows(results: Sequence[Result]) -> list[list[str]]:
    """All results as table rows with the columns `HEAD`, the fastest of each model and batch size first."""
    return [
        [
            r.configuration.label,
            duration(r.seconds.median),
            f"{duration(r.seconds.low)} to {duration(r.seconds.high)}",
            str(r.seconds.n),
            f"{r.seconds.median / group[0].seconds.median:.2f}",
            number(r.images_per_second),
            percent(r.gemm_fraction, 0),
            size(r.peak_bytes),
            "not measured" if r.joules_per_step is None else f"{number(r.joules_per_step)} J",
            percent(r.gradient_difference) + ("" if r.gradient_is_right else " (wrong)"),
        ]
        for group in by_model_and_batch(results).values()
        for r in group
    ]


def shared(facts: Facts, results: Sequence[Result]) -> dict[str, Any]:
    """The results for docs/machines.md, with chip and versions but without names, paths or settings of the user."""
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


def text(results: Sequence[Result], skipped: Mapping[str, str]) -> str:
    lines = [table(HEAD, rows(results)), "", *(f"- {line}" for line in verdict(results))]
    lines += [
        f"warning: {r.configuration.label}: other programs used {r.other_load:.0%} of the CPU"
        for r in results
        if (r.other_load or 0.0) > MAX_OTHERS
    ]
    return "\n".join(
        [*lines, *(f"skipped: {label}: {reason}" for label, reason in skipped.items())]
    )
