"""Ranks that are killed, stopped, hang or differ: one report, one checkpoint, and the same run afterwards."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from image_sets import make_set
from PIL import Image
from ranks import new_store, on_ranks, place, start_ranks
from small_run import (
    ROOT,
    TIMEOUT,
    Command,
    environment,
    finished_run,
    run_small,
    small_arguments,
    tensors_of,
)

from m1clip.data.pack import pack
from m1clip.data.sources import open_source
from m1clip.errors import UserError
from m1clip.runlog import parse
from m1clip.training import run as runs
from m1clip.training.distributed import Ranks

TINY: dict[str, Any] = {
    "model.patch_size": 16,
    "model.vision_layers": 1,
    "model.text_layers": 1,
    "train.steps": 12,
    "train.save_every": 2,
    "data.synthetic_images": 64,
}
STEPS, EPOCH = 12, 4


def saved(run: Path) -> set[int]:
    return {int(folder.name[5:]) for folder in (run / "checkpoints").glob("step-*[0-9]")}


def records(run: Path, kind: str) -> list[dict[str, Any]]:
    lines = (run / "run.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["kind"] == kind]


def reached(run: Path, step: int, session: int = 0) -> bool:
    """Whether the log has this step in a session; sessions before it may have it too."""
    lines = (run / "run.jsonl").read_bytes().splitlines() if (run / "run.jsonl").is_file() else []
    kinds = [(line["kind"], line.get("step")) for line in map(parse, lines) if line is not None]
    starts = [index for index, (kind, _) in enumerate(kinds) if kind == "start"]
    return len(starts) > session and ("step", step) in kinds[starts[session] :]


def assert_same_training(run: Path, undisturbed: Path) -> None:
    """The same batches in the same order: weights and moments are equal but for rounding."""
    actual, expected = tensors_of(run, STEPS), tensors_of(undisturbed, STEPS)
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(
            actual[name], value, rtol=1e-3, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}"
        )
    losses = {record["step"]: record["loss"] for record in records(run, "step")}
    for record in records(undisturbed, "step"):
        assert losses[record["step"]] == pytest.approx(record["loss"], rel=1e-3)
    tested = [records(folder, "end")[-1] for folder in (run, undisturbed)]
    assert tested[0].keys() == tested[1].keys()
    assert [tested[0][key] for key in tested[0] if key.endswith("/n")] == [
        tested[1][key] for key in tested[0] if key.endswith("/n")
    ], "each rank encodes a part of the test split"
    # Rounding may change a rank.
    assert tested[0]["mean_recall"] == pytest.approx(tested[1]["mean_recall"], abs=0.2)


def wait_all(commands: list[Command]) -> list[int]:
    return [command.wait() for command in commands]


@pytest.fixture(scope="module")
def undisturbed() -> Path:
    return finished_run(TINY)


def disturb(
    tmp_path: Path, undisturbed: Path, kills: int, draw: random.Random, shard: str = "off"
) -> None:
    """Kill a random rank again and again, each time with another number of ranks; then finish."""
    run = tmp_path / "run"
    words = ["train", *small_arguments({**TINY, "train.fsdp": shard}), "--out", str(run)]
    for number in range(kills):
        # Ranks wait before a step until the victim is killed: the test does not depend on how fast
        # they are.
        step, gate = draw.randint(1, 2) + max(saved(run), default=0), tmp_path / f"gate-{number}"
        ranks = start_ranks([words] * draw.choice([2, 3]), tmp_path, gate=(step, gate))
        victim = draw.choice(ranks)
        victim.wait_until(partial(reached, run, step, number))
        victim.send_signal(signal.SIGKILL, group=True)
        gate.touch()
        codes = wait_all(ranks)
        assert all(codes), "the others end too"
        errors = [error for command in ranks for error in command.read()[1].splitlines() if error]
        assert len(errors) <= 1, errors
        assert all(f"rank {ranks.index(victim)} " in error for error in errors)
    assert wait_all(start_ranks([words] * 2, tmp_path, gate=(-1, tmp_path / f"gate-{kills}"))) == [
        0,
        0,
    ]
    assert_same_training(run, undisturbed)
    samples_by_step = samples_seen(tmp_path, kills + 1)
    for first in range(0, STEPS, EPOCH):
        epoch = sorted(
            sample for step in range(first, first + EPOCH) for sample in samples_by_step[step]
        )
        assert epoch == list(range(TINY["data.synthetic_images"])), "every sample once"


def samples_seen(folder: Path, sessions: int) -> dict[int, list[int]]:
    """The samples of each step on all ranks, in the last session that has it: what it had before is undone."""
    samples_by_step: dict[int, list[int]] = {}
    for session in range(sessions):
        made: dict[int, list[int]] = {}
        for file in folder.glob(f"gate-{session}-seen-*"):
            for step, samples in map(json.loads, file.read_text().splitlines()):
                made.setdefault(step, []).extend(samples)
        samples_by_step |= made
    return samples_by_step


def test_killed_ranks_and_other_numbers_of_ranks_change_nothing(
    tmp_path: Path, undisturbed: Path
) -> None:
    disturb(tmp_path, undisturbed, 2, random.Random(0))


@pytest.mark.long("Kill ranks, continue on another number")
def test_many_kills(tmp_path: Path, undisturbed: Path, counts: dict[str, float]) -> None:
    for round_ in range(5):
        folder = tmp_path / str(round_)
        folder.mkdir()
        disturb(folder, undisturbed, 4, random.Random(round_), "on" if round_ % 2 else "off")
    counts["kills"] = 20


def test_sharded_run_is_killed_and_continues_on_one_rank(tmp_path: Path, undisturbed: Path) -> None:
    run, gate = tmp_path / "run", tmp_path / "gate"
    words = ["train", *small_arguments({**TINY, "train.fsdp": "on"}), "--out", str(run)]
    ranks = start_ranks([words] * 2, tmp_path, gate=(3, gate))
    ranks[0].wait_until(partial(reached, run, 3))
    ranks[1].send_signal(signal.SIGKILL, group=True)
    gate.touch()
    assert all(wait_all(ranks))
    assert ranks[0].read()[1].count("rank 1 ") == 1, ranks[0].read()[1]
    assert wait_all(start_ranks([["train", "--resume", str(run)]], tmp_path)) == [0]
    assert_same_training(run, undisturbed)


def test_streamed_shards_train_the_same_after_a_kill_in_the_middle_of_an_epoch(
    tmp_path: Path,
) -> None:
    pack(
        open_source(str(make_set(tmp_path / "set", train=150))), tmp_path / "shards", shard_size=11
    )
    changes = {
        **TINY,
        "data.source": str(tmp_path / "shards"),
        "data.cache": "stream",
        "data.workers": 1,
        "model.tokenizer": "char",
        "train.text_contrast": 0.2,  # with 0.5 and characters, gradients are so large that rounding errors grow fast
    }
    run_small(tmp_path / "one", {**changes, "data.workers": 0})
    run, gate = tmp_path / "run", tmp_path / "gate"
    words = ["train", *small_arguments(changes), "--out", str(run)]
    ranks = start_ranks([words] * 2, tmp_path, gate=(5, gate))
    ranks[0].wait_until(partial(reached, run, 5))
    ranks[1].send_signal(signal.SIGKILL, group=True)
    gate.touch()
    assert all(wait_all(ranks))
    assert wait_all(start_ranks([words] * 3, tmp_path)) == [0] * 3
    assert_same_training(run, tmp_path / "one")


def test_signal_to_one_rank_stops_all_with_one_checkpoint(
    tmp_path: Path, undisturbed: Path
) -> None:
    run = tmp_path / "run"
    words = ["train", *small_arguments({**TINY, "train.save_every": 100}), "--out", str(run)]
    gate = tmp_path / "gate"
    ranks = start_ranks([words] * 2, tmp_path, gate=(3, gate))
    ranks[1].wait_until(lambda: reached(run, 3))
    ranks[1].send_signal(signal.SIGTERM)
    gate.touch()
    assert wait_all(ranks) == [143, 143]
    assert len(saved(run)) == 1
    assert [record["event"] for record in records(run, "event")] == ["stopped by signal 15"]
    texts = [command.read() for command in ranks]
    assert f"continue with: m1clip train --resume {run}" in texts[0][0]
    assert texts[1] == ("", "")
    assert wait_all(start_ranks([["train", "--resume", str(run)]], tmp_path)) == [0]
    assert_same_training(run, undisturbed)


def test_hanging_rank_is_named(tmp_path: Path) -> None:
    run = tmp_path / "run"
    words = ["train", *small_arguments({**TINY, "train.steps": 10}), "--out", str(run)]
    ranks = start_ranks([words] * 2, tmp_path, hangs_at=5)
    assert ranks[0].wait() == 2
    error = ranks[0].read()[1]
    assert f"rank 1 (process {ranks[1].pid} on " in error
    assert "did not answer for 1 s" in error
    assert "rank 1 " in records(run, "event")[-1]["event"]


def test_other_settings_on_one_rank_are_refused(tmp_path: Path) -> None:
    ranks = start_ranks(
        [["train", *small_arguments({"train.batch_size": size})] for size in (16, 12)], tmp_path
    )
    assert wait_all(ranks) == [2, 2]
    assert f"rank 1 (process {ranks[1].pid} on " in ranks[0].read()[1]
    assert "--batch-size is 12, but 16 on rank 0" in ranks[0].read()[1]
    assert [command.read() for command in ranks[1:]] == [("", "")], "one report is enough"
    assert not (tmp_path / "runs").exists()


def test_other_data_on_one_rank_is_refused(tmp_path: Path) -> None:
    """Each rank finds `photos` in a folder of its own; captions differ."""
    for name, color in (("a", "red"), ("b", "blue")):
        photos = tmp_path / name / "photos"
        photos.mkdir(parents=True)
        for number in range(20):
            Image.new("RGB", (32, 32), (number * 12, 0, 0)).save(photos / f"{number}.png")
        rows = [f"{number}.png,shade {number} of {color}" for number in range(20)]
        (photos / "captions.csv").write_text("\n".join(["image,caption", *rows]))
    words = [
        "train",
        "photos",
        *small_arguments({"data.synthetic_images": None, "train.batch_size": 4}),
    ]
    ranks = start_ranks([words] * 2, tmp_path / "a", tmp_path / "b")
    assert wait_all(ranks) == [2, 2]
    error = ranks[0].read()[1].splitlines()[-1]
    assert f"rank 1 (process {ranks[1].pid} on " in error
    assert "the hash of their captions is " in error
    assert "Traceback" not in ranks[0].read()[1] + ranks[1].read()[1]


def test_missing_shard_on_one_rank_is_refused(tmp_path: Path) -> None:
    pack(
        open_source(str(make_set(tmp_path / "set", train=24))),
        tmp_path / "a" / "shards",
        shard_size=12,
    )
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    (tmp_path / "b" / "shards" / "train-000001.tar").unlink()
    changes = {
        "data.synthetic_images": None,
        "data.cache": "stream",
        "train.batch_size": 4,
        "model.tokenizer": "char",
    }
    words = ["train", "shards/train-{000000..000001}.tar", *small_arguments(changes)]
    ranks = start_ranks([words] * 2, tmp_path / "a", tmp_path / "b")
    assert wait_all(ranks) == [2, 2]
    error = ranks[0].read()[1].splitlines()[-1]
    assert f"rank 1 (process {ranks[1].pid} on " in error
    assert "shards/train-000001.tar: no such shard (1 of 2 are missing)" in error
    assert not ranks[1].read()[1], "one report is enough"


def differ(ranks: Ranks) -> str:
    """What a rank with another version of m1clip reports."""
    runs.__version__ = f"0.{ranks.rank}"
    try:
        runs.connect_same("cpu")
    except (UserError, SystemExit) as error:
        return str(error)
    return "no error"


def test_other_version_and_clock_on_one_rank_are_refused() -> None:
    report, other = on_ranks(2, differ)
    assert re.fullmatch(
        r"rank 1 \(process \d+ on .*\): the version of m1clip is 0\.1, but 0\.0 on rank 0; .*",
        report,
    )
    assert other == "2", "one report is enough"


def set_clock_back(seconds: float, *where: int) -> None:
    real = time.time
    time.time = lambda: real() - seconds
    place(*where)


def test_other_clock_on_one_rank_is_refused(tmp_path: Path) -> None:
    store = new_store()
    clocks = [partial(set_clock_back, 4000.0 * rank, rank, 2, store.port) for rank in range(2)]
    ranks = [Command("train", *small_arguments(), cwd=tmp_path, prepare=clock) for clock in clocks]
    assert wait_all(ranks) == [2, 2]
    error = ranks[0].read()[1]
    match = re.fullmatch(
        r"m1clip: rank 1 \(process (\d+) on .*\): its clock differs by -(\d+) s from .*; set it\n",
        error,
    )
    assert match is not None, error
    assert int(match[1]) == ranks[1].pid
    assert 3000 < int(match[2]) < 5000
    assert ranks[1].read() == ("", ""), "one report is enough"
    Ranks(0, 2, names=("", "")).check_clocks([1000.0, 1299.0])


def no_namespaces() -> str:
    """Why this machine cannot have two network namespaces; "" if it can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "needs root on Linux"
    name = f"probe-{os.getpid()}"
    tries = (["add", name], ["exec", name, "unshare", "--uts", "true"], ["del", name])
    try:
        for words in tries:
            subprocess.run(["ip", "netns", *words], check=True, capture_output=True, timeout=100)
    except (OSError, subprocess.SubprocessError) as error:
        return f"no network namespaces: {error}"
    return ""


