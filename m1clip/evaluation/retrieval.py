"""Image-text retrieval over a complete split: recall@k in both directions, top-1 accuracy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from m1clip.evaluation.statistics import Metric, Scores, metrics_of, wilson
from m1clip.inference.encoder import SplitFeatures
from m1clip.runlog import MEAN_RECALL, TOP1

RECALL_AT = (1, 5, 10)
TIE = 1e-6  # equal unit vectors may differ by about 1e-7 with their position in a matrix product
MAX_SCORES = 1 << 24  # similarities in memory at once: 64 MiB


def retrieval(
    image: Tensor,
    text: Tensor,
    image_index: Tensor,
    keys: Tensor | None = None,
    labels: Tensor | None = None,
    other_classes: Tensor | None = None,
) -> Scores:
    """Recall of unit vectors image (n_images, d) and text (n_texts, d), in both directions.

    image_index[t] is the image that text t describes; captions with equal `keys` are equally right. An image counts as
    found when any of its captions is, a caption when any of its images is. With class `labels` (n_images,), top-1
    accuracy comes first, among these classes and `other_classes` (n, d), which have no image here.
    """
    found = ranks(image, text, image_index, keys)
    queries = found.captioned.nonzero()[:, 0]
    metrics = [
        *_direction("text_to_image", found.text_to_image, image_index.cpu(), found.right_images, len(image)),
        *_direction(
            "image_to_text", found.image_to_text[queries], queries, found.right_texts[queries], found.distinct_texts
        ),
    ]
    metrics.insert(0, _mean_recall(metrics))
    if labels is not None:
        metrics.insert(0, _top1_accuracy(image, text, image_index, labels, other_classes))
    return Scores(tuple(metrics))


def _direction(name: str, rank: Tensor, image_index: Tensor, right: Tensor, candidates: int) -> list[Metric]:
    # The cap keeps rank n + 1 (never found) a miss when k exceeds the number of candidates.
    hits = rank[:, None] <= torch.tensor([min(k, candidates) for k in RECALL_AT])
    names, chances = zip(*((f"{name}/recall@{k}", recall_chance(k, right, candidates)) for k in RECALL_AT), strict=True)
    return metrics_of(names, hits, chances, image_index)


def _mean_recall(recalls: Sequence[Metric]) -> Metric:
    value = sum(metric.value for metric in recalls) / len(recalls)
    chance = sum(metric.chance for metric in recalls) / len(recalls)
    images = recalls[-1].n
    # Wilson over images is never too narrow: a mean of hits varies less than a single hit.
    return Metric(MEAN_RECALL, value, chance, wilson(value, images), images)


def _top1_accuracy(image: Tensor, text: Tensor, image_index: Tensor, labels: Tensor, others: Tensor | None) -> Metric:
    """How often an image is closest to its own class; a tie is a miss."""
    hits, classes = _class_hits(image, text, image_index, labels, others)
    value = float(hits.double().mean())
    return Metric(TOP1, value, 1 / classes, wilson(value, len(image)), len(image))


def class_accuracies(features: SplitFeatures, other_classes: Tensor | None, names: Sequence[str]) -> Scores:
    """The top-1 accuracy of the images of each class; `names` are those of the labels."""
    assert features.labels is not None
    hits, candidates = _class_hits(*features[:3], features.labels, other_classes)
    return accuracy_by_class(hits, features.labels, names, candidates)


def accuracy_by_class(hits: Tensor, labels: Tensor, names: Sequence[str], candidates: int) -> Scores:
    """The fraction of hits (n,) bool of each class with an image, the worst class first."""
    accuracies = []
    for label, name in enumerate(names):
        of_class = hits[labels == label]
        if len(of_class):
            value = float(of_class.double().mean())
            accuracies.append(Metric(name, value, 1 / candidates, wilson(value, len(of_class)), len(of_class)))
    return Scores((), tuple(sorted(accuracies, key=lambda metric: (metric.value, metric.name))))


def _class_hits(
    image: Tensor, text: Tensor, image_index: Tensor, labels: Tensor, others: Tensor | None
) -> tuple[Tensor, int]:
    """(n_images,) whether each is closest to its class, the mean of the class's captions; the number of classes."""
    sums = text.new_zeros(int(labels.max()) + 1, text.shape[1], dtype=torch.float32)
    classes = F.normalize(sums.index_add_(0, labels[image_index], text.float()), dim=-1)
    if others is not None:
        classes = torch.cat([classes, others])
    return _best_ranks(image, classes, torch.arange(len(image)), labels) == 1, len(classes)


@dataclass(frozen=True, slots=True)
class Ranks:
    """Ranks from 1, on the CPU; one more than the number of candidates means never found (NaN).

    Captions with equal keys are one candidate, and every image that has the caption is right for it.
    """

    text_to_image: Tensor  # (n_texts,) best rank among the images that have this caption
    image_to_text: Tensor  # (n_images,) best rank among its captions; valid only where `captioned`
    right_images: Tensor  # (n_texts,) how many images have this caption
    right_texts: Tensor  # (n_images,) how many distinct captions the image has
    distinct_texts: int

    @property
    def captioned(self) -> Tensor:
        """(n_images,) bool: images without a caption are candidates, not queries."""
        return self.right_texts > 0


