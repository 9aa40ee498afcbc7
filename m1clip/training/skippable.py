"""Base classes of optimizers."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

if TYPE_CHECKING:
    EagerOptimizer = Optimizer
else:

    class EagerOptimizer(Optimizer):
        """torch.optim.Optimizer without the wrappers that keep the compiler out of its methods.

        A wrapper imports torch._dynamo when it is first called, which takes seconds and memory in a
        run that compiles nothing. Any torch optimizer works as a part; one with this base class
        (for an optimizer of torch: before it, as in AdamW below) starts faster.
        """

        add_param_group = inspect.unwrap(Optimizer.add_param_group)
        zero_grad = inspect.unwrap(Optimizer.zero_grad)
        state_dict = inspect.unwrap(Optimizer.state_dict)
        load_state_dict = inspect.unwrap(Optimizer.load_state_dict)


class SkippableOptimizer(EagerOptimizer):
    """Base class of an optimizer written here, with what `Part.skips_on_device` asks of it.

    `skip` is None if the host decides, which then does not call `step`. Else it is a tensor on the
    device, 1 for a step that must change nothing (all gradients are 0 then) and 0 for any other:
    what `step` adds to a tensor is multiplied by `unless_skipped(...)`, and never read.
    """

    @property
    def skip(self) -> Tensor | None:
        """Return the flag of the current step, which training/update.py sets."""
        flag: Tensor | None = getattr(self, "found_inf", None)
        return flag

    def unless_skipped(self, factor: float | Tensor) -> Any:
        """Return the factor, a number or a 0-d tensor, or 0 in a step that is skipped on the
        device.
        """
        return factor if self.skip is None else factor * (1 - self.skip)

    def moment(self, p: Tensor, name: str) -> Tensor:
        """Return a moment of a parameter.

        It begins at 0, and is saved in checkpoints by its name.
        """
        state = self.state[p]
        if name not in state:
            state[name] = torch.zeros_like(p)
        moment: Tensor = state[name]
        return moment

    def update_means(self, means: list[Tensor], values: list[Tensor], beta: float) -> None:
        """Replace running means by beta * mean + (1 - beta) * value, unless the step is skipped."""
        if self.skip is None:
            torch._foreach_lerp_(means, values, 1 - beta)
        else:  # the values, such as gradients, are 0 in a skipped step
            torch._foreach_mul_(means, 1 - self.unless_skipped(1 - beta))
            torch._foreach_add_(means, values, alpha=1 - beta)
