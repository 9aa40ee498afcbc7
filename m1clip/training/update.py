"""From gradients to new weights: clip, skip what is not finite, step the optimizers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from m1clip.model.clip import CLIP
from m1clip.training.optim import Optimizer
from m1clip.training.world import World

INTEGER_DTYPES = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes
# Where a step that is not finite is detected and skipped.
SkipRule = Literal["host", "device", "never"]


class Updater:
    """Updates the weights of a model from their gradients."""

    def __init__(
        self,
        model: CLIP,
        optimizer: Optimizer,
        world: World,
        skip: SkipRule = "host",
        scaler: torch.amp.GradScaler | None = None,
        grad_clip: float = 0.0,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.world = world
        self.skip = skip
        self.scaler = scaler  # of fp16, whose gradients underflow
        self.grad_clip = grad_clip  # maximum norm of the gradients; 0: not clipped
        self._is_unscaled = False  # whether the loss scale is removed from the gradients already

    @property
    def scale_loss(self) -> Callable[[Tensor], Tensor]:
        """Scales a loss before its backward pass; the update removes the scale again."""
        return unscaled if self.scaler is None else self.scaler.scale

    def __call__(self, loss: Tensor) -> Tensor:
        """Clip the gradients and update the weights; returns the gradient norm.

        If the loss or norm is not finite, nothing changes: no weight, no optimizer state.
        """
        self.unscale()
        self._is_unscaled = False
        grad_norm = self._clip()
        finite = loss.isfinite() & grad_norm.isfinite()
        if self.scaler is None and self.skip == "device":
            self._step_if(finite)
        # An fp16 overflow must stop both optimizers: the scaler by itself would skip only the
        # affected one.
        elif self.skip == "never" or bool(finite):
            self.optimizer.step(self.scaler)
        if self.scaler is not None:
            self.scaler.update()
        self.optimizer.zero_grad()
        self.model.clamp_scale()
        return grad_norm

    def unscale(self) -> None:
        """Remove the loss scale from the gradients, once in a step: a probe needs it before the
        update.
        """
        if self.scaler is None or self._is_unscaled:
            return
        for part in self.optimizer.parts.values():
            self.scaler.unscale_(part)
        self._is_unscaled = True

    def without_update(self) -> Updater:
        """The same, but gradients are left as they are."""
        return NoUpdate(self.model, self.optimizer, self.world, self.skip, self.scaler)

    def _clip(self) -> Tensor:
        complete = [p.grad for p in self.world.complete_parameters if p.grad is not None]
        shards = self.world.shards
        total_norm = torch.nn.utils.get_total_norm if shards is None else shards.total_norm
        grad_norm = total_norm(complete)
        if self.grad_clip:
            torch.nn.utils.clip_grads_with_norm_(self.world.parameters, self.grad_clip, grad_norm)
        return grad_norm.detach()

    @torch.no_grad()
    def _step_if(self, finite: Tensor) -> None:
        """Step the optimizer if a flag on the device is set, without synchronization."""
        grads = [p.grad for p in self.world.parameters if p.grad is not None]
        # NaN * 0 is NaN, but the bits of NaN as an integer, times 0, are 0.
        for size in {grad.element_size() for grad in grads}:
            bits = [
                grad.view(INTEGER_DTYPES[size]) for grad in grads if grad.element_size() == size
            ]
            torch._foreach_mul_(bits, finite.to(INTEGER_DTYPES[size]))
        skip = 1 - finite.float()
        parts: list[Any] = list(self.optimizer.parts.values())
        for part in parts:
            part.found_inf = skip  # see m1clip.optimizers.Part.skips_on_device
        try:
            self.optimizer.step()
        finally:
            for part in parts:
                del part.found_inf


class NoUpdate(Updater):
    """Leaves the gradients as they are, for a step whose gradients are compared or measured."""

    def __call__(self, loss: Tensor) -> Tensor:
        """Change nothing."""
        return loss.new_zeros(())


def unscaled(loss: Tensor) -> Tensor:
    """Leave the loss as it is."""
    return loss


def skip_rule(kind: str, can_skip: bool) -> Literal["host", "device"]:
    """Where to decide to skip a non-finite step: on CUDA on the device, to avoid
    synchronization.
    """
    # On MPS, torch's fused AdamW accepts found_inf but updates the weights anyway, so the host
    # decides. It also does for towers on two devices, since no flag is on both, and for optimizers
    # without `skips_on_device`.
    return "device" if kind == "cuda" and can_skip else "host"
