"""Retrieval over the whole held-out set: recall@k and median rank, both ways, with chance and interval."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from m1clip.evaluation.statistics import Metric, Scores, median, median_interval, share_intervals, wilson
from m1clip.runlog import MEAN_RECALL, TOP1

# Equal samples of unit vectors may differ by about 1e-7 with their place in a matmul; they are still ties.
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


def ranks(image: Tensor, text: Tensor, owner: Tensor, keys: Tensor | None = None, chunk: int | None = None) -> Ranks:
    """Ranks of image (n_images, d) against text (n_texts, d); owner[t] is the image of text t.

    Equal captions have equal `keys` (n_texts,); by default all captions differ. A tie with a wrong candidate counts
    against the model; `chunk` queries are scored at a time.
    """
    check_features(image, text, owner)
    place = torch.arange(len(text))
    distinct, caption = (place, place) if keys is None else keys.cpu().unique(return_inverse=True)
    first = place.new_full((len(distinct),), len(text)).scatter_reduce_(0, caption, place, "amin")
    sample = (owner.cpu() * len(distinct) + caption).unique()  # sorted by image
    image_of, caption_of = sample // len(distinct), sample % len(distinct)
    by_caption = caption_of.argsort(stable=True)
    texts = text[first.to(text.device)]
    to_image = match_ranks(texts, image, caption_of[by_caption], image_of[by_caption], chunk)
    to_text = match_ranks(image, texts, image_of, caption_of, chunk)
    right_images = torch.bincount(caption_of)[caption]
    return Ranks(
        to_image[caption], to_text, right_images, torch.bincount(image_of, minlength=len(image)), len(distinct)
    )


@torch.no_grad()
def match_ranks(
    query: Tensor, candidates: Tensor, query_of: Tensor, candidate_of: Tensor, chunk: int | None = None
) -> Tensor:
    """(n_queries,) best rank of the right candidates; right samples are (query_of, candidate_of), sorted by query."""
    query_of, candidate_of = query_of.to(query.device), candidate_of.to(query.device)
    chunk = chunk or rows_at_once(len(candidates))
    # Sorted samples: those of a chunk are one slice, and no (chunk, n_candidates) mask is needed.
    edges = torch.searchsorted(query_of, torch.arange(len(query) + 1, device=query_of.device)).tolist()
    found = []
    # Under a caller's autocast the matmul would run in bf16, where unlike samples tie by rounding.
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
    """Raise ValueError unless the three tensors describe one set of images and captions."""
    if image.ndim != 2 or text.ndim != 2 or image.shape[1] != text.shape[1]:
        raise ValueError(f"image and text must be (n, d) with one d, got {tuple(image.shape)} and {tuple(text.shape)}")
    if len(image) == 0 or len(text) == 0:
        raise ValueError(f"nothing to evaluate: {len(image)} images and {len(text)} captions")
    if owner.shape != (len(text),) or owner.dtype != torch.long:
        raise ValueError(
            f"owner must be ({len(text)},) of int64, one a caption; got {tuple(owner.shape)} of {owner.dtype}"
        )
    low, high = int(owner.min()), int(owner.max())
    if low < 0 or high >= len(image):
        raise ValueError(f"owner names images {low} to {high}, but there are images 0 to {len(image) - 1}")


BATCH = 12
GROUPINGS = 20
# Groups scored at once; bounds the gathered features, not the result.
GROUPS_AT_ONCE = 512


def in_batch_accuracy(
    image: Tensor,
    text: Tensor,
    owner: Tensor,
    keys: Tensor | None = None,
    batch: int = BATCH,
    groupings: int = GROUPINGS,
    seed: int = 0,
) -> Metric:
    """Share of images that find a caption of theirs among `batch`, over seeded random groupings.

    Each image_ids brings one caption, drawn anew in each grouping; a tie is a miss.
    """
    check_features(image, text, owner)
    owner, keys = owner.cpu(), torch.arange(len(text)) if keys is None else keys.cpu()
    images = owner.unique()
    if batch < 2 or groupings < 1:
        raise ValueError(f"batch must be at least 2 and groupings at least 1, got {batch} and {groupings}")
    if len(images) < batch:
        raise ValueError(f"in-batch accuracy at {batch} needs {batch} captioned images, got {len(images)}")
    generator = torch.Generator().manual_seed(seed)
    hits, asked, right = [], [], []
    for _ in range(groupings):
        chosen = one_caption_each(owner, generator)  # (len(images),)
        order = torch.randperm(len(images), generator=generator)
        # The few left over form no full group; a new order leaves out others.
        groups = order[: len(order) // batch * batch].view(-1, batch)
        captions = chosen[groups]
        right.append(is_match(images[groups][:, :, None], keys[captions][:, None, :], owner, keys))
        hits.append(_hits(image, text, images[groups], captions, right[-1]).flatten())
        asked.append(images[groups].flatten())
    hit, image_ids = torch.cat(hits), torch.cat(asked)
    interval = share_intervals(hit[:, None], image_ids, seed)[0]
    level = sum(int(part.sum()) for part in right) / sum(part.numel() for part in right)
    return Metric(f"in_batch_{batch}/accuracy", float(hit.double().mean()), level, interval, len(images))


def one_caption_each(owner: Tensor, generator: torch.Generator) -> Tensor:
    """The index of one random caption for each captioned image, in the order of the images."""
    by_image = owner.argsort(stable=True)
    count = owner.unique(return_counts=True)[1]
    first = count.cumsum(0) - count
    draw = torch.rand(len(count), generator=generator, dtype=torch.float64)
    return by_image[first + (draw * count).long()]


def _hits(image: Tensor, text: Tensor, images: Tensor, captions: Tensor, right: Tensor) -> Tensor:
    """(groups, batch) bool: does the rows score a `right` caption above all others of the group."""
    found = []
    with torch.no_grad(), torch.autocast(image.device.type, enabled=False):
        for rows, caption, match in zip(
            *(each.to(image.device).split(GROUPS_AT_ONCE) for each in (images, captions, right)), strict=True
        ):
            asked = image[rows].float()  # (groups, batch, d)
            offered = text[caption].float()
            scores = asked @ offered.transpose(1, 2)  # (groups, batch, batch)
            own = scores.masked_fill(~match | scores.isnan(), -torch.inf).amax(dim=2)
            ahead = (scores.masked_fill(match, -torch.inf) >= own[..., None] - TIE).any(dim=2)
            found.append((~ahead & (own > -torch.inf)).cpu())
    return torch.cat(found)


def recall_chance(k: int, right: Tensor, n_candidates: int) -> float:
    """Probability that a random order of the candidates has a right one in its first k.

    right: (n_queries,) how many candidates are right; averaged over the queries that have any.
    """
    counts, weight = _counts(right)
    drawn = torch.arange(min(k, n_candidates), dtype=torch.float64)
    # Hypergeometric: draw k candidates without replacement and miss every right one, draw by draw.
    miss = ((n_candidates - counts[:, None] - drawn) / (n_candidates - drawn)).clamp(min=0).prod(dim=1)
    return float(((1 - miss) * weight).sum())


def median_rank_chance(right: Tensor, n_candidates: int) -> float:
    """Median best rank of the right candidates in a random order: the first k with chance >= 1/2."""
    low, high = 1, n_candidates
    while low < high:
        middle = (low + high) // 2
        if recall_chance(middle, right, n_candidates) >= 0.5 - 1e-9:
            high = middle
        else:
            low = middle + 1
    return float(low)


def _counts(right: Tensor) -> tuple[Tensor, Tensor]:
    """The different numbers of right candidates and the fraction of queries that have each."""
    counts, queries = right[right > 0].cpu().unique(return_counts=True)
    return counts.double(), queries.double() / queries.sum()


RECALL_AT = (1, 5, 10)


def retrieval(
    image: Tensor,
    text: Tensor,
    owner: Tensor,
    keys: Tensor | None = None,
    at: Sequence[int] = RECALL_AT,
    seed: int = 0,
    chunk: int | None = None,
) -> Scores:
    """Recall and median rank of normalised image (n_images, d) and text (n_texts, d), both ways.

    owner[t] is the image that text t describes; captions with equal `keys` are equally right. An image is found when
    any of its captions is, and a caption when any image that has it is.
    """
    found = ranks(image, text, owner, keys, chunk)
    asking = found.captioned.nonzero()[:, 0]
    there = (found.text_to_image, owner.cpu(), found.right_images, len(image))
    back = (found.image_to_text[asking], asking, found.right_texts[asking], found.distinct_texts)
    both = (*_direction("text_to_image", *there, at, seed), *_direction("image_to_text", *back, at, seed))
    return Scores((_mean_recall(both), *both))


def _mean_recall(metrics: Sequence[Metric]) -> Metric:
    """The mean of recall@1, @5 and @10 both ways."""
    recalls = [metric for metric in metrics if metric.kind == "share"]
    value = sum(metric.value for metric in recalls) / len(recalls)
    n_images = recalls[-1].n
    # Wilson over images: never too narrow, because a mean of hits varies less than a single hit.
    level = sum(metric.chance for metric in recalls) / len(recalls)
    return Metric(MEAN_RECALL, value, level, wilson(value, n_images), n_images)


def recall_hits(rank: Tensor, at: Sequence[int], n_candidates: int) -> Tensor:
    """(n, len(at)) bool: was the right one among the first k. A NaN's rank is never among them."""
    # The cap keeps rank n + 1 (never found) a miss when k exceeds the number of candidates.
    limit = torch.tensor([min(k, n_candidates) for k in at])
    return rank[:, None] <= limit


