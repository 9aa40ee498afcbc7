"""What the tests of the sources share besides fixtures."""

from __future__ import annotations

import io

from PIL import Image

from m1clip.data.types import Sample, Source


def image_bytes(number: int = 0, kind: str = "JPEG", size: tuple[int, int] = (24, 16)) -> bytes:
    """An image whose colour tells its number."""
    stream = io.BytesIO()
    Image.new("RGB", size, (number * 20 % 256, 100, 50)).save(stream, kind)
    return stream.getvalue()


def everything(source: Source) -> dict[str, Sample]:
    """All samples of all splits by id."""
    return {sample.id: sample for split in source.splits() for sample in source.samples(split)}
