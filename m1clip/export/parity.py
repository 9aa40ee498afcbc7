"""Whether an exported model does what the original does: token ids, pixels, vectors, recall, size
and speed.
"""

import runpy
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
import torch

from m1clip.config import Config, DataConfig, load_config
from m1clip.data.decoding import DecodeOptions, decode_options
from m1clip.data.images import BadImage, Preprocess, to_square
from m1clip.data.prepare import Split, load_split, open_data
from m1clip.data.types import Source
from m1clip.errors import UserError
from m1clip.evaluation.retrieval import ranks, retrieval
from m1clip.evaluation.statistics import Z95
from m1clip.export.onnx import EXAMPLE
from m1clip.formatting import MISSING, duration, number, percent, size, table
from m1clip.hardware.device import threads
from m1clip.hardware.machine_info import package_version, read_machine_info
from m1clip.hardware.timing import alternate
from m1clip.inference.features import SplitFeatures, encode_split
from m1clip.inference.model import Model
from m1clip.text.base import TOKENIZER_FILE

EXPORT_PARITY_IMAGES = 1000  # of the validation split
PROGRAM_IMAGES = 100  # for Core ML's programs, which take one image and one text at a time
SYNTHETIC_TRAIN_IMAGES = 288  # of which 32 are for validation
PIXEL_IMAGES = 64
THROUGHPUT_BATCH = 16
TIMING_SECONDS = 3.0
PARITY_RECALL_AT = (1, 10)
REPORTED_PACKAGES = (
    "torch",
    "onnx",
    "onnxscript",
    "onnxruntime",
    "coremltools",
    "tokenizers",
    "numpy",
    "pillow",
)
# Beyond these an export is not the same model.
LEAST_COSINE = 0.9999
MOST_TOKEN_ROWS = 0.005
# Mean, of 255: JPEG decoded at a reduced size against the complete image.
MOST_PIXEL_DIFFERENCE = 4.0


@dataclass(frozen=True)
class Runtime:
    """A model, original or exported, and how it is compared."""

    model: Model
    size_bytes: int
    own_inputs: bool = False  # its folder has a tokenizer and preprocessing for other programs
    graph: Path | None = None  # the image graph, in ONNX
    max_images: int = EXPORT_PARITY_IMAGES
    timed: bool = True


@dataclass(frozen=True)
class Examples:
    """What the original and the exported model are compared on: images of the validation split."""

    source: Source
    data: DataConfig
    decoding: DecodeOptions
    real: bool  # whether recall means something

    def split(self, model: Model) -> Split:
        """The split as a model sees it: with its own preprocessing and tokenizer."""
        length = model.context_length
        return load_split(
            self.source,
            "val",
            self.data,
            model.tokenizer,
            length,
            model.preprocess,
            1.0,
            self.decoding,
        )

    def calibration(self, preprocess: Preprocess, count: int) -> np.ndarray:
        """(count, size, size, 3) uint8 of training images, or of others where there are none.

        Spread over the split. In place of an image that cannot be read, which training skips too,
        the next one that can.
        """
        split = "train" if "train" in self.source.splits() else "val"
        samples = self.source.samples(split)
        size = preprocess.image_size
        squares = []
        untried = 0
        for start in np.linspace(0, len(samples) - 1, min(count, len(samples))).astype(int):
            untried = max(untried, int(start))
            is_read = False
            while not is_read and untried < len(samples):
                with suppress(BadImage):
                    image = samples[untried].image.open(size)
                    squares.append(to_square(image, size, preprocess.resize))
                    is_read = True
                untried += 1
        if not squares:
            raise UserError(
                f"{self.source.name}: none of the {len(samples):,} {split} images can be read, and"
                " int8 needs some to find its ranges; other images: --data"
            )
        return np.stack(squares)


def open_examples(path: Path, data: tuple[str, ...], model: Model) -> Examples:
    """The validation split of `data` or of the run's data.

    Synthetic images where neither is known.
    """
    run = path / "config.toml"
    config = load_config(run) if run.is_file() else Config()
    real = bool(data) or run.is_file()
    sources = replace(config.data, source=data) if data else config.data
    if not real:
        sources = DataConfig(source=("synthetic",), synthetic_images=SYNTHETIC_TRAIN_IMAGES)
    source = open_data(sources, model.preprocess.image_size, config.seed)
    if "val" not in source.splits():
        raise UserError(
            f"{', '.join(sources.source)}: has no val split to compare the exported model on"
        )
    return Examples(source, sources, decode_options(read_machine_info()), real)


