"""Datasets with broken images: a few are replaced and reported once, many stop the run."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from image_sets import break_files, make_set
from small_run import assert_same_batch, run_small

from m1clip.data.augment import Augmentation
from m1clip.data.captions import tokenize_captions
from m1clip.data.decoding import LazyImages
from m1clip.data.loader import BatchPlan, TrainingSet, batches
from m1clip.data.sources import open_source
from m1clip.errors import UserError
from m1clip.runlog import read_log
from m1clip.text.tokenizers import CharTokenizer

STEPS = 12


def lazy_set(folder: Path, batch: int = 8) -> TrainingSet:
    samples = open_source(str(folder)).samples("train")
    captions = [sample.captions for sample in samples]
    table = tokenize_captions(
        captions, CharTokenizer.from_captions(c for group in captions for c in group), 64
    )
    images = LazyImages([sample.image for sample in samples], 24)
    return TrainingSet(
        images, table, BatchPlan(len(samples), batch, 3), Augmentation(0.5, 0.5, 0.2)
    )


@pytest.fixture(scope="module")
def broken_set(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """60 training images: 6 are not images, one is empty, one is missing."""
    folder = make_set(tmp_path_factory.mktemp("broken") / "set", train=60)
    break_files(folder, range(0, 60, 10))
    break_files(folder, [7], data=b"")
    (folder / "images" / "train-0008.jpg").unlink()
    return folder


BROKEN = {0, 7, 8, 10, 20, 30, 40, 50}


@pytest.mark.slow
def test_same_batches_for_any_number_of_workers(broken_set: Path) -> None:
    data = lazy_set(broken_set)
    data.report = lambda failed: None  # must not travel to the workers
    alone = list(batches(data, 0, STEPS, 0, "fork", False))
    for one, other in zip(alone[5:], batches(data, 5, STEPS, 8, "fork", False), strict=True):
        assert_same_batch(one, other)


def test_replacement_brings_its_own_captions_and_id(broken_set: Path) -> None:
    data = lazy_set(broken_set)
    epoch = list(batches(data, 0, 7, 0, "fork", False))  # one epoch
    assert {failure.index for batch in epoch for failure in batch.failed} >= BROKEN - set(
        _left_over(data)
    )
    for batch in epoch:
        for index, image in enumerate(batch.sample_ids.tolist()):
            assert image not in BROKEN
            np.testing.assert_array_equal(
                batch.images[index].numpy(), data.images.read(np.array([image]))[0]
            )
            own = range(data.captions.first[image], data.captions.first[image + 1])
            captions = batch.caption_ids[batch.image_index == index].tolist()
            assert len(captions) == 1
            assert captions[0] in {int(data.captions.caption_ids[caption]) for caption in own}


def _left_over(data: TrainingSet) -> list[int]:
    used = np.concatenate([data.plan.members(step)[1] for step in range(data.plan.steps_per_epoch)])
    return sorted(set(range(data.plan.images)) - set(used.tolist()))


@pytest.mark.parametrize("workers", [0, 2])
def test_missing_disk_is_a_one_line_error(tmp_path: Path, workers: int) -> None:
    folder = make_set(tmp_path / "set")
    data = lazy_set(folder)
    for file in (folder / "images").iterdir():
        file.unlink()
    with pytest.raises(
        UserError, match=r"the file is missing; 32 replacement images.*is the disk.*still connected"
    ) as caught:
        list(batches(data, 0, STEPS, workers, "fork", False))
    assert "Traceback" not in str(caught.value)
    assert "\n" not in str(caught.value)


def broken_run(tmp_path: Path, fraction: float, cache: str, name: str = "run", **more: Any) -> Path:
    folder = tmp_path / "set"
    if not folder.exists():
        make_set(folder, train=200, val=20, test=20)
        break_files(folder, range(0, 200, round(1 / fraction)))
        break_files(folder, [3], split="val")
    changes = {
        "data.source": [str(folder)],
        "data.cache": cache,
        "train.steps": 8,
        "train.save_every": 4,
        **more,
    }
    run_small(tmp_path / name, changes)
    return tmp_path / name


@pytest.mark.slow
@pytest.mark.parametrize(("cache", "workers"), [("disk", 0), ("off", 2)])
def test_training_continues_with_five_percent_bad_files_and_names_each_once(
    tmp_path: Path, cache: str, workers: int
) -> None:
    # Twelve steps of 16 are one epoch of 200: each broken file is read, except those outside full
    # batches.
    run = broken_run(tmp_path, 0.05, cache, **{"train.steps": 12, "data.workers": workers})
    records = list(read_log(run))
    skipped = [record for record in records if record["kind"] == "skipped"]
    names = [record["where"] for record in skipped]
    assert len(names) == len(set(names)) == 11
    assert all(re.search(r"(train|val)-\d+\.jpg$", name) for name in names)
    assert all("not an image" in record["reason"] for record in skipped)
    start = next(record for record in records if record["kind"] == "start")
    assert start["choices"]["cache"]["train"] == cache
    assert start["choices"]["lint"]["verdict"] == "problems"
    assert 0 <= records[-1]["data_fraction"] < 1


@pytest.mark.slow
@pytest.mark.parametrize("cache", ["disk", "off"])
def test_twenty_percent_bad_files_are_refused_with_a_list(tmp_path: Path, cache: str) -> None:
    with pytest.raises(UserError) as caught:
        broken_run(tmp_path, 0.2, cache)
    message = str(caught.value)
    assert "40 of 200 train images cannot be read (20%, allowed 10%)" in message
    assert message.count(".jpg: not an image") == 3
    assert "--max-unreadable" in message
    assert not (tmp_path / "run").exists()
