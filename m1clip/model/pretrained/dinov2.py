"""DINOv2 image towers, with and without registers: our transformer, and the conversion of weights.

Two parts of theirs are folded into matrices when the weights are read: the scales at the end of
each branch, and the mean and deviation of the pixels they were trained on. So the blocks are those
of our own towers, and all towers take the same pixels.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from m1clip.errors import UserError
from m1clip.model.layers import Transformer
from m1clip.model.presets import MAX_GRID, VisionTowerConfig
from m1clip.model.towers import Tower, compute_dtype
from m1clip.model.weights import Tensors
from m1clip.schema import check_limits

MODEL_TYPES = ("dinov2", "dinov2_with_registers")
MAX_REGISTERS = 64


@dataclass(frozen=True, kw_only=True)
class DinoSize:
    """The sizes of a DINOv2; the defaults are those of dinov2-with-registers-small."""

    width: int = 384
    layers: int = 12
    heads: int = 6
    patch_size: int = 14
    mlp_ratio: float = 4.0
    registers: int = 4
    norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        check_limits(self, "the image tower: ")
        sizes = (self.width, self.layers, self.heads, self.patch_size)
        is_possible = min(sizes) >= 1 and 0 <= self.registers <= MAX_REGISTERS
        if not is_possible or self.width % self.heads:
            raise UserError(f"the image tower: impossible sizes ({self})")

    def grid(self, image_size: int) -> int:
        """Patches along one side of an image."""
        nearest = max(1, round(image_size / self.patch_size)) * self.patch_size
        if image_size != nearest:
            raise UserError(
                f"DINOv2 takes images whose size is a multiple of {self.patch_size}, not"
                f" {image_size}: try --image-size {nearest}"
            )
        grid = image_size // self.patch_size
        if grid > MAX_GRID:
            raise UserError(f"{grid} patches per side are more than {MAX_GRID}")
        return grid

    def transformer(self) -> VisionTowerConfig:
        """What our transformer is built from."""
        return VisionTowerConfig(
            image_size=self.patch_size,
            patch_size=self.patch_size,
            width=self.width,
            layers=self.layers,
            heads=self.heads,
            mlp_ratio=self.mlp_ratio,
            norm_eps=self.norm_eps,
        )


class DinoTower(Tower):
    """Images to the class token next to the mean of the patches, as in DINOv2's linear probes."""

    def __init__(self, size: DinoSize, image_size: int) -> None:
        super().__init__()
        grid = size.grid(image_size)
        self.size = size
        self.image_size = image_size
        self.width = 2 * size.width
        self.tokens_per_image = 1 + size.registers + grid**2
        self.patch = nn.Conv2d(3, size.width, size.patch_size, size.patch_size)
        self.cls = nn.Parameter(torch.zeros(size.width))
        self.registers = nn.Parameter(torch.zeros(size.registers, size.width))
        self.positions = nn.Parameter(torch.zeros(1 + grid**2, size.width))
        self.transformer = Transformer(size.transformer(), causal=False)
        self.norm = nn.LayerNorm(size.width, size.norm_eps)

    def forward(self, pixels: Tensor) -> Tensor:
        """(n, 3, image_size, image_size) normalized pixels -> (n, 2 * size.width)."""
        n = pixels.shape[0]
        size = self.size.patch_size
        grid = self.image_size // size
        # A matmul, as in our own tower.
        patches = pixels.reshape(n, 3, grid, size, grid, size).permute(0, 2, 4, 1, 3, 5)
        x = F.linear(
            patches.reshape(n * grid * grid, 3 * size * size),
            self.patch.weight.flatten(1),
            self.patch.bias,
        ).view(n, grid * grid, -1)
        x = x + self.positions[1:].to(x.dtype)
        # Registers have no position.
        prefix = torch.cat([(self.cls + self.positions[0])[None], self.registers]).to(x.dtype)
        x = torch.cat([prefix.expand(n, -1, -1), x], dim=1)
        x = self.norm(self.transformer(x.to(compute_dtype(x)))).float()
        return torch.cat([x[:, 0], x[:, len(prefix) :].mean(dim=1)], dim=1)