def recall_changes(before: SplitFeatures, after: SplitFeatures) -> dict[str, dict[str, float]]:
    """For each k: recall of both (the mean of both directions), the change, and its 95% interval
    over images.
    """
    index, rank_pairs = before.image_index, [ranks(*features[:4]) for features in (before, after)]
    captioned = rank_pairs[0].captioned
    changes = {}
    for k in PARITY_RECALL_AT:
        texts = [(result.text_to_image <= k).astype(np.float64) for result in rank_pairs]
        images = [
            (result.image_to_text <= k).astype(np.float64)[captioned] for result in rank_pairs
        ]
        old, new = (
            float(text.mean() + image.mean()) / 2 for text, image in zip(texts, images, strict=True)
        )
        by_text, by_image = texts[1] - texts[0], images[1] - images[0]
        # The captions of one image are correlated: residuals are summed for each image.
        residual = np.zeros(len(before.image))
        np.add.at(residual, index, (by_text - by_text.mean()) / len(by_text))
        residual[captioned] += (by_image - by_image.mean()) / len(by_image)
        half = Z95 * float(np.linalg.norm(residual)) / 2
        change = new - old
        interval = {"low": change - half, "high": change + half}
        changes[f"recall@{k}"] = {"before": old, "after": new, "change": change, **interval}
    return changes


def recall_failures(before: SplitFeatures, after: SplitFeatures) -> list[str]:
    """Recall that falls below the 95% interval of the original's."""
    old, new = (retrieval(*features[:4]) for features in (before, after))
    return [
        f"{metric.label} is {percent(new[metric.name].value)}, below the 95% interval of the"
        f" original's {percent(metric.value)} ({percent(metric.interval.low)} to"
        f" {percent(metric.interval.high)})"
        for metric in old.metrics
        if metric.name.endswith(tuple(f"recall@{k}" for k in PARITY_RECALL_AT))
        and new[metric.name].value < metric.interval.low
    ]


def vector_differences(
    before: SplitFeatures, after: SplitFeatures, texts: np.ndarray
) -> dict[str, dict[str, float]]:
    """For images and `texts`: smallest and mean cosine, and the largest difference of a
    coordinate.
    """
    differences = {}
    for name, rows in (("image", slice(None)), ("text", texts)):
        old, other = (
            getattr(features, name).astype(np.float64)[rows] for features in (before, after)
        )
        # Immich's vectors are longer.
        old = np.pad(old, ((0, 0), (0, other.shape[1] - old.shape[1])))
        if not len(old):
            continue
        lengths = np.linalg.norm(old, axis=1) * np.linalg.norm(other, axis=1)
        cosine = (old * other).sum(axis=1) / np.maximum(lengths, 1e-8)
        differences[name] = {
            "cosine_min": float(cosine.min()),
            "cosine_mean": float(cosine.mean()),
            "largest_difference": float(np.abs(old - other).max()),
        }
    return differences


def input_differences(
    folder: Path, models: tuple[Model, Model], split: Split, texts: list[str]
) -> dict[str, Any]:
    """Token ids and pixels as the folder's own files give them, against m1clip's."""
    model, exported = models
    tokens, pixels = library_tokens(folder, exported), exported.preprocess
    if (folder / EXAMPLE).is_file():
        functions = runpy.run_path(str(folder / EXAMPLE))
        tokens, pixels = functions["tokens"], functions["pixels"]
    ours, theirs = exported.tokenizer.tokenize(texts, model.context_length), tokens(texts)
    pad = np.full((len(texts), ours.shape[1] - theirs.shape[1]), exported.tokenizer.pad_id)
    rows = (ours != np.concatenate([theirs, pad], axis=1)).any(axis=1)
    size, resize = model.preprocess.image_size, model.preprocess.resize
    images = [sample.image for sample in split.samples[:PIXEL_IMAGES]]
    differences = np.stack(
        [
            to_square(image.open(size), size, resize).astype(int) - pixels(image.open())
            for image in images
        ]
    )
    return {
        "token_ids": {"captions": len(texts), "differ": int(rows.sum())},
        "pixels": {
            "images": len(differences),
            "mean": float(np.abs(differences).mean()),
            "max": int(np.abs(differences).max()),
        },
    }


