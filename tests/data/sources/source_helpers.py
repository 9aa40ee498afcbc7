"""What the tests of the sources share besides fixtures."""

from __future__ import annotations

import io

from PIL import Image

from m1clip.data.pair import Pair, Source


def picture_bytes(number: int = 0, kind: str = "JPEG", size: tuple[int, int] = (24, 16)) -> bytes:
    """A picture whose colour tells its number."""
    stream = io.BytesIO()
    Image.new("RGB", size, (number * 20 % 256, 100, 50)).save(stream, kind)
    return stream.getvalue()


def everything(source: Source) -> dict[str, Pair]:
    """All pairs of all splits by id."""
    return {pair.id: pair for split in source.splits() for pair in source.pairs(split)}
