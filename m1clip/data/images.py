"""Decode a picture from anyone: six formats and HEIC, size known before decoding, always 8-bit RGB."""

from __future__ import annotations

import importlib
import io
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import BinaryIO

import numpy as np
from PIL import Image

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")
SUFFIXES = frozenset(
    {
        ".jpg",
        ".jpeg",
        ".jpe",
        ".jfif",
        ".png",
        ".webp",
        ".gif",
        ".bmp",
        ".dib",
        ".tif",
        ".tiff",
        ".heic",
        ".heif",
    }
)
HEIC_BRANDS = (b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1")
HEIC_REMEDY = "HEIC is read with the library pi-heif: pip install pi-heif (or save the image as JPEG)"
# RGB of this size takes 192 MiB once decoded: what a laptop with two workers can bear.
MAX_PIXELS = 64 * 2**20
MAX_FILE_BYTES = 2**30

_ORIENTATION_TAG = 0x0112
_ORIENTATIONS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


def one_line(text: str) -> str:
    """Printable on one line: what names and messages from a stranger's file become."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


class BadImage(ValueError):
    """A picture that cannot be used: where, why, and what kind of fault. It pickles, for worker processes.

    Kinds: missing, empty, truncated, not-a-picture, no-decoder, too-large, broken.
    """

    def __init__(self, where: str, reason: str, kind: str = "broken") -> None:
        super().__init__(where, reason, kind)
        self.where, self.reason, self.kind = where, reason, kind

    def __str__(self) -> str:
        return one_line(f"{self.where}: {self.reason}")


def decode(
    data: bytes | str | os.PathLike[str], want: int | None = None, where: str | None = None
) -> Image.Image:
    """8-bit RGB, upright, first frame; `want` is the short side needed, so that JPEG may decode smaller."""
    place = where or ("picture in memory" if isinstance(data, bytes) else os.fspath(data))
    with opened(data, place) as image:
        try:
            if want and image.format == "JPEG":
                image.draft(None, (want, want))
            turn = _orientation(image)
            image.load()
            rgb = to_rgb(image)
            return rgb.transpose(turn) if turn is not None else rgb
        except Exception as error:
            raise BadImage(place, *_reason(error)) from error


@contextmanager
def opened(data: bytes | str | os.PathLike[str], where: str) -> Iterator[Image.Image]:
    """The picture with only its header read, its size already checked; BadImage where it cannot be."""
    stream = io.BytesIO(data) if isinstance(data, bytes) else _open_file(data, where)
    with stream:
        if isinstance(data, bytes) and not data:
            raise BadImage(where, "the file is empty (0 bytes)", "empty")
        try:
            image = Image.open(stream, formats=_formats())
        except Exception as error:
            if _is_heic(stream) and "HEIF" not in _formats():
                raise BadImage(where, HEIC_REMEDY, "no-decoder") from error
            raise BadImage(where, *_reason(error)) from error
        width, height = image.size
        if width * height > MAX_PIXELS:
            reason = f"{width} x {height} is more than {MAX_PIXELS >> 20} megapixels; make it smaller"
            raise BadImage(where, reason, "too-large")
        yield image


@cache
def _formats() -> tuple[str, ...]:
    """What can be decoded here; pi-heif adds HEIC to Pillow's formats."""
    try:
        importlib.import_module("pi_heif").register_heif_opener()
    except ImportError:
        return FORMATS
    return (*FORMATS, "HEIF")


def _is_heic(stream: BinaryIO) -> bool:
    """By its first bytes: phones also write HEIC under the name .jpg."""
    stream.seek(0)
    start = stream.read(12)
    return start[4:8] == b"ftyp" and start[8:] in HEIC_BRANDS


def _open_file(path: str | os.PathLike[str], where: str) -> io.BufferedReader:
    try:
        # Not blocking: a named pipe would hang here, before its kind can be seen.
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    except FileNotFoundError as error:
        raise BadImage(where, "the file is missing", "missing") from error
    except (OSError, ValueError) as error:
        raise BadImage(where, f"cannot be opened ({getattr(error, 'strerror', None) or error})") from error
    facts = os.fstat(handle)
    if stat.S_ISREG(facts.st_mode) and 0 < facts.st_size <= MAX_FILE_BYTES:
        return os.fdopen(handle, "rb")
    os.close(handle)
    if not stat.S_ISREG(facts.st_mode):
        raise BadImage(where, "not a file", "not-a-picture")
    if facts.st_size == 0:
        raise BadImage(where, "the file is empty (0 bytes)", "empty")
    raise BadImage(where, f"{facts.st_size >> 20} MiB is more than a picture needs", "too-large")


def _reason(error: Exception) -> tuple[str, str]:
    if isinstance(error, (Image.DecompressionBombError, Image.DecompressionBombWarning)):
        return f"more than {MAX_PIXELS >> 20} megapixels; make it smaller", "too-large"
    if isinstance(error, Image.UnidentifiedImageError):
        return (
            "not a picture that can be read (JPEG, PNG, WebP, GIF, BMP, TIFF and HEIC are)",
            "not-a-picture",
        )
    if "truncated" in str(error).lower():
        return "truncated: the file ends before the picture does", "truncated"
    return f"broken ({str(error) or type(error).__name__})", "broken"


def _orientation(image: Image.Image) -> Image.Transpose | None:
    try:
        return _ORIENTATIONS.get(image.getexif().get(_ORIENTATION_TAG, 1))
    except (ArithmeticError, AttributeError, LookupError, OSError, SyntaxError, TypeError, ValueError):
        # Broken metadata says nothing about the pixels.
        return None


def to_rgb(image: Image.Image) -> Image.Image:
    """Any mode to 8-bit RGB. Alpha is dropped, as open_clip does; 16-bit is scaled, not cut."""
    if image.mode == "RGB":
        return image.copy()
    if image.mode.startswith(("I", "F")):
        return Image.fromarray(_to_8bit(np.asarray(image))).convert("RGB")
    if image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")
    return image.convert("RGB")


def _to_8bit(values: np.ndarray) -> np.ndarray:
    """Grey of 16 or 32 bits, or float: the range is that of the type, or found where the type says little."""
    if values.dtype.kind == "u" and values.dtype.itemsize == 2:
        return ((values.astype(np.uint32) * 255 + 32767) // 65535).astype(np.uint8)
    real = np.nan_to_num(values.astype(np.float64), nan=0.0, posinf=0.0, neginf=0.0)
    low, high = float(real.min()), float(real.max())
    if low >= 0 and high <= 65535:
        tops = (1.0, 255.0, 65535.0) if values.dtype.kind == "f" else (255.0, 65535.0)
        return np.rint(real * (255 / next(top for top in tops if high <= top))).astype(np.uint8)
    return np.rint((real - low) * (255 / max(high - low, 1e-300))).astype(np.uint8)


@dataclass(frozen=True, slots=True)
class FileImage:
    """A picture in a file of its own."""

    path: str

    def open(self, want: int | None = None) -> Image.Image:
        """Decode to RGB; BadImage when it cannot be."""
        return decode(self.path, want, self.path)

    def read(self) -> bytes:
        """The bytes of the file; BadImage when there are none."""
        with _open_file(self.path, self.path) as stream:
            return stream.read()

    def stamp(self) -> str:
        """Name, size and time of the file."""
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
