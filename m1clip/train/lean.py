"""torch's optimizers without torch's compiler: their methods load it at the first call, and nothing here compiles them.

It takes 75 to 90 MB and about a second, in a process whose whole training step may need less.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

if TYPE_CHECKING:
    # To a reader of types they are torch's own.
    Lean = Optimizer
    AdamW = torch.optim.AdamW
else:

    class Lean(Optimizer):
        """An optimizer whose methods are torch's own, less the wrappers that keep the compiler out of them."""

        add_param_group = inspect.unwrap(Optimizer.add_param_group)
        zero_grad = inspect.unwrap(Optimizer.zero_grad)
        state_dict = inspect.unwrap(Optimizer.state_dict)
        load_state_dict = inspect.unwrap(Optimizer.load_state_dict)

    class AdamW(Lean, torch.optim.AdamW):
        """torch.optim.AdamW, the same step."""

        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            """Move every parameter that has a gradient."""
            return inspect.unwrap(torch.optim.AdamW.step)(self, closure)
