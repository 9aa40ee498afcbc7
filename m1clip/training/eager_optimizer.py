"""The base class of our optimizers."""

import inspect
from typing import TYPE_CHECKING

from torch.optim import Optimizer

if TYPE_CHECKING:
    EagerOptimizer = Optimizer
else:

    class EagerOptimizer(Optimizer):
        """torch.optim.Optimizer without the wrappers that keep the compiler out of its methods.

        A wrapper imports torch._dynamo when it is first called, which takes seconds and memory in a
        run that compiles nothing. Any torch optimizer works as a part; one with this base class
        (for an optimizer of torch: before it, as in training/adamw.py) starts faster.
        """

        add_param_group = inspect.unwrap(Optimizer.add_param_group)
        zero_grad = inspect.unwrap(Optimizer.zero_grad)
        state_dict = inspect.unwrap(Optimizer.state_dict)
        load_state_dict = inspect.unwrap(Optimizer.load_state_dict)
