"""Where decoded pictures are kept: in memory, on disk, or nowhere."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from m1clip.data.bad import SAMPLE, evenly, judge
from m1clip.data.cache import ROOM_MARGIN, CacheSpec, cache_key, cached
from m1clip.data.cache_place import cache_folder, free_bytes
from m1clip.data.pair import Pair, Source
from m1clip.data.patience import PATIENCE
from m1clip.data.sources.mixed import MixedSource
from m1clip.data.store import ArrayPictures, Failure, LivePictures, Pictures, Progress, decode_all, find_bad
from m1clip.data.synthetic.source import SyntheticImage

Kind = Literal["ram", "disk", "off"]
RAM_LIMIT_SHARE = 0.3  # of the machine's memory, for decoded pictures
DISK_LIMIT_SHARE = 0.5  # of the free disk, unless the person asks for the disk by name
QUICK_PICTURES = 500  # so few are decoded before a person grows impatient


@dataclass(frozen=True)
class DecodePlan:
    """How pictures are decoded: by how many processes, started how, shown to whom."""

    workers: int
    start_method: str
    memory_bytes: int
    progress: Callable[[str], AbstractContextManager[Progress]]  # by what is being done
    warn: Callable[[str], None]


@dataclass(frozen=True)
class CachePlace:
    """What the person asked for, and where the data lies."""

    wish: Literal["auto", "ram", "disk", "off"]
    cache_dir: str | None
    roots: tuple[str, ...]
    beside: Path | None
    in_all: int  # pictures of all splits, which share the memory
    patience: float = PATIENCE  # seconds for the read of one picture


@dataclass(frozen=True)
class Stored:
    """The pictures of a split that can be read, with their pairs, and those that cannot."""

    pictures: Pictures
    pairs: Sequence[Pair]
    failures: tuple[Failure, ...]
    kind: Kind


def choose_kind(
    wish: str, *, drawn: bool, pictures: int, needed: int, total: int, memory: int, free: int
) -> Kind:
    """What to do with `needed` bytes of a split of a set of `total` bytes, if the person leaves it open.

    Drawn pictures and small sets stay in memory. Others go to disk, so that the second run starts at once;
    where the disk has no room they stay in memory, and where that has none they are decoded each time.
    """
    if wish != "auto":
        return wish  # type: ignore[return-value]
    fits_memory = total <= RAM_LIMIT_SHARE * memory
    if fits_memory and (drawn or pictures <= QUICK_PICTURES):
        return "ram"
    if not drawn and needed * ROOM_MARGIN <= DISK_LIMIT_SHARE * free:
        return "disk"
    return "ram" if fits_memory else "off"


def data_folders(source: Source) -> tuple[tuple[str, ...], Path | None]:
    """(the folders the data lies in, the one that a cache may lie beside)."""
    parts: Sequence[Any] = [part for part, _ in source.parts] if isinstance(source, MixedSource) else [source]
    paths = [part.path for part in parts if isinstance(getattr(part, "path", None), Path)]
    # A pattern of shards is no file, and a dataset of the hub (hf:owner/name) has no folder at all.
    folders = [path if path.is_dir() else path.parent for path in paths if not str(path).startswith("hf:")]
    folders = [folder for folder in folders if folder.is_dir()]
    return tuple(map(str, folders)), folders[0] if folders else None


def store_split(
    pairs: Sequence[Pair],
    split: str,
    side: int,
    resize: str,
    place: CachePlace,
    max_bad: float,
    plan: DecodePlan,
) -> Stored:
    """Keep the pictures of a split as asked, without those that cannot be read."""
    row = side * side * 3
    drawn = all(isinstance(pair.image, SyntheticImage) for pair in pairs)
    facts = {
        "drawn": drawn,
        "pictures": place.in_all,
        "needed": len(pairs) * row,
        "total": place.in_all * row,
    }
    start_method = plan.start_method if drawn else None
    spec, kind = None, choose_kind(place.wish, **facts, memory=plan.memory_bytes, free=2**62)  # type: ignore[arg-type]
    if kind == "disk":
        key = cache_key(pairs, side, resize, place.roots)
        spec = CacheSpec(cache_folder(place.cache_dir, place.beside), key, len(pairs), side, resize)
        if not spec.is_whole():
            kind = choose_kind(place.wish, **facts, memory=plan.memory_bytes, free=free_bytes(spec.folder))  # type: ignore[arg-type]
    pictures: Pictures
    refs = [pair.image for pair in pairs]
    looked: Sequence[int] = range(len(pairs))
    if spec is not None and kind == "disk":
        with plan.progress(f"preparing {split} images") as show:
            pictures, bad = cached(spec, pairs, plan.workers, start_method, show, plan.warn, place.patience)
    elif kind == "ram":
        with plan.progress(f"preparing {split} images") as show:
            array, bad = decode_all(refs, side, resize, plan.workers, start_method, show, place.patience)
        pictures = ArrayPictures(array)
    else:
        # Pictures to evaluate with are a fixed set, so each is tried; of those to train on a sample shows the share.
        looked = evenly(len(pairs), SAMPLE) if split == "train" else looked
        bad = find_bad(refs, looked, plan.workers, place.patience)
        pictures = LivePictures(refs, side, resize, place.patience)
    failures = judge(bad, refs, split, len(looked), max_bad, plan.warn)
    if not bad or (kind == "off" and split == "train"):
        return Stored(pictures, pairs, failures, kind)
    good = [index for index in range(len(pairs)) if index not in bad]
    if isinstance(pictures, ArrayPictures):
        pictures = ArrayPictures(pictures.array[good])
    elif isinstance(pictures, LivePictures):
        pictures = LivePictures([refs[index] for index in good], side, resize, place.patience)
    return Stored(pictures, [pairs[index] for index in good], failures, kind)
