"""The synthetic set as a source of samples: nothing on disk, images drawn when opened."""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from itertools import product
from pathlib import Path

import numpy as np
from PIL import Image

from m1clip.data.synthetic.captions import captions
from m1clip.data.synthetic.drawing import VERSION, check_size, draw
from m1clip.data.synthetic.negatives import negatives
from m1clip.data.synthetic.scene import (
    AXES,
    COLOUR_NAMES,
    COUNTS,
    IMAGE,
    KIND_NAMES,
    POSITIONS,
    SCENES,
    SIZES,
    TIMES,
    Scene,
    Thing,
    derive,
    generator,
)
from m1clip.data.types import Sample
from m1clip.errors import UserError

SPLITS = ("train", "val", "test")
Look = tuple[str, str]  # kind and colour


def split_of(kind: str, colour: str) -> str:
    """The split that a (kind, colour) sample belongs to; val and test samples are never seen in train.

    Every second kind gives two colours to val, the others two to test, and each colour gives three kinds to
    both: two, because with one the kind alone would give the colour away. No seed enters, so that sets made
    with two seeds cannot leak into each other.
    """
    place, test = divmod(KIND_NAMES.index(kind), 2)
    if (place - COLOUR_NAMES.index(colour)) % 4:
        return "train"
    return "test" if test else "val"


@cache
def looks(split: str) -> tuple[Look, ...]:
    """The (kind, colour) samples of a split."""
    if split not in SPLITS:
        raise UserError(f"the synthetic set has no split {split!r}; it has {', '.join(SPLITS)}")
    return tuple(look for look in product(KIND_NAMES, COLOUR_NAMES) if split_of(*look) == split)


@cache
def _couples(split: str) -> tuple[tuple[Look, Look], ...]:
    """Ordered samples of looks that may share an image: one of the split, the other of train."""
    own, train = looks(split), looks("train")
    ordered = list(product(own, train))
    if split != "train":
        ordered += [(right, left) for left, right in ordered]
    return tuple((a, b) for a, b in ordered if a[0] != b[0] and a[1] != b[1])


@cache
def _thing(look: Look, count: int, size: str, position: str) -> Thing:
    return Thing(*look, count, size, position)


def _radices(split: str, things: int) -> tuple[int, ...]:
    amount = (len(COUNTS), len(SIZES))
    if things == 1:
        return (len(looks(split)), *amount, len(POSITIONS), len(TIMES))
    return (len(_couples(split)), *amount, *amount, len(AXES), len(TIMES))


def scenes_available(split: str, things: int) -> int:
    """How many distinct scenes with one (or two) things a split can have."""
    return int(np.prod(_radices(split, things)))


def _single(split: str, digits: list[int]) -> Scene:
    look, count, size, position, time = digits
    return Scene((_thing(looks(split)[look], COUNTS[count], SIZES[size], POSITIONS[position]),), TIMES[time])


def _double(split: str, digits: list[int]) -> Scene:
    couple, count1, size1, count2, size2, axis, time = digits
    (look1, look2), (position1, position2) = _couples(split)[couple], AXES[axis]
    first = _thing(look1, COUNTS[count1], SIZES[size1], position1)
    return Scene((first, _thing(look2, COUNTS[count2], SIZES[size2], position2)), TIMES[time])


def sample_scenes(split: str, count: int, seed: int, two_share: float = 0.5) -> list[Scene]:
    """`count` different scenes of a split, about `two_share` of them with two things."""
    singles, doubles = scenes_available(split, 1), scenes_available(split, 2)
    if not 0 <= count <= singles + doubles:
        raise UserError(f"{count} {split} scenes asked for; there are {singles + doubles:,} different ones")
    if not 0 <= two_share <= 1:
        raise UserError(f"two_share is a share between 0 and 1, not {two_share}")
    if (two_share == 0 and count > singles) or (two_share == 1 and count > doubles):
        raise UserError(f"{count} {split} scenes asked for with two_share {two_share}: choose a share between")
    wanted = min(round(count * (1 - two_share)), singles)
    wanted = max(wanted, count - doubles)
    rng = generator(SCENES, SPLITS.index(split), seed)
    scenes: list[Scene] = []
    for things, number, make in ((1, wanted, _single), (2, count - wanted, _double)):
        chosen = rng.choice(scenes_available(split, things), size=number, replace=False)
        digits = np.stack(np.unravel_index(chosen, _radices(split, things)), axis=1).tolist()
        scenes += [make(split, row) for row in digits]
    return [scenes[i] for i in rng.permutation(count)]


@dataclass(frozen=True, slots=True)
class SyntheticImage:
    """An image not yet drawn."""

    scene: Scene
    size: int
    seed: int
    name: str

    def open(self, want: int | None = None) -> Image.Image:
        """Draw it; `want` changes nothing, because a drawn image has no cheaper small form."""
        return Image.fromarray(draw(self.scene, self.size, self.seed))

    def read(self) -> bytes:
        """The image as PNG."""
        stream = io.BytesIO()
        self.open().save(stream, "PNG")
        return stream.getvalue()

    def stamp(self) -> str:
        """All that decides the pixels: the generator's version, the attributes, the size, the seed."""
        things = ";".join(f"{t.kind},{t.colour},{t.count},{t.size},{t.position}" for t in self.scene.things)
        return f"synthetic-{VERSION}|{things}|{self.scene.time}|{self.size}|{self.seed}"

    def __str__(self) -> str:
        return f"synthetic image {self.name}"


