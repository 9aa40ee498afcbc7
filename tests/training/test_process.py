"""Run folders, locks and signals, in real processes."""

import contextlib
import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from small_run import (
    TIMEOUT,
    assert_same_bits,
    command,
    resume_quietly,
    run_small,
    small_arguments,
    tensors_of,
    weights_sha256,
)

from m1clip.errors import UserError
from m1clip.io import RUN_LOCK, read_owner
from m1clip.monitor.history import History
from m1clip.monitor.status import status_of
from m1clip.runlog import ABOUT_LABELS, NAME, RunLog, read_log
from m1clip.training import loop, process, validation
from m1clip.training.checkpoint import verify
from m1clip.training.context import RunContext
from m1clip.training.process import (
    OUTPUT,
    Interrupted,
    Stopped,
    check_unused,
    create_run_folder,
    lock_run,
    stop_on_signals,
)


@pytest.mark.slow
def test_command_line_repeats_a_run_from_its_config(tmp_path: Path) -> None:
    first = command("train", *small_arguments(), "--out", "first", cwd=tmp_path)
    assert first.returncode == 0, first.stderr
    again = command("train", "--config", "first/config.toml", "--out", "again", cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert weights_sha256(tmp_path / "first") == weights_sha256(tmp_path / "again")
    assert "\x1b[" not in first.stdout  # clean where there is no terminal
    assert "first/retrieval.png" in first.stdout

    refused = command("train", *small_arguments(), "--out", "first", cwd=tmp_path)
    assert refused.returncode == 2
    assert (
        refused.stderr
        == "m1clip: first: already contains a run; continue it with --resume first, or choose another --out\n"
    )

    scored = command("eval", "first", "--split", "val", "--device", "cpu", cwd=tmp_path)
    assert scored.returncode == 0, scored.stderr
    assert "mean recall" in scored.stdout
    assert "image      first/retrieval-val.png" in scored.stdout
    data = ("--data", "synthetic", "--split", "val", "--device", "cpu")
    json_alone = command("eval", "first", *data, "--json", cwd=tmp_path)
    image = json.loads(json_alone.stdout)["image"]
    assert image == "first/retrieval-val-other-data.png", "beside the run"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["again", "first"]


HOLDER = """
import os, sys, time
from pathlib import Path
from m1clip.training.process import lock_run
with lock_run(Path(sys.argv[1])):
    if os.fork() == 0:  # a data worker, which outlives its parent for a while
        time.sleep(300)
        os._exit(0)
    print("held", flush=True)
    sys.stdin.readline()
"""


def test_default_run_folders_are_numbered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert [create_run_folder(None, "tiny").name for _ in range(3)] == ["tiny", "tiny-2", "tiny-3"]


def test_run_folder_must_be_empty(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    assert create_run_folder(tmp_path / "mine", "x") == tmp_path / "mine"
    (tmp_path / "mine" / "photo.jpg").touch()
    with pytest.raises(UserError, match="exists and is not a run"):
        create_run_folder(tmp_path / "mine", "x")
    (tmp_path / "mine" / "config.toml").touch()
    for name, message in (
        ("mine", "already contains a run"),
        ("mine/photo.jpg", "exists and is not a run"),
    ):
        with pytest.raises(UserError, match=message):
            create_run_folder(tmp_path / name, "x")


def test_folder_of_a_run_that_wrote_nothing_is_removed(tmp_path: Path) -> None:
    folder = create_run_folder(tmp_path / "run", "x")
    with lock_run(folder):
        process.remove_unused_folder(folder)
    assert not folder.exists()
    full = create_run_folder(tmp_path / "full", "x")  # the disk, before config.toml was written
    (full / "tokenizer.json").touch()
    process.remove_unused_folder(full)
    assert not full.exists()
    kept_folder = create_run_folder(tmp_path / "kept", "x")
    (kept_folder / "run.jsonl").touch()
    process.remove_unused_folder(kept_folder)
    assert (kept_folder / "run.jsonl").exists()


def test_second_writer_is_refused_and_a_dead_one_holds_no_lock(tmp_path: Path) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    with (
        pytest.raises(UserError, match=f"process {holder.pid} is training in this folder"),
        lock_run(tmp_path),
    ):
        pass
    holder.kill()
    holder.wait(timeout=TIMEOUT)
    with lock_run(tmp_path):
        assert (tmp_path / RUN_LOCK).read_text().splitlines()[0] == str(os.getpid())
    with contextlib.suppress(ProcessLookupError):
        os.killpg(holder.pid, signal.SIGKILL)


def test_lock_and_log_are_not_written_through_a_link(tmp_path: Path) -> None:
    """A downloaded run folder may contain links."""
    precious = tmp_path / "precious.txt"
    precious.write_text("mine")
    run = tmp_path / "run"
    run.mkdir()
    for name, opened in (
        (RUN_LOCK, lambda: lock_run(run).__enter__()),
        (NAME, lambda: RunLog(run)),
    ):
        (run / name).symlink_to(precious)
        with pytest.raises(UserError, match=rf"{name}: is a symbolic link"):
            opened()
    assert precious.read_text() == "mine"


def test_signal_interrupts_data_preparation_at_once() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Interrupted) as caught, stop_on_signals():
        os.kill(os.getpid(), signal.SIGTERM)
    assert caught.value.exit_code == 143
    assert signal.getsignal(signal.SIGTERM) is before


def test_signal_waits_for_the_step_and_a_second_has_its_default_effect() -> None:
    usual = signal.getsignal(signal.SIGINT)  # ignored, where the tests run in a shell's background
    with stop_on_signals() as stop_request, stop_request.interrupting(False):
        os.kill(os.getpid(), signal.SIGINT)
        assert stop_request.signal == signal.SIGINT
        with pytest.raises(Interrupted), stop_request.interrupting():
            pytest.fail("the block must not start")
        assert signal.getsignal(signal.SIGINT) is usual


@pytest.mark.parametrize(
    ("number", "rank", "on_terminal", "is_answered"),
    [
        (signal.SIGINT, "0", True, True),
        (signal.SIGINT, "1", True, False),
        (signal.SIGINT, "0", False, False),
        (signal.SIGTERM, "0", True, False),
    ],
)
def test_ctrl_c_in_a_step_is_answered_at_once_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, number: int, rank: str, on_terminal: bool, is_answered: bool
) -> None:
    main, terminal = pty.openpty()
    reader, writer = os.pipe()
    monkeypatch.setenv("RANK", rank)
    with os.fdopen(terminal if on_terminal else writer, "w") as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        with stop_on_signals() as stop_request, stop_request.interrupting(False):
            os.kill(os.getpid(), number)
            os.write(stream.fileno(), b"end")
        printed = os.read(main if on_terminal else reader, 4096).decode()
    assert stop_request.signal == number
    assert ("stopping after this step; Ctrl-C again" in printed) is is_answered


