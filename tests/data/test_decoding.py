"""Decoding in threads, and images that cannot be decoded."""

from dataclasses import dataclass

import numpy as np
import pytest
from PIL import Image

from m1clip import console
from m1clip.data import decoding
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


def test_threads_decode_in_order(refs: list[FileImage]) -> None:
    shown: list[tuple[int, int]] = []
    with console.on_progress(lambda *values: shown.append(values)):
        blocks = list(decoding.decode_images(refs, 16, "shortest", {}, decoding.DecodeMethod(2)))
    assert [item for items, _ in blocks for item in items] == list(range(300))
    lazy = decoding.LazyImages(refs, 16).read(np.arange(300))
    assert np.array_equal(np.concatenate([pixels for _, pixels in blocks]), lazy)
    assert shown == sorted(shown)
    assert (shown[0], shown[-1]) == ((0, 300), (300, 300))


@dataclass(frozen=True)
class Absurd:
    """An image whose decoding fails like that of an absurdly large one."""

    error: type[Exception]

    def open(self, min_side: int | None = None) -> Image.Image:
        raise self.error

    def stamp(self) -> str:
        return "absurd"


@pytest.mark.parametrize("error", [MemoryError, OverflowError])
def test_image_too_large_for_memory_is_a_failure(
    refs: list[FileImage], error: type[Exception]
) -> None:
    mixed: list[ImageRef] = [refs[0], Absurd(error), refs[1]]
    bad: dict[int, str] = {}
    ((items, _),) = decoding.decode_images(mixed, 16, "shortest", bad)
    assert (items, bad) == ([0, 2], {1: "too large for memory"})
    members, _, failed = decoding.read_or_replace(
        decoding.LazyImages(mixed, 16), np.array([0, 1]), 0, 0
    )
    assert members[0] == 0
    assert members[1] != 1
    assert {failure.index for failure in failed} == {1}
    with pytest.raises(UserError, match=r"too large for memory; .*continue with --resume"):
        decoding.LazyImages(mixed, 16).read(np.array([0, 1]))
