"""Synthetic images in which every word of a caption can be seen."""

from __future__ import annotations

from m1clip.data.synthetic.captions import captions
from m1clip.data.synthetic.drawing import draw, draw_labels
from m1clip.data.synthetic.negatives import Negative, negatives
from m1clip.data.synthetic.scene import Scene, Thing
from m1clip.data.synthetic.source import (
    SPLITS,
    SyntheticImage,
    SyntheticSource,
    Written,
    sample_scenes,
    scenes_available,
    write_folder,
)

__all__ = [
    "SPLITS",
    "Negative",
    "Scene",
    "SyntheticImage",
    "SyntheticSource",
    "Thing",
    "Written",
    "captions",
    "draw",
    "draw_labels",
    "negatives",
    "sample_scenes",
    "scenes_available",
    "write_folder",
]
