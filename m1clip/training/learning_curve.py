"""How much more captions would help: a learning curve from the captions so far, and what it
predicts.

Heads are fitted in closed form (CCA, as `--recipe frozen` starts) on parts of the captioned photos
and tested on the others. A curve through the measured recalls is continued to more captions; it is
fitted again to resampled measurements and with curves of different shapes, which gives the
interval.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from m1clip.errors import UserError
from m1clip.evaluation.retrieval import RECALL_AT, ranks
from m1clip.formatting import plural, table
from m1clip.training.cca import IMAGE_RIDGE, canonical

MIN_LABELS = 40  # photos with captions, below which a curve would be noise
MAX_LABELS = 2_000  # photos that are used: more would take long, and the curve is flat there
MORE = (100, 200, 500)
FOLDS = 4  # each held out once in a draw
DRAWS = 4  # orders of the photos
MIN_CANDIDATES = 10
MAX_CANDIDATES = 100  # held-out photos among which one is searched
SMALLEST_FRACTION = 0.125  # of the photos that are trained on
SIZES = 6
BOOTSTRAPS = 400
EMBED_DIM = 256
# Weights of the fitted heads, added to the similarities of a model that knows the photos already.
ALIGNED_WEIGHTS = (0.0, 0.25, 0.5, 1.0, 2.0, 4.0)
OUTLIER = 8.0  # of a standardized feature
# The resampled curves do not contain that the next captions may be better or worse than these. Of
# the interval of a gain. Chosen on 300 -> 500 photos; on 500 -> 1,000, the interval held in four of
# four draws, with gains predicted about a point too low (docs/results/how_many.json).
WIDENING = 1.25
LOW_QUANTILE, HIGH_QUANTILE = 0.025, 0.975


@dataclass(frozen=True)
class CurvePoint:
    """The mean recall that heads reach with some captioned photos, and its 95% interval."""

    labels: int
    recall: float
    low: float
    high: float


@dataclass(frozen=True)
class Gain:
    """What more captioned photos are predicted to add, in points (percent), with a 95% interval."""

    more: int
    points: float
    low: float
    high: float

    def __str__(self) -> str:
        return (
            f"{self.more:,} more captions: {self.points:+.1f} points "
            f"[{self.low:+.1f}, {self.high:+.1f}]"
        )


@dataclass(frozen=True)
class LearningCurve:
    """Recall on held-out photos by the number of captioned photos, and what it predicts."""

    labels: int  # photos with captions
    candidates: int  # held-out photos among which each is searched
    start: float | None  # recall of the model without these captions; None: there is no model
    now: float  # recall with all captions, by the fitted curve
    points: tuple[CurvePoint, ...]
    gains: tuple[Gain, ...]

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        rows = [
            (f"{point.labels:,}", f"{100 * point.recall:.1f}%", _interval(point))
            for point in self.points
        ]
        head = ("photos with captions", "mean recall", "95% interval")
        measured = table(head, rows)
        lines = [
            f"Mean recall (@1, @5, @10, both directions) among {self.candidates} held-out photos:",
            "",
            measured,
            "",
        ]
        if self.start is not None:
            lines.append(f"The model without these captions: {100 * self.start:.1f}%.")
        lines.append(f"Now, with {plural(self.labels, 'photo')}: about {100 * self.now:.1f}%.")
        return "\n".join([*lines, *(f"  {gain}" for gain in self.gains)])


def _interval(point: CurvePoint) -> str:
    return f"{100 * point.low:.1f} - {100 * point.high:.1f}%"


def learning_curve(
    images: np.ndarray,
    texts: np.ndarray,
    image_index: np.ndarray,
    *,
    aligned: bool = False,
    more: Sequence[int] = MORE,
    seed: int = 0,
    labels: int | None = None,
) -> LearningCurve:
    """Predict the gain of more captions from vectors of captioned photos.

    images (n, width) and texts (m, width) are features of two towers, whose heads start from
    nothing; or, with `aligned`, unit vectors of one CLIP model, which the captions improve.
    image_index (m,) is the photo that each caption describes. `labels` is the number of captioned
    photos if these are only some of them. UserError if there are fewer than MIN_LABELS photos.
    """
    captioned = np.unique(image_index)
    if len(captioned) < MIN_LABELS:
        raise UserError(
            f"{plural(len(captioned), 'photo')} with captions: a learning curve needs at least "
            f"{MIN_LABELS}"
        )
    random = np.random.default_rng(seed)
    chosen = np.sort(random.permutation(captioned)[:MAX_LABELS])
    pairs = Pairs.select(images, texts, image_index, chosen)
    recalls = _measure(pairs, aligned, random)
    curves = _fit(recalls, random)
    labels = labels or len(captioned)
    now = float(np.median(curves.at(labels)))
    gains = tuple(_gain(curves, labels, count) for count in more)
    start = None if recalls.start is None else float(recalls.start.mean())
    points = tuple(
        CurvePoint(int(size), *_mean_and_interval(recalls.values[number], random))
        for number, size in enumerate(recalls.sizes)
    )
    return LearningCurve(labels, recalls.candidates, start, now, points, gains)


# Measurements


class Pairs(NamedTuple):
    """Photos with captions, as coordinates in which heads are fitted."""

    images: torch.Tensor  # (n, coordinates) float64
    texts: torch.Tensor  # (m, coordinates) float64
    image_index: np.ndarray  # (m,) sorted
    widths: tuple[int, int]  # of the features that the coordinates stand for
    image_vectors: np.ndarray  # (n, dim) as they were given
    text_vectors: np.ndarray  # (m, dim)

    @classmethod
    def select(
        cls, images: np.ndarray, texts: np.ndarray, image_index: np.ndarray, chosen: np.ndarray
    ) -> Pairs:
        """Take the chosen photos and their captions, and standardize their features."""
        positions = np.full(int(image_index.max()) + 1, -1)
        positions[chosen] = np.arange(len(chosen))
        rows = np.flatnonzero(positions[image_index] >= 0)
        rows = rows[np.argsort(positions[image_index[rows]], kind="stable")]
        image_vectors = np.asarray(images[chosen], np.float32)
        text_vectors = np.asarray(texts[rows], np.float32)
        return cls(
            _coordinates(image_vectors),
            _coordinates(text_vectors),
            positions[image_index[rows]],
            (image_vectors.shape[1], text_vectors.shape[1]),
            image_vectors,
            text_vectors,
        )

    def captions_of(self, photos: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the rows of the captions of some photos, and the place of each one's photo."""
        positions = np.full(len(self.images), -1)
        positions[photos] = np.arange(len(photos))
        rows = np.flatnonzero(positions[self.image_index] >= 0)
        return rows, positions[self.image_index[rows]]