def ranks(image: Tensor, text: Tensor, image_index: Tensor, keys: Tensor | None = None) -> Ranks:
    """Ranks of image (n_images, d) against text (n_texts, d); a tie with a wrong candidate counts as a loss."""
    low, high = int(image_index.min()), int(image_index.max())
    if low < 0 or high >= len(image) or len(image_index) != len(text):
        raise ValueError(
            f"image_index: {len(image_index)} rows from {low} to {high} for {len(text)} texts and {len(image)} images"
        )
    order = torch.arange(len(text))
    distinct, caption = (order, order) if keys is None else keys.cpu().unique(return_inverse=True)
    first = order.new_full((len(distinct),), len(text)).scatter_reduce_(0, caption, order, "amin")
    pairs = (image_index.cpu() * len(distinct) + caption).unique()  # sorted by image
    image_of, caption_of = pairs // len(distinct), pairs % len(distinct)
    by_caption = caption_of.argsort(stable=True)
    texts = text[first.to(text.device)]
    return Ranks(
        text_to_image=_best_ranks(texts, image, caption_of[by_caption], image_of[by_caption])[caption],
        image_to_text=_best_ranks(image, texts, image_of, caption_of),
        right_images=torch.bincount(caption_of)[caption],
        right_texts=torch.bincount(image_of, minlength=len(image)),
        distinct_texts=len(distinct),
    )


@torch.no_grad()
def _best_ranks(query: Tensor, candidates: Tensor, query_of: Tensor, candidate_of: Tensor) -> Tensor:
    """(n_queries,) best rank of a right candidate; the right pairs (query_of, candidate_of) are sorted by query."""
    query_of, candidate_of = query_of.to(query.device), candidate_of.to(query.device)
    chunk = _chunk(len(candidates))
    # The pairs of a chunk of queries are one slice, so no (chunk, n_candidates) mask is needed.
    edges = torch.searchsorted(query_of, torch.arange(len(query) + 1, device=query_of.device)).tolist()
    found = []
    # Under the caller's autocast the product would run in bf16, where different scores tie by rounding.
    with torch.autocast(query.device.type, enabled=False):
        query, candidates = query.float(), candidates.float()
        for start in range(0, len(query), chunk):
            scores = query[start : start + chunk] @ candidates.T  # (chunk, n_candidates)
            part = slice(edges[start], edges[start + len(scores)])
            row, column = query_of[part] - start, candidate_of[part]
            # The right scores come from the same product: computed separately, they could win by rounding.
            right = scores[row, column].nan_to_num(nan=-torch.inf)
            best = scores.new_full((len(scores),), -torch.inf).scatter_reduce_(0, row, right, "amax")
            scores[row, column] = -torch.inf
            # Summed in int32, which is three times as fast as int64 on a CPU.
            rank = 1 + (scores >= best[:, None] - TIE).sum(dim=1, dtype=torch.int32).long()
            found.append(rank.masked_fill(best == -torch.inf, len(candidates) + 1))
    return torch.cat(found).cpu()


def is_match(image: Tensor, key: Tensor, image_index: Tensor, keys: Tensor | None = None) -> Tensor:
    """Whether each image has a caption with this key; `image` and `key` broadcast, default keys are row numbers."""
    keys = torch.arange(len(image_index)) if keys is None else keys
    n = int(keys.max()) + 1
    return torch.isin(image * n + key, image_index * n + keys)


def nearest(query: Tensor, candidates: Tensor, k: int = 5) -> tuple[Tensor, Tensor]:
    """Scores (n, k) and indices (n, k) of the k best candidates of each query, on the CPU; NaN comes last."""
    k = min(k, len(candidates))
    found = [(torch.empty(0, k), torch.empty(0, k, dtype=torch.long))]
    with torch.no_grad(), torch.autocast(query.device.type, enabled=False):
        for part in query.float().split(_chunk(len(candidates))):
            best = (part @ candidates.float().T).nan_to_num(nan=-torch.inf).topk(k, dim=1)
            found.append((best.values.cpu(), best.indices.cpu()))
    scores, indices = zip(*found, strict=True)
    return torch.cat(scores), torch.cat(indices)


def _chunk(candidates: int) -> int:
    return max(1, MAX_SCORES // max(1, candidates))


def recall_chance(k: int, right: Tensor, candidates: int) -> float:
    """Probability that the first k of a random order contain a right candidate.

    right: (n_queries,) how many candidates are right; averaged over the queries that have any.
    """
    counts, queries = right[right > 0].cpu().unique(return_counts=True)
    drawn = torch.arange(min(k, candidates), dtype=torch.float64)
    # Hypergeometric: draw k candidates without replacement and miss every right one, draw by draw.
    miss = ((candidates - counts.double()[:, None] - drawn) / (candidates - drawn)).clamp(min=0).prod(dim=1)
    return float(((1 - miss) * queries).sum() / queries.sum())
