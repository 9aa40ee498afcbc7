"""The table by epoch and the phases of the loss, on logs with known values."""

import math
import random
from typing import Any

import pytest

from m1clip.epochs import MAX_EPOCH_ROWS, Point, RunTables, drop_rolled_back, find_phases, fit_line


def step(number: int, steps_per_epoch: int = 4, **values: Any) -> dict[str, Any]:
    epoch = round(number / steps_per_epoch, 4)
    usual = {"loss": 3.0 - epoch, "epoch": epoch, "elapsed": 0.5 * number}
    accuracy = {"batch_accuracy": 0.1 * epoch, "batch_chance": 1 / 12}
    return {"kind": "step", "step": number, **usual, **accuracy, **values}


def evaluation(number: int, recall: float) -> dict[str, Any]:
    analysis = {"held_out_batch_accuracy": {"val": {"value": recall / 2}}}
    interval = {"mean_recall/low": recall - 0.1, "mean_recall/high": recall + 0.1}
    record = {"kind": "eval", "step": number, "split": "val", "mean_recall": recall}
    return {**record, **interval, "analysis": analysis}


def test_rows_are_the_means_of_their_epoch() -> None:
    tables = RunTables(
        [step(n) for n in range(1, 11)],
        [evaluation(4, 0.2), evaluation(7, 0.3), evaluation(8, 0.4)],
    )
    first, second, part = tables.epochs()
    assert (first.first, first.last, second.last, part.last) == (1, 1.0, 2.0, 2.5)
    assert first.loss == pytest.approx(3.0 - (0.25 + 0.5 + 0.75 + 1) / 4)
    assert second.accuracy == pytest.approx(0.1 * (1.25 + 1.5 + 1.75 + 2) / 4)
    assert first.chance == pytest.approx(1 / 12)
    assert (first.recall, first.val_accuracy) == (0.2, 0.1)
    assert (second.recall, second.low, second.high) == (0.4, pytest.approx(0.3), 0.5)
    assert part.recall is None
    assert [row.seconds for row in (first, second, part)] == pytest.approx([2.0, 2.0, 1.0])
    assert [cells[0] for cells in tables.epoch_cells] == ["1", "2", "2.5"]
    assert tables.epoch_cells[2][-3:] == ["-", "-", "1.0"]
    assert "mean recall" in tables.epoch_head


@pytest.mark.parametrize("every", [1, 10, 100])
def test_long_run_has_few_rows_that_cover_all_epochs(every: int) -> None:
    """Also with several epochs for each line of the log, and with epochs that are rounded in it."""
    lines = [step(n, steps_per_epoch=3) for n in range(every, 1001, every)]
    rows = RunTables(lines, []).epochs()
    assert 2 < len(rows) <= MAX_EPOCH_ROWS
    assert rows[0].first == 1
    assert all(math.floor(one.last) + 1 == two.first for one, two in zip(rows, rows[1:]))  # noqa: RUF007, B905
    assert sum(row.seconds or 0.0 for row in rows) == pytest.approx(500.0)


def test_values_that_are_missing_or_not_finite_are_left_out() -> None:
    tables = RunTables([{"kind": "step", "step": 1, "loss": "nan", "epoch": 0.5}], [])
    (row,) = tables.epochs()
    assert (row.loss, row.accuracy, row.recall, row.seconds) == (None, None, None, None)
    assert set(row.cells[1:]) == {"-"}
    assert RunTables([], []).epochs() == RunTables([], []).phases() == []
    assert tables.phases() == []


def test_steps_that_were_rolled_back_are_not_counted() -> None:
    start = {"kind": "start", "step": 0}
    back = {"kind": "event", "step": 6, "back_to": 4}
    records = [start, *map(step, range(1, 7)), evaluation(6, 0.9), back, step(5, loss=9.0)]
    steps, evaluations = drop_rolled_back(records)
    assert [row["step"] for row in steps] == [1, 2, 3, 4, 5]
    assert evaluations == []
    assert steps[-1]["loss"] == 9.0


def noisy(points: list[Point], noise: float = 0.02) -> list[Point]:
    random.seed(0)
    return [(step, loss + random.gauss(0, noise)) for step, loss in points]


