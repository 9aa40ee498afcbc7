"""Image-text retrieval over a complete split: recall@k in both directions, top-1 accuracy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from m1clip.evaluation.statistics import Metric, Scores, metrics_of, wilson
from m1clip.inference.features import SplitFeatures
from m1clip.runlog import MEAN_RECALL, TOP1

RECALL_AT = (1, 5, 10)
TIE = 1e-6  # equal unit vectors may differ by about 1e-7 with their position in a matmul
MAX_SCORES = 1 << 24  # similarities in memory at once: 64 MiB


def retrieval(
    image: np.ndarray,
    text: np.ndarray,
    image_index: np.ndarray,
    keys: np.ndarray | None = None,
    labels: np.ndarray | None = None,
    other_classes: np.ndarray | None = None,
) -> Scores:
    """Recall of unit vectors image (n_images, d) and text (n_texts, d), in both directions.

    image_index[t] is the image that text t describes; captions with equal `keys` are equally right.
    An image counts as found when any of its captions is, a caption when any of its images is. With
    class `labels` (n_images,), top-1 accuracy comes first, among these classes and `other_classes`
    (n, d), which have no image here.
    """
    ranking = ranks(image, text, image_index, keys)
    queries = np.flatnonzero(ranking.captioned)
    metrics = [
        *_direction(
            "text_to_image", ranking.text_to_image, image_index, ranking.right_images, len(image)
        ),
        *_direction(
            "image_to_text",
            ranking.image_to_text[queries],
            queries,
            ranking.right_texts[queries],
            ranking.distinct_texts,
        ),
    ]
    metrics.insert(0, _mean_recall(metrics))
    if labels is not None:
        metrics.insert(0, _top1_accuracy(image, text, image_index, labels, other_classes))
    return Scores(tuple(metrics))


def recall_by_group(features: SplitFeatures, groups: Sequence[str]) -> dict[str, Metric]:
    """Mean recall of the images and captions of each group, among those of all groups.

    groups: (n_images,) the group of each image; those with an empty name are candidates only.
    """
    ranking = ranks(*features[:4])
    of_image = np.array(groups, dtype=object)
    recalls: dict[str, Metric] = {}
    for group in sorted(set(groups) - {""}):
        queries = np.flatnonzero(ranking.captioned & (of_image == group))
        texts = np.flatnonzero(of_image[features.image_index] == group)
        if not len(queries):
            continue  # none of these images has a caption
        by_text = _direction(
            "text_to_image",
            ranking.text_to_image[texts],
            features.image_index[texts],
            ranking.right_images[texts],
            len(features.image),
        )
        by_image = _direction(
            "image_to_text",
            ranking.image_to_text[queries],
            queries,
            ranking.right_texts[queries],
            ranking.distinct_texts,
        )
        recalls[group] = _mean_recall([*by_text, *by_image])
    return recalls


def _direction(
    name: str, rank: np.ndarray, image_index: np.ndarray, right: np.ndarray, candidates: int
) -> list[Metric]:
    # The cap keeps rank n + 1 (never found) a miss when k exceeds the number of candidates.
    hits = rank[:, None] <= np.array([min(k, candidates) for k in RECALL_AT])
    names = [f"{name}/recall@{k}" for k in RECALL_AT]
    chances = [recall_chance(k, right, candidates) for k in RECALL_AT]
    return metrics_of(names, hits, chances, image_index)


def _mean_recall(recalls: Sequence[Metric]) -> Metric:
    value = sum(metric.value for metric in recalls) / len(recalls)
    chance = sum(metric.chance for metric in recalls) / len(recalls)
    images = recalls[-1].n
    # Wilson over images is never too narrow: a mean of hits varies less than a single hit.
    return Metric(MEAN_RECALL, value, chance, wilson(value, images), images)


def _top1_accuracy(
    image: np.ndarray,
    text: np.ndarray,
    image_index: np.ndarray,
    labels: np.ndarray,
    others: np.ndarray | None,
) -> Metric:
    """How often an image is closest to its own class; a tie is a miss."""
    hits, classes = _class_hits(image, text, image_index, labels, others)
    value = float(hits.mean())
    return Metric(TOP1, value, 1 / classes, wilson(value, len(image)), len(image))


def class_accuracies(
    features: SplitFeatures, other_classes: np.ndarray | None, names: Sequence[str]
) -> Scores:
    """The top-1 accuracy of the images of each class; `names` are those of the labels."""
    assert features.labels is not None
    hits, candidates = _class_hits(*features[:3], features.labels, other_classes)
    return accuracy_by_class(hits, features.labels, names, candidates)


def accuracy_by_class(
    hits: np.ndarray, labels: np.ndarray, names: Sequence[str], candidates: int
) -> Scores:
    """The fraction of hits (n,) bool of each class with an image, the worst class first."""
    accuracies = []
    for label, name in enumerate(names):
        of_class = hits[labels == label]
        if len(of_class):
            value = float(of_class.mean())
            accuracies.append(
                Metric(name, value, 1 / candidates, wilson(value, len(of_class)), len(of_class))
            )
    return Scores((), tuple(sorted(accuracies, key=lambda metric: (metric.value, metric.name))))


def _class_hits(
    image: np.ndarray,
    text: np.ndarray,
    image_index: np.ndarray,
    labels: np.ndarray,
    others: np.ndarray | None,
) -> tuple[np.ndarray, int]:
    """(n_images,) whether each is closest to its class, the mean of the class's captions.

    The number of classes.
    """
    sums = np.zeros((int(labels.max()) + 1, text.shape[1]), np.float32)
    np.add.at(sums, labels[image_index], text)
    classes = sums / np.maximum(np.linalg.norm(sums, axis=1, keepdims=True), 1e-12)
    if others is not None:
        classes = np.concatenate([classes, others])
    return _best_ranks(image, classes, np.arange(len(image)), labels) == 1, len(classes)


@dataclass(frozen=True, slots=True)
class Ranks:
    """Ranks from 1, on the CPU; one more than the number of candidates means never found (NaN).

    Captions with equal keys are one candidate, and every image that has the caption is right for
    it.
    """

    text_to_image: np.ndarray  # (n_texts,) best rank among the images that have this caption
    # (n_images,) best rank among its captions; valid only where `captioned`.
    image_to_text: np.ndarray
    right_images: np.ndarray  # (n_texts,) how many images have this caption
    right_texts: np.ndarray  # (n_images,) how many distinct captions the image has
    distinct_texts: int

    @property
    def captioned(self) -> np.ndarray:
        """(n_images,) bool: images without a caption are candidates, not queries."""
        return self.right_texts > 0


def ranks(
    image: np.ndarray, text: np.ndarray, image_index: np.ndarray, keys: np.ndarray | None = None
) -> Ranks:
    """Ranks of image (n_images, d) against text (n_texts, d).

    A tie with a wrong candidate counts as a loss.
    """
    low = int(image_index.min())
    high = int(image_index.max())
    if low < 0 or high >= len(image) or len(image_index) != len(text):
        raise ValueError(
            f"image_index: {len(image_index)} rows from {low} to {high} for {len(text)} texts and"
            f" {len(image)} images"
        )
    # The first text with each key, and the number of each text's key.
    keys = np.arange(len(text)) if keys is None else keys
    _, first_text, caption = np.unique(keys, return_index=True, return_inverse=True)
    distinct = len(first_text)
    pairs = np.unique(image_index * distinct + caption)  # sorted by image
    image_of = pairs // distinct
    caption_of = pairs % distinct
    by_caption = np.argsort(caption_of, kind="stable")
    texts = text[first_text]
    return Ranks(
        text_to_image=_best_ranks(texts, image, caption_of[by_caption], image_of[by_caption])[
            caption
        ],
        image_to_text=_best_ranks(image, texts, image_of, caption_of),
        right_images=np.bincount(caption_of)[caption],
        right_texts=np.bincount(image_of, minlength=len(image)),
        distinct_texts=distinct,
    )


def _best_ranks(
    query: np.ndarray, candidates: np.ndarray, query_of: np.ndarray, candidate_of: np.ndarray
) -> np.ndarray:
    """(n_queries,) best rank of a right candidate.

    The right pairs (query_of, candidate_of) are sorted by query.
    """
    chunk = _chunk(len(candidates))
    # The pairs of a chunk of queries are one slice, so no (chunk, n_candidates) mask is needed.
    edges = np.searchsorted(query_of, np.arange(len(query) + 1))
    best_ranks = np.empty(len(query), np.int64)
    for start in range(0, len(query), chunk):
        scores = query[start : start + chunk] @ candidates.T  # (chunk, n_candidates)
        pairs = slice(edges[start], edges[start + len(scores)])
        row = query_of[pairs] - start
        column = candidate_of[pairs]
        # The right scores come from the same matmul: computed separately, they could win by
        # rounding.
        right = scores[row, column]
        best = np.full(len(scores), -np.inf, np.float32)
        np.maximum.at(best, row, np.where(np.isnan(right), -np.inf, right).astype(np.float32))
        scores[row, column] = -np.inf
        above = scores >= best[:, None] - np.float32(TIE)
        # Half the time of a sum of bool.
        rank = 1 + above.view(np.uint8).sum(axis=1, dtype=np.int32)
        rank[np.isneginf(best)] = len(candidates) + 1
        best_ranks[start : start + len(scores)] = rank
    return best_ranks


def is_match(
    image: np.ndarray, key: np.ndarray, image_index: np.ndarray, keys: np.ndarray | None = None
) -> np.ndarray:
    """Whether each image has a caption with this key.

    `image` and `key` broadcast, default keys are row numbers.
    """
    keys = np.arange(len(image_index)) if keys is None else keys
    n = int(keys.max()) + 1
    return np.isin(image * n + key, image_index * n + keys)


def nearest(query: np.ndarray, candidates: np.ndarray, k: int = 5) -> tuple[np.ndarray, np.ndarray]:
    """Scores (n, k) and indices (n, k) of the k best candidates of each query, the best first.

    NaN comes last.
    """
    k = min(k, len(candidates))
    chunk = _chunk(len(candidates))
    scores = np.empty((len(query), k), np.float32)
    indices = np.empty((len(query), k), np.int64)
    for start in range(0, len(query), chunk):
        part = query[start : start + chunk] @ candidates.T
        part[np.isnan(part)] = -np.inf
        rows = slice(start, start + len(part))
        indices[rows], scores[rows] = top_k(part, k)
    return scores, indices


def top_k(scores: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Indices (n, k) and values (n, k) of the k largest of each row, the largest first."""
    if k == 1:
        chosen = scores.argmax(axis=1)[:, None]
    else:
        chosen = np.argpartition(scores, -k, axis=1)[:, -k:]
        order = np.argsort(-np.take_along_axis(scores, chosen, axis=1), axis=1, kind="stable")
        chosen = np.take_along_axis(chosen, order, axis=1)
    return chosen, np.take_along_axis(scores, chosen, axis=1)


def _chunk(candidates: int) -> int:
    return max(1, MAX_SCORES // max(1, candidates))


def recall_chance(k: int, right: np.ndarray, candidates: int) -> float:
    """Probability that the first k of a random order contain a right candidate.

    right: (n_queries,) how many candidates are right; averaged over the queries that have any.
    """
    counts, queries = np.unique(right[right > 0], return_counts=True)
    draws = np.arange(min(k, candidates), dtype=np.float64)
    # Hypergeometric: draw k candidates without replacement and miss every right one, draw by draw.
    miss = ((candidates - counts[:, None] - draws) / (candidates - draws)).clip(0).prod(axis=1)
    return float(((1 - miss) * queries).sum() / queries.sum())
