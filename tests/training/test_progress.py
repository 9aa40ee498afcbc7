"""While images are cached or features are computed: lines for a pipe, and the same in `m1clip runs`."""

import dataclasses
import io
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from small_run import finished_run

from m1clip import console
from m1clip.config import Config, DataConfig
from m1clip.data.decoding import decode_options
from m1clip.data.image_cache import cache_split
from m1clip.data.images import Preprocess
from m1clip.data.types import Sample, Source
from m1clip.hardware.machine_info import read_machine_info
from m1clip.inference import batches
from m1clip.inference.feature_cache import FeatureCache, FrozenTower
from m1clip.monitor.status import as_table, list_runs
from m1clip.runlog import PREPARING, read_log, read_preparing
from m1clip.text.tokenizers import CharTokenizer
from m1clip.training import workbench
from m1clip.training.process import check_unused, lock_run, remove_unused_folder

COUNT, FIRST = 600, r"\d+ of 600, [\d,.]+/s, \d+:\d\d left"


class Waiting:
    """Stops the work after its first chunk until a line about that chunk is printed."""

    def __init__(self, run: Path) -> None:
        self.run, self.printed, self.listed = run, io.StringIO(), ""

    def wait(self) -> None:
        deadline = time.monotonic() + 300
        while not re.search(FIRST, self.printed.getvalue()) and time.monotonic() < deadline:
            time.sleep(0.01)
        self.listed = as_table(list_runs(self.run.parent), self.run.parent)


class Ref:
    """An image; number 64, the first of the second chunk, waits."""

    in_processes = False  # it waits for this process

    def __init__(self, number: int, wait: Callable[[], None]) -> None:
        self.number, self.wait = number, wait

    def open(self, want: int | None = None) -> Image.Image:
        if self.number == 64:
            self.wait()
        return Image.new("RGB", (8, 8))

    def stamp(self) -> str:
        return str(self.number)


@pytest.mark.parametrize("work", ["disk", "ram", "image features", "caption features"])
def test_progress_is_printed_and_listed_while_a_run_prepares(
    tmp_path: Path, work: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(console, "PROGRESS_SECONDS", 0.01)
    run = tmp_path / "runs" / "a"
    run.mkdir(parents=True)
    waiting = Waiting(run)
    plan = decode_options(read_machine_info())
    image_wait = waiting.wait if work != "caption features" else lambda: None
    samples = [Sample(Ref(n, image_wait), (f"caption {n}",), str(n)) for n in range(COUNT)]
    finished: list[int] = []  # batches; the tower runs in several threads
    monkeypatch.setattr(batches, "CPU_TOKENS", 128)  # more batches than threads

    def tower(rows: torch.Tensor) -> torch.Tensor:
        if finished and work == "caption features":
            waiting.wait()
        finished.append(len(rows))
        return torch.zeros(len(rows), 4)

    side = FrozenTower(tower, 4, ("tower",))
    features: Any = FeatureCache(side, side, CharTokenizer("caption 0123456789"), 16, Preprocess(image_size=8),
                       tmp_path / "cache", (), torch.device("cpu"), "fp32", plan)  # fmt: skip
    with (
        lock_run(run),
        console.progress_file(run / PREPARING),
        console.capture() as waiting.printed,
    ):
        if work in ("disk", "ram"):
            config = DataConfig(cache=work, cache_dir=str(tmp_path / "cache"))  # type: ignore[arg-type]
            source = Source("images")
            source.by_split["train"] = samples
            cache_split(source, "train", 8, "squash", config, plan)
            title = "preparing train images"
        elif work == "image features":
            features.images(samples, "train", 0.1)
            title = "computing features of train images"
        else:
            features.captions(samples, "train")
            title = "computing features of train captions"
        assert re.search(f"{title}: {FIRST}", waiting.printed.getvalue())
        assert re.search(f"preparing  {title}: {FIRST}", waiting.listed)
        assert not (run / PREPARING).exists()


def test_printed_line_is_already_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console, "PROGRESS_SECONDS", 0.0)
    printed, listed = list[str](), list[str | None]()
    enough = threading.Event()

    def print_line(line: str) -> None:
        printed.append(line)
        listed.append(read_preparing(tmp_path))
        if len(printed) >= 20:
            enough.set()

    monkeypatch.setattr(console, "print", print_line)
    with (
        console.progress_file(tmp_path / PREPARING),
        console.progress("preparing train images") as refresh,
    ):
        done = 0
        while not enough.is_set():
            done += 1
            refresh(done, 10**9)
    assert listed == printed
    assert len(set(printed)) > 1, "the work went on between two lines"


def test_progress_left_by_a_killed_process_is_ignored(tmp_path: Path) -> None:
    run = tmp_path / "a"
    run.mkdir()
    console.write_progress(run / PREPARING, "preparing train images: 3 of 9")
    check_unused(run)
    with lock_run(run):
        assert read_preparing(run) is None
        console.write_progress(run / PREPARING, "preparing train images: 3 of 9")
        assert "preparing train images: 3 of 9" in as_table(list_runs(tmp_path), tmp_path)
        (run / PREPARING).write_bytes(b"\x1b[2J")
        assert read_preparing(run) is None
    remove_unused_folder(run)
    assert not run.exists()
    console.write_progress(run / PREPARING, "preparing train images")
    assert not run.exists()  # a removed folder is not recreated


def test_time_left_excludes_items_done_before(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    work = console.Progress("x")
    assert str(work) == "x"
    work.refresh(500, 1000)
    assert str(work) == "x: 500 of 1,000"
    now[0] += 10
    work.refresh(600, 1000)
    assert str(work) == "x: 600 of 1,000, 10/s, 0:40 left"


def test_work_without_a_count_prints_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(console, "PROGRESS_SECONDS", 0.001)
    fifth_write, writes = threading.Event(), list[str]()

    def write(path: Path, text: str) -> None:
        writes.append(text)
        if len(writes) == 5:
            fifth_write.set()

    monkeypatch.setattr(console, "write_progress", write)
    with (
        console.capture() as printed,
        console.progress_file(tmp_path / PREPARING),
        console.progress("fitting the heads"),
    ):
        assert fifth_write.wait(300)
    assert printed.getvalue() == "fitting the heads\n"


def test_reading_the_data_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console, "PROGRESS_SECONDS", 0.01)
    opened = workbench.open_data

    def slow(*words: Any) -> Any:
        deadline = time.monotonic() + 300
        while "reading the data" not in printed.getvalue() and time.monotonic() < deadline:
            time.sleep(0.01)
        return opened(*words)

    monkeypatch.setattr(workbench, "open_data", slow)
    data = dataclasses.replace(Config().data, synthetic_images=200)
    with console.capture() as printed:
        workbench.read_data(dataclasses.replace(Config(), data=data), 32)
    assert "reading the data" in printed.getvalue()


def test_warnings_before_a_run_starts_are_in_its_log() -> None:
    texts = [each["text"] for each in read_log(finished_run()) if each["kind"] == "warning"]
    assert [text.partition(":")[0] for text in texts] == ["only 72 training images"]


def test_text_from_files_cannot_control_the_terminal() -> None:
    with console.capture() as printed:
        console.print("skipped \x1b[2J\u202egpj.exe: broken\nimage \x9b31m")
    assert printed.getvalue() == "skipped \\x1b[2J\\u202egpj.exe: broken\nimage \\x9b31m\n"
