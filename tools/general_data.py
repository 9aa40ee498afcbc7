"""Collect the data that `general` was trained on (docs/models.md) from clones of the repositories that hold it.

    git clone https://github.com/hai4h/cnn-edge-detection clones/cnn-edge-detection
    git clone https://github.com/Vindhyaa-Saravanan/Deep-Learning-Coursework clones/Deep-Learning-Coursework
    git clone https://github.com/MachineLearning2020/Homework2-Caltech101 clones/Homework2-Caltech101
    git clone https://github.com/EliSchwartz/imagenet-sample-images clones/imagenet-sample-images
    python tools/general_data.py --clones clones --out data

Writes data/coco (images, and captions.csv with the splits of benchmarks/general_ids.json),
data/caltech101 and data/imagenet_names.txt. The clones need no work tree: `git clone --bare` or
`--no-checkout` is enough. Flickr8k is not among them; its train split is a folder with images and
captions.csv.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import subprocess
from pathlib import Path

IDS = Path(__file__).parent.parent / "benchmarks" / "general_ids.json"
IMAGES, CAPTIONS = "cnn-edge-detection", "Deep-Learning-Coursework"
CALTECH, IMAGENET = "Homework2-Caltech101", "imagenet-sample-images"
CALTECH_FOLDER = "101_ObjectCategories/"


class Clone:
    """A clone, of which files are read from the last commit."""

    def __init__(self, folder: Path) -> None:
        places = (folder / ".git", folder, folder / "repo" / ".git", folder / "repo")
        self.git = next((place for place in places if (place / "objects").is_dir()), folder)
        command = ["git", f"--git-dir={self.git}", "cat-file", "--batch"]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def names(self) -> list[str]:
        """The files of the last commit."""
        command = ["git", f"--git-dir={self.git}", "ls-tree", "-r", "--name-only", "HEAD"]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.split(
            "\n"
        )

    def read(self, name: str) -> bytes:
        """The content of a file; SystemExit if it is not there."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"HEAD:{name}\n".encode())
        self.process.stdin.flush()
        head = self.process.stdout.readline().split()
        if len(head) != 3 or head[1] != b"blob":
            raise SystemExit(f"{self.git}: has no {name}")
        content = self.process.stdout.read(int(head[2]))
        self.process.stdout.read(1)
        return content


def write_coco(images: Clone, captions: Clone, out: Path) -> int:
    """Write the images of `general_ids.json` with their captions; returns their number."""
    splits = json.loads(IDS.read_text(encoding="utf-8"))
    texts: dict[int, list[str]] = {}
    rows = csv.DictReader(io.StringIO(captions.read("coco_captions.csv").decode("utf-8")))
    for row in rows:
        texts.setdefault(int(row["image_id"]), []).append(row["caption"])
    (out / "images").mkdir(parents=True, exist_ok=True)
    count = 0
    with (out / "captions.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(("image", "caption", "split"))
        for split, numbers in splits.items():
            for number in numbers:
                name = f"images/{number:012d}.jpg"
                (out / name).write_bytes(images.read(f"train2017/{number:012d}.jpg"))
                writer.writerows((name, text, split) for text in texts[number])
                count += 1
    return count


def write_caltech(clone: Clone, out: Path) -> int:
    """Write the class folders; returns the number of images."""
    names = [name for name in clone.names() if name.startswith(CALTECH_FOLDER)]
    for name in names:
        path = out / name.removeprefix(CALTECH_FOLDER)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(clone.read(name))
    return len(names)


def imagenet_names(clone: Clone) -> list[str]:
    """The 1,000 class names in the order of their WordNet numbers, which is that of the classifiers."""
    files = sorted(name for name in clone.names() if name.endswith(".JPEG"))
    return [name.removesuffix(".JPEG").partition("_")[2].replace("_", " ") for name in files]


def main() -> None:
    """Write all parts, and print how much there is."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--clones", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    # A clone may have its owner before its name, as in owner+name.
    clones = {
        name: Clone(next(iter(sorted(options.clones.glob(f"*{name}"))), options.clones / name))
        for name in (IMAGES, CAPTIONS, CALTECH, IMAGENET)
    }
    count = write_coco(clones[IMAGES], clones[CAPTIONS], options.out / "coco")
    print(f"{count:,} images of COCO with captions")
    print(f"{write_caltech(clones[CALTECH], options.out / 'caltech101'):,} images of Caltech-101")
    names = imagenet_names(clones[IMAGENET])
    (options.out / "imagenet_names.txt").write_text("\n".join(names) + "\n", encoding="utf-8")
    print(f"{len(names):,} class names of ImageNet")


if __name__ == "__main__":
    main()
