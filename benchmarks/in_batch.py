"""Accuracy inside random batches, the metric of the prior art: `python benchmarks/in_batch.py runs/prior-art`."""

from __future__ import annotations

import sys

import torch
from torch import Tensor

from m1clip.evaluation.evaluate import open_split
from m1clip.evaluation.retrieval import TIE, is_match
from m1clip.evaluation.statistics import Metric, fraction_intervals

BATCH = 12
GROUPINGS = 20


@torch.no_grad()
def in_batch_accuracy(
    image: Tensor,
    text: Tensor,
    image_index: Tensor,
    keys: Tensor | None = None,
    batch: int = BATCH,
    groupings: int = GROUPINGS,
    seed: int = 0,
) -> Metric:
    """Fraction of images that find their caption among `batch`, over random groupings; a tie is a miss.

    Each image brings one caption, drawn anew in each grouping.
    """
    keys = torch.arange(len(text)) if keys is None else keys
    images = image_index.unique()
    if len(images) < batch:
        raise ValueError(f"in-batch accuracy at {batch} needs {batch} captioned images, got {len(images)}")
    generator = torch.Generator().manual_seed(seed)
    hits, asked, right = [], [], []
    for _ in range(groupings):
        chosen = one_caption_each(image_index, generator)  # (len(images),)
        order = torch.randperm(len(images), generator=generator)
        groups = order[: len(order) // batch * batch].view(-1, batch)  # a new order leaves out other images
        match = is_match(images[groups][:, :, None], keys[chosen[groups]][:, None, :], image_index, keys)
        scores = image[images[groups]].float() @ text[chosen[groups]].float().transpose(1, 2)  # (groups, batch, batch)
        own = scores.masked_fill(~match | scores.isnan(), -torch.inf).amax(dim=2)
        ahead = (scores.masked_fill(match, -torch.inf) >= own[..., None] - TIE).any(dim=2)
        hits.append((~ahead & (own > -torch.inf)).flatten())
        asked.append(images[groups].flatten())
        right.append(match.double().mean())
    hit = torch.cat(hits)
    interval = fraction_intervals(hit[:, None], torch.cat(asked), seed)[0]
    chance = float(torch.stack(right).mean())
    return Metric(f"in_batch_{batch}/accuracy", float(hit.double().mean()), chance, interval, len(images))


def one_caption_each(image_index: Tensor, generator: torch.Generator) -> Tensor:
    """The index of one random caption for each captioned image, in the order of the images."""
    by_image = image_index.argsort(stable=True)
    count = image_index.unique(return_counts=True)[1]
    first = count.cumsum(0) - count
    draw = torch.rand(len(count), generator=generator, dtype=torch.float64)
    return by_image[first + (draw * count).long()]


if __name__ == "__main__":
    for run in sys.argv[1:]:
        features = open_split(run, split="val").encode()
        found = in_batch_accuracy(*features[:4])
        low, high = found.interval.low, found.interval.high
        print(f"{run}: validation accuracy in batches of 12: {found.value:.3f} [{low:.3f}, {high:.3f}], n {found.n}")