def test_signal_aborts_the_evaluation_and_the_resume_repeats_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = {"train.eval_every": 4, "train.save_every": 100, "train.steps": 8}
    run_small(tmp_path / "reference", changes)
    real, calls = validation.encode, []

    def encode(*args: Any) -> Any:
        calls.append(1)
        if len(calls) == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return real(*args)

    monkeypatch.setattr(validation, "encode", encode)
    run = tmp_path / "run"
    with pytest.raises(Stopped) as stopped:
        run_small(run, changes)
    assert stopped.value.exit_code == 143
    assert [line["kind"] for line in read_log(run)][-2:] == ["checkpoint", "event"]
    assert "eval" not in [line["kind"] for line in read_log(run)]
    resume_quietly(run)

    def evaluations(path: Path) -> list[tuple[int, float]]:
        return [
            (line["step"], line["mean_recall"]) for line in read_log(path) if line["kind"] == "eval"
        ]

    assert evaluations(run) == evaluations(tmp_path / "reference")
    assert_same_bits(tensors_of(run, 8), tensors_of(tmp_path / "reference", 8))


def test_signal_while_saving_stops_after_the_next_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = loop.write_checkpoint

    def save(run: RunContext) -> None:
        real(run)
        if run.state.step == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(loop, "write_checkpoint", save)
    with pytest.raises(Stopped):
        run_small(tmp_path / "run", {"train.save_every": 3})
    (event,) = [line for line in read_log(tmp_path / "run") if line["kind"] == "event"]
    assert event["step"] == 4
    assert verify(tmp_path / "run" / "checkpoints" / "step-000004") == ""


