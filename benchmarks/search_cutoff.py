"""How honest is the cutoff of `m1clip search`? Half of the queries have their matching images removed.

    python benchmarks/search_cutoff.py runs/frozen flickr8k --json docs/results/search_cutoff.json
    python benchmarks/search_cutoff.py general flickr8k coco --json docs/results/search_cutoff_general.json

Two kinds of queries over the images of a split: words and pairs of words, where an image matches if
its captions mention them; and captions, where only the image matches that the caption was written
for. The weights and the cutoffs are fitted on the validation split; the tables and the reliability
diagram show the test split. Compared with a threshold on the cosine similarity, and with two that
adapt to each query: the standard score of the cosine within the library's images, and the cosine
above the query's mean over them. Queries of one or two words are encoded as `m1clip search` does
(m1clip/search/short_queries.py); "plain cosine" is the cosine of the query alone, which is the
baseline. "in use" has the weights and the cutoff of the package. The last rows of a table are
differences from the baseline, over the same resamples of queries. The test split is read once, with
the rules and cutoffs of the validation split.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from general import Towers

import m1clip
from m1clip.data.sources import open_source
from m1clip.formatting import number, percent, table
from m1clip.search.match import CUTOFF, MATCH_WEIGHTS, UNSURE, probabilities, zscore
from m1clip.search.short_queries import everyday_vectors, reference_vectors, short_vectors

LISTED = 20  # results that a search lists at most
RESAMPLES = 1000
BINS = (0.0, 0.03, 0.06, 0.1, 0.2, 0.3, 0.4, 0.6, 1.0)
MENTIONS, IMAGES = 3, 4  # a word is a query if it is in 3 captions of at least 4 images
SMALL = (
    "his her its their him who she them they has have had being are was were while that this there"
    " with from for"
)
SMALL += (
    " the and into onto out off over under near next down along around through behind two three one"
    " other another"
)
SMALL += " some front each wearing using doing"


def word_queries(samples: Any) -> tuple[list[str], np.ndarray]:
    """Words and pairs of words, and (queries, images) whether the captions of an image mention all words."""
    counts = [
        Counter(w for text in s.captions for w in set(re.findall("[a-z]{3,}", text.lower())))
        for s in samples
    ]
    words = {word for count in counts for word in count} - set(SMALL.split())
    mentions = {word: np.array([count[word] for count in counts]) for word in sorted(words)}
    singles = [word for word, mask in mentions.items() if (mask >= MENTIONS).sum() >= IMAGES]
    pairs = itertools.combinations(singles, 2)
    both = [p for p in pairs if (np.minimum(*(mentions[w] for w in p)) >= MENTIONS).sum() >= IMAGES]
    queries = [(word,) for word in singles] + both
    match = np.array([np.min([mentions[word] for word in query], axis=0) > 0 for query in queries])
    return [" ".join(query) for query in queries], match


class Queries:
    """The nearest images of some texts, where the matching images of every second group are removed."""

    def __init__(
        self,
        images: np.ndarray,
        texts: np.ndarray,
        match: np.ndarray,
        group: np.ndarray,
        reference: np.ndarray,
        plain: np.ndarray | None = None,
    ) -> None:
        self.group, self.present = group, group % 2 == 0
        # The same with the vectors of the queries alone.
        self.plain = self if plain is None else Queries(images, plain, match, group, reference)
        self.match = match
        queries_found = []
        statistics: dict[
            bytes, tuple[np.ndarray, np.ndarray]
        ] = {}  # by the images that are removed
        self.precision_at_10 = []
        for text, matching, present in zip(texts, match, self.present, strict=True):
            order = np.argsort(-(images @ text))[:10]
            self.precision_at_10.append(matching[order].sum() / min(10, matching.sum()))
            keep = np.ones(len(images), bool) if present else ~matching
            library = images[keep]
            key = b"" if present else matching.tobytes()
            if key not in statistics:
                statistics[key] = library.mean(axis=0), np.cov(library.T, bias=True)
            scores = library @ text
            best = np.argsort(-scores)[:LISTED]
            queries_found.append(
                (
                    scores[best],
                    (scores[best] - scores.mean()) / scores.std(),
                    scores[best] - scores.mean(),
                    zscore(scores[best], reference, statistics[key]),
                    matching[keep][best],
                )
            )
        self.cosine, self.standard, self.centered, self.zscore, right = map(
            np.stack, zip(*queries_found, strict=True)
        )
        self.right = right.astype(bool)
        self.wanted = np.where(self.present, np.minimum(match.sum(axis=1), LISTED), 0)

    def scores(self, weights: tuple[float, ...]) -> dict[str, np.ndarray]:
        """(queries, LISTED) score of each result by each rule."""
        chance = probabilities(self.zscore, weights)
        return {
            "plain cosine": self.plain.cosine,
            "cosine": self.cosine,
            "standard score": self.standard,
            "above the query's mean": self.centered,
            "probability": chance,
        }

    def of_rule(self, rule: str) -> Queries:
        """The queries whose results a rule scores."""
        return self.plain if rule == "plain cosine" else self

    def rates(self, score: np.ndarray, cut: float, queries: Any = slice(None)) -> dict[str, float]:
        """Of the results above a cutoff, for some of the queries.

        A query is answered correctly by a right result, or by none if its matching images are
        removed.
        """
        listed, present = score[queries] >= cut, self.present[queries]
        hits = listed & self.right[queries]
        false_positives, answered = (
            listed[~present].any(axis=1).mean(),
            hits[present].any(axis=1).mean(),
        )
        precision, recall = (
            hits.sum() / max(1, listed.sum()),
            hits.sum() / max(1, self.wanted[queries].sum()),
        )
        return {
            "precision": precision,
            "recall": recall,
            "false positives": false_positives,
            "F1": 2 * precision * recall / max(1e-9, precision + recall),
            "correct answers": (answered + 1 - false_positives) / 2,
        }

    def answers(self, chance: np.ndarray) -> dict[str, list[float]]:
        """{answer: fraction of queries with matching images, of those without, of right first results}."""
        best, first = chance.max(axis=1), self.right[:, 0]
        ranges = {
            "match": (CUTOFF, 2.0),
            "no sure match": (UNSURE, CUTOFF),
            "nothing here matches": (0.0, UNSURE),
        }
        answers = {}
        for name, (low, high) in ranges.items():
            in_bin = (best >= low) & (best < high)
            right = first[in_bin & self.present].mean()
            answers[name] = [in_bin[self.present].mean(), in_bin[~self.present].mean(), right]
        return answers

    def best_cut(self, score: np.ndarray, rate: str) -> float:
        """The cutoff with the best value of a rate."""
        cuts = np.quantile(score, np.linspace(0, 0.9995, 400))
        return float(max(cuts, key=lambda cut: self.rates(score, cut)[rate]))

    def with_intervals(
        self, rules: dict[str, tuple[np.ndarray, float]]
    ) -> dict[str, dict[str, list[float]]]:
        """{rule: {rate: [value, low, high]}} and the difference of two: 95% by resampling groups of queries."""
        rng = np.random.default_rng(0)
        rows = [np.flatnonzero(self.group == group) for group in np.unique(self.group)]
        draws: list[Any] = [slice(None)]
        draws += [
            np.concatenate([rows[i] for i in rng.integers(0, len(rows), len(rows))])
            for _ in range(RESAMPLES)
        ]
        rates = {
            name: [self.of_rule(name).rates(*rule, draw) for draw in draws]
            for name, rule in rules.items()
        }
        for name in [rule for rule in ("probability", "in use") if rule in rules]:
            pairs = zip(rates[name], rates["plain cosine"], strict=True)
            rates[f"{name} - plain cosine"] = [
                {rate: left_rates[rate] - other[rate] for rate in left_rates}
                for left_rates, other in pairs
            ]
        return {
            name: {
                rate: [
                    values[0][rate],
                    *np.quantile([sample[rate] for sample in values[1:]], [0.025, 0.975]),
                ]
                for rate in values[0]
            }
            for name, values in rates.items()
        }


def encode_images(
    model: Any, sources: list[tuple[str, Any]], split: str, cache: Path | None
) -> np.ndarray:
    """(n, dim) vectors of the images of a split; with a cache, from the towers' features there."""
    images = [[sample.image for sample in source.samples(split)] for _, source in sources]
    if cache is None:
        return np.asarray(model.encode_image([image.open() for group in images for image in group]))
    towers = Towers(model, cache)
    features = [
        towers.images(name, group) for (name, _), group in zip(sources, images, strict=True)
    ]
    return np.asarray(model.clip.project_image(torch.cat(features)).detach())


