"""The torch optimizers of the parts of m1clip.optimizers, and how each is built (`BUILDERS`)."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from m1clip.training.distributed import Ranks
from m1clip.training.muon import Muon
from m1clip.training.skippable import EagerOptimizer

Groups = list[dict[str, Any]]  # as torch's optimizers take them: params, lr, weight_decay
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


@dataclass(frozen=True)
class BuildOptions:
    """What the device and the ranks decide about an optimizer."""

    fused: bool = False  # torch's fused kernels
    capturable: bool = False  # learning rates are on the device, for CUDA graphs
    matmul_dtype: torch.dtype = torch.bfloat16  # of Muon's products
    ranks: Ranks | None = None  # None: one process
    # The number of rows of tensors of which this rank has some, by id.
    full_rows: Mapping[int, int] = field(default_factory=dict)


def build_adamw(groups: Groups, options: BuildOptions) -> torch.optim.Optimizer:
    return AdamW(
        groups, betas=ADAMW_BETAS, eps=ADAMW_EPS, fused=options.fused, capturable=options.capturable
    )


def build_muon(groups: Groups, options: BuildOptions) -> torch.optim.Optimizer:
    return Muon(
        groups, dtype=options.matmul_dtype, ranks=options.ranks, full_rows=options.full_rows
    )


# How torch builds each part of m1clip.optimizers, by its name.
BUILDERS: dict[str, Callable[[Groups, BuildOptions], torch.optim.Optimizer]] = {
    "muon": build_muon,
    "adamw": build_adamw,
}
