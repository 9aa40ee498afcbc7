"""Ranks against matrices written by hand and against a second implementation."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import normalize

from m1clip.evaluation.retrieval import nearest, ranks, retrieval

from .reference import reference_ranks


def from_scores(scores: list[list[float]]) -> tuple[Tensor, Tensor]:
    """Features whose product is exactly scores (texts x images): images are unit axes."""
    table = torch.tensor(scores)
    return torch.eye(table.shape[1]), table


@st.composite
def sets(draw: st.DrawFn) -> tuple[Tensor, Tensor, Tensor]:
    """Images and captions from a few integer directions, so that ties are common and exact."""
    n_images = draw(st.integers(1, 9))
    counts = draw(st.lists(st.integers(0, 4), min_size=n_images, max_size=n_images).filter(any))
    owner = torch.arange(n_images).repeat_interleave(torch.tensor(counts))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    owner = owner[torch.randperm(len(owner), generator=generator)]
    width, spread = draw(st.integers(1, 4)), draw(st.integers(1, 3))

    def directions(n: int) -> Tensor:
        whole = torch.randint(-spread, spread + 1, (n, width), generator=generator).double()
        whole[whole.abs().sum(dim=1) == 0, 0] = 1
        return normalize(whole, dim=1).float()

    return directions(n_images), directions(len(owner)), owner


@settings(max_examples=300, deadline=None)
@given(sets(), st.sampled_from([None, 1, 2, 3, 1000]))
def test_equals_the_second_implementation(features: tuple[Tensor, Tensor, Tensor], chunk: int | None) -> None:
    image, text, owner = features
    found = ranks(image, text, owner, chunk=chunk)
    to_image, to_text = reference_ranks(image.numpy(), text.numpy(), owner.numpy())
    assert found.text_to_image.tolist() == to_image
    assert found.captioned.tolist() == [rank is not None for rank in to_text]
    assert found.image_to_text[found.captioned].tolist() == [rank for rank in to_text if rank is not None]


def test_by_hand() -> None:
    image, text = from_scores(
        [
            [0.9, 0.1, 0.2],  # of image 0: first
            [0.5, 0.4, 0.3],  # of image 0: first
            [0.8, 0.7, 0.6],  # of image 1: second
            [0.3, 0.9, 0.1],  # of image 2: third
        ]
    )
    found = ranks(image, text, torch.tensor([0, 0, 1, 2]))
    assert found.text_to_image.tolist() == [1, 1, 2, 3]
    # ImageInput 0: its 0.9 leads. ImageInput 1: 0.7 stands behind 0.9. ImageInput 2: 0.1 behind .2 .3 .6.
    assert found.image_to_text.tolist() == [1, 2, 4]


def test_own_second_caption_is_not_a_rival() -> None:
    image, text = from_scores([[0.9, 0.0], [0.9, 0.0], [0.8, 1.0]])
    assert ranks(image, text, torch.tensor([0, 0, 1])).image_to_text.tolist() == [1, 1]


def test_ties_count_against_the_model() -> None:
    image, text = from_scores([[0.5, 0.5, 0.1], [0.5, 0.5, 0.1], [0.1, 0.1, 0.1]])
    found = ranks(image, text, torch.tensor([0, 1, 2]))
    assert found.text_to_image.tolist() == [2, 2, 3]
    assert found.image_to_text.tolist() == [2, 2, 3]


@pytest.mark.parametrize("width", [7, 64, 500])
@pytest.mark.parametrize("n", [3, 37, 203])
def test_a_collapsed_model_is_never_above_chance(n: int, width: int) -> None:
    one = normalize(torch.randn(1, width, generator=torch.Generator().manual_seed(n)), dim=1)
    owner = torch.arange(n).repeat_interleave(2)
    scores = retrieval(one.expand(n, -1), one.expand(2 * n, -1), owner)
    for metric in scores.metrics:
        if metric.kind == "rank":
            assert metric.value >= metric.chance
        else:
            assert metric.value <= metric.chance
    assert scores["text_to_image/recall@1"].value == 0


def test_chunks_change_nothing() -> None:
    generator = torch.Generator().manual_seed(3)
    image = normalize(torch.randn(157, 24, generator=generator), dim=1)
    owner = torch.randint(157, (401,), generator=generator)
    text = normalize(image[owner] + 0.4 * torch.randn(401, 24, generator=generator), dim=1)
    whole = ranks(image, text, owner)
    assert 0.1 < (whole.text_to_image == 1).double().mean() < 0.9
    for chunk in (1, 7, 64, 156, 5000):
        part = ranks(image, text, owner, chunk=chunk)
        assert torch.equal(part.text_to_image, whole.text_to_image)
        assert torch.equal(part.image_to_text, whole.image_to_text)


def test_never_allocates_the_full_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    largest = 0
    product = torch.Tensor.__matmul__

    def spy(left: Tensor, right: Tensor) -> Tensor:
        nonlocal largest
        result = product(left, right)
        largest = max(largest, result.numel())
        return result

    monkeypatch.setattr(torch.Tensor, "__matmul__", spy)
    monkeypatch.setattr("m1clip.evaluation.retrieval.SCORES_AT_ONCE", 2000)
    features = normalize(torch.randn(300, 4), dim=1)
    ranks(features, features, torch.arange(300))
    assert 0 < largest <= 2000


def test_nan_is_a_miss_even_when_k_exceeds_the_set() -> None:
    image, text = from_scores([[0.9, 0.1], [0.1, 0.9]])
    text[0] = torch.nan
    found = ranks(image, text, torch.tensor([0, 1]))
    assert found.text_to_image.tolist() == [3, 1]
    assert found.image_to_text.tolist() == [3, 1]
    scores = retrieval(image, text, torch.tensor([0, 1]))
    assert scores["text_to_image/recall@10"].value == 0.5
    assert scores["image_to_text/recall@10"].value == 0.5


def test_a_nan_caption_leaves_its_sisters_alone() -> None:
    image, text = from_scores([[0.9, 0.1], [0.9, 0.1], [0.1, 0.9]])
    text[1] = torch.nan
    found = ranks(image, text, torch.tensor([0, 0, 1]))
    assert found.text_to_image.tolist() == [1, 3, 1]
    assert found.image_to_text.tolist() == [1, 1]


def test_all_nan_scores_nothing() -> None:
    nothing = torch.full((4, 3), torch.nan)
    scores = retrieval(nothing, nothing, torch.arange(4))
    assert all(value == 0 for name, value in scores if "recall" in name)


def test_a_image_without_captions_is_a_candidate_that_asks_nothing() -> None:
    image, text = from_scores([[0.5, 0.9, 0.1], [0.1, 0.2, 0.9]])
    owner = torch.tensor([0, 2])
    found = ranks(image, text, owner)
    assert found.captioned.tolist() == [True, False, True]
    assert found.text_to_image.tolist() == [2, 1]
    scores = retrieval(image, text, owner)
    assert scores["image_to_text/recall@1"].n == 2
    assert scores["image_to_text/recall@1"].value == 1


def test_autocast_of_the_caller_does_not_reach_the_scores() -> None:
    image, text = from_scores([[0.5, 0.5004], [0.5, 0.5004]])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert ranks(image, text, torch.tensor([1, 1])).text_to_image.tolist() == [1, 1]


@pytest.mark.parametrize(
    ("owner", "words"),
    [
        (torch.tensor([0, 3]), "images 0 to 3"),
        (torch.tensor([-1, 0]), "images -1 to 0"),
        (torch.tensor([0]), "one a caption"),
        (torch.tensor([0.0, 1.0]), "int64"),
    ],
)
def test_a_wrong_owner_is_refused(owner: Tensor, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ranks(torch.eye(3), torch.eye(3)[:2], owner)


def test_empty_and_mismatched_features_are_refused() -> None:
    with pytest.raises(ValueError, match="nothing to evaluate"):
        ranks(torch.empty(0, 3), torch.empty(0, 3), torch.empty(0, dtype=torch.long))
    with pytest.raises(ValueError, match="one d"):
        ranks(torch.eye(3), torch.eye(2), torch.tensor([0, 1]))


def test_nearest_agrees_with_a_sort_and_puts_nan_last() -> None:
    image, text = from_scores([[0.3, 0.9, 0.6], [0.9, 0.1, 0.2]])
    scores, indices = nearest(text, image, k=2)
    assert indices.tolist() == [[1, 2], [0, 2]]
    np.testing.assert_allclose(scores.numpy(), [[0.9, 0.6], [0.9, 0.2]], rtol=1e-6)
    broken = image.clone()
    broken[1] = torch.nan
    assert nearest(text, broken, k=9)[1].tolist() == [[2, 0, 1], [0, 2, 1]]
