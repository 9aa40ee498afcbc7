"""What a run is decided from: facts of the data, the model and the machine, and the settings so far."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from m1clip.config import Config
from m1clip.hardware.machine_info import MachineInfo
from m1clip.model.presets import CLIPConfig
from m1clip.training.device_choice import Choice
from m1clip.training.duration import EVALUATIONS
from m1clip.training.head_trial import HeadTrial
from m1clip.training.spec import Origin, Settings, setting
from m1clip.training.transfer import BOTH, Trainable
from m1clip.training.tuning import ModelSize


@dataclass(frozen=True)
class Dataset:
    """What a run's decisions need to know of its data."""

    images: int  # of the training split, as listed; some may be unreadable
    streamed: bool = False
    median_captions: int = 1  # per image
    fewest_captions: int = 1  # of any image
    mentions_sides: bool = False  # whether many captions mention left and right


@dataclass(frozen=True)
class InitialModel:
    """What a run's decisions need to know of the model that it starts from."""

    shape: CLIPConfig
    trainable: Trainable = BOTH
    is_pretrained: bool = False  # has weights, of the towers at least
    new_heads: bool = False
    char_tokens: bool = False  # whether a token is a character


class MemoryModel(Protocol):
    """Predicts the memory of a step."""

    def peak(self, batch: int, checkpointing: bool) -> float:
        """Bytes of a step."""
        ...

    def largest(self, limit: float, max_batch: int, checkpointing: bool) -> int:
        """The largest power of two that fits; 0 if none does."""
        ...


class MemoryFacts(NamedTuple):
    limit: float  # bytes that a run may use
    steps: MemoryModel


class Length(NamedTuple):
    """Number of steps, and the number of evaluations unless configured."""

    steps: int
    evaluations: int = EVALUATIONS


class TuningFacts(NamedTuple):
    """What decides how to adapt a trained model, beside the images and the time."""

    memory: float  # bytes that a run may use
    flops_per_second: float
    size: ModelSize


@dataclass(frozen=True)
class Measurements:
    """What is read or measured for a run.

    Each function gets the settings that are decided so far.
    """

    initial_model: Callable[[Config], InitialModel]
    fastest: Callable[[Config], Choice]  # device and precision
    memory: Callable[[Config], MemoryFacts]
    # Whether so many rows of a batch train without FSDP.
    fits_one_gpu: Callable[[Config, int], bool]
    readable_images: Callable[[Config], int]  # of the training split
    steps_in_time: Callable[[Config], Length]  # of --minutes
    # How heads on cached features are trained, with the learning rate of the user, if there is one.
    heads: Callable[[Config, float | None], HeadTrial] | None = None
    # Of the model to start from; None where there is never one.
    tuning: Callable[[Config], TuningFacts] | None = None


@dataclass(frozen=True)
class Machine:
    """The machine as far as decisions need it."""

    facts: MachineInfo
    measure: Measurements
    ranks: int = 1
    is_installed: Callable[[str], bool] = lambda tower: False  # a pretrained tower
    has_gpu: Callable[[str], bool] = lambda kind: True  # a build of MLX may have none
    # Raises UserError if torch.compile cannot work.
    check_compile: Callable[[str], None] = lambda kind: None


class Draft:
    """The settings while they are decided, and who chose them."""

    def __init__(self, settings: Settings) -> None:
        self.config = settings.config
        self.chosen_by: dict[str, Origin] = dict(settings.chosen_by)

    def decide(self, origin: Origin, **values: Any) -> None:
        """Set values; one that stays the same keeps its origin.

        The settings may be those of a decided run: of one that is resumed on another device, or
        repeated by its config.toml. Then each decision must come to the value that is there, so
        that it stays and keeps its origin: a decision looks at the setting before it looks at
        anything else.
        """
        changed = [name for name, value in values.items() if setting(self.config, name) != value]
        self.chosen_by |= dict.fromkeys(changed, origin)
        self.config = self.config.with_values(**values)
