"""The model in the box beside heads that were trained on the user's own photographs, on the same towers.

    python benchmarks/general.py flickr8k-112 coco caltech101 --own runs/own-300 runs/own-3000 \
        --json docs/results/general.json
    python benchmarks/general.py --show docs/results/general.json
    python benchmarks/general.py flickr8k-112 coco caltech101 --keep docs/results/general.json --json ...

Recall on the test splits of two captioned datasets; zero-shot accuracy on ten class folders that no
model was trained on; and a search for 50 everyday words among the images of both test splits, where
an image matches if at least two of its captions mention the word. Features of the towers are
computed once; each model applies its heads to them.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sides import machine
from torch import Tensor

import m1clip
from m1clip.data.images import FileImage
from m1clip.data.sources import open_source
from m1clip.evaluation.retrieval import ranks
from m1clip.evaluation.statistics import wilson
from m1clip.formatting import table
from m1clip.inference.batches import TowerRunner, in_order
from m1clip.inference.inputs import TEMPLATES
from m1clip.io import write_json
from m1clip.model.clip import CLIP
from m1clip.model.weights import weights_hash

CLASSES = (
    "camera", "cellphone", "chair", "cup", "lamp", "laptop", "pizza", "scissors", "umbrella", "watch",
)  # fmt: skip
QUERIES = """
dog cat horse bird cow elephant beach snow mountain pool street kitchen bathroom bedroom bike motorcycle bus train car
boat airplane pizza cake sandwich fruit baby girl boy woman man crowd tennis soccer baseball skateboard surfboard ski
swing camera phone laptop umbrella clock tree grass water sky night rock fence
""".split()  # noqa: SIM905
MENTIONS = 2  # captions that mention a word, for an image to match
K = 10


class Towers:
    """Computes the features of the towers that all models share; those of images are stored in `cache`."""

    def __init__(self, model: m1clip.Model, cache: Path | None) -> None:
        clip = model.clip
        self.key = [weights_hash(t.state_dict()) for t in (clip.image_tower, clip.text_tower)]
        self.runner = TowerRunner(
            clip.image_tower, clip.text_tower, model.preprocess, torch.device("cpu"), "bf16"
        )
        self.tokenizer = model.tokenizer
        self.context_length = model.context_length
        self.cache = cache

    def images(self, name: str, refs: Sequence[Any]) -> Tensor:
        if self.cache is None:
            return self._images(refs)
        key = hashlib.sha256("\n".join([*self.key, *map(str, refs)]).encode()).hexdigest()
        file = self.cache / f"{name}-{key[:12]}.npy"
        if not file.is_file():
            self.cache.mkdir(parents=True, exist_ok=True)
            np.save(file, self._images(refs).numpy())
        return torch.from_numpy(np.load(file))

    def _images(self, refs: Sequence[Any]) -> Tensor:
        rows: dict[int, Tensor] = {}
        failures: dict[int, str] = {}
        for indices, vectors in self.runner.files(refs, failures):
            rows |= dict(zip(indices, vectors, strict=True))
        if failures:
            raise SystemExit(f"{len(failures)} unreadable images: {failures}")
        return torch.stack([rows[number] for number in range(len(refs))])

    def texts(self, texts: Sequence[str]) -> Tensor:
        tokens = self.tokenizer.tokenize(texts, self.context_length)
        return in_order(self.runner.tokens(tokens, self.tokenizer.lengths(tokens)))


def recall(clip: CLIP, images: Tensor, texts: Tensor, image_index: np.ndarray) -> dict[str, float]:
    """Recall@1 and @10 in percent, the mean of both directions."""
    retrieval_ranks = ranks(
        clip.project_image(images).numpy(), clip.project_text(texts).numpy(), image_index
    )
    return {
        f"recall@{k}": 50
        * float(
            (retrieval_ranks.text_to_image <= k).mean()
            + (retrieval_ranks.image_to_text <= k).mean()
        )
        for k in (1, 10)
    }


def zero_shot(clip: CLIP, images: Tensor, labels: np.ndarray, names: Tensor) -> dict[str, Any]:
    """Top-1 accuracy among the classes, in percent, with its 95% interval."""
    vectors = clip.project_text(names).view(len(CLASSES), len(TEMPLATES), -1).mean(dim=1)
    classes = torch.nn.functional.normalize(vectors, dim=1)
    correct = (clip.project_image(images) @ classes.T).argmax(dim=1).numpy() == labels
    accuracy = float(correct.mean())
    low, high = wilson(accuracy, len(correct))
    return {"accuracy": 100 * accuracy, "low": 100 * low, "high": 100 * high}


def search(clip: CLIP, images: Tensor, queries: Tensor, match: np.ndarray) -> dict[str, float]:
    """Over the queries: the fraction of the first ten results that match, and of first results that do."""
    scores = (clip.project_text(queries) @ clip.project_image(images).T).numpy()
    order = np.argsort(-scores, axis=1)[:, :K]
    hits = np.take_along_axis(match, order, axis=1)
    possible = np.minimum(match.sum(axis=1), K)
    return {
        f"precision@{K}": 100 * float((hits.sum(axis=1) / possible).mean()),
        "first": 100 * float(hits[:, 0].mean()),
    }


def matches(samples: Sequence[Any], words: Sequence[str]) -> np.ndarray:
    """(words, images) whether at least `MENTIONS` captions of an image mention a word, or its plural."""
    mentions = np.zeros((len(words), len(samples)), int)
    for column, sample in enumerate(samples):
        for caption in sample.captions:
            tokens = set(re.findall("[a-z]+", caption.lower()))
            for row, word in enumerate(words):
                mentions[row, column] += bool(tokens & {word, f"{word}s", f"{word}es"})
    return mentions >= MENTIONS


@torch.inference_mode()
def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measure all models."""
    models = {"general": m1clip.load("general")}
    models |= {path.name: m1clip.load(path) for path in options.own}
    towers = Towers(models["general"], options.cache)
    splits = {path.name: open_source(str(path)).samples("test") for path in options.captions}
    data = {}
    for name, samples in splits.items():
        texts = [text for sample in samples for text in sample.captions]
        index = np.repeat(np.arange(len(samples)), [len(sample.captions) for sample in samples])
        data[name] = (
            towers.images(name, [sample.image for sample in samples]), towers.texts(texts), index,
        )  # fmt: skip
        print(f"{name}: {len(samples):,} images", flush=True)
    paths = [path for name in CLASSES for path in sorted((options.classes / name).iterdir())]
    labels = np.array([CLASSES.index(path.parent.name) for path in paths])
    class_images = towers.images("classes", [FileImage(str(path)) for path in paths])
    class_names = towers.texts([text.format(name) for name in CLASSES for text in TEMPLATES])
    everything = [sample for samples in splits.values() for sample in samples]
    match = matches(everything, QUERIES)
    used = match.sum(axis=1) >= 5
    library = torch.cat([images for images, _, _ in data.values()])
    words = towers.texts([word for word, use in zip(QUERIES, used, strict=True) if use])
    results: dict[str, Any] = {}
    for name, model in models.items():
        clip = model.clip
        same = [weights_hash(t.state_dict()) for t in (clip.image_tower, clip.text_tower)]
        if same != towers.key:
            raise SystemExit(f"{name}: has other towers than general")
        results[name] = {
            **{source: recall(clip, *rows) for source, rows in data.items()},
            "classes": zero_shot(clip, class_images, labels, class_names),
            "search": search(clip, library, words, match[used]),
        }
    return {
        "machine": machine(),
        "images": {name: len(samples) for name, samples in splits.items()},
        "class_images": len(paths),
        "queries": int(used.sum()),
        "library": len(everything),
        "results": results,
    }


