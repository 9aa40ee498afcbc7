"""A quick look with a trained model: one picture against some words, or against a folder of pictures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from m1clip.data.sources.reading import walk_pictures
from m1clip.errors import UserError
from m1clip.evaluate.bundle import Bundle
from m1clip.evaluate.confusion import confusion_picture
from m1clip.evaluate.metric import Scores
from m1clip.evaluate.probe import linear_probe
from m1clip.evaluate.zeroshot import (
    TEMPLATES,
    class_folders,
    class_vectors,
    confusion,
    encode_readable,
    top_scores,
)


def classify(
    bundle: Bundle, image: Path, labels: Sequence[str], templates: Sequence[str]
) -> list[tuple[str, float]]:
    """(label, share) from the best on; the shares are the model's own, by its temperature, and sum to one."""
    if len(labels) < 2:
        raise UserError("--labels: give two or more, with commas between them")
    picture, _, _ = encode_readable(bundle, [image])
    scale = bundle.model.scale().detach().cpu()
    shares = (scale * picture @ class_vectors(bundle, labels, templates).cpu().T)[0].softmax(dim=0)
    order = shares.argsort(descending=True).tolist()
    return [(labels[place], float(shares[place])) for place in order]


def similar(
    bundle: Bundle, image: Path, folder: Path, count: int
) -> tuple[list[tuple[Path, float]], list[str]]:
    """((path, cosine) from the nearest on, why some could not be read); the picture itself is left out."""
    if not folder.is_dir():
        raise UserError(f"{folder}: no folder there")
    own = image.resolve()
    paths = [path for path in (folder / name for name in walk_pictures(folder)) if path.resolve() != own]
    if not paths:
        raise UserError(f"{folder}: holds no other pictures")
    query, _, _ = encode_readable(bundle, [image])
    features, kept, unreadable = encode_readable(bundle, paths)
    cosine = (features @ query[0]).tolist()
    order = sorted(range(len(kept)), key=lambda place: -cosine[place])[:count]
    return [(paths[kept[place]], cosine[place]) for place in order], unreadable


def score_classes(
    bundle: Bundle, folder: Path, names: Sequence[str], templates: Sequence[str], probe: bool, picture: Path
) -> tuple[Scores, list[str]]:
    """Zero-shot accuracy over class folders, a linear probe if asked for, and the confusion matrix as a picture."""
    data = class_folders(folder, names)
    features, kept, unreadable = encode_readable(bundle, data.paths)
    labels = torch.tensor([data.labels[place] for place in kept])
    scores = features @ class_vectors(bundle, data.names, templates or TEMPLATES).cpu().T
    found = top_scores(scores, labels)
    counts = confusion(scores.argmax(dim=1), labels, len(data.names))
    title = f"{len(kept):,} pictures of {folder.name}: rows the truth, columns what the model says"
    confusion_picture(counts, data.names, picture, title)
    return (found + linear_probe(features, labels) if probe else found), unreadable
