"""Reading a log that grows, has partial lines or is replaced."""

import json
from itertools import pairwise
from pathlib import Path

import pytest

from m1clip.analyses import ANALYSES
from m1clip.log_field import LogField
from m1clip.monitor.history import History, figure_of
from m1clip.runlog import FIELDS

from .made_runs import analysis, append, evaluation, line, make_run, step


def steps_of(history: History) -> list[int]:
    return [row["step"] for row in history.steps]


def test_only_complete_lines_are_read_and_each_once(tmp_path: Path) -> None:
    history = History(tmp_path).poll()
    assert (steps_of(history), history.step) == ([], 0)
    run = make_run(tmp_path, [step(1)])
    assert steps_of(history.poll()) == [1]
    text = json.dumps(step(2)).encode()
    with (run / "run.jsonl").open("ab", buffering=0) as file:
        file.write(text[:20])
        assert steps_of(history.poll()) == [1]
        file.write(text[20:] + b"\n")
    assert steps_of(history.poll()) == [1, 2]
    assert len(history.poll().latest.steps) == 2
    with (run / "run.jsonl").open(
        "ab"
    ) as file:  # a partial line that a later session ended, and invalid ones
        file.write(
            b'{"v":1,"kind":"step","lo\n\xff\xfe\n[1,2]\n{"kind":7}\n{"v":99,"kind":"step"}\n'
        )
    append(run, [step(3)])
    assert steps_of(history.poll()) == [1, 2, 3]
    assert history.log.invalid == 5


def test_replaced_log_is_read_from_its_beginning(tmp_path: Path) -> None:
    history = History(make_run(tmp_path, [step(1), step(2)])).poll()
    (tmp_path / "run.jsonl").unlink()
    make_run(tmp_path, [step(5)])
    assert (steps_of(history.poll()), history.generation) == ([5], 1)
    (tmp_path / "run.jsonl").unlink()
    assert (steps_of(history.poll()), history.generation) == ([], 2)


def test_history_memory_is_bounded(tmp_path: Path) -> None:
    history = History(tmp_path)
    for number in range(1, 20_001):
        history.add({"kind": "step", "step": number})
        history.add({"kind": "event", "step": number, "event": "x"})
    assert len(steps_of(history)) <= 2001
    assert len(history.latest.events) <= 200
    assert steps_of(history)[-1] == 20_000
    gaps = [b - a for a, b in pairwise(steps_of(history))]
    assert max(gaps[:-1]) == min(gaps[:-1])  # thinned evenly


@pytest.mark.parametrize(
    "continued",
    [line("start", step=30, steps=100), line("event", step=50, event="rollback", back_to=30)],
)
def test_history_after_resume_drops_later_steps(
    tmp_path: Path, continued: dict[str, object]
) -> None:
    run = make_run(tmp_path, [step(n) for n in range(10, 60, 10)] + [evaluation(50, 0.5)])
    history = History(run).poll()
    append(run, [continued, step(40, loss=9.0)])
    assert steps_of(history.poll()) == [10, 20, 30, 40]
    assert list(history.steps)[-1]["loss"] == 9.0
    assert (list(history.evaluations), history.generation, history.step) == ([], 1, 40)


def test_nan_loss_leaves_gap_in_curve(tmp_path: Path) -> None:
    history = History(
        make_run(tmp_path, [step(1), step(2, loss="nan"), line("step"), step(3)])
    ).poll()
    assert [("loss" in row) for row in history.steps] == [True, False, True]


def test_evaluation_figure_by_name() -> None:
    row = evaluation(1, 0.4)
    assert figure_of(row, "mean_recall") == 0.4
    assert figure_of(row, "analysis/modality_gap") == 0.5
    assert figure_of(row, "analysis/difficulty/hard") == 0.6
    assert figure_of(row, "analysis/difficulty") is figure_of(row, "nothing") is None


def test_new_entry_in_table_of_fields_has_a_curve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, kind in (("sharpness", "step"), ("analysis/rank", "eval")):
        monkeypatch.setitem(FIELDS, name, LogField(name=name, schema=None, curve=kind, title=name))
    records = [step(1, sharpness=2.0), step(2), step(3, sharpness="nan"), step(4, sharpness=3)]
    history = History(
        make_run(tmp_path, [*records, evaluation(4, 0.5, analysis={"rank": 7})])
    ).poll()
    assert history.curve("sharpness", 10.0) == [(1, 20.0), (4, 30.0)]
    assert history.curve("analysis/rank", 1.0) == [(4, 7.0)]


def test_best_of_many_evaluations_is_exact(tmp_path: Path) -> None:
    """2,000 evaluations are downsampled.

    The best is not, whichever it is, and also after a rollback.
    """
    history = History(tmp_path)
    for number in range(1, 2001):
        recall = {1333: 0.9, 1777: 0.95}.get(number, 0.2 + number / 10_000)
        history.add(evaluation(number, recall))
    assert len(list(history.evaluations)) <= 502
    assert history.best()["step"] == 1777
    assert history.best()["mean_recall/high"] == 1.0, "with all its values"
    assert max(value for _, value in history.curve("mean_recall", 1.0)) == 0.95
    steps = [row["step"] for row in history.evaluations]
    assert steps == sorted(set(steps))
    assert history.evaluations.count_after(1777) == 223
    history.add(line("event", step=1700, event="rolled back", back_to=1700))
    assert history.best()["step"] == 1333
    assert history.evaluations.count_after(1333) == 367
    history.add(line("event", step=1000, event="rolled back", back_to=1000))
    assert (history.best()["step"], history.evaluations.count_after(1000)) == (1000, 0)
    history.add(evaluation(1001, 0.1))
    assert history.best()["step"] == 1000
    # Further back than the rows that are kept: the score stays exact.
    history.add(line("event", step=100, event="rolled back", back_to=100))
    assert (history.best()["step"], history.best()["mean_recall"]) == (100, 0.2 + 0.01)


def test_largest_and_smallest_gradient_of_a_layer_are_exact(tmp_path: Path) -> None:
    history = History(tmp_path)
    for number in range(1, 2001):
        history.add(analysis(number, scale=7.0 if number == 1501 else 1.0))
    extremes = history.layer_extremes
    assert extremes.highest("layer_grad_norms", "scale") == (1501, 7.0)
    assert extremes.lowest("layer_grad_norms", "scale") == (1, 1.0)
    assert extremes.highest("layer_grad_norms", "image/head")[0] == 1
    assert extremes.lowest("layer_grad_norms", "no such layer") is None
    values = history.analysis(ANALYSES["layer_grad_norms"])
    assert (values[0][0], values[-1][0]) == (1, 2000)
    assert len(values) <= 501
    history.add(line("event", step=1500, event="rolled back", back_to=1500))
    assert extremes.highest("layer_grad_norms", "scale") == (1, 1.0)
    assert history.analysis(ANALYSES["layer_grad_norms"])[-1][0] <= 1500
