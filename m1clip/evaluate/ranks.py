"""Where the right answer stands among all candidates, in both directions, in bounded memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# Equal pairs of unit vectors may differ by about 1e-7 with their place in a matmul; they are still ties.
TIE = 1e-6
# Scores held at once when `chunk` is not given: 2^24 floats are 64 MiB.
SCORES_AT_ONCE = 1 << 24


@dataclass(frozen=True, slots=True)
class Ranks:
    """1-based ranks on the CPU. One more than the number of candidates means: never found (NaN)."""

    text_to_image: Tensor  # (n_texts,)
    image_to_text: Tensor  # (n_images,) best rank of its captions; read it only where `captioned`
    captioned: Tensor  # (n_images,) bool: pictures without a caption are candidates but ask nothing


def ranks(image: Tensor, text: Tensor, owner: Tensor, chunk: int | None = None) -> Ranks:
    """Ranks of image (n_images, d) against text (n_texts, d); owner[t] is the image of text t.

    A tie with a wrong candidate counts against the model; `chunk` queries are scored at a time.
    """
    check_features(image, text, owner)
    owner = owner.to(image.device)
    # Under a caller's autocast the matmul would run in bf16, where unlike pairs tie by rounding.
    with torch.no_grad(), torch.autocast(image.device.type, enabled=False):
        image, text = image.float(), text.float()
        to_image = _ranks_of_texts(text, image, owner, chunk or rows_at_once(len(image)))
        to_text = _ranks_of_images(image, text, owner, chunk or rows_at_once(len(text)))
    captioned = torch.bincount(owner.cpu(), minlength=len(image)) > 0
    return Ranks(to_image.cpu(), to_text.cpu(), captioned)


def _ranks_of_texts(text: Tensor, image: Tensor, owner: Tensor, chunk: int) -> Tensor:
    found = []
    for start in range(0, len(text), chunk):
        scores = text[start : start + chunk] @ image.T  # (chunk, n_images)
        right = owner[start : start + chunk, None]
        # The right score is read from the same product: computed apart, it could round to a false win.
        own = scores.gather(1, right)
        scores.scatter_(1, right, -torch.inf)
        rank = 1 + _count(scores >= own - TIE)
        found.append(rank.masked_fill(own[:, 0].isnan(), len(image) + 1))
    return torch.cat(found)


def _ranks_of_images(image: Tensor, text: Tensor, owner: Tensor, chunk: int) -> Tensor:
    # Captions in the order of their pictures: those of a chunk are one slice, and no (chunk, n_texts) mask
    # is needed to tell them from the others.
    by_picture = owner.argsort(stable=True)
    text, owner = text[by_picture], owner[by_picture]
    edges = torch.searchsorted(owner, torch.arange(len(image) + 1, device=owner.device)).tolist()
    found = []
    for start in range(0, len(image), chunk):
        scores = image[start : start + chunk] @ text.T  # (chunk, n_texts)
        first, last = edges[start], edges[start + len(scores)]
        column = torch.arange(first, last, device=owner.device)
        row = owner[first:last] - start
        own = scores[row, column].nan_to_num(nan=-torch.inf)
        best = scores.new_full((len(scores),), -torch.inf).scatter_reduce_(0, row, own, "amax")
        scores[row, column] = -torch.inf
        rank = 1 + _count(scores >= best[:, None] - TIE)
        found.append(rank.masked_fill(best == -torch.inf, len(text) + 1))
    return torch.cat(found)


def _count(true: Tensor) -> Tensor:
    """How many of each row are true; summed in int32, which is three times as fast as int64 on a CPU."""
    return true.sum(dim=1, dtype=torch.int32).long()


def nearest(query: Tensor, candidates: Tensor, k: int = 5) -> tuple[Tensor, Tensor]:
    """The k best candidates of each query: scores (n, k) and indices (n, k) on the CPU; NaN comes last."""
    k = min(k, len(candidates))
    scores, indices = [], []
    with torch.no_grad(), torch.autocast(query.device.type, enabled=False):
        for part in query.float().split(rows_at_once(len(candidates))):
            found = (part @ candidates.float().T).nan_to_num(nan=-torch.inf)
            best = found.topk(k, dim=1)
            scores.append(best.values.cpu())
            indices.append(best.indices.cpu())
    if not scores:
        return torch.empty(0, k), torch.empty(0, k, dtype=torch.long)
    return torch.cat(scores), torch.cat(indices)


def rows_at_once(n_candidates: int) -> int:
    """How many queries fit the memory set aside for scores."""
    return max(1, SCORES_AT_ONCE // max(1, n_candidates))


def check_features(image: Tensor, text: Tensor, owner: Tensor) -> None:
    """Raise ValueError unless the three tensors describe one set of pictures and captions."""
    if image.ndim != 2 or text.ndim != 2 or image.shape[1] != text.shape[1]:
        raise ValueError(
            f"image and text must be (n, d) with one d, got {tuple(image.shape)} and {tuple(text.shape)}"
        )
    if len(image) == 0 or len(text) == 0:
        raise ValueError(f"nothing to evaluate: {len(image)} pictures and {len(text)} captions")
    if owner.shape != (len(text),) or owner.dtype != torch.long:
        raise ValueError(
            f"owner must be ({len(text)},) of int64, one a caption; got {tuple(owner.shape)} of {owner.dtype}"
        )
    low, high = int(owner.min()), int(owner.max())
    if low < 0 or high >= len(image):
        raise ValueError(
            f"owner names pictures {low} to {high}, but there are pictures 0 to {len(image) - 1}"
        )
