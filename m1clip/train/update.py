"""One training step: forward, backward, clip, move. The loop, the calibration and the benchmarks all use this one."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from m1clip.config import Config
from m1clip.data import randomness as rnd
from m1clip.data.augment import Views, render
from m1clip.data.loader import Batch
from m1clip.data.preprocess import Preprocess
from m1clip.hardware.device import Device, Precision
from m1clip.hardware.heap import keep_freed_memory
from m1clip.hardware.phases import Phases
from m1clip.model.clip import Clip, Features
from m1clip.train.gradcache import Plan, Side, chunked_backward
from m1clip.train.objective import OBJECTIVES, positives
from m1clip.train.optim import Ema, Optimizer
from m1clip.train.precision import grad_scaler, no_autocast
from m1clip.train.schedule import rate

_DROPOUT = 1 << 16  # a stream of random numbers of its own, far from those of the data


class Update:
    """The model with all that moves it."""

    def __init__(
        self, model: Clip, config: Config, device: Device, precision: Precision, preprocess: Preprocess,
        autocast: Callable[[], AbstractContextManager[object]],
    ) -> None:  # fmt: skip
        self.model, self.config, self.device, self.preprocess = model, config, device, preprocess
        self.autocast = autocast
        self.objective = OBJECTIVES[config.train.objective]
        # Where bf16 is slow, its products in Muon would be slow too.
        muon_dtype = torch.bfloat16 if precision == "bf16" else torch.float32
        self.optimizer = Optimizer(model, config.optim, device.rules.fused_optimizer, muon_dtype)
        if device.kind == "cpu":
            keep_freed_memory()
        self.scaler = grad_scaler(device, precision)
        self.ema = Ema(model, config.optim.ema) if config.optim.ema else None
        self.phases = Phases(device.kind)
        compiled: Callable[[Any], Any] = torch.compile if config.model.compile else lambda function: function
        self.encoders: tuple[Callable[..., Tensor], ...] = (
            compiled(model.encode_image),
            compiled(model.encode_text),
        )
        # Compiled code without a graph may draw other dropout masks than the same code with one.
        graphs = bool(config.model.compile and model.shape.dropout)
        scale = self.scaler.scale if self.scaler is not None else lambda loss: loss
        self.plan = Plan(autocast, no_autocast(device, precision), scale, graphs, self.phases.mark)
        self.parameters = list(model.parameters())
        model.train()

    def __call__(self, batch: Batch, step: int, warmup: int, total_steps: int) -> tuple[Tensor, Tensor]:
        """Loss and gradient norm, still on the device: reading them is what would make the host wait."""
        self.phases.mark("copy")
        batch = batch.to(self.device.torch, self.device.rules.non_blocking)
        loss = self.backward(batch, step)
        self.phases.mark("optimizer")
        grad_norm = self._move(rate(step, warmup, total_steps, self.config.optim.lr_end))
        if self.ema is not None:
            self.ema.update(self.model, step)
        self.phases.stop()
        return loss, grad_norm

    def backward(self, batch: Batch, step: int) -> Tensor:
        """Leave the gradient of a batch, which is on the device, with the parameters; gives the loss."""
        positive = positives(self.config.train.objective, batch.pictures, batch.captions, batch.owners)
        if 0 < self.config.train.chunk < len(batch.pixels):
            return self._backward_in_chunks(batch, positive, step)
        self.phases.mark("forward")
        if self.model.shape.dropout:
            torch.manual_seed(self.config.seed * 1_000_003 + step)  # dropout too is a function of the step
        encode_image, encode_text = self.encoders
        with self.autocast():
            pixels = render(batch.pixels, batch.views, self.preprocess)
            image = encode_image(pixels, *_shown(batch.patches))
            text = torch.cat([encode_text(group) for group in batch.text_groups()])
        loss = self._loss(image, text, positive)
        self.phases.mark("backward")
        self.plan.scale(loss).backward()
        return loss.detach()

    def _backward_in_chunks(self, batch: Batch, positive: Tensor, step: int) -> Tensor:
        """The same gradient with the graph of one chunk at a time; a picture may have several captions."""
        encode_image, encode_text = self.encoders

        def of_pictures(rows: slice) -> Tensor:
            self._seed(step, 2 * rows.start)
            pixels = render(batch.pixels[rows], _rows_of(batch.views, rows), self.preprocess)
            return encode_image(pixels, *_shown(batch.patches, rows))  # floats of one chunk only

        def of_captions(rows: slice) -> Tensor:
            self._seed(step, 2 * rows.start + 1)
            return encode_text(batch.texts(rows))

        def loss_of(features: list[Tensor]) -> Tensor:
            image, text = features
            return self._loss(image, text, positive)

        pictures, captions = len(batch.pixels), len(batch.tokens)
        chunk = self.config.train.chunk
        sides = [
            Side(of_pictures, pictures, chunk),
            Side(of_captions, captions, -(-chunk * captions // pictures)),
        ]
        return chunked_backward(sides, loss_of, self.plan)

    def _seed(self, step: int, draw: int) -> None:
        """Dropout of a chunk is a function of the step and of its place: the second encoding repeats the first."""
        if self.model.shape.dropout:
            torch.manual_seed(int(rnd.bits(self.config.seed, step, np.array(draw), _DROPOUT)))

    def _loss(self, image: Tensor, text: Tensor, positive: Tensor) -> Tensor:
        features = Features(image, text, self.model.scale(), self.model.logit_bias)
        return self.objective(features, positive, self.config.train.label_smoothing)

    def _move(self, share: float) -> Tensor:
        """Clip the gradients and move the weights by a share of the peak learning rate; gives the gradient's norm."""
        self.optimizer.set_rate(share)
        if self.scaler is not None:
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


def _shown(patches: Tensor | None, rows: slice = slice(None)) -> tuple[Tensor, ...]:
    """The patches of some rows as an argument, or none: a pretrained tower knows of no patches."""
    return () if patches is None else (patches[rows],)


def _rows_of(views: Views, rows: slice) -> Views:
    """The random choices of some rows of a batch."""
    return Views(**{item.name: getattr(views, item.name)[rows] for item in fields(views)})
