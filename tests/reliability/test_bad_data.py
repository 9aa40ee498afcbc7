"""Promise 9: images that are broken, truncated or missing, and reads that hang."""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hanging_reads import hang, replace_clock_of_reads
from image_sets import break_files, make_set
from PIL import Image
from small_run import TIMEOUT, before_each_step, run_small

from m1clip.data import images
from m1clip.data.decoding import DecodeMethod, LazyImages, decode_images, read_or_replace
from m1clip.data.images import BadImage, decode, map_with_timeout
from m1clip.data.pack import pack
from m1clip.data.sources import open_source
from m1clip.errors import UserError
from m1clip.runlog import read_log
from m1clip.training.compose import TrainStep

HANGS = 2.0  # seconds after which a read counts as hanging: `hangs_without_waiting` skips them


class Hanging:
    """An image whose read never returns."""

    def __init__(self, name: str = "lost.jpg") -> None:
        self.name, self.released = name, threading.Event()

    def open(self, min_side: int | None = None) -> Image.Image:
        hang(self.released)
        raise OSError("released")

    def __str__(self) -> str:
        return self.name


class Grey:
    """An image that is read at once."""

    def open(self, min_side: int | None = None) -> Image.Image:
        return Image.new("RGB", (16, 16), (7, 7, 7))

    def __str__(self) -> str:
        return "grey"


@pytest.fixture(autouse=True)
def _no_abandoned_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "_abandoned", [])


@pytest.mark.parametrize("threads", [1, 4])
def test_results_keep_their_order_with_any_number_of_threads(threads: int) -> None:
    items = list(range(200))
    assert list(map_with_timeout(items, lambda i: i * i, TIMEOUT, threads)) == [
        i * i for i in items
    ]
    assert list(map_with_timeout([], lambda i: i, TIMEOUT, threads)) == []
    assert list(map_with_timeout(items, lambda i: i, 0.0, threads)) == items, "no limit"


@pytest.fixture
def hangs_without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    replace_clock_of_reads(monkeypatch)


@pytest.mark.usefixtures("hangs_without_waiting")
def test_late_error_of_a_skipped_item_is_ignored() -> None:
    stuck, raised = threading.Event(), threading.Event()
    late: list[threading.Thread] = []

    def work(item: int) -> int:
        if item == 0:
            hang(stuck)
            late.append(threading.current_thread())
            raised.set()
            raise OSError("the disk came back, broken")
        if item == 2:
            stuck.set()
            assert raised.wait(TIMEOUT)
            late[0].join()  # it has reported its error
        return item

    assert list(map_with_timeout([0, 1, 2, 3], work, HANGS, 1)) == [None, 1, 2, 3]


