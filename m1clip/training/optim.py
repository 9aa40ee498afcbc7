"""Optimizers: Muon for hidden matrices, AdamW for the rest.

Another optimizer needs an entry in PARTS and OPTIMIZER_PARTS here, and a line of help in
config.OPTIMIZERS.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from m1clip.config import OptimConfig
from m1clip.model.unfreeze import layer_lr_factors
from m1clip.training.muon import AdamW, Muon

NamedParameter = tuple[str, Tensor]
TOWERS = ("image_tower", "text_tower")
BETAS, EPS = (0.9, 0.98), 1e-6  # of AdamW
MUON_WEIGHT_DECAY = 0.3


def is_hidden_matrix(name: str, parameter: Tensor) -> bool:
    """Muon's parameters: matrices inside the blocks, and convolutions of the stem after the first (3 channels)."""
    in_block = parameter.ndim == 2 and ".blocks." in name
    return in_block or (parameter.ndim == 4 and ".patch.convs." in name and parameter.shape[1] > 3)


class BuildOptions(NamedTuple):
    """What the device decides about an optimizer."""

    fused: bool
    muon_dtype: torch.dtype  # of Muon's products
    capturable: bool  # learning rates are on the device, for CUDA graphs


class Part(NamedTuple):
    """One torch optimizer and the parameters that it trains."""

    trains: Callable[[str, Tensor], bool]  # by name and parameter
    peak_lr: Callable[[OptimConfig], float]
    weight_decay: Callable[[OptimConfig, Tensor], float]
    build: Callable[[list[dict[str, Any]], BuildOptions], torch.optim.Optimizer]
    # Whether a step changes neither weights nor state if the attribute `found_inf` is a tensor of 1.
    # If not, each step waits for the host to see whether the gradients are finite.
    skips_on_device: bool = False


def build_adamw(groups: list[dict[str, Any]], options: BuildOptions) -> torch.optim.Optimizer:
    return AdamW(groups, betas=BETAS, eps=EPS, fused=options.fused, capturable=options.capturable)


def build_muon(groups: list[dict[str, Any]], options: BuildOptions) -> torch.optim.Optimizer:
    return Muon(groups, dtype=options.muon_dtype)


PARTS = {
    "muon": Part(
        trains=is_hidden_matrix,
        peak_lr=lambda config: config.muon_lr,
        weight_decay=lambda config, parameter: MUON_WEIGHT_DECAY,
        build=build_muon,
        skips_on_device=True,
    ),
    "adamw": Part(
        trains=lambda name, parameter: True,
        peak_lr=lambda config: config.lr,
        # Matrices decay; norms, biases and the temperature do not.
        weight_decay=lambda config, parameter: config.wd if parameter.ndim >= 2 else 0.0,
        build=build_adamw,
        skips_on_device=True,
    ),
}
# The parts of each of config.OPTIMIZERS; a parameter belongs to the first part that trains it.
OPTIMIZER_PARTS = {"muon": ("muon", "adamw"), "adamw": ("adamw",)}


def skips_on_device(name: str) -> bool:
    """Whether the step of an optimizer can be skipped without waiting for the host."""
    return all(PARTS[part].skips_on_device for part in OPTIMIZER_PARTS[name])


class Optimizer:
    """One or more torch optimizers that step together.

    The state is a flat dict of tensors by parameter name.
    """

    def __init__(
        self,
        model: nn.Module,
        config: OptimConfig,
        fused: bool,
        muon_dtype: torch.dtype = torch.bfloat16,
        capturable: bool = False,
        local: Mapping[str, Tensor] = MappingProxyType({}),
    ) -> None:
        """`local` replaces parameters by this rank's rows of them."""
        named = [
            (name, local.get(name, p)) for name, p in model.named_parameters() if p.requires_grad
        ]
        device = named[0][1].device
        lr_fractions = {name: 1.0 for name, _ in named}
        if config.layer_decay < 1:
            lr_fractions = layer_lr_factors(model, TOWERS, config.layer_decay)
        options = BuildOptions(fused, muon_dtype, capturable)
        self.parts: dict[str, torch.optim.Optimizer] = {}
        self._peak_lr: dict[str, float] = {}
        part_names = OPTIMIZER_PARTS[config.optimizer]
        for part_name, members in split_parameters(named, part_names).items():
            part = PARTS[part_name]
            peak_lr = part.peak_lr(config)
            # One group per weight decay and fraction of the learning rate.
            groups: dict[tuple[float, float], dict[str, Any]] = {}
            for name, parameter in members:
                fraction = lr_fractions[name]
                decay = part.weight_decay(config, parameter)
                if (decay, fraction) not in groups:
                    lr = torch.tensor(peak_lr, device=device) if capturable else peak_lr
                    group = {"params": [], "lr_fraction": fraction, "lr": lr, "weight_decay": decay}
                    groups[decay, fraction] = group
                groups[decay, fraction]["params"].append((name, parameter))
            highest_first = [groups[key] for key in sorted(groups, reverse=True)]
            self.parts[part_name] = part.build(highest_first, options)
            self._peak_lr[part_name] = peak_lr

    def set_lr(self, fraction: float) -> None:
        for name, part in self.parts.items():
            for group in part.param_groups:
                lr = self._peak_lr[name] * fraction * group["lr_fraction"]
                if isinstance(group["lr"], Tensor):
                    group["lr"].fill_(lr)  # in place: a captured step reads this tensor
                else:
                    group["lr"] = lr

    def step(self, scaler: torch.amp.GradScaler | None = None) -> None:
        """Update the weights; with a scaler, only if the gradients are finite."""
        for part in self.parts.values():
            if scaler is None:
                part.step()
            else:
                scaler.step(part)

    def zero_grad(self) -> None:
        for part in self.parts.values():
            part.zero_grad(set_to_none=True)

    def drop_state(self) -> None:
        """Free the optimizer state, which takes up to twice the memory of the weights."""
        for part in self.parts.values():
            part.state.clear()

    def tensors(self) -> dict[str, Tensor]:
        """The state as part/parameter/key -> tensor."""
        flat = {}
        for part_name, part in self.parts.items():
            for name, parameter in _named_parameters(part):
                for key, value in part.state.get(parameter, {}).items():
                    flat[f"{part_name}/{name}/{key}"] = (
                        value if isinstance(value, Tensor) else torch.tensor(value)
                    )
        return flat

    def load_tensors(self, flat: dict[str, Tensor]) -> None:
        """The inverse of `tensors`; torch moves each to the device of its parameter."""
        for part_name, part in self.parts.items():
            state: dict[int, dict[str, Tensor]] = {}
            for index, (name, _) in enumerate(_named_parameters(part)):
                prefix = f"{part_name}/{name}/"
                values = {
                    key.removeprefix(prefix): t for key, t in flat.items() if key.startswith(prefix)
                }
                if values:
                    state[index] = values
            part.load_state_dict(
                {"state": state, "param_groups": part.state_dict()["param_groups"]}
            )


def split_parameters(
    named: Iterable[NamedParameter], part_names: Sequence[str]
) -> dict[str, list[NamedParameter]]:
    """The parameters of each part that has any."""
    members: dict[str, list[NamedParameter]] = {}
    for name, parameter in named:
        part = next(part for part in part_names if PARTS[part].trains(name, parameter))
        members.setdefault(part, []).append((name, parameter))
    return {part: members[part] for part in part_names if part in members}


def _named_parameters(part: torch.optim.Optimizer) -> Iterator[NamedParameter]:
    for group in part.param_groups:
        yield from zip(group["param_names"], group["params"], strict=True)
