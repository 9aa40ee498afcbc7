"""XMP and EXIF behind the pixels of a PNG, where exiftool writes them."""

import struct
import zlib
from pathlib import Path

from PIL import Image

from m1clip.data.sources.base import MAX_TEXT_BYTES
from m1clip.io import open_regular

_SIGNATURE_BYTES = 8
_XMP_KEYWORD = b"XML:com.adobe.xmp\0"
MAX_PNG_CHUNKS = 200_000  # pixels are in chunks of 8 KiB and more


def read_late_chunks(path: Path, image: Image.Image, inside: Path | None = None) -> None:
    """Add XMP and EXIF to the `info` of a PNG that Pillow has not decoded; pixels are skipped."""
    with open_regular(path, inside) as file:
        file.seek(_SIGNATURE_BYTES)
        for _ in range(MAX_PNG_CHUNKS):
            header = file.read(8)
            if len(header) < 8:
                return
            size, name = struct.unpack(">I4s", header)
            if name not in (b"iTXt", b"eXIf") or size > MAX_TEXT_BYTES:
                file.seek(size + 4, 1)  # with its checksum
                continue
            data = file.read(size)
            file.seek(4, 1)
            if name == b"eXIf":
                image.info.setdefault("exif", b"Exif\0\0" + data)
            elif data.startswith(_XMP_KEYWORD):
                image.info.setdefault("xmp", _international_text(data[len(_XMP_KEYWORD) :]))


def _international_text(data: bytes) -> bytes:
    """Return the text of an iTXt chunk behind its keyword."""
    is_compressed = data[:1] == b"\1"
    _, _, rest = data[2:].partition(b"\0")  # language
    _, _, text = rest.partition(b"\0")  # translated keyword
    if not is_compressed:
        return text
    decompressor = zlib.decompressobj()
    text = decompressor.decompress(text, MAX_TEXT_BYTES + 1)
    if len(text) > MAX_TEXT_BYTES:
        raise ValueError(f"larger than {MAX_TEXT_BYTES:,} bytes")
    return text
