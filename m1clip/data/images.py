"""Decode and preprocess images: common formats, HEIC, previews of RAW files.

Size checked first, always 8-bit RGB.
"""

from __future__ import annotations

import errno
import importlib
import io
import itertools
import math
import os
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, BinaryIO, ClassVar, Literal, NoReturn, TypeVar

import numpy as np
from PIL import Image, ImageOps
from PIL.JpegImagePlugin import JpegImageFile

from m1clip.data import raw
from m1clip.errors import UserError
from m1clip.formatting import one_line
from m1clip.io import open_regular
from m1clip.schema import check_limits, validate

if TYPE_CHECKING:
    from torch import Tensor

# The formats of photos that Pillow reads; other formats are rare, and EPS would start another
# program.
PIL_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "AVIF", "JPEG2000", "PPM", "QOI")
SUFFIXES = raw.RAW_SUFFIXES | {
    *(
        ".jpg",
        ".jpeg",
        ".jpe",
        ".jfif",
        ".mpo",
        ".png",
        ".webp",
        ".gif",
        ".bmp",
        ".dib",
        ".tif",
        ".tiff",
    ),
    *(
        ".heic",
        ".heif",
        ".hif",
        ".avif",
        ".jp2",
        ".j2k",
        ".jpx",
        ".ppm",
        ".pgm",
        ".pbm",
        ".pnm",
        ".qoi",
    ),
}
HEIC_BRANDS = (
    b"ftypheic",
    b"ftypheix",
    b"ftypheim",
    b"ftypheis",
    b"ftyphevc",
    b"ftyphevx",
    b"ftypmif1",
    b"ftypmsf1",
)
HEIC_REMEDY = (
    "HEIC is read with the library pi-heif: pip install pi-heif (or save the image as JPEG)"
)
# RGB of this size takes 192 MiB once decoded.
MAX_PIXELS = 64 * 2**20
# A JPEG may have more: it is decoded at 1/2, 1/4 or 1/8 of its size, without memory for the rest.
MAX_JPEG_PIXELS = 256 * 2**20
JPEG_SCALES = (1, 2, 4, 8)
MAX_FILE_BYTES = 2**30
# Bytes of any image file: headers, metadata, previews, further frames. Files with more need the
# pixels for it.
MAX_EXTRA_BYTES = 2**27
MAX_BYTES_PER_PIXEL = 16  # four channels of 32 bits without compression
MAX_MEMBER_BYTES = 2**28  # of an image in a shard, which is read at once

# Pillow warns about large images and odd metadata of each file; what matters becomes a BadImage.
warnings.filterwarnings("ignore", module=r"PIL\.")


class BadImage(ValueError):
    """An image that cannot be used: where, why, and the kind of fault.

    Picklable, for worker processes.

    Kinds: missing, empty, truncated, not-an-image, no-decoder, too-large, broken.
    """

    def __init__(self, where: str, reason: str, kind: str = "broken") -> None:
        super().__init__(where, reason, kind)
        self.where, self.reason, self.kind = where, reason, kind

    def __str__(self) -> str:
        return one_line(f"{self.where}: {self.reason}")


def failure_reason(error: Exception) -> str:
    """Why an image could not be read, without its name."""
    if isinstance(error, BadImage):
        return error.reason
    if isinstance(error, MemoryError | OverflowError):
        return "too large for memory"
    return str(error) or type(error).__name__


def decode(
    data: bytes | str | os.PathLike[str], min_side: int | None = None, where: str | None = None
) -> Image.Image:
    """8-bit RGB, upright, first frame.

    `want` is the short side needed, so that JPEG may decode smaller.

    A JPEG of more than MAX_PIXELS is always decoded smaller.
    """
    name = where or ("image in memory" if isinstance(data, bytes) else os.fspath(data))
    with open_header(data, name) as image:
        try:
            if isinstance(image, JpegImageFile):
                _reduce(image, min_side)
                fast = _decode_jpeg(image, data if isinstance(data, bytes) else None)
                if fast is not None:
                    return fast
            image.load()
            with suppress(Exception):  # damaged EXIF data: the image stays as it is stored
                ImageOps.exif_transpose(image, in_place=True)
            return to_rgb(image)
        except Exception as error:
            raise BadImage(name, *_reason(error)) from error


# What the orientation in EXIF data asks for.
ORIENTATIONS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


