"""The synthetic dataset: images drawn when they are opened, or written to a folder."""

import csv
import io
import math
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from m1clip import console
from m1clip.data.images import ImageRef
from m1clip.data.synthetic import scene as scenes
from m1clip.data.synthetic.captions import captions
from m1clip.data.synthetic.drawing import (
    MAX_SCENE_SIZE,
    MIN_SCENE_SIZE,
    SYNTHETIC_MARK,
    VERSION,
    draw,
)
from m1clip.data.synthetic.scene import AXES, VALUES, Scene, Thing
from m1clip.data.types import SPLITS, Sample, Source
from m1clip.errors import UserError
from m1clip.formatting import plural
from m1clip.io import write_bytes, write_text

CAPTIONS_PER_IMAGE = 5
Look = tuple[str, str]  # kind and color


def split_of(kind: str, color: str) -> str:
    """The split of a combination of kind and color; train never shows those of val and test.

    Every second kind gives two colors to val, the others two to test: with one, the kind would
    determine the color. Each color gives three kinds to both. There is no seed, so sets of two
    seeds cannot leak into each other.
    """
    index, is_test = divmod(VALUES["kind"].index(kind), 2)
    if (index - VALUES["color"].index(color)) % 4:
        return "train"
    return "test" if is_test else "val"


@cache
def looks(split: str) -> tuple[Look, ...]:
    """The combinations of kind and color of a split."""
    return tuple(
        look for look in product(VALUES["kind"], VALUES["color"]) if split_of(*look) == split
    )


@cache
def _axes(split: str, things: int) -> tuple[Sequence[Any], ...]:
    """The values that each attribute of a scene with so many things can have."""
    count, size, time = VALUES["count"], VALUES["size"], VALUES["time"]
    if things == 1:
        return looks(split), count, size, VALUES["position"], time
    # Pairs of looks that may share an image: one of the split, the other of train.
    pairs = list(product(looks(split), looks("train")))
    if split != "train":
        pairs += [(right, left) for left, right in pairs]
    return (
        [(a, b) for a, b in pairs if a[0] != b[0] and a[1] != b[1]],
        count,
        size,
        count,
        size,
        AXES,
        time,
    )


def _scene(values: Sequence[Any]) -> Scene:
    if len(values) == 5:
        (kind, color), count, size, position, time = values
        return Scene((Thing(kind, color, count, size, position),), time)
    (
        ((kind1, color1), (kind2, color2)),
        count1,
        size1,
        count2,
        size2,
        (position1, position2),
        time,
    ) = values
    first, second = (
        Thing(kind1, color1, count1, size1, position1),
        Thing(kind2, color2, count2, size2, position2),
    )
    return Scene((first, second), time)


def scenes_available(split: str, things: int) -> int:
    """The number of different scenes with one or two things."""
    return math.prod(map(len, _axes(split, things)))


def sample_scenes(split: str, count: int, seed: int) -> list[Scene]:
    """`count` different scenes of a split, half of them with two things as far as there
    are enough.
    """
    singles, doubles = scenes_available(split, 1), scenes_available(split, 2)
    if count > singles + doubles:
        raise UserError(
            f"{count} {split} scenes requested; there are {singles + doubles:,} different ones"
        )
    with_one = max(min(round(count / 2), singles), count - doubles)
    rng = scenes.generator(scenes.SCENES, SPLITS.index(split), seed)
    scene_list: list[Scene] = []
    for things, number in ((1, with_one), (2, count - with_one)):
        axes = _axes(split, things)
        chosen = rng.choice(scenes_available(split, things), size=number, replace=False)
        rows = zip(
            *(index.tolist() for index in np.unravel_index(chosen, [len(axis) for axis in axes])),
            strict=True,
        )
        scene_list += [_scene([axis[i] for axis, i in zip(axes, row, strict=True)]) for row in rows]
    return [scene_list[i] for i in rng.permutation(count)]


