"""Which module a tower is: read from its config, which is plain JSON in the model folder."""

from __future__ import annotations

import json
from typing import Any

from torch import nn

from m1clip.model.pretrained.bert import BertShape, BertTower
from m1clip.model.pretrained.efficientnet import EfficientNetLite0
from m1clip.model.pretrained.hugging_face import HfImageTower, HfTextTower
from m1clip.model.pretrained.shape import TowerShape
from m1clip.model.pretrained.timm_tower import TIMM, TimmTower
from m1clip.model.shape import ClipShape
from m1clip.model.towers import TextTower, VisionTower

OWN = "m1clip"  # the key under which a tower of ours keeps its shape; transformers' configs have a model_type instead
EOT = "eot_id"
STAGES = (
    2,
    3,
    4,
    5,
    6,
)  # of EfficientNet, pooled beside its last layer: colours and textures are lost on the way up


def image_tower(shape: TowerShape) -> nn.Module:
    """The image tower that the shape tells of, with no particular weights."""
    if not shape.image_config:
        return EfficientNetLite0(also=STAGES)
    told: dict[str, Any] = json.loads(shape.image_config)
    if OWN in told:
        return VisionTower(ClipShape.from_dict(told[OWN]))
    return TimmTower(told[TIMM]) if TIMM in told else HfImageTower(shape.image_config)


def text_tower(shape: TowerShape, pad_id: int) -> nn.Module:
    """The text tower that the shape tells of, with no particular weights."""
    if not shape.text_config:
        return BertTower(BertShape(vocab_size=shape.vocab_size), pad_id)
    told: dict[str, Any] = json.loads(shape.text_config)
    if OWN in told:
        return TextTower(ClipShape.from_dict(told[OWN]), told[EOT])
    return HfTextTower(shape.text_config, pad_id)


def own_config(shape: ClipShape, eot_id: int | None = None) -> str:
    """The config of a tower of ours."""
    end = {} if eot_id is None else {EOT: eot_id}
    return json.dumps({OWN: shape.to_dict(), **end}, sort_keys=True)


def own_shape(config: str) -> ClipShape | None:
    """The shape of a tower of ours; None where the tower is somebody else's."""
    told = json.loads(config) if config else {}
    return ClipShape.from_dict(told[OWN]) if OWN in told else None
