"""One training step: encode, gather, loss, scatter, backward, update.

`compute_gradients` and `train_step` are plain functions of their parts: the parity checks, memory estimates and
benchmarks call them directly. `TrainStep` composes what a run adds around them: a learning rate schedule, retries
when memory runs out, and a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from m1clip.config import Config
from m1clip.data.images import Preprocess
from m1clip.data.loader import Batch
from m1clip.hardware.device import Autocast, Device, Precision
from m1clip.hardware.memory import keep_freed_memory, map_large_blocks
from m1clip.hardware.timing import Phases
from m1clip.losses.registry import LOSSES, Ids
from m1clip.losses.run_loss import Rows, RunLoss
from m1clip.model.clip import CLIP, Features
from m1clip.model.weights import weights_hash
from m1clip.training.cuda_graph import CapturedStep
from m1clip.training.distributed import JointBatch, Ranks
from m1clip.training.duration import StepPlan, step_plan
from m1clip.training.encode import BatchEncoder, Mark, has_dropout, ignore_mark
from m1clip.training.muon import Muon, orthogonalize
from m1clip.training.oom import OOMHandler
from m1clip.training.optim import Optimizer, skips_on_device
from m1clip.training.schedule import lr_schedule
from m1clip.training.transfer import Teacher
from m1clip.training.update import Updater, skip_rule
from m1clip.training.world import World

if TYPE_CHECKING:  # a heavy import
    from m1clip.training.sharding import Shards

# Sees the gradients of a step by parameter name, before the update.
Probe = Callable[[Mapping[str, Tensor]], None]


class StepResult(NamedTuple):
    """What a step reports; both stay on the device to avoid synchronization."""

    loss: Tensor
    grad_norm: Tensor


@dataclass(frozen=True)
class StepParts:
    """What a training step works with."""

    model: CLIP
    encoder: BatchEncoder
    world: World
    loss: RunLoss
    update: Updater


def compute_gradients(
    parts: StepParts, batch: Batch, step: int, micro_batch: int = 0, mark: Mark = ignore_mark
) -> Tensor:
    """Forward and backward of a batch on the device; returns the detached loss.

    `micro_batch` images are encoded at a time, 0: all at once; the gradient is the same. With several ranks the batch
    has the rows of this one; loss and gradients are those of all rows together.
    """
    encoder, world = parts.encoder, parts.world
    chunk = world.chunk_size(micro_batch, len(batch))
    encoded, sizes = world.together(
        partial(encoder.forward, batch, step, chunk, world.most_calls, mark),
        *(len(batch), len(batch.caption_ids)),
        mark=mark,
    )
    gathered = world.gather(batch, encoded.features, sizes)
    mark("forward")
    (loss, gradients), _ = world.together(
        partial(_loss_and_grads, parts, gathered, encoder.loss_context(batch), mark), mark=mark
    )
    own_gradients = world.scatter(gradients, sizes)
    world.together(partial(world.backward, encoded, own_gradients), mark=mark)
    return world.reduce(loss)


def _loss_and_grads(
    parts: StepParts, gathered: JointBatch, autocast: Autocast, mark: Mark
) -> tuple[Tensor, list[Tensor]]:
    """The loss of this process's rows and its gradients by the features of all rows."""

    def backward(loss: Tensor) -> None:
        mark("backward")
        parts.update.scale_loss(loss).backward()

    image, text = gathered.features
    features = Features(image, text, parts.model.scale(), parts.model.logit_bias)
    ids = Ids(gathered.sample_ids, gathered.caption_ids, gathered.image_index)
    rows = None if parts.world.is_single else Rows(gathered.images, gathered.texts)
    return parts.loss.loss_and_grads(features, ids, rows, autocast=autocast, backward=backward)


def train_step(
    parts: StepParts,
    batch: Batch,
    step: int,
    micro_batch: int = 0,
    mark: Mark = ignore_mark,
    probe: Probe | None = None,
) -> StepResult:
    """Train on one batch that is on the device."""
    loss = compute_gradients(parts, batch, step, micro_batch, mark)
    if probe is not None:
        probe(named_gradients(parts))
    mark("optimizer")
    return StepResult(loss, parts.update(loss))


def named_gradients(parts: StepParts) -> dict[str, Tensor]:
    """The gradients that the update will see, by parameter name; with sharded weights, this rank's rows."""
    local = {} if parts.world.shards is None else parts.world.shards.local
    named = {name: local.get(name, p).grad for name, p in parts.model.named_parameters()}
    return {name: grad for name, grad in named.items() if grad is not None}


