"""m1clip checkpoints: the list, and its verification."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from m1clip.cli.main import main
from m1clip.training.checkpoint import TrainState, save
from m1clip.training.checkpoint_list import MANIFEST, checkpoint_folder, sha256


@pytest.fixture
def run(tmp_path: Path) -> Path:
    for step in (10, 20, 30):
        groups = {"weights": {"a": torch.full((250,), float(step))}, "optimizer": {"m": torch.ones(1)}}
        save(tmp_path, TrainState(step=step), groups, keep=9)
    return tmp_path


def command(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(["checkpoints", *words])
    said = capsys.readouterr()
    return int(ended.value.code or 0), said.out, said.err


def rot(run: Path, step: int) -> None:
    file = checkpoint_folder(run, step) / "weights.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def test_checkpoints_are_listed(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = command(capsys, str(run))
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()] == ["step", "10", "20", "30", "3"]
    assert "3 checkpoints, " in out
    code, out, _ = command(capsys, str(run), "--json")
    rows: list[dict[str, Any]] = json.loads(out)
    assert [row["step"] for row in rows] == [10, 20, 30]
    assert all(row["bytes"] > 1000 and row["problem"] is None for row in rows)


def test_a_damaged_checkpoint_is_found(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = command(capsys, str(run), "--verify")
    assert (code, out.count("valid")) == (0, 3)
    rot(run, 20)
    code, out, _ = command(capsys, str(run), "--verify")
    assert (code, out.count("valid")) == (1, 2)
    assert "weights.safetensors is damaged" in out
    code, out, _ = command(capsys, str(run), "--verify", "--json")
    assert code == 1
    assert [bool(row["problem"]) for row in json.loads(out)] == [False, True, False]


def test_a_newer_format_is_refused(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, state = checkpoint_folder(run, 30) / MANIFEST, checkpoint_folder(run, 30) / "state.json"
    state.write_text(json.dumps({**json.loads(state.read_text()), "format": 99}))
    hashes = {**json.loads(path.read_text())["sha256"], "state.json": sha256(state)}
    path.write_text(json.dumps({"sha256": hashes}))
    code, _, error = command(capsys, str(run), "--verify")
    assert code == 2
    assert "written by a newer m1clip (format 99" in error


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, error = command(capsys, str(tmp_path / "nowhere"))
    assert code == 2
    assert "not a run" in error
