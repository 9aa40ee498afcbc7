"""How many labels does the order of the Label page save? Captions of a dataset are the simulated user.

    python benchmarks/label_order.py flickr8k-112 --cache features     # three seeds, some minutes on one core

A part of the training images is the library of the user, who writes one of its captions for each
photo that is chosen. Recall is measured on all images and captions of the validation split (--test:
of the test split). Orders: random, plain diverse (each photo is the one farthest from those before
it, k-center), cover (the page's order without the weights of uncertainty), page, typical (of each
cluster the photo in the densest place) and unsure (of each cluster the photo that the model is most
unsure of). Two users:

- new: there is no model yet; photos are compared by the features of the image tower, and heads are fitted by CCA to the
  captions so far, as `m1clip train --recipe frozen` initializes them.
- adapt: a model exists that was trained on other kinds of photos. k-means divides all photos into 12 groups; the model
  is fitted to the captions of six of them, and the library and the images that are searched are those of the other six.
  The captions so far adapt its embeddings by ridge regression towards the identity.
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from sides import RESULTS, machine, write

from m1clip.data.images import FileImage
from m1clip.evaluation.retrieval import retrieval
from m1clip.inference import load
from m1clip.inference.batches import TowerRunner, in_order
from m1clip.model.named import GENERAL
from m1clip.search.order import LabelOrder, uncertainty
from m1clip.training.cca import IMAGE_RIDGE, TEXT_RIDGE

LABELS = (50, 100, 200, 400, 800)
LIBRARY = 4096  # photos of the user
DIMENSIONS = 256  # of embeddings
CAPTIONS = 5  # of each image
GROUPS = 12  # kinds of photos
KMEANS_ROUNDS = 15
NEIGHBORS = 20  # whose similarity makes a photo typical
BASE_IMAGES = 2500  # on which the model of `adapt` is fitted
ADAPT_RIDGE = 10.0  # chosen on validation among 1, 3, 10, 30, 100 and 300
WORDS = 600  # captions of other photos in place of the vocabulary, to measure uncertainty
DRAWS = 3  # of the captions that the user writes, for each seed of `adapt`
OUTLIER = 8.0  # of a standardized feature
MIN_DEVIATION = 0.01  # of the median deviation
METRICS = ("mean_recall", "text_to_image/recall@10")

Order = Callable[[np.ndarray, np.ndarray, int], Sequence[int]]


class Features(NamedTuple):
    """Features of images (n, w), and of the five captions of each (n, 5, v)."""

    images: np.ndarray
    captions: np.ndarray


def main() -> None:
    """Measure every order for every seed, and write the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", type=Path, help="a folder with captions.csv (image,caption,split)")
    parser.add_argument("--cache", type=Path, required=True, help="where features are kept")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--test", action="store_true", help="measure on the test split")
    parser.add_argument("--json", type=Path, default=RESULTS / "label_order.json")
    parser.add_argument(
        "--plot", type=Path, help="draw the figures of the file there, and measure nothing"
    )
    options = parser.parse_args()
    if options.plot:
        plot(json.loads(options.json.read_text(encoding="utf-8"))["test"]["table"], options.plot)
        return
    began = time.time()
    split = "test" if options.test else "val"
    train, evaluated = (
        read_features(options.data, name, options.cache) for name in ("train", split)
    )
    runs = []
    for user, measure in (("new", measure_new), ("adapt", measure_adapt)):
        for seed in options.seeds:
            for run in measure(train, evaluated, seed):
                runs.append({"user": user, "seed": seed, **run})
                curve = " ".join(f"{100 * value:.1f}" for value in run["mean_recall"])
                print(f"{user:6} seed {seed} {run['order']:8} {curve}", flush=True)
    table = summary(runs)
    for row in table:
        print(
            f"{row['user']:6} {row['labels']:4} labels  {row['order']:8} {row['mean_recall']:5.1f}  "
            f"over random {row['over_random']:+.1f} [{row['low']:+.1f}, {row['high']:+.1f}]"
        )
    earlier = json.loads(options.json.read_text(encoding="utf-8")) if options.json.exists() else {}
    machine_facts = {
        **machine(),
        "data": options.data.resolve().name,
        "seconds": round(time.time() - began),
    }
    write(
        options.json, {**earlier, split: {"machine": machine_facts, "table": table, "runs": runs}}
    )


