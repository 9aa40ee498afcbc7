"""The base class of our optimizers, and AdamW: torch's, with the moments of CLIP."""

import inspect
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

ADAMW_BETAS = (0.9, 0.98)
ADAMW_EPS = 1e-6

if TYPE_CHECKING:
    EagerOptimizer = Optimizer
    AdamW = torch.optim.AdamW
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

    class AdamW(EagerOptimizer, torch.optim.AdamW):
        """torch.optim.AdamW with the same step."""

        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            return inspect.unwrap(torch.optim.AdamW.step)(self, closure)