def make_parts(
    model: CLIP,
    config: Config,
    device: Device,
    precision: Precision,
    preprocess: Preprocess,
    teacher: Teacher | None = None,
    ranks: Ranks = Ranks(),  # noqa: B008  immutable
    capturable: bool = False,
) -> StepParts:
    """The parts of a step for a model; `capturable` keeps learning rates on the device, for a CUDA graph."""
    shards = None
    if config.train.fsdp == "on" and ranks.size > 1:
        from m1clip.training.sharding import Shards

        shards = Shards(model, ranks, device.torch, precision)
    # Our kernels have the same requirements as the compiler.
    model.use_triton(config.model.compile and device.kind == "cuda" and precision == "bf16")
    world = World(ranks, model, shards)
    encoder = BatchEncoder(
        model,
        device,
        precision,
        preprocess,
        config.seed,
        compile=config.model.compile,
        rank=ranks.rank,
    )
    # Muon's matmuls use bf16 only where it is fast.
    muon_dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    local = {} if shards is None else shards.local
    optimizer = Optimizer(
        model, config.optim, device.rules.fused_optimizer, muon_dtype, capturable, local
    )
    muon = optimizer.parts.get("muon")
    if isinstance(muon, Muon) and ranks.size > 1:
        muon.ranks = ranks
        muon.full_rows = {} if shards is None else shards.full_rows
    one_device = len({p.device for p in model.parameters()}) == 1
    scaler = torch.amp.GradScaler(device.kind) if precision == "fp16" else None
    can_skip = one_device and skips_on_device(config.optim.optimizer)
    update = Updater(model, optimizer, world, skip_rule(device.kind, can_skip), scaler)
    teacher_logits = None if teacher is None else teacher.logits
    loss = RunLoss(LOSSES[config.train.loss], config.train.text_contrast or 0.0, teacher_logits)
    model.train()
    return StepParts(model, encoder, world, loss, update)


def parts_for_check(parts: StepParts, model: CLIP) -> StepParts:
    """The parts for a copy of the model in which only gradients are computed, to compare them.

    Without dropout, compilation and ranks (a rank's own rows suffice), and without loss scaling: gradients that are
    too small for fp16 are so in both, and a scaled loss could overflow.
    """
    model.eval()
    encoder = parts.encoder.for_check(model)
    world = World(Ranks(), model)
    update = Updater(model, parts.update.optimizer, world, parts.update.skip)
    return StepParts(model, encoder, world, parts.loss, update)


@dataclass
class GradientCheck:
    """Computes gradients without updating anything, for comparisons between devices."""

    parts: StepParts
    config: Config
    device: Device
    oom: OOMHandler | None = None  # a smaller micro-batch where memory is short

    @property
    def model(self) -> CLIP:
        return self.parts.model

    @property
    def micro_batch(self) -> int:
        return self.config.train.micro_batch if self.oom is None else self.oom.micro_batch

    def compute_gradients(self, batch: Batch, step: int) -> Tensor:
        return compute_gradients(self.parts, batch, step, self.micro_batch)

    def without_teacher(self) -> GradientCheck:
        """The same check of the loss without distillation."""
        return replace(self, parts=replace(self.parts, loss=replace(self.parts.loss, teacher=None)))


