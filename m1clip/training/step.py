"""One training step: encode, gather, loss, scatter, backward, update.

`train_step` is a plain function of its parts: the parity checks, memory estimates and benchmarks
call it directly. training/compose.py puts around it what a run needs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from m1clip.config import Config
from m1clip.data.images import Preprocess
from m1clip.data.loader import Batch
from m1clip.hardware.device import Device, Precision
from m1clip.losses.batch_accuracy import accuracy_within_batch
from m1clip.losses.registry import LOSSES, Ids
from m1clip.losses.run_loss import Rows, RunLoss
from m1clip.model.clip import CLIP, Features
from m1clip.model.weights import weights_hash
from m1clip.optimizers import OPTIMIZERS
from m1clip.training.distributed import JointBatch, Ranks
from m1clip.training.encode import DONE, BatchEncoder, Mark, has_dropout, ignore_mark
from m1clip.training.hybrid import HybridEncoder
from m1clip.training.optim import Optimizer
from m1clip.training.step_analyses import Probe, view_step
from m1clip.training.torch_optimizers import BuildOptions
from m1clip.training.transfer import Teacher
from m1clip.training.update import NoUpdate, Updater, skip_rule
from m1clip.training.world import World


class StepResult(NamedTuple):
    """What a step reports; all stay on the device to avoid synchronization."""

    loss: Tensor
    grad_norm: Tensor
    batch_accuracy: Tensor  # (2,) accuracy within the batch, and its chance level


class PlainStep(Protocol):
    """`train_step` of some parts, or its counterpart in MLX."""

    def __call__(
        self,
        batch: Batch,
        step: int,
        micro_batch: int | None = None,
        mark: Mark = ignore_mark,
        probe: Probe | None = None,
    ) -> StepResult: ...


@dataclass(frozen=True)
class StepParts:
    """What a training step works with."""

    model: CLIP
    encoder: BatchEncoder
    world: World
    loss: RunLoss
    update: Updater
    config: Config
    device: Device
    capturable: bool = False  # as a CUDA graph
    hashed_before_sharding: str | None = None  # frozen weights, which are not complete later

    @cached_property
    def frozen_sha256(self) -> str:
        """Hash of the frozen weights; empty if all are trained."""
        if self.hashed_before_sharding is not None:
            return self.hashed_before_sharding
        return frozen_hash(self.model)


def train_step(
    parts: StepParts,
    batch: Batch,
    step: int,
    micro_batch: int | None = None,
    mark: Mark = ignore_mark,
    probe: Probe | None = None,
) -> StepResult:
    """Train on one batch.

    `micro_batch` images are encoded at a time, 0: all at once, None: as configured; the gradient is
    the same. With several ranks the batch has the rows of this one; loss and gradients are those of
    all rows together.
    """
    encoder, world, device = parts.encoder, parts.world, parts.device
    size = parts.config.train.micro_batch if micro_batch is None else micro_batch
    chunk = world.chunk_size(size, len(batch))
    with world.synchronized(len(batch), len(batch.caption_ids), mark=mark) as sizes:
        mark("copy")
        batch = batch.to(device.torch, device.capabilities.non_blocking)
        encoded = encoder.forward(batch, step, chunk, world.most_calls, mark)
    gathered = world.gather(batch, encoded.features, sizes)
    mark("forward")
    with world.synchronized(mark=mark):
        loss, gradients, accuracy = _loss_and_grads(parts, batch, gathered, mark)
    own_gradients = world.scatter(gradients, sizes)
    with world.synchronized(mark=mark):
        world.backward(encoded, own_gradients)
    loss, accuracy = world.reduce(loss, accuracy)
    # An error of a probe is not repeated with less memory: from here on the step belongs to the
    # update.
    mark("optimizer")
    if probe is not None:
        probe(view_step(parts, step))
    grad_norm = parts.update(loss)
    mark(DONE)
    return StepResult(loss, grad_norm, accuracy)


def compute_gradients(
    parts: StepParts, batch: Batch, step: int, micro_batch: int | None = None
) -> Tensor:
    """The loss of a step without the update: the gradients stay in the parameters."""
    without_update = replace(parts, update=parts.update.without_update())
    return train_step(without_update, batch, step, micro_batch).loss


def _loss_and_grads(
    parts: StepParts, batch: Batch, gathered: JointBatch, mark: Mark
) -> tuple[Tensor, list[Tensor], Tensor]:
    """The loss of this process's rows, its gradients by the features of all rows, and the accuracy
    of its rows.
    """

    def backward(loss: Tensor) -> None:
        mark("backward")
        parts.update.scale_loss(loss).backward()

    image, text = gathered.features
    features = Features(image, text, parts.model.scale(), parts.model.logit_bias)
    ids = Ids(gathered.sample_ids, gathered.caption_ids, gathered.image_index, gathered.mixed)
    rows = None if parts.world.is_single else Rows(gathered.images, gathered.texts)
    autocast = parts.encoder.loss_context(batch)
    loss_and_grads = parts.loss.loss_and_grads
    loss, gradients = loss_and_grads(features, ids, rows, autocast=autocast, backward=backward)
    return loss, gradients, accuracy_within_batch(image, text, ids, rows)


def make_parts(
    model: CLIP,
    config: Config,
    device: Device,
    precision: Precision,
    preprocess: Preprocess,
    teacher: Teacher | None = None,
    ranks: Ranks = Ranks(),  # noqa: B008  immutable
) -> StepParts:
    """The parts of a step for a model."""
    shards = None
    hashed_before_sharding = None
    # Learning rates are on the device then.
    capturable = can_capture(model, config, device, precision, teacher)
    if config.train.fsdp == "on" and ranks.size > 1:
        from m1clip.training.sharding import Shards

        hashed_before_sharding = frozen_hash(model)
        shards = Shards(model, ranks, device.torch, precision)
    model.use_triton(uses_kernels(config, device, precision, capturable and ranks.size == 1))
    world = World(ranks, model, shards)
    encoder_class: type[BatchEncoder] = HybridEncoder if device.is_hybrid else BatchEncoder
    encoder = encoder_class(
        model,
        device,
        precision,
        preprocess,
        config.seed,
        compile=config.model.compile,
        rank=ranks.rank,
    )
    options = BuildOptions(
        fused=device.capabilities.fused_optimizer,
        capturable=capturable,
        # bf16 only where it is fast.
        matmul_dtype=torch.bfloat16 if precision == "bf16" else torch.float32,
        ranks=ranks if ranks.size > 1 else None,
        full_rows={} if shards is None else shards.full_rows,
    )
    local = {} if shards is None else shards.local
    optimizer = Optimizer(model, config.optim, options, local)
    one_device = len({p.device for p in model.parameters()}) == 1
    scaler = torch.amp.GradScaler(device.kind) if precision == "fp16" else None
    can_skip = one_device and OPTIMIZERS[config.optim.optimizer].skips_on_device
    skip = skip_rule(device.kind, can_skip)
    update = Updater(model, optimizer, world, skip, scaler, config.optim.grad_clip)
    teacher_logits = None if teacher is None else teacher.logits
    contrast = config.train.text_contrast or 0.0
    members = model.config.members
    objective = LOSSES[config.train.loss].smoothed(config.train.label_smoothing or 0.0)
    loss = RunLoss(objective, contrast, teacher_logits, members=members)
    model.train()
    return StepParts(
        model, encoder, world, loss, update, config, device, capturable, hashed_before_sharding
    )


def parts_for_check(parts: StepParts, model: CLIP) -> StepParts:
    """The parts for a copy of the model in which only gradients are computed, to compare them.

    Without dropout, compilation and ranks (a rank's own rows suffice), and without loss scaling:
    gradients that are too small for fp16 are so in both, and a scaled loss could overflow.
    """
    model.eval()
    encoder = parts.encoder.for_check(model)
    world = World(Ranks(), model)
    update = NoUpdate(model, parts.update.optimizer, world, parts.update.skip)
    return replace(parts, model=model, encoder=encoder, world=world, update=update)


def uses_kernels(config: Config, device: Device, precision: Precision, is_captured: bool) -> bool:
    """Whether our Triton kernels compute the towers: bf16 on CUDA, compiled or in a graph.

    One by one, the host takes longer to launch them than torch's own.
    """
    if not (config.model.compile or is_captured):
        return False
    if device.kind != "cuda" or precision != "bf16":
        return False
    try:
        from m1clip.cuda import kernels
    except ImportError:  # triton comes with torch for CUDA, but not for every system
        return False
    return kernels.compile_here()


def frozen_hash(model: CLIP) -> str:
    """Hash of the frozen weights of a model; empty if all are trained."""
    frozen = {name: p.detach() for name, p in model.named_parameters() if not p.requires_grad}
    return weights_hash(frozen) if frozen else ""


def can_capture(
    model: CLIP, config: Config, device: Device, precision: Precision, teacher: Teacher | None
) -> bool:
    """Whether the steps of this run may be captured as a CUDA graph."""
    is_requested = (
        config.model.cuda_graph
        and device.capabilities.graphs
        and OPTIMIZERS[config.optim.optimizer].skips_on_device
    )
    capturable = model.image_tower.capturable and model.text_tower.capturable
    return (
        is_requested
        and capturable
        and precision != "fp16"
        and not has_dropout(model)
        and teacher is None
    )
