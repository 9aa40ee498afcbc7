"""CLIP: two towers, two heads, a temperature."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from m1clip.model.heads import Head, NoHead, Projection, build_head
from m1clip.model.layers import Attention, Mlp, Transformer, clear_prepacked
from m1clip.model.members import MemberHeads, MemberTowers
from m1clip.model.presets import AttentionKind, CLIPConfig, HeadConfig
from m1clip.model.pretrained.registry import build_image_tower, build_text_tower
from m1clip.model.towers import Tower

MAX_LOGIT_SCALE = math.log(100.0)  # as in the CLIP paper: the temperature never falls below 0.01
MAX_SIGMOID_SCALE = math.log(1000.0)  # SigLIP's trained models have 110 to 120
INITIAL_TEMPERATURE = 0.07
SHORTEST = 1e-24  # squared length below which a vector stays shorter than 1


class Features(NamedTuple):
    """Unit vectors of a batch, and the scale (and bias) that turn their dot products into
    logits.
    """

    image: Tensor
    text: Tensor
    scale: Tensor
    bias: Tensor | None


def normalize(x: Tensor) -> Tensor:
    """(n, d) -> unit vectors; the gradient takes half the passes of that of `F.normalize`."""
    return x * (x * x).sum(dim=-1, keepdim=True).clamp_min(SHORTEST).rsqrt()


class CLIP(nn.Module):
    """Maps images and texts to unit vectors; matching pairs have a high cosine similarity."""

    def __init__(self, config: CLIPConfig) -> None:
        super().__init__()
        self.config = config
        self.image_tower, self.text_tower = _towers(config)
        self.image_head = _head(config.image_head, self.image_tower.width, config)
        self.text_head = _head(config.text_head, self.text_tower.width, config)
        self.logit_scale = nn.Parameter(torch.empty(()))
        self.logit_bias = nn.Parameter(torch.empty(())) if config.logit_bias else None

    @torch.no_grad()
    def initialize(self) -> None:
        """Fill every parameter that is not pretrained from torch's random state.

        Seed it for a repeatable model.
        """
        for part in (self.image_tower, self.text_tower, self.image_head, self.text_head):
            part.initialize()
        if self.logit_bias is None:
            self.logit_scale.fill_(math.log(1 / INITIAL_TEMPERATURE))
        else:  # the sigmoid loss starts with most samples predicted as not matching (SigLIP)
            self.logit_scale.fill_(math.log(10.0))
            self.logit_bias.fill_(-10.0)

    def encode_image(self, images: Tensor) -> Tensor:
        """(n, 3, size, size) normalized pixels -> (n, embed_dim) unit vectors in float32.

        With `config.mirror`, the mean over each image and its mirror image; training sees one of
        them at a time (`encode_view`).
        """
        vectors = self.encode_view(images)
        if not self.config.mirror:
            return vectors
        total = vectors + self.encode_view(images.flip(3))
        members = self.config.members  # each has a unit vector
        by_member = total.view(-1, self.config.embed_dim // members)
        return (normalize(by_member) * members**-0.5).view(-1, self.config.embed_dim)

    def encode_view(
        self, images: Tensor, kept_patches: Tensor | None = None, *dropout_keys: Tensor
    ) -> Tensor:
        """(n, 3, size, size) normalized pixels, as they are -> (n, embed_dim) unit vectors.

        `kept_patches` (n, kept) are the patches that our own image tower sees; None: all. With
        `dropout_keys` (n,), the head has dropout.
        """
        patch_arguments = () if kept_patches is None else (kept_patches,)
        return self.project_image(self.image_tower(images, *patch_arguments), *dropout_keys)

    def encode_text(self, tokens: Tensor, *dropout_keys: Tensor) -> Tensor:
        """(n, length) token ids -> (n, embed_dim) unit vectors in float32."""
        return self.project_text(self.text_tower(tokens), *dropout_keys)

    def project_image(self, features: Tensor, *dropout_keys: Tensor) -> Tensor:
        """(n, width) features of the image tower -> (n, embed_dim) unit vectors in float32."""
        return normalize(self.image_head(features, *dropout_keys).float())

    def project_text(self, features: Tensor, *dropout_keys: Tensor) -> Tensor:
        """(n, width) features of the text tower -> (n, embed_dim) unit vectors in float32."""
        return normalize(self.text_head(features, *dropout_keys).float())

    def forward(self, images: Tensor, tokens: Tensor) -> Features:
        return Features(
            self.encode_image(images), self.encode_text(tokens), self.scale(), self.logit_bias
        )

    def scale(self) -> Tensor:
        """The logit scale: 1 / temperature."""
        return self.logit_scale.clamp(max=self._max_scale).exp()

    @property
    def _max_scale(self) -> float:
        return MAX_LOGIT_SCALE if self.logit_bias is None else MAX_SIGMOID_SCALE

    @torch.no_grad()
    def clamp_scale(self) -> None:
        """Clamp the temperature after an update, so that its gradient never vanishes."""
        self.logit_scale.clamp_(0.0, self._max_scale)

    def to_devices(self, device: torch.device, text_device: torch.device) -> CLIP:
        """Move the text tower with its head to one device, and everything else to another.

        They may be the same.
        """
        if device == text_device:
            return self.to(device)
        for part in (self.text_tower, self.text_head):
            part.to(text_device)
        for part in (self.image_tower, self.image_head):
            part.to(device)
        for parameter in (self.logit_scale, self.logit_bias):
            if parameter is not None:
                parameter.data = parameter.data.to(device)
        return self

    def set_attention(self, kind: AttentionKind) -> None:
        """Choose the implementation of attention in our own towers."""
        for module in self.modules():
            if isinstance(module, Attention):
                module.kind = kind

    def use_triton(self, on: bool = True) -> None:
        """Use our Triton kernels for bf16 on CUDA in our own towers."""
        if on:
            # Imported now: the compiler should not meet the import.
            from m1clip.cuda import kernels  # noqa: F401
        for module in self.modules():
            if isinstance(module, Attention | Mlp):
                module.use_triton = on

    def set_activation_checkpointing(self, on: bool) -> None:
        """Recompute activations of our own towers in the backward pass.

        Half the memory for a third more compute.
        """
        for module in self.modules():
            if isinstance(module, Transformer):
                module.activation_checkpointing = on

    def train(self, mode: bool = True) -> CLIP:
        """Keep the batch norms of pretrained towers in eval mode.

        Statistics of a small dataset would be noisy.
        """
        clear_prepacked()
        super().train(mode)
        for module in self.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                module.eval()
        return self


def _towers(config: CLIPConfig) -> tuple[Tower, Tower]:
    """The image and the text tower; with several members, theirs side by side."""
    numbers = range(config.members)
    if config.members == 1:
        return build_image_tower(config.image_tower), build_text_tower(config.text_tower)
    return (
        MemberTowers([build_image_tower(config.image_tower) for _ in numbers]),
        MemberTowers([build_text_tower(config.text_tower) for _ in numbers]),
    )


def _head(
    head: HeadConfig, width: int, config: CLIPConfig
) -> Projection | Head | NoHead | MemberHeads:
    """The head on a tower of this width; with several members, one for each."""
    count = config.members
    if count == 1:
        return build_head(head, width, config.embed_dim)
    own = [Projection(width // count, config.embed_dim // count, head.bias) for _ in range(count)]
    return MemberHeads(own)


def build_clip(config: CLIPConfig) -> CLIP:
    """A CLIP with initialized parameters (except on the meta device).

    Weights of pretrained towers are loaded later.
    """
    model = CLIP(config)
    if model.logit_scale.device.type != "meta":
        model.initialize()
    return model


def empty_clip(config: CLIPConfig, device: torch.device) -> CLIP:
    """A CLIP whose weights are about to be loaded: memory is allocated, nothing is initialized."""
    if config.from_libraries:
        # Libraries keep buffers that are neither weights nor saved.
        return build_clip(config).to(device)
    with torch.device("meta"):
        model = build_clip(config)
    # Not to_empty(): its empty_like() imports torch's compiler, 100 MB.
    model._apply(lambda t: torch.empty(t.shape, dtype=t.dtype, device=device))
    model.image_tower.reset_buffers()
    return model


def count_parameters(config: CLIPConfig) -> int:
    """Number of parameters, without allocating them."""
    with torch.device("meta"):
        model = build_clip(config)
    return sum(p.numel() for p in model.parameters())
