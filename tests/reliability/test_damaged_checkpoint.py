"""Promise 3: damage of any kind to the newest checkpoint is found by its hashes, and the one before is used."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from reliability_results import recorded

from m1clip.training.checkpoint import TrainState, load_latest, save
from m1clip.training.checkpoint_list import checkpoint_folder

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


def rot(folder: Path, times: int, seed: int) -> dict[str, int]:
    """Damage the newest of three in ways of chance; gives how often each kind was found."""
    draw = random.Random(seed)
    counts: dict[str, int] = {}
    original = folder / "original"
    for step in (10, 20, 30):
        groups = {"weights": {"a": torch.rand(50, generator=torch.Generator().manual_seed(step))},
                  "optimizer": {"m": torch.full((40,), float(step))}}  # fmt: skip
        save(original, TrainState(step=step, seconds=step / 7), groups, keep=3)
    for number in range(times):
        run = folder / "run"
        shutil.copytree(original, run)
        files = sorted(checkpoint_folder(run, 30).iterdir())
        damage = DAMAGES[number % len(DAMAGES)]
        file = draw.choice(files)
        damage(file, draw)
        if draw.random() < 0.2:
            (run / "checkpoints" / "step-000040.77.partial").mkdir()
        if draw.random() < 0.2:
            (run / "checkpoints" / "step-000030" / "stray.tmp").write_bytes(b"x")
        warnings: list[str] = []
        kept = load_latest(run, CPU, warnings.append)
        assert kept is not None
        same = (original / file.relative_to(run)).read_bytes() == (file.read_bytes() if file.exists() else None)
        # A manifest may be changed in its white space alone: then nothing is lost, and nothing needs to be said.
        expected = 30 if same or (kept[0].step == 30 and file.name == "manifest.json") else 20
        assert kept[0].step == expected, (damage.__name__, file.name)
        assert torch.equal(kept[1]["optimizer"]["m"], torch.full((40,), float(expected)))
        told = [line for line in warnings if "step-000030" in line]
        assert len(told) == (expected == 20), "one clear warning"
        counts[damage.__name__] = counts.get(damage.__name__, 0) + (expected == 20)
        shutil.rmtree(run)
    return counts


def test_damage_of_chance(tmp_path: Path) -> None:
    counts = rot(tmp_path, 120, seed=0)
    assert sum(counts.values()) > 100


PARTS = 4


@pytest.mark.long
@pytest.mark.parametrize("part", range(1, PARTS + 1))
def test_much_damage_of_chance(tmp_path: Path, part: int) -> None:
    with recorded("damaged checkpoint", part, PARTS) as counts:
        counts |= {"damaged": 1500, "found by kind": rot(tmp_path, 1500, seed=part)}
