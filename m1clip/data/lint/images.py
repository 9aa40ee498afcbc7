"""What one image is, or what is wrong with it: read once, decoded once."""

from __future__ import annotations

import os
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np
from PIL import Image

from m1clip.data.images import BadImage, decode, one_line, opened
from m1clip.data.lint.report import Finding, Severity, finding
from m1clip.data.sources.base import Problem
from m1clip.data.sources.mixture import MixedSource
from m1clip.data.types import ImageRef, Sample, Source

_FORMAT_OF = {
    **dict.fromkeys((".jpg", ".jpeg", ".jpe", ".jfif"), "JPEG"),
    **dict.fromkeys((".tif", ".tiff"), "TIFF"),
    **dict.fromkeys((".bmp", ".dib"), "BMP"),
    **{".png": "PNG", ".webp": "WEBP", ".gif": "GIF"},
}
THUMB_SIDE = 16
# Enough for a hash of 9 x 9 and for telling a flat image; JPEG decodes at a fraction of its size.
_LOOK_SIDE = 36
_PNG_DEPTH_AT = 24
_TIFF_DEPTH_TAG = 258


@dataclass(frozen=True, slots=True)
class ImageFacts:
    """`fault` is a kind of BadImage; the other fields hold only where it is None."""

    fault: str | None = None
    reason: str = ""
    format: str = ""
    width: int = 0
    height: int = 0
    traits: tuple[str, ...] = ()
    wrong_suffix: bool = False
    digest: bytes = b""
    look: bytes = b""
    thumb: bytes = b""
    contrast: float = 0.0


def inspect(ref: ImageRef) -> ImageFacts:
    """Read, hash, check and decode one image."""
    where = str(ref)
    try:
        read = getattr(ref, "read", None)
        if read is None:
            image = ref.open()
            return _facts(image, image.tobytes(), "", image.size, ())
        data = read()
        with opened(data, where) as header:
            kind, size, traits = header.format or "", header.size, _traits(header, data)
        suffix = _FORMAT_OF.get(os.path.splitext(where)[1].lower())
        return _facts(decode(data, _LOOK_SIDE, where), data, kind, size, traits, suffix not in (None, kind))
    except BadImage as error:
        return ImageFacts(fault=error.kind, reason=error.reason)


def _facts(
    image: Image.Image, data: bytes, kind: str, size: tuple[int, int], traits: tuple[str, ...], wrong: bool = False
) -> ImageFacts:
    grey = image.convert("L")
    thumb = np.asarray(grey.resize((THUMB_SIDE, THUMB_SIDE), Image.Resampling.BOX))
    digest = blake2b(data, digest_size=16).digest()
    contrast = float(thumb.astype(np.float32).std())
    return ImageFacts(None, "", kind, *size, traits, wrong, digest, look_hash(grey), thumb.tobytes(), contrast)


def look_hash(grey: Image.Image) -> bytes:
    """dHash of 128 bits: whether brightness grows to the right and downwards, on a grid of 8 x 8."""
    small = np.asarray(grey.resize((9, 9), Image.Resampling.BOX), np.int16)
    right = small[:8, 1:] > small[:8, :8]
    down = small[1:, :8] > small[:8, :8]
    return np.packbits(np.concatenate([right.ravel(), down.ravel()])).tobytes()


def _traits(image: Image.Image, data: bytes) -> tuple[str, ...]:
    """What is converted when the image is used."""
    mode = image.mode
    depth = image.tag_v2.get(_TIFF_DEPTH_TAG, (8,)) if image.format == "TIFF" else (8,)  # type: ignore[attr-defined]
    found = {
        "CMYK": mode == "CMYK",
        "16-bit": mode.startswith(("I", "F"))
        or (image.format == "PNG" and data[_PNG_DEPTH_AT : _PNG_DEPTH_AT + 1] == b"\x10")
        or (isinstance(depth, tuple) and any(isinstance(d, int) and d > 8 for d in depth)),
        "palette": mode in {"P", "PA"},
        "alpha": mode in {"RGBA", "LA", "La", "PA", "RGBa"} or "transparency" in image.info,
        "animated": _animated(image),
        "grey": mode in {"1", "L"},
    }
    return tuple(name for name, holds in found.items() if holds)


def _animated(image: Image.Image) -> bool:
    try:
        return bool(getattr(image, "is_animated", False))
    except (EOFError, LookupError, OSError, SyntaxError, TypeError, ValueError):
        return False


@dataclass(frozen=True, slots=True)
class Entry:
    """A sample with its split."""

    sample: Sample
    split: str


