"""Write any source as webdataset shards: train-000000.tar with key.jpg, key.txt and key.json for each image."""

from __future__ import annotations

import io
import json
import re
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from PIL import Image

from m1clip.data.images import decode, failure_reason, opened
from m1clip.data.sources.shards import PACKED
from m1clip.data.types import ImageRef, Source
from m1clip.errors import UserError
from m1clip.io import PARTIAL, write_json

# Formats that open_clip and webdataset read; others are converted to PNG, which is lossless.
KEPT = {"JPEG": "jpg", "PNG": "png", "WEBP": "webp"}
JPEG_QUALITY = 95
SIZES = "sizes.json"  # images in each shard, where open_clip looks for them


class Packed(NamedTuple):
    """What was written, and which images could not be read."""

    folder: Path
    images: dict[str, int]  # of each split
    shards: int
    skipped: list[str]

    def __str__(self) -> str:
        parts = ", ".join(f"{split} {number:,}" for split, number in self.images.items())
        return f"{self.folder}: {sum(self.images.values()):,} images ({parts}) in {self.shards:,} shards"


def pack(
    source: Source,
    folder: Path,
    shard_size: int = 1000,
    image_size: int | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Packed:
    """Write every split; the same source gives the same bytes. Unreadable images are skipped."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder}: not an empty folder; choose a new one for the shards")
    folder.mkdir(parents=True, exist_ok=True)
    samples = [(split, sample) for split in source.splits() for sample in source.samples(split)]
    writers = {split: ShardWriter(folder, split, shard_size) for split in source.splits()}
    skipped: list[str] = []
    for done, (split, sample) in enumerate(samples, start=1):
        # The first caption as txt; all captions, the id and the split as json.
        metadata = {"captions": list(sample.captions), "id": sample.id, "split": split, "format": PACKED}
        texts = {"txt": sample.captions[0].encode("utf-8", "replace"), "json": json.dumps(metadata).encode()}
        try:
            suffix, data = image_bytes(sample.image, image_size)
        except (OSError, ValueError) as error:  # what decoders raise for an image they cannot read
            skipped.append(f"{sample.image}: {failure_reason(error)}")
        else:
            writers[split].add({suffix: data, **texts})
        progress(done, len(samples))
    for writer in writers.values():
        writer.close()
    sizes = {name: size for writer in writers.values() for name, size in writer.sizes.items()}
    if not sizes:
        raise UserError(f"none of the {len(samples):,} images can be read; the first: {skipped[0]}")
    write_json(folder / SIZES, sizes)
    images = {split: sum(writer.sizes.values()) for split, writer in writers.items()}
    return Packed(folder, images, len(sizes), skipped)


class ShardWriter:
    """Writes the shards of a split. A shard gets its final name once it is complete.

    No timestamps or owners are written, so that equal content gives equal bytes.
    """

    def __init__(self, folder: Path, split: str, shard_size: int) -> None:
        self._stem = folder / re.sub(r"[^A-Za-z0-9_]+", "_", split)
        self._shard_size = shard_size
        self._tar: tarfile.TarFile | None = None
        self._written = 0
        self.sizes: dict[str, int] = {}

    def add(self, files: dict[str, bytes]) -> None:
        """One sample: its files by suffix."""
        if self._tar is None:
            path = f"{self._path()}{PARTIAL}"
            self._tar = tarfile.open(path, "w", format=tarfile.USTAR_FORMAT)  # noqa: SIM115
        for suffix, data in files.items():
            entry = tarfile.TarInfo(f"{self._written:09d}.{suffix}")
            entry.size, entry.mode = len(data), 0o644
            self._tar.addfile(entry, io.BytesIO(data))
        self._written += 1
        if self._written % self._shard_size == 0:
            self.close()

    def close(self) -> None:
        """Complete the shard being written, if any."""
        if self._tar is not None:
            self._tar.close()
            path = self._path()
            Path(f"{path}{PARTIAL}").replace(path)
            self.sizes[path.name] = self._written - len(self.sizes) * self._shard_size
            self._tar = None

    def _path(self) -> Path:
        return Path(f"{self._stem}-{len(self.sizes):06d}.tar")


def image_bytes(ref: ImageRef, image_size: int | None) -> tuple[str, bytes]:
    """(suffix, bytes): unchanged if common readers support the format, else re-encoded as PNG.

    With `image_size`, an image with a longer short side is downscaled and saved as JPEG.
    """
    where, data = str(ref), ref.read()
    with opened(data, where) as header:
        kind, short = header.format or "", min(header.size)
    image = decode(data, None, where)  # also checks that the bytes are complete
    stream = io.BytesIO()
    if image_size is not None and short > image_size:
        scale = image_size / min(image.size)
        width, height = (max(image_size, round(side * scale)) for side in image.size)
        image.resize((width, height), Image.Resampling.BICUBIC).save(stream, "JPEG", quality=JPEG_QUALITY)
        return "jpg", stream.getvalue()
    if kind in KEPT:
        return KEPT[kind], data
    image.save(stream, "PNG")
    return "png", stream.getvalue()
