"""Analyses of a training step: the probe that computes those that are due, and their functions.

A probe sees the gradients and weights of a step between its backward pass and its update. The loop
knows before a step which analyses are due (`Purpose.analyses`), and writes their values to the log
as soon as the step is made, in a record of its own: no value waits for the evaluation, so an
interrupted evaluation loses none, and after a rollback a reader drops the record with everything
else of the steps that were rolled back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from m1clip.analyses import RECORD, Analysis
from m1clip.errors import first_line
from m1clip.training.oom import is_out_of_memory
from m1clip.training.step_view import StepView

if TYPE_CHECKING:
    from m1clip.training.context import RunContext

DIGITS = 5  # of a logged value


class StepAnalyses:
    """The analyses that are due at one step.

    Its `probe` is given to the step, `write` is called after it.
    """

    def __init__(self, due: Sequence[Analysis]) -> None:
        self._due = due
        self._values: dict[str, Any] = {}
        self._failed: dict[str, str] = {}  # name -> reason
        # A step that nothing looks at needs no probe, and may be replayed as a CUDA graph.
        self.probe = self._look if any(each.needs == "step" for each in due) else None

    def _look(self, view: StepView) -> None:
        for analysis in self._due:
            if analysis.needs == "step":
                # With FSDP the other ranks wait for this one: a rank alone must not leave out
                # anything.
                self._compute(analysis, [view], may_fail=not view.sharded)

    def _compute(self, analysis: Analysis, needed: Sequence[Any], may_fail: bool = True) -> None:
        """Compute a value.

        An analysis for which memory is short is left out, and the run goes on.
        """
        try:
            self._values[analysis.name] = analysis.compute(*needed)
        except (RuntimeError, MemoryError) as error:
            if not (may_fail and is_out_of_memory(error)):
                raise
            self._failed[analysis.name] = first_line(error)

    def write(self, run: RunContext) -> None:
        """Write the values of the step that was just made; rank 0 has the log."""
        if run.ranks.rank == 0:
            for analysis in self._due:
                if analysis.needs == "nothing":
                    self._compute(analysis, [])
        for name, reason in self._failed.items():
            run.warn(f"analysis {name} of step {run.state.step:,} left out: {reason}")
        if self._values:
            run.log.write(RECORD, step=run.state.step, **self._values)


# The functions of the table in m1clip/analyses.py.


def layer_grad_norms(view: StepView) -> dict[str, float]:
    """Compute the norm of the gradient of each layer."""
    norms = view.norms(view.gradients, view.layers)
    return {layer: float(f"{norm:.{DIGITS}g}") for layer, norm in norms.items()}
