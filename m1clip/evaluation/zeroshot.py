"""Zero-shot classification by class names, and what is confused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from m1clip.data.images import FileImage
from m1clip.data.sources.base import walk_images
from m1clip.errors import UserError
from m1clip.evaluation.retrieval import accuracy_by_class, top_k
from m1clip.evaluation.statistics import Scores, metrics_of
from m1clip.formatting import plural, table
from m1clip.inference.inputs import TEMPLATES
from m1clip.inference.model import Model

TOP_K = (1, 5)
CONFUSIONS = 8  # shown


def class_folders(folder: Path) -> tuple[list[str], list[tuple[Path, int]]]:
    """Class names, and images with the index of their class, from one folder per class."""
    if not folder.is_dir():
        raise UserError(
            f"{folder}: no such folder; --classes expects a folder with one subfolder of images per"
            " class"
        )
    labeled = [
        (path.parts[0], folder / path)
        for path in map(Path, walk_images(folder))
        if len(path.parts) > 1
    ]
    classes = sorted({label for label, _ in labeled})
    if len(classes) < 2:
        raise UserError(
            f"{folder}: has {plural(len(classes), 'class folder')} with images; at least two are"
            " needed"
        )
    names = [label.replace("_", " ").replace("-", " ").strip() for label in classes]
    return names, [(path, classes.index(label)) for label, path in labeled]


def encode_readable(model: Model, paths: Sequence[Path]) -> tuple[np.ndarray, list[int], list[str]]:
    """(vectors, indices of the images that could be read, why the others could not)."""
    refs = [FileImage(str(path)) for path in paths]
    failures: dict[int, str] = {}
    readable: list[int] = []
    vectors: list[np.ndarray] = []
    for indices, encoded in model.encoder.files(refs, failures):
        readable += indices
        vectors.append(np.asarray(encoded))
    reasons = [f"{refs[index]}: {reason}" for index, reason in sorted(failures.items())]
    if not readable:
        raise UserError(
            f"none of {plural(len(paths), 'image')} can be read; first:"
            f" {(reasons or ['no images'])[0]}"
        )
    return np.concatenate(vectors), readable, reasons


@dataclass(frozen=True)
class ZeroShot:
    """Result of zero-shot classification over class folders."""

    scores: Scores
    # (classes, classes) counts: rows are the true class, columns the predicted one.
    confusion: np.ndarray
    names: list[str]
    unreadable: list[str]

    def __str__(self) -> str:
        """The scores, and the most frequent confusions."""
        confusions = self.confusion.copy()
        np.fill_diagonal(confusions, 0)
        order = np.argsort(-confusions, axis=None, kind="stable").tolist()
        worst = [divmod(index, len(confusions)) for index in order]
        rows = [
            (self.names[t], self.names[p], f"{n:,}")
            for t, p in worst[:CONFUSIONS]
            if (n := int(confusions[t, p]))
        ]
        confused = table(("class", "taken for", "images"), rows)
        return f"{self.scores}\n\n{confused}" if rows else str(self.scores)


def zero_shot(
    model: Model, folder: Path, templates: Sequence[str] = (), probe: bool = False
) -> ZeroShot:
    """Zero-shot accuracy on class folders, given only the class names.

    Optionally also of a linear probe.
    """
    names, images = class_folders(folder)
    vectors, readable, unreadable = encode_readable(model, [path for path, _ in images])
    labels = np.array([images[index][1] for index in readable])
    classes = np.asarray(model.class_vectors(names, templates or TEMPLATES))
    similarity = vectors @ classes.T
    scores = top_k_accuracy(similarity, labels, "zero_shot")
    if probe:
        from m1clip.evaluation.probe import linear_probe  # imports torch

        scores += linear_probe(vectors, labels)
    predicted = similarity.argmax(axis=1)
    scores += accuracy_by_class(predicted == labels, labels, names, len(names))
    pairs = labels * len(names) + predicted
    confusion = np.bincount(pairs, minlength=len(names) ** 2).reshape(len(names), len(names))
    return ZeroShot(scores, confusion, names, unreadable)


def top_k_accuracy(scores: np.ndarray, labels: np.ndarray, prefix: str) -> Scores:
    """Top-k accuracy of scores (images, classes) for each k below the number of classes."""
    classes = scores.shape[1]
    ks = [k for k in TOP_K if k < classes]
    order = top_k(scores, max(ks))[0]
    hits = np.stack([(order[:, :k] == labels[:, None]).any(axis=1) for k in ks], axis=1)
    names = [f"{prefix}/top{k}" for k in ks]
    chances = [k / classes for k in ks]
    return Scores(tuple(metrics_of(names, hits, chances, np.arange(len(labels)))))
