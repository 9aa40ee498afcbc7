"""RAW files give their largest JPEG preview, upright and with its date.

Damaged ones are refused or read as TIFF.
"""

import struct
from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from image_sets import encoded
from PIL import Image

from m1clip.data.images import BadImage, decode, open_header
from m1clip.search.read_photos import image_facts

DATE = b"2023:04:05 06:07:08\0"
# 14 bits per value.
LOSSLESS = b"\xff\xd8\xff\xc3\x00\x0b\x0e\x01\x00\x02\x00\x01\x11\x00" + bytes(90_000)


def jpeg(width: int, height: int) -> bytes:
    """White on the left, black on the right."""
    image = Image.new("RGB", (width, height))
    image.paste((255, 255, 255), (0, 0, width // 2, height))
    return encoded(image, quality=95)


SMALL, LARGE = jpeg(32, 16), jpeg(640, 320)


class Tiff:
    """A TIFF file under construction, in the byte order "<" or ">"."""

    def __init__(self, order: str, mark: bytes = b"") -> None:
        self.order = order
        self.data = bytearray({"<": b"II*\0", ">": b"MM\0*"}[order] + bytes(4) + mark)

    def add(self, data: bytes) -> int:
        """The place of some bytes."""
        self.data += data
        return len(self.data) - len(data)

    def directory(self, following: int = 0, **tags: int | bytes | list[int]) -> int:
        """The place of a directory: t274=6 is a short, a list has longs, bytes are text."""
        entries = []
        for name, values in sorted(tags.items(), key=lambda tag: int(tag[0][1:])):
            if isinstance(values, int):
                kind, count, raw = 3, 1, struct.pack(f"{self.order}H", values)
            elif isinstance(values, bytes):
                kind, count, raw = 2, len(values), values
            else:
                kind, count, raw = (
                    4,
                    len(values),
                    struct.pack(f"{self.order}{len(values)}I", *values),
                )
            value = (
                raw.ljust(4, b"\0")
                if len(raw) <= 4
                else struct.pack(f"{self.order}I", self.add(raw))
            )
            entries.append(struct.pack(f"{self.order}HHI", int(name[1:]), kind, count) + value)
        at = self.add(struct.pack(f"{self.order}H", len(entries)) + b"".join(entries))
        self.add(struct.pack(f"{self.order}I", following))
        return at

    def finish(self, first: int) -> bytes:
        self.data[4:8] = struct.pack(f"{self.order}I", first)
        return bytes(self.data)


def dng(order: str = "<") -> bytes:
    """As Adobe writes it: a thumbnail without compression, then children with the sensor's values and the preview."""
    file = Tiff(order)
    sensor = file.directory(t254=0, t259=7, t273=[file.add(LOSSLESS)], t279=[len(LOSSLESS)])
    preview = file.directory(t254=1, t259=7, t273=[file.add(LARGE)], t279=[len(LARGE)])
    exif = file.directory(t36867=DATE)
    thumbnail = {"t256": 4, "t257": 2, "t258": [8, 8, 8], "t259": 1, "t262": 2, "t277": 3}
    thumbnail |= {"t273": [file.add(bytes(24))], "t279": [24]}
    return file.finish(
        file.directory(
            t254=1, t274=6, t330=[sensor, preview], t34665=[exif], t50706=[0x01040000], **thumbnail
        )
    )


def cr2() -> bytes:
    """As Canon writes it: the preview first, then a thumbnail, then the sensor's values."""
    file = Tiff("<", b"CR\2\0")
    sensor = file.directory(t259=6, t273=[file.add(LOSSLESS)], t279=[len(LOSSLESS)])
    thumbnail = file.directory(sensor, t513=[file.add(SMALL)], t514=[len(SMALL)])
    return file.finish(
        file.directory(
            thumbnail, t259=6, t273=[file.add(LARGE)], t274=6, t279=[len(LARGE)], t306=DATE
        )
    )


def nef() -> bytes:
    """As Nikon and Sony write it: previews by JPEGInterchangeFormat, in children or in the first directory."""
    file = Tiff(">")
    preview = file.directory(t254=1, t259=6, t513=[file.add(LARGE)], t514=[len(LARGE)])
    return file.finish(
        file.directory(
            t254=1,
            t274=6,
            t306=DATE,
            t330=[preview, preview],
            t513=[file.add(SMALL)],
            t514=[len(SMALL)],
        )
    )


@pytest.mark.parametrize(
    "data", [dng(), dng(">"), cr2(), nef()], ids=["dng", "dng-big-endian", "cr2", "nef"]
)
def test_largest_preview_upright_with_date(data: bytes) -> None:
    image = decode(data)
    assert image.size == (320, 640)
    assert np.asarray(image)[:300].min() > 240 > 15 > np.asarray(image)[340:].max()
    with open_header(data, "x") as header:
        assert image_facts(header) == (320, 640, "2023-04-05T06:07:08", 6)
    assert decode(data, min_side=80).size == (80, 160)


def test_ordinary_tiff_is_not_replaced_by_its_thumbnail() -> None:
    assert decode(encoded(Image.new("RGB", (700, 400), (9, 8, 7)), "TIFF")).getpixel((0, 0)) == (
        9,
        8,
        7,
    )


@pytest.mark.filterwarnings("ignore")  # of Pillow
@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from([dng(), cr2(), nef()]),
    st.lists(
        st.tuples(st.integers(1, 700), st.sampled_from([0, 1, 127, 255]) | st.integers(0, 255)),
        max_size=6,
    ),
    st.integers(0, 800),
)
def test_damaged_files_are_read_or_refused(
    data: bytes, changes: list[tuple[int, int]], cut: int
) -> None:
    """Bytes of the directories, which are at the end, are changed or cut off, also into loops."""
    damaged = bytearray(data)
    for back, value in changes:
        damaged[-back] = value
    with suppress(BadImage):
        assert decode(bytes(damaged[: len(damaged) - cut])).mode == "RGB"


def test_directories_in_a_loop_and_too_many_entries() -> None:
    file = Tiff("<", b"CR\2\0")
    first = file.directory(t274=1)
    file.data[-4:] = struct.pack("<I", first)
    with pytest.raises(BadImage):
        decode(file.finish(first))
    file = Tiff("<", b"CR\2\0")
    with pytest.raises(BadImage):
        decode(file.finish(file.add(b"\xff\xff" + bytes(12 * 65535 + 4))))