def _standardize(features: np.ndarray) -> torch.Tensor:
    deviation = features.std(axis=0)
    scale = np.where(deviation < 0.01 * np.median(deviation), np.median(deviation), deviation)
    rows = (features - features.mean(axis=0)) / np.maximum(scale, 1e-12)
    return torch.from_numpy(rows.clip(-OUTLIER, OUTLIER).astype(np.float64))


def _coordinates(features: np.ndarray) -> torch.Tensor:
    """Return standardized features in a basis of the space that they span.

    With fewer photos than features, this is smaller, and ridge CCA is the same in any basis.
    """
    rows = _standardize(features)
    if len(rows) >= rows.shape[1]:
        return rows
    values, vectors = torch.linalg.eigh(rows @ rows.T)
    is_significant = values > 1e-10 * values[-1]
    return vectors[:, is_significant] * values[is_significant].sqrt()


class Recalls(NamedTuple):
    """Mean recalls of held-out photos."""

    sizes: np.ndarray  # (sizes,) photos that heads were fitted on
    values: np.ndarray  # (sizes, draws, photos) fractions; each photo is held out once in a draw
    candidates: int
    start: np.ndarray | None  # (draws, photos) of the model itself


def _measure(pairs: Pairs, aligned: bool, random: np.random.Generator) -> Recalls:
    """Fit heads on nested parts of the photos that are not held out, for each fold and draw."""
    photos = len(pairs.images)
    held_out = photos // FOLDS
    groups = max(1, round(held_out / MAX_CANDIDATES))
    candidates = held_out // groups
    largest = photos - photos // FOLDS - 1
    sizes = np.geomspace(max(4, SMALLEST_FRACTION * photos), largest, SIZES).round().astype(int)
    weights = ALIGNED_WEIGHTS if aligned else (None,)
    values = np.full((len(weights), len(sizes), DRAWS, photos), np.nan)
    for draw in range(DRAWS):
        order = random.permutation(photos)
        for fold in np.array_split(order, FOLDS):
            train = np.setdiff1d(order, fold)
            random.shuffle(train)
            tests = np.array_split(fold, groups)
            for number, size in enumerate(sizes):
                image_map, text_map = _fit_heads(pairs, train[:size])
                for test in tests:
                    for at, weight in enumerate(weights):
                        values[at, number, draw, test] = _recall(
                            pairs, test, image_map, text_map, weight
                        )
    start = values[0, 0] if aligned else None
    best = np.array(
        [
            values[int(values[:, number].mean(axis=(1, 2)).argmax()), number]
            for number in range(len(sizes))
        ]
    )
    return Recalls(sizes, best, candidates, start)