def fit_weights(zscores: np.ndarray, match: np.ndarray) -> tuple[float, ...]:
    """(constant, slope) of the most likely logistic regression, by Newton's method."""
    inputs, weights = np.stack([np.ones(zscores.size), zscores.ravel()], axis=1), np.zeros(2)
    for _ in range(25):
        p = probabilities(zscores.ravel(), tuple(weights))
        hessian = (inputs * (p * (1 - p))[:, None]).T @ inputs
        weights -= np.linalg.solve(hessian, inputs.T @ (p - match.ravel()))
    return tuple(weights.tolist())


def reliability(chance: np.ndarray, right: np.ndarray) -> list[dict[str, float]]:
    """For each bin of predicted probability: its mean, the fraction that is right, and the number of results."""
    bin_index = np.digitize(chance, BINS[1:-1])
    bins = [
        (chance[bin_index == bin_number], right[bin_index == bin_number])
        for bin_number in range(len(BINS) - 1)
    ]
    return [
        {"predicted": p.mean(), "right": r.mean(), "results": len(p)} for p, r in bins if len(p)
    ]


def diagram(bins: list[dict[str, float]], path: Path) -> None:
    """Save the reliability diagram."""
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(4.2, 4.2), layout="constrained")
    axes.plot([0, 1], [0, 1], color="0.6", linestyle="--", linewidth=1)
    predicted, right = (np.array([bin_[name] for bin_ in bins]) for name in ("predicted", "right"))
    error = 1.96 * np.sqrt(right * (1 - right) / np.array([bin_["results"] for bin_ in bins]))
    axes.errorbar(predicted, right, yerr=error, marker="o", capsize=2)
    axes.set(
        xlim=(0, 1), ylim=(0, 1), xlabel="predicted probability", ylabel="fraction that matches"
    )
    axes.set(title="Words as queries, test splits")
    figure.savefig(path, dpi=110)


