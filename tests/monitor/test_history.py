"""Reading a log that grows, has partial lines, is replaced or is very long."""

from __future__ import annotations

import json
import tracemalloc
from itertools import pairwise
from pathlib import Path

import pytest

from m1clip.monitor import history as module
from m1clip.monitor.history import History, figure_of

from .made_runs import append, evaluation, line, make_run, step


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
    assert len(history.poll().recent) == 2
    with (run / "run.jsonl").open("ab") as file:  # a partial line that a later session ended, and invalid ones
        file.write(b'{"v":1,"kind":"step","lo\n\xff\xfe\n[1,2]\n{"kind":7}\n{"v":99,"kind":"step"}\n')
    append(run, [step(3)])
    assert steps_of(history.poll()) == [1, 2, 3]
    assert history.invalid == 5


def test_replaced_log_is_read_from_its_beginning(tmp_path: Path) -> None:
    history = History(make_run(tmp_path, [step(1), step(2)])).poll()
    (tmp_path / "run.jsonl").unlink()
    make_run(tmp_path, [step(5)])
    assert (steps_of(history.poll()), history.generation) == ([5], 1)
    (tmp_path / "run.jsonl").unlink()
    assert (steps_of(history.poll()), history.generation) == ([], 2)


def test_long_log_is_subsampled_but_keeps_every_evaluation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(tmp_path, [], steps=3000)
    records = [[step(number)] + [evaluation(number, number / 3000)] * (number % 250 == 0) for number in range(1, 3001)]
    append(run, [record for each in records for record in each])
    for name, value in (("BLOCK", 100_000), ("PARSE_ALL", 50_000), ("EDGE", 3)):
        monkeypatch.setattr(module, name, value)
    parsed = []
    parse = module.parse
    monkeypatch.setattr(module, "parse", lambda text: parsed.append(len(text)) or parse(text))
    history = History(run).poll()
    assert sum(parsed) < (run / "run.jsonl").stat().st_size / 5
    assert (history.step, history.total, history.newest["step"]) == (3000, 3000, 3000)
    assert [row["step"] for row in history.evaluations] == list(range(250, 3001, 250))
    seen = steps_of(history)
    assert seen == sorted(seen)
    assert len(seen) > 100
    assert max(b - a for a, b in pairwise(seen)) < 100  # no large hole in the curve


def test_history_memory_is_bounded(tmp_path: Path) -> None:
    history = History(tmp_path)
    for number in range(1, 20_001):
        history.add({"kind": "step", "step": number})
        history.add({"kind": "event", "step": number, "event": "x"})
    assert len(steps_of(history)) <= 2001
    assert len(history.events) <= 200
    assert steps_of(history)[-1] == 20_000
    gaps = [b - a for a, b in pairwise(steps_of(history))]
    assert max(gaps[:-1]) == min(gaps[:-1])  # thinned evenly


def test_long_log_is_read_in_little_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(tmp_path, [])
    with (run / "run.jsonl").open("ab") as file:
        file.write(b"".join(json.dumps(step(1), separators=(",", ":")).encode() + b"\n" for _ in range(100)) * 80)
    append(run, [step(99)])
    monkeypatch.setattr(module, "BLOCK", 1 << 18)
    monkeypatch.setattr(module, "PARSE_ALL", 1 << 18)
    history = History(run)
    tracemalloc.start()
    assert history.poll().step == 99
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < (run / "run.jsonl").stat().st_size / 2


@pytest.mark.parametrize(
    "continued", [line("start", step=30, steps=100), line("event", step=50, event="rollback", back_to=30)]
)
def test_history_after_resume_drops_later_steps(tmp_path: Path, continued: dict[str, object]) -> None:
    run = make_run(tmp_path, [step(n) for n in range(10, 60, 10)] + [evaluation(50, 0.5)])
    history = History(run).poll()
    append(run, [continued, step(40, loss=9.0)])
    assert steps_of(history.poll()) == [10, 20, 30, 40]
    assert list(history.steps)[-1]["loss"] == 9.0
    assert (list(history.evaluations), history.generation, history.step) == ([], 1, 40)


def test_nan_loss_leaves_gap_in_curve(tmp_path: Path) -> None:
    history = History(make_run(tmp_path, [step(1), step(2, loss="nan"), line("step"), step(3)])).poll()
    assert [("loss" in row) for row in history.steps] == [True, False, True]


def test_evaluation_figure_by_name() -> None:
    row = evaluation(1, 0.4)
    assert figure_of(row, "mean_recall") == 0.4
    assert figure_of(row, "analysis/modality_gap") == 0.5
    assert figure_of(row, "analysis/difficulty/hard") == 0.6
    assert figure_of(row, "analysis/difficulty") is figure_of(row, "nothing") is None
