"""Write any source as webdataset shards: train-000000.tar with key.jpg, key.txt and key.json for
each image.
"""

import errno
import io
import itertools
import json
import os
import re
import tarfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from PIL import Image

from m1clip import console
from m1clip.data.decode_pool import BLOCKS_AHEAD, DecodePool, decode_processes
from m1clip.data.images import decode, failure_reason, open_header
from m1clip.data.sources.shards import PACKED
from m1clip.data.sources.stream import INDEX_SUFFIX, make_index, read_index
from m1clip.data.types import ImageRef, Sample, Source
from m1clip.errors import UserError
from m1clip.formatting import plural
from m1clip.hardware.machine_info import usable_cpus
from m1clip.io import PARTIAL, parse_json, read_small, remove_leftovers, write_bytes, write_json

# Formats that open_clip and webdataset read; others are converted to PNG, which is lossless.
KEPT = {"JPEG": "jpg", "PNG": "png", "WEBP": "webp"}
JPEG_QUALITY = 95
SIZES_FILE = "sizes.json"  # images in each shard, where open_clip looks for them
IN_PROCESSES_OF = 1000  # images of a split whose kind is looked at
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
    remove_leftovers(folder)
    write_json(folder / UNFINISHED, settings)
    jobs = [
        (split, start) for split, count in counts.items() for start in range(0, count, shard_size)
    ]
    total = sum(counts.values())
    shards = [
        ShardJob(
            folder / f"{re.sub(r'[^A-Za-z0-9_]+', '_', split)}-{start // shard_size:06d}.tar",
            split,
            range(start, min(start + shard_size, counts[split])),
            image_size,
        )
        for split, start in jobs
    ]

    def samples_of(job: ShardJob) -> Sequence[Sample]:
        return source.samples(job.split)[job.numbers.start : job.numbers.stop]

    refs = [sample.image for split in counts for sample in source.samples(split)[:IN_PROCESSES_OF]]
    processes = 0
    if threads > 1 and all(ref.in_processes for ref in refs):
        processes = min(len(shards), decode_processes(total, usable_cpus()))
    if processes:
        written = _write_in_processes(shards, samples_of, processes, total)
    else:
        written = _write_in_threads(shards, samples_of, threads, total)
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


class ShardJob(NamedTuple):
    """A shard to write: its file, and which images of a split it gets."""

    path: Path
    split: str
    numbers: range
    image_size: int | None

    def write(
        self, samples: Sequence[Sample], refresh: Callable[[int], object]
    ) -> tuple[str, int, list[str]]:
        """Name, number of samples and unreadable images of the shard.

        `refresh` gets the number of new images.
        """
        shard, skipped = read_index(str(self.path)), list[str]()
        if shard is not None:  # from before the interruption
            missing = len(self.numbers) - shard.samples
            skipped += [f"{self.path}: {plural(missing, 'image')}"] if missing > 0 else []
            refresh(len(self.numbers))
            return self.path.name, shard.samples, skipped
        with _new_shard(self.path) as tar:
            for number, sample in zip(self.numbers, samples, strict=True):
                try:
                    suffix, data = image_bytes(sample.image, self.image_size)
                except (
                    OSError,
                    ValueError,
                ) as error:  # what decoders raise for an image they cannot read
                    if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT):
                        raise
                    skipped.append(f"{sample.image}: {failure_reason(error)}")
                else:
                    files = {suffix: data, **_texts(sample, self.split)}
                    _add_sample(tar, f"{number:09d}", files)
                refresh(1)
        return self.path.name, len(self.numbers) - len(skipped), skipped


def _write_in_threads(
    shards: Sequence[ShardJob],
    samples_of: Callable[[ShardJob], Sequence[Sample]],
    threads: int,
    total: int,
) -> list[tuple[str, int, list[str]]]:
    done, refresh = itertools.count(1), console.current_progress()  # of this thread, for all

    def record(count: int) -> None:
        refresh(max(next(done) for _ in range(count)), total)

    with ThreadPoolExecutor(threads) as pool:
        try:
            return list(pool.map(lambda job: job.write(samples_of(job), record), shards))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)  # or Ctrl-C would wait for all shards
            raise


def _pack_shard(item: tuple[ShardJob, Sequence[Sample]]) -> tuple[None, tuple[str, int, list[str]]]:
    """Work for `DecodePool`: a shard with its samples -> what was written."""
    job, samples = item
    return None, job.write(samples, lambda count: None)


def _write_in_processes(
    shards: Sequence[ShardJob],
    samples_of: Callable[[ShardJob], Sequence[Sample]],
    processes: int,
    total: int,
) -> list[tuple[str, int, list[str]]]:
    refresh = console.current_progress()
    written: dict[int, tuple[str, int, list[str]]] = {}
    ahead = iter(enumerate(shards))
    done = 0
    with DecodePool(_pack_shard, processes, timeout=0) as pool:

        def submit(count: int) -> None:
            for number, job in itertools.islice(ahead, count):
                pool.submit(number, [(job, samples_of(job))], [0])

        submit(BLOCKS_AHEAD * processes)
        while len(written) < len(shards):
            number, (result,) = pool.next_done()
            written[number] = result
            submit(1)
            done += len(shards[number].numbers)
            refresh(done, total)
    return [written[number] for number in range(len(shards))]


def _is_unfinished(folder: Path, settings: dict[str, Any]) -> bool:
    """Whether an interrupted pack of the same data with the same settings wrote this folder."""
    try:
        return bool(parse_json(read_small(folder / UNFINISHED)) == settings)
    except (OSError, ValueError):
        return False


@contextmanager
def _new_shard(path: Path) -> Iterator[tarfile.TarFile]:
    """A tar that gets its name once it and its index are complete, and only if it has samples."""
    # Another process may still write: one that outlives a killed `pack` for a moment.
    partial = Path(f"{path}.{os.getpid()}{PARTIAL}")
    try:
        with tarfile.open(partial, "w", format=tarfile.USTAR_FORMAT) as tar:
            yield tar
            has_samples = bool(tar.getmembers())
        if has_samples:
            write_bytes(Path(f"{path}{INDEX_SUFFIX}"), make_index(str(partial)), sync=False)
            partial.replace(path)
        else:
            partial.unlink()
    except BaseException as error:
        partial.unlink(missing_ok=True)  # on a full disk, it must not use up the remaining space
        if isinstance(error, OSError):
            error.filename = str(path)  # not the temporary name, or none for a full disk
        raise


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
