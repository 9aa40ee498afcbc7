"""Write any source as webdataset shards: train-000000.tar with key.jpg, key.txt and key.json for each image."""

import io
import itertools
import json
import re
import tarfile
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from PIL import Image

from m1clip import console
from m1clip.data.images import decode, failure_reason, open_header
from m1clip.data.sources.shards import PACKED
from m1clip.data.sources.stream import INDEX_SUFFIX, make_index, read_index
from m1clip.data.types import ImageRef, Sample, Source
from m1clip.errors import UserError
from m1clip.formatting import plural
from m1clip.io import PARTIAL, read_small, write_bytes, write_json

# Formats that open_clip and webdataset read; others are converted to PNG, which is lossless.
KEPT = {"JPEG": "jpg", "PNG": "png", "WEBP": "webp"}
JPEG_QUALITY = 95
SIZES_FILE = "sizes.json"  # images in each shard, where open_clip looks for them
UNFINISHED = "unfinished.json"  # what is being packed


class Packed(NamedTuple):
    """What was written, and which images could not be read."""

    folder: Path
    images: dict[str, int]  # of each split
    shards: int
    skipped: list[str]

    def __str__(self) -> str:
        parts = ", ".join(f"{split} {number:,}" for split, number in self.images.items())
        images = plural(sum(self.images.values()), "image")
        return f"{self.folder}: {images} ({parts}) in {plural(self.shards, 'shard')}"


def pack(
    source: Source,
    folder: Path,
    shard_size: int = 1000,
    image_size: int | None = None,
    threads: int = 1,
) -> Packed:
    """Write every split; the same source gives the same bytes. Unreadable images are skipped.

    An interrupted pack continues: shards that have their name are complete.
    """
    counts = {split: len(source.samples(split)) for split in source.splits()}
    settings: dict[str, Any] = {"shard_size": shard_size, "image_size": image_size}
    settings |= {split: source.fingerprint(source.samples(split)) for split in counts}
    if folder.exists() and (
        not folder.is_dir() or (any(folder.iterdir()) and not _is_unfinished(folder, settings))
    ):
        raise UserError(f"{folder}: not an empty folder; choose a new one for the shards")
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / UNFINISHED, settings)
    jobs = [
        (split, start) for split, count in counts.items() for start in range(0, count, shard_size)
    ]
    done, total = itertools.count(1), sum(counts.values())
    refresh = console.current_progress()  # of this thread, for those of the pool

    def write(split: str, start: int) -> tuple[str, int, list[str]]:
        """Name, number of samples and unreadable images of a shard."""
        path = folder / f"{re.sub(r'[^A-Za-z0-9_]+', '_', split)}-{start // shard_size:06d}.tar"
        wanted = range(start, min(start + shard_size, counts[split]))
        shard, skipped = read_index(str(path)), list[str]()
        if shard is not None:  # from before the interruption
            missing = len(wanted) - shard.samples
            skipped += [f"{path}: {plural(missing, 'image')}"] if missing > 0 else []
            refresh(max(next(done) for _ in wanted), total)
            return path.name, shard.samples, skipped
        with _new_shard(path) as tar:
            for number, sample in zip(
                wanted, source.samples(split)[wanted.start : wanted.stop], strict=True
            ):
                try:
                    suffix, data = image_bytes(sample.image, image_size)
                except (
                    OSError,
                    ValueError,
                ) as error:  # what decoders raise for an image they cannot read
                    skipped.append(f"{sample.image}: {failure_reason(error)}")
                else:
                    _add_sample(tar, f"{number:09d}", {suffix: data, **_texts(sample, split)})
                refresh(next(done), total)
        return path.name, len(wanted) - len(skipped), skipped

    with ThreadPoolExecutor(threads) as pool:
        try:
            written = list(pool.map(write, *zip(*jobs, strict=True)))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)  # or Ctrl-C would wait for all shards
            raise
    skipped = [line for _, _, lines in written for line in lines]
    sizes = {name: count for name, count, _ in written if count}
    if not sizes:
        raise UserError(f"none of the {total:,} images can be read; the first: {skipped[0]}")
    write_json(folder / SIZES_FILE, sizes)
    (folder / UNFINISHED).unlink()
    images = Counter[str]()
    for (split, _), (_, count, _) in zip(jobs, written, strict=True):
        images[split] += count
    return Packed(folder, dict(+images), len(sizes), skipped)


def _is_unfinished(folder: Path, settings: dict[str, Any]) -> bool:
    """Whether an interrupted pack of the same data with the same settings wrote this folder."""
    try:
        return bool(json.loads(read_small(folder / UNFINISHED)) == settings)
    except (OSError, ValueError):
        return False


@contextmanager
def _new_shard(path: Path) -> Iterator[tarfile.TarFile]:
    """A tar that gets its name once it and its index are complete, and only if it has samples."""
    partial = Path(f"{path}{PARTIAL}")
    with tarfile.open(partial, "w", format=tarfile.USTAR_FORMAT) as tar:
        yield tar
        has_samples = bool(tar.getmembers())
    if has_samples:
        write_bytes(Path(f"{path}{INDEX_SUFFIX}"), make_index(str(partial)), sync=False)
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
    metadata = {
        "captions": list(sample.captions),
        "id": sample.id,
        "split": split,
        "format": PACKED,
    }
    return {
        "txt": sample.captions[0].encode("utf-8", "replace"),
        "json": json.dumps(metadata).encode(),
    }


def image_bytes(ref: ImageRef, image_size: int | None) -> tuple[str, bytes]:
    """(suffix, bytes): unchanged if common readers support the format, else re-encoded as PNG.

    With `image_size`, an image with a longer short side is downscaled and saved as JPEG.
    """
    where, data = str(ref), ref.read()
    with open_header(data, where) as header:
        kind, short = header.format or "", min(header.size)
    image = decode(data, None, where)  # also checks that the bytes are complete
    stream = io.BytesIO()
    if image_size is not None and short > image_size:
        scale = image_size / min(image.size)
        width, height = (max(image_size, round(side * scale)) for side in image.size)
        image.resize((width, height), Image.Resampling.BICUBIC).save(
            stream, "JPEG", quality=JPEG_QUALITY
        )
        return "jpg", stream.getvalue()
    if kind in KEPT:
        return KEPT[kind], data
    image.save(stream, "PNG")
    return "png", stream.getvalue()
