"""Train the heads of the model `general` and write them to m1clip/models/general (docs/lab-general.md).

    python tools/general_data.py --clones clones --out data
    python tools/train_general.py --captions flickr8k-112 data/coco data/openstax \
        --mirror flickr8k-112 --classes data/caltech101 data/coco-classes data/scenes \
        data/produce data/kitchenware --names data/imagenet_names.txt --cache features

--captions: folders with captions.csv (image, caption, split); rows of split `train` are used.
--mirror: one of them, whose mirror images some trainings see, too. --classes: folders with one
folder of images per class, of which HELD_OUT are not used; may be left out. --names: the 1,000
class names of ImageNet, one per line, in the order of the classifiers in the towers' packages.
--cache: where features and trained heads are stored, so that a second run does not compute them
again.

The same data gives the same file on the same kind of machine: all random numbers have a fixed seed,
and the heads are trained on one thread.

The towers are frozen. Both heads start from a canonical correlation analysis (CCA) of images and
captions, and are then trained with a contrastive loss on captions, on class folders, and on
synthetic features of the ImageNet classes: the classifiers that the EfficientNet packages contain
tell in which direction of the features a class lies, so no image of ImageNet is needed to connect
the class to its names. A class has several names: a pug is also a dog and an animal (EVERYDAY).
This is done several times from the same start, with other batches and other weights of the
datasets; the model is the weighted mean of all (STAGES).
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import itertools
import math
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from m1clip.data.images import FileImage
from m1clip.evaluation.retrieval import ranks
from m1clip.formatting import ceil_div
from m1clip.inference.batches import TowerRunner, in_order
from m1clip.inference.inputs import TEMPLATES as ZEROSHOT_TEMPLATES
from m1clip.model.clip import CLIP, build_clip
from m1clip.model.folder import TOWER_PREFIXES, write_boxed
from m1clip.model.named import BOXED, CONFIG, GENERAL, HEADS
from m1clip.model.presets import CLIPConfig, HeadConfig
from m1clip.model.pretrained.efficientnet import HEAD_CHANNELS
from m1clip.model.pretrained.packages import PACKAGES, package_file
from m1clip.model.pretrained.registry import (
    build_image_tower,
    build_text_tower,
    load_image_tower,
    load_text_tower,
    tower_image_size,
)
from m1clip.model.weights import read_checkpoint
from m1clip.training.cca import OUTPUT_NORM, canonical

# Classes of Caltech-101 for validation and for the table in docs/lab-general.md.
VALIDATION_CLASSES = """
airplanes butterfly car_side elephant electric_guitar grand_piano helicopter panda soccer_ball strawberry
sunflower stapler wheelchair ferry pigeon headphone kangaroo rooster wrench dolphin
"""
TEST_CLASSES = "camera cellphone chair cup lamp laptop pizza scissors umbrella watch"
NO_OBJECTS = "BACKGROUND_Google Faces Faces_easy"
HELD_OUT = f"{VALIDATION_CLASSES} {TEST_CLASSES} {NO_OBJECTS}".split()
CLASS_NAMES = {
    "Motorbikes": "motorbike",
    "airplanes": "airplane",
    "car_side": "car",
    "cougar_body": "cougar",
    "cougar_face": "cougar",
    "crocodile_head": "crocodile",
    "flamingo_head": "flamingo",
    "Leopards": "leopard",
    "water_lilly": "water lily",
    "garfield": "garfield cartoon cat",
    "snoopy": "snoopy cartoon dog",
    "yin_yang": "yin yang symbol",
    "hawksbill": "sea turtle",
    "ketch": "sailing boat",
    "schooner": "sailing ship",
    "tick": "tick insect",
    "bass": "bass fish",
    "buddha": "buddha statue",
}
# More names of ImageNet classes: a name, and the numbers of the classes that it is a name of.
EVERYDAY = """
fish: 0-6 389-397; bird: 7-24 80-100 127-146; chicken: 7 8; duck: 97 98; owl: 24; parrot: 87-90;
penguin: 145; frog: 30-32; turtle: 33-37; lizard: 38-48; crocodile: 49 50; snake: 52-68;
spider: 70 72-77; crab: 118-121 125; lobster: 122 123; insect: 300-320; beetle: 300-307;
butterfly: 321-326; dog: 151-268; wolf: 269-274; fox: 277-280; cat: 281-285; big cat: 286-293;
bear: 294-297 388; rabbit: 330-332; squirrel: 335; horse: 339; pig: 341-343; cow: 345-347;
sheep: 348 349; goat: 350; antelope: 351-353; camel: 354; monkey: 365-382; ape: 365-369;
elephant: 101 385 386; panda: 388; whale: 147 148; kangaroo: 104; animal: 0-397;
airplane: 404 895 726; boat: 403 472 484 510 554 576 625 628 724 780 814 871 914;
sailboat: 484 780 871 914; ship: 403 510 628; car: 407 436 468 511 609 627 656 661 751 817;
taxi: 468; truck: 555 569 675 717 864 867; fire truck: 555; bus: 654 779 874;
train: 466 547 565 705 820; tram: 829; van: 656 675 734 654; bicycle: 444 671;
motorcycle: 665 670; scooter: 670; tractor: 595 856 866;
vehicle: 407 436 468 511 555 569 609 627 654 656 665 670 675 717 751 779 817 864 867;
guitar: 402 546; piano: 579 881;
musical instrument: 401 402 420 432 486 513 541 546 558 566 579 593 594 642 683 776 875 881 889;
drum: 541 822; chair: 423 559 765 857; sofa: 831; bed: 564 520 431; crib: 520 431 516;
table: 532 736; desk: 526; shelf: 453; cabinet: 493 495 648 894;
furniture: 423 453 493 495 526 532 548 559 564 765 831 894; lamp: 619 846 818;
clock: 409 530 892 826; watch: 531; camera: 732 759; phone: 487 528 707; cell phone: 487;
telephone: 528 707; computer: 527 590 620 681; laptop: 620 681; keyboard: 508 878;
computer mouse: 673; monitor: 664 782; screen: 664 782 851; TV: 851 598 548; radio: 754 848 482;
speaker: 632; printer: 742 713; trash can: 412; cup: 504 968 967 647; mug: 504;
coffee: 504 967 505; coffee maker: 505 550; glass: 441 572; bottle: 440 720 737 898 907;
bowl: 659 809; plate: 923; pan: 567 909; pot: 505 521 544 738; kettle: 849 505; knife: 499 623;
spoon: 618 910 813; stove: 827 766; oven: 827 766; fridge: 760; washing machine: 897; sink: 896;
bath: 435 876; toilet: 861; towel: 434; soap: 804; kitchen: 827 760 534 651 659 567; hammer: 587;
tool: 477 587 596 740 783 784 792 499 491; screwdriver: 784; saw: 491; key: 507 695;
pen: 418 563 749; pencil: 709 710; book: 921 917 624 454; notebook: 681; envelope: 549;
ball: 429 430 522 574 722 747 768 805 852 890; soccer ball: 805; racket: 752; weights: 422 543;
bag: 414 636 728 748; handbag: 748; wallet: 893; basket: 588 790; box: 478 492 519;
hat: 439 452 515 808; cap: 433 793; helmet: 518 560 715; shoe: 514 502 630 770 774;
shoes: 514 502 630 770 774 788; boots: 514; sneakers: 770; sandals: 774; socks: 806 496;
glasses: 836 837; mask: 570 643 691 796; jacket: 465 474 568 617 869; coat: 568 617 869;
dress: 578 601 614; skirt: 601 655 689; shirt: 610 841; sweater: 474 841 911; jeans: 608;
pants: 608 697 842; suit: 834; tie: 451 457 906; swimsuit: 445 638 639 842; jewelry: 679;
necklace: 679; clothes: 399 400 474 568 578 608 610 614 617 655 697 834 841 869; umbrella: 879;
pillow: 721; blanket: 750; curtain: 794 854 905; flag: 557; candle: 470; flashlight: 862 818;
mirror: 475; fan: 545; vacuum cleaner: 882; balloon: 417; toy: 850 865 722 723; teddy bear: 850;
gun: 413 763 764; bridge: 821 839 888; building: 497 663 668 698 832 497 425 498 580 727;
house: 660 853 425 449; church: 497 663; castle: 483; tower: 900 437; barn: 425;
shop: 415 454 467 509 582 788 860 865; store: 415 454 467 509 582 788 860 865; supermarket: 582;
restaurant: 762; library: 624; cinema: 498; fence: 489 716 912; wall: 825; fountain: 562;
street sign: 919; mountain: 970 972 979 980; beach: 978 977 976; sea: 978 977 973; lake: 975;
valley: 979; flower: 985 986; plant: 738 984-986; mushroom: 947 991-997; fruit: 948-957;
apple: 948; vegetable: 936-946; food: 924-969; bread: 930-932 961; cake: 927 960; burger: 933;
hamburger: 933; hot dog: 934; ice cream: 928 929; pasta: 959; soup: 925 926 809;
drink: 966-969 441 572; wine: 966 907 572; squash: 939-942; corn: 987 998; grill: 581 766;
toilet paper: 999; tent: 672; boxing: 747; skis: 795; paper: 549 692; web page: 916
"""
# More names of class folders.
SYNONYMS = """
airplane: plane aircraft jet; bicycle: bike; motorcycle: motorbike; motorbike: motorcycle;
couch: sofa; television: TV; refrigerator: fridge; donut: doughnut; potted plant: plant flowerpot;
remote control: remote; sports ball: ball; dining table: table; tie: necktie; teddy bear: toy;
stop sign: sign; person: people; sea coast: sea coast ocean seaside shore; forest: woods trees;
highway: road motorway; street: road; industrial plant: factory; city: town buildings;
mountain: mountains; store: shop; office: workplace; open countryside: countryside field meadow;
suburban house: house home; living room: lounge; skyscraper: building tower buildings;
sailing boat: boat sailboat; sailing ship: ship; sea turtle: turtle
"""
TEMPLATES = (
    "a photo of a {}.",
    "an image of a {}.",
    "a close-up photo of a {}.",
    "there is a {} here.",
    "{}",
    "a {} in the picture.",
    "a picture of the {}.",
    "the {}",
    "a good photo of a {}.",
    "a photo of one {}.",
)
IMAGES_PER_CLASS = 12  # of a class folder
CALTECH = "caltech101"  # the folder of VALIDATION_CLASSES
SCENES = "scenes"  # the folder of classes whose next images are for validation
VALIDATION_SCENES = 32  # the first of them that are not used for anything
VALIDATION_IMAGES = 24  # of a class of VALIDATION_CLASSES
OTHER_SCENES = "six-scenes-val"  # a folder of classes that is for validation only
VALIDATION_OTHER_SCENES = 50  # images of a class of it
CAPTIONS = "captions.csv"
MIRRORED = "mirrored"  # the folder of mirror images
BLOCK = 1_024  # images in memory as float32 at a time
CHUNK = 500  # images whose features are in one file of the cache
TEXT_CHUNK = 10_000  # texts, likewise
EMBED_DIM, CONTEXT = 256, 64
HIDDEN = 128  # width of the hidden layer of a head: heads of less than 6 MB
DROPOUT = 0.5  # of the hidden layer; 0.4 times that of the features
SYNTHETIC_SIGMA = 4.0  # by how many deviations the logit of a synthetic class image is raised
SYNTHETIC_STRENGTH = (0.7, 1.5)  # times SYNTHETIC_SIGMA
BACKGROUND = 0.7  # weight of the real image that a class is added to
WARMUP = 0.1
FIRST_SCALE = 20.0


@dataclass(frozen=True)
class Stage:
    """One training of the heads, from their initialization."""

    epochs: int
    learning_rate: float
    batch: int  # images with captions
    captions_per_image: int
    class_batch: int  # synthetic class images; half as many real ones
    share: float  # of the model in the weighted mean
    class_weight: float = 0.3  # of the loss on classes
    weight_decay: float = 0.1
    seed: int = 0
    # How often the images of a folder are drawn in an epoch: once if it is not here. 0.5 draws
    # half of them, others in each epoch.
    draws: Mapping[str, float] = field(default_factory=dict)
    mirrored: bool = False  # whether the mirror images of --mirror are drawn, too

    def drawn(self, folders: dict[str, int]) -> dict[str, int]:
        """The number of images of each folder that are drawn in an epoch."""
        return {name: int(self.draws.get(name, 1) * count) for name, count in folders.items()}


FLICKR, COCO, BOOKS = "flickr8k-112", "coco", "openstax"
LARGE = Stage(
    epochs=5,
    learning_rate=8e-4,
    batch=1024,
    captions_per_image=3,
    class_batch=256,
    share=0.2,
    draws={FLICKR: 3, BOOKS: 2},
)
# Means of such models are better than each of them (docs/lab-general.md has what was tried).
STAGES = (
    LARGE,
    replace(LARGE, seed=3),
    replace(LARGE, draws={FLICKR: 1.5, MIRRORED: 1.5, BOOKS: 2}, mirrored=True),
    replace(LARGE, epochs=7, seed=1, share=0.24, draws={FLICKR: 2, COCO: 0.5, BOOKS: 2}),
    Stage(
        epochs=5,
        learning_rate=4e-4,
        batch=512,
        captions_per_image=5,
        class_batch=64,
        class_weight=0.1,
        share=0.16,
        draws={COCO: 0, BOOKS: 0},
        mirrored=True,
    ),
)


class Towers:
    """Both frozen towers, and features that were computed before."""

    def __init__(self, cache: Path) -> None:
        image_name, text_name = BOXED[GENERAL].towers
        size = tower_image_size(image_name)
        self.image_config, image_weights, self.preprocess = load_image_tower(image_name, size)
        self.text_config, text_weights, self.tokenizer = load_text_tower(text_name, CONTEXT)
        self.image = build_image_tower(self.image_config)
        self.image.load_state_dict(image_weights)
        self.text = build_text_tower(self.text_config)
        self.text.load_state_dict(text_weights)
        self.runner = TowerRunner(
            self.image.eval(), self.text.eval(), self.preprocess, torch.device("cpu"), "bf16"
        )
        self.mirror_runner = replace(self.runner, image=lambda pixels: self.image(pixels.flip(-1)))
        self.cache = cache
        cache.mkdir(parents=True, exist_ok=True)

    def images(self, folder: Path, names: Sequence[str], mirrored: bool = False) -> Tensor:
        """(n, width) float16 features of the image files of a folder, or of their mirror images.

        Each CHUNK of them is cached as one file.
        """
        chunks = [names[start : start + CHUNK] for start in range(0, len(names), CHUNK)]
        return torch.cat([self._chunk(folder, chunk, mirrored) for chunk in chunks])

    def _chunk(self, folder: Path, names: Sequence[str], mirrored: bool) -> Tensor:
        file = self._cache_file(f"{folder.name}-{MIRRORED}" if mirrored else folder.name, names)
        if not file.is_file():
            rows = np.zeros((len(names), self.image.width), np.float16)
            failures: dict[int, str] = {}
            refs = [FileImage(str(folder / name)) for name in names]
            runner = self.mirror_runner if mirrored else self.runner
            for indices, vectors in runner.files(refs, failures):
                rows[indices] = vectors.numpy()
            if failures:
                raise SystemExit(f"{len(failures)} unreadable images, such as {failures}")
            np.save(file, rows)
        return torch.from_numpy(np.load(file))

    def texts(self, name: str, texts: Sequence[str]) -> Tensor:
        """(n, width) float16 features of texts; each TEXT_CHUNK of them is cached as one file."""
        chunks = [texts[start : start + TEXT_CHUNK] for start in range(0, len(texts), TEXT_CHUNK)]
        return torch.cat([self._text_chunk(name, chunk) for chunk in chunks])

    def _text_chunk(self, name: str, texts: Sequence[str]) -> Tensor:
        file = self._cache_file(f"{name}-texts", texts)
        if not file.is_file():
            tokens = self.tokenizer.tokenize(texts, CONTEXT)
            vectors = in_order(self.runner.tokens(tokens, self.tokenizer.lengths(tokens)))
            np.save(file, vectors.numpy().astype(np.float16))
        return torch.from_numpy(np.load(file))

    def _cache_file(self, name: str, items: Sequence[str]) -> Path:
        digest = hashlib.sha256("\n".join(items).encode()).hexdigest()
        return self.cache / f"{name}-{digest[:12]}.npy"


@dataclass(frozen=True)
class Captioned:
    """Features of images, features of their captions, and the image of each caption."""

    images: Tensor
    captions: Tensor
    image_index: Tensor
    folders: dict[str, int]  # name of each folder -> its number of images, in order


@dataclass(frozen=True)
class Classes:
    """Images of classes, synthetic ones of ImageNet among them, and the names of the classes.

    A class may have several names, and a name may belong to several classes.
    """

    images: Tensor  # (n, width) features of the images in class folders
    labels: Tensor  # (n,) their classes
    directions: Tensor  # (1000, width) of standardized features; class i of ImageNet is class i
    named: Tensor  # (classes, names) whether the class has the name
    names: Tensor  # (names, templates, width) features of the names


def read_captions(
    folder: Path, towers: Towers, split: str = "train", mirrored: bool = False
) -> Captioned:
    """A split of a folder with captions.csv, or the mirror images of it."""
    captions: dict[str, list[str]] = {}
    with (folder / CAPTIONS).open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            if row["split"] == split:
                captions.setdefault(row["image"], []).append(row["caption"])
    texts = [text for captions_of_image in captions.values() for text in captions_of_image]
    index = [
        number
        for number, captions_of_image in enumerate(captions.values())
        for _ in captions_of_image
    ]
    return Captioned(
        towers.images(folder, list(captions), mirrored),
        towers.texts(folder.name, texts),
        torch.tensor(index),
        {MIRRORED if mirrored else folder.name: len(captions)},
    )


def class_folders(
    folder: Path, names: Collection[str] | None = None, first: int = 0, last: int = IMAGES_PER_CLASS
) -> list[tuple[str, list[str]]]:
    """(class name, files) of the class folders of these names; None: those that are not held out."""
    folders = sorted(
        path
        for path in folder.iterdir()
        if path.is_dir() and (path.name not in HELD_OUT if names is None else path.name in names)
    )
    return [
        (
            CLASS_NAMES.get(path.name, path.name.replace("_", " ").lower()),
            [f"{path.name}/{image.name}" for image in sorted(path.iterdir())[first:last]],
        )
        for path in folders
    ]


def everyday_names() -> dict[str, set[int]]:
    """The classes of ImageNet that a name of EVERYDAY belongs to."""
    classes: dict[str, set[int]] = {}
    for entry in EVERYDAY.split(";"):
        name, _, numbers = entry.strip().partition(":")
        for span in numbers.split():
            first, _, last = span.partition("-")
            classes.setdefault(name, set()).update(range(int(first), int(last or first) + 1))
    return classes


def synonyms() -> dict[str, set[str]]:
    """More names of the classes of folders."""
    entries = (entry.strip().partition(":") for entry in SYNONYMS.split(";"))
    return {name: set(more.split()) for name, _, more in entries}


def read_classes(
    folders: Sequence[Path], imagenet: Sequence[str], towers: Towers
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(images, labels, named, names) of `Classes`: those of ImageNet, then those of the folders."""
    classes = [
        (folder, *class_files) for folder in folders for class_files in class_folders(folder)
    ]
    everyday = everyday_names()
    of_folders = sorted({name for _, name, _ in classes})
    more = synonyms()
    names_of = {name: {name, *more.get(name, ())} for name in of_folders}
    vocabulary = sorted(
        {*(name.lower() for name in imagenet), *everyday, *itertools.chain(*names_of.values())}
    )
    row = {name: number for number, name in enumerate(vocabulary)}
    named = torch.zeros(len(imagenet) + len(of_folders), len(vocabulary), dtype=torch.bool)
    for number, name in enumerate(imagenet):
        named[number, row[name.lower()]] = True
    for name, numbers in everyday.items():
        named[sorted(numbers), row[name]] = True
    for number, name in enumerate(of_folders, start=len(imagenet)):
        named[number, [row[synonym] for synonym in names_of[name]]] = True
    features = []
    labels = []
    for folder in folders:
        members = [(name, files) for of, name, files in classes if of == folder]
        features.append(towers.images(folder, [file for _, files in members for file in files]))
        for name, files in members:
            labels += [len(imagenet) + of_folders.index(name)] * len(files)
    texts = [template.format(name) for name in vocabulary for template in TEMPLATES]
    names = towers.texts("names", texts).view(len(vocabulary), len(TEMPLATES), -1)
    images = (
        torch.cat(features) if features else torch.zeros(0, towers.image.width, dtype=torch.float16)
    )
    return images, torch.tensor(labels, dtype=torch.long), named, names


