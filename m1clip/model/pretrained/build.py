"""Which module a tower is: read from its config, which is plain JSON in the model folder."""

from __future__ import annotations

import json
import re
from typing import Any

from torch import Tensor, nn

from m1clip.errors import UserError
from m1clip.model.pretrained.bert import BertShape, BertTower
from m1clip.model.pretrained.efficientnet import EfficientNetLite0
from m1clip.model.pretrained.hugging_face import HfImageTower, HfTextTower
from m1clip.model.pretrained.shape import TowerShape
from m1clip.model.pretrained.timm_tower import TIMM, TimmTower
from m1clip.model.shape import ClipShape
from m1clip.model.towers import TextTower, VisionTower
from m1clip.plain import LIMITS

COUNT = re.compile("layers|depth|blocks|stages|groups|experts")  # what a library makes one module each of
SIZE = re.compile("(size|sizes|dim|dims|width|widths|channels|features)$")
MAX_NUMBER = 2**22  # for numbers that are neither, such as ids of tokens
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
    told = read_config(shape.image_config)
    if OWN in told:
        return VisionTower(ClipShape.from_dict(told[OWN]))
    return TimmTower(told[TIMM]) if TIMM in told else HfImageTower(shape.image_config)


def text_tower(shape: TowerShape, pad_id: int) -> nn.Module:
    """The text tower that the shape tells of, with no particular weights."""
    if not shape.text_config:
        return BertTower(BertShape(vocab_size=shape.vocab_size), pad_id)
    told = read_config(shape.text_config)
    if OWN in told:
        return TextTower(ClipShape.from_dict(told[OWN]), told[EOT])
    return HfTextTower(shape.text_config, pad_id)


def read_config(config: str) -> dict[str, Any]:
    """The JSON object of a tower; empty where the tower is one of the two that need none."""
    try:
        told = json.loads(config) if config else {}
    except (ValueError, RecursionError):
        told = None
    if (
        not isinstance(told, dict)
        or not isinstance(told.get(OWN, {}), dict)
        or type(told.get(EOT, 0)) is not int
    ):
        raise UserError("model on towers: image_config and text_config must be JSON objects")
    return told


def check_sizes(config: dict[str, Any], weights: dict[str, Tensor], where: str) -> None:
    """Refuse sizes in a third-party tower's config that the weights cannot fill, before a library builds it."""
    largest = max((side for tensor in weights.values() for side in tensor.shape), default=0)
    pending: list[tuple[str, Any]] = list(config.items())
    while pending:
        key, value = pending.pop()
        if isinstance(value, dict):
            pending += value.items()
        elif isinstance(value, list):
            pending += [(key, item) for item in value]
        elif isinstance(value, int):
            most = LIMITS["image_size"] if key == "image_size" else MAX_NUMBER
            if COUNT.search(key):
                most = max(64, len(weights))
            elif SIZE.search(key) and key != "image_size":
                most = max(1024, largest)
            if value > most:
                raise UserError(f"{where}: {key} is {value:,}, more than the weights have")


def own_config(shape: ClipShape, eot_id: int | None = None) -> str:
    """The config of a tower of ours."""
    end = {} if eot_id is None else {EOT: eot_id}
    return json.dumps({OWN: shape.to_dict(), **end}, sort_keys=True)


def own_shape(config: str) -> ClipShape | None:
    """The shape of a tower of ours; None where the tower is somebody else's."""
    told = read_config(config)
    return ClipShape.from_dict(told[OWN]) if OWN in told else None
