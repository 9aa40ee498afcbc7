"""Findings about images: what cannot be decoded, what is converted, and duplicates."""

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
from m1clip.data.types import ImageRef, Problem, Sample

Progress = Callable[[int, int], None]  # (done, total)
FAULTS = {  # kinds of BadImage
    "missing": ("missing images", "restore the missing images, or remove their rows"),
    "empty": ("empty image files (0 bytes)", "copy the empty files again, or remove their rows"),
    "truncated": ("truncated images", "copy or download the truncated images again"),
    "not-an-image": ("files that are not images", "convert them to JPEG or PNG, or remove their rows"),
    "no-decoder": ("HEIC images without a decoder", "pip install pi-heif, or save them as JPEG"),
    "too-large": ("images too large to decode safely", "reduce the size of the oversized images"),
    "broken": ("images that cannot be decoded", "save the broken images again, or remove their rows"),
}
SKIPPED: dict[str, tuple[Severity, str, str]] = {  # kinds of Problem
    "empty-caption": ("warning", "rows without a caption, skipped", "write the missing captions, or remove the rows"),
    "no-image": ("warning", "rows without a usable image, skipped", "fix the rows without an image"),
    "split-conflict": ("problem", "rows that put an image in a second split", "give each image one split"),
    "unsafe-member": ("warning", "files in shards with unsafe names, skipped", "write the shards again"),
    "shard": ("problem", "damaged shards", "copy or write the damaged shards again"),
    "row": ("warning", "unreadable rows, skipped", "fix the unreadable rows"),
}
MAX_BAD_FRACTION = 0.10  # a run stops above it
MIN_SIDE, MAX_ASPECT = 16, 8
_SUFFIX_FORMAT = {
    **dict.fromkeys((".jpg", ".jpeg", ".jpe", ".jfif"), "JPEG"),
    **dict.fromkeys((".tif", ".tiff"), "TIFF"),
    **dict.fromkeys((".bmp", ".dib"), "BMP"),
    **{".png": "PNG", ".webp": "WEBP", ".gif": "GIF"},
}
_DECODED_SIDE = 36  # enough for the hash and the thumbnail; JPEG decodes at a fraction of its size
_THUMB_SIDE = 16
_CHUNK = 32  # images per task of a thread
# Chosen by eye on Flickr8k: the 7 pairs within these limits are one image or one scene; looser limits add
# pairs of sky and fog. Of 1,000 of its images, copies that were re-encoded, resized, brightened or made grey
# were all found; of those cropped by 8% on each side 228, of mirrored ones 5.
MAX_BITS = 32  # of 128 that differ
MIN_CORRELATION = 0.8
MIN_DETAIL_CORRELATION = 0.55
MIN_CONTRAST = 6.0  # flat images all look alike
NEAR_EMPTY_CONTRAST = 2.0
MAX_ALL_PAIRS = 20_000  # above, only images that share 16 bits of the hash in one place are compared
_MAX_BUCKET = 500


@dataclass(frozen=True, slots=True)
class Entry:
    """A sample with its split; `origin` gives the file and row of a caption."""

    sample: Sample
    split: str
    origin: Callable[[str, int], str]

    def image_name(self) -> str:
        """a/b.jpg (captions.csv row 12)."""
        name = str(self.sample.image)
        row = self.origin(self.sample.id, 0)
        return name if row in name else f"{name} ({row})"

    def caption_name(self, number: int) -> str:
        """captions.csv row 12: the caption, shortened."""
        text = self.sample.captions[number]
        where = self.origin(self.sample.id, number)
        return one_line(f"{where}: {text if len(text) <= 80 else text[:77] + '...'}")


@dataclass(frozen=True, slots=True)
class ImageFacts:
    """`fault` is a kind of BadImage; the other fields are set only where it is None."""

    fault: str | None = None
    reason: str = ""
    format: str = ""
    mode: str = ""
    width: int = 0
    height: int = 0
    wrong_suffix: bool = False
    digest: bytes = b""
    look: bytes = b""  # hash of how it looks
    thumb: bytes = b""
    contrast: float = 0.0

    def __str__(self) -> str:
        return f"{self.width} x {self.height} {self.format} {self.mode}"