def test_other_errors_are_raised() -> None:
    with pytest.raises(ZeroDivisionError):
        list(map_with_timeout([1, 0, 2], lambda i: 1 // i, TIMEOUT, 2))


@pytest.mark.usefixtures("hangs_without_waiting")
def test_hanging_image_is_replaced_and_reported() -> None:
    lost = Hanging()
    lazy = LazyImages([Grey(), lost, Grey(), Grey()], 16, timeout=HANGS)
    members, pixels, failed = read_or_replace(lazy, np.array([0, 1, 2]), 0, 0)
    lost.released.set()
    assert 1 not in members.tolist()
    assert len(pixels) == 3
    assert {(failure.index, failure.where) for failure in failed} == {(1, "lost.jpg")}
    assert all("the read did not finish within 2 s" in failure.reason for failure in failed)


def test_lost_disk_is_a_one_line_error() -> None:
    lost = [Hanging(f"lost-{number}.jpg") for number in range(30)]
    lazy = LazyImages(lost, 16, timeout=0.05)
    with pytest.raises(
        UserError,
        match=(
            r"^lost-\d+\.jpg: .* read that hangs.*is the disk .* still connected\? Continue with"
            r" --resume"
        ),
    ):
        lazy.try_read(np.arange(30))
    for path in lost:
        path.released.set()


@pytest.mark.usefixtures("hangs_without_waiting")
def test_cache_does_not_store_a_hanging_image_as_broken() -> None:
    lost = Hanging()
    with pytest.raises(
        UserError, match=r"lost\.jpg: the read did not finish .*Run again when it is"
    ):
        list(decode_images([Grey(), lost], 16, "shortest", {}, DecodeMethod(timeout=HANGS)))
    lost.released.set()


def test_special_files_never_hang(tmp_path: Path) -> None:
    """A FIFO, a device or a folder in place of an image or its caption."""
    make_set(tmp_path / "set", train=4)
    os.mkfifo(tmp_path / "pipe.jpg")
    for odd in (tmp_path / "pipe.jpg", Path("/dev/zero"), tmp_path):
        with pytest.raises(BadImage):
            decode(odd)
    Image.new("RGB", (8, 8)).save(tmp_path / "a.jpg")
    os.mkfifo(tmp_path / "a.txt")
    with pytest.raises(UserError):
        open_source(f"txt:{tmp_path}")
    with pytest.raises(UserError, match="neither a file nor a folder"):
        open_source(str(tmp_path / "pipe.jpg"))


def cut_shard(folder: Path, keep: float) -> Path:
    """A dataset packed into one shard, which is then truncated."""
    source = open_source(str(make_set(folder / "set", train=40)))
    pack(source, folder / "shards")
    shard = max((folder / "shards").rglob("*.tar"), key=lambda path: path.stat().st_size)
    data = shard.read_bytes()
    shard.write_bytes(data[: int(len(data) * keep)])
    return shard


def test_samples_before_the_end_of_a_truncated_shard_are_read(tmp_path: Path) -> None:
    shard = cut_shard(tmp_path, 0.5)
    source = open_source(str(shard))
    samples = [sample for split in source.splits() for sample in source.samples(split)]
    assert 10 < len(samples) < 40
    assert any("cut short" in str(problem) for problem in source.problems)
    for sample in samples:
        sample.image.open()


@pytest.mark.slow
def test_file_deleted_while_training_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_set(tmp_path / "set", train=64, val=8, test=8)
    break_files(folder, [5, 25, 45])  # and 5% were broken from the start

    def delete(train_step: TrainStep, batch: Any, step: int) -> None:
        if step == 1:
            (folder / "images" / "train-0011.jpg").unlink(missing_ok=True)

    before_each_step(delete, monkeypatch)
    changes = {
        "data.source": [str(folder)],
        "data.cache": "off",
        "train.steps": 16,
        "data.workers": 2,
    }
    run_small(tmp_path / "run", changes)
    names = [
        Path(line["where"]).name for line in read_log(tmp_path / "run") if line["kind"] == "skipped"
    ]
    assert len(names) == len(set(names))
    assert "train-0011.jpg" in names
    assert {"train-0005.jpg", "train-0025.jpg", "train-0045.jpg"} <= set(names)


@pytest.mark.long("Bad data")
@pytest.mark.parametrize("part", range(3))
def test_shards_truncated_anywhere(tmp_path: Path, part: int, counts: dict[str, float]) -> None:
    shard = cut_shard(tmp_path, 1.0)
    full = shard.read_bytes()
    cuts = range(0, len(full), max(1, len(full) // 500))[part::3]
    for cut in cuts:
        shard.write_bytes(full[:cut])
        with contextlib.suppress(UserError):
            source = open_source(str(shard))
            for split in source.splits():
                for sample in source.samples(split):
                    sample.image.open()
    counts["truncated shards"] = len(cuts)


@pytest.mark.long("Bad data")
def test_hanging_reads(counts: dict[str, float]) -> None:
    lost = [Hanging(f"lost-{number}") for number in range(5)]
    assert len(LazyImages(lost, 16, timeout=0.3).try_read(np.arange(5))[1]) == 5
    for path in lost:
        path.released.set()
    counts["hanging reads"] = len(lost)