def read_features(data: Path, split: str, cache: Path) -> Features:
    """Features of the frozen towers of `general`, computed once."""
    files = [cache / f"{split}-{kind}.npy" for kind in ("images", "texts")]
    captions: dict[str, list[str]] = {}
    with (data / "captions.csv").open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            if row["split"] == split:
                captions.setdefault(row["image"], []).append(row["caption"])
    if not all(file.is_file() for file in files):
        cache.mkdir(parents=True, exist_ok=True)
        model = load(GENERAL)
        towers = (model.clip.image_tower.eval(), model.clip.text_tower.eval())
        runner = TowerRunner(*towers, model.preprocess, torch.device("cpu"), "bf16")
        refs = [FileImage(str(data / name)) for name in captions]
        rows: dict[int, np.ndarray] = {}
        for indices, vectors in runner.files(refs, {}):
            rows |= zip(indices, vectors.float().numpy().astype(np.float16), strict=True)
        np.save(files[0], np.stack([rows[index] for index in range(len(refs))]))
        texts = [text for group in captions.values() for text in group]
        tokens = model.tokenizer.tokenize(texts, model.context_length)
        vectors = in_order(runner.tokens(tokens, model.tokenizer.lengths(tokens)))
        np.save(files[1], vectors.float().numpy().astype(np.float16))
    images, texts = (np.load(file).astype(np.float32) for file in files)
    return Features(images, texts.reshape(len(images), CAPTIONS, -1))


# Orders: (vectors of the library (n, d), weights (n,), seed) -> places


def random_order(vectors: np.ndarray, weights: np.ndarray, seed: int) -> Sequence[int]:
    """Photos in a random order."""
    return np.random.default_rng(100 + seed).permutation(len(vectors))[: LABELS[-1]].tolist()


def diverse_order(vectors: np.ndarray, weights: np.ndarray, seed: int) -> Sequence[int]:
    """Each photo is the one farthest from those before it."""
    chosen = [int(np.random.default_rng(seed).integers(len(vectors)))]
    nearest = vectors @ vectors[chosen[0]]
    while len(chosen) < LABELS[-1]:
        chosen.append(int(nearest.argmin()))
        nearest = np.maximum(nearest, vectors @ vectors[chosen[-1]])
    return chosen


def cover_order(vectors: np.ndarray, weights: np.ndarray, seed: int) -> Sequence[int]:
    """The order of the page if all photos count alike."""
    return page_order(vectors, np.ones(len(vectors)), seed)


def page_order(vectors: np.ndarray, weights: np.ndarray, seed: int) -> Sequence[int]:
    """The order of the page."""
    order = LabelOrder(vectors, weights)
    indices = (order.next() for _ in range(LABELS[-1]))
    return [index for index in indices if index is not None]


def typical_order(vectors: np.ndarray, weights: np.ndarray, seed: int) -> Sequence[int]:
    """The photo with the most similar neighbors of each cluster, large clusters first (TypiClust)."""
    similarity = vectors @ vectors.T
    nearest = np.partition(similarity, -NEIGHBORS, axis=1)[:, -NEIGHBORS:]
    return clustered(vectors, nearest.mean(axis=1), seed)


def unsure_order(vectors: np.ndarray, weights: np.ndarray, seed: int) -> Sequence[int]:
    """The photo of each cluster that the model is most unsure of, large clusters first."""
    return clustered(vectors, weights, seed)


def clustered(vectors: np.ndarray, scores: np.ndarray, seed: int) -> list[int]:
    """The photo with the highest score of each cluster without a label.

    There are as many clusters as labels at each number of labels.
    """
    chosen: list[int] = []
    for count in LABELS:
        cluster = groups_of(vectors, seed, count)
        sizes = np.bincount(cluster, minlength=count)
        sizes[cluster[chosen]] = 0
        for number in np.argsort(-sizes, kind="stable")[: count - len(chosen)]:
            members = np.setdiff1d(np.flatnonzero(cluster == number), chosen)
            if len(members):
                chosen.append(int(members[scores[members].argmax()]))
        # Empty clusters, or such that a label is in: the best photos that are left.
        left = np.setdiff1d(np.arange(len(vectors)), chosen)
        best = left[np.argsort(-scores[left], kind="stable")]
        chosen += best[: count - len(chosen)].tolist()
    return chosen


ORDERS: dict[str, Order] = {
    "random": random_order,
    "diverse": diverse_order,
    "cover": cover_order,
    "page": page_order,
    "typical": typical_order,
    "unsure": unsure_order,
}


# Users


def measure_new(train: Features, evaluated: Features, seed: int) -> list[dict[str, object]]:
    """Recall of heads that are fitted to the labels alone."""
    rng = np.random.default_rng(seed)
    library = rng.permutation(len(train.images))[:LIBRARY]
    written = rng.integers(0, CAPTIONS, len(train.images))
    vectors = principal(train.images[library])
    results = []
    for name in ("random", "diverse", "cover", "typical"):  # without a model, page is `cover`
        order = library[ORDERS[name](vectors, np.ones(LIBRARY), seed)]
        scores = []
        for count in LABELS:
            photos = order[:count]
            heads = fit_heads(train.images[photos], train.captions[photos, written[photos]])
            scores.append(recall(*apply_heads(heads, evaluated)))
        results.append({"order": name, "labels": LABELS, **columns(scores)})
    return results