def test_run_that_ended_has_no_owner_though_its_process_lives_on(tmp_path: Path) -> None:
    """In a notebook: m1clip stop must not end the kernel, and m1clip runs must not say running."""
    with lock_run(tmp_path):
        owner = read_owner(tmp_path)
        assert owner is not None
        assert owner.pid == os.getpid()
    assert read_owner(tmp_path) is None
    with pytest.raises(ValueError, match="failed"), lock_run(tmp_path):
        raise ValueError("failed")
    assert read_owner(tmp_path) is None


class Starts:
    """Replaces the processes that `start_in_background` starts; each runs a program of Python."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, program: str) -> None:
        self.program = program
        self.processes: list[subprocess.Popen[bytes]] = []
        popen = subprocess.Popen

        def start(_: list[str], **streams: Any) -> subprocess.Popen[bytes]:
            self.processes.append(popen([sys.executable, "-c", self.program], **streams))
            return self.processes[-1]

        monkeypatch.setattr(subprocess, "Popen", start)

    def end(self) -> None:
        for started in self.processes:
            started.kill()
            started.wait(TIMEOUT)


@pytest.fixture
def sleepers(monkeypatch: pytest.MonkeyPatch) -> Iterator[Starts]:
    """Background runs that have imports to do for as long as the test takes."""
    monkeypatch.setattr(process, "START_SECONDS", 0.0)
    starts = Starts(monkeypatch, "import time; time.sleep(300)")
    yield starts
    starts.end()


def test_background_run_has_an_owner_before_it_has_written_anything(
    tmp_path: Path, sleepers: Starts
) -> None:
    """On a busy machine, its imports take half a minute, in which it could be started twice."""
    folder, pid = process.start_in_background(["train"], tmp_path / "run", "x", None)
    owner = read_owner(folder)
    assert owner is not None
    running = owner.process()
    assert running is not None
    assert running.pid == pid
    assert status_of(History(folder).poll()).state == "preparing"
    with lock_run(folder):  # the lock itself is free
        assert (folder / RUN_LOCK).read_text().splitlines()[0] == str(os.getpid())


def test_second_background_run_in_a_folder_is_refused(tmp_path: Path, sleepers: Starts) -> None:
    """It said that it trains, or removed the folder of the first, depending on the moment."""
    folder, pid = process.start_in_background(["train"], tmp_path / "run", "x", None)
    before = {item.name: item.read_bytes() for item in folder.iterdir()}
    with pytest.raises(UserError, match=f"process {pid} is training in this folder"):
        process.start_in_background(["train"], folder, "x", None)
    (folder / "config.toml").touch()
    with pytest.raises(UserError, match=f"process {pid} is training in this folder"):
        process.start_in_background(["train"], folder, "x", folder)
    (folder / RUN_LOCK).unlink()  # as while its process starts
    with pytest.raises(UserError, match="is training in this folder"):
        process.start_in_background(["train"], folder, "x", folder)
    assert len(sleepers.processes) == 1
    assert before.keys() - {RUN_LOCK} <= {item.name for item in folder.iterdir()}
    sleepers.end()
    process.start_in_background(["train"], folder, "x", folder)  # free again
    assert len(sleepers.processes) == 2


def test_failed_background_run_leaves_what_another_process_prepares(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both begin at the same moment: the one that finds the lock taken must not delete it."""
    other = tmp_path / "run"
    lock = contextlib.ExitStack()
    Starts(monkeypatch, "import sys; sys.exit('m1clip: no such option')")

    def begin_meanwhile(folder: Path, pid: int) -> None:
        lock.enter_context(lock_run(folder))
        (folder / "tokenizer.json").touch()

    monkeypatch.setattr(process, "name_owner", begin_meanwhile)
    with lock, pytest.raises(UserError, match="no such option"):
        process.start_in_background(["train"], other, "x", None)
    assert (other / RUN_LOCK).exists()
    assert (other / "tokenizer.json").exists()
    assert not (other / OUTPUT).exists()


