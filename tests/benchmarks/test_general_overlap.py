"""tools/general_overlap.py, which compares training images with those that are reported on."""

import csv
import importlib
import sys
from pathlib import Path

import pytest
from image_sets import image

TOOLS = Path(__file__).parents[2] / "tools"
PHOTO = (300, 200)


def write_captioned(folder: Path, splits: dict[str, int]) -> None:
    """Write a folder with captions.csv: {split: the seed of its image}."""
    folder.mkdir(parents=True)
    with (folder / "captions.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(("image", "caption", "split"))
        for split, seed in splits.items():
            image(seed, PHOTO).save(folder / f"{split}.png")
            writer.writerow((f"{split}.png", "a", split))


def write_class(folder: Path, count: int, first_seed: int) -> None:
    """Write a class folder of some images."""
    folder.mkdir(parents=True)
    for number in range(count):
        image(first_seed + number, PHOTO).save(folder / f"{number:02d}.png")


def test_training_image_that_looks_like_a_reported_one_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(TOOLS))
    tool = importlib.import_module("general_overlap")
    data = tmp_path / "data"
    write_captioned(tmp_path / "flickr", {"train": 1, "val": 2, "test": 3})
    write_captioned(data / "coco", {"train": 3, "val": 4, "test": 5})  # a test image of flickr
    write_captioned(data / "openstax", {"train": 6, "val": 7})
    write_captioned(data / "openstax-other", {"val": 8})
    write_class(data / "caltech101" / "fox", 14, 100)  # the last two are not trained on
    write_class(data / "caltech101" / "camera", 1, 113)
    write_class(data / "coco-classes" / "dog", 1, 200)
    write_class(data / "scenes" / "forest", 13, 300)
    write_class(data / "produce" / "apple", 1, 312)  # a scene that is not trained on
    write_class(data / "kitchenware" / "cup of tea", 1, 400)
    write_class(data / "six-scenes" / "sea", 1, 500)
    write_class(data / "six-scenes-val" / "sea", 1, 600)
    monkeypatch.setattr(sys, "argv", ["general_overlap.py", str(tmp_path / "flickr"), str(data)])
    tool.main()
    *pairs, total = capsys.readouterr().out.splitlines()
    assert [
        [Path(name).relative_to(tmp_path).as_posix() for name in row.split("  ")] for row in pairs
    ] == [
        ["data/coco/train.png", "flickr/test.png"],
        ["data/produce/apple/00.png", "data/scenes/forest/12.png"],
    ]
    # Of training: three with captions, and 12, 1, 12, 1 and 1 of classes.
    assert total == "2 pairs of 30 and 10 images"