def joined(parts: Sequence[Captioned]) -> Captioned:
    """Several datasets as one."""
    starts = np.cumsum([0, *(len(part.images) for part in parts)]).tolist()
    return Captioned(
        torch.cat([part.images for part in parts]),
        torch.cat([part.captions for part in parts]),
        torch.cat([part.image_index + at for part, at in zip(parts, starts, strict=False)]),
        {name: count for part in parts for name, count in part.folders.items()},
    )


def new_model(towers: Towers) -> CLIP:
    """A model with new heads, whose hidden layers start from random weights."""
    torch.manual_seed(0)
    head = HeadConfig(kind="adapter", hidden=HIDDEN, dropout=DROPOUT)
    return build_clip(
        CLIPConfig(
            image_tower=towers.image_config,
            text_tower=towers.text_config,
            image_head=head,
            text_head=head,
            embed_dim=EMBED_DIM,
        )
    )


def class_logits(features: Tensor, towers: Towers) -> Tensor:
    """(n, 1000) logits of ImageNet: the mean of the classifiers in the packages, centered for each image."""
    image_name = BOXED[GENERAL].towers[0]
    ends = itertools.accumulate(part.width for part in towers.image.parts)  # type: ignore[union-attr]
    total = torch.zeros(len(features), 1)
    for package, end in zip(PACKAGES[image_name], ends, strict=True):
        weight = read_checkpoint(package_file(package, image_name))["_fc.weight"]
        total = total + features[:, end - HEAD_CHANNELS : end].float() @ weight.T
    return total - total.mean(dim=1, keepdim=True)