Map = Callable[[torch.Tensor], np.ndarray]


def _fit_heads(pairs: Pairs, photos: np.ndarray) -> tuple[Map, Map]:
    """Return what maps coordinates of images and features of texts to unit vectors, by CCA."""
    photos = np.sort(photos)
    rows, photo_index = pairs.captions_of(photos)
    x = pairs.images[torch.from_numpy(photos)]
    y = pairs.texts[torch.from_numpy(rows)]
    index = torch.from_numpy(photo_index)
    counts = torch.bincount(index, minlength=len(x)).clamp(min=1)[:, None]
    y_of_image = torch.zeros(len(x), y.shape[1], dtype=y.dtype).index_add_(0, index, y) / counts
    x_mean = x.mean(dim=0)
    y_mean = y.mean(dim=0)
    x_centered = x - x_mean
    y_centered = y - y_mean
    xx = x_centered.T @ x_centered / len(x)
    yy = y_centered.T @ y_centered / len(y)
    xy = x_centered.T @ (y_of_image - y_of_image.mean(dim=0)) / len(x)
    count = min(EMBED_DIM, *xy.shape)
    wx, wy = canonical(xx, yy, xy, count, len(x), IMAGE_RIDGE * pairs.widths[0])
    return _unit_map(wx, x_mean), _unit_map(wy, y_mean)


def _unit_map(matrix: torch.Tensor, mean: torch.Tensor) -> Map:
    def to_unit_vectors(features: torch.Tensor) -> np.ndarray:
        projected = (features - mean) @ matrix.T
        return torch.nn.functional.normalize(projected, dim=1).float().numpy()

    return to_unit_vectors


def _recall(
    pairs: Pairs, photos: np.ndarray, image_map: Map, text_map: Map, weight: float | None
) -> np.ndarray:
    """(photos,) the mean recall of each held-out photo: @1, @5 and @10 in both directions."""
    rows, photo_index = pairs.captions_of(photos)
    image = image_map(pairs.images[torch.from_numpy(photos)])
    text = text_map(pairs.texts[torch.from_numpy(rows)])
    if weight is not None:
        # The similarity of the sum: that of the model, and that of the heads times the weight.
        scale = np.float32(weight**0.5)
        image = np.hstack([pairs.image_vectors[photos], scale * image])
        text = np.hstack([pairs.text_vectors[rows], scale * text])
    text_ranks = ranks(image, text, photo_index)
    by_text = np.mean([text_ranks.text_to_image <= k for k in RECALL_AT], axis=0)
    by_image = np.mean([text_ranks.image_to_text <= k for k in RECALL_AT], axis=0)
    counts = np.bincount(photo_index, minlength=len(photos))
    of_texts = np.bincount(photo_index, by_text, len(photos)) / np.maximum(counts, 1)
    return np.asarray((of_texts + by_image) / 2)


