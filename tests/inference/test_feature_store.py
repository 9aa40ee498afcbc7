"""Features on disk: added once, found by name, whole after a kill."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from m1clip.data.features import FeatureStore, name_of

WIDTH = 5


def row(word: str) -> np.ndarray:
    return np.full(WIDTH, float(int(word[1:])), np.float16)


def filled(store: FeatureStore, words: list[str], asked: list[str], stop_after: int | None = None) -> None:
    """Fill by twos, writing down what was computed; break off after some blocks."""

    def compute(wanted: list[int]) -> Iterator[tuple[list[int], np.ndarray]]:
        for number, start in enumerate(range(0, len(wanted), 2)):
            if number == stop_after:
                raise KeyboardInterrupt
            places = wanted[start : start + 2]
            asked.extend(words[place] for place in places)
            yield places, np.stack([row(words[place]) for place in places])

    store.fill([name_of(word) for word in words], compute, lambda: None)


def check(store: FeatureStore, words: list[str]) -> None:
    at = store.rows([name_of(word) for word in words])
    assert (at >= 0).all()
    assert np.array_equal(store.mapped()[at], np.stack([row(word) for word in words]))


def test_each_row_is_computed_once_and_only_new_ones_later(tmp_path: Path) -> None:
    store, asked = FeatureStore(tmp_path, "a", WIDTH), []
    filled(store, ["w1", "w2", "w1", "w3"], asked)
    assert asked == ["w1", "w2", "w3"]
    check(store, ["w3", "w1", "w1", "w2"])
    asked.clear()
    again = FeatureStore(tmp_path, "a", WIDTH)
    filled(again, ["w4", "w2", "w5"], asked)
    assert asked == ["w4", "w5"]
    check(again, ["w1", "w2", "w3", "w4", "w5"])
    asked.clear()
    filled(again, ["w1", "w5"], asked)
    assert asked == []


def test_another_key_is_another_store(tmp_path: Path) -> None:
    store, asked = FeatureStore(tmp_path, "a", WIDTH), []
    filled(store, ["w1"], asked)
    assert FeatureStore(tmp_path, "b", WIDTH).missing([name_of("w1")]) == [0]
    assert store.rows([name_of("w9")]).tolist() == [-1]


def test_a_killed_build_goes_on_where_it_was(tmp_path: Path) -> None:
    words = [f"w{i}" for i in range(9)]
    store, asked = FeatureStore(tmp_path, "a", WIDTH), []
    with pytest.raises(KeyboardInterrupt):
        filled(store, words, asked, stop_after=2)
    assert asked == words[:4]
    asked.clear()
    filled(FeatureStore(tmp_path, "a", WIDTH), words, asked)
    assert asked == words[4:]
    check(store, words)


@pytest.mark.parametrize("torn", ["rows.bin", "names.bin"])
def test_a_torn_end_is_cut_off_and_made_again(tmp_path: Path, torn: str) -> None:
    words = [f"w{i}" for i in range(6)]
    store, asked = FeatureStore(tmp_path, "a", WIDTH), []
    filled(store, words, asked)
    file = store.path / torn
    file.write_bytes(file.read_bytes()[:-3])
    assert store.missing([name_of(word) for word in words]) == [5]
    asked.clear()
    filled(store, [*words, "w7"], asked)
    assert asked == ["w5", "w7"]
    check(store, [*words, "w7"])