def class_directions(standardized: Tensor, logits: Tensor) -> Tensor:
    """(1000, width): how standardized features change if the logit of a class is one deviation higher."""
    scores = (logits - logits.mean(dim=0)) / logits.std(dim=0)
    return scores.T @ (standardized - standardized.mean(dim=0)) / len(standardized)


def initialize(model: CLIP, data: Captioned) -> None:
    """Standardize the features, and set both projections to the canonical directions of images and captions."""
    heads = (model.image_head, model.text_head)
    for head, rows in zip(heads, (data.images, data.captions), strict=True):
        head.standardize(*moments(rows))
    widths = (data.images.shape[1], data.captions.shape[1])
    xx, yy, xy = (
        torch.zeros(widths[a], widths[b], dtype=torch.float64) for a, b in ((0, 0), (1, 1), (0, 1))
    )
    sums = [torch.zeros(width, dtype=torch.float64) for width in (*widths, widths[1])]
    first = torch.searchsorted(data.image_index, torch.arange(len(data.images) + 1))
    for start in range(0, len(data.images), BLOCK):
        end = min(start + BLOCK, len(data.images))
        captions = slice(int(first[start]), int(first[end]))
        x = model.image_head.standardized(data.images[start:end])
        y = model.text_head.standardized(data.captions[captions])
        index = data.image_index[captions] - start
        count = torch.bincount(index, minlength=len(x)).clamp(min=1)[:, None]
        mean_captions = torch.zeros(len(x), widths[1]).index_add_(0, index, y) / count
        xx += x.T @ x
        yy += y.T @ y
        xy += x.T @ mean_captions
        for total, values in zip(sums, (x, y, mean_captions), strict=True):
            total.add_(values.sum(dim=0))
    images, texts = len(data.images), len(data.captions)
    x_mean, y_mean, mean_mean = sums[0] / images, sums[1] / texts, sums[2] / images
    xx = xx / images - x_mean[:, None] * x_mean
    yy = yy / texts - y_mean[:, None] * y_mean
    xy = xy / images - x_mean[:, None] * mean_mean
    directions = canonical(xx, yy, xy, EMBED_DIM, images)
    sides = zip(heads, directions, (x_mean, y_mean), (xx, yy), strict=True)
    with torch.no_grad():
        for head, rows, mean, covariance in sides:
            norm = ((rows @ covariance) * rows).sum().sqrt()
            matrix = rows * (OUTPUT_NORM / norm)
            head.project.weight.copy_(matrix)
            head.project.bias.copy_(-matrix @ mean)


