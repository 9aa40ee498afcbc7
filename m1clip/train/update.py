"""One training step: forward, backward, clip, move. The loop, the calibration and the benchmarks all use this one."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from m1clip.config import Config
from m1clip.data.augment import render
from m1clip.data.loader import Batch
from m1clip.data.preprocess import Preprocess
from m1clip.hardware.device import Device, Precision
from m1clip.hardware.heap import keep_freed_memory
from m1clip.model.clip import Clip
from m1clip.train.objective import OBJECTIVES, same_pairs
from m1clip.train.optim import Ema, Optimizer
from m1clip.train.precision import grad_scaler
from m1clip.train.schedule import rate


class Update:
    """The model with all that moves it."""

    def __init__(
        self, model: Clip, config: Config, device: Device, precision: Precision, preprocess: Preprocess,
        autocast: Callable[[], AbstractContextManager[object]],
    ) -> None:  # fmt: skip
        self.model, self.config, self.device, self.preprocess = model, config, device, preprocess
        self.autocast = autocast
        if device.kind == "cpu":
            keep_freed_memory()
        self.objective = OBJECTIVES[config.train.objective]
        self.optimizer = Optimizer(model, config.optim, fused=device.rules.fused_optimizer)
        self.scaler = grad_scaler(device, precision)
        self.ema = Ema(model, config.optim.ema) if config.optim.ema else None
        self.forward: Callable[..., object] = torch.compile(model) if config.model.compile else model
        self.parameters = list(model.parameters())
        model.train()

    def __call__(self, batch: Batch, step: int, warmup: int, total_steps: int) -> tuple[Tensor, Tensor]:
        """Loss and gradient norm, still on the device: reading them is what would make the host wait."""
        batch = batch.to(self.device.torch, self.device.rules.non_blocking)
        if self.model.shape.dropout:
            torch.manual_seed(self.config.seed * 1_000_003 + step)  # dropout too is a function of the step
        with self.autocast():
            features = self.forward(render(batch.pixels, batch.views, self.preprocess), batch.tokens)
        positive = same_pairs(batch.pictures, batch.captions)
        loss = self.objective(features, positive, self.config.train.label_smoothing)  # type: ignore[arg-type]
        grad_norm = self._move(loss, rate(step, warmup, total_steps, self.config.optim.lr_end))
        if self.ema is not None:
            self.ema.update(self.model, step)
        return loss.detach(), grad_norm

    def _move(self, loss: Tensor, share: float) -> Tensor:
        self.optimizer.set_rate(share)
        if self.scaler is None:
            loss.backward()
        else:
            self.scaler.scale(loss).backward()
            for part in self.optimizer.parts.values():
                self.scaler.unscale_(part)
        grads = [p.grad for p in self.parameters if p.grad is not None]
        grad_norm = torch.nn.utils.get_total_norm(grads)
        if self.config.optim.grad_clip:
            torch.nn.utils.clip_grads_with_norm_(self.parameters, self.config.optim.grad_clip, grad_norm)
        # An fp16 overflow must stop both parts: the scaler by itself would skip only the part that has it.
        if self.scaler is None or bool(grad_norm.isfinite()):
            self.optimizer.step(self.scaler)
        if self.scaler is not None:
            self.scaler.update()
        self.optimizer.zero_grad()
        self.model.clamp_scale()
        return grad_norm.detach()