class TrainStep:
    """The training step of a run. `loss, grad_norm = train_step(batch, step)` trains the model."""

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
        self.config = config
        self.device = device
        if config.train.fsdp == "on" and ranks.size > 1:
            self.frozen_sha256 = frozen_hash(model)  # of the complete weights
        captures = can_capture(model, config, device, precision, teacher)
        self.parts = make_parts(
            model, config, device, precision, preprocess, teacher, ranks, captures
        )
        self.phases = Phases(device.kind)
        self.oom: OOMHandler | None = (
            None  # reduces the micro-batch when memory runs out; None: raise
        )
        self.cuda_graph = CapturedStep(self) if captures else None
        if self.cuda_graph is not None and ranks.size > 1:
            self.cuda_graph.disabled = (
                "the ranks exchange the sizes of their batches on the host in each step"
            )
        self.lr_factor = 1.0  # lowered by each rollback
        self.follow(step_plan(config.train))
        if device.kind == "cpu":
            map_large_blocks()
        # After the first step, reuse freed memory; with activation checkpointing, return it instead.
        self.keeps_memory = device.kind == "cpu" and not config.model.grad_checkpointing

    def __call__(self, batch: Batch, step: int, probe: Probe | None = None) -> StepResult:
        """Train on one batch; a `probe` sees the gradients before the update."""
        self.optimizer.set_lr(self.schedule(step) * self.lr_factor)
        if probe is None and self.cuda_graph is not None and self.cuda_graph.accepts(batch):
            batch = self.cuda_graph.pad(batch)
            replayed = self.cuda_graph.replay(batch, step)
            if replayed is not None:
                return replayed
        self.phases.mark("copy")
        batch = batch.to(self.device.torch, self.device.rules.non_blocking)
        gradients = partial(self.compute_gradients, batch, step)
        oom = self.oom  # runs them again with a smaller micro-batch if memory runs out
        loss = oom.run(gradients, self.clear, len(batch), step) if oom else gradients()
        if probe is not None:
            probe(named_gradients(self.parts))
        self.phases.mark("optimizer")
        grad_norm = self.update_weights(loss)
        if self.keeps_memory:
            self.keeps_memory = False
            keep_freed_memory()  # all block sizes have been allocated once
        self.phases.stop()
        return StepResult(loss, grad_norm)

    def compute_gradients(self, batch: Batch, step: int) -> Tensor:
        """`compute_gradients` of this step's parts, with the micro-batch that fits."""
        return compute_gradients(self.parts, batch, step, self.micro_batch, self._mark)

    def update_weights(self, loss: Tensor) -> Tensor:
        """Update the weights from their gradients; returns the gradient norm."""
        return self.parts.update(loss)

    @property
    def micro_batch(self) -> int:
        """Images encoded at a time; 0: the full batch."""
        return self.config.train.micro_batch if self.oom is None else self.oom.micro_batch

    @property
    def model(self) -> CLIP:
        return self.parts.model

    @property
    def optimizer(self) -> Optimizer:
        return self.parts.update.optimizer

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """The loss scaler of fp16."""
        return self.parts.update.scaler

    @property
    def shards(self) -> Shards | None:
        """The weights, if they are divided among the ranks."""
        return self.parts.world.shards

    @property
    def ranks(self) -> Ranks:
        return self.parts.world.ranks

    @property
    def parameters(self) -> list[Tensor]:
        """What this rank updates."""
        return self.parts.world.parameters

    def for_check(self, model: CLIP) -> GradientCheck:
        """The gradients of a copy of the model, to be compared."""
        return GradientCheck(parts_for_check(self.parts, model), self.config, self.device)

    def _mark(self, phase: str) -> None:
        if phase == "backward" and self.oom is not None and self.parts.world.shards is None:
            self.oom.check()  # all activations are in memory now
        if phase != "exchange" or not self.parts.world.is_single:
            self.phases.mark(phase)

    def follow(self, plan: StepPlan | None) -> None:
        """Use the learning rate schedule of a plan."""
        self.schedule = lr_schedule(self.config.optim, plan)

    def orthogonalize(self, x: Tensor) -> Tensor:
        """Muon's matmuls (k, m, n) as this device computes them; the result is float32 on the CPU."""
        return orthogonalize(x.to(self.device.torch)).float().cpu()

    def clear(self) -> None:
        """Forget everything of a step that is repeated."""
        self.reset_graph()
        self.optimizer.zero_grad()
        self.parts.world.drop_gradients()
        self.device.release()

    def reset_graph(self) -> None:
        """Drop the captured CUDA graph, because the tensors it refers to are being replaced."""
        if self.cuda_graph is not None:
            self.cuda_graph.reset()

    @cached_property
    def frozen_sha256(self) -> str:
        """Hash of the frozen weights; empty if all are trained."""
        return frozen_hash(self.model)

    def nonfinite_rows(self, batch: Batch) -> list[int]:
        """Rows of a batch whose features are not finite."""
        return self.parts.encoder.nonfinite_rows(batch)


def frozen_hash(model: CLIP) -> str:
    """Hash of the frozen weights of a model; empty if all are trained."""
    frozen = {name: p.detach() for name, p in model.named_parameters() if not p.requires_grad}
    return weights_hash(frozen) if frozen else ""


def can_capture(
    model: CLIP, config: Config, device: Device, precision: Precision, teacher: Teacher | None
) -> bool:
    """Whether the steps of this run may be captured as a CUDA graph."""
    wanted = (
        config.model.cuda_graph and device.rules.graphs and skips_on_device(config.optim.optimizer)
    )
    capturable = model.image_tower.capturable and model.text_tower.capturable
    return (
        wanted and capturable and precision != "fp16" and not has_dropout(model) and teacher is None
    )


def step_class(device: Device) -> type[TrainStep]:
    if device.kind != "mlx":
        return TrainStep
    from m1clip.training.mlx_step import MLXStep

    return MLXStep
