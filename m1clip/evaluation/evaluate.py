"""`m1clip eval`: a run's best model on a split of its data, or of other data."""

from __future__ import annotations

import dataclasses
import io
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from m1clip.config import load_config
from m1clip.data.cache import DecodePlan
from m1clip.data.prepare import Split, load_split, open_data
from m1clip.data.synthetic.negatives import negatives
from m1clip.data.synthetic.scene import Scene
from m1clip.data.synthetic.source import SyntheticSource
from m1clip.data.types import Source
from m1clip.errors import UserError
from m1clip.evaluation.analysis import (
    alignment,
    as_plain,
    confusions,
    difficulty_by_similarity,
    even_indices,
    group_masks,
    modality_gap,
    negatives_accuracy,
    recall_by_group,
    recall_by_length,
    uniformity,
)
from m1clip.evaluation.figures import GridRow, retrieval_grid
from m1clip.evaluation.retrieval import held_out, is_match, nearest, ranks
from m1clip.evaluation.statistics import Scores
from m1clip.hardware.device import Device, choose_device, choose_precision, threads
from m1clip.hardware.facts import Facts, read_facts
from m1clip.hardware.measure import bf16_speedup
from m1clip.hardware.precision import autocast
from m1clip.inference.encoder import Bundle, Features, encode_split, load
from m1clip.io import read_small, write_bytes, write_text
from m1clip.model.clip import CLIP

# Images encoded at a time: few on the CPU, where their activations stand beside the optimizer's state in memory.
BATCH = {"cpu": 16}
USUAL_BATCH = 128
GRID_ROWS, GRID_COLUMNS = 8, 5
JOULES_PER_WATT_HOUR = 3600.0


def energy_figures(steps: Sequence[dict[str, Any]], epochs: float, recall: float) -> dict[str, float]:
    """Joules of the training and of an epoch of it, and mean recall in percent for a watt-hour; {} without a meter."""
    joules = sum(float(record.get("joules", 0.0)) for record in steps)
    if not joules or not epochs:
        return {}
    return {
        "joules": joules,
        "joules_per_epoch": joules / epochs,
        "recall_per_watt_hour": 100 * recall / (joules / JOULES_PER_WATT_HOUR),
    }


@dataclass(frozen=True)
class Exam:
    """A model and the split it is asked about."""

    bundle: Bundle
    source: Source
    split: str
    data: Split
    autocast: Callable[[], AbstractContextManager[object]]


def rows_at_once(model: CLIP) -> int:
    """Images to encode at a time where this model lives."""
    return BATCH.get(model.logit_scale.device.type, USUAL_BATCH)


def examine(exam: Exam, grid: Path) -> Scores:
    """All final figures of a split, and the image grid."""
    model, data = exam.bundle.model, exam.data
    features = encode_split(model, data, exam.bundle.preprocess, rows_at_once(model), exam.autocast)
    scores = held_out(*features)
    if isinstance(exam.source, SyntheticSource):
        scores += negative_scores(exam, exam.source, features[0])
    save_grid(exam, features, grid)
    return scores


@torch.inference_mode()
def negative_scores(exam: Exam, source: SyntheticSource, image: Tensor, images: Sequence[int] | None = None) -> Scores:
    """How often the true caption beats the same words with something changed: by difficulty, and by what changed.

    All images are asked, or those in `images`.
    """
    asked = [
        (index, negative)
        for index in (range(len(exam.data.samples)) if images is None else images)
        for negative in negatives(source.scene_of(exam.data.samples[index].id), seed=index)
    ]
    rows = 2 * rows_at_once(exam.bundle.model)
    with exam.autocast():
        # The negatives of an image share one true caption: it is encoded once.
        truths = list(dict.fromkeys(negative.truth for _, negative in asked))
        number = {truth: place for place, truth in enumerate(truths)}
        true = exam.bundle.encode_texts(truths, rows).cpu()[[number[negative.truth] for _, negative in asked]]
        wrong = exam.bundle.encode_texts([negative.caption for _, negative in asked], rows).cpu()
    return negatives_accuracy(
        image,
        true,
        wrong,
        torch.tensor([index for index, _ in asked]),
        [negative.difficulty for _, negative in asked],
        [negative.changed[0] if negative.difficulty == "hard" else None for _, negative in asked],
    )


def save_grid(exam: Exam, features: Features, path: Path) -> None:
    """An image of queries and what they retrieve, right and wrong marked, from the best query to the worst."""
    image, text, owner, keys, _ = features
    data, columns = exam.data, min(GRID_COLUMNS, len(image))
    place = ranks(image, text, owner, keys).text_to_image
    rows = []
    for caption in _even_sample(place, GRID_ROWS):
        scores, found = nearest(text[caption : caption + 1], image, columns)
        right = int(owner[caption])
        rows.append(
            GridRow(
                query=data.samples[right].captions[int(caption - data.captions.first[right])],
                images=list(data.images.read(found[0].numpy())),
                correct=is_match(found[0], keys[caption], owner, keys).tolist(),
                scores=scores[0].tolist(),
                right_rank=int(place[caption]),
            )
        )
    title = f"{len(image):,} images of the {exam.split} split: the best {columns} for each caption"
    retrieval_grid(rows, path, title=title)


