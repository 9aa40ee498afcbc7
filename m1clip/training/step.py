"""One training step: forward, backward, clip, move. The loop, the calibration and the benchmarks all use this one."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from m1clip.config import Config
from m1clip.data import randomness as rnd
from m1clip.data.augment import render
from m1clip.data.images import Preprocess
from m1clip.data.loader import Batch
from m1clip.hardware.device import Device, Precision
from m1clip.hardware.memory import keep_freed_memory, map_large_blocks
from m1clip.hardware.precision import grad_scaler, no_autocast
from m1clip.hardware.timing import Phases
from m1clip.losses import OBJECTIVES, positives, text_contrast
from m1clip.model.clip import CLIP, Features
from m1clip.model.pretrained import weights_hash
from m1clip.training.cuda_graph import CapturedStep
from m1clip.training.grad_cache import Plan, Side, chunked_backward
from m1clip.training.oom import OOMHandler
from m1clip.training.optim import EMA, Optimizer
from m1clip.training.schedule import lr_schedule
from m1clip.training.teacher import Teacher

_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes
_AT_ONCE = 32  # rows of a look at a step that failed
# Under these names modules keep the share that their dropout takes.
_SHARES = ("p", "drop_prob", "dropout", "dropout_prob", "attention_dropout", "layerdrop")
_DROPOUT = 1 << 16  # a stream of random numbers of its own, far from those of the data


class TrainStep:
    """The model with all that moves it."""

    def __init__(
        self, model: CLIP, config: Config, device: Device, precision: Precision, preprocess: Preprocess,
        autocast: Callable[[], AbstractContextManager[object]], teacher: Teacher | None = None,
    ) -> None:  # fmt: skip
        self.teacher = teacher
        self.model, self.config, self.device, self.preprocess = model, config, device, preprocess
        self.autocast = autocast
        self.objective = OBJECTIVES[config.train.loss]
        # Where bf16 is slow, its products in Muon would be slow too.
        muon_dtype = torch.bfloat16 if precision == "bf16" else torch.float32
        self.scaler = grad_scaler(device, precision)
        self.draws = draws_at_random(model)
        one_place = len({p.device for p in model.parameters()}) == 1
        self.skip: Literal["host", "device", "never"] = skipped_by(device.kind, one_place)
        graph = config.model.cuda_graph and device.rules.graphs and self.scaler is None and not self.draws
        graph = graph and model.image_tower.capturable and model.text_tower.capturable and teacher is None
        self.optimizer = Optimizer(model, config.optim, device.rules.fused_optimizer, muon_dtype, graph)
        self.cuda_graph = CapturedStep(self) if graph else None
        if device.kind == "cpu":
            map_large_blocks()
        # Blocks mapped one by one take least memory and some time: what who computes again has chosen already.
        self.settles = device.kind == "cpu" and not config.model.grad_checkpointing
        self.ema = EMA(model, config.optim.ema, graph) if config.optim.ema else None
        self.phases = Phases(device.kind)
        self.oom: OOMHandler | None = None  # where there is one, it makes chunks smaller when memory runs out
        self.schedule = lr_schedule(config.optim, config.train.steps)
        self.lr_factor = 1.0  # lowered by each rollback
        # What the compiler needs there is what our kernels need.
        model.use_triton(config.model.compile and device.kind == "cuda" and precision == "bf16")
        compiled: Callable[[Any], Any] = torch.compile if config.model.compile else lambda function: function
        self.encode_image, self.encode_text = compiled(model.encode_image), compiled(model.encode_text)
        self.project_image, self.project_text = compiled(model.project_image), compiled(model.project_text)
        # Compiled code without a graph may draw other dropout masks than the same code with one.
        graphs = config.model.compile and self.draws
        scale = self.scaler.scale if self.scaler is not None else lambda loss: loss
        self.plan = Plan(autocast, no_autocast(device, precision), scale, graphs, self._mark)
        self.parameters = list(model.parameters())
        self.in_blocks = device.kind == "cpu"  # the loss among captions; else its logits are made all at once
        model.train()

    def __call__(self, batch: Batch, step: int) -> tuple[Tensor, Tensor]:
        """Loss and gradient norm, still on the device: reading them is what would make the host wait."""
        self.optimizer.set_rate(self.schedule(step) * self.lr_factor)
        if self.ema is not None:
            self.ema.set_step(step)
        if self.cuda_graph is not None and self.cuda_graph.takes(batch):
            return self.cuda_graph(batch, step)
        return self.eager(batch, step)

    def eager(self, batch: Batch, step: int) -> tuple[Tensor, Tensor]:
        """The step as it stands here, kernel by kernel, within the memory that there is."""
        self.phases.mark("copy")
        batch = batch.to(self.device.torch, self.device.rules.non_blocking)
        loss = self._backward_within_room(batch, step)
        self.phases.mark("optimizer")
        grad_norm = self.move(loss)
        if self.settles:
            self.settles = False
            keep_freed_memory()  # from now on all sizes are known
        self.phases.stop()
        return loss, grad_norm

    @cached_property
    def frozen_sha256(self) -> str:
        """What the weights are that this run never changes; empty where it trains all."""
        frozen = {name: p.detach() for name, p in self.model.named_parameters() if not p.requires_grad}
        return weights_hash(frozen) if frozen else ""

    def reset_graph(self) -> None:
        """What was recorded of the step holds on to tensors that are replaced now."""
        if self.cuda_graph is not None:
            self.cuda_graph.forget()

    def _backward_within_room(self, batch: Batch, step: int) -> Tensor:
        if self.oom is None:
            return self.backward(batch, step)
        return self.oom.fit(lambda: self.backward(batch, step), self.clear, len(batch), step)

    def clear(self) -> None:
        """Forget a step that was broken off, and give its memory back, with that of a recording."""
        self.reset_graph()
        self.optimizer.zero_grad()
        self.device.release()

    def _mark(self, phase: str) -> None:
        if phase == "backward" and self.oom is not None:
            self.oom.look()  # now the activations are all there
        self.phases.mark(phase)

    def backward(self, batch: Batch, step: int) -> Tensor:
        """Leave the gradient of a batch, which is on the device, with the parameters; gives the loss."""
        positive = positives(self.config.train.loss, batch.sample_ids, batch.caption_ids, batch.image_index)
        chunk = self.config.train.micro_batch if self.oom is None else self.oom.chunk
        if 0 < chunk < len(batch):
            return self._backward_in_chunks(batch, positive, step, chunk)
        self.phases.mark("forward")
        if self.draws:
            torch.manual_seed(self.config.seed * 1_000_003 + step)  # dropout too is a function of the step
        with self.autocast():
            # The text first: the backward pass goes the other way, and frees the large tower's activations first.
            image = None if self.model.text_first else self._encode_images(batch)
            texts = [self._encode_texts(batch, rows) for rows in batch.text_rows()]
            text = texts[0] if len(texts) == 1 else torch.cat(texts)
            image = self._encode_images(batch) if image is None else image
        loss = self._loss(image, text, positive, batch)
        self._mark("backward")
        self.plan.scale(loss).backward()
        return loss.detach()

    def _encode_images(self, batch: Batch, rows: slice = slice(None)) -> Tensor:
        """Unit vectors of some images, from pixels or from the features of a frozen tower."""
        if batch.image_features is not None:
            return self.project_image(batch.image_features[rows])
        kept = () if batch.kept_patches is None else (batch.kept_patches[rows],)
        return self.encode_image(normalized_pixels(batch, self.preprocess, rows), *kept)

    def _encode_texts(self, batch: Batch, rows: slice) -> Tensor:
        if batch.text_features is not None:
            return self.project_text(batch.text_features[rows])
        return self.encode_text(batch.texts(rows))

    def _backward_in_chunks(self, batch: Batch, positive: Tensor, step: int, chunk: int) -> Tensor:
        """The same gradient with the graph of one chunk at a time; an image may have several captions."""

        def of_images(rows: slice) -> Tensor:
            self._seed(step, 2 * rows.start)
            return self._encode_images(batch, rows)

        def of_captions(rows: slice) -> Tensor:
            self._seed(step, 2 * rows.start + 1)
            return self._encode_texts(batch, rows)

        def loss_of(features: list[Tensor]) -> Tensor:
            image, text = features
            return self._loss(image, text, positive, batch)

        images, captions = len(batch), len(batch.caption_ids)
        sides = [Side(of_images, images, chunk), Side(of_captions, captions, -(-chunk * captions // images))]
        return chunked_backward(sides, loss_of, self.plan)

    def _seed(self, step: int, draw: int) -> None:
        """Dropout of a chunk is a function of the step and of its place: the second encoding repeats the first."""
        if self.draws:
            torch.manual_seed(int(rnd.bits(self.config.seed, step, np.array(draw), _DROPOUT)))

    def _loss(self, image: Tensor, text: Tensor, positive: Tensor, batch: Batch) -> Tensor:
        features = Features(image, text, self.model.scale(), self.model.logit_bias)
        # On kept features the loss is most of a step; where towers run, it is not worth the rounding.
        with self.autocast() if batch.image_features is not None else nullcontext():
            loss = self.objective(features, positive, self.config.train.label_smoothing)
        if self.config.train.text_contrast:
            near = text_contrast(features, batch.sample_ids, batch.caption_ids, batch.image_index, self.in_blocks)
            loss = loss + self.config.train.text_contrast * near
        return loss if self.teacher is None else self.teacher.taught(loss, features, batch)

    @torch.no_grad()
    def suspects(self, batch: Batch) -> list[int]:
        """Rows whose image, or a caption of it, has no finite vector; [] when all are so: then it is not them."""
        batch = batch.to(self.device.torch)
        rows = len(batch)
        bad = torch.zeros(rows, dtype=torch.bool, device=self.device.torch)
        with self.autocast():
            for at in range(0, rows, _AT_ONCE):
                part = slice(at, at + _AT_ONCE)
                image = self._encode_images(batch, part)
                bad[part] = ~image.isfinite().all(dim=1)
            for at in range(0, len(batch.caption_ids), _AT_ONCE):
                part = slice(at, at + _AT_ONCE)
                text = self._encode_texts(batch, part)
                bad[batch.image_index[part][~text.isfinite().all(dim=1)]] = True
        found: list[int] = bad.nonzero().flatten().tolist()
        return found if len(found) < rows else []

    def move(self, loss: Tensor) -> Tensor:
        """CLIP the gradients and move the weights; gives the gradient's norm.

        Where loss or norm are not finite nothing moves: no weight, no state of the optimizer, no average.
        """
        if self.scaler is not None:
            for part in self.optimizer.parts.values():
                self.scaler.unscale_(part)
        grads = [p.grad for p in self.parameters if p.grad is not None]
        grad_norm = torch.nn.utils.get_total_norm(grads)
        if self.config.optim.grad_clip_norm:
            torch.nn.utils.clip_grads_with_norm_(self.parameters, self.config.optim.grad_clip_norm, grad_norm)
        grad_norm = grad_norm.detach()
        finite = loss.isfinite() & grad_norm.isfinite()
        on_device = self.scaler is None and self.skip == "device"
        # An fp16 overflow must stop both parts: the scaler by itself would skip only the part that has it.
        moves = on_device or self.skip == "never" or bool(finite)
        if on_device:
            self._step_where(finite, grads)
        elif moves:
            self.optimizer.step(self.scaler)
        if self.scaler is not None:
            self.scaler.update()
        self.optimizer.zero_grad()
        self.model.clamp_scale()
        if self.ema is not None and moves:
            self.ema.update(self.model, 1 - finite.float() if on_device else None)
        return grad_norm

    @torch.no_grad()
    def _step_where(self, finite: Tensor, grads: list[Tensor]) -> None:
        """Move everything if a flag on the device says so; the host does not wait to learn it."""
        # NaN times 0 is NaN; the bits of it, taken as a whole number, times 0 are a zero.
        for size in {grad.element_size() for grad in grads}:
            bits = [grad.view(_INTEGERS[size]) for grad in grads if grad.element_size() == size]
            torch._foreach_mul_(bits, finite.to(_INTEGERS[size]))
        skip = 1 - finite.float()
        parts: list[Any] = list(self.optimizer.parts.values())
        for part in parts:
            part.found_inf = skip  # torch's fused optimizers and our Muon take it
        try:
            self.optimizer.step()
        finally:
            for part in parts:
                del part.found_inf


def normalized_pixels(batch: Batch, preprocess: Preprocess, rows: slice = slice(None)) -> Tensor:
    """(n, 3, size, size): what the image tower takes."""
    views = batch.views if batch.views is None or rows == slice(None) else batch.views.rows(rows)
    return render(batch.pixels(rows), views, preprocess)


def skipped_by(kind: str, one_place: bool) -> Literal["host", "device"]:
    """Who leaves out an update that is not finite: on CUDA the device, so that the host need not wait to learn it."""
    # torch's fused AdamW takes found_inf on MPS too, but moves the weights all the same: there the host decides.
    # So it does for towers on two devices: no flag lies on both.
    return "device" if kind == "cuda" and one_place else "host"


def draws_at_random(model: CLIP) -> bool:
    """Whether a step of the model draws random numbers: its own dropout, or that of a tower of others."""
    shares = (getattr(module, name, 0.0) for module in model.modules() for name in _SHARES)
    return any(isinstance(share, float) and share > 0 for share in shares)