def measure_adapt(train: Features, evaluated: Features, seed: int) -> list[dict[str, object]]:
    """Recall of a model of other photos that is adapted to the labels."""
    everything = principal(np.concatenate([train.images, evaluated.images]), DIMENSIONS // 2)
    rng = np.random.default_rng(seed)
    in_base = (rng.permutation(GROUPS) < GROUPS // 2)[groups_of(everything, seed)]
    base = np.flatnonzero(in_base[: len(train.images)])[:BASE_IMAGES]
    library = np.flatnonzero(~in_base[: len(train.images)])[:LIBRARY]
    searched = np.flatnonzero(~in_base[len(train.images) :])
    heads = fit_heads(train.images[base], train.captions[base].mean(axis=1))
    images, captions = apply_heads(heads, Features(train.images[library], train.captions[library]))
    queries = apply_heads(heads, Features(evaluated.images[searched], evaluated.captions[searched]))
    other = Features(train.images[:1], train.captions[base[:WORDS]])
    words = apply_heads(heads, Features(other.images, other.captions[:, :1]))[1][:, 0]
    weights = 1 + uncertainty(images, words)
    results = []
    for name, choose in ORDERS.items():
        order = np.array(choose(images, weights, seed))
        curves = []
        for draw in range(DRAWS):
            written = np.random.default_rng((seed, draw)).integers(0, CAPTIONS, len(library))
            scores = []
            for count in (0, *LABELS):
                photos = order[:count]
                maps = adapt(images[photos], captions[photos, written[photos]])
                scores.append(recall(queries[0] @ maps[0], queries[1] @ maps[1]))
            curves.append(scores)
        mean = np.mean(curves, axis=0).tolist()
        results.append({"order": name, "labels": (0, *LABELS), **columns(mean)})
    return results


# Heads


class Side(NamedTuple):
    """A linear head on standardized features."""

    mean: np.ndarray
    deviation: np.ndarray
    center: np.ndarray
    matrix: np.ndarray

    def __call__(self, features: np.ndarray) -> np.ndarray:
        """Unit vectors of features."""
        return unit((standardized(features, self.mean, self.deviation) - self.center) @ self.matrix)


def fit_heads(images: np.ndarray, captions: np.ndarray) -> tuple[Side, Side]:
    """Regularized CCA as in m1clip/training/cca.py, computed in the space that the few labels span."""
    count = len(images)
    sides = []
    for features in (images, captions):
        mean, deviation = features.mean(axis=0), features.std(axis=0)
        deviation = np.maximum(deviation, MIN_DEVIATION * np.median(deviation))
        rows = standardized(features, mean, deviation)
        center = rows.mean(axis=0)
        squared, rotation = np.linalg.eigh(((rows - center) @ (rows - center).T).astype(np.float64))
        is_significant = squared > 1e-6 * squared.max()
        squared, rotation = squared[is_significant], rotation[:, is_significant]
        axes = (rows - center).T @ (rotation / np.sqrt(squared))
        sides.append((mean, deviation, center, axes, rotation * np.sqrt(squared), squared / count))
    ridges = (IMAGE_RIDGE * images.shape[1] / count**0.5, TEXT_RIDGE / count**0.5)
    scales = [np.sqrt(side[5] + ridge) for side, ridge in zip(sides, ridges, strict=True)]
    cross = sides[0][4].T @ sides[1][4] / count / scales[0][:, None] / scales[1]
    left, correlation, right = np.linalg.svd(cross, full_matrices=False)
    directions = (
        left * correlation / scales[0][:, None],
        right.T * correlation / scales[1][:, None],
    )
    heads = [
        Side(*side[:3], (side[3] @ part[:, :DIMENSIONS]).astype(np.float32))
        for side, part in zip(sides, directions, strict=True)
    ]
    return heads[0], heads[1]


def apply_heads(heads: tuple[Side, Side], features: Features) -> tuple[np.ndarray, np.ndarray]:
    """Unit vectors of images (n, d), and of their captions (n, captions, d)."""
    rows, count, width = features.captions.shape
    captions = heads[1](features.captions.reshape(-1, width)).reshape(rows, count, -1)
    return heads[0](features.images), captions


def adapt(images: np.ndarray, captions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Maps of both embeddings that bring those of one label together, near the identity."""
    ridge = ADAPT_RIDGE * np.eye(images.shape[1], dtype=np.float32)
    if not len(images):
        return ridge / ADAPT_RIDGE, ridge / ADAPT_RIDGE
    image_map = np.linalg.solve(images.T @ images + ridge, images.T @ captions + ridge)
    caption_map = np.linalg.solve(captions.T @ captions + ridge, captions.T @ images + ridge)
    return image_map, caption_map


def recall(images: np.ndarray, captions: np.ndarray) -> tuple[float, ...]:
    """The metrics of images (n, d) and their captions (n, captions, d)."""
    index = np.repeat(np.arange(len(images)), captions.shape[1])
    texts = captions.reshape(-1, captions.shape[2])
    scores = retrieval(unit(images).astype(np.float32), unit(texts).astype(np.float32), index)
    return tuple(scores[name].value for name in METRICS)


def columns(scores: Sequence[Sequence[float]]) -> dict[str, list[float]]:
    """One list per metric."""
    return {
        name: [round(float(row[column]), 5) for row in scores]
        for column, name in enumerate(METRICS)
    }


def standardized(features: np.ndarray, mean: np.ndarray, deviation: np.ndarray) -> np.ndarray:
    return np.clip((features - mean) / deviation, -OUTLIER, OUTLIER)


def principal(features: np.ndarray, count: int = DIMENSIONS) -> np.ndarray:
    """(n, count) unit vectors: the principal components of standardized features."""
    deviation = features.std(axis=0)
    deviation = np.maximum(deviation, MIN_DEVIATION * np.median(deviation))
    rows = standardized(features, features.mean(axis=0), deviation)
    rows = torch.from_numpy(np.asarray(rows - rows.mean(axis=0), np.float32))
    torch.manual_seed(0)  # of the random projection: a quick approximation of the components
    _, _, axes = torch.svd_lowrank(rows, q=count, niter=2)
    return unit((rows @ axes).numpy()).astype(np.float32)


def groups_of(vectors: np.ndarray, seed: int, count: int = GROUPS) -> np.ndarray:
    """(n,) groups of unit vectors by k-means; an empty group keeps its center."""
    rng = np.random.default_rng(seed)
    centers = vectors[rng.choice(len(vectors), count, replace=False)]
    for _ in range(KMEANS_ROUNDS):
        group = (vectors @ centers.T).argmax(axis=1)
        sums = np.zeros_like(centers)
        np.add.at(sums, group, vectors)
        filled = np.bincount(group, minlength=count) > 0
        centers = np.where(filled[:, None], unit(sums), centers)
    return (vectors @ centers.T).argmax(axis=1)


def unit(rows: np.ndarray) -> np.ndarray:
    return np.asarray(rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-9))


# Figures

T95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}  # Student's t for the mean of so many differences


def summary(runs: list[dict[str, object]]) -> list[dict[str, object]]:
    """Mean recall over the seeds in percent, and the paired difference to the random order with its 95% interval."""
    table = []
    users = dict.fromkeys((str(run["user"]), str(run["order"])) for run in runs)
    for user, order in users:
        own = [run for run in runs if (run["user"], run["order"]) == (user, order)]
        base = [run for run in runs if (run["user"], run["order"]) == (user, "random")]
        for index, labels in enumerate(own[0]["labels"]):  # type: ignore[arg-type]
            values = [100 * run["mean_recall"][index] for run in own]  # type: ignore[index]
            chance = [100 * run["mean_recall"][index] for run in base]  # type: ignore[index]
            gains = [value - other for value, other in zip(values, chance, strict=True)]
            mean = statistics.fmean(gains)
            half = 0.0
            if len(gains) > 1:
                half = T95.get(len(gains), 1.96) * statistics.stdev(gains) / len(gains) ** 0.5
            table.append(
                {
                    "user": user,
                    "order": order,
                    "labels": labels,
                    "mean_recall": round(statistics.fmean(values), 2),
                    "over_random": round(mean, 2),
                    "low": round(mean - half, 2),
                    "high": round(mean + half, 2),
                }
            )
    return table


def plot(table: list[dict[str, object]], path: Path) -> None:
    """Recall against the number of labels, for both users."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    titles = {"new": "no model yet", "adapt": "a model of other photos, adapted"}
    colors = {
        "random": "#868e96",
        "diverse": "#b58100",
        "cover": "#d9480f",
        "page": "#0b7285",
        "typical": "#5f3dc4",
        "unsure": "#2b8a3e",
    }
    for axis, (user, title) in zip(axes, titles.items(), strict=True):
        for order, color in colors.items():
            rows = [row for row in table if (row["user"], row["order"]) == (user, order)]
            if rows:
                labels = [row["labels"] for row in rows]
                recall = [row["mean_recall"] for row in rows]
                axis.plot(labels, recall, "o-", color=color, label=order, markersize=3.5)
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("labelled photos")
        axis.set_ylabel("mean recall, %")
        axis.grid(alpha=0.3)
        axis.legend(frameon=False)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
