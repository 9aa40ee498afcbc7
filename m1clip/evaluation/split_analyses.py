"""Analyses of what a model has learned, as functions of features.

They are cheap enough for every evaluation. A fraction is reported as a rate: with its 95%
interval, its chance level and the number of trials.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from m1clip.analyses import Analysis, analyses_of_evaluations, analyses_that_need
from m1clip.data.synthetic.source import SyntheticSource
from m1clip.evaluation.retrieval import TIE, is_match, nearest, recall_by_group
from m1clip.evaluation.statistics import Metric, Scores, metrics_of, wilson
from m1clip.formatting import percent, table
from m1clip.inference.features import SplitFeatures

if TYPE_CHECKING:
    from m1clip.evaluation.evaluate import Evaluator

Rate = dict[str, float]  # as analyses.RATE

COMPARED_CAPTIONS = 256  # compared with each other by `difficulty_by_similarity`
CHANGED_SCENES = 64  # synthetic images whose captions are changed by `scene_difficulty`
MAX_POINTS = 1024  # compared with each other by `uniformity`
# quantiles of similarity
HARD = 0.9
MEDIUM = 0.5
DIFFICULTIES = ("easy", "medium", "hard")
DIGITS = 5  # of a logged value


def analyze(
    features: SplitFeatures,
    evaluator: Evaluator | None = None,
    on_error: Callable[[str, Exception], None] | None = None,
) -> dict[str, Any]:
    """Compute the analyses in the table that belong to an evaluation.

    Those of the split need an evaluator. A value that this data does not have is skipped.
    `on_error` gets the name and the error of an analysis that fails; if it returns, the analysis is
    skipped.
    """
    todo: list[tuple[Analysis, tuple[Any, ...]]]
    todo = [(analysis, (features,)) for analysis in analyses_that_need("features")]
    if evaluator is not None:
        todo += [(analysis, (evaluator, features)) for analysis in analyses_that_need("split")]
    values = {}
    for analysis, needed in todo:
        try:
            values[analysis.name] = analysis.compute(*needed)
        except Exception as error:
            if on_error is None:
                raise
            on_error(analysis.name, error)
    order = [analysis.name for analysis in analyses_of_evaluations()]
    return {name: values[name] for name in order if values.get(name) not in (None, {})}


def to_rate(metric: Metric) -> Rate:
    """A metric as it is logged in an analysis."""
    low, high = metric.interval
    fractions = {"value": metric.value, "low": low, "high": high, "chance": metric.chance}
    return {**{name: round(value, DIGITS) for name, value in fractions.items()}, "n": metric.n}


# The functions of the table: values as they are logged.


def mean_alignment(features: SplitFeatures) -> float:
    """Alignment of all captions."""
    return round(alignment(features.image, features.text, features.image_index), 5)


def uniformity_image(features: SplitFeatures) -> float:
    """Uniformity of the images."""
    return round(uniformity(features.image), 5)


def uniformity_text(features: SplitFeatures) -> float:
    """Uniformity of the captions."""
    return round(uniformity(features.text), 5)


def mean_modality_gap(features: SplitFeatures) -> float:
    """Modality gap of the split."""
    return round(modality_gap(features.image, features.text), 5)


def difficulty(features: SplitFeatures) -> dict[str, Rate]:
    """Accuracy against other captions by their similarity."""
    return difficulty_by_similarity(
        features.image, features.text, features.image_index, features.caption_ids
    )


def scene_difficulty(evaluator: Evaluator, features: SplitFeatures) -> dict[str, Rate]:
    """Accuracy against other captions of synthetic images by what they describe.

    {} for other data.
    """
    source = evaluator.source
    if not isinstance(source, SyntheticSource):
        return {}
    samples = evaluator.data.samples[: len(features.image)]
    categories = [
        {thing.category for thing in source.scene_of[sample.id].things} for sample in samples
    ]
    compared = compare_captions(
        features.image, features.text, features.image_index, features.caption_ids
    )
    pairs = zip(compared.image.tolist(), compared.other_image.tolist(), strict=True)
    shared = np.array([bool(categories[own] & categories[other]) for own, other in pairs], bool)
    rates = compared.rates({"easy": ~shared, "medium": shared})
    rows = even_indices(len(samples), CHANGED_SCENES).tolist()
    if rows:
        rates["hard"] = to_rate(evaluator.negative_scores(features.image, rows)["negatives"])
    return rates


def held_out_batch_accuracy(evaluator: Evaluator, features: SplitFeatures) -> dict[str, Rate]:
    """Accuracy within batches of the training's size; {} if that is unknown."""
    if evaluator.batch_size < 2:
        return {}
    metric = accuracy_within_batches(features, evaluator.batch_size)
    return {} if metric is None else {evaluator.split: to_rate(metric)}


