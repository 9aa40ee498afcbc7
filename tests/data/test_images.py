"""Image decoding in every mode, damaged files, and preprocessing that matches open_clip's."""

import json
import os
import pickle
import subprocess
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from image_sets import encoded
from PIL import Image

from m1clip.data import images
from m1clip.data.images import BadImage, FileImage, Preprocess, decode, to_square
from m1clip.data.lint import lint
from m1clip.data.sources import open_source
from m1clip.errors import UserError

HEIC = Path(__file__).parent / "fixtures" / "red.heic"


@pytest.mark.parametrize("kind", images.PIL_FORMATS)
def test_formats_become_rgb(kind: str) -> None:
    image = decode(encoded(Image.new("RGB", (20, 10), (200, 30, 30)), kind))
    assert (image.mode, image.size) == ("RGB", (20, 10))
    assert np.abs(np.asarray(image)[5, 5].astype(int) - (200, 30, 30)).max() <= 12


def test_other_formats_are_refused() -> None:
    for kind in ("EPS", "ICO", "TGA"):
        with pytest.raises(BadImage, match="not an image in a supported format"):
            decode(encoded(Image.new("RGB", (16, 16)), kind), where="x")


def test_sixteen_bits_and_floats_are_scaled() -> None:
    values = np.array([[0, 257 * 100, 65535]], np.uint16)
    image = np.asarray(decode(encoded(Image.fromarray(values), "PNG")))
    assert image[0, :, 0].tolist() == [0, 100, 255]
    assert np.array_equal(np.asarray(decode(encoded(Image.fromarray(values), "TIFF"))), image)
    floats = np.asarray(
        decode(encoded(Image.fromarray(np.array([[0.0, 0.5, 1.0]], np.float32)), "TIFF"))
    )
    assert floats[0, :, 1].tolist() == [0, 128, 255]


def test_palette_alpha_cmyk_animation_and_orientation() -> None:
    red = Image.new("RGBA", (8, 8), (255, 0, 0, 0))
    assert decode(encoded(red, "PNG")).getpixel((0, 0)) == (255, 0, 0)
    palette = Image.new("RGB", (8, 8), (0, 0, 255)).quantize(4)
    assert decode(encoded(palette, "PNG", transparency=b"\x00\xff")).getpixel((0, 0)) == (0, 0, 255)
    cmyk = decode(encoded(Image.new("RGB", (8, 8), (0, 255, 0)).convert("CMYK"), "JPEG"))
    assert cmyk.mode == "RGB"
    assert cmyk.getpixel((4, 4))[1] > 240 > 15 > cmyk.getpixel((4, 4))[0]
    animation = encoded(
        red.convert("RGB"), "GIF", save_all=True, append_images=[Image.new("RGB", (8, 8))]
    )
    assert decode(animation).getpixel((0, 0)) == (255, 0, 0), "the first frame"
    exif = Image.Exif()
    exif[0x0112] = 6
    for kind in ("JPEG", "PNG", "TIFF", "WEBP"):
        turned = Image.new("RGB", (40, 20))
        turned.paste((255, 255, 255), (0, 0, 20, 20))
        assert decode(encoded(turned, kind, exif=exif)).size == (20, 40)
        assert decode(encoded(turned, kind, exif=exif)).getpixel((10, 4))[0] > 250


def test_jpeg_draft_mode_is_never_below_wanted_size() -> None:
    data = encoded(Image.new("RGB", (1000, 600)), "JPEG")
    assert min(decode(data, min_side=112).size) in range(112, 224)
    assert decode(data).size == (1000, 600)


