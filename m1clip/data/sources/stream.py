"""Shards that are streamed: any sample by number through a small index of each shard, read when it
is needed.

`train-000000.tar.index` lies next to its shard, or in the cache folder if the shard is remote or
read-only: a line of JSON, a row of offsets for each sample, the names of the images. Memory does
not grow with the number of samples.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, overload

import numpy as np
from filelock import FileLock

from m1clip import console
from m1clip.data.images import MAX_MEMBER_BYTES, BadImage, ImageRef, file_stamp
from m1clip.data.sources.base import (
    CaptionFault,
    DataFormat,
    DataPath,
    Location,
    Options,
    captions_of,
    parse_json,
    user_error,
)
from m1clip.data.sources.remote import (
    is_broken,
    is_remote,
    open_file,
    read_file,
    read_range,
    without_credentials,
)
from m1clip.data.sources.shards import (
    captions_in,
    is_shards,
    read_texts,
    samples_in,
    shard_paths,
    shard_rows,
    split_of,
)
from m1clip.data.sources.tables import TABLE_NAMES, find_tables
from m1clip.data.types import Problem, ProblemKind, Sample, Source
from m1clip.errors import UserError
from m1clip.formatting import one_line, plural, size
from m1clip.io import open_regular, user_cache, write_bytes

STREAM_BYTES = 20 * 10**9  # local shards of more bytes are streamed
HELD_OUT = 5_000  # images at most for each of val and test where the shards name no splits
SHUFFLE_BLOCK = 1_024  # neighbours in a shard that stay together in the first shuffle
SAMPLED = 2_000  # samples that stand for all, where all would have to be read
THREADS = 32  # reads at a time: those of remote shards mostly wait
NEAR_BYTES = 2**16  # bytes between image and captions that cost less than a second read
INDEX_SUFFIX, SHARD_INDEX_FORMAT = ".index", 1
COUNTS = ("bytes", "samples", "captions", "fewest")  # of the header
PROBLEMS = 100  # kept of each shard
MAX_SAMPLES = 2**21  # of a shard, whose index is made in memory
MAX_HEADER = 2**20  # bytes of the first line of an index
MAX_NAMES = 2**28  # bytes of the names in an index
ROW = np.dtype(
    [("image", "<u8"), ("image_size", "<u4"), ("text", "<u8"), ("text_size", "<u4"), ("json", "?")]
)


@dataclass(frozen=True, slots=True)
class Shard:
    path: str
    index: Path
    problems: tuple[Problem, ...]
    bytes: int = 0
    samples: int = 0
    captions: int = 0
    fewest: int = 0  # captions of an image

    @property
    def name(self) -> str:
        """For messages."""
        return without_credentials(self.path)


def make_index(path: str) -> bytes:
    """Read a shard from start to end; a damaged one gives what is before the damage."""
    rows: list[Any] = []
    names: list[str] = []
    counts: list[int] = []
    problems: list[tuple[str, str, ProblemKind]] = []

    def problem(location: Location, message: str, kind: ProblemKind) -> None:
        if len(problems) < PROBLEMS:
            problems.append((without_credentials(location[0]), one_line(message), kind))

    with open_file(path) as file:
        size = file.seek(0, os.SEEK_END)
        for location, image, parts in samples_in(path, file, problem):
            texts = read_texts(file, parts)
            captions, fault = captions_of(texts.captions)
            if image.size > MAX_MEMBER_BYTES:
                captions = []
                message = f"{image.size >> 20} MiB is too large for an image"
                fault = CaptionFault("unreadable", message)
            if fault:
                problem(location, fault.message, fault.kind)
            if captions and texts.member is not None:
                if len(rows) == MAX_SAMPLES:
                    raise user_error(
                        f"{without_credentials(path)}: more than {MAX_SAMPLES:,} images in one"
                        " shard; use smaller shards"
                    )
                rows.append(
                    (
                        image.offset,
                        image.size,
                        texts.member.offset,
                        texts.member.size,
                        texts.is_json,
                    )
                )
                names.append(one_line(image.name))
                counts.append(len(captions))
    header: dict[str, Any] = {
        "format": SHARD_INDEX_FORMAT,
        "bytes": size,
        "samples": len(rows),
        "captions": sum(counts),
    }
    header |= {"fewest": min(counts, default=0), "problems": problems}
    return b"".join(
        [
            json.dumps(header).encode(),
            b"\n",
            np.array(rows, ROW).tobytes(),
            "\n".join(names).encode(),
        ]
    )


@lru_cache(maxsize=256)
def _map_file(index: Path, samples: int) -> tuple[np.ndarray, int]:
    """(rows, memory-mapped; where the names start)."""
    with open_regular(index) as file:
        start = len(file.readline(MAX_HEADER))
        rows = np.memmap(file, ROW, "r", start, (samples,)) if samples else np.empty(0, ROW)
        return rows, start + rows.nbytes


def read_index(path: str, index: Path | None = None) -> Shard | None:
    """A shard by its index, next to it if not given.

    None if it is missing, or of another version of the shard.
    """
    index = index or Path(path + INDEX_SUFFIX)
    try:
        with open_regular(index) as file:
            header = parse_json(file.readline(MAX_HEADER))
            facts, ours = None if is_remote(path) else os.stat(path), os.fstat(file.fileno())
        problems = tuple(
            Problem(str(where), str(message), kind) for where, message, kind in header["problems"]
        )
        shard = Shard(path, index, problems, *(int(header[name]) for name in COUNTS))
        fresh = facts is None or (
            facts.st_size == shard.bytes and facts.st_mtime_ns <= ours.st_mtime_ns
        )
        complete = 0 <= shard.samples * ROW.itemsize <= ours.st_size
        return shard if fresh and complete and header["format"] == SHARD_INDEX_FORMAT else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def open_shards(paths: Sequence[str], options: Options) -> tuple[list[Shard], int]:
    """The shards with their indexes, and how many indexes were made.

    A shard that cannot be read has no samples.
    """
    cache = Path(options.cache_dir).expanduser() if options.cache_dir else user_cache()
    index_paths = [_index_places(path, cache / "shards") for path in paths]
    refresh = console.current_progress()

    def find(path: str, indexes: Sequence[Path]) -> Shard | None:
        return next((shard for index in indexes if (shard := read_index(path, index))), None)

    def make(path: str, indexes: Sequence[Path]) -> Shard:
        return find(path, indexes) or _make(path, indexes)  # another process may have made it

    with ThreadPoolExecutor(_threads(paths)) as pool:
        shards_found = list(pool.map(find, paths, index_paths))
        missing = [number for number, shard in enumerate(shards_found) if shard is None]
        if missing:
            cache.mkdir(parents=True, exist_ok=True)
            refresh(0, len(missing))
            with FileLock(cache / "shards.lock"):
                made = pool.map(
                    make,
                    *zip(
                        *((paths[number], index_paths[number]) for number in missing), strict=True
                    ),
                )
                for done, (number, shard) in enumerate(zip(missing, made, strict=True), start=1):
                    shards_found[number] = shard
                    refresh(done, len(missing))
    shards = [shard for shard in shards_found if shard is not None]
    return shards, sum(shards[number].bytes > 0 for number in missing)


def _index_places(path: str, cache: Path) -> list[Path]:
    in_cache = (
        cache
        / f"{hashlib.sha256(without_credentials(path).encode()).hexdigest()[:32]}{INDEX_SUFFIX}"
    )
    return [in_cache] if is_remote(path) else [Path(path + INDEX_SUFFIX), in_cache]


def _make(path: str, indexes: Sequence[Path]) -> Shard:
    """Make the index of a shard, or copy the one that lies next to a remote shard."""
    try:
        url, mark, query = path.partition("?")
        data = (
            read_file(f"{url}{INDEX_SUFFIX}{mark}{query}") if is_remote(path) else None
        ) or make_index(path)
    except FileNotFoundError as error:
        raise user_error(
            f"{without_credentials(path)}: {error.strerror or error}; check the pattern of the"
            " shards"
        ) from None
    except OSError as error:
        message = one_line(error.strerror or str(error))
        return Shard(path, indexes[-1], (Problem(without_credentials(path), message, "shard"),))
    index = first_written(indexes, data)
    if not is_remote(path) and (changed := os.stat(path).st_mtime_ns) > index.stat().st_mtime_ns:
        os.utime(index, ns=(changed, changed))  # the clock of another machine is ahead
    _map_file.cache_clear()
    shard = read_index(path, index)
    if shard is not None:
        return shard
    where = without_credentials(path + INDEX_SUFFIX)
    return Shard(path, index, (Problem(where, "not an index: delete it", "shard"),))


def first_written(files: Sequence[Path], data: bytes) -> Path:
    """Write the first of some files that can be written."""
    for file in files:
        try:
            write_bytes(file, data, sync=False)
            return file
        except OSError as error:
            reason = error.strerror
    raise UserError(f"{files[-1]}: cannot be written ({reason}); choose --cache-dir")


def _threads(paths: Sequence[str]) -> int:
    return THREADS if any(map(is_remote, paths)) else min(4, os.cpu_count() or 1)


class ShardSamples(Sequence[Sample]):
    """The samples of some shards, or those of them `chosen` by number, or all but those `left_out`
    (sorted numbers).
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        chosen: np.ndarray | None = None,
        left_out: np.ndarray | None = None,
    ) -> None:
        self.shards = tuple(shards)
        self.starts = np.cumsum([0, *(shard.samples for shard in shards)])
        self.chosen = chosen
        self.left_out = np.empty(0, np.int64) if left_out is None else left_out
        self.threads = _threads([shard.path for shard in shards[:1]])
        self._captions: dict[
            int, tuple[str, ...]
        ] = {}  # of images that were read, until they are asked for

    def __len__(self) -> int:
        return (
            int(self.starts[-1]) - len(self.left_out) if self.chosen is None else len(self.chosen)
        )

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_captions": {}}

    @overload
    def __getitem__(self, index: int) -> Sample: ...
    @overload
    def __getitem__(self, index: slice) -> list[Sample]: ...
    def __getitem__(self, index: int | slice) -> Sample | list[Sample]:
        if isinstance(index, slice):
            return self.some(range(len(self))[index])
        image = ShardImage(self, range(len(self))[index])
        try:
            return Sample(image, self.captions(image.index), image.id)
        except UserError:  # as reading the image reports
            return Sample(image, (), image.id)

    def some(self, indices: Sequence[int]) -> list[Sample]:
        """Several samples, read at the same time."""
        with ThreadPoolExecutor(self.threads) as pool:
            return list(pool.map(self.__getitem__, indices))

    def find(self, index: int) -> tuple[Shard, int]:
        """The shard of a sample, and its row there."""
        if self.chosen is not None:
            index = int(self.chosen[index])
        elif len(self.left_out):
            # left_out[k] - k samples come before the k-th one that is left out.
            index += int(
                np.searchsorted(self.left_out - np.arange(len(self.left_out)), index, side="right")
            )
        shard_index = int(np.searchsorted(self.starts, index, side="right")) - 1
        return self.shards[shard_index], index - int(self.starts[shard_index])

    def images(self) -> Sequence[ShardImage]:
        """The images of all samples; nothing is read."""
        return ShardImages(self)

    def blocks(self) -> np.ndarray:
        """Sizes of the groups of neighbours that the order of an epoch keeps together at first."""
        counts = np.diff(self.starts) - np.diff(np.searchsorted(self.left_out, self.starts))
        return np.concatenate(
            [
                np.diff([*range(0, count, SHUFFLE_BLOCK), count])
                for count in counts.tolist()
                if count
            ]
        )

    def captions(self, index: int) -> tuple[str, ...]:
        """The captions of a sample; those of an image that was just read need no second read."""
        texts = self._captions.pop(index, None)
        if texts is None:
            shard, _, _, text, size, is_json = self._row(index)
            try:
                texts = captions_in(read_range(shard.path, text, size), is_json)
            except OSError as error:
                raise user_error(
                    f"{shard.name}: captions cannot be read ({error.strerror or error})"
                ) from None
        return texts

    def _row(self, index: int) -> tuple[Shard, int, int, int, int, bool]:
        """The shard of a sample, and where its image and its captions are."""
        shard, row = self.find(index)
        image, size, text, text_size, is_json = _map_file(shard.index, shard.samples)[0][row].item()
        if max(image + size, text + text_size) > min(shard.bytes, 2**62):
            raise user_error(f"{shard.index}: does not fit {shard.name}; delete it")
        return shard, image, size, text, text_size, is_json

    def read(self, index: int) -> bytes:
        """The encoded image of a sample; its captions are kept for `captions`."""
        shard, image, size, text, text_size, is_json = self._row(index)
        first, last = min(image, text), max(image + size, text + text_size)
        if last - first - size - text_size <= NEAR_BYTES:
            data = read_range(shard.path, first, last - first)
            pixels, texts = data[image - first :][:size], data[text - first :][:text_size]
        else:
            pixels, texts = (
                read_range(shard.path, image, size),
                read_range(shard.path, text, text_size),
            )
        captions = captions_in(texts, is_json)
        if len(pixels) < size or not captions:
            raise OSError("the shard has changed since it was indexed; run m1clip data index")
        if len(self._captions) > 2**16:  # of images whose captions nobody asked for
            self._captions.clear()
        self._captions[index] = captions
        return pixels