def category_recall(evaluator: Evaluator, features: SplitFeatures) -> dict[str, Rate]:
    """Mean recall by category; {} for data with fewer than two categories."""
    categories = evaluator.categories[: len(features.image)]
    if len(set(categories) - {""}) < 2:
        return {}
    recalls = recall_by_group(features, categories)
    return {category: to_rate(metric) for category, metric in recalls.items()}


# The same as functions of arrays.


def alignment(image: np.ndarray, text: np.ndarray, image_index: np.ndarray) -> float:
    """Mean squared distance between a caption and its image: 0 is perfect, 2 unrelated."""
    return float(np.square(image[image_index] - text).sum(axis=1).mean())


def uniformity(points: np.ndarray) -> float:
    """log mean exp(-2 d^2) over pairs of unit vectors: 0 is collapsed, about -4 evenly spread."""
    points = points[even_indices(len(points), MAX_POINTS)].astype(np.float64)
    if len(points) < 2:
        return 0.0
    squares = np.square(points).sum(axis=1)
    distances = squares[:, None] + squares - 2 * points @ points.T  # (n, n) squared
    pairs = np.triu_indices(len(points), k=1)
    return float(np.log(np.exp(-2 * distances[pairs].clip(0)).mean()))


def modality_gap(image: np.ndarray, text: np.ndarray) -> float:
    """Distance between the mean image and the mean caption."""
    return float(np.linalg.norm(image.mean(axis=0) - text.mean(axis=0)))


@dataclass(frozen=True, slots=True)
class ComparedCaptions:
    """Pairs of an image and a caption of another image, each one value per pair."""

    image: np.ndarray  # the image
    other_image: np.ndarray  # the image of the wrong caption
    similarity: np.ndarray  # of the wrong caption and the true one
    hits: np.ndarray  # bool: whether the true caption scores higher

    def rates(self, groups: Mapping[str, np.ndarray]) -> dict[str, Rate]:
        """How often the true caption wins in each group of pairs; empty groups are skipped.

        Chance is 1/2. The pairs of an image count as at least one trial, since they are correlated.
        """
        rates = {}
        for name, mask in groups.items():
            if mask.any():
                hits = self.hits[mask][:, None]
                (metric,) = metrics_of([name], hits, [0.5], self.image[mask])
                rates[name] = to_rate(metric)
        return rates


def compare_captions(
    image: np.ndarray, text: np.ndarray, image_index: np.ndarray, keys: np.ndarray | None = None
) -> ComparedCaptions:
    """Compare some captions, evenly spread, each with those of other images."""
    chosen = even_indices(len(text), COMPARED_CAPTIONS)
    captions = text[chosen]
    own = image_index[chosen]
    scores = image[own] @ captions.T  # (m, m): row i is the image of caption i
    key = chosen if keys is None else keys[chosen]
    negative = ~is_match(own[:, None], key[None, :], image_index, keys)
    hits = scores.diagonal()[:, None] > scores + TIE  # a tie or a NaN is a miss
    row, column = np.nonzero(negative)
    similarity = captions @ captions.T
    return ComparedCaptions(own[row], own[column], similarity[negative], hits[negative])


def difficulty_by_similarity(
    image: np.ndarray, text: np.ndarray, image_index: np.ndarray, keys: np.ndarray | None = None
) -> dict[str, Rate]:
    """How often an image prefers its caption to another's, by the similarity of the captions."""
    compared = compare_captions(image, text, image_index, keys)
    similarity = compared.similarity
    if not len(similarity):
        return {}
    medium, hard = np.quantile(similarity, [MEDIUM, HARD])
    level = (similarity >= medium).astype(int) + (similarity >= hard)
    return compared.rates({name: level == number for number, name in enumerate(DIFFICULTIES)})