class Places:
    """Names of images and captions: the file, and the row where the source knows it."""

    def __init__(self, source: Source) -> None:
        self._origin = getattr(source, "origin", None)

    def image(self, entry: Entry) -> str:
        """a/b.jpg (captions.csv row 12)."""
        name = str(entry.sample.image)
        row = self._row(entry, 0)
        return name if row is None or row in name else f"{name} ({row})"

    def caption(self, entry: Entry, number: int) -> str:
        """captions.csv row 12: the caption, cut where it is long."""
        text = entry.sample.captions[number]
        text = text if len(text) <= 80 else text[:77] + "..."
        return one_line(f"{self._row(entry, number) or entry.sample.id}: {text}")

    def _row(self, entry: Entry, number: int) -> str | None:
        if self._origin is None:
            return None
        return str(self._origin(entry.sample.id, number))


def entries_of(source: Source) -> tuple[Source, list[Entry]]:
    """All samples once: a mixture is looked at without its weights, which repeat images."""
    whole = MixedSource([(part, 1.0) for part, _ in source.parts]) if isinstance(source, MixedSource) else source
    return whole, [Entry(sample, split) for split in whole.splits() for sample in whole.samples(split)]


def evenly(entries: Sequence[Entry], count: int) -> list[Entry]:
    """A sample spread over the whole list, so that each split and each corner of the data is met."""
    if len(entries) <= count:
        return list(entries)
    return [entries[i * len(entries) // count] for i in range(count)]


# Set by eye on Flickr8k: the 7 samples within these limits are one image or one scene; looser ones let in
# samples of sky and fog. Of 1,000 of its images, copies saved again, resized, brightened or made grey were
# all found; of those cropped by 8% on each side 228, of mirrored ones 5.
MAX_BITS = 32
MIN_CORRELATION = 0.8
MIN_DETAIL_CORRELATION = 0.55
# A flat image looks like every other flat image.
MIN_CONTRAST = 6.0
# Above this all samples take too long: only those that share 16 bits of the hash in one place are compared.
MAX_ALL_PAIRS = 20_000
_BITS = 128
_CHUNK = 512
_MAX_BUCKET = 500


def find_duplicates(entries: Sequence[Entry], facts: Sequence[ImageFacts], places: Places) -> list[Finding]:
    """Same bytes, near-copies, and leakage of both."""
    same = list(same_bytes(facts))
    exact = {index for group in same for index in group}
    near = [(i, j) for i, j in same_look(facts) if not (i in exact and facts[i].digest == facts[j].digest)]
    samples = [(group[0], other) for group in same for other in group[1:]]

    def crossing(i: int, j: int) -> bool:
        return entries[i].split != entries[j].split

    def named(chosen: Sequence[tuple[int, int]]) -> list[str]:
        name = [f"{entry.split} {places.image(entry)}" for entry in (entries[i] for sample in chosen for i in sample)]
        return [f"{first} = {second}" for first, second in zip(name[::2], name[1::2], strict=True)]

    leaks = [sample for group in same for sample in _crossing_pairs(group, entries)]
    return [
        *finding(
            "leak-bytes",
            "problem",
            "images are in two splits (same bytes): the measure of the model would be false",
            "take the images that are in two splits out of one of them",
            named(leaks),
        ),
        *finding(
            "leak-look",
            "warning",
            "near-copies in two splits (the same image saved again, or the same scene)",
            "look at the near-copies in two splits, and take those that are one image out of train",
            named([sample for sample in near if crossing(*sample)]),
        ),
        *finding(
            "duplicate-bytes",
            "warning",
            "images occur twice in a split (same bytes)",
            "join the captions of copies under one image: two copies in a batch are false negatives",
            named([sample for sample in samples if not crossing(*sample)]),
        ),
        *finding(
            "duplicate-look",
            "info",
            "near-copies within a split (the same image saved again, or the same scene)",
            "",
            named([sample for sample in near if not crossing(*sample)]),
        ),
    ]


def _crossing_pairs(group: Sequence[int], entries: Sequence[Entry]) -> list[tuple[int, int]]:
    """The first of a group with the first in each other split."""
    first_in = {entries[index].split: index for index in reversed(group)}
    home, *others = sorted(first_in.values())
    return [(home, other) for other in others]


def same_bytes(facts: Sequence[ImageFacts]) -> Iterator[list[int]]:
    """Groups of images with the same bytes."""
    groups: dict[bytes, list[int]] = defaultdict(list)
    for index, fact in enumerate(facts):
        if fact.digest:
            groups[fact.digest].append(index)
    return (group for group in groups.values() if len(group) > 1)


def same_look(facts: Sequence[ImageFacts]) -> Iterator[tuple[int, int]]:
    """Pairs (i < j) that look alike, whatever their size and format."""
    usable = [i for i, fact in enumerate(facts) if fact.look and fact.contrast >= MIN_CONTRAST]
    if len(usable) < 2:
        return
    looks = np.frombuffer(b"".join(facts[i].look for i in usable), np.uint8).reshape(len(usable), -1)
    side = THUMB_SIDE
    thumbs = np.frombuffer(b"".join(facts[i].thumb for i in usable), np.uint8).reshape(-1, side, side)
    for i, others in _candidates(looks):
        grey, detail = _unit(thumbs[[i, *others]])
        alike = (grey[1:] @ grey[0] >= MIN_CORRELATION) & (detail[1:] @ detail[0] >= MIN_DETAIL_CORRELATION)
        for j in others[alike]:
            yield usable[i], usable[int(j)]


def _candidates(looks: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """(i, those after i within MAX_BITS of it)."""
    signs = np.unpackbits(looks, axis=1).astype(np.float32) * 2 - 1
    # Bits that agree minus bits that differ.
    enough = _BITS - 2 * MAX_BITS
    if len(looks) <= MAX_ALL_PAIRS:
        for start in range(0, len(looks), _CHUNK):
            agree = signs[start : start + _CHUNK] @ signs.T
            rows, columns = np.nonzero(agree >= enough)
            for row in np.unique(rows):
                after = columns[(rows == row) & (columns > start + row)]
                if len(after):
                    yield start + int(row), after
        return
    partners: dict[int, set[int]] = defaultdict(set)
    for band in looks.copy().view(np.uint16).T:
        order = np.argsort(band, kind="stable")
        for bucket in np.split(order, np.nonzero(np.diff(band[order]))[0] + 1):
            if 1 < len(bucket) <= _MAX_BUCKET:
                rows, columns = np.nonzero(signs[bucket] @ signs[bucket].T >= enough)
                for a, b in zip(bucket[rows], bucket[columns], strict=True):
                    if a < b:
                        partners[int(a)].add(int(b))
    for i in sorted(partners):
        yield i, np.array(sorted(partners[i]))


def _unit(thumbs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Thumbnails as unit vectors: as they are, and what is left without the wide shades (sky, fog)."""
    grey = thumbs.astype(np.float32)
    side = grey.shape[1]
    padded = np.pad(grey, ((0, 0), (2, 2), (2, 2)), mode="edge")
    shades = sum(padded[:, y : y + side, x : x + side] for y in range(5) for x in range(5)) / 25
    return _normalised(grey - grey.mean(axis=(1, 2), keepdims=True)), _normalised(grey - shades)


def _normalised(values: np.ndarray) -> np.ndarray:
    flat = values.reshape(len(values), -1)
    return flat / np.maximum(np.linalg.norm(flat, axis=1, keepdims=True), 1e-6)


FAULTS = {
    "missing": ("images are missing", "put the missing images where the data says they are, or remove their rows"),
    "empty": ("image files are empty (0 bytes)", "copy the empty files again, or remove their rows"),
    "truncated": ("images are cut short", "copy or download the truncated images again"),
    "not-a-image": ("files are not images", "convert them to JPEG or PNG, or remove their rows"),
    "no-decoder": ("HEIC images need a library to be read", "pip install pi-heif, or save them as JPEG"),
    "too-large": ("images are too large to decode safely", "make the images with absurd sizes smaller"),
    "broken": ("images cannot be decoded", "save the broken images again, or remove their rows"),
}
SKIPPED: dict[str, tuple[Severity, str, str]] = {
    "empty-caption": (
        "warning",
        "rows have no caption and are left out",
        "write the missing captions, or remove the rows",
    ),
    "no-image": ("warning", "rows name no usable image and are left out", "mend the rows that name no image"),
    "split-conflict": ("problem", "rows put an image in two splits", "give each image one split"),
    "unsafe-member": ("warning", "members of shards have unsafe names and are left out", "write the shards again"),
    "shard": ("problem", "faults in shards", "copy or write the damaged shards again"),
    "row": ("warning", "rows could not be read and are left out", "mend the rows that could not be read"),
}
TRAITS = ("CMYK", "16-bit", "palette", "alpha", "animated", "grey")
FLAT_CONTRAST = 2.0
MIN_SIDE = 16
MAX_ASPECT = 8.0
# A run stops above this share of bad images.
BAD_SHARE = 0.10


def check_skipped(problems: Sequence[Problem]) -> list[Finding]:
    """What the source could not use."""
    found = []
    for kind, (severity, message, remedy) in SKIPPED.items():
        places = [str(p) for p in problems if p.kind == kind or (kind == "row" and p.kind not in SKIPPED)]
        found += finding(f"skipped-{kind}", severity, message, remedy, places)
    return found


def check_images(
    entries: Sequence[Entry], facts: Sequence[ImageFacts], places: Places, image_size: int | None
) -> list[Finding]:
    """Faults, wrong endings, absurd sizes, flat images, and what will be converted."""
    both = list(zip(entries, facts, strict=True))
    found: list[Finding] = []
    bad = [(entry, fact) for entry, fact in both if fact.fault]
    if len(bad) > BAD_SHARE * len(both):
        what = f"of {len(both):,} images cannot be used: training stops above {BAD_SHARE:.0%}"
        found += [Finding("too-many-bad", "problem", len(bad), what, "")]
    for fault, (message, remedy) in FAULTS.items():
        named = [f"{places.image(entry)}: {fact.reason}" for entry, fact in bad if fact.fault == fault]
        found += finding(fault, "problem", f"{message} and will be skipped", remedy, named)
    good = [(entry, fact) for entry, fact in both if not fact.fault]

    def pick(code: str, severity: Severity, message: str, remedy: str, chosen: Sequence[tuple[Entry, str]]) -> None:
        found.extend(finding(code, severity, message, remedy, [f"{places.image(e)}{text}" for e, text in chosen]))

    pick(
        *("wrong-extension", "warning", "images are of another format than their name says (read all the same)"),
        "rename them: other tools may refuse them",
        [(entry, f": is {fact.format}") for entry, fact in good if fact.wrong_suffix],
    )
    pick(
        *(
            "absurd-size",
            "warning",
            f"images are under {MIN_SIDE} px or longer than {MAX_ASPECT:.0f} times their width",
        ),
        "look at the images of absurd size: icons and strips teach little",
        [(entry, f": {fact.width} x {fact.height}") for entry, fact in good if _absurd(fact)],
    )
    pick(
        *("near-empty", "warning", "images are nearly one colour"),
        "remove the images that show nothing",
        [(entry, "") for entry, fact in good if fact.contrast < FLAT_CONTRAST],
    )
    if image_size:
        small = [(e, f": {f.width} x {f.height}") for e, f in good if min(f.width, f.height) < image_size]
        pick("small", "info", f"images have a side under {image_size} px and will be enlarged", "", small)
    for trait in TRAITS:
        converted = [(entry, "") for entry, fact in good if trait in fact.traits]
        what = "first frame taken" if trait == "animated" else "converted to RGB"
        pick(trait.lower(), "info", f"images are {trait}: {what}", "", converted)
    return found


def _absurd(fact: ImageFacts) -> bool:
    short, long = sorted((fact.width, fact.height))
    return short < MIN_SIDE or long > MAX_ASPECT * short


def image_facts(facts: Sequence[ImageFacts]) -> dict[str, Any]:
    """Formats and sizes, for the head of the report."""
    good = [fact for fact in facts if not fact.fault]
    if not good:
        return {}
    sides = sorted(min(fact.width, fact.height) for fact in good)
    formats = Counter(fact.format or "drawn" for fact in good)
    return {
        "formats": dict(formats.most_common()),
        "short_side": {"min": sides[0], "median": sides[len(sides) // 2], "max": sides[-1]},
    }


Progress = Callable[[int, int], None]
_scan_CHUNK = 32


def scan(refs: Sequence[ImageRef], workers: int = 2, progress: Progress | None = None) -> list[ImageFacts]:
    """Facts of each image, in order; `progress` is told (done, total).

    Threads, which start nothing and pickle nothing. Medians of 5 rounds on 2 cores, while other jobs held
    one of them, so that a gain of the second worker could not show: 8,000 JPEG of 112 px took 2.7 s by
    2 threads, 2.9 s in line, 3.5 s by 2 spawned processes; 180 JPEG of 7 megapixels 1.9, 1.9 and 2.4 s.
    """
    chunks = [refs[start : start + _scan_CHUNK] for start in range(0, len(refs), _scan_CHUNK)]
    facts: list[ImageFacts] = []
    # Pillow warns of odd metadata image by image; what matters of it is in the facts.
    with warnings.catch_warnings(), ThreadPoolExecutor(max(1, workers)) as pool:
        warnings.simplefilter("ignore")
        for part in pool.map(_inspect_all, chunks):
            facts.extend(part)
            if progress:
                progress(len(facts), len(refs))
    return facts


def _inspect_all(refs: Sequence[ImageRef]) -> list[ImageFacts]:
    return [inspect(ref) for ref in refs]


def exists(ref: ImageRef) -> ImageFacts:
    """Without decoding: whether the file is there and has bytes (of a shard, whether the shard has)."""
    path = getattr(ref, "path", None)
    if not isinstance(path, str):
        return ImageFacts()
    try:
        size = os.stat(path).st_size
    except (OSError, ValueError):
        return ImageFacts(fault="missing", reason="the file is missing")
    return ImageFacts() if size else ImageFacts(fault="empty", reason="the file is empty (0 bytes)")
