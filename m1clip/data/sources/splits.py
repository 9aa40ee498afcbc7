"""The split of each image: what the data names, else a hash of the image's id."""

import re
from collections.abc import Mapping
from hashlib import blake2b
from typing import Any

from m1clip.data.types import SPLITS
from m1clip.formatting import plural

# Of the images, for each of val and test. More of small data, where 5% would be too few to judge a
# model: SMALL_SPLIT images, but at most MAX_FRACTION.
HELD_OUT_FRACTION, MAX_FRACTION = 0.05, 0.1
SMALL_SPLIT = 20
MIN_HELD_OUT = 0.5  # images of a class by its fraction, from which at least one is held out
_NAMES_OF_SPLIT = {
    "train": ("train", "training", "trn", "restval"),
    "val": ("val", "valid", "validation", "dev", "eval"),
    "test": ("test", "testing", "tst"),
}
_SPLIT_OF_NAME = {name: split for split, names in _NAMES_OF_SPLIT.items() for name in names}
_IN_FILE_NAME = re.compile(r"(?:^|[^a-z])(" + "|".join(_SPLIT_OF_NAME) + r")(?=[^a-z]|images|$)")


def clean_text(text: str) -> str:
    """Single spaces, and a replacement for what UTF-8 cannot encode."""
    return " ".join(text.replace("\0", " ").encode("utf-8", "replace").decode("utf-8").split())


def from_value(value: Any) -> str | None:
    """dev, valid, validation -> val; restval -> train; other names stay.

    None where the value names none.
    """
    name = clean_text(value).lower() if isinstance(value, str) else ""
    return _SPLIT_OF_NAME.get(name, name) or None


def from_folder(name: str) -> str | None:
    """The split in a folder, or in a table (without its suffix), of this name, or None."""
    return _SPLIT_OF_NAME.get(name.lower())


def from_path(name: str) -> str | None:
    """train/cats/1.jpg -> train: the split of a relative path whose first folder is one,
    or None.
    """
    top, slash, _ = name.partition("/")
    return from_folder(top) if slash else None


def from_file_name(name: str) -> str | None:
    """captions_train2017.json -> train; val-00001.tar -> val; photos.csv -> None."""
    match = _IN_FILE_NAME.search(name.lower())
    return _SPLIT_OF_NAME[match.group(1)] if match else None


def hash_unit(text: str) -> float:
    """A number in [0, 1) that depends only on the text: validation images are the same for every
    training seed.
    """
    digest = blake2b(f"0:{text}".encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64


def assign(
    split_names: Mapping[str, str | None], class_of: Mapping[str, str] | None = None
) -> tuple[dict[str, str], list[str]]:
    """The split of each id, and notes for the user on how it was chosen.

    The same fractions of each class if given.
    """
    names = {name for name in split_names.values() if name}
    if not names:
        return _by_hash(list(split_names), ("val", "test"), class_of), []
    notes = []
    split_of = {id_: name or "train" for id_, name in split_names.items()}
    if unnamed := sum(name is None for name in split_names.values()):
        notes.append(
            f"{plural(unnamed, 'image')} without a split although others have one: assigned to"
            " train"
        )
    if unused := sorted(names - set(SPLITS)):
        notes.append(f"splits not used in training: {', '.join(unused[:5])}")
    train = [id_ for id_, name in split_of.items() if name == "train"]
    if train and "val" not in names:
        split_of |= _by_hash(train, ("val",), class_of)
        if count := sum(name == "val" for name in split_of.values()):
            moved = f"{count:,} of {plural(len(train), 'train image')}"
            notes.append(f"the data has no val split: {moved} moved there")
    return split_of, notes


def held_out_fraction(images: int) -> float:
    """The fraction of the images that goes to val, and to test: 0.05, or more of small data."""
    return max(HELD_OUT_FRACTION, min(MAX_FRACTION, SMALL_SPLIT / max(images, 1)))


def _by_hash(
    ids: list[str], held_out: tuple[str, ...], class_of: Mapping[str, str] | None
) -> dict[str, str]:
    """The split of each id: one of `held_out`, or train."""
    unit = {id_: hash_unit(id_) for id_ in ids}
    fraction = held_out_fraction(len(ids))
    if class_of is not None:
        split_of = _by_class(unit, fraction, held_out, class_of)
    elif fraction > HELD_OUT_FRACTION:
        count = min(SMALL_SPLIT, int(len(ids) * MAX_FRACTION))
        split_of = _by_rank(unit, count, held_out)
    else:
        split_of = {id_: _by_range(u, held_out) for id_, u in unit.items()}
    if len(ids) >= 10 and "val" not in split_of.values():
        split_of[min(ids, key=lambda id_: unit[id_])] = "val"
    return split_of


def _by_range(u: float, held_out: tuple[str, ...]) -> str:
    """The split whose range of hashes, the first ones, has `u`."""
    number = int(u / HELD_OUT_FRACTION)
    return held_out[number] if number < len(held_out) else "train"


def _by_rank(unit: Mapping[str, float], count: int, held_out: tuple[str, ...]) -> dict[str, str]:
    """Exactly `count` images for each split: chance would give small data too few or too many.

    Those in its range of hashes first, so that few images change their split when the data grows,
    and none goes from val to test or back. val is then filled up from the highest hashes, the other
    split from those after its range.
    """
    split_of = dict.fromkeys(unit, "train")
    for split in held_out:
        inside = [id_ for id_, u in unit.items() if _by_range(u, held_out) == split]
        inside.sort(key=lambda id_: unit[id_])
        others = [id_ for id_, u in unit.items() if _by_range(u, held_out) == "train"]
        others.sort(key=lambda id_: unit[id_], reverse=split == "val")
        free = [id_ for id_ in (*inside, *others) if split_of[id_] == "train"]
        split_of |= dict.fromkeys(free[:count], split)
    return split_of


def _by_class(
    unit: Mapping[str, float],
    fraction: float,
    held_out: tuple[str, ...],
    class_of: Mapping[str, str],
) -> dict[str, str]:
    """The same fractions of each class."""
    split_of = dict.fromkeys(unit, "train")
    members: dict[str, list[str]] = {}
    for id_ in unit:
        members.setdefault(class_of[id_], []).append(id_)
    for name, of_class in members.items():
        of_class.sort(key=lambda id_: (unit[id_], id_))
        done = 0
        for split in held_out:
            max_count = len(of_class) - 1 - done
            count = _count_of_class(name, split, len(of_class), fraction, max_count)
            split_of |= dict.fromkeys(of_class[done : done + count], split)
            done += count
    return split_of


def _count_of_class(name: str, split: str, images: int, fraction: float, max_count: int) -> int:
    """How many images of a class are held out for a split: at least one of ten.

    Train keeps at least one.

    A count between two integers is rounded up or down by a hash of the name: small classes add up
    to the fraction.
    """
    exact = images * fraction
    count = int(exact + hash_unit(f"{split}:{name}"))
    if exact >= MIN_HELD_OUT:
        count = max(1, count)
    return max(0, min(count, max_count))
