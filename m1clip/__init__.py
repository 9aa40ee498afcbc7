"""m1clip: train CLIP on the computer you have, then use it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = [
    "Config",
    "Index",
    "Model",
    "__version__",
    "caption_photos",
    "compare",
    "download",
    "evaluate",
    "export",
    "how_many",
    "list_models",
    "list_presets",
    "load",
    "plan",
    "resume",
    "train",
]

if TYPE_CHECKING:
    from m1clip.bench.compare import compare
    from m1clip.config import Config
    from m1clip.data.captioning.photos import caption_photos
    from m1clip.evaluation.evaluate import evaluate
    from m1clip.export.layouts import export
    from m1clip.inference import load
    from m1clip.inference.model import Model
    from m1clip.model.hub import download
    from m1clip.model.listing import list_models
    from m1clip.model.presets import list_presets
    from m1clip.search.query import Index
    from m1clip.training.how_many import how_many
    from m1clip.training.run import plan, resume, train

_MODULES = {
    "Config": "m1clip.config",
    "Index": "m1clip.search.query",
    "Model": "m1clip.inference.model",
    "caption_photos": "m1clip.data.captioning.photos",
    "compare": "m1clip.bench.compare",
    "download": "m1clip.model.hub",
    "evaluate": "m1clip.evaluation.evaluate",
    "how_many": "m1clip.training.how_many",
    "list_models": "m1clip.model.listing",
    "list_presets": "m1clip.model.presets",
    "load": "m1clip.inference",
    "plan": "m1clip.training.run",
    "resume": "m1clip.training.run",
    "train": "m1clip.training.run",
}


def __getattr__(name: str) -> Any:
    # Imported on first use: `m1clip --help` must not wait for torch.
    import importlib

    if name == "export":
        return importlib.import_module("m1clip.export")  # a package that can be called
    if name not in _MODULES:
        raise AttributeError(f"module 'm1clip' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)
