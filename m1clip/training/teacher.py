"""A second target: what another model, whose features of the training set are kept, thinks of the samples of a step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from m1clip.data.loader import Batch
from m1clip.losses import distillation
from m1clip.model.clip import Features


@dataclass(frozen=True)
class Teacher:
    """Unit vectors of every training image and caption, in a table on disk, and the temperature they go with."""

    image: np.ndarray  # (rows, d) float16
    image_at: np.ndarray  # (images,) row of each, by the number that a batch calls it
    text: np.ndarray  # (rows, d) float16
    text_at: np.ndarray  # (captions,) row of each, by the key that a batch calls it
    scale: float
    weight: float

    def logits(self, images: Tensor, captions: Tensor) -> Tensor:
        """(n, m) of the images and captions of a batch, on their device, in float32."""
        image = self.image[self.image_at[images.cpu().numpy()]].astype(np.float32)
        text = self.text[self.text_at[captions.cpu().numpy()]].astype(np.float32)
        there = images.device
        return self.scale * torch.from_numpy(image).to(there) @ torch.from_numpy(text).to(there).T

    def taught(self, loss: Tensor, features: Features, batch: Batch) -> Tensor:
        """The loss with its share of the second target."""
        second = distillation(features, self.logits(batch.sample_ids, batch.caption_ids))
        return (1 - self.weight) * loss + self.weight * second
