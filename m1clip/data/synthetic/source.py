"""The synthetic dataset: images drawn when they are opened, or written to a folder."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from itertools import product
from pathlib import Path

import numpy as np
from PIL import Image

from m1clip.data.synthetic import scene as scenes
from m1clip.data.synthetic.captions import captions
from m1clip.data.synthetic.drawing import VERSION, check_size, draw
from m1clip.data.synthetic.negatives import negatives
from m1clip.data.synthetic.scene import AXES, COLOUR_NAMES, COUNTS, KIND_NAMES, POSITIONS, SIZES, TIMES, Scene, Thing
from m1clip.data.types import Problem, Sample
from m1clip.errors import UserError
from m1clip.io import write_text

SPLITS = ("train", "val", "test")
Look = tuple[str, str]  # kind and colour


def split_of(kind: str, colour: str) -> str:
    """The split of a combination of kind and colour; train never shows those of val and test.

    Every second kind gives two colours to val, the others two to test: with one, the kind would determine the
    colour. Each colour gives three kinds to both. There is no seed, so sets of two seeds cannot leak into each other.
    """
    index, is_test = divmod(KIND_NAMES.index(kind), 2)
    if (index - COLOUR_NAMES.index(colour)) % 4:
        return "train"
    return "test" if is_test else "val"


@cache
def looks(split: str) -> tuple[Look, ...]:
    """The combinations of kind and colour of a split."""
    return tuple(look for look in product(KIND_NAMES, COLOUR_NAMES) if split_of(*look) == split)


@cache
def _couples(split: str) -> tuple[tuple[Look, Look], ...]:
    """Ordered pairs of looks that may share an image: one of the split, the other of train."""
    ordered = list(product(looks(split), looks("train")))
    if split != "train":
        ordered += [(right, left) for left, right in ordered]
    return tuple((a, b) for a, b in ordered if a[0] != b[0] and a[1] != b[1])


def _choices(split: str, things: int) -> tuple[int, ...]:
    """How many values each attribute of a scene has."""
    amount = (len(COUNTS), len(SIZES))
    if things == 1:
        return (len(looks(split)), *amount, len(POSITIONS), len(TIMES))
    return (len(_couples(split)), *amount, *amount, len(AXES), len(TIMES))


def scenes_available(split: str, things: int) -> int:
    """The number of different scenes with one or two things."""
    return int(np.prod(_choices(split, things)))


@cache
def _thing(look: Look, count: int, size: int, position: str) -> Thing:
    return Thing(*look, COUNTS[count], SIZES[size], position)


def _scene(split: str, index: list[int]) -> Scene:
    """The scene with these values of its attributes."""
    if len(index) == 5:
        look, count, size, position, time = index
        return Scene((_thing(looks(split)[look], count, size, POSITIONS[position]),), TIMES[time])
    couple, count1, size1, count2, size2, axis, time = index
    (look1, look2), (position1, position2) = _couples(split)[couple], AXES[axis]
    return Scene((_thing(look1, count1, size1, position1), _thing(look2, count2, size2, position2)), TIMES[time])


def sample_scenes(split: str, count: int, seed: int) -> list[Scene]:
    """`count` different scenes of a split, half of them with two things as far as there are enough."""
    singles, doubles = scenes_available(split, 1), scenes_available(split, 2)
    if count > singles + doubles:
        raise UserError(f"{count} {split} scenes requested; there are {singles + doubles:,} different ones")
    with_one = max(min(round(count / 2), singles), count - doubles)
    rng = scenes.generator(scenes.SCENES, SPLITS.index(split), seed)
    found: list[Scene] = []
    for things, number in ((1, with_one), (2, count - with_one)):
        chosen = rng.choice(scenes_available(split, things), size=number, replace=False)
        index = np.stack(np.unravel_index(chosen, _choices(split, things)), axis=1).tolist()
        found += [_scene(split, row) for row in index]
    return [found[i] for i in rng.permutation(count)]


@dataclass(frozen=True, slots=True)
class SyntheticImage:
    """An image that is drawn when it is opened."""

    scene: Scene
    size: int
    seed: int
    name: str

    def open(self, want: int | None = None) -> Image.Image:
        return Image.fromarray(draw(self.scene, self.size, self.seed))

    def read(self) -> bytes:
        stream = io.BytesIO()
        self.open().save(stream, "PNG")
        return stream.getvalue()

    def stamp(self) -> str:
        things = ";".join(f"{t.kind},{t.colour},{t.count},{t.size},{t.position}" for t in self.scene.things)
        return f"synthetic-{VERSION}|{things}|{self.scene.time}|{self.size}|{self.seed}"

    def __str__(self) -> str:
        return f"synthetic image {self.name}"


class SyntheticSource:
    """Scenes with captions; val and test show combinations of kind and colour that train never shows."""

    name = "synthetic"
    class_captions = False
    notes: tuple[str, ...] = ()
    problems: tuple[Problem, ...] = ()

    def __init__(
        self,
        image_size: int,
        train: int = 8000,
        val: int = 500,
        test: int = 500,
        seed: int = 0,
        captions_per_image: int = 5,
    ) -> None:
        check_size(image_size)
        if seed < 0:
            raise UserError(f"the seed must be at least 0, not {seed}")
        self._scenes = {
            split: sample_scenes(split, n, seed) for split, n in zip(SPLITS, (train, val, test), strict=True)
        }
        self._samples: dict[str, list[Sample]] = {}
        self._image_size, self._seed, self._captions_per_image = image_size, seed, captions_per_image

    def splits(self) -> tuple[str, ...]:
        return tuple(split for split in SPLITS if self._scenes[split])

    def samples(self, split: str) -> Sequence[Sample]:
        if split not in self._scenes:
            raise UserError(f"the synthetic dataset has no split {split!r}; it has {', '.join(SPLITS)}")
        if split not in self._samples:
            self._samples[split] = [self._sample(split, i, scene) for i, scene in enumerate(self._scenes[split])]
        return self._samples[split]

    def origin(self, id_: str, caption: int = 0) -> str:
        return id_

    def scene_of(self, sample_id: str) -> Scene:
        """The scene of a sample."""
        split, _, number = sample_id.rpartition("-")
        return self._scenes[split][int(number)]

    def _sample(self, split: str, index: int, scene: Scene) -> Sample:
        name = f"{split}-{index:06d}"
        seed = scenes.derive(scenes.IMAGE, self._seed, SPLITS.index(split), index)
        image = SyntheticImage(scene, self._image_size, seed, name)
        return Sample(image, captions(scene, self._captions_per_image, seed), name)


def write_folder(
    folder: Path,
    count: int,
    image_size: int = 224,
    seed: int = 0,
    captions_per_image: int = 5,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> str:
    """Write images/, scenes.jsonl, negatives.csv and, when all is there, captions.csv; returns a summary.

    A tenth of the images each are val and test.
    """
    if count < 3:
        raise UserError(f"{count} images are too few for train, val and test; use at least 3")
    held_out = max(1, round(count / 10))
    counts = {"train": count - 2 * held_out, "val": held_out, "test": held_out}
    source = SyntheticSource(image_size, **counts, seed=seed, captions_per_image=captions_per_image)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder}: not an empty folder; choose a new one for the images")
    (folder / "images").mkdir(parents=True)
    facts, wrong, rows = [], [], []
    for split in SPLITS:
        for sample in source.samples(split):
            image, name = sample.image, f"images/{sample.id}.png"
            assert isinstance(image, SyntheticImage)
            (folder / name).write_bytes(image.read())
            facts.append({"image": name, "split": split, "generator": VERSION, **asdict(image.scene)})
            for negative in negatives(image.scene, image.seed):
                changed = " ".join(negative.changed)
                wrong.append((name, negative.caption, negative.difficulty, changed, negative.truth))
            rows += [(name, caption, split, index) for index, caption in enumerate(sample.captions)]
            progress(len(facts), count)
    write_text(folder / "scenes.jsonl", "".join(json.dumps(fact) + "\n" for fact in facts))
    _write_csv(folder / "negatives.csv", ("image", "caption", "difficulty", "changed", "truth"), wrong)
    _write_csv(folder / "captions.csv", ("image", "caption", "split", "caption_index"), rows)
    parts = ", ".join(f"{split} {number:,}" for split, number in counts.items())
    return f"{folder}: {count:,} images ({parts}), {len(rows):,} captions, {len(wrong):,} negatives"


def _write_csv(path: Path, header: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    stream = io.StringIO()
    table = csv.writer(stream, lineterminator="\n")
    table.writerow(header)
    table.writerows(rows)
    write_text(path, stream.getvalue())
