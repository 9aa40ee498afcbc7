"""Classes by their names alone: a model that has seen no label says which sentence suits a picture best."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from m1clip.data.images import BadImage
from m1clip.data.sources.reading import walk_pictures
from m1clip.errors import UserError
from m1clip.evaluate.bundle import Bundle
from m1clip.evaluate.interval import share_intervals
from m1clip.evaluate.metric import Metric, Scores

TEMPLATES = (
    "a photo of a {}.",
    "a picture of a {}.",
    "a close-up photo of a {}.",
    "there is a {} here.",
    "{}",
)
TOP = (1, 5)
BATCH = 64


@dataclass(frozen=True)
class LabelledPictures:
    """Pictures with the number of their class."""

    names: tuple[str, ...]  # of the classes
    paths: tuple[Path, ...]
    labels: tuple[int, ...]


def class_folders(folder: Path, names: Sequence[str] = ()) -> LabelledPictures:
    """cats/1.jpg: the folder is the class. `names`, in the order of the sorted folders, take the place of theirs."""
    if not folder.is_dir():
        raise UserError(
            f"{folder}: no folder there; --classes takes a folder with one folder of pictures a class"
        )
    found = [
        (path.parts[0], folder / path) for path in map(Path, walk_pictures(folder)) if len(path.parts) > 1
    ]
    classes = sorted({label for label, _ in found})
    if len(classes) < 2:
        raise UserError(f"{folder}: holds {len(classes)} class folders with pictures; two or more are needed")
    if names and len(names) != len(classes):
        raise UserError(f"{len(names)} names for the {len(classes)} class folders of {folder}")
    shown = names or [label.replace("_", " ").replace("-", " ").strip() for label in classes]
    number = {label: place for place, label in enumerate(classes)}
    return LabelledPictures(
        tuple(shown), tuple(path for _, path in found), tuple(number[label] for label, _ in found)
    )


def class_vectors(bundle: Bundle, names: Sequence[str], templates: Sequence[str] = TEMPLATES) -> Tensor:
    """(classes, d) unit vectors: the mean over the templates, each of which must hold a {}."""
    for template in templates:
        if "{}" not in template:
            raise UserError(f"template '{template}': has no {{}} for the name of the class")
    sentences = [template.replace("{}", name) for name in names for template in templates]
    vectors = bundle.encode_texts(sentences).view(len(names), len(templates), -1)
    return F.normalize(vectors.mean(dim=1), dim=-1)


def top_scores(scores: Tensor, labels: Tensor, prefix: str = "zero_shot", at: Sequence[int] = TOP) -> Scores:
    """Top-k accuracy of scores (pictures, classes), each with its interval and chance."""
    classes = scores.shape[1]
    kept = [k for k in at if k < classes]
    order = scores.topk(max(kept), dim=1).indices
    hits = torch.stack([(order[:, :k] == labels[:, None]).any(dim=1) for k in kept], dim=1)
    shares, intervals = hits.double().mean(dim=0).tolist(), share_intervals(hits, torch.arange(len(labels)))
    return Scores(
        tuple(
            Metric(f"{prefix}/top{k}", share, k / classes, interval, len(labels))
            for k, share, interval in zip(kept, shares, intervals, strict=True)
        )
    )


def confusion(predicted: Tensor, labels: Tensor, classes: int) -> Tensor:
    """(classes, classes) counts: row the truth, column what was said."""
    return torch.bincount(labels * classes + predicted, minlength=classes**2).view(classes, classes)


def encode_readable(bundle: Bundle, paths: Sequence[Path]) -> tuple[Tensor, list[int], list[str]]:
    """(features, places of the pictures that could be read, why the others could not)."""
    features, kept, reasons = [], [], []
    for places in _chunks(len(paths), BATCH):
        squares = []
        for place in places:
            try:
                squares.append(bundle.square(paths[place]))
            except (BadImage, OSError) as error:
                reasons.append(str(error))
            else:
                kept.append(place)
        if squares:
            features.append(bundle.encode_images(squares))
    if not kept:
        raise UserError(
            f"none of the {len(paths)} pictures can be read; first: {(reasons or ['no pictures'])[0]}"
        )
    return torch.cat(features).cpu(), kept, reasons


def _chunks(count: int, size: int) -> Iterator[range]:
    for start in range(0, count, size):
        yield range(start, min(start + size, count))
