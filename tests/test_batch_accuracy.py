"""Accuracy within a batch: known values, chance level, and the sum over ranks."""

import pytest
import torch
from torch import Tensor

from m1clip.losses import batch_accuracy
from m1clip.losses.batch_accuracy import accuracy_within_batch
from m1clip.losses.registry import Ids
from m1clip.losses.run_loss import Rows


def units(n: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.nn.functional.normalize(torch.randn(n, 16, generator=generator), dim=1)


def distinct(n: int, captions_per_image: int = 1) -> Ids:
    index = torch.arange(n).repeat_interleave(captions_per_image)
    return Ids(torch.arange(n), torch.arange(len(index)), index)


@pytest.mark.parametrize("captions_per_image", [1, 3])
@pytest.mark.parametrize("n", [2, 12, 200])
def test_chance_is_one_over_the_batch_size(n: int, captions_per_image: int) -> None:
    image = units(n, 0)
    text = image.repeat_interleave(captions_per_image, 0)
    ids = distinct(n, captions_per_image)
    assert accuracy_within_batch(image, text, ids).tolist() == pytest.approx([1.0, 1 / n])
    shifted = accuracy_within_batch(image.roll(1, 0), text, ids)
    assert shifted.tolist() == pytest.approx([0.0, 1 / n])


def test_half_of_the_captions_exchanged_is_an_accuracy_of_one_half() -> None:
    image = units(12, 0)
    text = image.clone()
    text[:6] = image[:6].roll(1, 0)
    assert accuracy_within_batch(image, text, distinct(12)).tolist() == pytest.approx([0.5, 1 / 12])


def test_equal_captions_and_copies_of_an_image_are_right() -> None:
    """A class folder: four images of two classes, which share their captions."""
    ids = Ids(torch.arange(4), torch.tensor([7, 7, 8, 8]), torch.arange(4))
    text = units(2, 0).repeat_interleave(2, 0)
    assert accuracy_within_batch(text, text, ids).tolist() == pytest.approx([1.0, 0.5])


@pytest.mark.parametrize("sizes", [[5, 7], [12, 0], [4, 4, 4]])
def test_parts_of_the_ranks_add_up(sizes: list[int]) -> None:
    image = units(12, 0)
    text = units(12, 1)
    ids = distinct(12)
    complete = accuracy_within_batch(image, text, ids)
    parts = torch.zeros(2)
    start = 0
    for size in sizes:
        rows = slice(start, start + size)
        parts += accuracy_within_batch(image, text, ids, Rows(rows, rows))
        start += size
    assert parts.tolist() == pytest.approx(complete.tolist())


def test_large_batch_is_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_accuracy, "MAX_IMAGES", 4)
    image = units(12, 0)
    text = image.clone()
    text[4:] = text[4:].roll(1, 0)
    assert accuracy_within_batch(image, text, distinct(12)).tolist() == pytest.approx([1.0, 1 / 12])
