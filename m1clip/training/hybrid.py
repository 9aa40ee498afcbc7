"""Two devices that train one model at the same time: the image tower is on one, the text tower on
the other.

The step is the same function (training/step.py); only its encoder differs. Each tower has a thread,
because torch releases the GIL while a kernel runs or is queued. Features and their gradients, (n,
d) each, are all that is copied between the devices; the loss is computed on the device of the image
tower.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from m1clip.config import Config
from m1clip.data.loader import Batch
from m1clip.errors import UserError
from m1clip.hardware.device import Autocast, autocast
from m1clip.training.encode import (
    BatchEncoder,
    ChunkedTower,
    EncodedAtOnce,
    EncodedBatch,
    EncodedInChunks,
    Mark,
    Passes,
    TowerCall,
    ignore_mark,
)
from m1clip.training.transfer import ModelInit

First = TypeVar("First")
Second = TypeVar("Second")


def check_supported(config: Config, model_init: ModelInit) -> None:
    """Raise UserError for a run that two devices cannot train."""
    image, text = model_init.config.image_tower.kind, model_init.config.text_tower.kind
    trains_image, trains_text = model_init.trainable
    unsupported = {
        "--compile": config.model.compile,
        # They draw their dropout from torch's random state, which both threads share.
        "training a pretrained image tower": trains_image and image != "vit",
        "training a pretrained text tower": trains_text and text != "transformer",
    }
    for feature, is_requested in unsupported.items():
        if is_requested:
            raise UserError(
                f"--device {config.train.device} does not support {feature}; use one device"
            )


@cache
def _second_thread() -> ThreadPoolExecutor:
    """Return the thread of the text tower: one for all steps, since a new one would start its own
    OpenMP threads.
    """
    return ThreadPoolExecutor(1, thread_name_prefix="text-tower")


def at_the_same_time(
    first: Callable[[], First], second: Callable[[], Second]
) -> tuple[First, Second]:
    """Run the first function in this thread and the second in another one.

    Returns when both have ended.
    """
    other = _second_thread().submit(second)
    try:
        result = first()
    finally:
        wait([other])  # also after an error: nothing may still run when the step is repeated
    return result, other.result()


@dataclass
class EncodedOnTwoDevices:
    """The features of both towers, and the way back on each device."""

    features: list[Tensor]  # on the device of the loss, without a graph
    image: EncodedBatch
    text: EncodedBatch
    text_device: torch.device

    def backward(self, gradients: Sequence[Tensor], before_pass: Passes) -> None:
        # Copied before the image tower's work is queued, for which the copy would wait.
        text_gradient = gradients[1].to(self.text_device)
        at_the_same_time(
            partial(self.image.backward, [gradients[0]], before_pass),
            partial(self.text.backward, [text_gradient], before_pass),
        )
        self.features = []


class HybridEncoder(BatchEncoder):
    """Encodes images on one device and captions on another, at the same time."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        text_device = self.device.text_torch
        self.text_autocast = autocast(self.device, self.precision, torch_device=text_device)
        self.no_text_autocast = autocast(
            self.device, self.precision, enabled=False, torch_device=text_device
        )

    def forward(
        self,
        batch: Batch,
        step: int,
        chunk: int = 0,
        most_calls: Callable[[list[int]], list[int]] = lambda calls: calls,
        mark: Mark = ignore_mark,
    ) -> EncodedBatch:
        """Encode a batch as `BatchEncoder.forward` does, with both towers at the same time."""
        mark("forward")
        batch = self._with_texts_in_place(batch)
        image_tower, text_tower = self._towers(batch, step, chunk, most_calls)
        image, text = at_the_same_time(
            partial(_encode, image_tower, self.autocast, with_graph=not chunk),
            partial(_encode, text_tower, self.text_autocast, with_graph=not chunk),
        )
        image_way: EncodedBatch = EncodedAtOnce([image], mark)
        text_way: EncodedBatch = EncodedAtOnce([text], ignore_mark)
        if chunk:
            image_way = EncodedInChunks(
                [image], [image_tower], mark, self.autocast, self.no_autocast
            )
            text_way = EncodedInChunks(
                [text], [text_tower], ignore_mark, self.text_autocast, self.no_text_autocast
            )
        features = [image.detach(), text.detach().to(self.device.torch)]
        return EncodedOnTwoDevices(features, image_way, text_way, self.device.text_torch)

    def _with_texts_in_place(self, batch: Batch) -> Batch:
        """The batch with its captions on the device of the text tower, before anything waits for
        the other device.
        """
        device = self.device.text_torch
        tokens = None if batch.tokens is None else batch.tokens.to(device)
        features = None if batch.text_features is None else batch.text_features.to(device)
        return replace(batch, tokens=tokens, text_features=features)

    def text_call(self, batch: Batch, rows: slice, keys: Tensor | None = None) -> TowerCall:
        """Prepare to encode some captions on the device of the text tower."""
        encode, inputs = super().text_call(batch, rows, keys)
        return TowerCall(encode, tuple(tensor.to(self.device.text_torch) for tensor in inputs))

    def dropout_keys(self, batch: Batch, step: int) -> list[Tensor | None]:
        """The keys of `BatchEncoder`, on the device of their head."""
        image, text = super().dropout_keys(batch, step)
        return [image, None if text is None else text.to(self.device.text_torch)]


def _encode(tower: ChunkedTower, context: Autocast, with_graph: bool) -> Tensor:
    """The features of all rows.

    Called in the thread of the tower, in which precision and graph are set.
    """
    encoded: list[Tensor] = []
    with context(), torch.set_grad_enabled(with_graph):
        for rows in tower.chunks:
            encode, inputs = tower.call(rows)
            encoded.append(encode(*inputs))
    return encoded[0] if len(encoded) == 1 else torch.cat(encoded)