@dataclass(frozen=True, slots=True)
class ShardImage(ImageRef):
    samples: ShardSamples
    index: int

    def read(self) -> bytes:
        try:
            return self.samples.read(self.index)
        except OSError as error:
            raise BadImage(str(self), f"cannot be read ({error.strerror or error})") from error

    @property
    def id(self) -> str:
        """The shard and the name of the image in it."""
        shard, row = self.samples.find(self.index)
        with open_regular(shard.index) as file:
            file.seek(_map_file(shard.index, shard.samples)[1])
            names = file.read(MAX_NAMES).decode("utf-8", "replace").split("\n")[row : row + 1]
        return f"{os.path.basename(shard.name)}: {one_line(''.join(names))}"

    def stamp(self) -> str:
        shard, row = self.samples.find(self.index)
        return f"{shard.name}|{'' if is_remote(shard.path) else file_stamp(shard.path)}|{row}"

    def __str__(self) -> str:
        shard, _ = self.samples.find(self.index)
        return (
            shard.name
            if is_broken(shard.path)
            else os.path.join(os.path.dirname(shard.name), self.id)
        )


class ShardImages(Sequence[ShardImage]):
    def __init__(self, samples: ShardSamples) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: Any) -> Any:
        return ShardImage(self.samples, int(index))