def test_folder_of_a_background_run_that_failed_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Starts(monkeypatch, "import sys; sys.exit('m1clip: no such option')")
    with pytest.raises(UserError, match="no such option"):
        process.start_in_background(["train"], tmp_path / "run", "x", None)
    assert not (tmp_path / "run").exists()


def test_lock_holds_within_a_process_and_when_its_owner_is_read(tmp_path: Path) -> None:
    """The system lets go of a lock as soon as its process closes the file once more."""
    in_use = pytest.raises(UserError, match=f"process {os.getpid()} is training in this folder")
    with lock_run(tmp_path):
        with in_use, lock_run(tmp_path):
            pass
        owner = read_owner(tmp_path)
        assert owner is not None
        assert owner.pid == os.getpid()
        program = HOLDER.replace("os.fork() == 0", "False")
        other = [sys.executable, "-c", program, str(tmp_path)]
        refused = subprocess.run(other, capture_output=True, text=True, check=False)
        assert "is training in this folder" in refused.stderr
        assert "held" not in refused.stdout
    with lock_run(tmp_path):
        pass


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_lock_that_is_no_file_is_named(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path / RUN_LOCK)
    with pytest.raises(UserError, match=r"run\.lock: not a regular file; delete it"):
        lock_run(tmp_path).__enter__()


def test_lock_file_that_its_holder_deleted_protects_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process fails while it prepares a run, and removes the folder."""
    real = process.lock_file

    def lock_deleted(handle: int) -> None:
        (tmp_path / RUN_LOCK).unlink()
        real(handle)

    monkeypatch.setattr(process, "lock_file", lock_deleted)
    with (
        pytest.raises(UserError, match="has just removed the folder; run the command again"),
        lock_run(tmp_path),
    ):
        pass


def test_run_that_another_process_finished_meanwhile_is_not_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both found the folder empty, and one was faster."""
    real = process.create_run_folder

    def create(path: Path | None, name: str) -> Path:
        folder = real(path, name)
        (folder / "config.toml").write_text("of another process")
        return folder

    monkeypatch.setattr(process, "create_run_folder", create)
    with pytest.raises(UserError, match="already contains a run"):
        run_small(tmp_path / "run")
    assert (tmp_path / "run" / "config.toml").read_text() == "of another process"


@pytest.mark.parametrize(
    ("output", "error"),
    [
        (
            "step 1\nm1clip: photos: images but no captions\n\n  label some\n  sort them\n",
            "photos: ",
        ),
        (
            "training   400 steps of 8 images\n",  # killed
            "its process ended without a message, as when memory runs out; the last line of its"
            " output: training   400 steps",
        ),
        ("step 1\nTraceback (most recent call last):\n  File x\nKeyError: 'x'\n", "KeyError: 'x'"),
        ("", ""),
    ],
)
def test_error_of_a_background_run_is_found_above_its_notes(output: str, error: str) -> None:
    assert process.error_line(output.encode()).startswith(error)
    assert bool(process.error_line(output.encode())) == bool(error)


def test_note_of_the_label_page_is_no_content_of_a_run_folder(tmp_path: Path) -> None:
    """The page writes it before it starts the run."""
    (tmp_path / ABOUT_LABELS).write_text("{}", encoding="utf-8")
    (tmp_path / OUTPUT).touch()
    check_unused(tmp_path)