def _even_sample(place: Tensor, count: int) -> list[int]:
    """Captions at even steps of their rank from the best to the very worst, so that the image hides no failure."""
    order = place.argsort(stable=True)
    return [int(order[int(step)]) for step in np.linspace(0, len(order) - 1, min(count, len(order)))]


def score_run(
    run: Path, split: str, device_name: str, other_data: tuple[str, ...], decode: Callable[[Facts], DecodePlan]
) -> tuple[Scores, Path]:
    """Figures of a split and the path of the image grid, which goes into the run folder."""
    exam = open_exam(run, split, device_name, other_data, decode)
    grid = run / f"retrieval-{split}{'-other-data' if other_data else ''}.png"
    return examine(exam, grid), grid


def open_exam(
    run: Path, split: str, device_name: str, other_data: tuple[str, ...], decode: Callable[[Facts], DecodePlan]
) -> Exam:
    """A run's best model, ready to be asked about a split as it was in training."""
    bundle = load(run)
    if not (run / "config.toml").is_file():
        raise UserError(f"{run}: no config.toml; give the run folder, which says what data it was trained on")
    config = load_config(run / "config.toml")
    data = dataclasses.replace(config.data, source=other_data) if other_data else config.data
    facts = read_facts()
    device = Device(choose_device(device_name, facts), facts)
    torch.set_num_threads(threads(config.train.threads, facts))
    # As in the run, so that the figures are those that training printed; elsewhere what is fast there.
    wish = config.train.precision if device.kind == config.train.device else "auto"
    speedup = bf16_speedup(device) if wish == "auto" and device.rules.bf16 == "measure" else None
    precision = choose_precision(wish, device.kind, facts, speedup)
    bundle.model.to(device.torch)
    if device.kind == config.train.device:
        bundle.model.set_attention(config.model.attention_image, config.model.attention_text)  # type: ignore[arg-type]
    source = open_data(data, bundle.preprocess.image_size, config.seed)
    if split not in source.splits():
        raise UserError(f"{', '.join(data.source)}: has no {split} split (there: {', '.join(source.splits())})")
    context = bundle.model.shape.context_length
    samples = load_split(source, split, data, bundle.tokenizer, context, bundle.preprocess, 1.0, decode(facts))
    return Exam(bundle, source, split, samples, autocast(device, precision))


CONFUSIONS = 8
SAMPLE = 32  # images whose made-up negatives are encoded at an evaluation: the one dear part


def analyse(exam: Exam, features: Features, sample: int = SAMPLE) -> dict[str, Any]:
    """Everything that can be said from the features of a split, ready for the log; `sample` images for negatives."""
    image, text, owner, keys, _ = features
    place = ranks(image, text, owner, keys).text_to_image
    found: dict[str, Any] = {
        "alignment": round(alignment(image, text, owner), 5),
        "uniformity_image": round(uniformity(image), 5),
        "uniformity_text": round(uniformity(text), 5),
        "modality_gap": round(modality_gap(image, text), 5),
        "difficulty": as_plain(difficulty_by_similarity(image, text, owner, keys)),
        "length": as_plain(recall_by_length(place, torch.from_numpy(exam.data.captions.lengths))),
    }
    if isinstance(exam.source, SyntheticSource):
        labels = [labels_of(exam.source.scene_of(sample.id)) for sample in exam.data.samples]
        found["groups"] = as_plain(recall_by_group(place, group_masks(labels, owner)))
        # Where a frozen tower has made the features of all captions, there is none to encode new ones here.
        if sample and exam.data.captions.features is None:
            chosen = even_indices(len(image), sample).tolist()
            scores = negative_scores(exam, exam.source, image, chosen)
            found["negatives"] = {
                metric.name.removeprefix("negatives/"): [round(metric.value, 5), metric.n] for metric in scores.metrics
            }
    return found


def analyse_split(exam: Exam, image: Path) -> dict[str, Any]:
    """The whole analysis of a split, every image asked, and an image of the nearest confusions."""
    data = exam.data
    features = encode_split(
        exam.bundle.model, data, exam.bundle.preprocess, rows_at_once(exam.bundle.model), exam.autocast
    )
    found = analyse(exam, features, sample=len(data.samples))
    worst = confusions(*features[:4], most=CONFUSIONS)
    rows = [
        GridRow(
            query=caption_of(data, each.caption),
            images=list(data.images.read(np.array([each.found, each.right]))),
            correct=[False, True],
            scores=[
                float(features[0][p].float() @ features[1][each.caption].float()) for p in (each.found, each.right)
            ],
        )
        for each in worst
    ]
    if rows:
        retrieval_grid(rows, image, title=f"Nearest confusions of the {exam.split} split: found, and right")
    found["confusions"] = [[caption_of(data, each.caption), data.samples[each.found].captions[0]] for each in worst]
    return found