def main() -> None:
    """Fit on validation, report on test."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument(
        "data", nargs="+", help="their val and test splits, together, are the libraries"
    )
    parser.add_argument(
        "--splits", nargs=2, default=("val", "test"), help="to fit on, and to report"
    )
    parser.add_argument("--cache", type=Path, help="where features of the towers are stored")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--figure", type=Path)
    options = parser.parse_args()
    model = m1clip.load(options.model)
    sources = [(Path(data).name, open_source(data)) for data in options.data]

    def encode(texts: list[str]) -> np.ndarray:
        return np.asarray(model.encode_text(texts))

    tasks: dict[str, list[Queries]] = {"words": [], "captions": []}  # of val and test
    for split in options.splits:
        samples = [sample for _, source in sources for sample in source.samples(split)]
        images = encode_images(model, sources, split, options.cache)
        words, match = word_queries(samples)
        everyday = everyday_vectors(encode)
        in_use = short_vectors(encode, words, everyday)
        reference = reference_vectors(everyday, short=True)
        groups = np.arange(len(words))
        tasks["words"].append(Queries(images, in_use, match, groups, reference, encode(words)))
        captions = np.asarray(
            model.encode_text([text for sample in samples for text in sample.captions])
        )
        own = np.repeat(np.arange(len(samples)), [len(sample.captions) for sample in samples])
        reference = reference_vectors(everyday, short=False)
        tasks["captions"].append(
            Queries(images, captions, own[:, None] == np.arange(len(samples)), own, reference)
        )
    weights = fit_weights(tasks["words"][0].zscore, tasks["words"][0].right)
    record: dict[str, Any] = {"weights": weights}
    for name, (val, test) in tasks.items():
        fitted, tested = val.scores(weights), test.scores(weights)
        # Of captions, correct answers are no criterion: without its image, a caption finds others
        # as good.
        rate = "correct answers" if name == "words" else "F1"
        cuts = {rule: val.of_rule(rule).best_cut(score, rate) for rule, score in fitted.items()}
        if name == "words":
            fitted["in use"] = probabilities(val.zscore)
            tested["in use"] = probabilities(test.zscore)
            cuts["in use"] = CUTOFF
            before, after = (
                np.mean(queries_of.precision_at_10) for queries_of in (test.plain, test)
            )
            gain = np.array(test.precision_at_10) - np.array(test.plain.precision_at_10)
            rng = np.random.default_rng(0)
            means = [gain[rng.integers(0, len(gain), len(gain))].mean() for _ in range(RESAMPLES)]
            low, high = np.quantile(means, [0.025, 0.975])
            record["precision@10"] = {"plain": before, "short": after, "low": low, "high": high}
            print(
                f"precision@10 {percent(before)} of the words alone, {percent(after)} as searched "
                f"({100 * gain.mean():+.1f} [{100 * low:.1f}, {100 * high:.1f}] points)\n"
            )
        rates_of_rules = test.with_intervals(
            {rule: (score, cuts[rule]) for rule, score in tested.items()}
        )
        record[name] = {"queries": len(test.right), "cutoffs": cuts, "test": rates_of_rules}
        cells = [
            (
                rule,
                number(cuts.get(rule)),
                *(f"{percent(v)} [{percent(a)}, {percent(b)}]" for v, a, b in rates.values()),
            )
            for rule, rates in rates_of_rules.items()
        ]
        columns = (f"{len(test.right):,} {name}", "cutoff", *next(iter(rates_of_rules.values())))
        print(table(columns, cells), "\n")
        if name == "words":
            record["answers"] = test.answers(probabilities(test.zscore))
            bins = record["reliability"] = reliability(
                tested["probability"].ravel(), test.right.ravel()
            )
    shown = [(name, *map(percent, shares)) for name, shares in record["answers"].items()]
    print(
        table(("words: answer", "with matches", "removed", "first is right, with matches"), shown),
        "\n",
    )
    shown = [(percent(b["predicted"]), percent(b["right"]), f"{b['results']:,}") for b in bins]
    print(table(("words: predicted", "right", "results"), shown))
    cut = record["words"]["cutoffs"]["probability"]
    print(
        f"\nweights {np.round(weights, 3).tolist()} (in use: {MATCH_WEIGHTS}), cutoff {cut:.3f} (in use: {CUTOFF})"
    )
    if options.figure:
        diagram(bins, options.figure)
    if options.json:
        options.json.write_text(json.dumps(record, indent=2, default=float) + "\n")


if __name__ == "__main__":
    main()
