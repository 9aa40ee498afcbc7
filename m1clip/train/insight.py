"""The analysis of a split during training and in `m1clip eval --analysis`: what is learned, what is confused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from m1clip.data.captions import CaptionTable
from m1clip.data.prepare import Split
from m1clip.data.synthetic.scene import Scene
from m1clip.data.synthetic.source import SyntheticSource
from m1clip.evaluate.analysis import (
    alignment,
    as_plain,
    confusions,
    difficulty_by_similarity,
    even_indices,
    group_masks,
    modality_gap,
    recall_by_group,
    recall_by_length,
    uniformity,
)
from m1clip.evaluate.dataset import Features, encode_split
from m1clip.evaluate.grid import GridRow, retrieval_grid
from m1clip.evaluate.ranks import ranks
from m1clip.train.finish import Exam, negative_scores, rows_at_once

CONFUSIONS = 8
SAMPLE = 32  # pictures whose made-up negatives are encoded at an evaluation: the one dear part


def analyse(exam: Exam, features: Features, sample: int = SAMPLE) -> dict[str, Any]:
    """Everything that can be said from the features of a split, ready for the log; `sample` pictures for negatives."""
    image, text, owner, keys, _ = features
    place = ranks(image, text, owner, keys).text_to_image
    found: dict[str, Any] = {
        "alignment": round(alignment(image, text, owner), 5),
        "uniformity_image": round(uniformity(image), 5),
        "uniformity_text": round(uniformity(text), 5),
        "modality_gap": round(modality_gap(image, text), 5),
        "difficulty": as_plain(difficulty_by_similarity(image, text, owner, keys)),
        "length": as_plain(recall_by_length(place, torch.from_numpy(exam.data.captions.lengths))),
    }
    if isinstance(exam.source, SyntheticSource):
        labels = [labels_of(exam.source.scene_of(pair.id)) for pair in exam.data.pairs]
        found["groups"] = as_plain(recall_by_group(place, group_masks(labels, owner)))
        # Where a frozen tower has made the features of all captions, there is none to encode new ones here.
        if sample and type(exam.data.captions) is CaptionTable:
            chosen = even_indices(len(image), sample).tolist()
            scores = negative_scores(exam, exam.source, image, chosen)
            found["negatives"] = {
                metric.name.removeprefix("negatives/"): [round(metric.value, 5), metric.n]
                for metric in scores.metrics
            }
    return found


def analyse_split(exam: Exam, picture: Path) -> dict[str, Any]:
    """The whole analysis of a split, every picture asked, and a picture of the nearest confusions."""
    data = exam.data
    features = encode_split(
        exam.bundle.model,
        data.pictures,
        data.captions,
        exam.bundle.preprocess,
        rows_at_once(exam.bundle.model),
        exam.autocast,
    )
    found = analyse(exam, features, sample=len(data.pairs))
    worst = confusions(*features[:4], most=CONFUSIONS)
    rows = [
        GridRow(
            query=caption_of(data, each.caption),
            pictures=list(data.pictures.read(np.array([each.found, each.right]))),
            correct=[False, True],
            scores=[
                float(features[0][p].float() @ features[1][each.caption].float())
                for p in (each.found, each.right)
            ],
        )
        for each in worst
    ]
    if rows:
        retrieval_grid(rows, picture, title=f"Nearest confusions of the {exam.split} split: found, and right")
    found["confusions"] = [
        [caption_of(data, each.caption), data.pairs[each.found].captions[0]] for each in worst
    ]
    return found


def caption_of(data: Split, caption: int) -> str:
    """The words behind a caption's number."""
    picture = int(data.captions.owner[caption])
    return data.pairs[picture].captions[caption - int(data.captions.first[picture])]


def labels_of(scene: Scene) -> Mapping[str, Sequence[str]]:
    """What a synthetic picture shows, by attribute."""
    things = scene.things
    return {
        "category": [thing.category for thing in things],
        "object": [thing.kind for thing in things],
        "colour": [thing.colour for thing in things],
        "count": [str(thing.count) for thing in things],
        "size": [thing.size for thing in things],
        "position": [thing.position for thing in things],
        "time": [scene.time],
    }
