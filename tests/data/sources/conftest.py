"""Small images for tests of sources."""

from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from source_helpers import image_bytes


@pytest.fixture
def images(tmp_path: Path) -> Callable[[Iterable[str]], Path]:
    """Returns a function that writes an image for each relative name under tmp_path."""

    def write(names: Iterable[str]) -> Path:
        for number, name in enumerate(names):
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(image_bytes(number))
        return tmp_path

    return write
