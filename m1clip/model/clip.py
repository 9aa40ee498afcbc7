"""CLIP: two towers, two projections, a temperature."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from m1clip.model.layers import AttentionKind
from m1clip.model.presets import ClipShape
from m1clip.model.towers import TextTower, VisionTower

MAX_LOGIT_SCALE = math.log(100.0)  # as in the CLIP paper: the temperature never falls below 0.01
INITIAL_TEMPERATURE = 0.07


class Features(NamedTuple):
    """What a forward pass gives: unit vectors, and the scale (and bias) that turn products into logits."""

    image: Tensor
    text: Tensor
    scale: Tensor
    bias: Tensor | None


class CLIP(nn.Module):
    """An image and a sentence that belong together get vectors that point the same way."""

    text_first = True  # the order in which a training step encodes

    def __init__(self, shape: ClipShape, eot_id: int) -> None:
        super().__init__()
        self.shape = shape
        self.image = VisionTower(shape)
        self.text = TextTower(shape, eot_id)
        self.image_projection = nn.Linear(shape.vision_width, shape.embed_dim, bias=shape.projection_bias)
        self.text_projection = nn.Linear(shape.text_width, shape.embed_dim, bias=shape.projection_bias)
        self.logit_scale = nn.Parameter(torch.empty(()))
        self.logit_bias = nn.Parameter(torch.empty(())) if shape.logit_bias else None
        if self.logit_scale.device.type != "meta":
            self.initialise()

    @torch.no_grad()
    def initialise(self) -> None:
        """Fill every parameter from torch's random state; seed it first for a repeatable model."""
        self.image.initialise(self.shape)
        self.text.initialise(self.shape)
        for projection in (self.image_projection, self.text_projection):
            nn.init.normal_(projection.weight, std=projection.in_features**-0.5)
            if projection.bias is not None:
                nn.init.zeros_(projection.bias)
        if self.logit_bias is None:
            self.logit_scale.fill_(math.log(1 / INITIAL_TEMPERATURE))
        else:  # the sigmoid loss starts with most samples predicted as not matching (SigLIP)
            self.logit_scale.fill_(math.log(10.0))
            self.logit_bias.fill_(-10.0)

    def encode_image(self, pixels: Tensor, patches: Tensor | None = None) -> Tensor:
        """(n, 3, size, size) normalised pixels -> (n, embed_dim) unit vectors in float32; of some patches or all."""
        return F.normalize(self.image_projection(self.image(pixels, patches)).float(), dim=-1)

    def encode_text(self, ids: Tensor) -> Tensor:
        """(n, length) token ids -> (n, embed_dim) unit vectors in float32."""
        return F.normalize(self.text_projection(self.text(ids)).float(), dim=-1)

    def forward(self, pixels: Tensor, ids: Tensor) -> Features:
        """Both encoders and the temperature."""
        return Features(self.encode_image(pixels), self.encode_text(ids), self.scale(), self.logit_bias)

    def scale(self) -> Tensor:
        """What products of unit vectors are multiplied with: one over the temperature."""
        return self.logit_scale.clamp(max=MAX_LOGIT_SCALE).exp()

    @torch.no_grad()
    def clamp_scale(self) -> None:
        """Pull the temperature back into its range after an update, so that its gradient never dies."""
        self.logit_scale.clamp_(0.0, MAX_LOGIT_SCALE)

    def set_attention(self, image: AttentionKind, text: AttentionKind) -> None:
        """Choose the implementation of attention for each tower."""
        self.image.transformer.set_attention(image)
        self.text.transformer.set_attention(text)

    def fuse(self, on: bool = True) -> None:
        """Let both towers take our own CUDA kernels for bf16, or not; wants triton, as torch.compile does there."""
        if on:
            from m1clip.model import triton_ops as fused  # noqa: F401  loaded now: the compiler should not meet the import
        self.image.transformer.fuse(on)
        self.text.transformer.fuse(on)

    def set_recompute(self, on: bool) -> None:
        """Gradient checkpointing in both towers."""
        self.image.transformer.recompute = on
        self.text.transformer.recompute = on


def count_parameters(shape: ClipShape) -> int:
    """Number of parameters, without taking the memory for them."""
    with torch.device("meta"):
        model = CLIP(shape, eot_id=0)
    return sum(p.numel() for p in model.parameters())
