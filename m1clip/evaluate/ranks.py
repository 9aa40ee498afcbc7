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
    """1-based ranks on the CPU. One more than the number of candidates means: never found (NaN).

    Captions with the same key are one candidate, and every image that has that caption is right for it.
    """

    text_to_image: Tensor  # (n_texts,) best rank of the images that have this caption
    image_to_text: Tensor  # (n_images,) best rank of its captions; read it only where `captioned`
    right_images: Tensor  # (n_texts,) how many images have this caption
    right_texts: Tensor  # (n_images,) how many distinct captions this image has
    distinct_texts: int

    @property
    def captioned(self) -> Tensor:
        """(n_images,) bool: images without a caption are candidates but not queries."""
        return self.right_texts > 0


def ranks(
    image: Tensor, text: Tensor, owner: Tensor, keys: Tensor | None = None, chunk: int | None = None
) -> Ranks:
    """Ranks of image (n_images, d) against text (n_texts, d); owner[t] is the image of text t.

    Equal captions have equal `keys` (n_texts,); by default all captions differ. A tie with a wrong candidate counts
    against the model; `chunk` queries are scored at a time.
    """
    check_features(image, text, owner)
    place = torch.arange(len(text))
    distinct, caption = (place, place) if keys is None else keys.cpu().unique(return_inverse=True)
    first = place.new_full((len(distinct),), len(text)).scatter_reduce_(0, caption, place, "amin")
    pair = (owner.cpu() * len(distinct) + caption).unique()  # sorted by image
    image_of, caption_of = pair // len(distinct), pair % len(distinct)
    by_caption = caption_of.argsort(stable=True)
    texts = text[first.to(text.device)]
    to_image = match_ranks(texts, image, caption_of[by_caption], image_of[by_caption], chunk)
    to_text = match_ranks(image, texts, image_of, caption_of, chunk)
    right_images = torch.bincount(caption_of)[caption]
    return Ranks(
        to_image[caption],
        to_text,
        right_images,
        torch.bincount(image_of, minlength=len(image)),
        len(distinct),
    )


@torch.no_grad()
def match_ranks(
    query: Tensor, candidates: Tensor, query_of: Tensor, candidate_of: Tensor, chunk: int | None = None
) -> Tensor:
    """(n_queries,) best rank of the right candidates; right pairs are (query_of, candidate_of), sorted by query."""
    query_of, candidate_of = query_of.to(query.device), candidate_of.to(query.device)
    chunk = chunk or rows_at_once(len(candidates))
    # Sorted pairs: those of a chunk are one slice, and no (chunk, n_candidates) mask is needed.
    edges = torch.searchsorted(query_of, torch.arange(len(query) + 1, device=query_of.device)).tolist()
    found = []
    # Under a caller's autocast the matmul would run in bf16, where unlike pairs tie by rounding.
    with torch.autocast(query.device.type, enabled=False):
        query, candidates = query.float(), candidates.float()
        for start in range(0, len(query), chunk):
            scores = query[start : start + chunk] @ candidates.T  # (chunk, n_candidates)
            part = slice(edges[start], edges[start + len(scores)])
            row, column = query_of[part] - start, candidate_of[part]
            # Right scores are read from the same product: computed apart, they could round to a false win.
            right = scores[row, column].nan_to_num(nan=-torch.inf)
            best = scores.new_full((len(scores),), -torch.inf).scatter_reduce_(0, row, right, "amax")
            scores[row, column] = -torch.inf
            rank = 1 + _count(scores >= best[:, None] - TIE)
            found.append(rank.masked_fill(best == -torch.inf, len(candidates) + 1))
    return torch.cat(found).cpu()


def is_match(image: Tensor, key: Tensor, owner: Tensor, keys: Tensor | None) -> Tensor:
    """Whether each image has a caption with this key; `image` and `key` broadcast.

    Without `keys`, the key of a caption is its index.
    """
    keys = torch.arange(len(owner)) if keys is None else keys
    n = int(keys.max()) + 1
    return torch.isin(image * n + key, owner * n + keys)


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
