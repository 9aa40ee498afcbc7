"""Each diagnostic: records that cause it, and records that do not."""

from pathlib import Path
from typing import Any

import pytest

from m1clip.monitor.diagnostics import diagnose
from m1clip.monitor.history import History

from .made_runs import BEGIN, analysis, evaluation, line, make_run, step

PEAKED = [evaluation(n, 0.5 if n == 10 else 0.4) for n in (10, 20, 30, 40)]
STEADY = [step(n) for n in range(1, 40)]


def messages(
    folder: Path,
    records: list[dict[str, Any]],
    state: str = "running",
    after: float = 21.0,
    config: str = "",
) -> str:
    history = History(make_run(folder, records, config)).poll()
    return "\n".join(diagnosis.message for diagnosis in diagnose(history, BEGIN + after, state))


CASES: dict[str, tuple[list[dict[str, Any]], str]] = {
    "nan": ([*STEADY, step(40, loss="nan")], "the loss is NaN or infinite at step 40"),
    "data": (
        [step(n, data_fraction=0.31) for n in range(1, 20)],
        "loading data takes 31% of each step",
    ),
    "slow": (
        [step(n, step_seconds=0.5 if n < 20 else 0.7) for n in range(1, 80)],
        "steps are 1.4x slower than at the start: the machine is throttling, or busy",
    ),
    "hot": (
        [step(n, step_seconds=0.5 if n < 20 else 0.7, celsius=97.0) for n in range(1, 80)],
        "the machine is throttling at 97 °C",
    ),
    "straggler": (
        [step(n, rank_seconds=[0.4, 0.39, 0.56]) for n in range(1, 20)],
        "rank 2 is 1.4x slower than the others, which wait for it",
    ),
    "chance": (
        [*STEADY, evaluation(39, 0.012, low=0.004)],
        "mean recall is within noise of chance: 1.2%, chance 1.0%",
    ),
    "rising": (
        [step(n, loss=1.0 if n < 60 else 2.0) for n in range(1, 80)],
        "the loss is rising: 2 now, 1 before",
    ),
    "stale": (
        [step(n, loss=4.0 if n < 30 else 3.9) for n in range(1, 60)] + PEAKED,
        "mean recall has not improved for 3 evaluations (best at step 10)",
    ),
    "overfit": (
        [step(n, loss=4.0 / n) for n in range(1, 60)] + PEAKED,
        "the model overfits the training images",
    ),
    "full": (
        [step(n, memory_bytes=7_500_000_000) for n in range(1, 20)],
        "memory is nearly full: 7.5 GB of 8 GB",
    ),
    "unreadable": (
        [*STEADY, *[line("skipped", where=name) for name in "ab"]],
        "2 images could not be read",
    ),
    "learns": (
        [*STEADY, evaluation(39, 0.5)],
        "the model is learning: mean recall 50.0%, 50 times chance",
    ),
    "vanishing": (
        [*STEADY, analysis(20), analysis(39, **{"image/block 1": 1e-7})],
        "the gradients of the image tower vanish towards its input: 1e-7 in block 1",
    ),
    "rising below 0": (
        [step(n, loss=-2.0 if n < 60 else -1.0) for n in range(1, 80)],
        "the loss is rising: -1 now, -2 before",
    ),
    "falls below 0": (
        [step(n, loss=1.0 - n / 10) for n in range(1, 40)],
        "the loss is falling: 0.8 at first, -2.8 now",
    ),
    "overfit below 0": (
        [step(n, loss=-1.0 - n / 10) for n in range(1, 60)] + PEAKED,
        "the model overfits the training images",
    ),
    "falls": (STEADY, "the loss is falling: "),
}


@pytest.mark.parametrize("name", CASES)
def test_diagnostic_conditions(tmp_path: Path, name: str) -> None:
    records, words = CASES[name]
    assert words in messages(tmp_path, records)


def test_steady_run_has_only_good_diagnostics(tmp_path: Path) -> None:
    history = History(make_run(tmp_path, [*STEADY, evaluation(39, 0.5)])).poll()
    assert [diagnosis.level for diagnosis in diagnose(history, BEGIN + 21, "running")] == ["good"]


def test_empty_log_has_no_diagnostics(tmp_path: Path) -> None:
    assert messages(tmp_path / "empty", []) == ""
    assert messages(tmp_path / "one", [step(1)]) == ""


def test_stalled_run_is_reported(tmp_path: Path) -> None:
    assert "nothing logged for 3:20; usually every 0.5 s" in messages(
        tmp_path / "a", STEADY, after=20 + 199.5
    )
    assert "nothing logged" not in messages(tmp_path / "b", STEADY, state="crashed", after=500)
    assert "nothing logged" not in messages(tmp_path / "c", STEADY, after=30)


def test_diagnostics_are_sorted_by_severity(tmp_path: Path) -> None:
    words = messages(tmp_path, [*STEADY, evaluation(39, 0.5), step(40, loss="inf")])
    assert words.startswith("the loss is NaN or infinite")


def test_data_bound_run_is_advised_more_workers(tmp_path: Path) -> None:
    config = "[data]\nworkers = 4\n"
    assert "--workers 8" in messages(
        tmp_path, [step(n, data_fraction=0.5) for n in range(1, 9)], config=config
    )
