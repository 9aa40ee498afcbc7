"""Decide runs of a model preset without data, for `plan` and `compare`.

`resolve` decides them as it does for `train`; this module answers what it asks about the model and
the machine.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from m1clip import console
from m1clip.bench.steps import MEASURED_RUN_STEPS, Configuration, model_shape
from m1clip.config import Config
from m1clip.errors import UserError
from m1clip.hardware.device import Device, Kind, Precision, check_compile, choose_device, threads
from m1clip.hardware.machine_info import MachineInfo
from m1clip.training.decision import (
    Dataset,
    InitialModel,
    Length,
    Machine,
    Measurements,
    MemoryFacts,
)
from m1clip.training.device_choice import Choice, fastest
from m1clip.training.memory import MemoryEstimate, estimate_memory, fits_one_gpu, memory_limit
from m1clip.training.resolve import resolve
from m1clip.training.spec import RunSpec, Settings
from m1clip.training.transfer import ModelInit


@dataclass(frozen=True)
class PresetBench:
    """A machine and a number of images with one caption each, of which nothing is opened."""

    facts: MachineInfo
    images: int  # of the training split
    ranks: int = 1

    def resolve(self, options: Mapping[str, Any]) -> RunSpec:
        """Decide the run of `m1clip train` with these options, from random weights."""
        settings = Settings({**options, "recipe": "scratch"})
        return resolve(settings, Dataset(self.images), self.machine())

    def machine(self) -> Machine:
        measurements = Measurements(
            initial_model=lambda config: InitialModel(model_shape(config.model.name)[0]),
            fastest=self._fastest,
            memory=self._memory,
            fits_one_gpu=self._fits_one_gpu,
            readable_images=lambda config: self.images,
            steps_in_time=reject_minutes,
        )
        return Machine(self.facts, measurements, self.ranks, check_compile=check_compile)

    def estimate(self, config: Config) -> MemoryEstimate:
        """The memory of the step of a run."""
        shape, tokens = model_shape(config.model.name)
        device = self._device(config)
        return estimate_memory(config, ModelInit(shape), self.facts, device, tokens, self.images)

    def _device(self, config: Config) -> Device:
        return Device(choose_device(config.train.device, self.facts), self.facts)

    def _fastest(self, config: Config) -> Choice:
        torch.set_num_threads(threads(config.train.threads, self.facts))
        shape, tokens = model_shape(config.model.name)
        return fastest(config, ModelInit(shape), self.facts, tokens)

    def _memory(self, config: Config) -> MemoryFacts:
        limit = memory_limit(config, self._device(config), self.facts)
        return MemoryFacts(limit, self.estimate(config))

    def _fits_one_gpu(self, config: Config, rows: int) -> bool:
        shape, _ = model_shape(config.model.name)
        return fits_one_gpu(config, ModelInit(shape), self.facts, self._device(config), rows)


def reject_minutes(config: Config) -> Length:
    raise UserError(
        "--minutes: the number of steps is measured on your images, so name them: m1clip plan"
        " photos --minutes 10; or use --epochs or --steps"
    )


def default_configuration(
    facts: MachineInfo,
    model: str,
    batch_size: int,
    device: Kind,
    precision: Precision,
    optimizer: str,
) -> Configuration:
    """How `train` computes the step of a model by default."""
    configuration = Configuration(model, batch_size, device, precision, optimizer=optimizer)
    names = ("model", "batch_size", "device", "precision", "optimizer", "steps")
    options = {name: value for name, value in configuration.options().items() if name in names}
    with console.quiet():
        spec = PresetBench(facts, options["batch_size"]).resolve(options)
    return dataclasses.replace(Configuration.of(spec.config), batch_size=batch_size)


def decide_step(
    facts: MachineInfo, configuration: Configuration, steps: int = MEASURED_RUN_STEPS
) -> RunSpec:
    """The run whose step a configuration measures."""
    options = {**configuration.options(), "steps": steps}
    with console.quiet():
        return PresetBench(facts, options["batch_size"]).resolve(options)
