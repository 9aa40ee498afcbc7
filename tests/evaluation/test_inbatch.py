"""Accuracy inside batches of twelve."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import normalize

from m1clip.evaluation.retrieval import in_batch_accuracy, one_caption_each


def test_perfect_collapsed_and_nan() -> None:
    owner = torch.arange(30).repeat_interleave(2)
    perfect = in_batch_accuracy(torch.eye(30), torch.eye(30)[owner], owner)
    assert (perfect.name, perfect.value, perfect.chance) == ("in_batch_12/accuracy", 1.0, 1 / 12)
    assert perfect.interval.low < 1
    one = torch.full((30, 4), 0.5)
    assert in_batch_accuracy(one, one[:1].expand(60, -1), owner).value == 0
    assert in_batch_accuracy(one * torch.nan, one[:1].expand(60, -1), owner).value == 0


def test_one_group_by_hand() -> None:
    # Three images and a batch of three: every grouping is the whole set, whatever its order.
    scores = torch.tensor([[0.9, 0.1, 0.5], [0.2, 0.3, 0.6], [0.1, 0.4, 0.5]])  # (images, captions)
    result = in_batch_accuracy(torch.eye(3), scores.T.contiguous(), torch.arange(3), batch=3, groupings=4)
    # ImageInput 0 finds 0.9; image 1 prefers 0.6 to its 0.3; image 2 finds 0.5.
    assert result.value == pytest.approx(2 / 3)
    assert result.n == 3


def test_random_features_score_one_in_twelve() -> None:
    generator = torch.Generator().manual_seed(0)
    image = normalize(torch.randn(600, 64, generator=generator), dim=1)
    text = normalize(torch.randn(600, 64, generator=generator), dim=1)
    result = in_batch_accuracy(image, text, torch.arange(600))
    assert result.interval.low <= 1 / 12 <= result.interval.high
    assert result.interval.high - result.interval.low < 0.05


def test_a_function_of_the_seed() -> None:
    generator = torch.Generator().manual_seed(0)
    image = normalize(torch.randn(50, 8, generator=generator), dim=1)
    text = normalize(image + 0.3 * torch.randn(50, 8, generator=generator), dim=1)
    owner = torch.arange(50)
    assert in_batch_accuracy(image, text, owner, seed=3) == in_batch_accuracy(image, text, owner, seed=3)
    assert in_batch_accuracy(image, text, owner, seed=3) != in_batch_accuracy(image, text, owner, seed=4)


def test_each_image_brings_its_own_caption_and_all_get_a_turn() -> None:
    owner = torch.tensor([4, 0, 4, 2, 4, 0])
    generator = torch.Generator().manual_seed(0)
    drawn = torch.stack([one_caption_each(owner, generator) for _ in range(200)])
    assert torch.equal(owner[drawn], torch.tensor([0, 2, 4]).expand(200, -1))
    assert set(drawn.flatten().tolist()) == set(range(6))


def test_too_few_images_is_an_error() -> None:
    with pytest.raises(ValueError, match="needs 12 captioned images, got 5"):
        in_batch_accuracy(torch.eye(5), torch.eye(5), torch.arange(5))
