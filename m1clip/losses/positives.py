"""Which pairs of a batch match: positives of a loss as (images, captions) tables of bools.

With CutMix, rows 2 k and 2 k + 1 of a batch are partners: each image may have a box of the other.
The last of an odd number of rows is its own partner.
"""

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

from m1clip.losses.registry import Ids, Positives

ALL = slice(None)


def partners(count: int, device: torch.device) -> Tensor:
    """(count,) the row of each row's partner, among rows of which the first is even."""
    return (torch.arange(count, device=device) ^ 1).clamp(max=count - 1)


def with_partners(rows: slice, count: int) -> slice:
    """Some rows of a batch of `count`, and their partners."""
    start, stop, _ = rows.indices(count)
    return slice(start - start % 2, min(count, stop + stop % 2))


def targets(positives: Positives, ids: Ids, images: slice = ALL, captions: slice = ALL) -> Tensor:
    """Which pairs match, or to which degree where images are mixed: (rows, columns) from 0 to 1.

    The captions of an image and of its partner count by the parts that show each.
    """
    if ids.mixed is None:
        return positives(ids, images, captions)
    count = len(ids.sample_ids)
    start, stop, _ = images.indices(count)
    wide = with_partners(images, count)
    table = positives(ids, ALL if wide == slice(0, count) else wide, captions)
    table = table.to(ids.mixed.dtype)
    swapped = table[partners(len(table), table.device)]
    mixed = table.lerp(swapped, ids.mixed[wide, None])
    return mixed[start - wide.start : stop - wide.start]


def own_captions(ids: Ids, images: slice = ALL, captions: slice = ALL) -> Tensor:
    """Match each image with its own captions only."""
    image_rows = torch.arange(len(ids.sample_ids), device=ids.image_index.device)
    return image_rows[images, None] == ids.image_index[captions]


def same_image_or_caption(ids: Ids, images: slice = ALL, captions: slice = ALL) -> Tensor:
    """Match caption j with image i if its image or one of that image's captions is the same."""
    on_cpu = ids.image_index.device.type == "cpu" and not is_fake(ids.image_index)
    if images == captions == ALL and on_cpu:
        return _compare_repeats(ids)
    return _compare_without_sync(ids, images, captions)


def _compare_without_sync(ids: Ids, images: slice, captions: slice) -> Tensor:
    """Compare the rows `images` and columns `captions` on the device, without reading values."""
    image_ids = ids.sample_ids[images]
    text_images = ids.image_index[captions]
    rows = len(image_ids)
    columns = len(text_images)
    same_image = image_ids[:, None] == ids.sample_ids[text_images]
    # For each caption of the batch, an equal caption of this block; else one column more.
    number = number_values(ids.caption_ids)
    column_numbers = torch.arange(columns, device=number.device)
    column = torch.full_like(number, columns).scatter_(0, number[captions], column_numbers)[number]
    row = ids.image_index - (images.start or 0)
    row = torch.where((row >= 0) & (row < rows), row, rows)
    has_caption = torch.zeros((rows + 1) * (columns + 1), dtype=torch.bool, device=row.device)
    has_caption.scatter_(0, row * (columns + 1) + column, True)
    return same_image | has_caption.view(rows + 1, columns + 1)[:rows, column[captions]]


def _compare_repeats(ids: Ids) -> Tensor:
    """Compare only images and captions that occur twice: on the CPU, reading values is free."""
    sample_ids, caption_ids, image_index = ids.sample_ids, ids.caption_ids, ids.image_index
    positive = torch.zeros(len(sample_ids), len(caption_ids), dtype=torch.bool)
    positive[image_index, torch.arange(len(caption_ids))] = True
    repeats = _indices_of_repeats(sample_ids)
    positive[repeats] = sample_ids[repeats, None] == sample_ids[image_index]
    repeats = _indices_of_repeats(caption_ids)
    _, number = caption_ids[repeats].unique(return_inverse=True)
    has_caption = torch.zeros(len(sample_ids), len(repeats), dtype=torch.bool)
    has_caption[image_index[repeats], number] = True
    positive[:, repeats] |= has_caption[:, number]
    return positive


def _indices_of_repeats(values: Tensor) -> Tensor:
    """Return the indices of the values that occur more than once."""
    _, number, counts = values.unique(return_inverse=True, return_counts=True)
    return (counts[number] > 1).nonzero().view(-1)


def number_values(values: Tensor) -> Tensor:
    """Number the distinct values from 0; equal values have the same number.

    The distinct values are not counted, which would synchronize.
    """
    order = values.argsort()
    changes = values[order].diff(prepend=values[order[:1]]) != 0
    return torch.empty_like(order).scatter_(0, order, changes.cumsum(0))


def captions_with_positives(ids: Ids) -> Tensor:
    """Count the captions with a different caption of the same image in the batch; at least 1."""
    image_number = number_values(ids.sample_ids[ids.image_index])
    pair_number = number_values(image_number * len(image_number) + number_values(ids.caption_ids))

    def occurrences(values: Tensor) -> Tensor:
        return torch.zeros_like(values).scatter_add_(0, values, torch.ones_like(values))[values]

    return (occurrences(image_number) > occurrences(pair_number)).sum().clamp(min=1)