@pytest.fixture
def small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits of pixels as for images 10,000 times as large.

    Above twice its own, Pillow raises an error.
    """
    monkeypatch.setattr(images, "MAX_PIXELS", 6_400)
    monkeypatch.setattr(images, "MAX_JPEG_PIXELS", 25_600)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 8_900)


@pytest.mark.usefixtures("small_limits")
# Pytest resets m1clip's filter.
@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize("size", [(120, 90), (160, 125), (200, 128)])
@pytest.mark.parametrize(("min_side", "expected"), [(20, 20), (None, 60)])
def test_large_jpeg_is_decoded_smaller(
    size: tuple[int, int], min_side: int | None, expected: int
) -> None:
    data = encoded(Image.new("RGB", size, (200, 30, 30)), "JPEG")
    with images.open_header(data, "x") as header:
        assert header.size == size
    image = decode(data, min_side, "x")
    assert image.width * image.height <= 6_400
    assert min(image.size) >= min(expected, size[1] // 2)
    assert np.abs(np.asarray(image)[5, 5].astype(int) - (200, 30, 30)).max() <= 12


@pytest.mark.usefixtures("small_limits")
# Pytest resets m1clip's filter.
@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_large_image_that_cannot_be_decoded_smaller_is_rejected() -> None:
    large = Image.new("RGB", (120, 90), (200, 30, 30))
    too_large = Image.new("RGB", (210, 125))
    separate_scans = two_scans(encoded(large, "JPEG"))
    for data in (
        *(encoded(large, kind) for kind in ("PNG", "WEBP", "BMP", "TIFF")),
        *(encoded(large, "JPEG", progressive=True), separate_scans, encoded(too_large, "JPEG")),
    ):
        with pytest.raises(
            BadImage, match=r"x: .*more than 0 megapixels; reduce its size"
        ) as caught:
            decode(data, 20, "x")
        assert caught.value.kind == "too-large"


def two_scans(data: bytes) -> bytes:
    """A JPEG whose first scan claims to have only one of the three colors."""
    at = data.index(b"\xff\xda")
    return data[:at] + b"\xff\xda\x00\x08\x01\x01\x00\x00\x3f\x00" + data[at + 14 :]


def test_pillow_prints_no_warnings(tmp_path: Path) -> None:
    """For a JPEG of 108 megapixels and a TIFF with odd tags, in a new process: pytest changes the filters."""
    Image.new("L", (12_000, 9_000), 90).save(tmp_path / "large.jpg")
    (tmp_path / "odd.tif").write_bytes(b"II*\0\x08\0\0\0\x01\0\0\x01\x04\0\xff\xff\xff\x7f\0\0\0\0")
    code = (
        "import contextlib, sys\n"
        "from m1clip.data.images import BadImage, FileImage\n"
        "for path in sys.argv[1:]:\n"
        "    with contextlib.suppress(BadImage):\n"
        "        print(FileImage(path).open(224).size)\n"
    )
    files = [str(tmp_path / name) for name in ("large.jpg", "odd.tif")]
    ended = subprocess.run(
        [sys.executable, "-W", "default", "-c", code, *files],
        capture_output=True,
        text=True,
        check=True,
    )
    assert (ended.stdout, ended.stderr) == ("(1500, 1125)\n", "")


@pytest.mark.parametrize(
    "start", [b"", encoded(Image.new("RGB", (64, 64)), "JPEG"), b"RIFF\xff\xff\xff\x3fWEBPVP8X"]
)
def test_large_file_is_not_read_for_a_small_image(
    tmp_path: Path, start: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "sparse.jpg"
    file.write_bytes(start)
    os.truncate(file, 2**24)
    limit = 2**20
    monkeypatch.setattr(images, "MAX_EXTRA_BYTES", limit)
    tracemalloc.start()
    for attempt in (FileImage(str(file)).read, FileImage(str(file)).open):
        with pytest.raises(BadImage) as caught:
            attempt()
        assert caught.value.kind in ("too-large", "not-an-image")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**23


def test_large_file_of_a_large_image_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(images, "MAX_EXTRA_BYTES", 1_000)
    for kind in ("BMP", "TIFF", "PNG", "JPEG"):
        file = tmp_path / f"a.{kind}"
        noise(64, 48).save(file, kind)
        assert file.stat().st_size > 1_000
        assert FileImage(str(file)).read() == file.read_bytes()
        assert np.array_equal(FileImage(str(file)).open(), decode(file.read_bytes()))


def test_broken_file_error_names_file_and_reason(tmp_path: Path) -> None:
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64, 3), np.uint8))
    for kind in ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF"):
        data = encoded(noise, kind)
        with pytest.raises(BadImage, match="here: "):
            decode(data[: len(data) // 2], where="here")
    with pytest.raises(BadImage, match="truncated"):
        decode(encoded(noise, "JPEG")[:2000], min_side=16, where="here")
    (tmp_path / "empty.jpg").touch()
    os.mkfifo(tmp_path / "pipe.jpg")
    for name, reason in (
        ("gone.jpg", "missing"),
        ("empty.jpg", "empty"),
        (".", "not a file"),
        ("pipe.jpg", "not a file"),
    ):
        with pytest.raises(BadImage, match=reason):
            FileImage(str(tmp_path / name)).open()
    with pytest.raises(BadImage):
        FileImage("zero\0byte.jpg").open()


def test_bad_image_is_one_line_and_pickles() -> None:
    error = pickle.loads(pickle.dumps(BadImage("a\nb\x1b[31m.jpg", "broken")))
    assert isinstance(error, ValueError)
    assert str(error) == r"a\nb\x1b[31m.jpg: broken"


# Phones also write HEIC under the name of a JPEG.
@pytest.mark.parametrize("name", ["a.heic", "a.jpg"])
def test_heic_without_library_error_names_hint(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pi_heif", None)
    images._formats.cache_clear()
    (tmp_path / name).write_bytes(HEIC.read_bytes())
    (tmp_path / "a.txt").write_text("a red square")
    ((sample,),) = [open_source(str(tmp_path)).samples("train")]
    with pytest.raises(BadImage, match="pip install pi-heif") as caught:
        sample.image.open()
    assert caught.value.kind == "no-decoder"
    assert "pip install pi-heif" in lint(open_source(str(tmp_path))).to_text()
    images._formats.cache_clear()


def test_heic_is_read_with_its_library() -> None:
    pytest.importorskip("pi_heif", reason="pi-heif is an extra: pip install 'm1clip[data]'")
    image = decode(HEIC)
    assert image.size == (48, 32)
    assert abs(image.getpixel((3, 3))[0] - 220) < 6


def noise(width: int, height: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (height, width, 3), np.uint8))


def reference(image: Image.Image, size: int) -> np.ndarray:
    """torchvision's Resize(size, bicubic) and CenterCrop(size), as open_clip uses them."""
    width, height = image.size
    short, long = min(width, height), max(width, height)
    new_long = int(size * long / short)
    new = (size, new_long) if width <= height else (new_long, size)
    image = image.resize(new, Image.Resampling.BICUBIC)
    left, top = round((new[0] - size) / 2), round((new[1] - size) / 2)
    return np.asarray(image.crop((left, top, left + size, top + size)))


