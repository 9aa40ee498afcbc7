"""Write any source as webdataset shards: train-000000.tar with key.jpg, key.txt and key.json for each image."""

from __future__ import annotations

import io
import json
import re
import tarfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from m1clip.data.cache import reason_of
from m1clip.data.images import decode, opened
from m1clip.data.sources.shards import PACKED
from m1clip.data.types import ImageRef, Sample, Source
from m1clip.errors import UserError
from m1clip.io import PARTIAL, write_json

# What open_clip and webdataset look for; other formats become PNG, which loses nothing.
KEPT = {"JPEG": "jpg", "PNG": "png", "WEBP": "webp"}
JPEG_QUALITY = 95
SIZES = "sizes.json"  # images in each shard, where open_clip looks for them


@dataclass(frozen=True, slots=True)
class Packed:
    """What was written: images of each split, shards, and what could not be."""

    folder: Path
    images: dict[str, int]
    shards: int
    skipped: tuple[str, ...]

    def __str__(self) -> str:
        parts = ", ".join(f"{split} {number:,}" for split, number in self.images.items())
        return f"{self.folder}: {sum(self.images.values()):,} images ({parts}) in {self.shards:,} shards"


def pack(
    source: Source, folder: Path, shard_size: int = 1000, image_size: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Packed:  # fmt: skip
    """Write every split; the same source gives the same bytes. An image that cannot be read is left out."""
    if shard_size < 1:
        raise UserError(f"--shard-size must be at least 1, not {shard_size}")
    if image_size is not None and image_size < 1:
        raise UserError(f"--image-size must be at least 1, not {image_size}")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder}: not an empty folder; name a new one for the shards")
    folder.mkdir(parents=True, exist_ok=True)
    total = sum(len(source.samples(split)) for split in source.splits())
    images: dict[str, int] = {}
    skipped: list[str] = []
    shards = Shards(folder, shard_size)
    done = 0
    for split in source.splits():
        for sample in source.samples(split):
            try:
                suffix, data = image_bytes(sample.image, image_size)
            except (OSError, ValueError) as error:  # what decoders raise for an image they cannot read
                skipped.append(f"{sample.image}: {reason_of(error)}")
            else:
                number = images.get(split, 0)
                shards.add(split, number, {suffix: data, **_texts(sample, split)})
                images[split] = number + 1
            done += 1
            if progress is not None:
                progress(done, total)
        shards.end()
    if not shards.sizes:
        raise UserError(f"none of the {total:,} images can be read; the first: {skipped[0]}")
    write_json(folder / SIZES, shards.sizes)
    return Packed(folder, images, len(shards.sizes), tuple(skipped))


class Shards:
    """Writes samples one after the other. A shard has its name when it is whole.

    No times or image_index are written, so that equal content gives equal bytes.
    """

    def __init__(self, folder: Path, shard_size: int) -> None:
        self.folder, self.shard_size = folder, shard_size
        self.sizes: dict[str, int] = {}
        self._path = folder
        self._tar: tarfile.TarFile | None = None
        self._held = 0

    def add(self, split: str, number: int, parts: dict[str, bytes]) -> None:
        """One sample: its files by ending."""
        if self._held == self.shard_size:
            self.end()
        if self._tar is None:
            stem = re.sub(r"[^A-Za-z0-9_]+", "_", split)
            order = sum(name.startswith(f"{stem}-") for name in self.sizes)
            self._path = self.folder / f"{stem}-{order:06d}.tar"
            self._tar = tarfile.open(f"{self._path}{PARTIAL}", "w", format=tarfile.USTAR_FORMAT)  # noqa: SIM115
        for suffix, data in parts.items():
            entry = tarfile.TarInfo(f"{number:09d}.{suffix}")
            entry.size, entry.mode = len(data), 0o644
            self._tar.addfile(entry, io.BytesIO(data))
        self._held += 1

    def end(self) -> None:
        """The shard is whole: give it its name."""
        if self._tar is not None:
            self._tar.close()
            Path(f"{self._path}{PARTIAL}").replace(self._path)
            self.sizes[self._path.name] = self._held
        self._tar, self._held = None, 0


def image_bytes(ref: ImageRef, image_size: int | None) -> tuple[str, bytes]:
    """(ending, bytes): as they are where any reader knows the format, else encoded again.

    With `image_size`, an image whose short side is longer is made smaller and written as JPEG.
    """
    where = str(ref)
    read = getattr(ref, "read", None)
    if read is None:  # a drawn image
        return "png", _encoded(ref.open(), "PNG")
    data: bytes = read()
    with opened(data, where) as header:
        kind, short = header.format or "", min(header.size)
    if image_size is not None and short > image_size:
        image = decode(data, None, where)
        scale = image_size / min(image.size)
        width, height = (max(image_size, round(side * scale)) for side in image.size)
        return "jpg", _encoded(image.resize((width, height), Image.Resampling.BICUBIC), "JPEG")
    image = decode(data, None, where)  # also the check that the bytes are whole
    return (KEPT[kind], data) if kind in KEPT else ("png", _encoded(image, "PNG"))


def _encoded(image: Image.Image, kind: str) -> bytes:
    stream = io.BytesIO()
    image.save(stream, kind, **({"quality": JPEG_QUALITY} if kind == "JPEG" else {}))
    return stream.getvalue()


def _texts(sample: Sample, split: str) -> dict[str, bytes]:
    """The first caption for readers that want one; all of them, with the name and split, for those that can."""
    about = {"captions": list(sample.captions), "id": sample.id, "split": split, "format": PACKED}
    return {"txt": sample.captions[0].encode("utf-8", "replace"), "json": json.dumps(about).encode()}
