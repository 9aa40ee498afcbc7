"""The order in which photos are labelled: representative, diverse and unsure ones first, duplicates last."""

import numpy as np

from m1clip.search.order import LabelOrder, uncertainty


def unit(rows: np.ndarray) -> np.ndarray:
    return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)


def groups(sizes: list[int], spread: float = 0.2) -> tuple[np.ndarray, np.ndarray]:
    """Unit vectors around one center per group, and their groups."""
    rng = np.random.default_rng(0)
    of = np.repeat(np.arange(len(sizes)), sizes)
    centers = np.linalg.qr(rng.normal(size=(16, 16)))[0][: len(sizes)]
    return unit(centers[of] + spread * rng.normal(size=(len(of), 16)) / 4), of


def chosen(order: LabelOrder, count: int) -> list[int]:
    return [index for _ in range(count) if (index := order.next()) is not None]


def test_each_group_is_chosen_once_the_largest_first() -> None:
    photos, of = groups([40, 20, 10, 5])
    assert of[chosen(LabelOrder(photos), 4)].tolist() == [0, 1, 2, 3]


def test_labelled_group_comes_last_also_if_its_photo_is_not_in_the_sample() -> None:
    photos, of = groups([40, 20, 10, 5])
    order = LabelOrder(photos[1:])
    order.add(photos[:1])
    assert of[1:][chosen(order, 3)].tolist() == [1, 2, 3]


def test_unsure_photos_come_first() -> None:
    photos, of = groups([20, 20])
    for first in (0, 1):
        order = LabelOrder(photos, np.where(of == first, 2.0, 1.0))
        assert of[order.next() or 0] == first


def test_same_choice_as_the_greedy_one_without_bounds() -> None:
    photos = unit(np.random.default_rng(1).normal(size=(60, 8)))
    centered = unit(photos - photos.mean(axis=0))
    similarity = np.maximum(centered @ centered.T, 0)
    covered = np.zeros(60)
    expected = []
    for _ in range(10):
        gains = np.maximum(similarity - covered, 0).sum(axis=1)
        gains[expected] = -1
        expected.append(int(gains.argmax()))
        covered = np.maximum(covered, similarity[expected[-1]])
    assert chosen(LabelOrder(photos), 10) == expected


def test_near_duplicates_are_never_shown_and_every_other_photo_once() -> None:
    photos = unit(np.random.default_rng(2).normal(size=(30, 16)))
    twice = np.concatenate([photos, unit(photos + 1e-3)])
    order = LabelOrder(twice)
    order_of_photos = chosen(order, 60)
    assert sorted(index % 30 for index in order_of_photos) == list(range(30))
    assert order.next() is None


def test_uncertainty_is_low_where_one_word_fits() -> None:
    words = np.eye(8, dtype=np.float32)
    sure = unit(np.eye(8)[:4] + 0.01)
    unsure = unit(np.ones((4, 8)) + 0.01 * np.arange(32).reshape(4, 8) / 32)
    values = uncertainty(np.concatenate([sure, unsure]).astype(np.float32), words)
    assert values.min() == 0
    assert values.max() == 1
    assert values[:4].max() < values[4:].min()
