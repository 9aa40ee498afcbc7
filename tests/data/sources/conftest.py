"""Small images and sets that the tests of the sources share."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from source_helpers import image_bytes


@pytest.fixture
def images(tmp_path: Path) -> Callable[[Iterable[str]], Path]:
    """Writes an image for each relative name under tmp_path, and gives tmp_path."""

    def write(names: Iterable[str]) -> Path:
        for number, name in enumerate(names):
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(image_bytes(number))
        return tmp_path

    return write


@pytest.fixture
def tar_of() -> Callable[[Path, Iterable[tuple[str, bytes]]], Path]:
    """Writes a tar of (name, bytes)."""

    def write(path: Path, members: Iterable[tuple[str, bytes]]) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tarfile.open(path, "w") as tar:
            for name, data in members:
                info = tarfile.TarInfo(name)
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
        return path

    return write


@pytest.fixture
def samples() -> Callable[..., list[tuple[str, bytes]]]:
    """Members of n webdataset samples: jpg and txt."""

    def make(count: int, start: int = 0) -> list[tuple[str, bytes]]:
        made: list[tuple[str, bytes]] = []
        for number in range(start, start + count):
            made += [(f"{number:05d}.jpg", image_bytes(number)), (f"{number:05d}.txt", f"caption {number}".encode())]
        return made

    return make
