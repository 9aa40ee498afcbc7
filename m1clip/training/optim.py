"""Builds the optimizers of m1clip.optimizers from torch optimizers, one for each part."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from m1clip.config import OptimConfig
from m1clip.model.blocks import layer_lr_factors
from m1clip.optimizers import OPTIMIZERS, Part
from m1clip.training.torch_optimizers import BUILDERS, BuildOptions

NamedParameter = tuple[str, Tensor]
TOWERS = ("image_tower", "text_tower")


class Optimizer:
    """One or more torch optimizers that step together.

    The state is a flat dict of tensors by parameter name.
    """

    def __init__(
        self,
        model: nn.Module,
        config: OptimConfig,
        options: BuildOptions,
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
        self.parts: dict[str, torch.optim.Optimizer] = {}
        self._peak_lr: dict[str, float] = {}
        self._lr_fraction = 1.0
        for part, members in split_parameters(named, OPTIMIZERS[config.optimizer].parts):
            peak_lr = getattr(config, part.lr_setting)
            # One group per weight decay and fraction of the learning rate.
            groups: dict[tuple[float, float], dict[str, Any]] = {}
            for name, parameter in members:
                fraction = lr_fractions[name]
                decay = part.weight_decay(config.wd, parameter)
                if (decay, fraction) not in groups:
                    lr = torch.tensor(peak_lr, device=device) if options.capturable else peak_lr
                    groups[decay, fraction] = {
                        "params": [],
                        "lr_fraction": fraction,
                        "lr": lr,
                        "weight_decay": decay,
                    }
                groups[decay, fraction]["params"].append((name, parameter))
            highest_first = [groups[key] for key in sorted(groups, reverse=True)]
            self.parts[part.name] = BUILDERS[part.name](highest_first, options)
            self._peak_lr[part.name] = peak_lr

    def set_lr(self, fraction: float) -> None:
        """Use a fraction of the peak learning rates."""
        self._lr_fraction = fraction
        for name, part in self.parts.items():
            for group in part.param_groups:
                lr = self._peak_lr[name] * fraction * group["lr_fraction"]
                if isinstance(group["lr"], Tensor):
                    group["lr"].fill_(lr)  # in place: a captured step reads this tensor
                else:
                    group["lr"] = lr

    def learning_rates(self) -> dict[str, float]:
        """The learning rate of each part, of its layers with the highest.

        Reads nothing from the device.
        """
        return {name: peak * self._lr_fraction for name, peak in self._peak_lr.items()}

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
    named: Iterable[NamedParameter], parts: Sequence[Part]
) -> list[tuple[Part, list[NamedParameter]]]:
    """The parts that have any parameters, with these."""
    members: dict[str, list[NamedParameter]] = {part.name: [] for part in parts}
    for name, parameter in named:
        part = next(part for part in parts if part.trains(name, parameter))
        members[part.name].append((name, parameter))
    return [(part, members[part.name]) for part in parts if members[part.name]]


def _named_parameters(part: torch.optim.Optimizer) -> Iterator[NamedParameter]:
    for group in part.param_groups:
        yield from zip(group["param_names"], group["params"], strict=True)
