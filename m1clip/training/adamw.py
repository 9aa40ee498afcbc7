"""AdamW: torch's, with the moments of CLIP."""

import inspect
from typing import TYPE_CHECKING, Any

import torch

from m1clip.training.eager_optimizer import EagerOptimizer

ADAMW_BETAS = (0.9, 0.98)
ADAMW_EPS = 1e-6

if TYPE_CHECKING:
    AdamW = torch.optim.AdamW
else:

    class AdamW(EagerOptimizer, torch.optim.AdamW):
        """torch.optim.AdamW with the same step."""

        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            return inspect.unwrap(torch.optim.AdamW.step)(self, closure)
