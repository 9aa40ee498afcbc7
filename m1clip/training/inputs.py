"""What a decided run works with on this machine: opened data, initial model, device."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from m1clip.data.images import Preprocess
from m1clip.data.loader import TrainingSet, pairs_stay_together
from m1clip.data.prepare import Split
from m1clip.data.types import Source
from m1clip.hardware.device import Device, Precision, autocast, choose_precision
from m1clip.hardware.machine_info import MachineInfo
from m1clip.inference.model import Model
from m1clip.inference.torch_encoder import TorchEncoder
from m1clip.model.clip import CLIP
from m1clip.model.presets import CLIPConfig
from m1clip.text.base import Tokenizer
from m1clip.training.budget import steps_of_epochs
from m1clip.training.compose import TrainStep, compose_step
from m1clip.training.distributed import Ranks
from m1clip.training.spec import DecidedConfig, RunSpec
from m1clip.training.step import make_parts
from m1clip.training.transfer import ModelInit, Teacher, parameter_counts


class ModelParts(NamedTuple):
    """An initial model with what it needs to read images and captions."""

    init: ModelInit
    tokenizer: Tokenizer
    preprocess: Preprocess


@dataclass(frozen=True)
class RunInputs:
    """What a decided run works with on this machine."""

    spec: RunSpec  # its number of steps is not yet final while it is measured
    facts: MachineInfo
    device: Device
    model: ModelParts
    source: Source
    training: TrainingSet
    splits: dict[str, Split]
    teacher: Teacher | None = None
    ranks: Ranks = field(default_factory=Ranks)

    @property
    def config(self) -> DecidedConfig:
        return self.spec.config

    @property
    def shape(self) -> CLIPConfig:
        return self.model.init.config

    @property
    def precision(self) -> Precision:
        return choose_precision(self.config.train.precision, self.device.name, self.facts)

    @property
    def autocast(self) -> Callable[[], AbstractContextManager[object]]:
        return autocast(self.device, self.precision)

    @property
    def shards(self) -> bool:
        """Whether weights are divided among the ranks."""
        return self.config.train.fsdp == "on" and self.ranks.size > 1

    @property
    def max_steps(self) -> int | None:
        """The number of steps after which more of the time of --minutes would not help.

        None: there is none.
        """
        epochs = self.config.train.max_epochs
        return (
            None if epochs is None else steps_of_epochs(epochs, self.training.plan.steps_per_epoch)
        )

    def build_model(self) -> CLIP:
        """The initialized model on its device or devices, or on the CPU if only a part of it will
        be on the device.
        """
        return self._placed(seeded_build(self.model.init, self.config.seed))

    def _placed(self, model: CLIP) -> CLIP:
        if self.shards:
            model.to("cpu")
        else:
            model.to_devices(self.device.torch, self.device.text_torch)
        model.set_activation_checkpointing(self.config.model.grad_checkpointing)
        return model

    def make_step(self, model: CLIP | None = None) -> TrainStep:
        """The training step of `model`, which is the initial model, built now if it was
        not before.
        """
        model = self.build_model() if model is None else self._placed(model)
        # Other machines may round differently.
        self.ranks.broadcast(list(model.state_dict().values()))
        parts = make_parts(
            model,
            self.config,
            self.device,
            self.precision,
            self.model.preprocess,
            self.teacher,
            self.ranks,
        )
        return compose_step(parts)

    def complete_model(self, train_step: TrainStep) -> CLIP:
        """The model with all its weights: a copy if they are divided among the ranks, which must
        all call this.
        """
        shards = train_step.parts.world.shards
        if shards is None:
            return train_step.model
        model = self.model.init.build(load_weights=False)
        model.load_state_dict(shards.complete(train_step.model.state_dict(), on_all_ranks=True))
        return model.to(self.device.torch).train()

    def for_rank(self, ranks: Ranks) -> RunInputs:
        """The inputs of one rank, which trains on its rows of each batch."""
        if ranks.size > self.training.plan.batch:
            ranks.abort(
                f"--batch-size {self.training.plan.batch} is less than one image for each of"
                f" {ranks.size} ranks"
            )
        if ranks.size > 1 and self.device.is_hybrid:
            name = self.device.name
            ranks.abort(
                f"--device {name}: two devices train in one process; use one process, or one device"
            )
        batch = self.config.train.batch_size
        if self.config.data.cutmix and not pairs_stay_together(batch, ranks.size):
            ranks.abort(
                f"--cutmix mixes pairs of images, and {ranks.size} ranks would separate some of a"
                f" batch of {batch}: use a multiple of {2 * ranks.size}"
            )
        plan = dataclasses.replace(self.training.plan, part=(ranks.rank, ranks.size))
        training = dataclasses.replace(self.training, plan=plan)
        return dataclasses.replace(self, training=training, ranks=ranks)

    def describe_model(self) -> str:
        """One line about the model: its size, what is trained, and where its weights come from."""
        model_init = self.model.init
        trained, total = parameter_counts(model_init)
        if not model_init.weights:
            return (
                f"{self.config.model.name}: {total:,} parameters,"
                f" {self.model.tokenizer.vocab_size:,} tokens"
            )
        if not model_init.new_heads and not any(model_init.trainable):
            start = f"from {self.config.transfer.init}, heads on its frozen towers"
            return f"{start}: {trained:,} of {total:,} parameters trained"
        if not model_init.new_heads:
            return f"from {self.config.transfer.init}: {trained:,} of {total:,} parameters trained"
        towers = (
            f"{self.config.transfer.image_tower} (frozen) and {self.config.transfer.text_tower}"
            " (frozen)"
        )
        return (
            f"{towers}, adapter heads to {self.shape.embed_dim}: {trained:,} of {total:,} trained"
        )

    def to_model(self, model: CLIP) -> Model:
        """The model with what it needs to encode images and texts, in the precision of the run."""
        parts = self.model
        return Model(TorchEncoder(model, parts.tokenizer, parts.preprocess, self.precision))


def seeded_build(model_init: ModelInit, seed: int) -> CLIP:
    """The initial model on the CPU; its random weights are a function of the seed."""
    torch.manual_seed(seed)
    return model_init.build()
