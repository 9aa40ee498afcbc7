"""Run folders with damaged or hostile files: every reader continues, skips what is invalid, and never hangs."""

import copy
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from image_sets import png
from small_run import environment

from m1clip.errors import UserError
from m1clip.monitor.diagnostics import diagnose
from m1clip.monitor.history import History, read_snapshot, read_thumbnail
from m1clip.monitor.report import has_matplotlib, write_report
from m1clip.monitor.status import as_table, list_runs
from m1clip.monitor.terminal import once
from m1clip.runlog import json_safe
from m1clip.web.server import Store, key_of

from .made_runs import append, ended, evaluation, full_run, line, step

# As JSON text, because Python would not write some of them.
BAD_VALUES = (
    *(
        "9" * 400,
        "-7",
        "1e999",
        "1e308",
        "5e-324",
        "NaN",
        "true",
        "null",
        "1.5",
        '"x"',
        '"\\ud800"',
        "[]",
    ),
    *("{}", "[[]]", '{"a": {}}', "[" * 30 + "]" * 30, '{"1": ["x", 1]}', '["nan", "nan"]'),
)
RECORDS = (
    step(102, watts=3.0, celsius=50.0),
    evaluation(102, 0.3),
    ended(102, 0.3),
    line("start", step=100, steps=200, version="1", choices={"a": 1}),
    line("memory", weights=1, peak=2, meter=None),
    line("event", step=102, event="rolled back", back_to=50),
    line("warning", step=102, text="w"),
    line("skipped", split="train", where="a.jpg", reason="r"),
    line("parity", gradient_difference=1e-5),
)


INSTALLED = has_matplotlib()


def damaged(value: Any) -> Iterator[str]:
    """The value with each of its parts replaced by each bad value, as JSON text."""
    mark = "REPLACE-ME"
    for path in paths(value):
        changed = copy.deepcopy(value)
        parent = changed
        for key in path[:-1]:
            parent = parent[key]
        parent[path[-1]] = mark
        text = json.dumps(changed, separators=(",", ":"))
        yield from (text.replace(f'"{mark}"', bad) for bad in BAD_VALUES)


def paths(value: Any) -> Iterator[tuple[Any, ...]]:
    items = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for key, item in items:
        yield (key,)
        yield from ((key, *rest) for rest in paths(item))


def read_everything(run: Path) -> None:
    """What `runs`, `monitor --once`, `monitor --web` and `report` do."""
    rows = list_runs(run.parent)
    assert run.name in as_table(rows, run.parent)
    assert once(run)
    json.dumps(
        json_safe([rows, Store([run.parent]).update({key_of(run): "new"})]), allow_nan=False
    ).encode()
    write_report([run], run / "report.html")
    assert "</html>" in (run / "report.html").read_text()


