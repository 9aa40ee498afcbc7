"""The synthetic set as a folder that any other tool can read."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from m1clip.data.synthetic.draw import VERSION
from m1clip.data.synthetic.negatives import negatives
from m1clip.data.synthetic.source import SyntheticImage, SyntheticSource
from m1clip.errors import UserError


@dataclass(frozen=True, slots=True)
class Written:
    """What a folder got: pictures of each split, captions, negatives."""

    folder: Path
    pictures: dict[str, int]
    captions: int
    negatives: int

    def __str__(self) -> str:
        parts = ", ".join(f"{split} {number:,}" for split, number in self.pictures.items())
        total = f"{sum(self.pictures.values()):,} pictures ({parts})"
        return f"{self.folder}: {total}, {self.captions:,} captions, {self.negatives:,} negatives"


def shares(count: int) -> dict[str, int]:
    """80 / 10 / 10, at least one picture each."""
    if count < 3:
        raise UserError(f"{count} pictures cannot fill train, val and test; ask for at least 3")
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
        raise UserError(f"{folder} is a file; name a new folder for the pictures")
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
    """Write `count` pictures: images/, scenes.jsonl, negatives.csv and, when all is there, captions.csv.

    `progress` is called with (pictures done, count) after each picture.
    """
    folder = Path(folder)
    split_counts = shares(count)
    source = SyntheticSource(
        image_size, **split_counts, seed=seed, captions_per_image=captions_per_image, two_share=two_share
    )
    _empty_folder(folder)
    entries = [(split, pair) for split in source.splits() for pair in source.pairs(split)]
    names = {pair.id: f"images/{pair.id}.png" for _, pair in entries}
    with (folder / "scenes.jsonl").open("w", encoding="utf-8", newline="\n") as scenes:
        for done, (split, pair) in enumerate(entries, start=1):
            pair.image.open().save(folder / names[pair.id])
            facts = {"image": names[pair.id], "split": split, "generator": VERSION}
            scenes.write(json.dumps(facts | asdict(source.scene_of(pair.id))) + "\n")
            if progress is not None:
                progress(done, count)
    wrong = [
        (names[pair.id], negative.caption, negative.difficulty, " ".join(negative.changed), negative.truth)
        for _, pair in entries
        if isinstance(pair.image, SyntheticImage)
        for negative in negatives(pair.image.scene, pair.image.seed)
    ]
    rows = [
        (names[pair.id], caption, split, index)
        for split, pair in entries
        for index, caption in enumerate(pair.captions)
    ]
    negative_count = _write_csv(
        folder / "negatives.csv", ("image", "caption", "difficulty", "changed", "truth"), wrong
    )
    caption_count = _write_csv(folder / "captions.csv", ("image", "caption", "split", "caption_index"), rows)
    return Written(folder, split_counts, caption_count, negative_count)