def moments(rows: Tensor) -> tuple[Tensor, Tensor]:
    """(mean, deviation) of each column."""
    total = torch.zeros(2, rows.shape[1], dtype=torch.float64)
    for start in range(0, len(rows), BLOCK):
        block = rows[start : start + BLOCK].double()
        total += torch.stack([block.sum(dim=0), block.square().sum(dim=0)])
    mean, square = total / len(rows)
    return mean.float(), (square - mean.square()).clamp(min=0).sqrt().float()


def contrastive(images: Tensor, texts: Tensor, scale: Tensor, positive: Tensor) -> Tensor:
    """The symmetric contrastive loss.

    `positive` (images, texts) is True where a text describes an image.
    """
    logits = scale * images @ texts.T
    by_image = -(F.log_softmax(logits, dim=1) * positive).sum(dim=1) / positive.sum(dim=1)
    by_text = -(F.log_softmax(logits, dim=0) * positive).sum(dim=0) / positive.sum(dim=0)
    return (by_image.mean() + by_text.mean()) / 2


def train(model: CLIP, stage: Stage, captioned: Captioned, classes: Classes) -> None:
    """Train both heads on captions, class folders and synthetic features of the classes of ImageNet."""
    rng = np.random.default_rng(stage.seed)
    caption_rows = np.split(
        np.arange(len(captioned.captions)),
        np.flatnonzero(np.diff(captioned.image_index.numpy())) + 1,
    )
    heads = [*model.image_head.parameters(), *model.text_head.parameters()]
    log_scale = torch.nn.Parameter(torch.tensor(math.log(FIRST_SCALE)))
    optimizer = torch.optim.AdamW(
        [
            {"params": heads, "weight_decay": stage.weight_decay},
            {"params": [log_scale], "weight_decay": 0.0},
        ]
    )
    steps_per_epoch = sum(stage.drawn(captioned.folders).values()) // stage.batch
    steps = stage.epochs * steps_per_epoch
    step = 0
    for epoch in range(stage.epochs):
        began = time.monotonic()
        order = epoch_order(stage, captioned.folders, rng)
        for start in range(0, steps_per_epoch * stage.batch, stage.batch):
            fraction = min(1.0, (step + 1) / (WARMUP * steps))
            learning_rate = (
                stage.learning_rate * fraction * 0.5 * (1 + math.cos(math.pi * step / steps))
            )
            optimizer.param_groups[0]["lr"] = learning_rate
            optimizer.param_groups[1]["lr"] = 10 * learning_rate
            scale = log_scale.exp().clamp(max=100)
            chosen = order[start : start + stage.batch]
            picked = [
                rng.permutation(caption_rows[row])[: stage.captions_per_image] for row in chosen
            ]
            owner = np.repeat(chosen, [len(rows) for rows in picked])
            loss = contrastive(
                encode(model.image_head, captioned.images[chosen], rng),
                encode(model.text_head, captioned.captions[np.concatenate(picked)], rng),
                scale,
                torch.from_numpy(chosen)[:, None] == torch.from_numpy(owner),
            )
            images, positive, texts = class_batch(model, stage, captioned.images, classes, rng)
            loss = loss + stage.class_weight * contrastive(
                encode(model.image_head, images, rng),
                encode(model.text_head, texts, rng),
                scale,
                positive,
            )
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
        seconds = time.monotonic() - began
        print(f"epoch {epoch + 1}: loss {loss.item():.3f}, {seconds:.0f} s", flush=True)
    with torch.no_grad():
        model.logit_scale.copy_(log_scale.clamp(max=math.log(100)))