def _decode_jpeg(image: JpegImageFile, data: bytes | None) -> Image.Image | None:
    """The image as Pillow decodes it, by a binding of the same libjpeg-turbo that is faster and
    needs no GIL.

    None where simplejpeg is not installed, or reports anything unusual: Pillow decides what a
    damaged image is.
    """
    library = _simplejpeg()
    too_large = image.width * image.height > MAX_PIXELS
    if library is None or image.mode not in ("RGB", "L") or too_large or image.fp is None:
        return None
    if data is None:
        image.fp.seek(0)
        data = image.fp.read()
    width, height = image.size  # after `_reduce`
    try:
        pixels = library.decode_jpeg(data, "RGB", min_height=height, min_width=width, min_factor=1)
    except ValueError:
        pixels = None
    if pixels is None or pixels.shape != (height, width, 3):
        image.fp.seek(0)
        return None
    decoded = Image.fromarray(pixels)
    if "exif" in image.info or "xmp" in image.info:
        orientation = 1
        with suppress(Exception):  # damaged EXIF data: the image stays as it is stored
            orientation = image.getexif().get(0x0112, 1)
        if orientation in ORIENTATIONS:
            return decoded.transpose(ORIENTATIONS[orientation])
    return decoded


@cache
def _simplejpeg() -> Any:
    """The library simplejpeg; None if it is not installed or cannot be loaded."""
    try:
        return importlib.import_module("simplejpeg")
    except ImportError:
        return None


