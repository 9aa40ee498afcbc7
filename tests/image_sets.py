"""Small image datasets on disk."""

import io
import json
import struct
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from m1clip.data.decoding import DecodeOptions


def make_set(
    folder: Path, train: int = 40, val: int = 8, test: int = 8, suffix: str = "jpg"
) -> Path:
    """Random images and captions.jsonl with two captions per image and named splits."""
    (folder / "images").mkdir(parents=True)
    lines = []
    for split, count in (("train", train), ("val", val), ("test", test)):
        for number in range(count):
            name = f"images/{split}-{number:04d}.{suffix}"
            image(number + 1000 * len(split)).save(folder / name)
            captions = [
                f"image number {number} of {split}",
                f"the {number}th of the {split} images",
            ]
            lines.append(json.dumps({"image": name, "captions": captions, "split": split}))
    (folder / "captions.jsonl").write_text("\n".join(lines))
    return folder


def image(seed: int, size: tuple[int, int] = (52, 40)) -> Image.Image:
    """A random image; no two look alike."""
    small = np.random.default_rng(seed).integers(0, 255, (6, 9, 3), np.uint8)
    return Image.fromarray(small).resize(size, Image.Resampling.BICUBIC)


def encoded(image: Image.Image, kind: str = "JPEG", **options: Any) -> bytes:
    """The bytes of an image file."""
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()


def png(width: int, height: int, data: bytes = b"") -> bytes:
    """A PNG header of any size with little data."""

    def part(kind: bytes, body: bytes) -> bytes:
        return (
            struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
        )

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + part(b"IHDR", head) + part(b"IDAT", data) + part(b"IEND", b"")


def break_files(
    folder: Path, numbers: Iterable[int], split: str = "train", data: bytes = b"not an image"
) -> None:
    """Overwrite images with invalid data."""
    for number in numbers:
        (folder / "images" / f"{split}-{number:04d}.jpg").write_bytes(data)


def plan() -> DecodeOptions:
    """Decoding of a small machine."""
    return DecodeOptions(2, 8 * 2**30)
