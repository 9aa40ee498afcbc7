"""The rows of a cache on disk: content, reuse, damage, and a full disk."""

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from image_sets import make_set

from m1clip.data import cache
from m1clip.data.sources import open_sources
from m1clip.data.types import Source
from m1clip.errors import UserError

WIDTH = 5


def row(word: str) -> np.ndarray:
    return np.full(WIDTH, float(word[1:]), np.float16)


def fill(rows: cache.RowCache, words: list[str], stop_after: int | None = None) -> list[str]:
    """Fill two rows at a time and return the computed ones.

    Interrupted after `stop_after` blocks.
    """
    computed: list[str] = []

    def compute(
        missing: list[int], failed: dict[int, str], writer: cache.RowWriter
    ) -> Iterator[list[int]]:
        for number, start in enumerate(range(0, len(missing), 2)):
            if number == stop_after:
                raise KeyboardInterrupt
            block = [words[item] for item in missing[start : start + 2]]
            computed.extend(block)
            indices = list(range(start, start + len(block)))
            writer.write(indices, np.stack([row(word) for word in block]))
            yield indices

    try:
        at, _ = rows.fill([cache.row_key(word) for word in words], compute)
    except KeyboardInterrupt:
        return computed
    view = rows.view(at)
    np.testing.assert_array_equal(
        view.read(np.arange(len(words))), np.stack([row(word) for word in words])
    )
    return computed


def row_cache(folder: Path, key: str = "a") -> cache.RowCache:
    made = cache.RowCache(folder, "rows", key, (WIDTH,), np.float16)
    made.path = folder / key
    return made


def test_each_row_is_computed_once_and_only_new_ones_later(tmp_path: Path) -> None:
    assert fill(row_cache(tmp_path), ["w1", "w2", "w1", "w3"]) == ["w1", "w2", "w3"]
    assert fill(row_cache(tmp_path), ["w4", "w2", "w5"]) == ["w4", "w5"]
    assert fill(row_cache(tmp_path), ["w5", "w1", "w1"]) == []
    assert row_cache(tmp_path, "b").missing([cache.row_key("w1")]) == [0], (
        "another key is another cache"
    )


@pytest.mark.parametrize("torn", ["rows.bin", "names.bin"])
def test_partial_row_is_truncated_and_recomputed(tmp_path: Path, torn: str) -> None:
    words = [f"w{i}" for i in range(6)]
    fill(row_cache(tmp_path), words)
    file = tmp_path / "a" / torn
    file.write_bytes(file.read_bytes()[:-3])
    assert fill(row_cache(tmp_path), [*words, "w7"]) == ["w5", "w7"]


@pytest.mark.parametrize("name", ["rows.bin", "names.bin"])
def test_untrusted_link_or_pipe_is_never_written(tmp_path: Path, name: str) -> None:
    """A downloaded dataset may contain a cache folder."""
    (tmp_path / "precious").write_text("mine")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / name).symlink_to(tmp_path / "precious")
    with pytest.raises(UserError, match="is a symbolic link"):
        fill(row_cache(tmp_path), ["w1"])
    assert (tmp_path / "precious").read_text() == "mine"
    (tmp_path / "a" / name).unlink()
    os.mkfifo(tmp_path / "a" / name)
    with pytest.raises(OSError, match=r"No such device|not a regular file"):
        fill(row_cache(tmp_path), ["w1"])


def test_full_disk_is_a_one_line_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cache.os, "fsync", full)
    with pytest.raises(UserError, match=r"the disk is full.*run again to continue"):
        fill(row_cache(tmp_path), ["w1"])
    monkeypatch.undo()
    assert fill(row_cache(tmp_path), ["w1"]) == ["w1"]


def test_data_folders_of_a_mixture_and_of_the_hub(tmp_path: Path) -> None:
    one, two = make_set(tmp_path / "one"), make_set(tmp_path / "two")
    assert cache.data_folders(open_sources([str(one), str(two)])) == (str(one), str(two))
    assert cache.data_folders(Source("hub", [Path("hf:owner/name")])) == ()
