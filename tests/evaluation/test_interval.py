"""Do the intervals hold the truth as often as they say, and do they survive the edges."""

from __future__ import annotations

import pytest
import torch

from m1clip.evaluation.statistics import median, median_interval, share_intervals, wilson


def test_wilson_by_hand() -> None:
    # Values of the closed form, computed apart: 8 of 10, and none of 10.
    assert (wilson(0.8, 10).low, wilson(0.8, 10).high) == pytest.approx((0.4902, 0.9433), abs=1e-4)
    assert (wilson(0.0, 10).low, wilson(0.0, 10).high) == pytest.approx((0.0, 0.2775), abs=1e-4)
    assert wilson(1.0, 10).high == 1.0


def test_coverage_with_correlated_captions() -> None:
    generator = torch.Generator().manual_seed(0)
    trials, images, captions, truth = 300, 80, 5, 0.6
    cluster = torch.arange(images).repeat_interleave(captions)
    held = held_naive = 0
    for trial in range(trials):
        # In two images of three all captions share one fate; the mean stays at the truth.
        fate = (torch.rand(images, 1, generator=generator) < truth).expand(-1, captions)
        free = torch.rand(images, captions, generator=generator) < truth
        shared = torch.rand(images, 1, generator=generator) < 2 / 3
        hits = torch.where(shared, fate, free).flatten()
        interval = share_intervals(hits[:, None], cluster, seed=trial)[0]
        held += interval.low <= truth <= interval.high
        naive = wilson(float(hits.double().mean()), len(hits))
        held_naive += naive.low <= truth <= naive.high
    assert 0.91 <= held / trials <= 0.99
    # The reason for resampling images: taken as independent, captions promise far too much.
    assert held_naive / trials < 0.85


@pytest.mark.parametrize("truth", [0.02, 0.5, 0.97])
def test_coverage_with_one_caption_a_image(truth: float) -> None:
    generator = torch.Generator().manual_seed(1)
    held = 0
    for _ in range(400):
        hits = torch.rand(200, 1, generator=generator) < truth
        interval = share_intervals(hits, torch.arange(200))[0]
        held += interval.low <= truth <= interval.high
    assert 0.92 <= held / 400 <= 0.99


def test_none_and_all_have_a_width() -> None:
    cluster = torch.arange(100).repeat_interleave(3)
    hits = torch.stack([torch.zeros(300), torch.ones(300), torch.arange(300) % 2], dim=1).bool()
    none, every, half = share_intervals(hits, cluster)
    assert none.low == 0 < none.high < 0.05
    assert 0.95 < every.low < 1 == every.high
    assert half.low < 0.5 < half.high


def test_one_image() -> None:
    interval = share_intervals(torch.tensor([[True], [False]]), torch.tensor([7, 7]))[0]
    assert 0 < interval.low < 0.5 < interval.high < 1


def test_a_function_of_the_seed() -> None:
    hits = torch.rand(600, 1, generator=torch.Generator().manual_seed(5)) < 0.4
    cluster = torch.arange(200).repeat_interleave(3)
    torch.manual_seed(9)
    before = torch.get_rng_state()
    assert share_intervals(hits, cluster, seed=1) == share_intervals(hits, cluster, seed=1)
    assert share_intervals(hits, cluster, seed=1) != share_intervals(hits, cluster, seed=2)
    # The training run's own randomness must not move because an evaluation took place.
    assert torch.equal(before, torch.get_rng_state())


def test_draws_at_once_do_not_change_coverage_or_length(monkeypatch: pytest.MonkeyPatch) -> None:
    hits = torch.rand(600, 1, generator=torch.Generator().manual_seed(5)) < 0.4
    cluster = torch.arange(200).repeat_interleave(3)
    whole = share_intervals(hits, cluster)[0]
    monkeypatch.setattr("m1clip.evaluation.statistics.DRAWS_AT_ONCE", 1500)
    part = share_intervals(hits, cluster)[0]
    assert (part.low, part.high) == pytest.approx((whole.low, whole.high), abs=0.01)


def test_median_interval_covers() -> None:
    generator = torch.Generator().manual_seed(2)
    held = 0
    for _ in range(300):
        # Ranks 1 to 99 in clusters of three equal ones: the true median is 50.
        rank = torch.randint(1, 100, (60,), generator=generator).repeat_interleave(3)
        interval = median_interval(rank, torch.arange(60).repeat_interleave(3))
        held += interval.low <= 50 <= interval.high
    assert 0.91 <= held / 300 <= 0.99


def test_median_of_even_and_of_one() -> None:
    assert median(torch.tensor([4, 1, 3, 2])) == 2.5
    assert median(torch.tensor([7])) == 7
    interval = median_interval(torch.tensor([7]), torch.tensor([0]))
    assert (interval.low, interval.high) == (7, 7)
