"""Which parameter moves by which rule: Muon for hidden matrices, AdamW for the rest, decay where it belongs."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from m1clip.config import OptimConfig
from m1clip.train.muon import Muon


def is_hidden_matrix(name: str, parameter: Tensor) -> bool:
    """The weights inside the blocks: what Muon is made for."""
    return parameter.ndim == 2 and ".blocks." in name


def decays(parameter: Tensor) -> bool:
    """Matrices decay; norms, biases and the temperature never."""
    return parameter.ndim >= 2


def _whole(name: str) -> int:
    return 1


def _qkv_parts(name: str) -> int:
    """Queries, keys and values are three matrices in one parameter."""
    return 3 if name.endswith("attn.qkv.weight") else 1


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
        hidden = [(n, p) for n, p in named if config.name == "muon" and is_hidden_matrix(n, p)]
        chosen = {name for name, _ in hidden}
        rest = [(n, p) for n, p in named if n not in chosen]
        groups = [
            {"params": [(n, p) for n, p in rest if decays(p)], "weight_decay": config.weight_decay},
            {"params": [(n, p) for n, p in rest if not decays(p)], "weight_decay": 0.0},
        ]
        betas = (config.beta1, config.beta2)
        device = named[0][1].device

        def start(peak: float) -> float | Tensor:
            return torch.tensor(peak, device=device) if capturable else peak

        self.parts: dict[str, torch.optim.Optimizer] = {
            "adamw": torch.optim.AdamW(
                groups, lr=start(config.lr), betas=betas, eps=config.eps, fused=fused, capturable=capturable
            )
        }
        self._peak = {"adamw": config.lr, "muon": config.muon_lr}
        if hidden:
            self.parts["muon"] = Muon(
                hidden,
                lr=start(config.muon_lr),
                weight_decay=config.muon_weight_decay,
                dtype=muon_dtype,
                parts=_qkv_parts if config.muon_split_qkv else _whole,
                quick=config.muon_quick,
            )

    def set_rate(self, share: float) -> None:
        """Set each part's learning rate to a share of its peak."""
        for name, part in self.parts.items():
            for group in part.param_groups:
                if isinstance(group["lr"], Tensor):
                    group["lr"].fill_(
                        self._peak[name] * share
                    )  # in place: a captured step reads this very tensor
                else:
                    group["lr"] = self._peak[name] * share

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
                    flat[f"{part_name}/{name}/{key}"] = (
                        value if isinstance(value, Tensor) else torch.tensor(value)
                    )
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


def _named(part: torch.optim.Optimizer) -> Iterable[tuple[str, Tensor]]:
    for group in part.param_groups:
        yield from zip(group["param_names"], group["params"], strict=True)


class Ema:
    """A slowly following copy of the weights."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self.weights = {name: p.detach().clone() for name, p in model.named_parameters()}

    @torch.no_grad()
    def update(self, model: nn.Module, step: int) -> None:
        """Follow the weights; faster at the start, so that the first steps are soon forgotten."""
        decay = min(self.decay, (1 + step) / (10 + step))
        live = {name: p.detach() for name, p in model.named_parameters()}
        # By name: weights read back from a file come in another order.
        torch._foreach_lerp_([self.weights[name] for name in live], list(live.values()), 1 - decay)

    @torch.no_grad()
    def swap(self, model: nn.Module) -> None:
        """Exchange the model's weights with the average; a second call exchanges them back."""
        for name, p in model.named_parameters():
            kept = p.detach().clone()
            p.copy_(self.weights[name])
            self.weights[name].copy_(kept)