def caption_of(data: Split, caption: int) -> str:
    """The words behind a caption's number."""
    image = int(data.captions.owner[caption])
    return data.samples[image].captions[caption - int(data.captions.first[image])]


def labels_of(scene: Scene) -> Mapping[str, Sequence[str]]:
    """What a synthetic image shows, by attribute."""
    things = scene.things
    return {
        "category": [thing.category for thing in things],
        "object": [thing.kind for thing in things],
        "colour": [thing.colour for thing in things],
        "count": [str(thing.count) for thing in things],
        "size": [thing.size for thing in things],
        "position": [thing.position for thing in things],
        "time": [scene.time],
    }


FOLDER, THUMBS = "watch", "thumbs"
QUERIES, FOUND, MATRIX, SNAPSHOT_CONFUSIONS = 8, 5, 24, 6
KEEP = 24  # snapshots of a run
THUMB = 72  # pixels
LONGEST = 300  # letters of a caption


def write_snapshot(run: Path, step: int, split: str, data: Split, features: Features) -> None:
    """One more snapshot; old ones are thinned out, and thumbnails that none shows any more deleted."""
    content = {
        "step": step,
        "split": split,
        "images": len(features.image),
        "queries": _queries(data, features),
        "matrix": _matrix(data, features.image, features.text),
        "confusions": _confusions(data, features),
    }
    folder = run / FOLDER
    for part in (folder, folder / THUMBS):
        part.mkdir(exist_ok=True)
    for image in _images(content):
        _write_thumb(folder / THUMBS / f"{image}.jpg", data, image)
    write_text(folder / f"step-{step:08d}.json", json.dumps(content, ensure_ascii=False, separators=(",", ":")))
    _thin_out(folder, step)


def _queries(data: Split, features: Features) -> list[dict[str, Any]]:
    image, text, owner, keys, _ = features
    chosen = even_indices(len(text), QUERIES)
    scores, found = nearest(text[chosen], image, FOUND)
    correct = is_match(found, keys[chosen][:, None], owner, keys)
    # Every caption equal to a chosen one is needed: it tells which other images are right.
    asked = torch.isin(keys, keys[chosen]).nonzero()[:, 0]
    place = ranks(image, text[asked], owner[asked], keys[asked]).text_to_image[torch.searchsorted(asked, chosen)]
    return [
        {
            "caption": caption_of(data, int(caption))[:LONGEST],
            "right": int(owner[caption]),
            "rank": int(place[row]),
            "found": found[row].tolist(),
            "correct": correct[row].tolist(),
            "scores": [round(score, 3) for score in scores[row].tolist()],
        }
        for row, caption in enumerate(chosen)
    ]


def _matrix(data: Split, image: Tensor, text: Tensor) -> dict[str, Any]:
    """Images against the first caption of each: the diagonal is right."""
    images = even_indices(len(image), MATRIX)
    captions = [int(data.captions.first[int(image)]) for image in images]
    values = image[images].float() @ text[captions].float().T
    return {
        "images": images.tolist(),
        "captions": [caption_of(data, caption)[:LONGEST] for caption in captions],
        "values": [[round(value, 3) for value in row] for row in values.tolist()],
    }


def _confusions(data: Split, features: Features) -> list[dict[str, Any]]:
    return [
        {
            "caption": caption_of(data, each.caption)[:LONGEST],
            "found": each.found,
            "right": each.right,
            "margin": round(each.margin, 3),
            "truth": data.samples[each.found].captions[0][:LONGEST],
        }
        for each in confusions(*features[:4], most=SNAPSHOT_CONFUSIONS)
    ]


def _images(content: dict[str, Any]) -> set[int]:
    """Every image that a snapshot shows."""
    shown = set(content["matrix"]["images"])
    for query in content["queries"]:
        shown |= {query["right"], *query["found"]}
    for each in content["confusions"]:
        shown |= {each["found"], each["right"]}
    return shown


def _write_thumb(path: Path, data: Split, image: int) -> None:
    if path.exists():
        return
    small = Image.fromarray(data.images.read(np.array([image]))[0])
    small.thumbnail((THUMB, THUMB))
    coded = io.BytesIO()
    small.save(coded, format="JPEG", quality=82)
    write_bytes(path, coded.getvalue(), sync=False)  # whole after a kill; not worth a wait for the disk


def _thin_out(folder: Path, step: int) -> None:
    kept = sorted(folder.glob("step-*.json"))
    for stale in [path for path in kept if int(path.stem[5:]) > step]:
        stale.unlink()  # of a session that was killed after its last checkpoint
        kept.remove(stale)
    if len(kept) <= KEEP:
        return
    for path in kept[1:-1:2]:
        path.unlink()
    shown: set[int] = set()
    for path in folder.glob("step-*.json"):
        shown |= _images(json.loads(read_small(path)))
    _remove(thumb for thumb in (folder / THUMBS).glob("*.jpg") if int(thumb.stem) not in shown)


def _remove(paths: Iterable[Path]) -> None:
    for path in paths:
        path.unlink(missing_ok=True)
