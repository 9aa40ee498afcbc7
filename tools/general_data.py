"""Collect the data that `general` was trained on (docs/lab-general.md) from clones of the repositories that hold it.

    git clone https://github.com/hai4h/cnn-edge-detection clones/cnn-edge-detection
    git clone https://github.com/Vindhyaa-Saravanan/Deep-Learning-Coursework clones/Deep-Learning-Coursework
    git clone https://github.com/SpartaG117/TRcap clones/TRcap
    git clone https://github.com/kanadn/diht clones/diht
    git clone https://github.com/rohitgandikota/erasing clones/erasing
    git clone https://github.com/Yuhyeong/BK-SDM clones/BK-SDM
    git clone https://github.com/Ouxiang-Li/SAFE clones/SAFE
    git clone https://github.com/yandex-research/swd clones/swd
    git clone https://github.com/thuml/HashNet clones/HashNet
    git clone https://github.com/MachineLearning2020/Homework2-Caltech101 clones/Homework2-Caltech101
    git clone https://github.com/jaaumeadrover/Landscape-Image-Classification clones/Landscape-Image-Classification
    git clone https://github.com/ustbChengzhao/Image_search_clip clones/Image_search_clip
    git clone https://github.com/maclavijo/Kitchenware-Project clones/Kitchenware-Project
    git clone https://github.com/keshav1245/Image-Classification-using-AlexNet-CNN-Model \
        clones/Image-Classification-using-AlexNet-CNN-Model
    git clone https://github.com/EliSchwartz/imagenet-sample-images clones/imagenet-sample-images
    for book in $BOOKS $OTHER_BOOKS; do git clone https://github.com/openstax/osbooks-$book clones/osbooks-$book; done
    python tools/general_data.py --clones clones --out data

Writes folders with images and captions.csv (coco, openstax, openstax-other), folders of class
folders (caltech101, coco-classes, scenes, produce, kitchenware, six-scenes, six-scenes-val), and
imagenet_names.txt. The clones need no work tree: `git clone --bare` or `--no-checkout` is enough.
Flickr8k is not among them; its train split is a folder with images and captions.csv. Images of the
validation and test splits in benchmarks/general_ids.json and benchmarks/coco_ids.json are not in a
train split. A book is read from its last commit that was under CC BY 4.0, so its clone needs the
history. BOOKS of the model in the package: american-government anatomy-physiology astronomy
biology-bundle business-ethics chemistry-bundle college-physics-bundle college-success
contemporary-mathematics entrepreneurship introduction-anthropology introduction-business
introduction-philosophy introduction-political-science introduction-sociology
introductory-statistics-bundle microbiology prealgebra-bundle principles-economics-bundle
principles-marketing psychology university-physics-bundle us-history world-history writing-guide.
OTHER_BOOKS, for validation: college-algebra-bundle introduction-intellectual-property
nursing-external-bundle physics principles-finance.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import html
import io
import json
import re
import subprocess
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath

from PIL import Image

from m1clip.data.duplicates import appearance, near_duplicates

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
IMAGES, CAPTIONS = "cnn-edge-detection", "Deep-Learning-Coursework"
MORE_CAPTIONS = {"TRcap": "data/coco_val.json", "diht": "coco_test.json"}
# Tables with one caption per row, and their columns of images and captions.
CAPTION_TABLES = {
    "erasing": ("data/coco_30k.csv", "image_id", "prompt"),
    "BK-SDM": ("data/mscoco_val2014_30k/metadata.csv", "file_name", "text"),
    "SAFE": ("data/mscoco.csv", "image_id", "text"),
    "swd": ("src/prompts/coco.csv", "file_name", "caption"),
}
LABELS = "HashNet"
LABEL_FILES = [f"caffe/data/coco/test/database{part}.txt" for part in range(8)]
CALTECH, IMAGENET = "Homework2-Caltech101", "imagenet-sample-images"
SCENES, PRODUCE = "Landscape-Image-Classification", "Image_search_clip"
KITCHENWARE, BOOKS = "Kitchenware-Project", "osbooks-"
SIX_SCENES = "Image-Classification-using-AlexNet-CNN-Model"
# A folder of it, and how many images of each scene: one for the test, one for validation.
SIX_SCENES_PARTS = {"six-scenes": ("seg_test", 60), "six-scenes-val": ("seg_train", 50)}
# Books of which no photograph is trained on: their photographs are for validation.
OTHER_BOOKS = (
    "college-algebra-bundle",
    "introduction-intellectual-property",
    "nursing-external-bundle",
    "physics",
    "principles-finance",
)
LICENSE, CC_BY = "LICENSE", "Attribution 4.0 International"
# Images of COCO that show the same scene as one of a test split.
COPIES = {343799, 460131}
# The categories of COCO in the order of the label files.
COCO_NAMES = """
airplane, apple, backpack, banana, baseball bat, baseball glove, bear, bed, bench, bicycle, bird, boat, book, bottle,
bowl, broccoli, bus, cake, car, carrot, cat, cell phone, chair, clock, couch, cow, cup, dining table, dog, donut,
elephant, fire hydrant, fork, frisbee, giraffe, hair drier, handbag, horse, hot dog, keyboard, kite, knife, laptop,
microwave, motorcycle, mouse, orange, oven, parking meter, person, pizza, potted plant, refrigerator, remote control,
sandwich, scissors, sheep, sink, skateboard, skis, snowboard, spoon, sports ball, stop sign, suitcase, surfboard,
teddy bear, tennis racket, tie, toaster, toilet, toothbrush, traffic light, train, truck, television, umbrella, vase,
wine glass, zebra
"""
# Folder names of the scenes that are not words; the others are taken as they are.
SCENE_NAMES = {
    "TallBuilding": "skyscraper",
    "OpenCountry": "open countryside",
    "Insidecity": "city",
    "Suburb": "suburban house",
    "livingroom": "living room",
    "industrial": "industrial plant",
    "Coast": "sea coast",
}
PER_CLASS = 60
LOOK_SIDE = 256  # pixels, about, of an image that is compared with others
ALT_WORDS = (3, 50)
NO_PHOTOGRAPH = """
graph|graphs|diagram|diagrams|chart|charts|table|map|maps|figure|illustration|illustrations|axis|equation|equations|
drawing|drawings|screenshot|painting|paintings|cartoon|flowchart|schematic|plot|logo|icon|micrograph|micrographs|
model|formula|fraction|number line|triangle|rectangle|circle|curve|molecule|bar|image a|text|label|labeled|arrow|
arrows|timeline|x|y|engraving|sketch|poster|page|blank|infographic|histogram|spectrum|equals|plus|minus
"""
PHOTOGRAPH = re.compile(
    r"^((in|this|the|these|a|an|two|three|is|here|color|colou?r|colou?red|black|and|white|black-and-white|close-?up|"
    r"top|left|right|old)\s+)*(photo|photos|photograph|photographs|picture|pictures|image|images)\b"
    r"(\s\(?[a-d]\)?(?=\s))?,?\s*(\b(is|are|of|shows?|depicts?|showing|depicting|features?)\b)?\s*(that of\s)?",
    re.IGNORECASE,
)
SAYS_PHOTOGRAPH = re.compile(
    r"\b(photo|photos|photograph|photographs|picture|pictures)\b", re.IGNORECASE
)
# Books with more drawings than photographs: only images that are called photographs.
MOSTLY_DRAWINGS = re.compile(
    r"math|physics|chem|microbio|anatomy|algebra|statistics|economics|python"
)


class Clone:
    """A clone, of which files are read from one commit: the last one, unless it is named."""

    def __init__(self, folder: Path, commit: str = "HEAD") -> None:
        self.git = git_folder(folder)
        command = ["git", f"--git-dir={self.git}", "cat-file", "--batch"]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

        # Git looks up a name in all of its folder's entries each time; an id is found at once.
        listed = run_git(self.git, "ls-tree", "-r", "-z", commit)
        entries = [entry.partition("\t") for entry in listed.split("\0")[:-1]]
        self.ids = {name: head.split()[2] for head, _, name in entries}

    def names(self) -> list[str]:
        """The files of the last commit."""
        return list(self.ids)

    def find(self, name: str) -> bytes | None:
        """The content of a file; None if it is not there."""
        if name not in self.ids:
            return None
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{self.ids[name]}\n".encode())
        self.process.stdin.flush()
        head = self.process.stdout.readline().split()
        if len(head) != 3 or head[1] != b"blob":
            return None
        content = self.process.stdout.read(int(head[2]))
        self.process.stdout.read(1)
        return content

    def read(self, name: str) -> bytes:
        """The content of a file; SystemExit if it is not there."""
        content = self.find(name)
        if content is None:
            raise SystemExit(f"{self.git}: has no {name}")
        return content


def git_folder(folder: Path) -> Path:
    """The folder with the objects of a clone."""
    candidates = (folder / ".git", folder / "repo" / ".git", folder / "repo", folder)
    return next((path for path in candidates if (path / "objects").is_dir()), folder)


def run_git(git: Path, *words: str) -> str:
    """What a git command prints."""
    command = ["git", f"--git-dir={git}", *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def last_free_commit(folder: Path) -> str | None:
    """The last commit of a book whose license is CC BY 4.0; None if none was.

    Most books were put under CC BY-NC-SA in 2025 and 2026; what was published before under CC BY
    stays available under it.
    """
    git = git_folder(folder)
    commit = "HEAD"
    for change in run_git(git, "log", "--format=%H", "--", LICENSE).split():
        if run_git(git, "show", f"{commit}:{LICENSE}").lstrip().startswith(CC_BY):
            return commit
        if run_git(git, "log", "-1", "--format=%P", change) == "\n":
            return None
        commit = f"{change}^"
    return None


def write_captions(out: Path, rows: Iterable[tuple[str, str, bytes, list[str]]]) -> int:
    """Write images and captions.csv from (file, split, content, captions); returns the number of images."""
    (out / "images").mkdir(parents=True, exist_ok=True)
    count = 0
    with (out / "captions.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(("image", "caption", "split"))
        for name, split, content, texts in rows:
            (out / "images" / name).write_bytes(content)
            writer.writerows((f"images/{name}", text, split) for text in texts)
            count += 1
    return count


def write_classes(out: Path, images: Iterable[tuple[str, str, bytes]]) -> int:
    """Write class folders from (class, file, content); returns the number of images."""
    count = 0
    for name, file, content in images:
        (out / name).mkdir(parents=True, exist_ok=True)
        (out / name / file).write_bytes(content)
        count += 1
    return count


def coco_captions(clones: dict[str, Clone]) -> dict[int, list[str]]:
    """The captions of each image of COCO that a clone has captions of."""
    texts: dict[int, list[str]] = defaultdict(list)
    table = clones[CAPTIONS].read("coco_captions.csv").decode("utf-8")
    for row in csv.DictReader(io.StringIO(table)):
        texts[int(row["image_id"])].append(row["caption"])
    for clone, file in MORE_CAPTIONS.items():
        for row in json.loads(clones[clone].read(file)):
            number = coco_number(row.get("image") or row["file_path"])
            if number not in texts:
                captions = row.get("caption") or row["captions"]
                texts[number] = [" ".join(text.split()) for text in captions]
    return add_tables(texts, clones)


def add_tables(texts: dict[int, list[str]], clones: dict[str, Clone]) -> dict[int, list[str]]:
    """Add the images of CAPTION_TABLES that have no captions yet, with all captions in the tables."""
    more: dict[int, list[str]] = defaultdict(list)
    for clone, (file, image, caption) in CAPTION_TABLES.items():
        for row in csv.DictReader(io.StringIO(clones[clone].read(file).decode("utf-8"))):
            number = coco_number(row[image])
            text = " ".join(row[caption].split())
            if number not in texts and text and text not in more[number]:
                more[number].append(text)
    return texts | {number: captions for number, captions in more.items() if captions}


def coco_number(name: str) -> int:
    """The number of an image, from a name such as val2014/COCO_val2014_000000391895.jpg."""
    return int(Path(name).stem[-12:])


def file_of(number: int) -> str:
    """The file of an image in the clone of images."""
    return f"train2017/{number:012d}.jpg"


def coco_splits() -> dict[int, str]:
    """The split of each image that has one.

    Images of test splits of other benchmarks, and COPIES of those of this one, are in `none`.
    """
    other = json.loads((BENCHMARKS / "coco_ids.json").read_text(encoding="utf-8"))
    splits = dict.fromkeys(other["test"] + other["val"], "none")
    for split, numbers in json.loads((BENCHMARKS / "general_ids.json").read_text("utf-8")).items():
        splits |= dict.fromkeys(numbers, split)
    return splits | dict.fromkeys(COPIES, "none")


def coco_images(clones: dict[str, Clone]) -> Iterator[tuple[str, str, bytes, list[str]]]:
    """The images with captions: those of `general_ids.json` in their split, all others for training."""
    texts = coco_captions(clones)
    splits = coco_splits()
    available = set(clones[IMAGES].names())
    annotated = [number for number, split in splits.items() if split != "none"]
    more = sorted(
        number for number in texts if number not in splits and file_of(number) in available
    )
    for number in annotated + more:
        file = file_of(number)
        if file in available:
            content = clones[IMAGES].read(file)
            yield f"{number:012d}.jpg", splits.get(number, "train"), content, texts[number]


def coco_classes(clones: dict[str, Clone]) -> Iterator[tuple[str, str, bytes]]:
    """Images of COCO in which one category is labeled and no other, up to PER_CLASS of each."""
    names = [name.strip() for name in COCO_NAMES.replace("\n", " ").split(",")]
    splits = coco_splits()
    available = set(clones[IMAGES].names())
    count: dict[str, int] = defaultdict(int)
    for part in LABEL_FILES:
        for line in clones[LABELS].read(part).decode().splitlines():
            file, *flags = line.split()
            number = coco_number(file)
            if flags.count("1") != 1 or splits.get(number, "train") != "train":
                continue
            name = names[flags.index("1")]
            path = file_of(number)
            if path in available and count[name] < PER_CLASS:
                count[name] += 1
                yield name, f"{number:012d}.jpg", clones[IMAGES].read(path)


def scene_images(clone: Clone) -> Iterator[tuple[str, str, bytes]]:
    """Images of the 15 scenes."""
    for name in clone.names():
        folders = PurePosixPath(name).parts
        if folders[:2] == ("data", "train") and len(folders) == 4:
            scene = SCENE_NAMES.get(folders[2], folders[2].lower())
            yield scene, folders[3], clone.read(name)


def six_scenes(clone: Clone, part: str, images: int) -> Iterator[tuple[str, str, bytes]]:
    """The first images of each of six scenes, of the training or the test part of that dataset."""
    count: dict[str, int] = defaultdict(int)
    for name in sorted(clone.names(), key=lambda name: PurePosixPath(name).name):
        folders = PurePosixPath(name).parts
        if folders[0] == part and len(folders) == 4 and count[folders[2]] < images:
            count[folders[2]] += 1
            yield folders[2], folders[3], clone.read(name)


def produce_images(clone: Clone) -> Iterator[tuple[str, str, bytes]]:
    """Images of fruit and vegetables."""
    count: dict[str, int] = defaultdict(int)
    for name in clone.names():
        folders = PurePosixPath(name).parts
        if folders[0] == "raw" and len(folders) == 3 and count[folders[1]] < PER_CLASS:
            content = clone.find(name)  # the largest files may be absent
            if content is not None and len(content) < 2_000_000:
                count[folders[1]] += 1
                yield folders[1], folders[2], content


def kitchen_images(clone: Clone) -> Iterator[tuple[str, str, bytes]]:
    """Images of kitchenware."""
    count: dict[str, int] = defaultdict(int)
    for row in csv.DictReader(io.StringIO(clone.read("train.csv").decode())):
        content = clone.find(f"images/{int(row['Id']):04d}.jpg")
        if content is not None and count[row["label"]] < PER_CLASS:
            count[row["label"]] += 1
            yield row["label"], f"{row['Id']}.jpg", content


def plain_alt(text: str, drawings: bool) -> str | None:
    """An alternative text without "this photo shows"; None if it may describe no photograph.

    `drawings`: most of the book's images are drawings.
    """
    text = " ".join(html.unescape(text).split())
    if drawings and not SAYS_PHOTOGRAPH.search(text):
        return None
    sentences = re.split(r"(?<=[.!?])\s+", text)
    text = " ".join(sentences[:2])
    words = set(re.findall(r"[a-z]+", text.lower()))
    unwanted = set(re.split(r"[|\n]+", NO_PHOTOGRAPH))
    text = PHOTOGRAPH.sub("", text).removeprefix("of ")
    if words & unwanted or not ALT_WORDS[0] <= len(text.split()) <= ALT_WORDS[1]:
        return None
    return text


def book_images(books: dict[str, Clone]) -> Iterator[tuple[str, str, bytes, list[str]]]:
    """Photographs with their alternative texts; one in eight is for validation."""
    done = set()
    for book, clone in sorted(books.items()):
        drawings = MOSTLY_DRAWINGS.search(book) is not None
        for module in clone.names():
            if not module.endswith(".cnxml"):
                continue
            text = clone.read(module).decode("utf-8")
            for alt, file in re.findall(
                r'<media[^>]*?\balt="([^"]*)"[^>]*>\s*<image[^>]*?\bsrc="([^"]*\.jpe?g)"', text
            ):
                caption = plain_alt(alt, drawings)
                content = clone.find(f"media/{PurePosixPath(file).name}") if caption else None
                if caption is None or content is None:
                    continue
                digest = hashlib.sha256(content).hexdigest()
                if digest not in done:
                    done.add(digest)
                    split = "val" if int(digest[:2], 16) < 32 else "train"
                    yield f"{digest[:16]}.jpg", split, content, [caption]


def is_other_book(name: str) -> bool:
    """Whether a clone is one of OTHER_BOOKS."""
    return name.partition(BOOKS)[2] in OTHER_BOOKS


def without_copies(
    rows: Iterable[tuple[str, str, bytes, list[str]]], folder: Path
) -> Iterator[tuple[str, str, bytes, list[str]]]:
    """The rows whose image looks like no image in a folder, for validation."""
    rows = list(rows)
    contents = [content for _, _, content, _ in rows]
    contents += [path.read_bytes() for path in sorted(folder.iterdir())]
    pairs = near_duplicates([look(content) for content in contents])
    copies = {first for first, second in pairs if first < len(rows) <= second}
    for number, (name, _, content, captions) in enumerate(rows):
        if number not in copies:
            yield name, "val", content, captions


def look(content: bytes) -> tuple[bytes, bytes]:
    """How an image file looks, for `near_duplicates`."""
    with Image.open(io.BytesIO(content)) as opened:
        opened.draft("RGB", (LOOK_SIDE, LOOK_SIDE))
        return appearance(opened.convert("RGB"))


def caltech_images(clone: Clone) -> Iterator[tuple[str, str, bytes]]:
    """All images of Caltech-101."""
    for name in clone.names():
        folders = PurePosixPath(name).parts
        if folders[0] == "101_ObjectCategories":
            yield folders[1], folders[2], clone.read(name)


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
        for name in (
            IMAGES, CAPTIONS, *MORE_CAPTIONS, *CAPTION_TABLES, LABELS, CALTECH, IMAGENET, SCENES, SIX_SCENES,
            PRODUCE, KITCHENWARE,
        )
    }  # fmt: skip
    folders = {path: last_free_commit(path) for path in options.clones.glob(f"*{BOOKS}*")}
    books = {path.name: Clone(path, commit) for path, commit in folders.items() if commit}
    others = {name: book for name, book in books.items() if is_other_book(name)}
    captioned = {
        "coco": coco_images(clones),
        "openstax": book_images({name: book for name, book in books.items() if name not in others}),
        # Written after the folder that it is compared with.
        "openstax-other": without_copies(book_images(others), options.out / "openstax" / "images"),
    }
    for folder, rows in captioned.items():
        count = write_captions(options.out / folder, rows)
        print(f"{folder}: {count:,} images with captions", flush=True)
    classes = {
        "caltech101": caltech_images(clones[CALTECH]),
        "coco-classes": coco_classes(clones),
        "scenes": scene_images(clones[SCENES]),
        "produce": produce_images(clones[PRODUCE]),
        "kitchenware": kitchen_images(clones[KITCHENWARE]),
    }
    for folder, (part, images) in SIX_SCENES_PARTS.items():
        classes[folder] = six_scenes(clones[SIX_SCENES], part, images)
    for folder, images in classes.items():
        count = write_classes(options.out / folder, images)
        print(f"{folder}: {count:,} images of classes", flush=True)
    names = imagenet_names(clones[IMAGENET])
    (options.out / "imagenet_names.txt").write_text("\n".join(names) + "\n", encoding="utf-8")
    print(f"{len(names):,} class names of ImageNet")


if __name__ == "__main__":
    main()