Check = tuple[str, Severity, str, str, Callable[[ImageFacts], bool]]  # code, severity, message, remedy, test
CHECKS: tuple[Check, ...] = (
    (
        "wrong-suffix",
        "warning",
        "images with the suffix of another format (still read)",
        "rename them: other tools may fail",
        lambda fact: fact.wrong_suffix,
    ),
    (
        "extreme-size",
        "warning",
        f"images under {MIN_SIDE} px or more than {MAX_ASPECT} times as long as wide",
        "check images of extreme size: icons and strips contribute little",
        lambda fact: min(fact.width, fact.height) < max(MIN_SIDE, max(fact.width, fact.height) / MAX_ASPECT),
    ),
    (
        "near-empty",
        "warning",
        "images of nearly a single color",
        "remove blank images",
        lambda fact: fact.contrast < NEAR_EMPTY_CONTRAST,
    ),
    ("converted", "info", "images that are converted to 8-bit RGB", "", lambda fact: fact.mode != "RGB"),
)


def inspect(ref: ImageRef) -> ImageFacts:
    """Read, hash and decode one image."""
    where = str(ref)
    try:
        data = ref.read()
        with opened(data, where) as header:
            kind, mode, (width, height) = header.format or "", header.mode, header.size
        grey = decode(data, _DECODED_SIDE, where).convert("L")
    except BadImage as error:
        return ImageFacts(fault=error.kind, reason=error.reason)
    wrong_suffix = _SUFFIX_FORMAT.get(os.path.splitext(where)[1].lower(), kind) != kind
    thumb = np.asarray(grey.resize((_THUMB_SIDE, _THUMB_SIDE), Image.Resampling.BOX))
    digest, contrast = blake2b(data, digest_size=16).digest(), float(thumb.astype(np.float32).std())
    facts = (kind, mode, width, height, wrong_suffix, digest, _look_hash(grey), thumb.tobytes(), contrast)
    return ImageFacts(None, "", *facts)


def _look_hash(grey: Image.Image) -> bytes:
    """dHash of 128 bits: whether brightness grows to the right and downwards, on a grid of 8 x 8."""
    small = np.asarray(grey.resize((9, 9), Image.Resampling.BOX), np.int16)
    right, down = small[:8, 1:] > small[:8, :8], small[1:, :8] > small[:8, :8]
    return np.packbits(np.concatenate([right.ravel(), down.ravel()])).tobytes()


def inspect_all(refs: Sequence[ImageRef], workers: int = 2, progress: Progress | None = None) -> list[ImageFacts]:
    """Facts of each image, in order. Threads: decoding releases the GIL, and processes were slower."""
    facts: list[ImageFacts] = []
    chunks = [refs[start : start + _CHUNK] for start in range(0, len(refs), _CHUNK)]
    # Pillow warns about odd metadata of each image.
    with warnings.catch_warnings(), ThreadPoolExecutor(max(1, workers)) as pool:
        warnings.simplefilter("ignore")
        for part in pool.map(lambda chunk: [inspect(ref) for ref in chunk], chunks):
            facts += part
            if progress:
                progress(len(facts), len(refs))
    return facts


def check_skipped(problems: Sequence[Problem]) -> list[Finding]:
    """What the source could not use."""
    found = []
    for kind, (severity, message, remedy) in SKIPPED.items():
        places = [str(problem) for problem in problems if problem.kind == kind]
        found += finding(f"skipped-{kind}", severity, message, remedy, places)
    return found


def check_images(entries: Sequence[Entry], facts: Sequence[ImageFacts], image_size: int | None) -> list[Finding]:
    """Broken images, wrong suffixes, extreme sizes, empty images, and conversions."""
    both = list(zip(entries, facts, strict=True))
    bad = [(entry, fact) for entry, fact in both if fact.fault]
    good = [(entry, fact) for entry, fact in both if not fact.fault]
    found: list[Finding] = []
    if len(bad) > MAX_BAD_FRACTION * len(both):
        message = f"unusable images among {len(both):,} (training stops above {MAX_BAD_FRACTION:.0%})"
        found.append(Finding("too-many-bad", "problem", len(bad), message))
    for fault, (message, remedy) in FAULTS.items():
        places = [f"{entry.image_name()}: {fact.reason}" for entry, fact in bad if fact.fault == fault]
        found += finding(fault, "problem", f"{message}, skipped", remedy, places)
    checks = CHECKS
    if image_size:
        message = f"images with a side under {image_size} px, enlarged"
        checks = (*CHECKS, ("small", "info", message, "", lambda fact: min(fact.width, fact.height) < image_size))
    for code, severity, message, remedy, applies in checks:
        places = [f"{entry.image_name()}: {fact}" for entry, fact in good if applies(fact)]
        found += finding(code, severity, message, remedy, places)
    return found