def _direction(
    name: str, rank: Tensor, image: Tensor, right: Tensor, n_candidates: int, at: Sequence[int], seed: int
) -> list[Metric]:
    hits = recall_hits(rank, at, n_candidates)
    shares = hits.double().mean(dim=0).tolist()
    intervals = share_intervals(hits, image, seed)
    recalls = [
        Metric(f"{name}/recall@{k}", share, recall_chance(k, right, n_candidates), interval, len(rank))
        for k, share, interval in zip(at, shares, intervals, strict=True)
    ]
    level = median_rank_chance(right, n_candidates)
    middle = Metric(f"{name}/median_rank", median(rank), level, median_interval(rank, image), len(rank), "rank")
    return [*recalls, middle]


def held_out(
    image: Tensor, text: Tensor, owner: Tensor, keys: Tensor | None = None, labels: Tensor | None = None, seed: int = 0
) -> Scores:
    """Top-1 accuracy where images have class `labels`, retrieval both ways, and in-batch accuracy."""
    scores = retrieval(image, text, owner, keys, seed=seed)
    if labels is not None:
        scores = Scores((top1_accuracy(image, text, owner, labels),)) + scores
    if len(owner.unique()) >= BATCH:
        scores += Scores((in_batch_accuracy(image, text, owner, keys, seed=seed),))
    return scores


def top1_accuracy(image: Tensor, text: Tensor, owner: Tensor, labels: Tensor) -> Metric:
    """How often an image is closest to its own class; a class is the mean of its captions, and a tie is a miss."""
    classes = int(labels.max()) + 1
    sums = text.new_zeros(classes, text.shape[1], dtype=torch.float32).index_add_(0, labels[owner], text.float())
    hits = match_ranks(image, F.normalize(sums, dim=-1), torch.arange(len(image)), labels) == 1
    value = float(hits.double().mean())
    return Metric(TOP1, value, 1 / classes, wilson(value, len(image)), len(image))
