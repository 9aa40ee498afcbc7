"""Optimizers: Muon for hidden matrices, AdamW for the rest."""

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

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


class Optimizer:
    """One or two torch optimizers that step together; the state is a flat dict of tensors by parameter name."""

    def __init__(
        self,
        model: nn.Module,
        config: OptimConfig,
        fused: bool,
        muon_dtype: torch.dtype = torch.bfloat16,
        capturable: bool = False,
        local: Mapping[str, Tensor] = MappingProxyType({}),
    ) -> None:
        """`muon_dtype` is that of Muon's products; `capturable` keeps learning rates on the device, for CUDA graphs.

        `local` replaces parameters by this rank's rows of them.
        """
        named = [(name, local.get(name, p)) for name, p in model.named_parameters() if p.requires_grad]
        hidden = {n: p for n, p in named if config.optimizer == "muon" and is_hidden_matrix(n, p)}
        rest = [(n, p) for n, p in named if n not in hidden]
        device = named[0][1].device
        fractions = {name: 1.0 for name, _ in named}  # of the learning rate
        if config.layer_decay < 1:
            fractions = layer_lr_factors(model, TOWERS, config.layer_decay)

        def groups(parameters: Sequence[NamedParameter], lr: float, **options: float) -> Iterator[dict[str, object]]:
            """One group per learning rate, the highest first; at least one group."""
            for fraction in sorted({fractions[name] for name, _ in parameters}, reverse=True) or [1.0]:
                members = [(name, p) for name, p in parameters if fractions[name] == fraction]
                start = torch.tensor(lr, device=device) if capturable else lr
                yield {"params": members, "lr_fraction": fraction, "lr": start, **options}

        adamw_groups = [  # matrices decay; norms, biases and the temperature do not
            *groups([(n, p) for n, p in rest if p.ndim >= 2], config.lr, weight_decay=config.wd),
            *groups([(n, p) for n, p in rest if p.ndim < 2], config.lr, weight_decay=0.0),
        ]
        self.parts: dict[str, torch.optim.Optimizer] = {
            "adamw": AdamW(adamw_groups, betas=BETAS, eps=EPS, fused=fused, capturable=capturable)
        }
        if hidden:
            muon_groups = list(groups(list(hidden.items()), config.muon_lr))
            self.parts["muon"] = Muon(muon_groups, weight_decay=MUON_WEIGHT_DECAY, dtype=muon_dtype)
        self._peak_lr = {"adamw": config.lr, "muon": config.muon_lr}

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
                    flat[f"{part_name}/{name}/{key}"] = value if isinstance(value, Tensor) else torch.tensor(value)
        return flat

    def load_tensors(self, flat: dict[str, Tensor]) -> None:
        """The inverse of `tensors`; torch moves each to the device of its parameter."""
        for part_name, part in self.parts.items():
            state: dict[int, dict[str, Tensor]] = {}
            for index, (name, _) in enumerate(_named_parameters(part)):
                prefix = f"{part_name}/{name}/"
                values = {key.removeprefix(prefix): t for key, t in flat.items() if key.startswith(prefix)}
                if values:
                    state[index] = values
            part.load_state_dict({"state": state, "param_groups": part.state_dict()["param_groups"]})


def _named_parameters(part: torch.optim.Optimizer) -> Iterator[NamedParameter]:
    for group in part.param_groups:
        yield from zip(group["param_names"], group["params"], strict=True)
