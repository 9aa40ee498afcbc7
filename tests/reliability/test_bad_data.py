"""Promise 9: images that are broken, cut off, gone, or that hang. By share: tests/data/test_bad_input.py."""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from reliability_results import recorded
from small_run import run_small

from m1clip.data import images
from m1clip.data.cache import LiveImages, decode_images, read_or_replace
from m1clip.data.images import BadImage, decode, map_with_timeout
from m1clip.data.pack import pack
from m1clip.data.sources import open_source
from m1clip.errors import UserError
from m1clip.runlog import read_log

sys.path.append(str(Path(__file__).parents[1] / "data"))
from image_sets import break_files, make_set


class Hanging:
    """An image whose read never comes back."""

    def __init__(self, name: str = "lost.jpg") -> None:
        self.name, self.released = name, threading.Event()

    def open(self, want: int | None = None) -> Image.Image:
        self.released.wait(60)
        raise OSError("released")

    def __str__(self) -> str:
        return self.name


class Grey:
    """An image that is there at once."""

    def open(self, want: int | None = None) -> Image.Image:
        return Image.new("RGB", (16, 16), (7, 7, 7))

    def __str__(self) -> str:
        return "grey"


@pytest.fixture(autouse=True)
def _no_abandoned_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "_abandoned", [])


@pytest.mark.parametrize("threads", [1, 4])
def test_work_in_order_by_any_number_of_threads(threads: int) -> None:
    items = list(range(200))
    assert map_with_timeout(items, lambda i: i * i, 5.0, threads) == [i * i for i in items]
    assert map_with_timeout([], lambda i: i, 5.0, threads) == []
    assert map_with_timeout(items, lambda i: i, 0.0, threads) == items, "no limit"


def test_one_that_hangs_is_answered_for_and_the_rest_goes_on() -> None:
    stuck = threading.Event()

    def work(item: int) -> int:
        if item == 3:
            stuck.wait(60)
        return item

    found = map_with_timeout(list(range(10)), work, 0.2, 1)
    stuck.set()
    assert found == [0, 1, 2, None, 4, 5, 6, 7, 8, 9]


def test_one_that_was_given_up_on_cannot_end_the_read() -> None:
    stuck, raised = threading.Event(), threading.Event()

    def work(item: int) -> int:
        if item == 0:
            stuck.wait(60)
            raised.set()
            raise OSError("the disk came back, broken")
        if item == 2:
            stuck.set()
            raised.wait(60)
            time.sleep(0.05)  # the error is on its way while there is still work
        return item

    assert map_with_timeout([0, 1, 2, 3], work, 0.2, 1) == [None, 1, 2, 3]


def test_an_error_comes_out_where_it_was_asked_for() -> None:
    with pytest.raises(ZeroDivisionError):
        map_with_timeout([1, 0, 2], lambda i: 1 // i, 5.0, 2)


def test_a_hanging_image_is_replaced_and_named() -> None:
    lost = Hanging()
    live = LiveImages([Grey(), lost, Grey(), Grey()], 16, timeout=0.2)
    members, pixels, failed = read_or_replace(live, np.array([0, 1, 2]), 0, 0)
    lost.released.set()
    assert 1 not in members.tolist()
    assert len(pixels) == 3
    assert {(failure.index, failure.where) for failure in failed} == {(1, "lost.jpg")}
    assert all("the read did not finish within 0.2 s" in failure.reason for failure in failed)


def test_a_lost_disk_stops_the_run_in_time_with_one_line() -> None:
    lost = [Hanging(f"lost-{number}.jpg") for number in range(30)]
    live = LiveImages(lost, 16, timeout=0.05)
    with pytest.raises(
        UserError, match=r"^lost-\d+\.jpg: .* read that hangs.*is the disk .* still connected\? Continue with --resume"
    ):
        live.try_read(np.arange(30))
    for each in lost:
        each.released.set()


def test_a_cache_never_remembers_a_hang_as_a_broken_image() -> None:
    lost = Hanging()
    with pytest.raises(UserError, match=r"lost\.jpg: the read did not finish .*Run again when it is"):
        list(decode_images([Grey(), lost], 16, "shortest", {}, lambda done, total: None, timeout=0.1))
    lost.released.set()


def test_special_files_never_hang(tmp_path: Path) -> None:
    """A named pipe, a device, a folder in the place of an image or of its caption."""
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
    """A set packed into one shard, of which only a part is left."""
    source = open_source(str(make_set(folder / "set", train=40)))
    pack(source, folder / "shards")
    shard = max((folder / "shards").rglob("*.tar"), key=lambda path: path.stat().st_size)
    data = shard.read_bytes()
    shard.write_bytes(data[: int(len(data) * keep)])
    return shard


def test_a_shard_cut_in_half_gives_what_lies_before_the_cut(tmp_path: Path) -> None:
    shard = cut_shard(tmp_path, 0.5)
    source = open_source(str(shard))
    samples = [sample for split in source.splits() for sample in source.samples(split)]
    assert 10 < len(samples) < 40
    assert any("cut short" in str(problem) for problem in source.problems)
    for sample in samples:
        sample.image.open()


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_a_file_that_vanishes_while_training_is_replaced(
    tmp_path: Path, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_set(tmp_path / "set", train=64, val=8, test=8)
    break_files(folder, [5, 25, 45])  # and 5% were broken from the start
    from m1clip.training.step import TrainStep

    usual = TrainStep.__call__

    def step(self: TrainStep, batch: Any, number: int, *rest: Any, **named: Any) -> Any:
        if number == 1:
            (folder / "images" / "train-0011.jpg").unlink(missing_ok=True)
        return usual(self, batch, number, *rest, **named)

    monkeypatch.setattr(TrainStep, "__call__", step)
    changes = {"data.source": [str(folder)], "data.cache": "off", "train.steps": 16, "data.workers": workers}
    run_small(tmp_path / "run", changes)
    names = [Path(line["where"]).name for line in read_log(tmp_path / "run") if line["kind"] == "skipped"]
    assert len(names) == len(set(names))
    assert "train-0011.jpg" in names
    assert {"train-0005.jpg", "train-0025.jpg", "train-0045.jpg"} <= set(names)


PARTS = 4


@pytest.mark.long
@pytest.mark.parametrize("part", range(1, PARTS))
def test_shards_cut_anywhere(tmp_path: Path, part: int) -> None:
    with recorded("bad data", part, PARTS) as counts:
        shard = cut_shard(tmp_path, 1.0)
        whole, read = shard.read_bytes(), 0
        cuts = range(0, len(whole), max(1, len(whole) // 500))[part - 1 :: PARTS - 1]
        for cut in cuts:
            shard.write_bytes(whole[:cut])
            try:
                source = open_source(str(shard))
            except UserError:
                continue
            for split in source.splits():
                for sample in source.samples(split):
                    sample.image.open()
                    read += 1
        counts |= {"shards cut": len(cuts), "images read before the cuts": read}


@pytest.mark.long
def test_reads_that_hang_one_after_the_other() -> None:
    with recorded("bad data", PARTS, PARTS) as counts:
        begin = time.monotonic()
        lost = [Hanging(f"lost-{number}") for number in range(5)]
        assert len(LiveImages(lost, 16, timeout=0.3).try_read(np.arange(5))[1]) == 5
        for each in lost:
            each.released.set()
        counts |= {"hanging reads": len(lost), "seconds for them at a limit of 0.3": round(time.monotonic() - begin, 2)}