def test_two_nodes_train_like_one_process(tmp_path: Path, undisturbed: Path) -> None:
    if reason := no_namespaces():
        pytest.skip(reason)
    run = tmp_path / "run"
    words = ["-m", "m1clip", "train", *small_arguments(TINY), "--out", str(run)]
    variables = environment() | {"PYTHON": sys.executable, "PYTHONPATH": ROOT}
    script = [f"{ROOT}/tools/two_nodes.sh", *words]
    done = subprocess.run(
        script,
        env=variables,
        cwd=tmp_path,
        check=False,
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stderr
    assert records(run, "start")[0]["ranks"] == 2
    assert_same_training(run, undisturbed)


@pytest.mark.long("Kill ranks, continue on another number")
def test_torchrun_restarts_and_continues(
    tmp_path: Path, undisturbed: Path, counts: dict[str, float]
) -> None:
    run = tmp_path / "run"
    torchrun = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "--max-restarts",
        "1",
        "--",
    ]
    words = [f"{ROOT}/tests/ranks.py", "train", *small_arguments(TINY), "--out", str(run)]
    gate = {"GATE_STEP": "4", "GATE_FILE": str(tmp_path / "gate")}
    with subprocess.Popen(
        [sys.executable, *torchrun, *words], cwd=tmp_path, env=environment() | gate
    ) as process:
        while process.poll() is None and not reached(run, 4):
            time.sleep(0.05)
        ranks = [
            child for child in psutil.Process(process.pid).children() if words[0] in child.cmdline()
        ]
        assert len(ranks) == 2
        ranks[1].kill()
        (tmp_path / "gate").touch()
        assert process.wait(TIMEOUT) == 0
    assert [record["step"] > 0 for record in records(run, "start")] == [False, True]
    assert_same_training(run, undisturbed)
    counts["restart by torchrun"] = 1
