"""One training step: forward, backward, clip, optimizer. The loop, the calibration and the benchmarks all use it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np
import torch
from torch import Tensor

from m1clip.config import Config
from m1clip.data import randomness as rnd
from m1clip.data.augment import render
from m1clip.data.images import Preprocess
from m1clip.data.loader import Batch
from m1clip.hardware.device import Device, Precision, autocast
from m1clip.hardware.memory import keep_freed_memory, map_large_blocks
from m1clip.hardware.timing import Phases
from m1clip.losses.registry import LOSSES, Ids
from m1clip.losses.run_loss import Rows, RunLoss
from m1clip.model.clip import CLIP, Features
from m1clip.model.heads import Head, mixed
from m1clip.model.pretrained import weights_hash
from m1clip.training.cuda_graph import CapturedStep
from m1clip.training.distributed import GradientExchange, Ranks, Sizes
from m1clip.training.duration import StepPlan, step_plan
from m1clip.training.muon import Muon, orthogonalize
from m1clip.training.oom import OOMHandler
from m1clip.training.optim import Optimizer
from m1clip.training.schedule import lr_schedule
from m1clip.training.transfer import Teacher

if TYPE_CHECKING:  # a heavy import
    from m1clip.training.sharding import Shards

GRAD_CLIP_NORM = 1.0
Result = TypeVar("Result")
INTEGER_DTYPES = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes
DROPOUT_ATTRIBUTES = ("p", "drop_prob", "dropout", "dropout_prob", "attention_dropout", "layerdrop")
DROPOUT_STREAM = 1 << 16  # a random stream separate from the data's
INSPECTED_ROWS = 32  # rows of a non-finite step to inspect at a time
ONE_ROW = slice(0, 1)


@dataclass(frozen=True)
class Tower:
    """One encoder and its input in slices; `encode(rows)` must give the same features for the same rows each time.

    The exact gradient of a large batch in the memory of a slice (GradCache, arXiv 2101.06983): a contrastive loss needs
    all features of the batch at once, but only the towers' activations are large. So all slices are encoded without a
    graph, the loss is computed once over all features, and then each slice is re-encoded with a graph and
    backpropagates the gradient of its features.
    """

    encode: Callable[[slice], Tensor]
    slices: list[slice]
    extra: int = 0  # calls without a result: with sharded weights, all ranks call a tower equally often

    def features(self) -> Tensor:
        """The features of all rows; with a graph only if it is needed for the backward pass of all at once."""
        found = [self.encode(rows) for rows in self.slices] + [self.encode(ONE_ROW)[:0] for _ in range(self.extra)]
        return found[0] if len(found) == 1 else torch.cat(found)

    def features_only(self) -> Tensor:
        found = [self.encode(rows).detach() for rows in self.slices]
        for _ in range(self.extra):
            self.encode(ONE_ROW)
        return torch.cat(found)

    def backward(
        self,
        gradient: Tensor,
        mark: Callable[[str], None] = lambda phase: None,
        no_autocast: Callable[[], AbstractContextManager[object]] = nullcontext,
        exchange: GradientExchange | None = None,
    ) -> None:
        """Re-encode each slice and add to every parameter what follows from the gradient of its features."""
        zero = torch.zeros_like(gradient[ONE_ROW])
        passes = [*((rows, gradient[rows]) for rows in self.slices), *[(ONE_ROW, zero)] * self.extra]
        for number, (rows, part) in enumerate(passes, start=1):
            mark("forward")
            encoded = self.encode(rows)
            mark("backward")
            if exchange is not None:
                exchange.final = number == len(passes)
            with no_autocast():
                encoded.backward(part)


class TrainStep:
    """A model with its loss and optimizer. `loss, grad_norm = train_step(batch, step)` trains it."""

    def __init__(
        self,
        model: CLIP,
        config: Config,
        device: Device,
        precision: Precision,
        preprocess: Preprocess,
        teacher: Teacher | None = None,
        ranks: Ranks = Ranks(),  # noqa: B008  immutable
    ) -> None:
        self.model, self.config, self.device, self.preprocess = model, config, device, preprocess
        self.ranks = ranks
        self.shards: Shards | None = None
        if config.train.shard == "on" and ranks.size > 1:
            from m1clip.training.sharding import Shards

            self.frozen_sha256  # noqa: B018  of the complete weights
            self.shards = Shards(model, ranks, device.torch, precision)
        self.autocast = autocast(device, precision)
        teacher_logits = None if teacher is None else teacher.logits
        objective = LOSSES[config.train.loss]
        self.run_loss = RunLoss(objective, config.train.text_contrast or 0.0, teacher_logits)
        self.scaler = torch.amp.GradScaler(device.kind) if precision == "fp16" else None  # gradients underflow
        self.has_dropout = has_dropout(model)
        one_device = len({p.device for p in model.parameters()}) == 1
        self.skip: Literal["host", "device", "never"] = skip_rule(device.kind, one_device)
        graph = config.model.cuda_graph and device.rules.graphs and self.scaler is None and not self.has_dropout
        graph = graph and model.image_tower.capturable and model.text_tower.capturable and teacher is None
        # Muon's products use bf16 only where it is fast.
        muon_dtype = torch.bfloat16 if precision == "bf16" else torch.float32
        local = {} if self.shards is None else self.shards.local
        self.optimizer = Optimizer(model, config.optim, device.rules.fused_optimizer, muon_dtype, graph, local)
        muon = self.optimizer.parts.get("muon")
        if isinstance(muon, Muon) and ranks.size > 1:
            muon.ranks, muon.full_rows = ranks, {} if self.shards is None else self.shards.full_rows
        self.follow(step_plan(config.train))
        self.lr_factor = 1.0  # lowered by each rollback
        self.cuda_graph = CapturedStep(self) if graph else None
        if self.cuda_graph is not None and ranks.size > 1:
            self.cuda_graph.disabled = "the ranks exchange the sizes of their batches on the host in each step"
        self.oom: OOMHandler | None = None  # reduces the micro-batch when memory runs out; None: raise
        self.phases = Phases(device.kind)
        if device.kind == "cpu":
            map_large_blocks()
        # After the first step, reuse freed memory; with activation checkpointing, return it instead.
        self.keeps_memory = device.kind == "cpu" and not config.model.grad_checkpointing
        # Our kernels have the same requirements as the compiler.
        model.use_triton(config.model.compile and device.kind == "cuda" and precision == "bf16")
        compiled: Callable[[Any], Any] = torch.compile if config.model.compile else lambda function: function
        self.encode_image, self.encode_text = compiled(model.encode_image), compiled(model.encode_text)
        self.project_image, self.project_text = compiled(model.project_image), compiled(model.project_text)
        self.scale_loss: Callable[[Tensor], Tensor] = lambda loss: loss
        if self.scaler is not None:
            self.scale_loss = self.scaler.scale
        # Compiled code may draw different dropout masks with and without an autograd graph.
        self.first_pass_with_graph = config.model.compile and self.has_dropout
        self.no_autocast = autocast(device, precision, enabled=False)  # for backward passes
        self.complete_parameters = [p for name, p in model.named_parameters() if name not in local]
        self.parameters = [*self.complete_parameters, *local.values()]
        self.exchange: GradientExchange | None = None
        self.rest = self.complete_parameters  # whose gradients are exchanged after the backward pass
        if ranks.size > 1 and self.shards is None:
            parts = (model.text_tower, model.text_head, model.image_tower, model.image_head)
            encoders = [p for part in parts for p in part.parameters() if p.requires_grad]
            self.exchange = GradientExchange(ranks, encoders[::-1])
            self.rest = [p for p in (model.logit_scale, model.logit_bias) if p is not None]
        model.train()

    def follow(self, plan: StepPlan | None) -> None:
        """Use the learning rate schedule of a plan."""
        self.schedule = lr_schedule(self.config.optim, plan)

    def __call__(self, batch: Batch, step: int) -> tuple[Tensor, Tensor]:
        """Train on one batch. Loss and gradient norm stay on the device to avoid synchronization."""
        self.optimizer.set_lr(self.schedule(step) * self.lr_factor)
        if self.cuda_graph is not None and self.cuda_graph.accepts(batch):
            batch = self.cuda_graph.pad(batch)
            replayed = self.cuda_graph.replay(batch, step)
            if replayed is not None:
                return replayed
        self.phases.mark("copy")
        batch = batch.to(self.device.torch, self.device.rules.non_blocking)
        loss = self._gradients_that_fit(batch, step)
        self.phases.mark("optimizer")
        grad_norm = self.update_weights(loss)
        if self.keeps_memory:
            self.keeps_memory = False
            keep_freed_memory()  # all block sizes have been allocated once
        self.phases.stop()
        return loss, grad_norm

    def _gradients_that_fit(self, batch: Batch, step: int) -> Tensor:
        if self.oom is None:
            return self.compute_gradients(batch, step)
        return self.oom.run(lambda: self.compute_gradients(batch, step), self.clear, len(batch), step)

    def compute_gradients(self, batch: Batch, step: int) -> Tensor:
        """Forward and backward of a batch on the device; returns the detached loss.

        With several ranks the batch has the rows of this one; loss and gradients are those of all rows together.
        """
        captions = len(batch.caption_ids)
        rows = len(batch) if self.shards is None else self.ranks.agree(len(batch))[0]
        in_micro_batches = 0 < self.micro_batch < rows
        towers = self._towers(batch, step, in_micro_batches)
        if in_micro_batches:
            encode = partial(self._encode_only, towers)
            backward: Callable[[list[Tensor]], None] = partial(self._encode_and_backward, towers)
        else:
            encode = partial(self._encode, towers, step)
            backward = lambda gradients: _backward(features, gradients)  # noqa: E731
        features, sizes = self._together(encode, len(batch), captions)
        loss, gradients = self._loss_gradients(features, batch, sizes)

        def backward_pass() -> None:
            with nullcontext() if self.exchange is None else self.exchange.during(final=not in_micro_batches):
                self._mark("backward")
                backward(gradients)

        self._together(backward_pass)
        if self.shards is not None:
            self.shards.take_gradients()
        if self.exchange is not None:
            self.exchange.finish()
        if self.ranks.size > 1:
            self.ranks.add([loss, *(p.grad for p in self.rest if p.grad is not None)])
        return loss

    def _together(self, work: Callable[[], Result], *facts: int) -> tuple[Result, Sizes]:
        """Run work that may run out of memory, and exchange a few numbers."""

        def watched() -> Result:
            with nullcontext() if self.shards is None else self.shards.watched():
                try:
                    return work()
                finally:
                    self._mark_exchange()  # waiting for slower ranks

        return self.ranks.together(watched, *facts)

    def _encode(self, towers: Sequence[Tower], step: int) -> list[Tensor]:
        self.phases.mark("forward")
        self._seed_dropout(step, 0)
        with self.autocast():
            # Text first: the backward pass then starts with the larger tower and frees its activations.
            text, image = towers[1].features(), towers[0].features()
        return [image, text]

    def _encode_only(self, towers: Sequence[Tower]) -> list[Tensor]:
        self.phases.mark("forward")
        # One autocast context per pass: its cache of cast weights saves a cast per micro-batch, but casts made without
        # a graph must not be reused in the pass that needs one.
        with self.autocast(), torch.set_grad_enabled(self.first_pass_with_graph):
            return [tower.features_only() for tower in towers]

    def _encode_and_backward(self, towers: Sequence[Tower], gradients: Sequence[Tensor]) -> None:
        with self.autocast():
            for tower, gradient in zip(towers, gradients, strict=True):
                tower.backward(gradient, self._mark, self.no_autocast, self.exchange)

    def _loss_gradients(self, features: list[Tensor], batch: Batch, sizes: Sizes) -> tuple[Tensor, list[Tensor]]:
        """The detached loss and its gradient for the features of this rank's rows.

        The parameters of the loss (temperature, bias) get their gradients here. With several ranks, the loss and these
        gradients are parts that add up over the ranks.
        """
        self._mark_exchange()
        joint = self.ranks.join(batch, features, sizes)
        image, text = joint.features
        if self.ranks.size > 1:
            self.phases.mark("forward")
        # With cached features the loss dominates the step; with towers, autocast is not worth the
        # rounding error.
        autocast = nullcontext if batch.image_features is None else self.autocast

        def loss_and_grads() -> tuple[Tensor, list[Tensor]]:
            return self.run_loss.loss_and_grads(
                Features(image, text, self.model.scale(), self.model.logit_bias),
                Ids(joint.sample_ids, joint.caption_ids, joint.image_index),
                Rows(joint.images, joint.texts),
                autocast=autocast,
                backward=self._backward_of_loss,
            )

        loss, gradients = self._together(loss_and_grads)[0]
        self._mark_exchange()
        return loss, self.ranks.own_rows(gradients, sizes)

    def _backward_of_loss(self, loss: Tensor) -> None:
        self._mark("backward")
        self.scale_loss(loss).backward()

    def update_weights(self, loss: Tensor) -> Tensor:
        """Clip the gradients and update the weights; returns the gradient norm.

        If the loss or norm is not finite, nothing changes: no weight, no optimizer state.
        """
        if self.scaler is not None:
            for part in self.optimizer.parts.values():
                self.scaler.unscale_(part)
        grads = [p.grad for p in self.parameters if p.grad is not None]
        complete = [p.grad for p in self.complete_parameters if p.grad is not None]
        total_norm = torch.nn.utils.get_total_norm if self.shards is None else self.shards.total_norm
        grad_norm = total_norm(complete)
        torch.nn.utils.clip_grads_with_norm_(self.parameters, GRAD_CLIP_NORM, grad_norm)
        grad_norm = grad_norm.detach()
        finite = loss.isfinite() & grad_norm.isfinite()
        on_device = self.scaler is None and self.skip == "device"
        if on_device:
            self._step_if(finite, grads)
        # An fp16 overflow must stop both optimizers: the scaler by itself would skip only the affected one.
        elif self.skip == "never" or bool(finite):
            self.optimizer.step(self.scaler)
        if self.scaler is not None:
            self.scaler.update()
        self.optimizer.zero_grad()
        self.model.clamp_scale()
        return grad_norm

    @torch.no_grad()
    def _step_if(self, finite: Tensor, grads: list[Tensor]) -> None:
        """Step the optimizer if a flag on the device is set, without synchronization."""
        # NaN * 0 is NaN, but the bits of NaN as an integer, times 0, are 0.
        for size in {grad.element_size() for grad in grads}:
            bits = [grad.view(INTEGER_DTYPES[size]) for grad in grads if grad.element_size() == size]
            torch._foreach_mul_(bits, finite.to(INTEGER_DTYPES[size]))
        skip = 1 - finite.float()
        parts: list[Any] = list(self.optimizer.parts.values())
        for part in parts:
            part.found_inf = skip  # read by torch's fused optimizers and by our Muon
        try:
            self.optimizer.step()
        finally:
            for part in parts:
                del part.found_inf

    @property
    def micro_batch(self) -> int:
        """Samples encoded at a time; 0: the full batch."""
        return self.config.train.micro_batch if self.oom is None else self.oom.micro_batch

    def _rows_at_once(self, batch: Batch) -> tuple[int, int]:
        """How many images and how many captions the device may encode in one call."""
        rules, images, captions = self.device.rules, len(batch), len(batch.caption_ids)
        image_tokens = self.model.image_tower.tokens_per_image if batch.image_features is None else 1
        text_tokens = 1 if batch.tokens is None else batch.tokens.shape[1]
        return rules.rows_at_once(image_tokens) or images, rules.rows_at_once(text_tokens) or captions

    def _encode_images(self, batch: Batch, rows: slice = slice(None), keys: Tensor | None = None) -> Tensor:
        """Unit vectors of some images, from pixels or from the features of a frozen tower; with dropout by `keys`."""
        dropout = () if keys is None else (keys[rows],)
        if batch.image_features is not None:
            return self.project_image(batch.image_features[rows], *dropout)
        kept = None if batch.kept_patches is None else batch.kept_patches[rows]
        return self.encode_image(normalized_pixels(batch, self.preprocess, rows), kept, *dropout)

    def _encode_texts(self, batch: Batch, rows: slice, keys: Tensor | None = None) -> Tensor:
        dropout = () if keys is None else (keys[rows],)
        if batch.text_features is not None:
            return self.project_text(batch.text_features[rows], *dropout)
        return self.encode_text(batch.texts(rows), *dropout)

    def dropout_keys(self, batch: Batch, step: int) -> list[Tensor | None]:
        """A random number for each image and each caption, from which the masks of its head follow, on any rank."""
        if not self.has_dropout:
            return [None, None]
        word = int(rnd.bits(self.config.seed, step, np.array(0), DROPOUT_STREAM).astype(np.int64))
        images, captions = mixed(batch.sample_ids ^ word), mixed(batch.caption_ids ^ ~word)
        keys = images, mixed(captions ^ batch.sample_ids[batch.image_index])
        heads = self.model.image_head, self.model.text_head
        return [key if isinstance(head, Head) else None for key, head in zip(keys, heads, strict=True)]

    def _towers(self, batch: Batch, step: int, in_micro_batches: bool) -> list[Tower]:
        """Both encoders with their input in slices: as few as the device takes, or micro-batches."""
        image_keys, text_keys = self.dropout_keys(batch, step)

        def encode_images(rows: slice) -> Tensor:
            if in_micro_batches:
                self._seed_dropout(step, 2 * rows.start)
            return self._encode_images(batch, rows, image_keys)

        def encode_texts(rows: slice) -> Tensor:
            if in_micro_batches:
                self._seed_dropout(step, 2 * rows.start + 1)
            return self._encode_texts(batch, rows, text_keys)

        images, captions, size = len(batch), len(batch.caption_ids), self.micro_batch
        most_images, most_texts = self._rows_at_once(batch)
        groups = batch.text_rows()
        if in_micro_batches:
            most_images, most_texts = min(size, most_images), min(-(-size * captions // images), most_texts)
            groups = [slice(0, captions)]
        slices = [split(slice(0, images), most_images), [part for rows in groups for part in split(rows, most_texts)]]
        calls = list(map(len, slices))
        most = calls if self.shards is None else self.ranks.agree(*calls)
        encoders = (encode_images, encode_texts)
        return [Tower(encode, rows, n - len(rows)) for encode, rows, n in zip(encoders, slices, most, strict=True)]

    def _seed_dropout(self, step: int, draw: int) -> None:
        """Make the dropout of third-party towers a function of step, rank and position, the same in both passes."""
        if self.has_dropout:
            torch.manual_seed(int(rnd.bits(self.config.seed, step, np.array(draw), DROPOUT_STREAM + self.ranks.rank)))

    def _mark(self, phase: str) -> None:
        if phase == "backward" and self.oom is not None and self.shards is None:
            self.oom.check()  # all activations are in memory now
        self.phases.mark(phase)

    def _mark_exchange(self) -> None:
        if self.ranks.size > 1:
            self.phases.mark("exchange")

    def orthogonalize(self, x: Tensor) -> Tensor:
        """Muon's products (k, m, n) as this device computes them; the result is float32 on the CPU."""
        return orthogonalize(x.to(self.device.torch)).float().cpu()

    def for_check(self, model: CLIP) -> TrainStep:
        """This step for a copy of the model, without dropout and loss scaling: its gradients are compared."""
        step = copy.copy(self)
        step.model, step.has_dropout = model.eval(), False
        step.encode_image, step.encode_text = model.encode_image, model.encode_text
        step.project_image, step.project_text = model.project_image, model.project_text
        # Gradients that are too small for fp16 are so in both; a scaled loss could overflow.
        step.scale_loss = lambda loss: loss
        step.ranks, step.shards, step.exchange = Ranks(), None, None  # a rank's own rows suffice
        return step

    def clear(self) -> None:
        self.reset_graph()
        self.optimizer.zero_grad()
        if self.shards is not None:
            self.shards.drop_gradients()
        if self.exchange is not None:
            self.exchange.finish()  # nothing is left to add to
        self.device.release()

    def reset_graph(self) -> None:
        """Drop the captured CUDA graph, because the tensors it refers to are being replaced."""
        if self.cuda_graph is not None:
            self.cuda_graph.reset()

    @cached_property
    def frozen_sha256(self) -> str:
        """Hash of the frozen weights; empty if all are trained."""
        frozen = {name: p.detach() for name, p in self.model.named_parameters() if not p.requires_grad}
        return weights_hash(frozen) if frozen else ""

    @torch.no_grad()
    def nonfinite_rows(self, batch: Batch) -> list[int]:
        """Rows whose image or captions have non-finite features; [] if all rows do: then the model is at fault."""
        batch = batch.to(self.device.torch)
        rows = len(batch)
        bad = torch.zeros(rows, dtype=torch.bool, device=self.device.torch)
        with self.autocast():
            for part in split(slice(0, rows), INSPECTED_ROWS):
                bad[part] = ~self._encode_images(batch, part).isfinite().all(dim=1)
            for part in split(slice(0, len(batch.caption_ids)), INSPECTED_ROWS):
                text = self._encode_texts(batch, part)
                bad[batch.image_index[part][~text.isfinite().all(dim=1)]] = True
        found: list[int] = bad.nonzero().flatten().tolist()
        return found if len(found) < rows else []


