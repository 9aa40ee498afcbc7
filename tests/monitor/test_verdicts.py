"""Each verdict: records that earn it, and records that do not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from m1clip.monitor.diagnostics import verdicts
from m1clip.monitor.history import History

from .made_runs import BEGIN, evaluation, line, make_run, step

PEAKED = [evaluation(n, 0.5 if n == 10 else 0.4) for n in (10, 20, 30, 40)]
STEADY = [step(n) for n in range(1, 40)]


def said(
    folder: Path, records: list[dict[str, Any]], state: str = "running", after: float = 21.0, config: str = ""
) -> str:
    history = History(make_run(folder, records, config)).poll_all()
    return "\n".join(verdict.words for verdict in verdicts(history, BEGIN + after, state))


CASES: dict[str, tuple[list[dict[str, Any]], str]] = {
    "nan": ([*STEADY, step(40, loss="nan")], "the loss is not a number at step 40"),
    "data": ([step(n, data_fraction=0.31) for n in range(1, 20)], "data is holding the device back: 31% of each step"),
    "slow": (
        [step(n, step_seconds=0.5 if n < 20 else 0.7) for n in range(1, 80)],
        "throttling, or busy with something else: steps 1.4x slower than at the start",
    ),
    "hot": (
        [step(n, step_seconds=0.5 if n < 20 else 0.7, celsius=97.0) for n in range(1, 80)],
        "the machine is throttling at 97 °C: steps 1.4x slower",
    ),
    "chance": ([*STEADY, evaluation(39, 0.012, low=0.004)], "mean recall is within noise of chance: 1.2%, chance 1.0%"),
    "rising": ([step(n, loss=1.0 if n < 60 else 2.0) for n in range(1, 80)], "the loss is rising: 2 now, 1 before"),
    "stale": (
        [step(n, loss=4.0 if n < 30 else 3.9) for n in range(1, 60)] + PEAKED,
        "mean recall has not risen for 3 evaluations (best at step 10)",
    ),
    "by heart": (
        [step(n, loss=4.0 / n) for n in range(1, 60)] + PEAKED,
        "learns the training images by heart",
    ),
    "jump": ([*STEADY, step(40, grad_norm=25.0)], "the gradient norm jumped to 25, 25 times the usual"),
    "vanished": ([step(n, grad_norm=1e-9) for n in range(1, 20)], "the gradients have vanished"),
    "cold": ([step(n, temperature=0.01) for n in range(1, 20)], "the temperature is at its limit"),
    "full": ([step(n, memory_bytes=7_500_000_000) for n in range(1, 20)], "memory is nearly full: 7.5 GB of 8 GB"),
    "unreadable": ([*STEADY, *[line("skipped", where=name) for name in "ab"]], "2 images could not be read"),
    "learns": ([*STEADY, evaluation(39, 0.5)], "it learns: mean recall 50.0%, 50 times chance"),
    "falls": (STEADY, "the loss falls: "),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_it_is_said_where_it_is_true(tmp_path: Path, name: str) -> None:
    records, words = CASES[name]
    assert words in said(tmp_path, records)


def test_a_steady_run_hears_nothing_bad(tmp_path: Path) -> None:
    history = History(make_run(tmp_path, [*STEADY, evaluation(39, 0.5)])).poll_all()
    assert [verdict.level for verdict in verdicts(history, BEGIN + 21, "running")] == ["good"]


def test_nothing_is_said_of_nothing(tmp_path: Path) -> None:
    assert said(tmp_path / "empty", []) == ""
    assert said(tmp_path / "one", [step(1)]) == ""


def test_silence_is_noticed_in_a_run_that_lives(tmp_path: Path) -> None:
    assert "no news for 3:20; a line usually comes every 5 s" in said(tmp_path / "a", STEADY, after=20 + 199.5)
    assert "no news" not in said(tmp_path / "b", STEADY, state="died", after=500)
    assert "no news" not in said(tmp_path / "c", STEADY, after=30)


def test_the_worst_stands_first(tmp_path: Path) -> None:
    words = said(tmp_path, [*STEADY, evaluation(39, 0.5), step(40, loss="inf")])
    assert words.startswith("the loss is not a number")


def test_workers_are_advised_from_what_the_run_has(tmp_path: Path) -> None:
    config = "[data]\nworkers = 4\n"
    assert "--workers 8" in said(tmp_path, [step(n, data_fraction=0.5) for n in range(1, 9)], config=config)