class SyntheticSource:
    """Drawn scenes with captions; val and test show samples of kind and colour that train never does."""

    def __init__(
        self,
        image_size: int,
        train: int = 8000,
        val: int = 500,
        test: int = 500,
        seed: int = 0,
        captions_per_image: int = 5,
        two_share: float = 0.5,
    ) -> None:
        check_size(image_size)
        if seed < 0:
            raise UserError(f"a seed is a whole number from 0 up, not {seed}")
        if captions_per_image < 1:
            raise UserError(f"an image needs at least one caption, not {captions_per_image}")
        self.image_size = image_size
        self.seed = seed
        self.captions_per_image = captions_per_image
        self._scenes = {
            split: sample_scenes(split, count, seed, two_share)
            for split, count in zip(SPLITS, (train, val, test), strict=True)
        }
        self._pairs: dict[str, list[Sample]] = {}

    def splits(self) -> tuple[str, ...]:
        """The splits that hold a sample."""
        return tuple(split for split in SPLITS if self._scenes[split])

    def samples(self, split: str) -> Sequence[Sample]:
        """All samples of a split; made once, then the same list."""
        if split not in self._scenes:
            raise UserError(f"the synthetic set has no split {split!r}; it has {', '.join(SPLITS)}")
        if split not in self._pairs:
            self._pairs[split] = [self._pair(split, i, s) for i, s in enumerate(self._scenes[split])]
        return self._pairs[split]

    def scene_of(self, pair_id: str) -> Scene:
        """The attributes behind a sample's id."""
        split, _, number = pair_id.rpartition("-")
        try:
            return self._scenes[split][int(number)]
        except (KeyError, ValueError, IndexError):
            raise UserError(f"the synthetic set has no sample {pair_id!r}") from None

    def _pair(self, split: str, index: int, scene: Scene) -> Sample:
        name = f"{split}-{index:06d}"
        seed = derive(IMAGE, self.seed, SPLITS.index(split), index)
        image = SyntheticImage(scene, self.image_size, seed, name)
        return Sample(image, captions(scene, self.captions_per_image, seed), name)


@dataclass(frozen=True, slots=True)
class Written:
    """What a folder got: images of each split, captions, negatives."""

    folder: Path
    images: dict[str, int]
    captions: int
    negatives: int

    def __str__(self) -> str:
        parts = ", ".join(f"{split} {number:,}" for split, number in self.images.items())
        total = f"{sum(self.images.values()):,} images ({parts})"
        return f"{self.folder}: {total}, {self.captions:,} captions, {self.negatives:,} negatives"


def shares(count: int) -> dict[str, int]:
    """80 / 10 / 10, at least one image each."""
    if count < 3:
        raise UserError(f"{count} images cannot fill train, val and test; ask for at least 3")
    held_out = max(1, round(count / 10))
    return {"train": count - 2 * held_out, "val": held_out, "test": held_out}


def _write_csv(path: Path, header: Sequence[str], rows: Iterable[Sequence[object]]) -> int:
    """Write under another name first, so that a file with the right name is always whole."""
    partial = path.with_name(path.name + ".partial")
    number = 0
    with partial.open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(header)
        for number, row in enumerate(rows, start=1):  # noqa: B007
            table.writerow(row)
    os.replace(partial, path)
    return number


def _empty_folder(folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file; name a new folder for the images")
    if folder.is_dir() and any(folder.iterdir()):
        raise UserError(f"{folder} is not empty; name a new folder, or empty this one first")
    (folder / "images").mkdir(parents=True)


def write_folder(
    folder: str | Path,
    count: int,
    image_size: int = 224,
    seed: int = 0,
    captions_per_image: int = 5,
    two_share: float = 0.5,
    progress: Callable[[int, int], None] | None = None,
) -> Written:
    """Write `count` images: images/, scenes.jsonl, negatives.csv and, when all is there, captions.csv.

    `progress` is called with (images done, count) after each image.
    """
    folder = Path(folder)
    split_counts = shares(count)
    source = SyntheticSource(
        image_size, **split_counts, seed=seed, captions_per_image=captions_per_image, two_share=two_share
    )
    _empty_folder(folder)
    entries = [(split, sample) for split in source.splits() for sample in source.samples(split)]
    names = {sample.id: f"images/{sample.id}.png" for _, sample in entries}
    with (folder / "scenes.jsonl").open("w", encoding="utf-8", newline="\n") as scenes:
        for done, (split, sample) in enumerate(entries, start=1):
            sample.image.open().save(folder / names[sample.id])
            facts = {"image": names[sample.id], "split": split, "generator": VERSION}
            scenes.write(json.dumps(facts | asdict(source.scene_of(sample.id))) + "\n")
            if progress is not None:
                progress(done, count)
    wrong = [
        (names[sample.id], negative.caption, negative.difficulty, " ".join(negative.changed), negative.truth)
        for _, sample in entries
        if isinstance(sample.image, SyntheticImage)
        for negative in negatives(sample.image.scene, sample.image.seed)
    ]
    rows = [
        (names[sample.id], caption, split, index)
        for split, sample in entries
        for index, caption in enumerate(sample.captions)
    ]
    negative_count = _write_csv(folder / "negatives.csv", ("image", "caption", "difficulty", "changed", "truth"), wrong)
    caption_count = _write_csv(folder / "captions.csv", ("image", "caption", "split", "caption_index"), rows)
    return Written(folder, split_counts, caption_count, negative_count)
