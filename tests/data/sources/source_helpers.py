"""Helpers for tests of sources."""

import io
import tarfile
from collections.abc import Iterable
from pathlib import Path

from image_sets import encoded
from PIL import Image

from m1clip.data.types import Sample, Source


def image_bytes(number: int = 0, kind: str = "JPEG", size: tuple[int, int] = (24, 16)) -> bytes:
    """An image whose color encodes its number."""
    return encoded(Image.new("RGB", size, (number * 20 % 256, 100, 50)), kind)


def everything(source: Source) -> dict[str, Sample]:
    """All samples of all splits by id."""
    return {sample.id: sample for split in source.splits() for sample in source.samples(split)}


def add_member(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(data)
    tar.addfile(info, io.BytesIO(data))


def write_tar(path: Path, members: Iterable[tuple[str, bytes]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for name, data in members:
            add_member(tar, name, data)
    return path


def shard_samples(count: int) -> list[tuple[str, bytes]]:
    """Members of n webdataset samples: jpg and txt."""
    return [
        member
        for number in range(count)
        for member in (
            (f"{number:05d}.jpg", image_bytes(number)),
            (f"{number:05d}.txt", f"caption {number}".encode()),
        )
    ]
