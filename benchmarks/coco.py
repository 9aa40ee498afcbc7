"""COCO as a second data set of the speedrun: 8,000 images, as many in each split as Flickr8k has.

python benchmarks/coco.py train2017 annotations/captions_train2017.json coco-112

coco_ids.json lists the images of each split, drawn at random from 9,024 images of train2017.
"""

from __future__ import annotations

import argparse
import csv
import json
from collections import defaultdict
from pathlib import Path

from PIL import Image

IDS = Path(__file__).with_name("coco_ids.json")
SIDE, CAPTIONS = 112, 5


def main() -> None:
    """Write OUT/images and OUT/captions.csv."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("images", type=Path, help="the folder train2017")
    parser.add_argument("captions", type=Path, help="captions_train2017.json")
    parser.add_argument("out", type=Path)
    options = parser.parse_args()
    splits: dict[str, list[int]] = json.loads(IDS.read_text(encoding="utf-8"))
    captions = defaultdict(list)
    for row in json.loads(options.captions.read_text(encoding="utf-8"))["annotations"]:
        captions[row["image_id"]].append(" ".join(row["caption"].split()))
    (options.out / "images").mkdir(parents=True, exist_ok=True)
    with (options.out / "captions.csv").open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file)
        table.writerow(("image", "caption", "split"))
        for split, ids in splits.items():
            for number in ids:
                name = f"images/{number:012}.jpg"
                with Image.open(options.images / Path(name).name) as opened:
                    image = opened.convert("RGB")
                scale = SIDE / min(image.size)
                size = [round(scale * side) for side in image.size]
                image.resize((size[0], size[1]), Image.Resampling.BICUBIC).save(
                    options.out / name, quality=92
                )
                table.writerows((name, caption, split) for caption in captions[number][:CAPTIONS])


if __name__ == "__main__":
    main()