def accuracy_within_batches(features: SplitFeatures, batch_size: int) -> Metric | None:
    """How often an image is closest to its own caption among the captions of its batch.

    Batches are random but always the same, with one caption per image, the first; an incomplete
    last batch is skipped. A split that is smaller than a batch is one batch. None for
    fewer than two images with a caption.
    """
    captioned, first_caption = np.unique(features.image_index, return_index=True)
    size = min(batch_size, len(captioned))
    if size < 2:
        return None
    order = np.random.default_rng(0).permutation(len(captioned))
    batches = order[: len(order) // size * size].reshape(-1, size)
    images = features.image[captioned]
    captions = features.text[first_caption]
    keys = features.caption_ids[first_caption]
    hits = []
    right = []
    for batch in batches:
        scores = images[batch] @ captions[batch].T  # (size, size)
        matches = keys[batch][:, None] == keys[batch]  # equal captions are equally right
        best_wrong = np.where(matches, -np.inf, scores).max(axis=1)
        best_right = np.where(matches, scores, -np.inf).max(axis=1)
        hits.append(best_right > best_wrong + TIE)
        right.append(matches.mean(axis=1))
    hit = np.concatenate(hits)
    value = float(hit.mean())
    chance = float(np.concatenate(right).mean())
    return Metric("batch_accuracy", value, chance, wilson(value, len(hit)), len(hit))


@dataclass(frozen=True, slots=True)
class Confusion:
    """A caption that retrieved a wrong image, and by how much that image scored higher."""

    caption: int
    retrieved: int
    right: int
    margin: float


def confusions(
    image: np.ndarray,
    text: np.ndarray,
    image_index: np.ndarray,
    keys: np.ndarray | None = None,
    *,
    limit: int,
) -> list[Confusion]:
    """The captions whose wrong image leads by the largest margin, each pair of images once."""
    best, retrieved = nearest(text, image, 1)
    own = (image[image_index] * text).sum(axis=1)
    key = np.arange(len(text)) if keys is None else keys
    margin = np.where(is_match(retrieved[:, 0], key, image_index, keys), -np.inf, best[:, 0] - own)
    worst: dict[tuple[int, int], Confusion] = {}
    for caption in np.argsort(-margin, kind="stable").tolist():
        if len(worst) == limit or not margin[caption] > -np.inf:
            break
        pair = (int(retrieved[caption, 0]), int(image_index[caption]))
        worst.setdefault(pair, Confusion(caption, *pair, float(margin[caption])))
    return list(worst.values())


def negatives_accuracy(
    image: np.ndarray,
    caption: np.ndarray,
    negative: np.ndarray,
    image_index: np.ndarray,
    changed: Sequence[str],
) -> Scores:
    """How often an image scores its true caption above a negative one; chance is 1/2.

    image: (n, d); caption, negative: (m, d), the true and the negative caption of image
    image_index[j], which differ in the attribute changed[j].
    """
    own = image[image_index]
    true, false = ((own * vectors).sum(axis=1) for vectors in (caption, negative))
    hits = true > false + TIE  # a tie or a NaN is a miss
    metrics = metrics_of(["negatives"], hits[:, None], [0.5], image_index)
    for name in sorted(set(changed)):
        mask = np.array([attribute == name for attribute in changed])
        metrics += metrics_of(
            [f"negatives/changed_{name}"], hits[mask][:, None], [0.5], image_index[mask]
        )
    return Scores(tuple(metrics))


def even_indices(count: int, limit: int) -> np.ndarray:
    """At most `limit` indices below `count`, evenly spaced."""
    return np.arange(min(count, limit)) * count // max(1, min(count, limit))


def analysis_table(analysis: Mapping[str, Any]) -> str:
    """The analyses of an evaluation as tables: the numbers, then the rates."""
    included = [entry for entry in analyses_of_evaluations() if entry.name in analysis]
    numbers = [
        (entry.name.replace("_", " "), f"{analysis[entry.name]:.3f}", entry.meaning)
        for entry in included
        if entry.shown_as == "curve"
    ]
    tables = [table(("figure", "value", "meaning"), numbers)]
    for entry in included:
        if entry.has_rates:
            rows = [
                (part, *_rate_cells(value), entry.parts.get(part, ""))
                for part, value in analysis[entry.name].items()
            ]
            head = (entry.name.replace("_", " "), "value", "95% interval", "chance", "n", "")
            tables.append(f"{table(head, rows)}\n({entry.meaning})")
    return "\n\n".join(tables)


def _rate_cells(value: Rate) -> tuple[str, ...]:
    interval = f"{100 * value['low']:.1f} - {100 * value['high']:.1f}%"
    return percent(value["value"]), interval, percent(value["chance"]), f"{int(value['n']):,}"
