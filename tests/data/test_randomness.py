"""Random numbers as a function of integers: uniform, with independent streams."""

import itertools
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from m1clip.data import randomness as rnd

SAMPLES = np.arange(20_000)
STREAMS = (
    rnd.CAPTION,
    rnd.CROP_AREA,
    rnd.CROP_ASPECT,
    rnd.CROP_X,
    rnd.CROP_Y,
    rnd.FLIP,
    rnd.BRIGHTNESS,
    rnd.CONTRAST,
)


@given(seed=st.integers(0, 2**31 - 1), epoch=st.integers(0, 10**6), stream=st.sampled_from(STREAMS))
def test_uniform_is_in_the_half_open_unit_interval(seed: int, epoch: int, stream: int) -> None:
    numbers = rnd.uniform(seed, epoch, np.array([0, 1, 2**31, 2**62]), stream)
    assert ((numbers >= 0) & (numbers < 1)).all()
    assert len(set(numbers)) == 4


def test_hash_is_splitmix64() -> None:
    """The reference values of splitmix64: a run of today is repeated exactly by a later version."""
    with np.errstate(over="ignore"):
        golden = np.uint64(0x9E3779B97F4A7C15)
        states = np.arange(3, dtype=np.uint64) * golden
        hashes = rnd._splitmix(states)
    assert [hex(value) for value in hashes] == [
        "0xe220a8397b1dcdaf",
        "0x6e789e6aa1b965f4",
        "0x6c45d188009454f",
    ]


def test_numbers_are_uniform() -> None:
    for stream in STREAMS:
        counts, _ = np.histogram(rnd.uniform(3, 7, SAMPLES, stream), bins=20, range=(0, 1))
        assert (
            (counts - 1000) ** 2 / 1000
        ).sum() < 43.8  # chi-square with 19 degrees of freedom, p = 0.001


@given(
    blocks=st.lists(st.integers(1, 50), min_size=1, max_size=40),
    seed=st.integers(0, 2**31 - 1),
    epoch=st.integers(0, 1000),
    window=st.integers(1, 400),
    cuts=st.lists(st.floats(0, 1), max_size=5),
)
def test_windowed_order_has_each_sample_once_wherever_it_is_cut(
    blocks: list[int], seed: int, epoch: int, window: int, cuts: list[float]
) -> None:
    total = sum(blocks)
    bounds = sorted({0, total, *(int(cut * total) for cut in cuts)})
    with mock.patch.object(rnd, "SHUFFLE_WINDOW", window):
        rnd._window.cache_clear()
        order = rnd.windowed_order(seed, epoch, np.array(blocks), 0, total)
        parts = [
            rnd.windowed_order(seed, epoch, np.array(blocks), *pair)
            for pair in itertools.pairwise(bounds)
        ]
    rnd._window.cache_clear()
    assert sorted(order.tolist()) == list(range(total))
    assert np.concatenate(parts).tolist() == order.tolist()


def test_windowed_order_differs_by_epoch_and_spreads_neighbours() -> None:
    blocks = np.full(400, 1000)
    orders = [rnd.windowed_order(0, epoch, blocks, 0, 400_000) for epoch in (0, 1)]
    assert (orders[0] == orders[1]).mean() < 0.001
    positions = np.argsort(orders[0])
    assert abs(np.corrcoef(positions, np.arange(400_000))[0, 1]) < 0.2  # 400 blocks in random order
    batch = orders[0][:4096] // 1000
    assert len(np.unique(batch)) == 66, "from all blocks of the first window"


@pytest.mark.parametrize(
    "other",
    [
        (0, 0, rnd.FLIP),
        (0, 1, rnd.CAPTION),
        (1, 0, rnd.CAPTION),
        (1, 1, rnd.CAPTION),
        (0, rnd.FLIP, rnd.CAPTION),
    ],
)
def test_streams_epochs_and_seeds_are_independent(other: tuple[int, int, int]) -> None:
    one = rnd.uniform(0, 0, SAMPLES, rnd.CAPTION)
    seed, epoch, stream = other
    two = rnd.uniform(seed, epoch, SAMPLES, stream)
    assert (one != two).all()
    assert abs(np.corrcoef(one, two)[0, 1]) < 4 / np.sqrt(len(SAMPLES))


def test_neighboring_samples_are_independent() -> None:
    numbers = rnd.uniform(0, 0, SAMPLES, rnd.CAPTION)
    assert abs(np.corrcoef(numbers[1:], numbers[:-1])[0, 1]) < 4 / np.sqrt(len(SAMPLES))
    assert len(np.unique(rnd.bits(0, 0, SAMPLES, rnd.CAPTION))) == len(SAMPLES)
    assert (numbers[[17, 3]] == rnd.uniform(0, 0, np.array([17, 3]), rnd.CAPTION)).all()


@given(seed=st.integers(0, 2**31 - 1), epoch=st.integers(0, 1000), count=st.integers(1, 300))
def test_permutation_contains_each_image_once(seed: int, epoch: int, count: int) -> None:
    order = rnd.permutation(seed, epoch, count)
    assert sorted(order) == list(range(count))
    assert (order == rnd.permutation.__wrapped__(seed, epoch, count)).all()
    assert not order.flags.writeable
    assert count < 20 or (order != rnd.permutation(seed, epoch + 1, count)).any()
