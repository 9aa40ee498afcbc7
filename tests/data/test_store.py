"""Images by index: held in memory or decoded each time, the same pixels."""

from __future__ import annotations

import os
import pickle
import threading
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from m1clip.data.cache import ArrayImages, LiveImages, decode_all, read_or_replace
from m1clip.data.images import FileImage
from m1clip.data.types import ImageRef
from m1clip.errors import UserError


@pytest.fixture(scope="module")
def refs(tmp_path_factory: pytest.TempPathFactory) -> list[FileImage]:
    """300 images of several sizes, as PNG and JPEG."""
    folder = tmp_path_factory.mktemp("images")
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
    kept, live = ArrayImages(array), LiveImages(refs[:40], 16)
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


def test_a_broken_image_is_named_and_the_rest_decoded(refs: list[FileImage], tmp_path: Path) -> None:
    (tmp_path / "broken.jpg").write_bytes(b"\xff\xd8\xff\xe0 no image")
    mixed = [refs[0], FileImage(str(tmp_path / "broken.jpg")), FileImage(str(tmp_path / "gone.png")), refs[2]]
    array, bad = decode_all(mixed, 16, "shortest", 1, "fork", lambda done, total: None)
    assert sorted(bad) == [1, 2]
    assert bad[1]
    assert "missing" in bad[2]
    assert np.array_equal(array[[0, 3]], LiveImages(refs, 16).read(np.array([0, 2])))


@dataclass(frozen=True)
class Absurd:
    """An image whose decoding fails as one of an absurd size does."""

    error: type[Exception]

    def open(self, want: int | None = None) -> Image.Image:
        raise self.error

    def stamp(self) -> str:
        return "absurd"


@pytest.mark.parametrize("error", [MemoryError, OverflowError])
def test_a_image_too_large_for_the_memory_is_a_bad_one(refs: list[FileImage], error: type[Exception]) -> None:
    mixed: list[ImageRef] = [refs[0], Absurd(error), refs[1]]
    _, bad = decode_all(mixed, 16, "shortest", 1, "fork", lambda done, total: None)
    assert bad == {1: "too large for the memory"}
    members, _, failed = read_or_replace(LiveImages(mixed, 16), np.array([0, 1]), 0, 0)
    assert members[0] == 0
    assert members[1] != 1
    assert {failure.index for failure in failed} == {1}
    with pytest.raises(UserError, match="too large for the memory"):
        LiveImages(mixed, 16).read(np.array([0, 1]))


@dataclass(frozen=True)
class Together:
    """An image that is decoded only when another one is being decoded at the same time."""

    barrier: threading.Barrier
    grey: int

    def open(self, want: int | None = None) -> Image.Image:
        self.barrier.wait(timeout=20)
        return Image.new("RGB", (16, 16), (self.grey,) * 3)

    def stamp(self) -> str:
        return str(self.grey)


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="one core decodes one image at a time")
def test_live_images_are_decoded_side_by_side_in_order() -> None:
    barrier = threading.Barrier(2)
    live = LiveImages([Together(barrier, grey) for grey in range(6)], 16)
    assert live.read(np.array([5, 0, 3, 1]))[:, 0, 0, 0].tolist() == [5, 0, 3, 1]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of fork beside threads, which is the point
def test_a_forked_process_and_a_pickle_read_the_same(refs: list[FileImage]) -> None:
    live, asked = LiveImages(refs[:40], 16), np.arange(40)
    pixels = live.read(asked)  # starts the threads, of which a fork inherits none
    assert np.array_equal(pickle.loads(pickle.dumps(live)).read(asked), pixels)
    child = os.fork()
    if child == 0:
        os._exit(0 if np.array_equal(live.read(asked), pixels) else 1)
    assert os.waitpid(child, 0)[1] == 0
