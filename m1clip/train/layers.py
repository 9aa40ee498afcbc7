"""Gradient norm and size of the update against the weights, by layer: looked at in few steps, by hooks."""

from __future__ import annotations

import math
import re
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from m1clip.train.optim import Optimizer

BLOCK = re.compile(r"^(?P<tower>[^.]+)\..*?\b(?:blocks|layers?|resblocks|stages)\.(?P<number>\d+)\.")
LOOKS = 40  # a run, unless the config says otherwise


def layer_of(name: str) -> str:
    """The layer that a parameter belongs to, in a person's words: image block 3, text stem, image head."""
    if name.startswith("logit_"):
        return "temperature"
    block = BLOCK.match(name)
    if block:
        return f"{block['tower']} block {int(block['number']) + 1}"
    tower = re.split(r"[._]", name)[0]
    head = "projection" in name or name.startswith(f"{tower}.norm.")
    return f"{tower} {'head' if head else 'stem'}"


def look_every(asked: int | None, total_steps: int, log_every: int) -> int:
    """Steps between two looks, a multiple of the log's interval so that both read the device at once; 0 = never."""
    if asked == 0:
        return 0
    wish = asked if asked is not None else max(1, total_steps // LOOKS)
    return -(-wish // log_every) * log_every


class LayerProbe:
    """Armed for one step, it reads gradients just before the optimizer moves the weights, and the move just after."""

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._names = {id(p): layer_of(name) for name, p in model.named_parameters()}
        self._handles: list[RemovableHandle] = []
        self._before: list[Tensor] = []
        self._seen: list[tuple[list[str], list[Tensor], list[Tensor], list[Tensor]]] = []

    def arm(self) -> None:
        """Look at the next step."""
        self._optimizer.observed = True
        for part in self._optimizer.parts.values():
            self._handles.append(part.register_step_pre_hook(self._look_before))
            self._handles.append(part.register_step_post_hook(self._look_after))

    def disarm(self) -> None:
        """Look no more, and forget what was seen."""
        for handle in self._handles:
            handle.remove()
        self._optimizer.observed = False
        self._handles, self._before, self._seen = [], [], []

    @torch.no_grad()
    def _look_before(self, part: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        moved = _moving(part)
        grads = [p.grad for p in moved if p.grad is not None]
        self._before = [p.detach().clone() for p in moved]
        names = [self._names[id(p)] for p in moved]
        norms, weights = torch._foreach_norm(grads), torch._foreach_norm(self._before)
        self._seen.append((names, list(norms), list(weights), []))

    @torch.no_grad()
    def _look_after(self, part: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        moved = [p.detach() for p in _moving(part)]
        torch._foreach_sub_(self._before, moved)
        self._seen[-1][3].extend(torch._foreach_norm(self._before))
        self._before = []

    def take(self, grad_norm: float) -> dict[str, list[float]] | None:
        """layer -> [gradient norm before clipping, update / weight]; one read of the device. None: nothing moved."""
        seen = self._seen
        self.disarm()
        names = [name for part in seen for name in part[0]]
        columns = (
            [norm for part in seen for norm in part[1]],
            [norm for part in seen for norm in part[2]],
            [norm for part in seen for norm in part[3]],
        )
        if not names or len(columns[2]) != len(names):
            return None
        rows = torch.stack([torch.stack([t.float() for t in column]) for column in columns]).square().tolist()
        sums: dict[str, list[float]] = {}
        for name, *squares in zip(names, *rows, strict=True):
            row = sums.setdefault(name, [0.0, 0.0, 0.0])
            for place, square in enumerate(squares):
                row[place] += square
        # Clipping scaled all gradients alike: the norm before it is known, so that each can be scaled back.
        clipped = math.sqrt(sum(row[0] for row in sums.values()))
        scale = grad_norm / clipped if clipped > 0 and math.isfinite(grad_norm) else 1.0
        return {
            name: [_short(scale * math.sqrt(grad)), _short(math.sqrt(moved / weight) if weight else 0.0)]
            for name, (grad, weight, moved) in sums.items()
        }


def _moving(part: torch.optim.Optimizer) -> list[Tensor]:
    return [p for group in part.param_groups for p in group["params"] if p.grad is not None]


def _short(value: float) -> float:
    return float(f"{value:.4g}")
