"""Images per second that the loader of `train` delivers with different numbers of workers."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Generator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from m1clip.data.augment import Augmentation
from m1clip.data.captions import tokenize_captions
from m1clip.data.decoding import LazyImages
from m1clip.data.images import FileImage
from m1clip.data.loader import Batch, BatchPlan, TrainingSet, batches
from m1clip.data.synthetic.source import SyntheticSource
from m1clip.hardware.device import rules
from m1clip.hardware.machine_info import MachineInfo
from m1clip.hardware.timing import Timing, timing
from m1clip.text.tokenizers import make_tokenizer

LOADED_IMAGES = 64  # JPEG files that are read again and again
STORED_SIZE = 224  # pixels of a file's side
LOADED_SIZE = 112  # pixels of a decoded image's side
LOADED_BATCH = 16
LOADING_ROUNDS = 5
BATCHES_PER_ROUND = 4
PREFETCHED = 2  # batches that each worker has ready; they would make the next ones look faster
ORIGINAL_WORKERS = 4  # as the original project used


@dataclass(frozen=True)
class Loading:
    """How fast batches are loaded with a number of worker processes."""

    workers: int  # 0: none, images are decoded in threads of this process
    images_per_second: Timing


def worker_counts(facts: MachineInfo) -> list[int]:
    """No workers, half of the cores, all of them, and as many as the original project used."""
    counts = {0, max(1, facts.cores // 2), facts.cores, ORIGINAL_WORKERS}
    return sorted(counts)


def measure_loading(
    facts: MachineInfo,
    counts: Sequence[int] = (),
    *,
    rounds: int = LOADING_ROUNDS,
    images: int = LOADED_IMAGES,
    seconds: float = float("inf"),
) -> list[Loading]:
    """Decode and batch JPEG files with each number of workers, in alternating rounds.

    After `seconds`, no further round begins.
    """
    begin = time.perf_counter()
    counts = counts or worker_counts(facts)
    start_method = rules("cpu", facts).worker_start
    rates: dict[int, list[float]] = {count: [] for count in counts}
    with tempfile.TemporaryDirectory(prefix="m1clip-loading-") as folder, ExitStack() as stack:
        data = _training_set(Path(folder), images)
        feeds = {}
        for count in counts:
            feed = batches(data, 0, 10**6, count, start_method, False)
            feeds[count] = stack.enter_context(contextlib.closing(feed))
            next(feed)
        for _ in range(rounds):
            for count, feed in feeds.items():
                rates[count].append(data.plan.batch / _batch_seconds(feed, count))
            if time.perf_counter() - begin > seconds:
                break
    return [Loading(count, timing(values)) for count, values in rates.items()]


def _batch_seconds(feed: Generator[Batch, None, None], workers: int) -> float:
    """Seconds of one batch, after those that the workers prepared while others were measured."""
    for _ in range(PREFETCHED * workers):
        next(feed)
    begin = time.perf_counter()
    for _ in range(BATCHES_PER_ROUND):
        next(feed)
    return (time.perf_counter() - begin) / BATCHES_PER_ROUND


def _training_set(folder: Path, images: int) -> TrainingSet:
    """Synthetic images as JPEG files in a folder, with their captions."""
    source = SyntheticSource(STORED_SIZE, images, 1, 1, seed=0)
    samples = source.samples("train")
    refs = []
    for number, sample in enumerate(samples):
        path = folder / f"{number}.jpg"
        sample.image.open().save(path, quality=90)
        refs.append(FileImage(str(path)))
    captions = [sample.captions for sample in samples]
    tokenizer = make_tokenizer("char", [caption for group in captions for caption in group])
    table = tokenize_captions(captions, tokenizer, 32)
    plan = BatchPlan(images, min(LOADED_BATCH, images), 0)
    return TrainingSet(LazyImages(refs, LOADED_SIZE), table, plan, Augmentation())
