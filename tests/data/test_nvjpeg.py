"""Decoding JPEG on a GPU: what is sent there, its squares, and what is left to the CPU.

The decoder is simulated.
"""

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hanging_reads import hang, replace_clock_of_reads
from PIL import Image

from m1clip.data import decoding, nvjpeg
from m1clip.data.cache import Computed, RowCache, RowWriter, row_key
from m1clip.data.decode_worker import Late
from m1clip.data.images import FileImage, decode, to_square
from m1clip.data.nvjpeg import jpeg_size
from m1clip.data.types import ImageRef
from m1clip.errors import UserError

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


@pytest.mark.parametrize("processes", [0, 2])
def test_gpu_and_cpu_decode_each_image_once_in_order(
    processes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rotated and broken images are left to the CPU; so is a group that contains a damaged one.

    Threads read the files, or processes.
    """
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
    blocks = list(
        decoding.decode_images(
            refs,
            SIDE,
            "shortest",
            bad,
            decoding.DecodeMethod(processes=processes, gpu=damaged_once),
        )
    )
    expected = list(decoding.decode_images(refs, SIDE, "shortest", on_cpu))
    indices = [index for items, _ in blocks for index in items]
    assert indices == [index for items, _ in expected for index in items]
    assert bad == on_cpu
    assert sorted(bad) == [7, 8]
    assert max(sent) == 2
    assert sum(sent) == 17
    one = np.concatenate([pixels for _, pixels in blocks]).astype(int)
    other = np.concatenate([pixels for _, pixels in expected])
    assert np.abs(one - other).max() <= 2


def test_rows_decoded_on_the_gpu_are_written_to_their_places(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broken images leave their rows free; rows need not be in order."""
    refs = []
    for number in range(20):
        path = tmp_path / f"{number:02}.jpg"
        photo(path, (50 + number % 3, 40))
        refs.append(FileImage(str(path)))
    (tmp_path / "07.jpg").write_bytes(b"no image")
    monkeypatch.setattr(nvjpeg, "GPU_BATCH", 6)
    monkeypatch.setattr(nvjpeg, "READ_BLOCK", 3)
    cache = RowCache(tmp_path / "cache", "images", "test", (SIDE, SIDE, 3), np.uint8)
    options = decoding.DecodeOptions(1, 2**30)

    def compute(missing: list[int], failed: dict[int, str], writer: RowWriter) -> Computed:
        writer.rows = [*writer.rows[10:], *writer.rows[:10]]
        chosen = [refs[index] for index in missing]
        return decoding.decode_to_rows(
            chosen, SIDE, "shortest", failed, writer, options, gpu=on_host
        )

    rows, bad = cache.fill([row_key(str(ref)) for ref in refs], compute)
    assert set(bad) == {7}
    assert rows.tolist() == [*range(10, 17), -1, 18, 19, *range(10)]
    indices = np.array([index for index in range(20) if index != 7])
    decoded = cache.view(rows[indices]).read(np.arange(19)).astype(int)
    for made, index in zip(decoded, indices.tolist(), strict=True):
        assert np.abs(made - to_square(decode(refs[index].path), SIDE)).max() <= 2


class Hanging(ImageRef):
    def __init__(self) -> None:
        self.released = threading.Event()

    def read(self) -> bytes:
        hang(self.released)
        return b""

    def __str__(self) -> str:
        return "hanging.jpg"


def test_hanging_read_for_the_gpu_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other images of its block are read again."""
    replace_clock_of_reads(monkeypatch)
    lost = Hanging()
    photo(tmp_path / "a.jpg")
    good = FileImage(str(tmp_path / "a.jpg"))
    work = nvjpeg.ReadForGpu(lambda ref: "not for the GPU")
    (read,) = nvjpeg.read_batches([good, lost, good], work, 0, 2.0)
    encoded = nvjpeg.Encoded(good.read(), 50 * 40)
    assert read == [encoded, Late(2.0), encoded]
    with pytest.raises(UserError, match=r"hanging\.jpg: the read did not finish"):
        list(
            decoding.decode_images(
                [good, lost], SIDE, "shortest", {}, decoding.DecodeMethod(gpu=on_host, timeout=2.0)
            )
        )
    lost.released.set()


def test_large_files_are_read_in_small_blocks(tmp_path: Path) -> None:
    small = FileImage(str(tmp_path / "a.jpg"))
    photo(tmp_path / "a.jpg")
    large = FileImage(str(tmp_path / "b.jpg"))
    (tmp_path / "b.jpg").write_bytes(bytes(nvjpeg.BLOCK_BYTES // 2))
    assert nvjpeg.images_per_block([small] * 20) == nvjpeg.READ_BLOCK
    assert nvjpeg.images_per_block([small, large]) == 2


def test_few_images_for_the_gpu_are_left_to_processes(tmp_path: Path) -> None:
    photo(tmp_path / "a.jpg")
    Image.new("RGB", (50, 40)).save(tmp_path / "b.png")
    jpeg, png = FileImage(str(tmp_path / "a.jpg")), FileImage(str(tmp_path / "b.png"))
    assert nvjpeg.mostly_for_gpu([jpeg] * 95 + [png] * 5, 20)
    assert not nvjpeg.mostly_for_gpu([jpeg, png] * 50, 20)
    assert not nvjpeg.mostly_for_gpu([jpeg] * 100, 30), "hardly larger than what is cached"


def test_without_a_gpu_the_cpu_decodes() -> None:
    if not torch.cuda.is_available():
        assert nvjpeg.gpu_decoder() is None
