"""Classes by their names alone: a model that has seen no label says which sentence suits an image best."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from m1clip.data.images import BadImage
from m1clip.data.sources.base import walk_images
from m1clip.errors import UserError
from m1clip.evaluation.figures import confusion_image
from m1clip.evaluation.statistics import Metric, Scores, share_intervals
from m1clip.inference.encoder import Bundle

TEMPLATES = ("a photo of a {}.", "an image of a {}.", "a close-up photo of a {}.", "there is a {} here.", "{}")
TOP = (1, 5)
BATCH = 64


@dataclass(frozen=True)
class LabelledImages:
    """Images with the number of their class."""

    names: tuple[str, ...]  # of the classes
    paths: tuple[Path, ...]
    labels: tuple[int, ...]


def class_folders(folder: Path, names: Sequence[str] = ()) -> LabelledImages:
    """cats/1.jpg: the folder is the class. `names`, in the order of the sorted folders, take the place of theirs."""
    if not folder.is_dir():
        raise UserError(f"{folder}: no folder there; --classes takes a folder with one folder of images a class")
    found = [(path.parts[0], folder / path) for path in map(Path, walk_images(folder)) if len(path.parts) > 1]
    classes = sorted({label for label, _ in found})
    if len(classes) < 2:
        raise UserError(f"{folder}: holds {len(classes)} class folders with images; two or more are needed")
    if names and len(names) != len(classes):
        raise UserError(f"{len(names)} names for the {len(classes)} class folders of {folder}")
    shown = names or [label.replace("_", " ").replace("-", " ").strip() for label in classes]
    number = {label: place for place, label in enumerate(classes)}
    return LabelledImages(tuple(shown), tuple(path for _, path in found), tuple(number[label] for label, _ in found))


def class_vectors(bundle: Bundle, names: Sequence[str], templates: Sequence[str] = TEMPLATES) -> Tensor:
    """(classes, d) unit vectors: the mean over the templates, each of which must hold a {}."""
    for template in templates:
        if "{}" not in template:
            raise UserError(f"template '{template}': has no {{}} for the name of the class")
    sentences = [template.replace("{}", name) for name in names for template in templates]
    vectors = bundle.encode_texts(sentences).view(len(names), len(templates), -1)
    return F.normalize(vectors.mean(dim=1), dim=-1)


def top_scores(scores: Tensor, labels: Tensor, prefix: str = "zero_shot", at: Sequence[int] = TOP) -> Scores:
    """Top-k accuracy of scores (images, classes), each with its interval and chance."""
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
    """(features, places of the images that could be read, why the others could not)."""
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
        raise UserError(f"none of the {len(paths)} images can be read; first: {(reasons or ['no images'])[0]}")
    return torch.cat(features).cpu(), kept, reasons


def _chunks(count: int, size: int) -> Iterator[range]:
    for start in range(0, count, size):
        yield range(start, min(start + size, count))


HELD_OUT = 0.3
ROUNDS = 1000


def linear_probe(features: Tensor, labels: Tensor, seed: int = 0, strength: float = 1.0) -> Scores:
    """Accuracy on a held-out third of each class, after logistic regression on the rest (scikit-learn)."""
    try:
        sklearn = importlib.import_module("sklearn.linear_model")
    except ImportError:
        raise UserError("the linear probe needs scikit-learn: pip install 'm1clip[probe]'") from None
    test = held_out(labels, seed)
    if bool(test.all()) or not bool(test.any()):
        raise UserError("the linear probe needs at least two images of some class")
    model = sklearn.LogisticRegression(C=strength, max_iter=ROUNDS)
    # Unit vectors have entries far below one, which the penalty would flatten.
    scaled = features.numpy() * features.shape[1] ** 0.5
    model.fit(scaled[(~test).numpy()], labels[~test].numpy())
    said = torch.full((int(test.sum()), int(labels.max()) + 1), float("-inf"), dtype=torch.float64)
    known = torch.from_numpy(model.predict_log_proba(scaled[test.numpy()])).double()
    said[:, torch.from_numpy(model.classes_)] = known
    return top_scores(said, labels[test], prefix="linear_probe")


def held_out(labels: Tensor, seed: int) -> Tensor:
    """(n,) bool: about a third of each class, at least one where there are two; a function of the seed."""
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.zeros(len(labels), dtype=torch.bool)
    for label in labels.unique():
        places = (labels == label).nonzero()[:, 0]
        order = places[torch.randperm(len(places), generator=generator)]
        count = max(round(HELD_OUT * len(places)), min(1, len(places) - 1))
        chosen[order[:count]] = True
    return chosen


def classify(bundle: Bundle, image: Path, labels: Sequence[str], templates: Sequence[str]) -> list[tuple[str, float]]:
    """(label, share) from the best on; the shares are the model's own, by its temperature, and sum to one."""
    if len(labels) < 2:
        raise UserError("--labels: give two or more, with commas between them")
    query, _, _ = encode_readable(bundle, [image])
    scale = bundle.model.scale().detach().cpu()
    shares = (scale * query @ class_vectors(bundle, labels, templates).cpu().T)[0].softmax(dim=0)
    order = shares.argsort(descending=True).tolist()
    return [(labels[place], float(shares[place])) for place in order]


def similar(bundle: Bundle, image: Path, folder: Path, count: int) -> tuple[list[tuple[Path, float]], list[str]]:
    """((path, cosine) from the nearest on, why some could not be read); the image itself is left out."""
    if not folder.is_dir():
        raise UserError(f"{folder}: no folder there")
    own = image.resolve()
    paths = [path for path in (folder / name for name in walk_images(folder)) if path.resolve() != own]
    if not paths:
        raise UserError(f"{folder}: holds no other images")
    query, _, _ = encode_readable(bundle, [image])
    features, kept, unreadable = encode_readable(bundle, paths)
    cosine = (features @ query[0]).tolist()
    order = sorted(range(len(kept)), key=lambda place: -cosine[place])[:count]
    return [(paths[kept[place]], cosine[place]) for place in order], unreadable


def score_classes(
    bundle: Bundle, folder: Path, names: Sequence[str], templates: Sequence[str], probe: bool, image: Path
) -> tuple[Scores, list[str]]:
    """Zero-shot accuracy over class folders, a linear probe if asked for, and the confusion matrix as an image."""
    data = class_folders(folder, names)
    features, kept, unreadable = encode_readable(bundle, data.paths)
    labels = torch.tensor([data.labels[place] for place in kept])
    scores = features @ class_vectors(bundle, data.names, templates or TEMPLATES).cpu().T
    found = top_scores(scores, labels)
    counts = confusion(scores.argmax(dim=1), labels, len(data.names))
    title = f"{len(kept):,} images of {folder.name}: rows the truth, columns what the model says"
    confusion_image(counts, data.names, image, title)
    return (found + linear_probe(features, labels) if probe else found), unreadable
