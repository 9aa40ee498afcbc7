"""Pictures that occur twice, by their bytes or by their look, and those that are in two splits."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

import numpy as np

from m1clip.data.lint.entries import Entry, Places
from m1clip.data.lint.pictures import THUMB_SIDE, PictureFacts
from m1clip.data.lint.report import Finding, finding

# Set by eye on Flickr8k: the 7 pairs within these limits are one picture or one scene; looser ones let in
# pairs of sky and fog. Of 1,000 of its pictures, copies saved again, resized, brightened or made grey were
# all found; of those cropped by 8% on each side 228, of mirrored ones 5.
MAX_BITS = 32
MIN_CORRELATION = 0.8
MIN_DETAIL_CORRELATION = 0.55
# A flat picture looks like every other flat picture.
MIN_CONTRAST = 6.0
# Above this all pairs take too long: only those that share 16 bits of the hash in one place are compared.
MAX_ALL_PAIRS = 20_000
_BITS = 128
_CHUNK = 512
_MAX_BUCKET = 500


def find_duplicates(entries: Sequence[Entry], facts: Sequence[PictureFacts], places: Places) -> list[Finding]:
    """Same bytes, near-copies, and leakage of both."""
    same = list(same_bytes(facts))
    exact = {index for group in same for index in group}
    near = [(i, j) for i, j in same_look(facts) if not (i in exact and facts[i].digest == facts[j].digest)]
    pairs = [(group[0], other) for group in same for other in group[1:]]

    def crossing(i: int, j: int) -> bool:
        return entries[i].split != entries[j].split

    def named(chosen: Sequence[tuple[int, int]]) -> list[str]:
        name = [
            f"{entry.split} {places.picture(entry)}"
            for entry in (entries[i] for pair in chosen for i in pair)
        ]
        return [f"{first} = {second}" for first, second in zip(name[::2], name[1::2], strict=True)]

    leaks = [pair for group in same for pair in _crossing_pairs(group, entries)]
    return [
        *finding(
            "leak-bytes",
            "problem",
            "pictures are in two splits (same bytes): the measure of the model would be false",
            "take the pictures that are in two splits out of one of them",
            named(leaks),
        ),
        *finding(
            "leak-look",
            "warning",
            "near-copies in two splits (the same picture saved again, or the same scene)",
            "look at the near-copies in two splits, and take those that are one picture out of train",
            named([pair for pair in near if crossing(*pair)]),
        ),
        *finding(
            "duplicate-bytes",
            "warning",
            "pictures occur twice in a split (same bytes)",
            "join the captions of copies under one picture: two copies in a batch are false negatives",
            named([pair for pair in pairs if not crossing(*pair)]),
        ),
        *finding(
            "duplicate-look",
            "info",
            "near-copies within a split (the same picture saved again, or the same scene)",
            "",
            named([pair for pair in near if not crossing(*pair)]),
        ),
    ]


def _crossing_pairs(group: Sequence[int], entries: Sequence[Entry]) -> list[tuple[int, int]]:
    """The first of a group with the first in each other split."""
    first_in = {entries[index].split: index for index in reversed(group)}
    home, *others = sorted(first_in.values())
    return [(home, other) for other in others]


def same_bytes(facts: Sequence[PictureFacts]) -> Iterator[list[int]]:
    """Groups of pictures with the same bytes."""
    groups: dict[bytes, list[int]] = defaultdict(list)
    for index, fact in enumerate(facts):
        if fact.digest:
            groups[fact.digest].append(index)
    return (group for group in groups.values() if len(group) > 1)


def same_look(facts: Sequence[PictureFacts]) -> Iterator[tuple[int, int]]:
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