# Curves


class Curves(NamedTuple):
    """Curves that fit resampled measurements: functions of the number of photos."""

    functions: tuple[Callable[[float], float], ...]

    def at(self, labels: float) -> np.ndarray:
        """(curves,) the recalls with a number of photos."""
        return np.array([function(labels) for function in self.functions])


def _mean_and_interval(
    values: np.ndarray, random: np.random.Generator
) -> tuple[float, float, float]:
    """Return the mean of (draws, photos) values with the interval of a bootstrap over photos."""
    by_photo = values.mean(axis=0)
    picks = random.integers(len(by_photo), size=(BOOTSTRAPS, len(by_photo)))
    low, high = np.quantile(by_photo[picks].mean(axis=1), (LOW_QUANTILE, HIGH_QUANTILE))
    return float(by_photo.mean()), float(low), float(high)


def _fit(recalls: Recalls, random: np.random.Generator) -> Curves:
    """Fit each shape of curve to resampled photos and draws."""
    sizes = recalls.sizes.astype(np.float64)
    # The last levels off, which a few points rarely show: it decides the lower end of the interval.
    shapes = (_fit_logit, _fit_power, _fit_logit, _fit_power, _fit_saturating)
    functions = []
    draws, photos = recalls.values.shape[1:]
    for number in range(BOOTSTRAPS):
        picked = random.integers(photos, size=photos)
        drawn = random.integers(draws, size=draws)
        means = recalls.values[:, drawn][:, :, picked].mean(axis=(1, 2))
        functions.append(shapes[number % len(shapes)](sizes, means))
    return Curves(tuple(functions))


def _fit_logit(sizes: np.ndarray, recalls: np.ndarray) -> Callable[[float], float]:
    """The log odds of recall are a line over the logarithm of the number of photos."""
    clipped = recalls.clip(1e-4, 1 - 1e-4)
    slope, offset = np.polyfit(np.log(sizes), np.log(clipped / (1 - clipped)), 1, w=sizes**0.5)
    slope = max(float(slope), 0.0)
    return lambda labels: float(1 / (1 + np.exp(-(offset + slope * np.log(labels)))))


def _fit_power(sizes: np.ndarray, recalls: np.ndarray) -> Callable[[float], float]:
    """The fraction that is missed is a power of the number of photos."""
    missed = (1 - recalls).clip(1e-4)
    slope, offset = np.polyfit(np.log(sizes), np.log(missed), 1, w=sizes**0.5)
    slope = min(float(slope), 0.0)
    return lambda labels: float(1 - np.exp(offset + slope * np.log(labels)))


def _fit_saturating(sizes: np.ndarray, recalls: np.ndarray) -> Callable[[float], float]:
    """The recall approaches a limit with one over the root of the number of photos."""
    slope, limit = np.polyfit(sizes**-0.5, recalls, 1, w=sizes**0.5)
    slope = min(float(slope), 0.0)
    return lambda labels: float(min(limit + slope * labels**-0.5, 1.0))


def _gain(curves: Curves, labels: int, more: int) -> Gain:
    gains = 100 * (curves.at(labels + more) - curves.at(labels))
    low, middle, high = np.quantile(gains, (LOW_QUANTILE, 0.5, HIGH_QUANTILE))
    # Where nothing changes, one photo that is found or not is still uncertain.
    min_width = 100 / labels
    low = middle - max(min_width, WIDENING * (middle - low))
    high = middle + max(min_width, WIDENING * (high - middle))
    return Gain(more, float(middle), float(low), float(high))