def _backward(features: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
    """Continue the backward pass in the encoders; one that is completely frozen has no graph."""
    pairs = [pair for pair in zip(features, gradients, strict=True) if pair[0].requires_grad]
    torch.autograd.backward([feature for feature, _ in pairs], [gradient for _, gradient in pairs])


def step_class(device: Device) -> type[TrainStep]:
    if device.kind != "mlx":
        return TrainStep
    from m1clip.training.mlx_step import MLXStep

    return MLXStep


def split(rows: slice, most: int) -> list[slice]:
    return [slice(at, min(at + most, rows.stop)) for at in range(rows.start, rows.stop, most)]


def normalized_pixels(batch: Batch, preprocess: Preprocess, rows: slice = slice(None)) -> Tensor:
    """(n, 3, size, size): the input of the image tower."""
    return render(batch.pixels(rows), None if batch.views is None else batch.views[rows], preprocess)


def skip_rule(kind: str, one_device: bool) -> Literal["host", "device"]:
    """Where to decide to skip a non-finite step: on CUDA on the device, to avoid synchronization."""
    # On MPS, torch's fused AdamW accepts found_inf but updates the weights anyway, so the host decides.
    # It also does for towers on two devices, since no flag is on both.
    return "device" if kind == "cuda" and one_device else "host"


def has_dropout(model: CLIP) -> bool:
    """Whether a forward pass of the model draws random numbers, in our own or in third-party modules."""
    values = (getattr(module, name, 0.0) for module in model.modules() for name in DROPOUT_ATTRIBUTES)
    return any(isinstance(value, float) and value > 0 for value in values)
