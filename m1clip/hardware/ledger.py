"""Which tensors are alive, and what for: the bytes of a training step by component, at the moment of the most.

It watches every operation, so it is slow, and never on while something is timed. It works alike on real tensors
(a measurement) and on fake ones, which have a shape and no memory (a prediction).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

COMPONENTS = ("weights", "gradients", "optimizer", "activations", "batch", "temporaries")


class Ledger(TorchDispatchMode):
    """Counts storages from the operation that makes them until the last tensor on them is gone."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._live: dict[int, tuple[str, int, int]] = {}  # storage -> component, bytes, number of its birth
        self._now = dict.fromkeys(COMPONENTS, 0)
        self._total = self._most = self._born = self._peak_at = 0
        self.peak: dict[str, int] = dict(self._now)
        self._kind = next(
            model.parameters()
        ).device.type  # what lies elsewhere is not in this device's memory
        self.phase = "activations"  # what a new tensor is, unless it is claimed for something else
        self.claim("weights", (*model.parameters(), *model.buffers()))
        self._handles = [
            p.register_post_accumulate_grad_hook(self._take_gradient) for p in model.parameters()
        ]

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Sequence[Any], args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run the operation, and enter what it has made."""
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.device.type == self._kind:
                self._enter(leaf, self.phase)
        return result

    def claim(self, component: str, tensors: Iterable[Tensor]) -> None:
        """These belong to a component, whatever made them."""
        for tensor in (tensor for tensor in tensors if tensor.device.type == self._kind):
            key = self._enter(tensor, component)
            known, size, born = self._live[key]
            if known == component:
                continue
            self._live[key] = (component, size, born)
            # Whoever was there at the peak, and lives still, gets its right name there too.
            for counts in (self._now, self.peak) if born <= self._peak_at else (self._now,):
                counts[known] -= size
                counts[component] += size

    def close(self) -> None:
        """Leave the model as it was."""
        for handle in self._handles:
            handle.remove()

    def _take_gradient(self, parameter: Tensor) -> None:
        if parameter.grad is not None:
            self.phase = "temporaries"  # the backward pass has begun: nothing new is kept for it
            self.claim("gradients", [parameter.grad])

    def _enter(self, tensor: Tensor, component: str) -> int:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._live:
            size = storage.nbytes()
            self._born += 1
            self._live[key] = (component, size, self._born)
            self._now[component] += size
            self._total += size
            weakref.finalize(storage, self._leave, key)
            if self._total > self._most:
                self._most, self._peak_at, self.peak = self._total, self._born, dict(self._now)
        return key

    def _leave(self, key: int) -> None:
        component, size, _ = self._live.pop(key)
        self._now[component] -= size
        self._total -= size
