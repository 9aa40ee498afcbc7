"""Fuzzing: readers given changed files answer with one line or with what is left of the data. By hand: fuzz.py."""

from __future__ import annotations

import math
import random
from pathlib import Path

import pytest
from fuzz import fuzz, fuzz_all
from fuzz_mutate import mutate
from fuzz_targets import Target, targets
from reliability_results import recorded

COUNT = 250


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz")


@pytest.fixture(scope="module")
def found(folder: Path) -> dict[str, Target]:
    return targets(folder)


NAMES = ["config", "run log", "manifest", "state", "tokenizers", "bpe-cut", "model config", "weights", "lock", "csv",
         "tsv", "jsonl", "json", "token", "tar", "images", "parquet"]  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", NAMES)
def test_changed_files(name: str, folder: Path, found: dict[str, Target]) -> None:
    if name not in found:
        pytest.skip(f"{name}: its library is not installed")
    target = found[name]
    for good in target.seeds:  # or else nothing but the first check would be tested
        (folder / target.file).write_bytes(good)
        target.read(folder)
    assert fuzz(name, target, folder, max(2, int(COUNT * min(1, target.share))), seed=0) == []


def test_every_target_is_named(found: dict[str, Target]) -> None:
    assert set(found) <= set(NAMES)


def test_a_failure_is_caught(folder: Path) -> None:
    def careless(place: Path) -> object:
        return (place / "x").read_bytes().decode("ascii")

    failures = fuzz("careless", Target("x", (b"abc" * 20,), careless), folder, 300, seed=0)
    assert failures
    assert "UnicodeDecodeError" in failures[0][0]


def test_the_same_seed_gives_the_same_inputs() -> None:
    made = [[mutate((b"a,b\n1,2\n",), draw) for _ in range(50)] for draw in (random.Random(5), random.Random(5))]
    assert made[0] == made[1]
    assert len(set(made[0])) > 40


PARTS, INPUTS = 14, 1_000_000


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("part", range(1, PARTS + 1))
def test_a_million_changed_files(part: int) -> None:
    with recorded("fuzzing", part, PARTS) as counts:
        done, failures = fuzz_all(math.ceil(INPUTS / PARTS), seed=part)
        assert failures == []
        counts |= {"inputs": sum(done.values()), "by reader": done}
