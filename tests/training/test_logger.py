"""Log lines about steps: values, time split; nothing is read from the device in between."""

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
from small_run import finished_run, run_small
from torch.utils._python_dispatch import TorchDispatchMode

from m1clip import console
from m1clip.config import Config, DataConfig
from m1clip.data.decoding import decode_options
from m1clip.data.image_cache import cache_split
from m1clip.data.images import Preprocess
from m1clip.data.types import Sample, Source
from m1clip.errors import UserError
from m1clip.hardware.energy import EnergyMeter
from m1clip.hardware.machine_info import read_machine_info
from m1clip.hardware.sensors import Host
from m1clip.inference import batches
from m1clip.inference.feature_cache import FeatureCache, FrozenTower
from m1clip.monitor.status import as_table, list_runs
from m1clip.optimizers import OPTIMIZERS
from m1clip.runlog import PREPARING, read_log, read_preparing
from m1clip.text.tokenizers import CharTokenizer
from m1clip.training import duration, loop, training_data
from m1clip.training.context import RunContext
from m1clip.training.logger import Telemetry, check_sink, scalars, time_split
from m1clip.training.process import check_unused, lock_run, remove_unused_folder
from m1clip.training.validation import BestSoFar


class Reads(TorchDispatchMode):
    """Counts reads of tensor values, each of which would synchronize on an accelerator."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            self.count += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_device_is_read_only_for_log_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, optimizer: str
) -> None:
    """The reads of a run do not grow with its steps, only with its lines."""
    real = loop.train
    counts = []

    def counted(run: RunContext) -> None:
        # As on an accelerator: the CPU reads each step, where it costs nothing.
        run.train_step.parts.update.skip = "device"
        with Reads() as reads:
            real(run)
        counts.append(reads.count)

    monkeypatch.setattr(loop, "train", counted)
    # The sigmoid loss is that of accelerators; the CPU's InfoNCE looks at the scale.
    common = {"train.eval_every": 0, "optim.optimizer": optimizer, "train.loss": "sigmoid"}
    common |= {"model.vision_layers": 1, "model.text_layers": 1}
    monkeypatch.setattr(duration, "LOG_EVERY", 20)
    monkeypatch.setattr(loop, "evaluate", lambda run: BestSoFar(0.0, -1, 0, "mean recall"))
    for name, steps, lines in (("a", 10, 1), ("b", 20, 1), ("c", 20, 10)):
        monkeypatch.setattr(duration, "LOG_LINES", lines)
        run_small(tmp_path / name, {**common, "train.steps": steps})
    assert counts[1] - counts[0] <= 2  # ten more steps, no more lines
    assert counts[2] > counts[1]


def test_waiting_for_data_counts_only_while_the_device_is_idle() -> None:
    split = time_split(10.0, waited=4.0, phases={"forward": 4.0, "backward": 5.0})
    assert split == {"data": 1.0, "forward": 4.0, "backward": 5.0, "rest": 0.0}
    idle = time_split(10.0, waited=4.0, phases={"forward": 2.0})
    assert idle == {"data": 4.0, "forward": 2.0, "rest": 4.0}
    assert time_split(10.0, 1.0, {}) == {"data": 1.0, "rest": 9.0}
    over = time_split(10.0, 0.0, {"forward": 12.0})
    assert sum(over.values()) == pytest.approx(10.0)


def test_scalars_of_a_record(monkeypatch: pytest.MonkeyPatch) -> None:
    record = {
        "v": 1,
        "kind": "step",
        "step": 3,
        "time": 1.0,
        "loss": 0.5,
        "seconds": {"data": 0.1},
        "x": "nan",
    }
    assert list(scalars("step", record)) == [("step/loss", 0.5), ("step/seconds/data", 0.1)]
    groups = {"groups": {"color/red": [0.5, 9]}}
    assert list(scalars("eval", groups)) == [("eval/groups/color/red", 0.5)]
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install 'm1clip\[log\]'"):
        check_sink("tensorboard")


def test_tensorboard_has_the_values_of_the_log(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="needs tensorboard (pip install m1clip[log])")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run_small(tmp_path / "run", {"train.report_to": "tensorboard"})
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    logged = {r["step"]: r["loss"] for r in read_log(tmp_path / "run") if r["kind"] == "step"}
    assert {e.step: pytest.approx(e.value) for e in events.Scalars("step/loss")} == logged


def test_telemetry_reads_given_meters_and_sensors(tmp_path: Path) -> None:
    sensor = tmp_path / "class" / "hwmon" / "hwmon0"
    sensor.mkdir(parents=True)
    (sensor / "name").write_text("k10temp")
    (sensor / "temp1_input").write_text("55000")
    now = [0.0]
    joules = [1000.0]
    host = Host(system="Linux", machine="x86_64", sys=tmp_path, battery=lambda: 64.0)
    telemetry = Telemetry(
        "cpu",
        host,
        open_energy_meter=lambda kind: EnergyMeter("test", "all of it", lambda: joules[0]),
        measure_idle=lambda meter: 4.25,
        clock=lambda: now[0],
    )
    described = telemetry.describe()
    assert (described["meter"], described["idle_watts"]) == ("test: all of it", 4.25)
    assert set(described["not_measured"]) == {"fan", "throttling"}
    joules[0] += 30.0
    first = telemetry.read(2.0)
    assert (first["joules"], first["watts"], first["celsius"]) == (30.0, 15.0, 55.0)
    assert first["battery_percent"] == 64.0
    (sensor / "temp1_input").write_text("70000")
    assert telemetry.read(1.0)["celsius"] == 55.0, "read every few seconds"
    now[0] += 60.0
    assert telemetry.read(1.0)["celsius"] == 70.0


def test_telemetry_without_a_meter_says_why(tmp_path: Path) -> None:
    host = Host(system="Linux", machine="x86_64", sys=tmp_path, battery=lambda: None)
    telemetry = Telemetry("cpu", host, open_energy_meter=lambda kind: None)
    reasons = telemetry.describe()["not_measured"]
    assert set(reasons) == {"energy", "temperature", "fan", "throttling", "battery"}
    assert "idle_watts" not in telemetry.describe()
    assert set(telemetry.read(1.0)) == {"cores"}


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

    def open(self, min_side: int | None = None) -> Image.Image:
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


def test_reading_the_data_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console, "PROGRESS_SECONDS", 0.01)
    opened = training_data.open_data

    def slow(*words: Any) -> Any:
        deadline = time.monotonic() + 300
        while "reading the data" not in printed.getvalue() and time.monotonic() < deadline:
            time.sleep(0.01)
        return opened(*words)

    monkeypatch.setattr(training_data, "open_data", slow)
    data = dataclasses.replace(Config().data, synthetic_images=200)
    with console.capture() as printed:
        training_data.read_data(dataclasses.replace(Config(), data=data), 32)
    assert "reading the data" in printed.getvalue()


def test_warnings_before_a_run_starts_are_in_its_log() -> None:
    texts = [record["text"] for record in read_log(finished_run()) if record["kind"] == "warning"]
    assert [text.partition(":")[0] for text in texts] == ["only 72 training images"]


def test_text_from_files_cannot_control_the_terminal() -> None:
    with console.capture() as printed:
        console.print("skipped \x1b[2J\u202egpj.exe: broken\nimage \x9b31m")
    assert printed.getvalue() == "skipped \\x1b[2J\\u202egpj.exe: broken\nimage \\x9b31m\n"
