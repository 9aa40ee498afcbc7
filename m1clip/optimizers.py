"""The optimizers. The choices and help of `--optimizer` and the training step follow from here.

Another optimizer is an entry here, of parts that exist or of a new one. A new part also needs a
line in training/torch_optimizers.py (`BUILDERS`), which builds it with torch, and, if it has one,
its update in MLX in mlx/step.py (`UPDATES`). This module does not import torch, because the
settings read it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

FLOAT_BYTES = 4  # of a float32
MUON_WEIGHT_DECAY = 0.3  # of the matrices that Muon trains; --wd is for the others


class Parameter(Protocol):
    """What decides how a parameter is trained: a torch tensor has it."""

    @property
    def ndim(self) -> int: ...

    @property
    def shape(self) -> tuple[int, ...]: ...


@dataclass(frozen=True)
class Part:
    """One torch optimizer and the parameters that it trains; most optimizers have one part.

    Write a new part with all that it can do: a copy of another one (`replace(ADAMW, ...)`) would
    also claim `skips_on_device` and `in_mlx`.
    """

    name: str  # as in the keys of a checkpoint: name/parameter/state
    trains: Callable[[str, Parameter], bool]  # by name and parameter
    lr_setting: Literal["lr", "muon_lr"]  # the setting of [optim] that is its peak learning rate
    weight_decay: Callable[[float, Parameter], float]  # by --wd and parameter
    # The values of float32 that it stores for each weight, such as its moments: predictions of
    # memory use it.
    moments: int
    # Whether its steps can be skipped on the device. A step that is not finite must change neither
    # weights nor state. On CUDA this is decided on the device (training/update.py): all gradients
    # are set to 0, and the attribute `found_inf` of the optimizer is a tensor of 1 during `step`,
    # else of 0; `step` must then change nothing and must not read it on the host. `capturable` in
    # its build options means that the learning rate of each group is a 0-d tensor on the device,
    # which `step` never reads on the host (float(lr), lr > 0). With False, the host looks at the
    # gradients before each step, which waits for the device, and CUDA graphs are off.
    # `SkippableOptimizer` (training/skippable.py) has what an own optimizer needs for it.
    skips_on_device: bool = False
    in_mlx: bool = False  # whether mlx/step.py can train it; else --device mlx rejects it


@dataclass(frozen=True)
class OptimizerEntry:
    """What `--optimizer NAME` means."""

    help: str
    parts: tuple[Part, ...]  # a parameter belongs to the first part that trains it
    # Relative to the learning rate and weight decay of a recipe, which were found with AdamW; those
    # of a user are not changed.
    lr_factor: float = 1.0
    wd_factor: float = 1.0

    @property
    def help_text(self) -> str:
        """The help text, with defaults that differ from the recipe's."""
        factors = {"--lr": self.lr_factor, "--wd": self.wd_factor}
        changed = [f"{option} x {factor:g}" for option, factor in factors.items() if factor != 1]
        return f"{self.help} (default: {', '.join(changed)})" if changed else self.help

    @property
    def trained_bytes(self) -> int:
        """Bytes of memory per trained weight beside the weight, at most: its gradient, and the
        moments of the part with the most.
        """
        return FLOAT_BYTES * (1 + max(part.moments for part in self.parts))

    @property
    def skips_on_device(self) -> bool:
        """Whether a step can be skipped without waiting for the host."""
        return all(part.skips_on_device for part in self.parts)

    @property
    def in_mlx(self) -> bool:
        """Whether --device mlx can train with it."""
        return all(part.in_mlx for part in self.parts)

    @property
    def lr_options(self) -> list[str]:
        """The options with its learning rates."""
        names = dict.fromkeys(part.lr_setting for part in reversed(self.parts))
        return [f"--{name.replace('_', '-')}" for name in names]


def is_hidden_matrix(name: str, parameter: Parameter) -> bool:
    """Whether Muon trains a parameter: a matrix in a block, or a convolution of the stem.

    Not the first convolution, which has 3 input channels.
    """
    in_block = parameter.ndim == 2 and ".blocks." in name
    return in_block or (parameter.ndim == 4 and ".patch.convs." in name and parameter.shape[1] > 3)


MUON = Part(
    name="muon",
    trains=is_hidden_matrix,
    lr_setting="muon_lr",
    weight_decay=lambda wd, parameter: MUON_WEIGHT_DECAY,
    moments=1,
    skips_on_device=True,
    in_mlx=True,
)
ADAMW = Part(
    name="adamw",
    trains=lambda name, parameter: True,
    lr_setting="lr",
    # Matrices decay; norms, biases and the temperature do not.
    weight_decay=lambda wd, parameter: wd if parameter.ndim >= 2 else 0.0,
    moments=2,
    skips_on_device=True,
    in_mlx=True,
)
OPTIMIZERS = {
    "muon": OptimizerEntry("Muon for hidden matrices, AdamW for everything else", (MUON, ADAMW)),
    "adamw": OptimizerEntry("AdamW for all parameters of the model", (ADAMW,)),
}
DEFAULT_OPTIMIZER = "muon"
