"""The usual way: a torch Dataset that opens one image with Pillow and transforms it alone."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, RandomSampler

from m1clip.training.setup import Job


class PerSample(Dataset[tuple[Tensor, Tensor]]):
    """Random crop, resize, flip, to float, normalise, one caption: as in most training scripts."""

    def __init__(self, job: Job) -> None:
        self.paths = [str(sample.image) for sample in job.splits["train"].samples]
        self.captions, self.size = job.splits["train"].captions, job.preprocess.image_size
        self.mean = torch.tensor(job.preprocess.mean).view(3, 1, 1)
        self.std = torch.tensor(job.preprocess.std).view(3, 1, 1)

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        area, x, y, flip, caption = torch.rand(5).tolist()
        image = Image.open(self.paths[index]).convert("RGB")
        side = round(min(image.size) * (0.6 + 0.4 * area) ** 0.5)
        left, top = round(x * (image.width - side)), round(y * (image.height - side))
        box = (left, top, left + side, top + side)
        image = image.resize((self.size, self.size), Image.Resampling.BICUBIC, box=box)
        if flip < 0.5:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1).float().div(255)
        first, end = self.captions.first[index], self.captions.first[index + 1]
        tokens = self.captions.tokens[first + int(caption * (end - first))]
        return (pixels - self.mean) / self.std, torch.from_numpy(tokens.astype(np.int64))


def per_sample_loader(job: Job, batch: int, workers: int) -> Iterator[list[Tensor]]:
    """Random batches without an epoch's end, where workers would be started anew."""
    data = PerSample(job)
    sampler = RandomSampler(data, replacement=True, num_samples=10**7)
    return iter(DataLoader(data, batch, sampler=sampler, num_workers=workers))
