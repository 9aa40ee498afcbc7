"""Train the heads of the model `general` and write them to m1clip/models/general (docs/models.md).

    python tools/general_data.py --clones clones --out data
    python tools/train_general.py --captions flickr8k-112 data/coco --classes data/caltech101 \
        --names data/imagenet_names.txt --cache features

--captions: folders with captions.csv (image, caption, split); rows of split `train` are used.
--classes: a folder with one folder of images per class, of which HELD_OUT are not used; may be left
out. --names: the 1,000 class names of ImageNet, one per line, in the order of the classifiers in
the towers' packages. --cache: where features are stored, so that a second run does not compute them
again.

The same data gives the same file on the same kind of machine: all random numbers have a fixed seed.

The towers are frozen. Both heads start from a canonical correlation analysis (CCA) of images and
captions, and are then trained with a contrastive loss on captions, on class folders, and on
synthetic features of the ImageNet classes: the classifiers that the EfficientNet packages contain
tell in which direction of the features a class lies, so no image of ImageNet is needed to connect
the class to its name. This is done twice, once with more weight on captions and once with more on
classes; the model is the mean of both, weighted.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from m1clip.data.images import FileImage
from m1clip.inference.batches import TowerRunner, in_order
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

# Classes of Caltech-101 for validation and for the table in docs/models.md.
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
IMAGES_PER_CLASS = 60  # of a class folder
EMBED_DIM, CONTEXT = 256, 64
HIDDEN = 64  # width of the hidden layer of a head: heads of less than 5 MB
DROPOUT = 0.5  # of the hidden layer; 0.4 times that of the features
SYNTHETIC_SIGMA = (
    4.0  # by how many deviations the logit of a synthetic class image is above the mean
)
BACKGROUND = 0.7  # weight of the real image that a class is added to
WEIGHT_DECAY, WARMUP = 0.1, 0.1


@dataclass(frozen=True)
class Stage:
    """One training of the heads, from their initialization."""

    epochs: int
    learning_rate: float
    batch: int  # images with captions
    captions_per_image: int
    class_batch: int  # synthetic class images; half as many real ones
    class_weight: float  # of the loss on classes
    share: float  # of the model in the weighted mean


STAGES = (
    Stage(
        epochs=6,
        learning_rate=4e-4,
        batch=512,
        captions_per_image=5,
        class_batch=128,
        class_weight=0.3,
        share=0.65,
    ),
    Stage(
        epochs=9,
        learning_rate=1e-3,
        batch=256,
        captions_per_image=2,
        class_batch=256,
        class_weight=1.0,
        share=0.35,
    ),
)
FIRST_SCALE = 20.0


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
        self.cache = cache
        cache.mkdir(parents=True, exist_ok=True)

    def images(self, name: str, paths: Sequence[Path]) -> Tensor:
        """(n, width) features of image files, cached as NAME.npy."""
        file = self.cache / f"{name}.npy"
        if file.is_file() and len(rows := np.load(file)) == len(paths):
            return torch.from_numpy(rows).float()
        refs = [FileImage(str(path)) for path in paths]
        rows = np.zeros((len(paths), self.image.width), np.float16)
        failures: dict[int, str] = {}
        for indices, vectors in self.runner.files(refs, failures):
            rows[indices] = vectors.numpy()
        if failures:
            raise SystemExit(
                f"{len(failures)} unreadable images, such as {next(iter(failures.items()))}"
            )
        np.save(file, rows)
        return torch.from_numpy(rows).float()

    def texts(self, name: str, texts: Sequence[str]) -> Tensor:
        """(n, width) features of texts, cached as NAME-texts.npy."""
        file = self.cache / f"{name}-texts.npy"
        if file.is_file() and len(rows := np.load(file)) == len(texts):
            return torch.from_numpy(rows).float()
        tokens = self.tokenizer.tokenize(texts, CONTEXT)
        vectors = in_order(self.runner.tokens(tokens, self.tokenizer.lengths(tokens)))
        rows = vectors.numpy().astype(np.float16)  # also the first time, when nothing is cached
        np.save(file, rows)
        return torch.from_numpy(rows).float()


@dataclass(frozen=True)
class Captioned:
    """Features of images, features of their captions, and the image of each caption."""

    images: Tensor
    captions: Tensor
    image_index: Tensor


@dataclass(frozen=True)
class Classes:
    """Features of class images with their class numbers, and features of the names: (classes, templates, width)."""

    images: Tensor
    labels: Tensor
    names: Tensor


def read_captions(folder: Path, towers: Towers) -> Captioned:
    """The train split of a folder with captions.csv."""
    captions: dict[str, list[str]] = {}
    with (folder / "captions.csv").open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            if row["split"] == "train":
                captions.setdefault(row["image"], []).append(row["caption"])
    texts = [text for each in captions.values() for text in each]
    index = [number for number, each in enumerate(captions.values()) for _ in each]
    return Captioned(
        towers.images(folder.name, [folder / name for name in captions]),
        towers.texts(folder.name, texts),
        torch.tensor(index),
    )


def read_classes(folder: Path, towers: Towers) -> Classes:
    """The class folders that are not held out."""
    folders = sorted(
        path for path in folder.iterdir() if path.is_dir() and path.name not in HELD_OUT
    )
    names = [CLASS_NAMES.get(path.name, path.name.replace("_", " ").lower()) for path in folders]
    known = sorted(set(names))
    paths = []
    labels = []
    for path, name in zip(folders, names, strict=True):
        images = sorted(path.iterdir())[:IMAGES_PER_CLASS]
        paths += images
        labels += [known.index(name)] * len(images)
    return Classes(
        towers.images(folder.name, paths), torch.tensor(labels), named(known, folder.name, towers)
    )


def named(names: Sequence[str], source: str, towers: Towers) -> Tensor:
    """(names, templates, width) features of names in sentences."""
    texts = [template.format(name) for name in names for template in TEMPLATES]
    return towers.texts(f"{source}-names", texts).view(len(names), len(TEMPLATES), -1)


def class_logits(features: Tensor, towers: Towers) -> Tensor:
    """(n, 1000) logits of ImageNet: the mean of the classifiers in the packages, centered for each image."""
    image_name = BOXED[GENERAL].towers[0]
    ends = (towers.image.first.width, towers.image.width)  # type: ignore[union-attr]
    total = torch.zeros(len(features), 1)
    for package, end in zip(PACKAGES[image_name], ends, strict=True):
        weight = read_checkpoint(package_file(package, image_name))["_fc.weight"]
        total = total + features[:, end - HEAD_CHANNELS : end] @ weight.T
    return total - total.mean(dim=1, keepdim=True)


def class_directions(standardized: Tensor, logits: Tensor) -> Tensor:
    """(1000, width): how standardized features change if the logit of a class is one deviation higher."""
    centered = standardized - standardized.mean(dim=0)
    scores = (logits - logits.mean(dim=0)) / logits.std(dim=0)
    return scores.T @ centered / len(centered)


def initialize(model: CLIP, data: Captioned) -> None:
    """Standardize the features, and set both projections to the canonical directions of images and captions."""
    heads = (model.image_head, model.text_head)
    for head, rows in zip(heads, (data.images, data.captions), strict=True):
        head.standardize(rows.mean(dim=0), rows.std(dim=0, correction=0))
    x = model.image_head.standardized(data.images)
    y = model.text_head.standardized(data.captions)
    count = torch.bincount(data.image_index, minlength=len(x)).clamp(min=1)[:, None]
    mean_captions = torch.zeros(len(x), y.shape[1]).index_add_(0, data.image_index, y) / count
    x_mean, y_mean = x.mean(dim=0), y.mean(dim=0)
    xx = ((x - x_mean).T @ (x - x_mean)).double() / len(x)
    yy = ((y - y_mean).T @ (y - y_mean)).double() / len(y)
    xy = ((x - x_mean).T @ (mean_captions - mean_captions.mean(dim=0))).double() / len(x)
    directions = canonical(xx, yy, xy, EMBED_DIM, len(x))
    sides = zip(heads, directions, (x_mean, y_mean), (xx, yy), strict=True)
    with torch.no_grad():
        for head, rows, mean, covariance in sides:
            norm = ((rows @ covariance) * rows).sum().sqrt()
            matrix = rows * (OUTPUT_NORM / norm)
            head.project.weight.copy_(matrix)
            head.project.bias.copy_(-matrix @ mean.double())


def contrastive(images: Tensor, texts: Tensor, scale: Tensor, positive: Tensor) -> Tensor:
    """The symmetric contrastive loss.

    `positive` (images, texts) is True where a text describes an image.
    """
    logits = scale * images @ texts.T
    by_image = -(F.log_softmax(logits, dim=1) * positive).sum(dim=1) / positive.sum(dim=1)
    by_text = -(F.log_softmax(logits, dim=0) * positive).sum(dim=0) / positive.sum(dim=0)
    return (by_image.mean() + by_text.mean()) / 2


def train(
    model: CLIP,
    stage: Stage,
    captioned: Captioned,
    folders: Classes | None,
    names: Tensor,
    directions: Tensor,
) -> None:
    """Train both heads on captions, class folders and synthetic features of the classes of ImageNet."""
    rng = np.random.default_rng(0)
    torch.manual_seed(0)
    standard_images = model.image_head.standardized(captioned.images)
    caption_rows = [
        np.flatnonzero(captioned.image_index.numpy() == number)
        for number in range(len(standard_images))
    ]
    heads = [*model.image_head.parameters(), *model.text_head.parameters()]
    log_scale = torch.nn.Parameter(torch.tensor(math.log(FIRST_SCALE)))
    optimizer = torch.optim.AdamW(
        [
            {"params": heads, "weight_decay": WEIGHT_DECAY},
            {"params": [log_scale], "weight_decay": 0.0},
        ]
    )
    steps_per_epoch = len(standard_images) // stage.batch
    steps = stage.epochs * steps_per_epoch
    deviation, mean = model.image_head.deviation, model.image_head.mean
    step = 0
    for epoch in range(stage.epochs):
        began = time.monotonic()
        order = rng.permutation(len(standard_images))
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
            owner = np.repeat(np.arange(stage.batch), [len(rows) for rows in picked])
            loss = contrastive(
                encode(model.image_head, captioned.images[chosen], rng),
                encode(model.text_head, captioned.captions[np.concatenate(picked)], rng),
                scale,
                torch.arange(stage.batch)[:, None] == torch.from_numpy(owner),
            )
            made = rng.integers(0, len(directions), stage.class_batch)
            behind = standard_images[rng.integers(0, len(standard_images), stage.class_batch)]
            strength = torch.from_numpy(rng.uniform(0.7, 1.5, (stage.class_batch, 1))).float()
            synthetic = SYNTHETIC_SIGMA * strength * directions[made] + BACKGROUND * behind
            images = synthetic * deviation + mean
            labels = torch.from_numpy(made)
            class_names = names
            if folders is not None:  # half as many real images of classes
                real = rng.integers(0, len(folders.images), stage.class_batch // 2)
                images = torch.cat([images, folders.images[real]])
                labels = torch.cat([labels, folders.labels[real] + len(names)])
                class_names = torch.cat([names, folders.names])
            classes = torch.unique(labels)
            template = torch.from_numpy(rng.integers(0, len(TEMPLATES), len(classes)))
            texts = class_names[classes, template]
            loss = loss + stage.class_weight * contrastive(
                encode(model.image_head, images, rng),
                encode(model.text_head, texts, rng),
                scale,
                labels[:, None] == classes,
            )
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
        seconds = time.monotonic() - began
        print(f"epoch {epoch + 1}: loss {loss.item():.3f}, {seconds:.0f} s", flush=True)
    with torch.no_grad():
        model.logit_scale.copy_(log_scale.clamp(max=math.log(100)))


def train_mean(
    model: CLIP, captioned: Captioned, folders: Classes | None, names: Tensor, directions: Tensor
) -> None:
    """Train once for each of STAGES, from the same start, and take the weighted mean."""
    initial = {name: tensor.clone() for name, tensor in heads_of(model).items()}
    total = {name: torch.zeros_like(tensor) for name, tensor in initial.items()}
    for stage in STAGES:
        model.load_state_dict(initial, strict=False)
        train(model, stage, captioned, folders, names, directions)
        for name, tensor in heads_of(model).items():
            total[name] += stage.share * tensor
    model.load_state_dict(total, strict=False)


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
    return F.normalize(head(features, keys), dim=1)


def main() -> None:
    """Train, write the files, and print their hashes for m1clip/model/named.py."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--captions", type=Path, nargs="+", required=True)
    parser.add_argument("--classes", type=Path)
    parser.add_argument("--names", type=Path, required=True)
    parser.add_argument("--cache", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=BOXED[GENERAL].folder)
    options = parser.parse_args()
    towers = Towers(options.cache)
    parts = [read_captions(folder, towers) for folder in options.captions]
    offsets = np.cumsum([0, *(len(part.images) for part in parts)]).tolist()
    captioned = Captioned(
        torch.cat([part.images for part in parts]),
        torch.cat([part.captions for part in parts]),
        torch.cat([part.image_index + at for part, at in zip(parts, offsets, strict=False)]),
    )
    folders = None if options.classes is None else read_classes(options.classes, towers)
    names = named(options.names.read_text(encoding="utf-8").splitlines(), "imagenet", towers)
    class_images = [] if folders is None else [folders.images]
    print(
        f"{len(captioned.images):,} images with {len(captioned.captions):,} captions, "
        f"{sum(map(len, class_images)):,} images of classes"
    )
    torch.manual_seed(0)  # the hidden layers of the heads start from random weights
    head = HeadConfig(kind="adapter", hidden=HIDDEN, dropout=DROPOUT)
    model = build_clip(
        CLIPConfig(
            image_tower=towers.image_config,
            text_tower=towers.text_config,
            image_head=head,
            text_head=head,
            embed_dim=EMBED_DIM,
        )
    )
    initialize(model, captioned)
    seen = torch.cat([captioned.images, *class_images])
    directions = class_directions(model.image_head.standardized(seen), class_logits(seen, towers))
    train_mean(model, captioned, folders, names, directions)
    options.out.mkdir(parents=True, exist_ok=True)
    write_boxed(options.out, model, towers.preprocess)
    for file in (CONFIG, HEADS):
        print(file, hashlib.sha256((options.out / file).read_bytes()).hexdigest())


if __name__ == "__main__":
    main()
