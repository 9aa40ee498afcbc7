"""What stands at the end of a run, and what `m1clip eval` shows: the figures, and a picture of what is retrieved."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from m1clip.data.pair import Source
from m1clip.data.prepare import Split
from m1clip.data.synthetic.negatives import negatives
from m1clip.data.synthetic.source import SyntheticSource
from m1clip.evaluate.bundle import Bundle
from m1clip.evaluate.dataset import Features, encode_split
from m1clip.evaluate.grid import GridRow, retrieval_grid
from m1clip.evaluate.heldout import held_out
from m1clip.evaluate.metric import Scores
from m1clip.evaluate.negatives import negatives_accuracy
from m1clip.evaluate.ranks import is_match, nearest, ranks
from m1clip.model.clip import Clip

# Pictures encoded at a time: few on the CPU, where their activations stand beside the optimizer's state in memory.
BATCH = {"cpu": 16}
USUAL_BATCH = 128
GRID_ROWS, GRID_COLUMNS = 8, 5
JOULES_PER_WATT_HOUR = 3600.0


def energy_figures(steps: Sequence[dict[str, Any]], epochs: float, recall: float) -> dict[str, float]:
    """Joules of the training and of an epoch of it, and mean recall in percent for a watt-hour; {} without a meter."""
    joules = sum(float(record.get("joules", 0.0)) for record in steps)
    if not joules or not epochs:
        return {}
    return {
        "joules": joules,
        "joules_per_epoch": joules / epochs,
        "recall_per_watt_hour": 100 * recall / (joules / JOULES_PER_WATT_HOUR),
    }


@dataclass(frozen=True)
class Exam:
    """A model and the split it is asked about."""

    bundle: Bundle
    source: Source
    split: str
    data: Split
    autocast: Callable[[], AbstractContextManager[object]]


def rows_at_once(model: Clip) -> int:
    """Pictures to encode at a time where this model lives."""
    return BATCH.get(model.logit_scale.device.type, USUAL_BATCH)


def examine(exam: Exam, grid: Path) -> Scores:
    """All final figures of a split, and the picture grid."""
    model, data = exam.bundle.model, exam.data
    features = encode_split(
        model, data.pictures, data.captions, exam.bundle.preprocess, rows_at_once(model), exam.autocast
    )
    scores = held_out(*features)
    if isinstance(exam.source, SyntheticSource):
        scores += negative_scores(exam, exam.source, features[0])
    save_grid(exam, features, grid)
    return scores


@torch.inference_mode()
def negative_scores(
    exam: Exam, source: SyntheticSource, image: Tensor, pictures: Sequence[int] | None = None
) -> Scores:
    """How often the true caption beats the same words with something changed: by difficulty, and by what changed.

    All pictures are asked, or those in `pictures`.
    """
    asked = [
        (index, negative)
        for index in (range(len(exam.data.pairs)) if pictures is None else pictures)
        for negative in negatives(source.scene_of(exam.data.pairs[index].id), seed=index)
    ]
    rows = 2 * rows_at_once(exam.bundle.model)
    with exam.autocast():
        # The negatives of a picture share one true caption: it is encoded once.
        truths = list(dict.fromkeys(negative.truth for _, negative in asked))
        number = {truth: place for place, truth in enumerate(truths)}
        true = exam.bundle.encode_texts(truths, rows).cpu()[[number[negative.truth] for _, negative in asked]]
        wrong = exam.bundle.encode_texts([negative.caption for _, negative in asked], rows).cpu()
    return negatives_accuracy(
        image,
        true,
        wrong,
        torch.tensor([index for index, _ in asked]),
        [negative.difficulty for _, negative in asked],
        [negative.changed[0] if negative.difficulty == "hard" else None for _, negative in asked],
    )


def save_grid(exam: Exam, features: Features, path: Path) -> None:
    """A picture of queries and what they retrieve, right and wrong marked, from the best query to the worst."""
    image, text, owner, keys, _ = features
    data, columns = exam.data, min(GRID_COLUMNS, len(image))
    place = ranks(image, text, owner, keys).text_to_image
    rows = []
    for caption in _even_sample(place, GRID_ROWS):
        scores, found = nearest(text[caption : caption + 1], image, columns)
        right = int(owner[caption])
        rows.append(
            GridRow(
                query=data.pairs[right].captions[int(caption - data.captions.first[right])],
                pictures=list(data.pictures.read(found[0].numpy())),
                correct=is_match(found[0], keys[caption], owner, keys).tolist(),
                scores=scores[0].tolist(),
                right_rank=int(place[caption]),
            )
        )
    title = f"{len(image):,} pictures of the {exam.split} split: the best {columns} for each caption"
    retrieval_grid(rows, path, title=title)


def _even_sample(place: Tensor, count: int) -> list[int]:
    """Captions at even steps of their rank from the best to the very worst, so that the picture hides no failure."""
    order = place.argsort(stable=True)
    return [int(order[int(step)]) for step in np.linspace(0, len(order) - 1, min(count, len(order)))]
