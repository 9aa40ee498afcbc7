"""Import this before open_clip or timm: it makes torchvision importable with a torch that its binary does not fit."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import torch


def _binary_loads() -> bool:
    """Whether torchvision's own operators can be loaded; loading them twice is harmless."""
    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None:
        raise SystemExit(
            "this Python has no torchvision: see benchmarks/README.md, 'An environment for the"
            " peers'"
        )
    files = [
        file
        for file in Path(spec.origin).parent.glob("_C*")
        if file.suffix in (".so", ".pyd", ".dylib")
    ]
    try:
        for file in files:
            torch.ops.load_library(str(file))
    except OSError:
        return False
    return bool(files)


# No torchvision build loads with a CPU-only torch on Linux unless these two exist; nothing here
# calls them.
LIBRARY = None
if not _binary_loads():
    LIBRARY = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        LIBRARY.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