@dataclass(frozen=True, slots=True)
class SyntheticImage(ImageRef):
    """An image that is drawn when it is opened."""

    scene: Scene
    size: int
    seed: int
    name: str

    def open(self, min_side: int | None = None) -> Image.Image:
        return Image.fromarray(draw(self.scene, self.size, self.seed))

    def read(self) -> bytes:
        stream = io.BytesIO()
        text = PngInfo()
        text.add_text(*SYNTHETIC_MARK)
        self.open().save(stream, "PNG", pnginfo=text)
        return stream.getvalue()

    def stamp(self) -> str:
        things = ";".join(
            f"{t.kind},{t.color},{t.count},{t.size},{t.position}" for t in self.scene.things
        )
        return f"synthetic-{VERSION}|{things}|{self.scene.time}|{self.size}|{self.seed}"

    def __str__(self) -> str:
        return f"synthetic image {self.name}"


class SyntheticSource(Source):
    """Scenes with captions.

    Val and test show combinations of kind and color that train never shows.
    """

    def __init__(
        self, image_size: int, train: int = 8000, val: int = 500, test: int = 500, seed: int = 0
    ) -> None:
        if not MIN_SCENE_SIZE <= image_size <= MAX_SCENE_SIZE:
            raise UserError(
                f"synthetic images are {MIN_SCENE_SIZE} to {MAX_SCENE_SIZE} px wide, not"
                f" {image_size}"
            )
        if seed < 0:
            raise UserError(f"the seed must be at least 0, not {seed}")
        super().__init__("synthetic")
        self.scene_of: dict[str, Scene] = {}  # by the id of the sample
        for number, count in enumerate((train, val, test)):
            for index, scene in enumerate(sample_scenes(SPLITS[number], count, seed)):
                name = f"{SPLITS[number]}-{index:06d}"
                own_seed = scenes.derive(scenes.IMAGE, seed, number, index)
                image = SyntheticImage(scene, image_size, own_seed, name)
                sample = Sample(image, captions(scene, CAPTIONS_PER_IMAGE, own_seed), name)
                self.by_split.setdefault(SPLITS[number], []).append(sample)
                self.scene_of[name] = scene

    def category(self, id_: str) -> str:
        """nature, animals, urban or food: the category of the first thing."""
        return self.scene_of[id_].category


def write_folder(folder: Path, count: int, image_size: int = 224, seed: int = 0) -> str:
    """Write images/ and, when all are there, captions.csv.

    A tenth of the images each are val and test.
    """
    if count < 3:
        raise UserError(f"{plural(count, 'image')} cannot fill train, val and test; use at least 3")
    held_out = max(1, round(count / 10))
    counts = {"train": count - 2 * held_out, "val": held_out, "test": held_out}
    source = SyntheticSource(image_size, **counts, seed=seed)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder}: not an empty folder; choose a new one for the images")
    (folder / "images").mkdir(parents=True)
    try:
        caption_count = _write_files(source, folder, count)
    except BaseException:  # so that the same command works again
        shutil.rmtree(folder / "images", ignore_errors=True)
        raise
    parts = ", ".join(f"{split} {number:,}" for split, number in counts.items())
    return f"{folder}: {plural(count, 'image')} ({parts}), {plural(caption_count, 'caption')}"


def _write_files(source: SyntheticSource, folder: Path, count: int) -> int:
    """Write the images of all splits, then their table; returns the number of captions."""
    rows = [("image", "caption", "split")]
    refresh = console.current_progress()
    for done, (split, sample) in enumerate(
        ((s, sample) for s in SPLITS for sample in source.samples(s)), start=1
    ):
        name = f"images/{sample.id}.png"
        write_bytes(folder / name, sample.image.read(), sync=False)
        rows += [(name, caption, split) for caption in sample.captions]
        refresh(done, count)
    table = io.StringIO()
    csv.writer(table, lineterminator="\n").writerows(rows)
    write_text(folder / "captions.csv", table.getvalue())
    return len(rows) - 1
