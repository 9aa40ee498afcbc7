"""m1clip: train CLIP on the computer you have."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["Config", "__version__", "load", "train"]

if TYPE_CHECKING:
    from m1clip.config import Config
    from m1clip.inference.encoder import load
    from m1clip.training.run import train

_HOMES = {"Config": "m1clip.config", "load": "m1clip.inference.encoder", "train": "m1clip.training.run"}


def __getattr__(name: str) -> Any:
    # Imported when first asked for: `m1clip --help` must not wait for torch.
    if name not in _HOMES:
        raise AttributeError(f"module 'm1clip' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)
