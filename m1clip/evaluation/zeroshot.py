"""Zero-shot classification by class names, what is confused, and a linear probe."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from m1clip.data.cache import decode_images
from m1clip.data.images import FileImage
from m1clip.data.sources.base import walk_images
from m1clip.errors import UserError
from m1clip.evaluation.retrieval import accuracy_by_class
from m1clip.evaluation.statistics import Scores, metrics_of
from m1clip.formatting import plural, table
from m1clip.hardware.facts import decode_threads
from m1clip.inference.encoder import Model
from m1clip.inference.onnx import OnnxModel

TEMPLATES = ("a photo of a {}.", "an image of a {}.", "a close-up photo of a {}.", "there is a {} here.", "{}")
TOP_K = (1, 5)
TEST_FRACTION = 0.3  # of each class, for the linear probe
PROBE_ITERATIONS = 1000
CONFUSIONS = 8  # shown


def class_folders(folder: Path) -> tuple[list[str], list[tuple[Path, int]]]:
    """Class names, and images with the index of their class, from one folder per class (cats/1.jpg)."""
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; --classes expects a folder with one subfolder of images per class")
    found = [(path.parts[0], folder / path) for path in map(Path, walk_images(folder)) if len(path.parts) > 1]
    classes = sorted({label for label, _ in found})
    if len(classes) < 2:
        raise UserError(f"{folder}: has {plural(len(classes), 'class folder')} with images; at least two are needed")
    names = [label.replace("_", " ").replace("-", " ").strip() for label in classes]
    return names, [(path, classes.index(label)) for label, path in found]


def encode_readable(model: Model | OnnxModel, paths: Sequence[Path]) -> tuple[Tensor, list[int], list[str]]:
    """(vectors, indices of the images that could be read, why the others could not)."""
    refs, failures = [FileImage(str(path)) for path in paths], dict[int, str]()
    if isinstance(model, OnnxModel):
        image_size, resize = model.preprocess.image_size, model.preprocess.resize
        blocks = decode_images(refs, image_size, resize, failures, _ignore, decode_threads())
        parts: Iterable[tuple[list[int], Tensor]] = (
            (items, torch.from_numpy(model.pixels(block))) for items, block in blocks
        )
    else:
        parts = model.encoder().files(refs, failures, _ignore)
    kept, vectors = list[int](), list[Tensor]()
    for items, found in parts:
        kept += items
        vectors.append(found)
    reasons = [f"{refs[item]}: {reason}" for item, reason in sorted(failures.items())]
    if not kept:
        raise UserError(f"none of {plural(len(paths), 'image')} can be read; first: {(reasons or ['no images'])[0]}")
    return torch.cat(vectors), kept, reasons


def _ignore(done: int, total: int) -> None:
    return None


@dataclass(frozen=True)
class ZeroShot:
    """Result of zero-shot classification over class folders."""

    scores: Scores
    confusion: Tensor  # (classes, classes) counts: rows are the true class, columns the predicted one
    names: list[str]
    unreadable: list[str]

    def __str__(self) -> str:
        """The scores, and the most frequent confusions."""
        wrong = self.confusion.clone().fill_diagonal_(0)
        worst = [divmod(place, len(wrong)) for place in wrong.flatten().argsort(descending=True, stable=True).tolist()]
        rows = [(self.names[t], self.names[p], f"{n:,}") for t, p in worst[:CONFUSIONS] if (n := int(wrong[t, p]))]
        confused = table(("class", "taken for", "images"), rows)
        return f"{self.scores}\n\n{confused}" if rows else str(self.scores)


def zero_shot(model: Model | OnnxModel, folder: Path, templates: Sequence[str] = (), probe: bool = False) -> ZeroShot:
    """Zero-shot accuracy on class folders, given only the class names; optionally also of a linear probe."""
    names, images = class_folders(folder)
    vectors, kept, unreadable = encode_readable(model, [path for path, _ in images])
    labels = torch.tensor([images[index][1] for index in kept])
    classes = torch.as_tensor(model.class_vectors(names, templates or TEMPLATES))
    with torch.autocast("cpu", enabled=False):
        similarity = vectors @ classes.T
    scores = top_k_accuracy(similarity, labels, "zero_shot")
    if probe:
        scores += linear_probe(vectors, labels)
    hits = similarity.argmax(dim=1) == labels
    scores += accuracy_by_class(hits, labels, names, len(names))
    pairs = labels * len(names) + similarity.argmax(dim=1)
    confusion = torch.bincount(pairs, minlength=len(names) ** 2).view(len(names), len(names))
    return ZeroShot(scores, confusion, names, unreadable)


def top_k_accuracy(scores: Tensor, labels: Tensor, prefix: str) -> Scores:
    """Top-k accuracy of scores (images, classes) for each k below the number of classes."""
    classes = scores.shape[1]
    kept = [k for k in TOP_K if k < classes]
    order = scores.topk(max(kept), dim=1).indices
    hits = torch.stack([(order[:, :k] == labels[:, None]).any(dim=1) for k in kept], dim=1)
    names, chances = [f"{prefix}/top{k}" for k in kept], [k / classes for k in kept]
    return Scores(tuple(metrics_of(names, hits, chances, torch.arange(len(labels)))))


def linear_probe(features: Tensor, labels: Tensor, seed: int = 0) -> Scores:
    """Test accuracy of logistic regression, trained on about 70% of each class."""
    test = stratified_test_mask(labels, seed)
    if bool(test.all()) or not bool(test.any()):
        raise UserError("the linear probe needs at least two images of some class")
    # The entries of unit vectors are far below one, and weight decay would dominate.
    inputs = features * features.shape[1] ** 0.5
    predict = fit_classifier(inputs[~test], labels[~test])
    return top_k_accuracy(predict(inputs[test]), labels[test], "linear_probe")


def fit_classifier(inputs: Tensor, labels: Tensor, weight_decay: float = 1.0) -> Callable[[Tensor], Tensor]:
    """Logistic regression in float64: the function from inputs (n, d) to scores (n, classes)."""

    def extended(rows: Tensor) -> Tensor:
        return F.pad(rows.double(), (0, 1), value=1.0)

    known = extended(inputs)
    weight = torch.zeros(known.shape[1], int(labels.max()) + 1, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([weight], max_iter=PROBE_ITERATIONS, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        value = F.cross_entropy(known @ weight, labels, reduction="sum")
        value = value + weight_decay * weight[:-1].square().sum() / 2
        value.backward()
        return value

    optimizer.step(loss)
    return lambda rows: extended(rows) @ weight.detach()


def stratified_test_mask(labels: Tensor, seed: int) -> Tensor:
    """(n,) bool: about a third of each class, at least one image of a class that has two."""
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.zeros(len(labels), dtype=torch.bool)
    for label in labels.unique():
        rows = (labels == label).nonzero()[:, 0]
        count = max(round(TEST_FRACTION * len(rows)), min(1, len(rows) - 1))
        chosen[rows[torch.randperm(len(rows), generator=generator)[:count]]] = True
    return chosen