def _reduce(image: JpegImageFile, min_side: int | None) -> None:
    """Let a JPEG be decoded at a fraction of its size: not below the short side `want`, unless it
    is too large.
    """
    width, height = image.size
    min_scale = next(scale for scale in JPEG_SCALES if width * height <= MAX_PIXELS * scale**2)
    largest = (max(1, width // min_scale), max(1, height // min_scale))
    if min_side:
        image.draft(None, (min(min_side, largest[0]), min(min_side, largest[1])))
    elif min_scale > 1:
        image.draft(None, largest)


@contextmanager
def open_header(
    data: bytes | str | os.PathLike[str], where: str, inside: str | Path | None = None
) -> Iterator[Image.Image]:
    """The image with only its header read, its size already checked.

    BadImage if it cannot be opened, or is a link out of the folder `inside`.
    """
    if isinstance(data, bytes) and not data:
        raise BadImage(where, "the file is empty (0 bytes)", "empty")
    with io.BytesIO(data) if isinstance(data, bytes) else _open_file(data, where, inside) as stream:
        yield _open_header(stream, where)


def _open_header(stream: BinaryIO, where: str) -> Image.Image:
    """Read the header of an image, and check what decoding it would need.

    BadImage if it cannot be used.
    """
    try:
        image = raw.open_preview(stream)
        if image is None:
            stream.seek(0)
            image = _open_any(stream)
    except BadImage:
        raise
    except Exception as error:
        stream.seek(4)  # not by the file's name: phones also save HEIC as .jpg
        if stream.read(8) in HEIC_BRANDS and "HEIF" not in _formats():
            raise BadImage(where, HEIC_REMEDY, "no-decoder") from error
        raise BadImage(where, *_reason(error)) from error
    width, height = image.size
    pixels = width * height
    if pixels > MAX_PIXELS and not (pixels <= MAX_JPEG_PIXELS and _is_decoded_in_strips(image)):
        reason = f"{width} x {height} is more than {MAX_PIXELS >> 20} megapixels; reduce its size"
        raise BadImage(where, reason, "too-large")
    if isinstance(stream, _LimitedFile):
        stream.allow(pixels * MAX_BYTES_PER_PIXEL, f"{width} x {height} pixels")
    return image


def _open_any(stream: BinaryIO) -> Image.Image:
    try:
        return Image.open(stream, formats=_formats())
    except Image.DecompressionBombError:
        # Pillow's limit is for complete images; a JPEG can be decoded smaller.
        stream.seek(0)
        if stream.read(3) != b"\xff\xd8\xff":
            raise
        stream.seek(0)
        return JpegImageFile(stream)


def _is_decoded_in_strips(image: Image.Image) -> bool:
    """Whether a JPEG is sequential with all colors in one scan.

    For others, libjpeg keeps values of every pixel.
    """
    if not isinstance(image, JpegImageFile) or image.fp is None:
        return False
    image.fp.seek(2)
    colors = 0
    while len(head := image.fp.read(4)) == 4 and head[0] == 0xFF:
        marker, size = head[1], int.from_bytes(head[2:], "big")
        segment = image.fp.read(max(0, size - 2))
        if marker in (0xC0, 0xC1) and len(segment) > 5:  # start of a sequential frame
            colors = segment[5]
        elif marker == 0xDA:  # start of the first scan
            return bool(segment) and segment[0] == colors
        elif marker == 0xC2:  # start of a progressive frame
            return False
    return False


@cache
def _formats() -> tuple[str, ...]:
    """The formats that can be decoded; pi-heif adds HEIC to Pillow's."""
    try:
        importlib.import_module("pi_heif").register_heif_opener()
    except ImportError:
        return PIL_FORMATS
    return (*PIL_FORMATS, "HEIF")


class _LimitedFile(io.BufferedReader):
    """A large file of which only as many bytes are read as an image can need; BadImage for more."""

    def __init__(self, file: io.RawIOBase, size: int, where: str) -> None:
        super().__init__(file)
        self.size, self.where = size, where
        self.left = MAX_EXTRA_BYTES

    def read(self, size: int | None = -1, /) -> bytes:
        limit = self.left + 1  # one more shows that there is more
        data = super().read(limit if size is None or size < 0 else min(size, limit))
        self.left -= len(data)
        if self.left < 0:
            self._refuse("an image file")
        return data

    def allow(self, count: int, kind: str) -> None:
        """Allow as many bytes more; BadImage if the file has more than that."""
        if self.size > count + MAX_EXTRA_BYTES:
            self._refuse(kind)
        self.left += count

    def _refuse(self, kind: str) -> NoReturn:
        raise BadImage(self.where, f"{self.size >> 20} MiB is too large for {kind}", "too-large")


def _open_file(
    path: str | os.PathLike[str], where: str, inside: str | Path | None = None
) -> BinaryIO:
    try:
        stream = open_regular(os.fspath(path), inside)
    except FileNotFoundError as error:
        raise BadImage(where, "the file is missing", "missing") from error
    except (OSError, ValueError) as error:
        if isinstance(error, IsADirectoryError) or getattr(error, "errno", 0) == errno.EINVAL:
            raise BadImage(where, "not a file", "not-an-image") from error
        raise BadImage(
            where, f"cannot be opened ({getattr(error, 'strerror', None) or error})"
        ) from error
    size = os.fstat(stream.fileno()).st_size
    if 0 < size <= MAX_EXTRA_BYTES:
        return stream
    if 0 < size <= MAX_FILE_BYTES:
        limited = _LimitedFile(io.FileIO(os.dup(stream.fileno())), size, where)
        stream.close()
        return limited
    stream.close()
    if size == 0:
        raise BadImage(where, "the file is empty (0 bytes)", "empty")
    raise BadImage(where, f"{size >> 20} MiB is too large for an image file", "too-large")


def _reason(error: Exception) -> tuple[str, str]:
    if isinstance(error, BadImage):
        return error.reason, error.kind
    if isinstance(error, (Image.DecompressionBombError, Image.DecompressionBombWarning)):
        return f"more than {MAX_PIXELS >> 20} megapixels; reduce its size", "too-large"
    if isinstance(error, Image.UnidentifiedImageError):
        return (
            "not an image in a supported format (JPEG, PNG, WebP, GIF, BMP, TIFF, HEIC, AVIF, ...)",
            "not-an-image",
        )
    if "truncated" in str(error).lower():
        return "truncated: the file ends before the end of the image", "truncated"
    return f"broken ({str(error) or type(error).__name__})", "broken"


def to_rgb(image: Image.Image) -> Image.Image:
    """Any mode to 8-bit RGB. Alpha is dropped, as open_clip does; 16-bit is scaled, not clipped."""
    if image.mode == "RGB":
        return image.copy()
    if image.mode.startswith(("I", "F")):
        return Image.fromarray(_to_8bit(np.asarray(image))).convert("RGB")
    if image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")
    return image.convert("RGB")


def _to_8bit(values: np.ndarray) -> np.ndarray:
    """16-bit, 32-bit or float gray to 8 bits: the range is that of the type, or of the values if
    that is unknown.
    """
    if values.dtype.itemsize == 2:
        return np.rint(values * np.float32(255 / 65535)).astype(np.uint8)
    real = np.nan_to_num(values.astype(np.float64), nan=0.0, posinf=0.0, neginf=0.0)
    low, high = float(real.min()), float(real.max())
    if low >= 0 and high <= 65535:
        tops = (1.0, 255.0, 65535.0) if values.dtype.kind == "f" else (255.0, 65535.0)
        return np.rint(real * (255 / next(top for top in tops if high <= top))).astype(np.uint8)
    return np.rint((real - low) * (255 / max(high - low, 1e-300))).astype(np.uint8)


class ImageRef:
    """An image that is not yet decoded: hashable, picklable for worker processes, and as a string
    its place.
    """

    __slots__ = ()
    # Whether another process can read it as fast as this one; else its file may be read again for
    # each image.
    in_processes: ClassVar[bool] = False

    def open(self, min_side: int | None = None) -> Image.Image:
        """Decode to RGB; `want` is the short side needed, so that JPEG may be decoded smaller.

        BadImage on failure.
        """
        return decode(self.read(), min_side, str(self))

    def read(self) -> bytes:
        """The encoded bytes; BadImage if they cannot be read."""
        raise NotImplementedError

    def stamp(self) -> str:
        """Identifies the content (name, size, time), for cache keys."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class FileImage(ImageRef):
    in_processes: ClassVar[bool] = True

    path: str
    inside: str | None = None  # a folder: the file is not read through a link out of it

    def open(self, min_side: int | None = None) -> Image.Image:
        source = self.path if self.inside is None else self.read()
        return decode(source, min_side, self.path)

    def read(self) -> bytes:
        with _open_file(self.path, self.path, self.inside) as stream:
            if isinstance(stream, _LimitedFile):
                _open_header(stream, self.path)  # before more is read than any image needs
                stream.seek(0)
                return stream.read()
            return stream.read(MAX_FILE_BYTES)

    def stamp(self) -> str:
        return f"{self.path}|{file_stamp(self.path)}"

    def __str__(self) -> str:
        return one_line(self.path)


def file_stamp(path: str | Path) -> str:
    """Size and time of a file, or "missing"."""
    try:
        facts = os.stat(path)
    except (OSError, ValueError):
        return "missing"
    return f"{facts.st_size}|{facts.st_mtime_ns}"


OPENAI_MEAN = (0.48145466, 0.4578275, 0.40821073)
OPENAI_STD = (0.26862954, 0.26130258, 0.27577711)
# Above this the ends are cropped before resizing: an image of 60,000 x 1 would become 13 million
# pixels wide.
MAX_DECODED_ASPECT = 16


BILINEAR = "-bilinear"  # how the names of such ways to resize end


@dataclass(frozen=True, kw_only=True)
class Preprocess:
    """Image preprocessing; saved in the model folder, so that inference matches training."""

    image_size: int
    mean: tuple[float, float, float] = OPENAI_MEAN
    std: tuple[float, float, float] = OPENAI_STD
    # Shortest side then center crop, or squash to a square. An odd margin is halved as torchvision
    # and open_clip do, or ("-floor") as transformers does: the crop then moves by one pixel.
    # Bicubic, unless it says otherwise.
    resize: Literal[
        "shortest",
        "shortest-floor",
        "squash",
        "shortest-bilinear",
        "shortest-floor-bilinear",
        "squash-bilinear",
    ] = "shortest"

    def __post_init__(self) -> None:
        check_limits(self, "preprocessing: ")
        if self.image_size < 1:
            raise UserError(f"preprocessing: image_size must be at least 1, not {self.image_size}")
        if min(self.std) <= 0:
            raise UserError(f"preprocessing: std must be above 0, not {self.std}")

    def __call__(self, image: Image.Image) -> Tensor:
        """A PIL image -> (3, image_size, image_size) normalized pixels, as the model
        expects them.
        """
        import torch

        from m1clip.data.augment import render

        square = np.array(to_square(image, self.image_size, self.resize))
        return render(torch.from_numpy(square)[None], None, self)[0]

    to_dict = asdict  # plain values, for JSON

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Preprocess:
        """The inverse of `to_dict`; an unknown key or a wrong value is an error."""
        return cls(**validate(cls, values, "preprocessing"))

    @property
    def squashes(self) -> bool:
        """Whether the image is squashed to a square, and nothing is cropped."""
        return self.resize.startswith("squash")

    @property
    def bilinear(self) -> bool:
        """Whether the image is resized by linear and not cubic interpolation."""
        return self.resize.endswith(BILINEAR)


def to_square(image: Image.Image, size: int, resize: str = "shortest") -> np.ndarray:
    """(size, size, 3) uint8, as open_clip does it: bicubic, shortest side to `size`,
    center crop.
    """
    squashes = resize.startswith("squash")
    filtering = Image.Resampling.BICUBIC
    if resize.endswith(BILINEAR):
        filtering = Image.Resampling.BILINEAR
    # Crop first: each copy of an image of 1 x 60,000,000 takes 700 MB.
    image = image if squashes else _without_ends(image)
    image = image if image.mode == "RGB" else image.convert("RGB")
    width, height = image.size
    if squashes:
        image = image.resize((size, size), filtering)
    elif (width, height) != (size, size):
        wide, high, left, top = square_geometry(width, height, size, resize)
        image = image.resize((wide, high), filtering)
        image = image.crop((left, top, left + size, top + size))
    return np.asarray(image)


def square_geometry(width: int, height: int, size: int, resize: str) -> tuple[int, int, int, int]:
    """(width, height) of an image once resized, and (left, top) of the square that is cropped."""
    if resize.startswith("squash"):
        return size, size, 0, 0
    # In this order, as torchvision does: a scale computed first is sometimes one pixel short.
    if width <= height:
        wide, high = size, max(size, int(size * height / width))
    else:
        wide, high = max(size, int(size * width / height)), size
    left, top = (wide - size) / 2, (high - size) / 2
    if "-floor" in resize:
        return wide, high, int(left), int(top)
    return wide, high, round(left), round(top)


def _without_ends(image: Image.Image) -> Image.Image:
    """The middle of a very long image; other images unchanged."""
    width, height = image.size
    limit = MAX_DECODED_ASPECT * min(width, height)
    if max(width, height) <= limit:
        return image
    # Remove an even number of pixels, half from each end, so that the center stays in place.
    cut_x, cut_y = max(0, width - limit) // 2, max(0, height - limit) // 2
    return image.crop((cut_x, cut_y, width - cut_x, height - cut_y))


READ_TIMEOUT = 60.0  # seconds for one image; 0 waits forever
MAX_ABANDONED = 8  # hanging reads of this process; more mean that the disk is at fault
READS_AHEAD = 64  # for each thread

Item = TypeVar("Item")
Result = TypeVar("Result")


class _Read(Future[Any]):
    started, abandoned = math.inf, False


_abandoned: list[_Read] = []


def map_with_timeout(
    items: Iterable[Item],
    work: Callable[[Item], Result],
    timeout: float = READ_TIMEOUT,
    threads: int = 1,
    ahead: int = READS_AHEAD,
) -> Generator[Result | None]:
    """Run `work` in threads.

    Yields results in order, None for an item that takes longer than `timeout` seconds.

    Each thread works on up to `ahead` items before they are used. A thread that hangs in a read
    cannot be stopped: it is abandoned and replaced.
    """
    reads: SimpleQueue[tuple[_Read, Item] | None] = SimpleQueue()
    waiting: deque[tuple[_Read, Item]] = deque()

    def run() -> None:
        while (task := reads.get()) is not None:
            read, item = task
            read.started = time.monotonic()
            try:
                read.set_result(work(item))
            except BaseException as error:  # noqa: BLE001  raised again in the calling thread
                read.set_exception(error)
            if read.abandoned:
                return
        reads.put(None)  # for the other threads

    def start() -> None:
        threading.Thread(target=run, name="decode", daemon=True).start()

    for _ in range(threads):
        start()
    remaining = iter(items)
    try:
        while True:
            for item in itertools.islice(remaining, ahead * threads - len(waiting)):
                waiting.append((_Read(), item))
                reads.put(waiting[-1])
            if not waiting:
                return
            # The oldest read is running: those before it are finished, or their threads were
            # replaced.
            read, item = waiting.popleft()
            now = time.monotonic()
            try:
                yield read.result(
                    max(0.0, min(read.started, now) + timeout - now) if timeout > 0 else None
                )
            except TimeoutError:
                if read.done():  # the error of `work`
                    raise
                read.abandoned = True
                _abandoned[:] = [thread for thread in (*_abandoned, read) if not thread.done()]
                if len(_abandoned) > MAX_ABANDONED:
                    raise UserError(
                        f"{item}: the {len(_abandoned)}th read that hangs for more than {timeout:g}"
                        " s; is the disk with the images still connected? Continue with --resume"
                        " when it is"
                    ) from None
                start()
                yield None
    finally:
        reads.put(None)
