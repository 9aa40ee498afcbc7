"""Decoding JPEG on a GPU: what is sent there, its squares, and what is left to the CPU.

The decoder is simulated.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from m1clip.data import decoding, nvjpeg
from m1clip.data.images import FileImage, decode, to_square
from m1clip.data.nvjpeg import jpeg_size, squares

SIDE = 32


def on_host(batch: list[torch.Tensor]) -> list[torch.Tensor]:
    """What nvJPEG does, with the pixels of Pillow."""
    images = [np.asarray(decode(bytes(data.numpy()))) for data in batch]
    return [torch.from_numpy(image.copy()).permute(2, 0, 1) for image in images]


def photo(path: Path, size: tuple[int, int] = (50, 40), **options: Any) -> bytes:
    coarse = np.random.default_rng(size[0]).integers(0, 256, (6, 6, 3), np.uint8)
    image = Image.fromarray(coarse).resize(size, Image.Resampling.BICUBIC)
    image.convert(options.pop("mode", "RGB")).save(path, "JPEG", **options)
    return path.read_bytes()


def rotated(orientation: int) -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif


def test_only_ordinary_jpegs_go_to_the_gpu(tmp_path: Path) -> None:
    path = tmp_path / "a.jpg"
    assert jpeg_size(photo(path)) == (50, 40)
    assert jpeg_size(photo(path, progressive=True)) == (50, 40)
    assert jpeg_size(photo(path, mode="L")) == (50, 40)
    assert jpeg_size(photo(path, exif=rotated(1))) == (50, 40)
    assert jpeg_size(photo(path, exif=rotated(6))) is None
    assert jpeg_size(photo(path, xmp=b"<x tiff:Orientation='6'/>")) is None
    assert jpeg_size(photo(path, mode="CMYK")) is None
    assert jpeg_size(photo(path)[:-40]) is None, "truncated"
    assert jpeg_size(photo(path, size=(640, 20))) is None, "its ends are cropped first"
    assert jpeg_size(b"") is None
    assert jpeg_size(b"\x89PNG" + bytes(100)) is None


@pytest.mark.parametrize("resize", ["shortest", "shortest-floor", "squash"])
def test_squares_differ_from_those_of_pillow_by_rounding(resize: str) -> None:
    draw = np.random.default_rng(0)
    images = []
    for size in ((50, 40), (41, 67), (50, 40), (32, 32), (33, 70)):
        coarse = Image.fromarray(draw.integers(0, 256, (5, 5, 3), np.uint8))
        images.append(coarse.resize(size, Image.Resampling.BICUBIC))
    tensors = [torch.from_numpy(np.asarray(image).copy()).permute(2, 0, 1) for image in images]
    found = squares(tensors, SIDE, resize).numpy().astype(int)
    for made, image in zip(found, images, strict=True):
        difference = np.abs(made - to_square(image, SIDE, resize))
        assert difference.max() <= 2
        assert difference.mean() < 0.3


def test_gpu_and_cpu_decode_each_image_once_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rotated and broken images are left to the CPU; so is a group that contains a damaged one."""
    refs = []
    for number in range(20):
        path = tmp_path / f"{number:02}.jpg"
        photo(path, (50 + number % 3, 40), exif=rotated(6 if number == 4 else 1))
        refs.append(FileImage(str(path)))
    (tmp_path / "07.jpg").write_bytes(b"no image")
    (tmp_path / "08.jpg").unlink()
    monkeypatch.setattr(nvjpeg, "GPU_BATCH", 6)
    monkeypatch.setattr(nvjpeg, "GROUP_PIXELS", 5000)  # two images at a time
    sent = []

    def damaged_once(batch: list[torch.Tensor]) -> list[torch.Tensor]:
        sent.append(len(batch))
        if len(sent) == 3:
            raise RuntimeError("nvJPEG: bad JPEG")
        return on_host(batch)

    bad: dict[int, str] = {}
    on_cpu: dict[int, str] = {}
    blocks = list(decoding.decode_images(refs, SIDE, "shortest", bad, gpu=damaged_once))
    expected = list(decoding.decode_images(refs, SIDE, "shortest", on_cpu))
    places = [place for items, _ in blocks for place in items]
    assert places == [place for items, _ in expected for place in items]
    assert bad == on_cpu
    assert sorted(bad) == [7, 8]
    assert max(sent) == 2
    assert sum(sent) == 17
    one = np.concatenate([pixels for _, pixels in blocks]).astype(int)
    other = np.concatenate([pixels for _, pixels in expected])
    assert np.abs(one - other).max() <= 2


def test_without_a_gpu_the_cpu_decodes() -> None:
    if not torch.cuda.is_available():
        assert nvjpeg.gpu_decoder() is None
