"""A Clip whose towers were trained by others and stand still, with a head on each that is trained."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from m1clip.model.attention import AttentionKind
from m1clip.model.clip import INITIAL_TEMPERATURE, Clip
from m1clip.model.heads import Head
from m1clip.model.pretrained.bert import BertShape, BertTower
from m1clip.model.pretrained.efficientnet import EfficientNetLite0
from m1clip.model.pretrained.hugging_face import HfImageTower, HfTextTower
from m1clip.model.pretrained.shape import TowerShape

STAGES = (
    2,
    3,
    4,
    5,
    6,
)  # of EfficientNet, pooled beside the last layer: colours and textures are lost on the way up


class TowerClip(Clip):
    """The same doors as a Clip. Features that a tower made earlier pass its door as well and skip the tower:
    a float (n, width) is taken for such features, so training never runs a tower that stands still.
    """

    image: EfficientNetLite0 | HfImageTower  # type: ignore[assignment]
    text: BertTower | HfTextTower  # type: ignore[assignment]
    shape: TowerShape  # type: ignore[assignment]

    def __init__(self, shape: TowerShape, pad_id: int = 0) -> None:
        nn.Module.__init__(self)  # not Clip's: that one builds transformers of ours
        self.shape = shape
        theirs, told = shape.image_config, shape.text_config
        self.image = HfImageTower(theirs) if theirs else EfficientNetLite0(also=STAGES)
        self.text = (
            HfTextTower(told, pad_id) if told else BertTower(BertShape(vocab_size=shape.vocab_size), pad_id)
        )
        sizes = (shape.embed_dim, shape.hidden, shape.dropout)
        self.image_projection = Head(shape.head, self.image.width, *sizes)  # type: ignore[assignment]
        self.text_projection = Head(shape.head, self.text.width, *sizes)  # type: ignore[assignment]
        self.logit_scale = nn.Parameter(torch.empty(()))
        self.logit_bias = nn.Parameter(torch.empty(())) if shape.logit_bias else None
        for tower in (self.image, self.text):
            tower.requires_grad_(False)
        if self.logit_scale.device.type != "meta":
            self.initialise()

    @torch.no_grad()
    def initialise(self) -> None:
        """Start values of the heads and the temperature; the towers' weights come from their makers."""
        self.image_projection.initialise()  # type: ignore[operator]
        self.text_projection.initialise()  # type: ignore[operator]
        if self.logit_bias is None:
            self.logit_scale.fill_(math.log(1 / INITIAL_TEMPERATURE))
        else:
            self.logit_scale.fill_(math.log(10.0))
            self.logit_bias.fill_(-10.0)

    def encode_image(self, pixels: Tensor, patches: Tensor | None = None) -> Tensor:
        """(n, 3, size, size) normalised pixels, or (n, width) features of the tower -> unit vectors in float32."""
        assert patches is None, "a tower that stands still sees whole pictures"
        features = pixels if pixels.ndim == 2 else self.image(pixels)
        return F.normalize(self.image_projection(features).float(), dim=-1)

    def encode_text(self, ids: Tensor) -> Tensor:
        """(n, length) token ids, or (n, width) features of the tower -> unit vectors in float32."""
        features = ids if ids.is_floating_point() else self.text(ids)
        return F.normalize(self.text_projection(features).float(), dim=-1)

    def set_attention(self, image: AttentionKind, text: AttentionKind) -> None:
        """Nothing to choose: the towers have an attention of their own, or none."""

    def set_recompute(self, on: bool) -> None:
        """Nothing to save: the towers keep no activations."""


def empty_towers(shape: TowerShape, pad_id: int, device: torch.device) -> TowerClip:
    """A model whose weights are about to be loaded: memory is taken, no random start is drawn."""
    if shape.image_config or shape.text_config:
        return TowerClip(shape, pad_id).to(device)  # theirs keep numbers that are neither weights nor saved
    with torch.device("meta"):
        model = TowerClip(shape, pad_id)
    model.to_empty(device=device)
    return model