def library_tokens(folder: Path, model: Model) -> Callable[[Sequence[str]], np.ndarray]:
    """What reads the folder's tokenizer.json as other programs do."""
    from tokenizers import Tokenizer

    library = Tokenizer.from_file(str(next(folder.rglob(TOKENIZER_FILE))))
    library.enable_truncation(model.context_length)
    library.enable_padding(pad_id=model.tokenizer.pad_id)
    return lambda texts: np.array([encoding.ids for encoding in library.encode_batch(list(texts))])


def speeds(models: dict[str, Model], split: Split) -> dict[str, dict[str, Any]]:
    """Seconds (median, quartiles, n) of one image, one text and a batch of images, in alternation
    on all cores.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(threads(0, read_machine_info()))
    block = split.images.read(np.arange(THROUGHPUT_BATCH) % len(split.images))
    entries: dict[str, dict[str, Any]] = {name: {} for name in models}
    for quantity, count in (
        ("image_seconds", 1),
        ("text_seconds", 0),
        ("batch_seconds", THROUGHPUT_BATCH),
    ):
        calls = {
            name: _call(model, block[:count], split.samples[0].captions[:1])
            for name, model in models.items()
        }
        for name, timing in alternate(
            calls, lambda: None, rounds=41, warmup=2, seconds=TIMING_SECONDS
        ).items():
            entries[name][quantity] = asdict(timing)
    torch.set_num_threads(before)
    for entry in entries.values():
        entry["images_per_second"] = THROUGHPUT_BATCH / entry["batch_seconds"]["median"]
    return entries


def _call(model: Model, pixels: np.ndarray, texts: Sequence[str]) -> Callable[[], object]:
    if not len(pixels):
        return lambda: model.encode_text(texts)
    return lambda: model.encode_image(pixels)


def compare(
    runtimes: dict[str, Runtime], folder: Path, examples: Examples, exact: bool
) -> dict[str, Any]:
    """The contents of export.json.

    The first model is the original, the last one was exported to `folder`.

    `exact`: the vectors must be the same; otherwise only recall must be. Models between the two are
    only timed.
    """
    (original, _), *_, (exported, runtime) = runtimes.items()
    first = runtimes[original].model
    last = runtime.model
    splits = [examples.split(model) for model in (first, last)]
    images = min(runtime.max_images, len(splits[0].images))
    before, after = (
        encode_split(model, split, images)
        for model, split in zip((first, last), splits, strict=True)
    )
    texts = [
        caption for sample in splits[0].samples[: len(before.image)] for caption in sample.captions
    ]
    record: dict[str, Any] = {
        "examples": {
            "data": examples.source.name,
            "images": len(before.image),
            "captions": len(texts),
        }
    }
    timed = speeds({name: item.model for name, item in runtimes.items() if item.timed}, splits[0])
    record["runtimes"] = {
        name: {"bytes": item.size_bytes, **timed.get(name, {})} for name, item in runtimes.items()
    }
    if runtime.own_inputs:
        record |= input_differences(folder, (first, last), splits[0], texts)
    if runtime.graph is not None:
        record["operator_set"] = operator_set(runtime.graph)
    # A vocabulary that grew reads words that it did not have differently: captions with as many
    # tokens must have the same vectors, and the others are reported beside them.
    lengths = [split.captions.lengths[: len(texts)] for split in splits]
    grew = first.tokenizer.vocab_size != last.tokenizer.vocab_size
    cut = grew & (lengths[0] == first.context_length)  # not at the same word
    same = np.flatnonzero((lengths[0] == lengths[1]) & ~cut)
    record["runtimes"][exported] |= vector_differences(before, after, same)
    others = np.setdiff1d(np.arange(len(texts)), same)
    if len(others):
        difference = vector_differences(before, after, others)["text"]
        record["other_tokens"] = {"captions": len(others), "of": len(texts), **difference}
    if examples.real:
        record["runtimes"][original] |= recall_changes(before, before)
        record["runtimes"][exported] |= recall_changes(before, after)
    packages = {name: version for name in REPORTED_PACKAGES if (version := package_version(name))}
    record |= {"machine": read_machine_info().cpu, "versions": packages}
    record["failures"] = [*_failures(record, exported, exact)]
    if examples.real:
        record["failures"] += recall_failures(before, after)
    return record


def _failures(record: dict[str, Any], exported: str, exact: bool) -> Iterator[str]:
    rows, pixels = record.get("token_ids"), record.get("pixels")
    if rows and rows["differ"] > MOST_TOKEN_ROWS * rows["captions"]:
        yield f"the token ids of {rows['differ']:,} of {rows['captions']:,} captions differ"
    if exact and pixels and pixels["mean"] > MOST_PIXEL_DIFFERENCE:
        yield f"pixels differ by {number(pixels['mean'])} of 255 on average"
    for name in ("image", "text"):
        cosine = record["runtimes"][exported].get(name, {}).get("cosine_min", 1.0)
        if exact and not cosine >= LEAST_COSINE:
            yield (
                f"the smallest cosine of {name} vectors with the original's is {cosine:.5f}, below"
                f" {LEAST_COSINE}"
            )


def operator_set(path: Path) -> int:
    """The version of ONNX's operators that a graph uses."""
    import onnx

    opsets = onnx.load(str(path), load_external_data=False).opset_import
    return int(next(opset.version for opset in opsets if opset.domain in ("", "ai.onnx")))


