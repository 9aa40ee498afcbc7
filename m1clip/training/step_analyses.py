"""Analyses of a training step: what they see of it, the probe that computes those that are due, and
their functions.

A probe sees the gradients and weights of a step (`StepView`) between its backward pass and its
update. The loop knows before a step which analyses are due (`Purpose.analyses`), and writes their
values to the log right after the step, in a record of their own: an interrupted evaluation does not
lose them. After a rollback, readers drop the record with all others of the steps that were rolled
back.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from m1clip.analyses import RECORD, Analysis
from m1clip.errors import first_line
from m1clip.model.blocks import model_layers
from m1clip.training.distributed import Ranks
from m1clip.training.oom import is_out_of_memory

if TYPE_CHECKING:
    from m1clip.training.context import RunContext
    from m1clip.training.step import StepParts


# Called with the view of a step before its update, on all ranks; it must not change a tensor.
Probe = Callable[["StepView"], None]
Groups = Mapping[str, Sequence[str]]  # name of a group -> names of parameters
DIGITS = 5  # of a logged value


@dataclass(frozen=True)
class StepView:
    """The gradients and weights of a step before its update.

    Gradients are those of the complete batch: of all micro-batches, summed over the ranks, without
    the loss scale of fp16, and not clipped yet. Weights are those that gave the gradients. Both are
    torch tensors by parameter name, only of parameters that have a gradient, and must not be
    changed. Weights are those of the model, not copies: read after the update, they are the new
    ones, on torch and in MLX.

    With FSDP a rank has its rows of the tensors of towers: use `sums` and `norms`, which are right
    for one process, for ranks, with FSDP and in MLX. They communicate, so all ranks must call them
    with the same names.
    """

    step: int  # counted from 0, as the loop counts
    gradients: Mapping[str, Tensor]
    weights: Mapping[str, Tensor]
    layers: Groups  # "image/block 1" -> its parameters; see model/blocks.py
    sharded: Collection[str] = ()  # names of the tensors of which this rank has some rows
    ranks: Ranks = field(default_factory=Ranks)

    def sums(
        self, function: Callable[[Tensor], Tensor], tensors: Mapping[str, Tensor], groups: Groups
    ) -> dict[str, float]:
        """Sum `function(tensor)` over the complete tensors of each group.

        Groups without a tensor are omitted.

        `function` gives a scalar that adds up over the rows of a tensor, such as the sum of its
        squares.
        """
        names = {group: [n for n in members if n in tensors] for group, members in groups.items()}
        names = {group: members for group, members in names.items() if members}
        # One transfer from the device for all tensors.
        order = [name for members in names.values() for name in members]
        values = dict(zip(order, _read([function(tensors[n]) for n in order]), strict=True))
        totals = {
            group: sum(values[n] for n in members if n not in self.sharded)
            for group, members in names.items()
        }
        if self.sharded:
            own_rows = torch.tensor(
                [
                    sum(values[n] for n in members if n in self.sharded)
                    for members in names.values()
                ],
                dtype=torch.float64,
                device=next(iter(tensors.values())).device,
            )
            self.ranks.all_reduce([own_rows])
            for group, value in zip(totals, own_rows.tolist(), strict=True):
                totals[group] += value
        return totals

    def norms(self, tensors: Mapping[str, Tensor], groups: Groups) -> dict[str, float]:
        """Compute the norm of all complete tensors of each group together."""
        squares = self.sums(_sum_of_squares, tensors, groups)
        return {group: math.sqrt(value) for group, value in squares.items()}


def _sum_of_squares(tensor: Tensor) -> Tensor:
    precision = torch.promote_types(tensor.dtype, torch.float32)
    return torch.linalg.vector_norm(tensor, dtype=precision).square()  # without a copy


def _read(scalars: list[Tensor]) -> list[float]:
    """Read scalars, which may be on several devices, with one transfer."""
    if not scalars:
        return []
    first = scalars[0].device
    values: list[float] = torch.stack([scalar.to(first) for scalar in scalars]).tolist()
    return values


class LazyTensors(Mapping[str, Tensor]):
    """Tensors by name that are converted when they are read, so that only one copy is in memory at
    a time.
    """

    def __init__(self, names: Collection[str], read: Callable[[str], Tensor]) -> None:
        self._names = dict.fromkeys(names)
        self._read = read

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._names:
            raise KeyError(name)
        return self._read(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def view_step(parts: StepParts, step: int) -> StepView:
    """View a step whose gradients are computed.

    With fp16 this removes the loss scale, before the update would.
    """
    parts.update.unscale()
    shards = parts.world.shards
    local = {} if shards is None else shards.local
    trained = {name: local.get(name, p) for name, p in parts.model.named_parameters()}
    gradients = {name: p.grad for name, p in trained.items() if p.grad is not None}
    weights = {name: trained[name].detach() for name in gradients}
    layers = model_layers(parts.model)
    return StepView(step, gradients, weights, layers, frozenset(local), parts.world.ranks)


class StepAnalyses:
    """The analyses that are due at one step.

    Its `probe` is given to the step, `write` is called after it.
    """

    def __init__(self, due: Sequence[Analysis]) -> None:
        self._due = due
        self._values: dict[str, Any] = {}
        self._failed: dict[str, str] = {}  # name -> reason
        # A step that nothing looks at needs no probe, and may be replayed as a CUDA graph.
        self.probe = self._look if any(analysis.needs == "step" for analysis in due) else None

    def _look(self, view: StepView) -> None:
        for analysis in self._due:
            if analysis.needs == "step":
                # With FSDP the other ranks wait for this one: a rank alone must not leave out
                # anything.
                self._compute(analysis, [view], may_fail=not view.sharded)

    def _compute(self, analysis: Analysis, needed: Sequence[Any], may_fail: bool = True) -> None:
        """Compute a value.

        An analysis for which memory is short is skipped, and the run goes on.
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
            run.warn(f"analysis {name} of step {run.state.step:,} skipped: {reason}")
        if self._values:
            run.log.write(RECORD, step=run.state.step, **self._values)


# The functions of the table in m1clip/analyses.py.


def layer_grad_norms(view: StepView) -> dict[str, float]:
    """Compute the norm of the gradient of each layer."""
    norms = view.norms(view.gradients, view.layers)
    return {layer: float(f"{norm:.{DIGITS}g}") for layer, norm in norms.items()}
