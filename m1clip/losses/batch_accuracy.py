"""Accuracy within a batch: how often the caption closest to an image is one of its own.

Its chance level is 1 / batch size, so values of different batch sizes cannot be compared. Recall
over the complete validation split (evaluation/retrieval.py) can.
"""

import torch
from torch import Tensor

from m1clip.losses.positives import ALL, same_image_or_caption
from m1clip.losses.registry import Ids
from m1clip.losses.run_loss import Rows, similarity, without_autocast

# Images of a batch that are looked at: the cost must not grow with the square of the batch.
MAX_IMAGES = 64


@torch.no_grad()
def accuracy_within_batch(
    image: Tensor, text: Tensor, ids: Ids, rows: Rows | None = None
) -> Tensor:
    """Return (2,) the accuracy within a batch and its chance level, without synchronization.

    image (n, d), text (m, d) and `ids` are those of the complete batch. In a large batch, only the
    first images are compared. `rows` are the rows of this process: the results of all processes add
    up to those of the batch.
    """
    n = len(ids.sample_ids)
    image_rows = slice(0, n) if rows is None else rows.images
    count = image_rows.stop - image_rows.start
    if count == 0:
        return torch.zeros(2, device=image.device)
    chosen = slice(image_rows.start, image_rows.start + min(count, MAX_IMAGES))
    positive = same_image_or_caption(ids, ALL if chosen == slice(0, n) else chosen, ALL)
    with without_autocast(image.device):
        nearest = similarity(image[chosen].float(), text.float()).argmax(dim=1, keepdim=True)
    hits = positive.gather(1, nearest).float().mean()
    chance = positive.float().mean()  # 1/n, unless images or captions occur twice
    return torch.stack([hits, chance]) * (count / n)
