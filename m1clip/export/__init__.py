"""Trained models in the formats of other programs.

The package is also the function `m1clip.export`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Literal

Target = Literal[
    "onnx",
    "transformers.js",
    "immich",
    "coreml",
    "sentence-transformers",
    "hf",
    "openclip",
    "safetensors",
]
Precision = Literal["fp32", "fp16", "int8"]


class _CallablePackage(ModuleType):
    """This package: importing it would otherwise hide the function of the same name."""

    def __call__(
        self,
        model: str | Path,
        to: Target = "onnx",
        out: str | Path | None = None,
        *,
        image_size: int | None = None,
        data: str | Path | Sequence[str | Path] = (),
        precision: Precision = "fp32",
        force: bool = False,
    ) -> Path:
        """Write a model in the format of another program, like the command `m1clip export`.

        Returns the new folder.

        `model` is a run, a model folder or a checkpoint. `out` is the new folder, by default
        MODEL-onnx for to="onnx", and so on. The result is compared with the original on the val
        split of `data`, by default that of the run. A UserError, and no folder, if it differs,
        unless `force`.
        """
        from m1clip import console
        from m1clip.export.layouts import export

        sources = (data,) if isinstance(data, str | Path) else tuple(data)
        paths = tuple(map(str, sources))
        with console.quiet():
            return export(model, to, out, image_size, paths, precision, force)


sys.modules[__name__].__class__ = _CallablePackage