def image_facts(facts: Sequence[ImageFacts]) -> dict[str, Any]:
    """Formats and sizes."""
    good = [fact for fact in facts if not fact.fault]
    if not good:
        return {}
    sides = sorted(min(fact.width, fact.height) for fact in good)
    return {
        "formats": dict(Counter(fact.format for fact in good).most_common()),
        "short_side": {"min": sides[0], "median": sides[len(sides) // 2], "max": sides[-1]},
    }


def find_duplicates(entries: Sequence[Entry], facts: Sequence[ImageFacts]) -> list[Finding]:
    """Identical files and near-duplicates, within a split and between splits."""
    first: dict[bytes, int] = {}
    same = [(first.setdefault(fact.digest, i), i) for i, fact in enumerate(facts) if fact.digest]
    same = [(i, j) for i, j in same if i != j]
    near = [(i, j) for i, j in near_duplicates(facts) if facts[i].digest != facts[j].digest]

    def places(pairs: Sequence[tuple[int, int]], between: bool) -> list[str]:
        return [
            " = ".join(f"{entry.split} {entry.image_name()}" for entry in (entries[i], entries[j]))
            for i, j in pairs
            if (entries[i].split != entries[j].split) == between
        ]

    saved_again = "(the same image saved again, or the same scene)"
    leak = "identical images in two splits (scores would be too high)"
    leak_remedy = "remove the images that are in two splits from one of them"
    near_remedy = "check the near-duplicates in two splits, and remove those of the same image from train"
    join = "join the captions of copies under one image: two copies in a batch are false negatives"
    return [
        *finding("leak-identical", "problem", leak, leak_remedy, places(same, True)),
        *finding(
            "leak-near", "warning", f"near-duplicates in two splits {saved_again}", near_remedy, places(near, True)
        ),
        *finding("duplicate-identical", "warning", "identical images within a split", join, places(same, False)),
        *finding("duplicate-near", "info", f"near-duplicates within a split {saved_again}", "", places(near, False)),
    ]


def near_duplicates(facts: Sequence[ImageFacts]) -> Iterator[tuple[int, int]]:
    """Pairs (i < j) that look alike, regardless of size and format."""
    usable = [i for i, fact in enumerate(facts) if fact.look and fact.contrast >= MIN_CONTRAST]
    if len(usable) < 2:
        return
    looks = np.frombuffer(b"".join(facts[i].look for i in usable), np.uint8).reshape(len(usable), -1)
    thumbs = np.frombuffer(b"".join(facts[i].thumb for i in usable), np.uint8)
    thumbs = thumbs.reshape(-1, _THUMB_SIDE, _THUMB_SIDE)
    partners: dict[int, list[int]] = defaultdict(list)
    for i, j in _similar_hashes(looks):
        partners[i].append(j)
    for i, others in sorted(partners.items()):
        grey, detail = _unit_vectors(thumbs[[i, *sorted(others)]])
        alike = (grey[1:] @ grey[0] >= MIN_CORRELATION) & (detail[1:] @ detail[0] >= MIN_DETAIL_CORRELATION)
        yield from ((usable[i], usable[j]) for j, holds in zip(sorted(others), alike, strict=True) if holds)


def _similar_hashes(looks: np.ndarray) -> set[tuple[int, int]]:
    """Pairs (i < j) whose hashes differ in at most MAX_BITS."""
    signs = np.unpackbits(looks, axis=1).astype(np.float32) * 2 - 1
    everything = np.arange(len(looks))
    if len(looks) <= MAX_ALL_PAIRS:
        blocks = [(everything[start : start + 512], everything) for start in range(0, len(looks), 512)]
    else:
        orders = [(band, np.argsort(band, kind="stable")) for band in looks.copy().view(np.uint16).T]
        parts = [np.split(order, np.nonzero(np.diff(band[order]))[0] + 1) for band, order in orders]
        blocks = [(part, part) for bucket in parts for part in bucket if 1 < len(part) <= _MAX_BUCKET]
    found: set[tuple[int, int]] = set()
    for rows, columns in blocks:
        # Bits that agree minus bits that differ.
        i, j = np.nonzero(signs[rows] @ signs[columns].T >= signs.shape[1] - 2 * MAX_BITS)
        first, second = rows[i], columns[j]
        found.update(zip(first[first < second].tolist(), second[first < second].tolist(), strict=True))
    return found


def _unit_vectors(thumbs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Thumbnails as unit vectors: as they are, and without the broad shades of sky or fog."""
    grey = thumbs.astype(np.float32)
    side = grey.shape[1]
    padded = np.pad(grey, ((0, 0), (2, 2), (2, 2)), mode="edge")
    shades = sum(padded[:, y : y + side, x : x + side] for y in range(5) for x in range(5)) / 25
    pair = (grey - grey.mean(axis=(1, 2), keepdims=True)).reshape(len(grey), -1), (grey - shades).reshape(len(grey), -1)
    plain, detail = (values / np.maximum(np.linalg.norm(values, axis=1, keepdims=True), 1e-6) for values in pair)
    return plain, detail