@pytest.fixture(autouse=True)
def without_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plots take seconds; tests that need them set this to True."""
    monkeypatch.setattr("m1clip.monitor.report.has_matplotlib", lambda: False)


def test_readers_survive_damaged_log_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = full_run(tmp_path / "runs" / "one", finished=False)
    log = (run / "run.jsonl").read_bytes()
    lines = [damaged_line for record in RECORDS for damaged_line in damaged(record)]
    for number, damaged_line in enumerate(random.Random(0).sample(lines, 30)):
        monkeypatch.setattr(
            "m1clip.monitor.report.has_matplotlib", lambda drawn=number == 0: drawn and INSTALLED
        )
        (run / "run.jsonl").write_bytes(log + damaged_line.encode() + b"\n")
        read_everything(run)


def test_invalid_lines_are_skipped_and_counted(tmp_path: Path) -> None:
    run = full_run(tmp_path / "runs" / "one")
    before = History(run).poll()
    bad = [
        *(
            line("step", step=10**400),
            step(102, seconds={"data": "x"}),
            evaluation(102, 0.3, seconds=[]),
        ),
        *(step(102, time=1e300), line("event", step=[], event={})),
        line("step", step=102, loss={}),
    ]
    append(run, bad)
    history = History(run).poll()
    assert (history.log.invalid, history.step, history.last_time) == (
        len(bad),
        before.step,
        before.last_time,
    )
    assert "6 invalid lines of run.jsonl skipped" in [
        diagnosis.message for diagnosis in diagnose(history, 0.0, "finished")
    ]
    read_everything(run)


def test_unusual_log_values_are_valid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("m1clip.monitor.report.has_matplotlib", lambda: INSTALLED)
    run = full_run(tmp_path / "runs" / "one", finished=False)
    append(run, [step(102, loss="nan", grad_norm="inf", watts="nan")])
    assert History(run).poll().log.invalid == 0
    read_everything(run)


def test_damaged_snapshots_are_ignored(tmp_path: Path) -> None:
    run = full_run(tmp_path / "runs" / "one")
    path = run / "snapshots" / "step-00000100.json"
    snapshot = json.loads(path.read_text())
    assert read_snapshot(run, 100) == snapshot
    needed = [
        *snapshot["queries"][0],
        *snapshot["confusions"][0],
        "values",
        "captions",
        "queries",
        "matrix",
        "step",
    ]
    for field in needed:
        path.write_text(json.dumps(snapshot).replace(f'"{field}":', '"other":'))
        assert read_snapshot(run, 100) is None, field
    for text in damaged(snapshot):
        path.write_text(text)
        json.dumps(read_snapshot(run, 100), allow_nan=False).encode()
    path.write_text(json.dumps(snapshot | {"matrix": {"captions": [], "values": []}}))
    assert read_snapshot(run, 100) is None


def test_readers_survive_invalid_settings(tmp_path: Path) -> None:
    run = full_run(tmp_path / "runs" / "one", finished=False)
    append(run, [step(n, data_fraction=0.9) for n in range(102, 130)])
    for bad in ("{}", "[]", "'x'", "-1", "true", "9" * 400, "1e999", "1979-05-27"):
        names = {
            "train": ("eval_every", "batch", "device"),
            "data": ("workers",),
            "optim": ("warmup",),
        }
        text = "".join(
            f"[{table}]\n" + "".join(f"{name} = {bad}\n" for name in keys)
            for table, keys in names.items()
        )
        (run / "config.toml").write_text(text)
        (run / "environment.json").write_text(
            json.dumps({"facts": {"memory_bytes": bad}, "command": bad})
        )
        read_everything(run)
        (run / "environment.json").write_text(f'{{"facts": {{"memory_bytes": {"9" * 400}}}}}')
        read_everything(run)
    for data in (b"\xff\xfe\x00a", b"name = '\xe4'\n", b"a = " + b"[" * 100_000):
        (run / "config.toml").write_bytes(data)
        (run / "environment.json").write_bytes(data[4:])
        read_everything(run)


@pytest.mark.parametrize("padding", [0, 1_000_000], ids=["small file", "large file"])
def test_report_omits_undecodable_image(tmp_path: Path, padding: int) -> None:
    run = full_run(tmp_path / "runs" / "one")
    huge = png(60_000, 60_000, zlib.compress(bytes(1000)))
    for data in (
        huge + bytes(padding),
        b"\x89PNG" + bytes(padding),
        b"\xff\xd8" + bytes(padding),
        b"",
    ):
        (run / "retrieval.png").write_bytes(data)
        assert "retrieval.png skipped" in write_report([run], tmp_path / "report.html").read_text()


def replaced_by_fifo(path: Path, outside: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def replaced_by_link(path: Path, outside: Path) -> None:
    """Replace a file by a link to a copy outside the run folder."""
    path.rename(outside)
    path.symlink_to(outside)


READ = (
    "run.jsonl",
    "config.toml",
    "retrieval.png",
    "snapshots/step-00000100.json",
    "snapshots/thumbnails/1.jpg",
)


@pytest.fixture
def time_limit() -> Iterator[None]:
    """Interrupts a reader that waits for a FIFO."""
    before = signal.signal(signal.SIGALRM, lambda *_: pytest.fail("a reader waits"))
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.usefixtures("time_limit")
@pytest.mark.parametrize("replace", [replaced_by_fifo, replaced_by_link])
@pytest.mark.parametrize("name", [*READ, "environment.json"])
def test_only_regular_files_inside_the_run_folder_are_opened(
    tmp_path: Path, name: str, replace: Callable[[Path, Path], None]
) -> None:
    run = full_run(tmp_path / "runs" / "one")
    (run / "config.toml").write_text("seed = 20211\n")
    replace(run / name, tmp_path / "outside")
    history, page = History(run).poll(), ""
    if name == "run.jsonl":
        with pytest.raises(UserError, match="has not started yet"):
            read_everything(run)
    else:
        read_everything(run)
        page = (run / "report.html").read_text()
    read = (
        bool(history.start),
        history.files.config,
        "class='wide'" in page or not page,
        read_snapshot(run, 100),
    )
    content_of = dict(zip(READ, (*read, read_thumbnail(run, 1)), strict=True))
    assert [name_ for name_ in READ if not content_of[name_]] == [name] * (name in READ)
    assert ("20211" in page) == (name not in ("config.toml", "run.jsonl"))
    assert bool(history.files.environment) == (name != "environment.json")


def test_snapshot_folder_that_links_outside_is_not_read(tmp_path: Path) -> None:
    run = full_run(tmp_path / "runs" / "one")
    shutil.move(run / "snapshots" / "thumbnails", tmp_path / "elsewhere")
    (run / "snapshots" / "thumbnails").symlink_to(tmp_path / "elsewhere")
    assert read_thumbnail(run, 1) is None
    shutil.move(run / "snapshots", tmp_path / "snapshots")
    (run / "snapshots").symlink_to(tmp_path / "snapshots")
    assert read_snapshot(run, 100) is None


@pytest.mark.slow
def test_run_is_shown_in_ascii_locale(tmp_path: Path) -> None:
    ascii_locale = {**environment(), "PYTHONIOENCODING": "ascii"}
    run = full_run(tmp_path / "größe")
    for words in (("monitor", "--once", str(run)), ("runs", str(tmp_path)), ("report", str(run))):
        command = [sys.executable, "-m", "m1clip", *words]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=300, check=False, env=ascii_locale
        )
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.isascii()
        assert "gr??e" in done.stdout


@pytest.mark.parametrize("report_name", ["folder.html", "file/report.html", "/proc/report.html"])
def test_report_write_error_names_file(tmp_path: Path, report_name: str) -> None:
    (tmp_path / "folder.html").mkdir()
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError) as caught:  # noqa: PT011
        write_report([full_run(tmp_path / "one")], tmp_path / report_name)
    assert ".partial" not in str(caught.value)
