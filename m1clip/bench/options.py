"""Options of `compare` and `plan`; imports nothing slow, since --help reads them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from cyclopts import Parameter

from m1clip.errors import UserError

Several = Parameter(consume_multiple=True, negative="", show_default=lambda values: " ".join(map(str, values)) or "all")
Optimizer = Literal["muon", "adamw"]


@dataclass(frozen=True, kw_only=True)
class CompareOptions:
    """What to compare."""

    model: Annotated[tuple[str, ...], Several] = ("tiny",)
    """Model presets: tiny, small, ViT-B-32, ... With more than one, only device and precision vary."""
    batch_size: Annotated[tuple[int, ...], Several] = (64,)
    """Images per step, one or more values."""
    device: Annotated[tuple[str, ...], Several] = ()
    """Only these devices, such as cpu cuda."""
    precision: Annotated[tuple[str, ...], Several] = ()
    """Only these precisions, such as fp32 bf16; fp16 is measured only if listed."""
    optimizer: Optimizer = "muon"
    """As in train."""
    minutes: float = 4.7
    """Time budget in minutes. Configurations that do not fit are skipped and listed."""

    def __post_init__(self) -> None:
        if not self.batch_size or min(self.batch_size) < 1:
            raise UserError("--batch-size: give integers of at least 1, such as --batch-size 1 8 64")
        if not self.minutes > 0:
            raise UserError(f"--minutes must be above 0, not {self.minutes:g}")


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """A training run to plan."""

    model: str = "tiny"
    """Model preset: tiny, small, ViT-B-32, 200M, 500M, 1B, ..."""
    batch_size: int = 64
    """Images per step."""
    images: int = 8000
    """Number of training images."""
    epochs: float = 10.0
    """Number of epochs."""
    device: Literal["auto", "cpu", "mps", "cuda"] = "auto"
    """As in train."""
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """As in train."""
    optimizer: Optimizer = "muon"
    """As in train."""
    rate: str | None = None
    """Plan for another machine: its matrix multiplication speed in FLOP/s, such as 2.6TFLOP."""
    watts: float | None = None
    """Power of the machine under load, to compute energy. Default: a meter's reading, or "not measured"."""
    memory: str | None = None
    """Memory limit, such as 8GB. Default: all memory of the device."""

    def __post_init__(self) -> None:
        for name, least in (("batch_size", 2), ("images", 2), ("epochs", 1e-9)):
            if not getattr(self, name) >= least:
                option = name.replace("_", "-")
                raise UserError(f"--{option} must be at least {least:g}, not {getattr(self, name):g}")
