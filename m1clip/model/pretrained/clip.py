"""A Clip on towers that were trained by others, with a head on each; the towers stand still until they are let go."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from m1clip.model.attention import AttentionKind
from m1clip.model.clip import INITIAL_TEMPERATURE, Clip
from m1clip.model.heads import Head, unit
from m1clip.model.pretrained.build import image_tower, own_shape, text_tower
from m1clip.model.pretrained.shape import TowerShape
from m1clip.model.towers import TextTower, VisionTower


class TowerClip(Clip):
    """The same doors as a Clip. Features that a tower made earlier pass its door as well and skip the tower:
    a float (n, width) is taken for such features, so training never runs a tower that stands still.
    """

    image: nn.Module  # type: ignore[assignment]
    text: nn.Module  # type: ignore[assignment]
    shape: TowerShape  # type: ignore[assignment]

    def __init__(self, shape: TowerShape, pad_id: int = 0) -> None:
        nn.Module.__init__(self)  # not Clip's: that one builds transformers of ours
        self.shape = shape
        self.image, self.text = image_tower(shape), text_tower(shape, pad_id)
        sizes = (shape.embed_dim, shape.hidden, shape.dropout)
        self.image_projection = Head(shape.head, width_of(self.image), *sizes)  # type: ignore[assignment]
        self.text_projection = Head(shape.head, width_of(self.text), *sizes)  # type: ignore[assignment]
        self.logit_scale = nn.Parameter(torch.empty(()))
        self.logit_bias = nn.Parameter(torch.empty(())) if shape.logit_bias else None
        for tower in (self.image, self.text):
            tower.requires_grad_(False)
        if self.logit_scale.device.type != "meta":
            self.initialise()

    @torch.no_grad()
    def initialise(self) -> None:
        """Start values of the heads, the temperature and towers of ours; other towers' come from their makers."""
        for tower, told in ((self.image, self.shape.image_config), (self.text, self.shape.text_config)):
            own = own_shape(told)
            if own is not None:
                assert isinstance(tower, VisionTower | TextTower)
                tower.initialise(own)
        self.image_projection.initialise()  # type: ignore[operator]
        self.text_projection.initialise()  # type: ignore[operator]
        if self.logit_bias is None:
            self.logit_scale.fill_(math.log(1 / INITIAL_TEMPERATURE))
        else:
            self.logit_scale.fill_(math.log(10.0))
            self.logit_bias.fill_(-10.0)

    def encode_image(self, pixels: Tensor, patches: Tensor | None = None) -> Tensor:
        """(n, 3, size, size) normalised pixels, or (n, width) features of the tower -> unit vectors in float32."""
        features = (
            pixels if pixels.ndim == 2 else self.image(pixels, *(() if patches is None else (patches,)))
        )
        return unit(self.image_projection(features).float())

    def encode_text(self, ids: Tensor) -> Tensor:
        """(n, length) token ids, or (n, width) features of the tower -> unit vectors in float32."""
        features = ids if ids.is_floating_point() else self.text(ids)
        return unit(self.text_projection(features).float())

    def set_attention(self, image: AttentionKind, text: AttentionKind) -> None:
        """Only a tower of ours leaves a choice: the others have an attention of their own, or none."""
        for tower, kind in ((self.image, image), (self.text, text)):
            if isinstance(tower, VisionTower | TextTower):
                tower.transformer.set_attention(kind)

    def set_recompute(self, on: bool) -> None:
        """Gradient checkpointing in a tower of ours; the others do not have it."""
        for tower in (self.image, self.text):
            if isinstance(tower, VisionTower | TextTower):
                tower.transformer.recompute = on

    def train(self, mode: bool = True) -> TowerClip:
        """Batch norms keep the statistics of their makers: a small set's own would be noise."""
        super().train(mode)
        for module in self.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                module.eval()
        return self


def width_of(tower: nn.Module) -> int:
    """Numbers in a tower's feature."""
    return int(tower.width)  # type: ignore[arg-type]


def empty_towers(shape: TowerShape, pad_id: int, device: torch.device) -> TowerClip:
    """A model whose weights are about to be loaded: memory is taken, no random start is drawn."""
    if shape.image_config or shape.text_config:
        return TowerClip(shape, pad_id).to(device)  # theirs keep numbers that are neither weights nor saved
    with torch.device("meta"):
        model = TowerClip(shape, pad_id)
    model.to_empty(device=device)
    return model
