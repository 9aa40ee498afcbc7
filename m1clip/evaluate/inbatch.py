"""Accuracy inside small random batches: the figure of the prior art, measured the fair way."""

from __future__ import annotations

import torch
from torch import Tensor

from m1clip.evaluate.interval import share_intervals
from m1clip.evaluate.metric import Metric
from m1clip.evaluate.ranks import TIE, check_features, is_match

BATCH = 12
GROUPINGS = 20
# Groups scored at once; bounds the gathered features, not the result.
GROUPS_AT_ONCE = 512


def in_batch_accuracy(
    image: Tensor,
    text: Tensor,
    owner: Tensor,
    keys: Tensor | None = None,
    batch: int = BATCH,
    groupings: int = GROUPINGS,
    seed: int = 0,
) -> Metric:
    """Share of pictures that find a caption of theirs among `batch`, over seeded random groupings.

    Each picture brings one caption, drawn anew in each grouping; a tie is a miss.
    """
    check_features(image, text, owner)
    owner, keys = owner.cpu(), torch.arange(len(text)) if keys is None else keys.cpu()
    pictures = owner.unique()
    if batch < 2 or groupings < 1:
        raise ValueError(f"batch must be at least 2 and groupings at least 1, got {batch} and {groupings}")
    if len(pictures) < batch:
        raise ValueError(
            f"in-batch accuracy at {batch} needs {batch} captioned pictures, got {len(pictures)}"
        )
    generator = torch.Generator().manual_seed(seed)
    hits, asked, right = [], [], []
    for _ in range(groupings):
        chosen = one_caption_each(owner, generator)  # (len(pictures),)
        order = torch.randperm(len(pictures), generator=generator)
        # The few left over form no full group; a new order leaves out others.
        groups = order[: len(order) // batch * batch].view(-1, batch)
        captions = chosen[groups]
        right.append(is_match(pictures[groups][:, :, None], keys[captions][:, None, :], owner, keys))
        hits.append(_hits(image, text, pictures[groups], captions, right[-1]).flatten())
        asked.append(pictures[groups].flatten())
    hit, picture = torch.cat(hits), torch.cat(asked)
    interval = share_intervals(hit[:, None], picture, seed)[0]
    level = sum(int(part.sum()) for part in right) / sum(part.numel() for part in right)
    return Metric(f"in_batch_{batch}/accuracy", float(hit.double().mean()), level, interval, len(pictures))


def one_caption_each(owner: Tensor, generator: torch.Generator) -> Tensor:
    """The index of one random caption for each captioned picture, in the order of the pictures."""
    by_picture = owner.argsort(stable=True)
    count = owner.unique(return_counts=True)[1]
    first = count.cumsum(0) - count
    draw = torch.rand(len(count), generator=generator, dtype=torch.float64)
    return by_picture[first + (draw * count).long()]


def _hits(image: Tensor, text: Tensor, pictures: Tensor, captions: Tensor, right: Tensor) -> Tensor:
    """(groups, batch) bool: does the picture score a `right` caption above all others of the group."""
    found = []
    with torch.no_grad(), torch.autocast(image.device.type, enabled=False):
        for picture, caption, match in zip(
            *(each.to(image.device).split(GROUPS_AT_ONCE) for each in (pictures, captions, right)),
            strict=True,
        ):
            asked = image[picture].float()  # (groups, batch, d)
            offered = text[caption].float()
            scores = asked @ offered.transpose(1, 2)  # (groups, batch, batch)
            own = scores.masked_fill(~match | scores.isnan(), -torch.inf).amax(dim=2)
            ahead = (scores.masked_fill(match, -torch.inf) >= own[..., None] - TIE).any(dim=2)
            found.append((~ahead & (own > -torch.inf)).cpu())
    return torch.cat(found)