def keep(result: dict[str, Any], earlier: dict[str, Any]) -> None:
    """Add the earlier results of other models, if they are of as many images."""
    for name in ("images", "class_images", "queries", "library"):
        if earlier[name] != result[name]:
            raise SystemExit(f"--keep: {name} was {earlier[name]}, and is {result[name]}")
    result["results"] |= {
        name: value for name, value in earlier["results"].items() if name not in result["results"]
    }


def show(result: dict[str, Any]) -> str:
    """The results as a table."""
    sources = list(result["images"])
    header = (
        "heads",
        *(f"{name} test, recall@10 (n={result['images'][name]:,})" for name in sources),
        f"ten classes, zero-shot (n={result['class_images']:,})",
        f"{result['queries']} words in {result['library']:,} images: precision@{K}",
        "first result",
    )
    rows = [
        (
            name,
            *(f"{figures[source]['recall@10']:.1f}" for source in sources),
            f"{figures['classes']['accuracy']:.1f} "
            f"[{figures['classes']['low']:.1f}, {figures['classes']['high']:.1f}]",
            f"{figures['search'][f'precision@{K}']:.1f}",
            f"{figures['search']['first']:.0f}",
        )
        for name, figures in result["results"].items()
    ]
    return table(header, rows)


def main() -> None:
    """Measure and print, or print what was measured."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("captions", type=Path, nargs="*", help="folders with a test split")
    parser.add_argument("classes", type=Path, nargs="?", help="a folder of class folders")
    parser.add_argument("--own", type=Path, nargs="*", default=[], help="runs on the same towers")
    parser.add_argument("--cache", type=Path, help="where features of the towers are stored")
    parser.add_argument("--json", type=Path)
    parser.add_argument(
        "--keep", type=Path, help="earlier results, of models that are not measured now"
    )
    parser.add_argument("--show", type=Path)
    options = parser.parse_args()
    if options.show is None and options.classes is None:
        *options.captions, options.classes = options.captions
    result = json.loads(options.show.read_text()) if options.show else measure(options)
    if options.keep:
        keep(result, json.loads(options.keep.read_text()))
    if options.json:
        write_json(options.json, result)
    print(show(result))


if __name__ == "__main__":
    main()
