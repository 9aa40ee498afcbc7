"""Which parameter moves by which rule: Muon for hidden matrices, AdamW for the rest, decay where it belongs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn

from m1clip.config import OptimConfig
from m1clip.model.lora import layer_lr_factors
from m1clip.training.muon import AdamW, Muon

Parameter = tuple[str, Tensor]
PIXEL_CHANNELS = 3
BETA1, EPS = 0.9, 1e-6  # of AdamW
TOWERS = ("image_tower", "text_tower")


def is_hidden_matrix(name: str, parameter: Tensor) -> bool:
    """The weights inside the blocks, and of a conv stem all but the first: what Muon is made for."""
    inside = parameter.ndim == 2 and ".blocks." in name
    return inside or (parameter.ndim == 4 and ".patch.convs." in name and parameter.shape[1] > PIXEL_CHANNELS)


def decays(parameter: Tensor) -> bool:
    """Matrices decay; norms, biases and the temperature never."""
    return parameter.ndim >= 2


def _whole(name: str) -> int:
    return 1


class Optimizer:
    """One or two torch optimizers that step together; its state is a flat dict of tensors by parameter name."""

    def __init__(
        self,
        model: nn.Module,
        config: OptimConfig,
        fused: bool,
        muon_dtype: torch.dtype = torch.bfloat16,
        capturable: bool = False,
    ) -> None:
        """`muon_dtype` is that of Muon's products. `capturable` keeps the rates on the device, for CUDA graphs."""
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        hidden = [(n, p) for n, p in named if config.optimizer == "muon" and is_hidden_matrix(n, p)]
        chosen = {name for name, _ in hidden}
        rest = [(n, p) for n, p in named if n not in chosen]
        device = named[0][1].device

        def start(peak: float) -> float | Tensor:
            return torch.tensor(peak, device=device) if capturable else peak

        shares = {name: 1.0 for name, _ in named}
        if config.layer_decay < 1:
            shares = layer_lr_factors(model, TOWERS, config.layer_decay)
        groups = [
            {"params": part, "weight_decay": decay, "share": share, "lr": start(config.lr)}
            for decay, chosen_by in ((config.wd, True), (0.0, False))
            for share, part in _by_share([(n, p) for n, p in rest if decays(p) == chosen_by], shares)
        ]
        self.parts: dict[str, torch.optim.Optimizer] = {
            "adamw": AdamW(groups, betas=(BETA1, config.beta2), eps=EPS, fused=fused, capturable=capturable)
        }
        self._peak = {"adamw": config.lr, "muon": config.muon_lr}
        self.observed = False  # whether hooks wait for the next step, which a replayed one would not call
        if hidden:
            self.parts["muon"] = Muon(
                [
                    {"params": part, "share": share, "lr": start(config.muon_lr)}
                    for share, part in _by_share(hidden, shares)
                ],
                weight_decay=config.muon_wd,
                dtype=muon_dtype,
                parts=_whole,
                quick=True,
            )

    def set_rate(self, share: float) -> None:
        """Set each part's learning rate to a share of its peak."""
        for name, part in self.parts.items():
            for group in part.param_groups:
                lr = self._peak[name] * share * group["share"]
                if isinstance(group["lr"], Tensor):
                    group["lr"].fill_(lr)  # in place: a captured step reads this very tensor
                else:
                    group["lr"] = lr

    def step(self, scaler: torch.amp.GradScaler | None = None) -> None:
        """Move the weights; with a scaler, only where its gradients are finite."""
        for part in self.parts.values():
            if scaler is None:
                part.step()
            else:
                scaler.step(part)

    def zero_grad(self) -> None:
        """Forget the gradients."""
        for part in self.parts.values():
            part.zero_grad(set_to_none=True)

    def drop_state(self) -> None:
        """Free the moments, twice the size of the weights: nothing will be trained any more."""
        for part in self.parts.values():
            part.state.clear()

    def tensors(self) -> dict[str, Tensor]:
        """All state as part/parameter/key -> tensor."""
        flat = {}
        for part_name, part in self.parts.items():
            for name, parameter in _named(part):
                for key, value in part.state.get(parameter, {}).items():
                    flat[f"{part_name}/{name}/{key}"] = value if isinstance(value, Tensor) else torch.tensor(value)
        return flat

    def load_tensors(self, flat: dict[str, Tensor]) -> None:
        """The inverse of `tensors`; torch puts each where its parameter lives."""
        for part_name, part in self.parts.items():
            state: dict[int, dict[str, Tensor]] = {}
            for index, (name, _) in enumerate(_named(part)):
                prefix = f"{part_name}/{name}/"
                values = {key.removeprefix(prefix): t for key, t in flat.items() if key.startswith(prefix)}
                if values:
                    state[index] = values
            part.load_state_dict({"state": state, "param_groups": part.state_dict()["param_groups"]})


def _by_share(named: Sequence[Parameter], shares: dict[str, float]) -> Iterator[tuple[float, list[Parameter]]]:
    """The parameters in groups of one learning rate, the fastest first; there is always at least one group."""
    for share in sorted({shares[name] for name, _ in named}, reverse=True) or [1.0]:
        yield share, [(name, p) for name, p in named if shares[name] == share]


def _named(part: torch.optim.Optimizer) -> Iterable[tuple[str, Tensor]]:
    for group in part.param_groups:
        yield from zip(group["param_names"], group["params"], strict=True)


class EMA:
    """A slowly following copy of the weights."""

    def __init__(self, model: nn.Module, decay: float, capturable: bool = False) -> None:
        """`capturable` keeps the share of a step on the device, for CUDA graphs."""
        self.decay = decay
        self.weights = {name: p.detach().clone() for name, p in model.named_parameters()}
        device = next(iter(self.weights.values())).device
        self.share: float | Tensor = torch.zeros((), device=device) if capturable else 0.0

    def set_step(self, step: int) -> None:
        """How far the next update follows: faster at the start, so that the first steps are soon forgotten."""
        share = 1 - min(self.decay, (1 + step) / (10 + step))
        if isinstance(self.share, Tensor):
            self.share.fill_(share)
        else:
            self.share = share

    @torch.no_grad()
    def update(self, model: nn.Module, skip: Tensor | None = None) -> None:
        """Follow the weights; a `skip` of 1 on the device leaves the average as it is, without the host knowing."""
        live = {name: p.detach() for name, p in model.named_parameters()}
        # By name: weights read back from a file come in another order.
        average = [self.weights[name] for name in live]
        if skip is None and not isinstance(self.share, Tensor):
            torch._foreach_lerp_(average, list(live.values()), self.share)
        else:
            way = torch._foreach_sub(list(live.values()), average)
            torch._foreach_mul_(way, self.share if skip is None else self.share * (1 - skip))
            torch._foreach_add_(average, way)

    @torch.no_grad()
    def swap(self, model: nn.Module) -> None:
        """Exchange the model's weights with the average; a second call exchanges them back."""
        for name, p in model.named_parameters():
            kept = p.detach().clone()
            p.copy_(self.weights[name])
            self.weights[name].copy_(kept)
