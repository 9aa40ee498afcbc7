"""Accuracy within a batch: how often an image is closest to one of its own captions among all of the batch.

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
    """(2,) float32: the accuracy within a batch, and its chance level; nothing is read from the device.

    image (n, d), text (m, d) and `ids` are those of the complete batch. Of a large batch, the first
    images stand for all. `rows` are the rows of this process: the results of all processes add up
    to those of the batch.
    """
    n = len(ids.sample_ids)
    own = slice(0, n) if rows is None else rows.images
    count = own.stop - own.start
    if count == 0:
        return torch.zeros(2, device=image.device)
    chosen = slice(own.start, own.start + min(count, MAX_IMAGES))
    positive = same_image_or_caption(ids, ALL if chosen == slice(0, n) else chosen, ALL)
    with without_autocast(image.device):
        nearest = similarity(image[chosen].float(), text.float()).argmax(dim=1, keepdim=True)
    hits = positive.gather(1, nearest).float().mean()
    chance = positive.float().mean()  # 1/n, unless images or captions occur twice
    return torch.stack([hits, chance]) * (count / n)