def dino_size(config: dict[str, Any]) -> DinoSize | None:
    """The sizes in a config.json of transformers; None if it is not a DINOv2 with these layers.

    The largest model has another MLP.
    """
    usual = {"hidden_act": "gelu", "num_channels": 3, "use_swiglu_ffn": False, "qkv_bias": True}
    if config.get("model_type") not in MODEL_TYPES:
        return None
    if any(config.get(name, value) != value for name, value in usual.items()):
        return None
    has_registers = config["model_type"] == "dinov2_with_registers"
    names = {
        "hidden_size": "width",
        "num_hidden_layers": "layers",
        "num_attention_heads": "heads",
        "patch_size": "patch_size",
    }
    values: dict[str, Any] = {ours: config.get(theirs) for theirs, ours in names.items()}
    values["registers"] = config.get("num_register_tokens", 4) if has_registers else 0
    if not all(type(value) is int for value in values.values()):
        return None
    return DinoSize(
        **values,
        mlp_ratio=float(config.get("mlp_ratio", 4)),
        norm_eps=float(config.get("layer_norm_eps", 1e-6)),
    )


# Part of a block -> their name for it, or for the three parts of a fused matrix; and the scale that
# follows it.
DINO_BLOCK = {
    "norm1": (("norm1",), None),
    "attn.qkv": (tuple(f"attention.attention.{part}" for part in ("query", "key", "value")), None),
    "attn.out": (("attention.output.dense",), "layer_scale1"),
    "norm2": (("norm2",), None),
    "mlp.up": (("mlp.fc1",), None),
    "mlp.down": (("mlp.fc2",), "layer_scale2"),
}


def from_dinov2(
    weights: Tensors,
    size: DinoSize,
    image_size: int,
    trained_on: tuple[Sequence[float], Sequence[float]],
    normalization: tuple[Sequence[float], Sequence[float]],
) -> Tensors:
    """Hugging Face's tensors under our names, for images of this size.

    `trained_on` and `normalization` are (mean, deviation) of the pixels, of theirs and of ours.
    """
    weights = {name.removeprefix("dinov2."): tensor for name, tensor in weights.items()}
    embeddings = "embeddings."
    patch = f"{embeddings}patch_embeddings.projection"
    kernel, bias = fold_pixels(
        weights[f"{patch}.weight"], weights[f"{patch}.bias"], trained_on, normalization
    )
    ours = {
        "patch.weight": kernel,
        "patch.bias": bias,
        "cls": weights[f"{embeddings}cls_token"].flatten(),
        "registers": torch.zeros(0, size.width),
        "positions": resize_dino_positions(
            weights[f"{embeddings}position_embeddings"][0],
            size.grid(image_size),
            antialias=size.registers > 0,
        ),
    }
    if size.registers:
        ours["registers"] = weights[f"{embeddings}register_tokens"][0]
    for kind in ("weight", "bias"):
        ours[f"norm.{kind}"] = weights[f"layernorm.{kind}"]
        for i in range(size.layers):
            block = f"encoder.layer.{i}"
            for name, (theirs, scale) in DINO_BLOCK.items():
                part = torch.cat([weights[f"{block}.{item}.{kind}"] for item in theirs])
                if scale is not None:
                    factor = weights[f"{block}.{scale}.lambda1"]
                    part = part * factor.view(-1, *(1,) * (part.ndim - 1))
                ours[f"transformer.blocks.{i}.{name}.{kind}"] = part
    return ours


def fold_pixels(
    kernel: Tensor,
    bias: Tensor,
    trained_on: tuple[Sequence[float], Sequence[float]],
    normalization: tuple[Sequence[float], Sequence[float]],
) -> tuple[Tensor, Tensor]:
    """The first layer for pixels with another normalization: exact, because it has no padding."""
    (their_mean, their_std), (our_mean, our_std) = (
        tuple(torch.tensor(list(values), dtype=torch.float64) for values in pair)
        for pair in (trained_on, normalization)
    )
    scale = our_std / their_std
    shift = (our_mean - their_mean) / their_std
    exact = kernel.double()
    folded_bias = bias.double() + (exact.sum(dim=(2, 3)) * shift).sum(dim=1)
    return (exact * scale.view(1, 3, 1, 1)).float(), folded_bias.float()


def resize_dino_positions(positions: Tensor, grid: int, antialias: bool) -> Tensor:
    """(1 + old * old, width) -> (1 + grid * grid, width), as DINOv2 interpolates.

    With antialiasing in the models with registers alone.
    """
    old = round((len(positions) - 1) ** 0.5)
    if old == grid:
        return positions
    table = positions[1:].reshape(1, old, old, -1).permute(0, 3, 1, 2).float()
    table = F.interpolate(
        table, size=(grid, grid), mode="bicubic", align_corners=False, antialias=antialias
    )
    return torch.cat([positions[:1], table.permute(0, 2, 3, 1).reshape(grid * grid, -1)])