@pytest.mark.parametrize(
    "size",
    [
        (32, 32),
        (33, 33),
        (64, 64),
        (65, 64),
        (101, 57),
        (57, 101),
        (20, 31),
        (32, 33),
        (33, 32),
        (500, 40),
    ],
)
def test_shortest_side_then_center_crop(size: tuple[int, int]) -> None:
    square = to_square(noise(*size), 32)
    assert square.shape == (32, 32, 3)
    assert square.dtype == np.uint8
    assert np.array_equal(square, reference(noise(*size), 32))


def test_squash_keeps_the_edges() -> None:
    full = np.zeros((40, 80, 3), np.uint8)
    full[:, :20] = 255  # cut off by a center crop
    assert to_square(Image.fromarray(full), 32, "squash")[:, 0].min() == 255
    assert to_square(Image.fromarray(full), 32, "shortest")[:, 2:].max() < 60


def test_preprocessing_round_trips_through_json() -> None:
    preprocess = Preprocess(image_size=96, mean=(0.1, 0.2, 0.3), resize="squash")
    assert Preprocess.from_dict(json.loads(json.dumps(preprocess.to_dict()))) == preprocess
    with pytest.raises(UserError, match="zoom"):
        Preprocess.from_dict({**preprocess.to_dict(), "zoom": 2})
    with pytest.raises(UserError, match="mean"):
        Preprocess.from_dict({"image_size": 32})


@pytest.mark.parametrize("size", [(60_000, 1), (1, 60_001), (2_000_000, 1), (3, 50_000)])
def test_very_long_image_needs_little_memory(size: tuple[int, int]) -> None:
    square = to_square(Image.new("RGB", size, (10, 200, 30)), 64)
    assert square.shape == (64, 64, 3)
    assert np.abs(square.astype(int) - (10, 200, 30)).max() <= 1


@pytest.mark.parametrize("size", [(17, 1000), (1000, 17), (1001, 20), (40, 641)])
def test_very_long_image_is_cropped_at_its_center(size: tuple[int, int]) -> None:
    slope = np.indices(size[::-1]).sum(axis=0) * 255 / sum(size)
    long = Image.fromarray(slope.astype(np.uint8)).convert("RGB")
    assert np.abs(to_square(long, 32).astype(int) - reference(long, 32)).max() <= 2


@pytest.mark.parametrize(
    "change",
    [
        {"image_size": "96"}, {"image_size": 96.0}, {"image_size": True}, {"image_size": 0}, {"image_size": None},
        {"mean": [0.5]}, {"mean": 0.5}, {"mean": ["a", "b", "c"]}, {"std": [1, 1, 0]}, {"std": [1, 1, float("nan")]},
        {"std": [1, 1, 10**400]}, {"resize": "zoom"}, {"resize": ["shortest"]}, {"resize": None},
    ],
)  # fmt: skip
def test_wrong_preprocessing_value_is_a_one_line_error(change: dict[str, object]) -> None:
    values = {**Preprocess(image_size=96).to_dict(), **change}
    with pytest.raises(UserError, match=next(iter(change))) as caught:
        Preprocess.from_dict(values)
    assert "\n" not in str(caught.value)