def folder_bytes(folder: Path) -> int:
    """Size on disk of everything in a folder, or of a file."""
    paths = folder.rglob("*") if folder.is_dir() else [folder]
    return sum(path.stat().st_size for path in paths if path.is_file())


def _cosine(value: float | None) -> str:
    return MISSING if value is None else f"{value:.6f}"


def change_text(entry: dict[str, float] | None) -> str:
    """A change in points with its interval, as in `recall_changes`."""
    if entry is None or entry["low"] == entry["high"]:
        return MISSING if entry is None else f"{100 * entry['change']:+.2f}"
    change, low, high = (100 * entry[name] for name in ("change", "low", "high"))
    return f"{change:+.2f} ({low:+.2f} to {high:+.2f})"


# (label, path in the entry of a runtime, how to write it)
PARITY_ROWS: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
    ("image vectors: smallest cosine", "image/cosine_min", _cosine),
    ("  mean cosine", "image/cosine_mean", _cosine),
    ("  largest difference", "image/largest_difference", number),
    ("text vectors: smallest cosine", "text/cosine_min", _cosine),
    ("  mean cosine", "text/cosine_mean", _cosine),
    ("  largest difference", "text/largest_difference", number),
    ("recall@1", "recall@1/after", percent),
    ("  change in points (95% interval)", "recall@1", change_text),
    ("recall@10", "recall@10/after", percent),
    ("  change in points (95% interval)", "recall@10", change_text),
    ("size on disk", "bytes", size),
    ("one image", "image_seconds/median", duration),
    ("one text", "text_seconds/median", duration),
    (f"images per second, in batches of {THROUGHPUT_BATCH}", "images_per_second", number),
)


def report_table(record: dict[str, Any]) -> str:
    """export.json for the screen: one column per runtime."""
    columns, examples = record["runtimes"], record["examples"]
    rows = []
    for label, keys, text in PARITY_ROWS:
        values = (
            reduce(lambda entry, key: (entry or {}).get(key), keys.split("/"), column)
            for column in columns.values()
        )
        cells = [text(value) for value in values]
        if any(cell != MISSING for cell in cells):
            rows.append([label, *cells])
    lines = [table(["", *columns], rows), ""]
    if "token_ids" in record:
        tokens, pixels = record["token_ids"], record["pixels"]
        lines.append(f"token ids  {tokens['differ']:,} of {tokens['captions']:,} captions differ")
        mean = f"mean difference {number(pixels['mean'])} of 255, largest {pixels['max']}"
        lines.append(
            f"pixels     {mean}: {pixels['images']} images decoded at full size and resized"
        )
    if "other_tokens" in record:
        other = record["other_tokens"]
        lines.append(
            f"new words  {other['captions']:,} of {other['of']:,} captions have other tokens with"
            f" the larger vocabulary: smallest cosine {other['cosine_min']:.4f}, mean"
            f" {other['cosine_mean']:.4f}; the rows above are of the rest"
        )
    if "operator_set" in record:
        runtime = record["versions"]["onnxruntime"]
        lines.append(f"graph      operator set {record['operator_set']}, onnxruntime {runtime}")
    if "coreml" in columns:
        lines.append(
            "vectors    of the exported program in torch, with weights in float16; Core ML itself was not run"
        )
    measured = any("recall@1" in entry for entry in columns.values())
    recall = "" if measured else "; recall was not measured: export a run, or use --data"
    lines.append(
        f"compared   {examples['images']:,} validation images of {examples['data']}{recall}"
    )
    return "\n".join(lines)
