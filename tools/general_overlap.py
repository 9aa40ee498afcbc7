"""Which images that `general` is trained on look like one that is validated or reported on?

    python tools/general_overlap.py flickr8k-112 data

DATA is what tools/general_data.py writes. Prints each pair, to be looked at: skies, seas and white
backgrounds look alike, too.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from general_data import SIX_SCENES_PARTS, look
from train_general import CALTECH, CAPTIONS, SCENES, TEST_CLASSES, VALIDATION_CLASSES, class_folders

from m1clip.data.duplicates import near_duplicates

CAPTIONED = ("coco", "openstax", "openstax-other")
CLASSES = (CALTECH, "coco-classes", SCENES, "produce", "kitchenware")
FURTHER_SCENES = (12, 60)  # images of each scene that are not trained on, as in benchmarks


def of_splits(folder: Path, splits: Sequence[str]) -> list[Path]:
    """The images of some splits of a folder with captions."""
    with (folder / CAPTIONS).open(newline="", encoding="utf-8") as file:
        rows = [row["image"] for row in csv.DictReader(file) if row["split"] in splits]
    return [folder / name for name in dict.fromkeys(rows)]


def of_classes(
    folder: Path, names: Sequence[str] | None = None, images: tuple[int, int] | None = None
) -> list[Path]:
    """The images of class folders: those that are trained on, or `images` of the named ones."""
    classes = class_folders(folder, names, *(images or ()))
    return [folder / file for _, files in classes for file in files]


def training_images(flickr: Path, data: Path) -> list[Path]:
    """All images that `general` is trained on."""
    captioned = [
        of_splits(folder, ("train",)) for folder in (flickr, *(data / n for n in CAPTIONED))
    ]
    classes = [of_classes(data / name) for name in CLASSES]
    return [image for group in (*captioned, *classes) for image in group]


def reported_images(flickr: Path, data: Path) -> list[Path]:
    """All images that are validated or reported on."""
    folders = (flickr, *(data / name for name in CAPTIONED))
    captioned = [of_splits(folder, ("val", "test")) for folder in folders]
    held_out = f"{VALIDATION_CLASSES} {TEST_CLASSES}".split()
    scenes = [path.name for path in (data / SCENES).iterdir()]
    classes = [
        of_classes(data / CALTECH, held_out, (0, sys.maxsize)),
        of_classes(data / SCENES, scenes, FURTHER_SCENES),
    ]
    classes += [sorted((data / name).glob("*/*")) for name in SIX_SCENES_PARTS]
    return [image for group in (*captioned, *classes) for image in group]


def main() -> None:
    """Print the pairs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("flickr", type=Path)
    parser.add_argument("data", type=Path)
    options = parser.parse_args()
    training = training_images(options.flickr, options.data)
    reported = reported_images(options.flickr, options.data)
    looks = [look(image.read_bytes()) for image in (*training, *reported)]
    pairs = 0
    for first, second in near_duplicates(looks):
        if first < len(training) <= second:
            pairs += 1
            print(f"{training[first]}  {reported[second - len(training)]}")
    print(f"{pairs:,} pairs of {len(training):,} and {len(reported):,} images")


if __name__ == "__main__":
    main()
