"""What stands at the end of a run: the final figures and a picture of what is retrieved."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from m1clip.data.synthetic.negatives import negatives
from m1clip.data.synthetic.source import SyntheticSource
from m1clip.evaluate.grid import GridRow, retrieval_grid
from m1clip.evaluate.heldout import held_out
from m1clip.evaluate.metric import Scores
from m1clip.evaluate.negatives import negatives_accuracy
from m1clip.evaluate.ranks import nearest, ranks
from m1clip.model.clip import Clip
from m1clip.train.setup import Job

GRID_ROWS, GRID_COLUMNS = 8, 5


def final_scores(job: Job, model: Clip, split: str, image: Tensor, text: Tensor, owner: Tensor) -> Scores:
    """Retrieval figures; for synthetic data also the accuracy against labelled negatives."""
    scores = held_out(image, text, owner)
    if isinstance(job.source, SyntheticSource):
        scores += negative_scores(job, model, job.source, split, image, text, owner)
    return scores


@torch.inference_mode()
def negative_scores(
    job: Job, model: Clip, source: SyntheticSource, split: str, image: Tensor, text: Tensor, owner: Tensor
) -> Scores:
    """How often the true caption beats one with something changed: easy, medium, hard, and by what was changed."""
    changed = [
        (index, negative)
        for index, pair in enumerate(job.splits[split].pairs)
        for negative in negatives(source.scene_of(pair.id), seed=index)
    ]
    rows = job.tokenizer([negative.caption for _, negative in changed], job.shape.context_length)
    features = []
    with job.autocast():
        for part in torch.from_numpy(rows).long().split(512):
            features.append(model.encode_text(part.to(job.device.torch)).cpu())
    first = torch.from_numpy(job.splits[split].captions.first[:-1])  # the first caption of each picture
    return negatives_accuracy(
        image,
        text[first],
        torch.cat(features),
        torch.tensor([index for index, _ in changed]),
        [negative.difficulty for _, negative in changed],
        [negative.changed[0] if negative.difficulty == "hard" else "several" for _, negative in changed],
    )


def save_grid(job: Job, split: str, image: Tensor, text: Tensor, owner: Tensor, path: Path) -> Path:
    """A picture of queries and what they retrieve: as many right as the recall says, evenly spread over the set."""
    data = job.splits[split]
    columns = min(GRID_COLUMNS, len(image))
    place = ranks(image, text, owner).text_to_image
    rows = []
    for caption in _even_sample(place, GRID_ROWS):
        scores, found = nearest(text[caption : caption + 1], image, columns)
        pictures = data.pictures.read(found[0].numpy())
        right = int(owner[caption])
        rows.append(
            GridRow(
                query=data.pairs[right].captions[int(caption - data.captions.first[right])],
                pictures=list(pictures),
                correct=[int(index) == right for index in found[0]],
                scores=scores[0].tolist(),
                right_rank=int(place[caption]),
            )
        )
    return retrieval_grid(rows, path, title=f"{len(image):,} held-out pictures ({split}): the best {columns} for each caption")


def _even_sample(place: Tensor, count: int) -> list[int]:
    """Captions at even steps of their rank, so that the picture shows failures in their true share."""
    order = place.argsort(stable=True)
    steps = (np.arange(min(count, len(order))) + 0.5) * len(order) / min(count, len(order))
    return [int(order[int(step)]) for step in steps]