def epoch_order(stage: Stage, folders: dict[str, int], rng: np.random.Generator) -> np.ndarray:
    """The images of an epoch, in random order; some of them several times (`Stage.draws`)."""
    rows = []
    start = 0
    for name, drawn in stage.drawn(folders).items():
        count = folders[name]
        repeats = [rng.permutation(count) for _ in range(ceil_div(drawn, count))]
        rows.append(start + np.concatenate([np.empty(0, int), *repeats])[:drawn])
        start += count
    return rng.permutation(np.concatenate(rows))


def class_batch(
    model: CLIP, stage: Stage, backgrounds: Tensor, classes: Classes, rng: np.random.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    """(images, which name belongs to which image, names): synthetic images, and half as many real ones."""
    count = stage.class_batch
    made = rng.integers(0, len(classes.directions), count)
    rows = backgrounds[rng.integers(0, len(backgrounds), count)]
    behind = model.image_head.standardized(rows)
    strength = torch.from_numpy(rng.uniform(*SYNTHETIC_STRENGTH, (count, 1))).float()
    synthetic = SYNTHETIC_SIGMA * strength * classes.directions[made] + BACKGROUND * behind
    images = synthetic * model.image_head.deviation + model.image_head.mean
    labels = torch.from_numpy(made)
    if len(classes.images):
        real = rng.integers(0, len(classes.images), count // 2)
        images = torch.cat([images, classes.images[real].float()])
        labels = torch.cat([labels, classes.labels[real]])
    positive = classes.named[labels]
    used = positive.any(dim=0)
    template = torch.from_numpy(rng.integers(0, classes.names.shape[1], int(used.sum())))
    return images, positive[:, used], classes.names[used.nonzero()[:, 0], template]


def heads_after(
    stage: Stage,
    model: CLIP,
    initial: dict[str, Tensor],
    captioned: Captioned,
    classes: Classes,
    cache: Path,
) -> dict[str, Tensor]:
    """The heads after a training from `initial`, which are stored in the cache."""
    digest = hashlib.sha256(repr((replace(stage, share=0), DROPOUT)).encode())
    data = (classes.images, classes.labels, classes.directions, classes.named, classes.names)
    for tensor in (*initial.values(), *data):
        digest.update(tensor.numpy().tobytes())
    file = cache / f"heads-{digest.hexdigest()[:12]}.pt"
    if not file.is_file():
        model.load_state_dict(initial, strict=False)
        train(model, stage, captioned, classes)
        torch.save(heads_of(model), file)
    return dict(torch.load(file))


def train_mean(
    model: CLIP,
    captioned: Captioned,
    classes: Classes,
    cache: Path,
    mirrored: Captioned | None = None,
    validation: Validation | None = None,
) -> None:
    """Train once for each of STAGES that has images, from the same start, and take the weighted mean.

    Stages with mirror images draw those of `mirrored`, too.
    """
    with_mirrored = joined([captioned, mirrored]) if mirrored else captioned
    initial = {name: tensor.clone() for name, tensor in heads_of(model).items()}
    total = {name: torch.zeros_like(tensor) for name, tensor in initial.items()}
    stages = [stage for stage in STAGES if any(stage.drawn(captioned.folders).values())]
    shares = sum(stage.share for stage in stages)
    for stage in stages:
        images = with_mirrored if stage.mirrored else captioned
        heads = heads_after(stage, model, initial, images, classes, cache)
        if validation:
            model.load_state_dict(heads, strict=False)
            print(f"validation: {validation.figures(model)}", flush=True)
        for name, tensor in heads.items():
            total[name] += stage.share / shares * tensor
    model.load_state_dict(total, strict=False)
    if validation:
        print(f"validation of the mean: {validation.figures(model)}")


class Validation:
    """Figures of a model on images that it was not trained on, for the choice of STAGES.

    They are the val split of each folder with captions, the class folders of VALIDATION_CLASSES,
    more images of the scenes, and scenes of another dataset.
    """

    def __init__(self, captions: Sequence[Path], classes: Sequence[Path], towers: Towers) -> None:
        self.captioned = {
            folder.name: read_captions(folder, towers, "val")
            for folder in captions
            if (folder / CAPTIONS).is_file()
        }
        self.classes: dict[str, tuple[Tensor, Tensor, Tensor]] = {}
        for folder in classes:
            class_files = []
            if folder.name == SCENES:
                scenes = [path.name for path in folder.iterdir()]
                class_files = class_folders(folder, scenes, IMAGES_PER_CLASS, VALIDATION_SCENES)
            elif folder.name == CALTECH:
                class_files = class_folders(
                    folder, VALIDATION_CLASSES.split(), 0, VALIDATION_IMAGES
                )
            elif folder.name == OTHER_SCENES:
                scenes = [path.name for path in folder.iterdir()]
                class_files = class_folders(folder, scenes, 0, VALIDATION_OTHER_SCENES)
            if class_files:
                self.classes[folder.name] = self._class_images(folder, class_files, towers)

    @staticmethod
    def _class_images(
        folder: Path, classes: list[tuple[str, list[str]]], towers: Towers
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(images, their classes, (classes, templates, width) names)."""
        images = towers.images(folder, [file for _, files in classes for file in files])
        labels = [number for number, (_, files) in enumerate(classes) for _ in files]
        texts = [template.format(name) for name, _ in classes for template in ZEROSHOT_TEMPLATES]
        names = towers.texts(f"{folder.name}-v", texts).view(
            len(classes), len(ZEROSHOT_TEMPLATES), -1
        )
        return images, torch.tensor(labels), names

    @torch.inference_mode()
    def figures(self, model: CLIP) -> dict[str, float]:
        """Recall@10 (the mean of both directions) and zero-shot accuracy, in percent."""
        scores = {}
        for name, data in self.captioned.items():
            images = model.project_image(data.images.float()).numpy()
            texts = model.project_text(data.captions.float()).numpy()
            rank = ranks(images, texts, data.image_index.numpy())
            both = (rank.text_to_image <= 10).mean() + (rank.image_to_text <= 10).mean()
            scores[name] = 50 * float(both)
        for name, (rows, labels, names) in self.classes.items():
            vectors = model.project_text(names.float().flatten(0, 1)).view(*names.shape[:2], -1)
            classes = F.normalize(vectors.mean(dim=1), dim=1)
            best = (model.project_image(rows.float()) @ classes.T).argmax(dim=1)
            scores[name] = 100 * float((best == labels).float().mean())
        return {name: round(value, 2) for name, value in scores.items()}


def heads_of(model: CLIP) -> dict[str, Tensor]:
    """The weights of both heads, their statistics, and the logit scale."""
    return {
        name: tensor
        for name, tensor in model.state_dict().items()
        if not name.startswith(TOWER_PREFIXES)
    }


def encode(head: torch.nn.Module, features: Tensor, rng: np.random.Generator) -> Tensor:
    """Unit vectors of features, with dropout."""
    keys = torch.from_numpy(rng.integers(-(2**63), 2**63 - 1, len(features)))
    with torch.autocast("cpu", torch.bfloat16):
        return F.normalize(head(features, keys).float(), dim=1)


def main() -> None:
    """Train, write the files, and print their hashes for m1clip/model/named.py."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--captions", type=Path, nargs="+", required=True)
    parser.add_argument("--mirror", type=Path)
    parser.add_argument("--classes", type=Path, nargs="*", default=[])
    parser.add_argument("--names", type=Path, required=True)
    parser.add_argument("--cache", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=BOXED[GENERAL].folder)
    parser.add_argument(
        "--validate",
        type=Path,
        nargs="*",
        help="print figures on validation after each training; more folders for it",
    )
    options = parser.parse_args()
    towers = Towers(options.cache)
    captioned = joined([read_captions(folder, towers) for folder in options.captions])
    imagenet = options.names.read_text(encoding="utf-8").splitlines()
    images, labels, named, names = read_classes(options.classes, imagenet, towers)
    print(
        f"{len(captioned.images):,} images with {len(captioned.captions):,} captions, "
        f"{len(images):,} images of classes, {len(names):,} names"
    )
    torch.set_num_threads(1)  # sums of several threads would depend on the number of cores
    model = new_model(towers)
    initialize(model, captioned)
    inputs = torch.cat([captioned.images, images])
    directions = class_directions(
        model.image_head.standardized(inputs), class_logits(inputs, towers)
    )
    validation = None
    if options.validate is not None:
        folders = [*options.captions, *options.validate]
        validation = Validation(folders, [*options.classes, *options.validate], towers)
    classes = Classes(images, labels, directions, named, names)
    mirrored = read_captions(options.mirror, towers, mirrored=True) if options.mirror else None
    train_mean(model, captioned, classes, options.cache, mirrored, validation)
    options.out.mkdir(parents=True, exist_ok=True)
    write_boxed(options.out, model, towers.preprocess)
    for file in (CONFIG, HEADS):
        print(file, hashlib.sha256((options.out / file).read_bytes()).hexdigest())


if __name__ == "__main__":
    main()