class StreamedSource(Source):
    """Shards on disk or at URLs, in splits by their names.

    Without names, some evenly spread images are held out.
    """

    streamed = True

    def __init__(self, name: str, paths: Sequence[str], options: Options) -> None:
        super().__init__(
            without_credentials(name),
            [Path(path).parent for path in paths[:1] if not is_remote(path)],
        )
        self.shards, _ = open_shards(paths, options)
        self.problems = [problem for shard in self.shards for problem in shard.problems]
        if not any(shard.samples for shard in self.shards):
            why = f"; the first problem: {self.problems[0]}" if self.problems else ""
            raise user_error(
                f"{self.name}: no images with captions in {plural(len(self.shards), 'shard')}{why}"
            )
        split_names = {split_of(shard.name) for shard in self.shards} - {None}
        in_split: dict[str, list[Shard]] = {}
        for shard in self.shards:
            in_split.setdefault(split_of(shard.name) or "train", []).append(shard)
        self.parts = {split: ShardSamples(shards) for split, shards in in_split.items()}
        if "train" in self.parts and "val" not in self.parts:
            self._hold_out(("val",) if split_names else ("val", "test"))
        self.by_split.update(self.parts)
        remote, total = any(map(is_remote, paths)), sum(shard.bytes for shard in self.shards)
        self.threads = THREADS if remote else 0
        reason = (
            "remote"
            if remote
            else "--cache stream"
            if options.stream
            else f"more than {size(STREAM_BYTES)}"
        )
        amount = f"{plural(len(self.shards), 'shard')}, {size(total)}"
        self.notes.append(
            f"{self.name}: {amount}, streamed: read during training, not cached ({reason})"
        )

    def _hold_out(self, names: Sequence[str]) -> None:
        """Move evenly spread samples of train to other splits."""
        train = self.parts["train"]
        count = max(1, min(round(0.05 * len(train)), HELD_OUT)) * len(names)
        numbers = np.arange(count) * len(train) // count
        self.parts["train"] = ShardSamples(train.shards, left_out=numbers)
        for offset, name in enumerate(names):
            self.parts[name] = ShardSamples(train.shards, chosen=numbers[offset :: len(names)])
        text = " and ".join(plural(len(self.parts[name]), f"{name} image") for name in names)
        self.notes.append(
            f"the shards' names contain no val split: {text} held out of {len(train):,}"
        )

    def pick(self, split: str, indices: Sequence[int]) -> list[Sample]:
        return self.parts[split].some(indices)

    def sampled(self, split: str) -> Sequence[Sample]:
        return self._spread(split, SAMPLED)

    def cached(self, split: str) -> list[Sample]:
        return self._spread(split, HELD_OUT)

    def _spread(self, split: str, max_count: int) -> list[Sample]:
        total = len(self.parts[split])
        picked = self.pick(
            split,
            [index * total // min(max_count, total) for index in range(min(max_count, total))],
        )
        # Without shards that cannot be read.
        return [sample for sample in picked if sample.captions]

    def caption_count(self) -> int:
        return sum(shard.captions for shard in self.shards)

    def fewest_captions(self, split: str) -> int:
        return min(shard.fewest for shard in self.parts[split].shards if shard.samples)

    def fingerprint(self, samples: Sequence[Sample]) -> str:
        """Of the names, sizes and counts of all shards."""
        facts = [
            [os.path.basename(shard.name), *(getattr(shard, name) for name in COUNTS)]
            for shard in self.shards
        ]
        return hashlib.sha256(json.dumps([facts, len(samples)]).encode()).hexdigest()


def _is_webdataset(data: DataPath) -> bool:
    """Whether a path has shards, and no captions.csv or the like.

    Other tables do not matter: img2dataset writes one next to each shard.
    """
    if not is_shards(data.path):
        return False
    return not any(table.name in TABLE_NAMES for table in data.ask(find_tables))


def _open_stream(data: DataPath) -> StreamedSource | None:
    """Open the shards at a path, if they are asked to be streamed or too large to load."""
    paths = shard_paths(data.path)
    total_bytes = sum(os.path.getsize(path) for path in paths)
    if total_bytes <= STREAM_BYTES and not data.options.stream:
        return None
    return StreamedSource(str(data.path), paths, data.options)


WEBDATASET = DataFormat(
    name="webdataset",
    help="tar shards: a folder, one .tar file, or a pattern such as train-{000..099}.tar",
    read=shard_rows,
    item="sample",
    matches=_is_webdataset,
    open_stream=_open_stream,
)
