"""Pictures by index: held in memory or decoded each time, the same pixels."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from m1clip.data.images import FileImage
from m1clip.data.store import ArrayPictures, LivePictures, decode_all


@pytest.fixture(scope="module")
def refs(tmp_path_factory: pytest.TempPathFactory) -> list[FileImage]:
    """300 pictures of several sizes, as PNG and JPEG."""
    folder = tmp_path_factory.mktemp("pictures")
    rng = np.random.default_rng(0)
    made = []
    for number in range(300):
        path = folder / f"{number}.{'jpg' if number % 2 else 'png'}"
        shape = (20 + number % 13, 20 + number % 7, 3)
        Image.fromarray(rng.integers(0, 256, shape, np.uint8)).save(path)
        made.append(FileImage(str(path)))
    return made


def test_decoded_once_or_each_time_is_the_same(refs: list[FileImage]) -> None:
    array, bad = decode_all(refs[:40], 16, "shortest", 1, "fork", lambda done, total: None)
    assert bad == {}
    kept, live = ArrayPictures(array), LivePictures(refs[:40], 16)
    assert len(kept) == len(live) == 40
    asked = np.array([7, 0, 39, 7])
    assert kept.read(asked).shape == (4, 16, 16, 3)
    assert np.array_equal(kept.read(asked), live.read(asked))


@pytest.mark.slow
def test_processes_decode_the_same_and_progress_reaches_the_end(refs: list[FileImage]) -> None:
    told: list[tuple[int, int]] = []
    alone, _ = decode_all(refs, 16, "shortest", 1, "fork", lambda done, total: None)
    helped, bad = decode_all(refs, 16, "shortest", 2, "fork", lambda done, total: told.append((done, total)))
    assert bad == {}
    assert np.array_equal(alone, helped)
    assert told[-1] == (300, 300)
    assert told == sorted(told)


def test_a_broken_picture_is_named_and_the_rest_decoded(refs: list[FileImage], tmp_path: Path) -> None:
    (tmp_path / "broken.jpg").write_bytes(b"\xff\xd8\xff\xe0 no picture")
    mixed = [refs[0], FileImage(str(tmp_path / "broken.jpg")), FileImage(str(tmp_path / "gone.png")), refs[2]]
    array, bad = decode_all(mixed, 16, "shortest", 1, "fork", lambda done, total: None)
    assert sorted(bad) == [1, 2]
    assert bad[1]
    assert "missing" in bad[2]
    assert np.array_equal(array[[0, 3]], LivePictures(refs, 16).read(np.array([0, 2])))
