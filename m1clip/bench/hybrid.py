"""Both devices at once: the image tower on the accelerator, the text tower on the CPU. It has to win by measurement."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace

import torch
from torch import Tensor

from m1clip.data.loader import Batch
from m1clip.hardware.device import Precision
from m1clip.hardware.measure import DTYPES
from m1clip.model.clip import Clip


class HybridClip(Clip):
    """A Clip whose towers live on two devices; a step of it is the same step."""

    text_first = False  # the accelerator gets its work, and computes while the CPU does the rest

    @classmethod
    def placed(cls, model: Clip, accelerator: torch.device) -> HybridClip:
        """Turn a model into a hybrid one, in place: its text half moves to the CPU, the rest to the accelerator."""
        model.to(accelerator)
        model.text.to("cpu")
        model.text_projection.to("cpu")
        model.__class__ = cls
        assert isinstance(model, cls)
        return model

    def encode_text(self, ids: Tensor) -> Tensor:
        """On the CPU, while the accelerator works through the image tower that was queued before.

        Going back, autograd has one thread a device, so the two towers overlap there too.
        """
        return super().encode_text(ids).to(self.logit_scale.device)


class HybridBatch(Batch):
    """A batch whose tokens stay on the host: fetching them back would wait for the image tower."""

    @classmethod
    def of(cls, batch: Batch) -> HybridBatch:
        """The same batch with this rule."""
        return cls(**vars(batch))

    def to(self, device: torch.device, non_blocking: bool = False) -> Batch:
        """All but the tokens on a device."""
        return replace(super().to(device, non_blocking), tokens=self.tokens)


def hybrid_autocast(kind: str, precision: Precision) -> Callable[[], AbstractContextManager[object]]:
    """The same precision on both devices."""
    if precision == "fp32":
        return contextlib.nullcontext

    @contextlib.contextmanager
    def both():  # type: ignore[no-untyped-def]
        with torch.autocast(kind, dtype=DTYPES[precision]), torch.autocast("cpu", dtype=DTYPES[precision]):
            yield

    return both
