"""Which split an image belongs to: what the data says, else a hash of the seed and the image's id."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from hashlib import blake2b

ORDER = ("train", "val", "test")
_NAMES = {
    "train": ("train", "training", "trn", "restval"),
    "val": ("val", "valid", "validation", "dev", "eval"),
    "test": ("test", "testing", "tst"),
}
_KNOWN = {name: split for split, names in _NAMES.items() for name in names}
_IN_FILE_NAME = re.compile(r"(?:^|[^a-z])(" + "|".join(_KNOWN) + r")(?=[^a-z]|images|$)")


def normalise(name: str) -> str:
    """dev, valid, validation -> val; restval -> train; an unknown name stays as it is."""
    key = name.strip().lower()
    return _KNOWN.get(key, key)


def known(name: str) -> str | None:
    """The split a folder of this name holds, or None."""
    return _KNOWN.get(name.strip().lower())


def from_file_name(name: str) -> str | None:
    """captions_train2017.json -> train; val-00001.tar -> val; photos.csv -> None."""
    found = _IN_FILE_NAME.search(name.lower())
    return _KNOWN[found.group(1)] if found else None


def hash_unit(seed: int, text: str) -> float:
    """A number in [0, 1) that depends on the seed and the text alone."""
    digest = blake2b(f"{seed}:{text}".encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64


def assign(given: Mapping[str, str | None], seed: int, fractions: Sequence[float]) -> tuple[dict[str, str], list[str]]:
    """Split of each id, and what a person should know about how it was found."""
    _, val_fraction, test_fraction = fractions
    names = {name for name in given.values() if name}
    if not names:
        return _seeded(list(given), seed, val_fraction, test_fraction), []
    notes = []
    split_of = {id_: name or "train" for id_, name in given.items()}
    unsaid = sum(name is None for name in given.values())
    if unsaid:
        notes.append(f"{unsaid} images name no split, others do: they were put in train")
    if unknown := sorted(names - set(ORDER)):
        notes.append(f"splits not used in training: {', '.join(unknown[:5])}")
    train = [id_ for id_, name in split_of.items() if name == "train"]
    if train and "val" not in names and val_fraction > 0:
        carved = _seeded(train, seed, val_fraction, 0.0)
        split_of.update(carved)
        count = sum(name == "val" for name in carved.values())
        if count:
            notes.append(f"the data has no val split: {count} of {len(train)} train images were taken for it")
    return split_of, notes


def _seeded(ids: list[str], seed: int, val_fraction: float, test_fraction: float) -> dict[str, str]:
    place = {id_: hash_unit(seed, id_) for id_ in ids}
    split_of = {}
    for id_, unit in place.items():
        held_out = "val" if unit < val_fraction else "test" if unit < val_fraction + test_fraction else "train"
        split_of[id_] = held_out
    if val_fraction > 0 and len(ids) >= 10 and "val" not in split_of.values():
        split_of[min(ids, key=lambda id_: place[id_])] = "val"
    return split_of
