"""The learning rate as a function of the step."""

import math

from m1clip.config import OptimConfig
from m1clip.errors import UserError
from m1clip.formatting import plural
from m1clip.training.duration import StepPlan


def warmup_steps(warmup: float, total_steps: int) -> int:
    """Number of warmup steps, given as a fraction of all steps or a number.

    UserError if warmup would never end.
    """
    steps = round(warmup * total_steps) if warmup < 1 else int(warmup)
    if steps >= total_steps:
        raise UserError(
            f"warmup of {plural(steps, 'step')} would never end: the run has"
            f" {plural(total_steps, 'step')}; train longer, or lower --warmup (0.05 = five percent"
            " of the run)"
        )
    return steps


def lr_fraction(step: float, warmup: int, total_steps: int) -> float:
    """Fraction of the peak learning rate: linear warmup, then a half cosine down to 0."""
    if step < warmup:
        return (step + 1) / (warmup + 1)
    progress = (step - warmup) / max(total_steps - warmup, 1)
    return 0.5 * (1 + math.cos(math.pi * min(progress, 1.0)))


def scheduled_lr_fraction(config: OptimConfig, plan: StepPlan, step: int) -> float:
    """`lr_fraction` of a step of a run; `step` counts from 0."""
    first_total = plan.segments[0].total_steps
    warmup = warmup_steps(config.warmup, first_total)
    return lr_fraction(plan.position(step), warmup, first_total)
