"""Promise 3: any damage to the newest checkpoint is detected by its hashes, and the one before is used."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from m1clip import console
from m1clip.training.checkpoint import TrainState, checkpoint_folder, load_latest, save

CPU = torch.device("cpu")
Damage = Callable[[Path, random.Random], None]


def truncated(file: Path, draw: random.Random) -> None:
    data = file.read_bytes()
    file.write_bytes(data[: draw.randrange(len(data))])


def bit_flipped(file: Path, draw: random.Random) -> None:
    data = bytearray(file.read_bytes())
    data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    file.write_bytes(data)


def zero_filled(file: Path, draw: random.Random) -> None:
    """A page of zeros at the end: what some file systems leave after a power cut."""
    data = file.read_bytes()
    cut = draw.randrange(len(data.rstrip(b"\0")))
    file.write_bytes(data[:cut] + bytes(len(data) - cut))


def longer(file: Path, draw: random.Random) -> None:
    file.write_bytes(file.read_bytes() + draw.randbytes(draw.randrange(1, 50)))


def of_another_step(file: Path, draw: random.Random) -> None:
    shutil.copyfile(checkpoint_folder(file.parents[2], 10) / file.name, file)


def gone(file: Path, draw: random.Random) -> None:
    file.unlink()


DAMAGES: tuple[Damage, ...] = (truncated, bit_flipped, zero_filled, longer, of_another_step, gone)


def damage_checkpoints(folder: Path, times: int, seed: int) -> int:
    """Damage the newest of three checkpoints in random ways.

    Returns how often the one before was used.
    """
    draw = random.Random(seed)
    damaged = 0
    original = folder / "original"
    for step in (10, 20, 30):
        weights = torch.rand(50, generator=torch.Generator().manual_seed(step))
        groups = {"weights": {"a": weights}, "optimizer": {"m": torch.full((40,), float(step))}}
        save(original, TrainState(step=step, seconds=step / 7), groups, keep=3)
    for number in range(times):
        run = folder / "run"
        shutil.copytree(original, run)
        damage = DAMAGES[number % len(DAMAGES)]
        file = draw.choice(sorted(checkpoint_folder(run, 30).iterdir()))
        damage(file, draw)
        if draw.random() < 0.2:
            (run / "checkpoints" / "step-000040.77.partial").mkdir()
        if draw.random() < 0.2:
            (run / "checkpoints" / "step-000030" / "stray.tmp").write_bytes(b"x")
        with console.record_warnings() as warnings:
            loaded = load_latest(run, CPU)
        assert loaded is not None
        same = (original / file.relative_to(run)).read_bytes() == (
            file.read_bytes() if file.exists() else None
        )
        # If only white space of a manifest changed, nothing is lost and there is nothing to report.
        expected = 30 if same or (loaded[0].step == 30 and file.name == "manifest.json") else 20
        assert loaded[0].step == expected, (damage.__name__, file.name)
        assert torch.equal(loaded[1]["optimizer"]["m"], torch.full((40,), float(expected)))
        assert sum("step-000030" in line for line in warnings) == (expected == 20), (
            "one clear warning"
        )
        damaged += expected == 20
        shutil.rmtree(run)
    return damaged


def test_random_damage_is_found(tmp_path: Path) -> None:
    assert damage_checkpoints(tmp_path, 120, seed=0) > 100


@pytest.mark.long("Damaged checkpoint")
@pytest.mark.parametrize("seed", range(4))
def test_much_random_damage_is_found(tmp_path: Path, seed: int, counts: dict[str, float]) -> None:
    assert damage_checkpoints(tmp_path, 1500, seed) > 1400
    counts[f"damaged checkpoints of {len(DAMAGES)} kinds"] = 1500
