"""Write any source as webdataset shards: train-000000.tar with key.jpg, key.txt and key.json for each image."""

from __future__ import annotations

import io
import json
import re
import tarfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from PIL import Image

from m1clip.data.images import decode, failure_reason, opened
from m1clip.data.sources.shards import PACKED
from m1clip.data.types import ImageRef, Sample, Source
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
    total = sum(len(source.samples(split)) for split in source.splits())
    done, sizes, images, skipped = 0, dict[str, int](), Counter[str](), list[str]()
    for split in source.splits():
        samples = source.samples(split)
        stem = re.sub(r"[^A-Za-z0-9_]+", "_", split)
        for start in range(0, len(samples), shard_size):
            name = f"{stem}-{start // shard_size:06d}.tar"
            with _new_shard(folder / name) as tar:
                for index, sample in enumerate(samples[start : start + shard_size], start=start):
                    try:
                        suffix, data = image_bytes(sample.image, image_size)
                    except (OSError, ValueError) as error:  # what decoders raise for an image they cannot read
                        skipped.append(f"{sample.image}: {failure_reason(error)}")
                    else:
                        _add_sample(tar, f"{index:09d}", {suffix: data, **_texts(sample, split)})
                        sizes[name] = sizes.get(name, 0) + 1
                        images[split] += 1
                    done += 1
                    progress(done, total)
    if not sizes:
        raise UserError(f"none of the {total:,} images can be read; the first: {skipped[0]}")
    write_json(folder / SIZES, sizes)
    return Packed(folder, dict(images), len(sizes), skipped)


@contextmanager
def _new_shard(path: Path) -> Iterator[tarfile.TarFile]:
    """A tar that gets its name once it is complete, and only if it has samples."""
    partial = Path(f"{path}{PARTIAL}")
    with tarfile.open(partial, "w", format=tarfile.USTAR_FORMAT) as tar:
        yield tar
        has_samples = bool(tar.getmembers())
    if has_samples:
        partial.replace(path)
    else:
        partial.unlink()


def _add_sample(tar: tarfile.TarFile, key: str, files: dict[str, bytes]) -> None:
    """Files by suffix, without timestamps or owners, so that equal content gives equal bytes."""
    for suffix, data in files.items():
        entry = tarfile.TarInfo(f"{key}.{suffix}")
        entry.size, entry.mode = len(data), 0o644
        tar.addfile(entry, io.BytesIO(data))


def _texts(sample: Sample, split: str) -> dict[str, bytes]:
    """The first caption as txt; all captions, the id and the split as json."""
    metadata = {"captions": list(sample.captions), "id": sample.id, "split": split, "format": PACKED}
    return {"txt": sample.captions[0].encode("utf-8", "replace"), "json": json.dumps(metadata).encode()}


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