def test_fall_and_plateau_are_two_phases() -> None:
    curve = [(n, max(1.0, 3.0 - n / 100)) for n in range(0, 500, 5)]
    fall, plateau = find_phases(noisy(curve), steps_per_epoch=100)
    assert fall.last_step == pytest.approx(200, abs=15)
    assert fall.low <= -1.0 <= fall.high
    assert fall.trend == "falling fast"
    assert plateau.trend == "plateau"
    assert plateau.last_epoch == pytest.approx(4.95)
    assert (fall.first_loss, plateau.last_loss) == pytest.approx((3.0, 1.0), abs=0.05)


def test_fast_fall_slow_fall_and_rise_are_named() -> None:
    curve = [(n, 5 - n / 20) for n in range(50)]
    curve += [(n, 2.5 - (n - 50) / 200) for n in range(50, 150)]
    curve += [(n, 2.0 + (n - 150) / 50) for n in range(150, 200)]
    trends = [phase.trend for phase in find_phases(noisy(curve))]
    assert trends == ["falling fast", "falling", "rising"]


@pytest.mark.parametrize(("fraction", "trend"), [(0.4, "falling"), (0.6, "falling fast")])
def test_fall_of_less_than_half_the_steepest_slope_is_not_fast(fraction: float, trend: str) -> None:
    curve = [(n, 9 - n / 20) for n in range(60)]
    curve += [(n, 6 - fraction * (n - 60) / 20) for n in range(60, 140)]
    assert [phase.trend for phase in find_phases(noisy(curve, 0.005))] == ["falling fast", trend]


def test_slope_has_a_sign_unless_it_is_zero() -> None:
    constant = [step(number, loss=2.0) for number in range(1, 30)]
    rising = [step(number, loss=2.0 + number / 10) for number in range(1, 30)]
    (flat,) = RunTables(constant, []).phase_cells
    (up,) = RunTables(rising, []).phase_cells
    assert [cell for cell in flat if cell.startswith("+")] == []
    assert any(cell.startswith("+0.4") for cell in up), "0.1 in each of four steps"


def test_straight_line_and_noise_are_one_phase() -> None:
    (line,) = find_phases(noisy([(n, 3 - n / 100) for n in range(100)]))
    assert line.trend == "falling", "fast only in comparison with another phase"
    assert line.slope == pytest.approx(-10.0, rel=0.1), "per 1,000 steps without epochs"
    (flat,) = find_phases(noisy([(n, 2.0) for n in range(100)]))
    assert flat.trend == "plateau"
    assert flat.low < 0 < flat.high
    (constant,) = find_phases([(n, 2.0) for n in range(100)])
    assert (constant.slope, constant.trend) == (0.0, "plateau")


def test_few_and_many_points() -> None:
    (two,) = find_phases([(1, 3.0), (2, 2.0)])
    assert (two.first_loss, two.last_loss) == pytest.approx((3.0, 2.0))
    assert (two.low, two.high) == (None, None), "any two points are on a line"
    assert "not measured: 2 points" in two.cells
    (three,) = find_phases([(1, 3.0), (2, 2.0), (3, 1.1)])
    assert "not measured: 3 points" in three.cells
    (four,) = find_phases([(1, 3.0), (2, 2.0), (3, 1.1), (4, 0.0)])
    assert four.low is not None
    assert four.high is not None
    assert four.low < four.slope < four.high
    many = find_phases(noisy([(n, max(1.0, 3.0 - n / 10_000)) for n in range(50_000)]))
    assert [phase.trend for phase in many] == ["falling fast", "plateau"]
    assert (many[0].first_step, many[-1].last_step) == (0, 49_999)


def test_line_has_the_interval_of_least_squares() -> None:
    line = fit_line([(0, 0.0), (1, 1.0), (2, 1.0), (3, 2.0)])
    assert line.slope == pytest.approx(0.6)
    assert line.margin == pytest.approx(1.959964 * math.sqrt(0.2 / 2 / 5))


def test_falling_loss_beside_recall_at_chance_has_a_note() -> None:
    steps = [step(number, loss=4.0 - number / 10) for number in range(1, 20)]
    metrics = {"mean_recall/low": 0.1, "mean_recall/high": 0.5, "mean_recall/chance": 0.2}
    tables = RunTables(steps, [evaluation(19, 0.3) | metrics])
    assert "mean recall on validation is within noise of chance" in tables.phase_note
    assert RunTables([], [evaluation(19, 0.3) | metrics]).phase_note == ""
    above = metrics | {"mean_recall/low": 0.25}
    assert RunTables(steps, [evaluation(19, 0.3) | above]).phase_note == ""
    assert RunTables(steps, []).phase_note == ""
