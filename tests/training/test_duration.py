"""The length of a run: plans, corrections by the clock, and that `--minutes` keeps its promise on a busy computer."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from simulated_load import SimulatedTime, Slowdown, load_from, load_until, quiet, random_load
from small_run import (
    before_each_step,
    losses_of,
    resume_quietly,
    run_small,
    small_config,
    small_options,
    weights_sha256,
)

from m1clip import console, time_use
from m1clip.analyses import ANALYSES, RECORD
from m1clip.config import OptimConfig, load_config
from m1clip.errors import UserError
from m1clip.runlog import read_log
from m1clip.training import calibration, duration, logger, loop, training_data, validation
from m1clip.training import run as runs
from m1clip.training.compose import TrainStep
from m1clip.training.duration import (
    Costs,
    Pacer,
    Segment,
    StepPlan,
    TimeBudget,
    log_interval,
    planned_steps,
)
from m1clip.training.schedule import scheduled_lr_fraction
from m1clip.training.validation import encode as plain_encode


def plan_of(*parts: tuple[int, int], **settings: Any) -> StepPlan:
    return StepPlan(tuple(Segment(*part) for part in parts), **settings)


def test_plan_without_corrections_is_the_number_of_steps() -> None:
    plan = plan_of((0, 100), evaluations=5)
    assert [plan.position(step) for step in (0, 1, 57, 100)] == [0, 1, 57, 100]
    assert [step for step in range(1, 101) if plan.evaluates(step)] == [20, 40, 60, 80, 100]
    assert plan.evaluations_left(0) == 5
    assert plan.evaluations_left(20) == 4
    assert plan.evaluations_left(99) == 1
    assert plan.as_settings() == {"steps": 100, "plan": ()}


def test_corrected_plan_ends_the_schedule_with_its_last_step() -> None:
    plan = plan_of((0, 100), evaluations=5).corrected(20, 420)
    assert plan.total_steps == 420
    assert plan.position(20) == 20
    assert plan.position(220) == pytest.approx(60)
    assert plan.position(420) == pytest.approx(100)
    assert plan.as_settings() == {"steps": 420, "plan": ((0, 100), (20, 420))}
    evaluated = [step for step in range(1, 421) if plan.evaluates(step)]
    assert evaluated == [20, 120, 220, 320, 420], (
        "evenly spread over the schedule, not over the first estimate"
    )
    shorter = plan.corrected(220, 240)
    assert shorter.position(240) == pytest.approx(100)
    config = OptimConfig(warmup=0.05)
    assert scheduled_lr_fraction(config, shorter, 239) < 0.002
    assert scheduled_lr_fraction(config, shorter, 220) == pytest.approx(
        scheduled_lr_fraction(config, plan_of((0, 100)), 60)
    )


@given(
    st.lists(st.tuples(st.integers(1, 400), st.integers(1, 400)), max_size=6), st.integers(2, 300)
)
def test_positions_increase_to_the_end_for_any_corrections(
    parts: list[tuple[int, int]], total: int
) -> None:
    plan = plan_of((0, total))
    step = 0
    for wait, left in parts:
        step += wait
        if step >= plan.total_steps:
            break
        plan = plan.corrected(step, step + left)
    positions = [plan.position(step) for step in range(plan.total_steps + 1)]
    assert all(earlier < later for earlier, later in itertools.pairwise(positions))
    assert positions[-1] == pytest.approx(total)
    assert plan.evaluates(plan.total_steps)
    assert plan.logs(plan.total_steps)


def test_evaluations_at_a_fixed_number_of_steps_stay_there() -> None:
    plan = plan_of((0, 100), eval_every=30).corrected(30, 200)
    assert [step for step in range(1, 201) if plan.evaluates(step)] == [
        30,
        60,
        90,
        120,
        150,
        180,
        200,
    ]
    assert plan.evaluations_left(35) == 6
    end_only = plan_of((0, 50), eval_every=0)
    assert [step for step in range(1, 51) if end_only.evaluates(step)] == [50]


def test_short_runs_log_more_often() -> None:
    assert [log_interval(steps) for steps in (1, 60, 200, 4000)] == [1, 1, 4, 10]


def test_a_run_that_is_extended_on_its_last_planned_step_goes_on() -> None:
    plan = plan_of((0, 10), evaluations=2).corrected(10, 30)
    assert [step for step in range(1, 31) if plan.evaluates(step)] == [5, 10, 30]


@pytest.mark.parametrize("last", [1, 7])
def test_last_step_of_a_plan_is_evaluated_and_logged_although_the_run_went_on(last: int) -> None:
    """A repeated run does what the run did that did not know of its correction."""
    plan = plan_of((0, last), eval_every=0).corrected(last, 9 * last)
    assert [step for step in range(1, 9 * last + 1) if plan.evaluates(step)] == [last, 9 * last]
    assert plan.logs(last)


def test_schedule_of_a_single_step_is_done_after_it() -> None:
    assert [plan_of((0, 1)).fraction(step) for step in (0, 1)] == [0, 1]


@given(
    seconds=st.floats(20, 500),
    every=st.integers(1, 60),
    evaluation=st.floats(0, 4),
    closing=st.floats(0, 8),
)
def test_planned_steps_and_their_evaluations_fill_the_time(
    seconds: float, every: int, evaluation: float, closing: float
) -> None:
    """Steps of half a second, with an evaluation after every so many, and after the last one."""
    costs = Costs(evaluation, closing)
    total = planned_steps(plan_of((0, 1), eval_every=every), 0, seconds, 0.5, costs)
    evaluations = plan_of((0, total), eval_every=every).evaluations_left(0)
    used = 0.5 * (total + evaluations * evaluation + closing)
    assert used <= seconds + 1e-6
    # One step, or the last evaluation if it comes with a full interval, may be left over.
    assert seconds - used < 0.5 * (evaluation + 1 + evaluation / every) + 1e-6


def test_time_that_is_used_already_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimulatedTime()
    clock.install(monkeypatch, duration)
    budget = TimeBudget(60, used=8)
    clock.work(2.0)
    assert (budget.used, budget.remaining) == pytest.approx((10, 50))


STEP, EVALUATION = 0.25, 2.0  # seconds on a quiet computer


def simulate(
    seconds: float, slowdown: Slowdown, monkeypatch: pytest.MonkeyPatch
) -> tuple[float, StepPlan, int]:
    """(seconds that a run took, its plan, corrections); the run is its loop without a model."""
    clock = SimulatedTime(slowdown)
    clock.install(monkeypatch, duration)
    budget = TimeBudget(seconds)
    clock.work(3.0)  # reading the data
    began = clock.now
    clock.work(STEP * 3)
    step_seconds = (clock.now - began) / 3
    costs = Costs(EVALUATION / STEP, EVALUATION / STEP)
    total = planned_steps(plan_of((0, 1), evaluations=5), 0, budget.remaining, step_seconds, costs)
    plan = plan_of((0, total), evaluations=5)
    pacer = Pacer(budget, costs, 0)
    step = 0
    while step < plan.total_steps:
        clock.work(STEP)
        step += 1
        evaluates = plan.evaluates(step)
        if evaluates or plan.checks(step):
            pacer.record(step)
        if evaluates:
            began = clock.now
            clock.work(EVALUATION)
            pacer.evaluated(step, clock.now - began)
        if evaluates or plan.checks(step):
            plan = pacer.check(plan, step)
    clock.work(EVALUATION)  # the test split
    return clock.now, plan, len(plan.segments) - 1


def test_few_steps_are_explained_by_what_is_not_for_steps() -> None:
    warning = calibration.few_steps_warning(240.0, 90.0, 2, 11.3)
    assert warning.startswith("4 minutes are only 2 steps of 11.3 s each, too few to learn much:")
    assert "150 s were for preparing and checks before the first step" in warning
    assert "about 67 s are for evaluations and saving" in warning
    assert "run it when the computer is less busy, or use m1clip train with more" in warning


def test_a_quiet_run_is_hardly_corrected(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds, _, corrections = simulate(120, quiet, monkeypatch)
    assert seconds == pytest.approx(120, rel=0.02)
    assert corrections <= 1


@pytest.mark.parametrize("seed", range(40))
def test_minutes_end_in_time_under_a_load_that_begins_or_ends(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The load changes before the test split is encoded: what begins after the last step cannot be
    # answered.
    seconds, plan, _ = simulate(120, random_load(seed, 110), monkeypatch)
    assert seconds == pytest.approx(120, rel=0.05)
    assert scheduled_lr_fraction(OptimConfig(), plan, plan.total_steps - 1) < 0.02, (
        "the schedule ended"
    )


def test_flickering_load(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(1)
    levels = [draw.uniform(1, 3) for _ in range(1000)]
    seconds, plan, corrections = simulate(300, lambda now: levels[int(now / 2)], monkeypatch)
    assert seconds == pytest.approx(300, rel=0.05)
    assert corrections <= 60, "not at each of the 200 checks"
    assert scheduled_lr_fraction(OptimConfig(), plan, plan.total_steps - 1) < 0.02


def test_a_pause_of_the_machine_is_not_part_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lid is closed for an hour: the run has as much time as before."""
    clock = SimulatedTime()
    clock.install(monkeypatch, duration)
    pacer = Pacer(TimeBudget(100), Costs(), 0)
    plan = plan_of((0, 100))
    for step in range(1, 11):
        clock.work(1.0)
        pacer.record(step)
        plan = pacer.check(plan, step)
    clock.now += 3600
    clock.work(1.0)
    pacer.record(11)
    assert pacer.check(plan, 11) == plan
    assert pacer.budget.remaining == pytest.approx(89)


def test_a_faster_machine_does_not_exceed_the_steps_that_help(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Time that is left over is given back; a slower machine still gets fewer steps."""
    clock = SimulatedTime()
    clock.install(monkeypatch, duration)
    pacer = Pacer(TimeBudget(100), Costs(), 0, max_steps=40)
    plan = plan_of((0, 40))
    for step in range(1, 11):
        clock.work(1.0)
        pacer.record(step)
        plan = pacer.check(plan, step)
    assert plan.total_steps == 40
    for step in range(11, 31):
        clock.work(6.0)
        pacer.record(step)
        plan = pacer.check(plan, step)
        if step >= plan.total_steps:
            break
    assert plan.total_steps < 40
    assert clock.now <= 110


# A real run, whose steps and evaluations take time on a simulated clock.


@pytest.fixture
def on_clock(monkeypatch: pytest.MonkeyPatch) -> SimulatedTime:
    """A clock for which a step takes 0.4 s and an evaluation 0.8 s."""
    clock = SimulatedTime()
    clock.install(monkeypatch, duration, calibration, runs, loop, logger, validation, time_use)

    def slow_encode(*args: Any) -> Any:
        clock.work(0.8)
        return plain_encode(*args)

    before_each_step(lambda train_step, batch, step: clock.work(0.4), monkeypatch)
    for module in (validation, calibration, runs):
        monkeypatch.setattr(module, "encode", slow_encode)
    return clock


ONE_MINUTE = {
    "train.steps": None,
    "train.minutes": 1.0,
    "train.eval_every": None,
    "model.patch_size": 16,
    "model.vision_layers": 1,
    "model.text_layers": 1,
    "optim.optimizer": "adamw",
    "train.batch_size": 8,
    "data.captions_per_step": 1,
}


@pytest.mark.parametrize("load", [load_until(15, 3.0), load_from(30, 3.0)], ids=["ends", "begins"])
def test_run_under_load_ends_in_time_and_can_be_repeated(
    tmp_path: Path, on_clock: SimulatedTime, load: Slowdown
) -> None:
    on_clock.slowdown = load
    run_small(tmp_path / "run", ONE_MINUTE)
    assert on_clock.now == pytest.approx(60, rel=0.05)
    train = load_config(tmp_path / "run").train
    assert train.minutes is None
    assert len(train.plan) > 1, "the plan was corrected"
    records = list(read_log(tmp_path / "run"))
    corrections = [
        (record["step"], record["steps"]) for record in records if record["kind"] == "plan"
    ]
    assert list(train.plan[1:]) == corrections
    steps = [record for record in records if record["kind"] == "step"]
    assert steps[-1]["step"] == train.steps
    assert steps[-1]["lr"] < 0.05 * max(record["lr"] for record in steps)
    evaluations = [record["step"] for record in records if record["kind"] == "eval"]

    # From config.toml, without a clock, on another load.
    on_clock.slowdown = quiet
    runs.train_config(load_config(tmp_path / "run"), tmp_path / "again")
    assert losses_of(tmp_path / "again") == losses_of(tmp_path / "run")
    assert weights_sha256(tmp_path / "again") == weights_sha256(tmp_path / "run")
    again = [record["step"] for record in read_log(tmp_path / "again") if record["kind"] == "eval"]
    assert again == evaluations


def test_resumed_run_keeps_the_rest_of_its_time(
    tmp_path: Path, on_clock: SimulatedTime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run is interrupted in the middle and resumed: together both sessions take the promised time."""
    calls = {"left": 60}

    def interrupt(train_step: TrainStep, batch: Any, step: int) -> None:
        calls["left"] -= 1
        if calls["left"] == 0:
            raise KeyboardInterrupt

    before_each_step(interrupt, monkeypatch)
    on_clock.slowdown = load_until(20, 2.0)
    with pytest.raises(KeyboardInterrupt):
        run_small(tmp_path / "run", {**ONE_MINUTE, "train.save_every": 5})
    resume_quietly(tmp_path / "run")
    assert on_clock.now == pytest.approx(60, abs=6), (
        "at most what followed the last checkpoint is added"
    )
    plan = load_config(tmp_path / "run").train.plan
    runs.train_config(load_config(tmp_path / "run"), tmp_path / "again")
    assert weights_sha256(tmp_path / "again") == weights_sha256(tmp_path / "run")
    assert plan


@pytest.mark.parametrize(
    ("first", "usual", "steps"),
    [(6.0, 2.0, 20), (12.0, 2.0, 3)],
    ids=["first step is dropped", "first step is all that there is time for"],
)
def test_first_step_of_a_model_is_no_measure_of_the_others(
    tmp_path: Path,
    on_clock: SimulatedTime,
    monkeypatch: pytest.MonkeyPatch,
    first: float,
    usual: float,
    steps: int,
) -> None:
    """It is slower than the others, as the first pass of an evaluation is."""
    passes = itertools.count()

    def slow_at_first(*args: Any) -> Any:
        on_clock.work(0.05 if next(passes) else 2.0)
        return plain_encode(*args)

    before_each_step(
        lambda train_step, batch, step: on_clock.work(first if step == 0 else usual), monkeypatch
    )
    monkeypatch.setattr(calibration, "encode", slow_at_first)
    on_clock.install(monkeypatch, calibration)
    run_small(tmp_path / "run", ONE_MINUTE)
    start = next(record for record in read_log(tmp_path / "run") if record["kind"] == "start")
    assert start["steps"] == steps


def test_time_before_training_counts_for_a_command(
    tmp_path: Path, on_clock: SimulatedTime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Imports take seconds on a busy computer; the time of a notebook before the call does not count."""
    monkeypatch.setattr(time_use, "process_seconds", lambda: 25.0)
    for counts, seconds in ((True, 35), (False, 60)):
        if counts:
            time_use.count_process()
        began = on_clock.now
        runs.train(out=tmp_path / f"{seconds}", **small_options(ONE_MINUTE))
        assert on_clock.now - began == pytest.approx(seconds, rel=0.05)


def test_preparing_that_takes_all_the_time_still_trains(
    tmp_path: Path, on_clock: SimulatedTime, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = training_data.open_data

    def slow_open(*args: Any, **options: Any) -> Any:
        on_clock.work(90.0)
        return plain(*args, **options)

    monkeypatch.setattr(training_data, "open_data", slow_open)
    with console.capture() as captured:
        runs.train_config(small_config(ONE_MINUTE), tmp_path / "run")
    output = captured.getvalue()
    assert "time       1:00 in all: reading and caching the data, training, evaluation" in output
    assert "preparing the data has taken 1:30 of the 1:00 of --minutes" in output
    assert on_clock.now < 110


def test_plan_in_a_config_file_is_checked() -> None:
    valid = {"train.steps": 30, "train.plan": [[0, 10], [5, 30]]}
    assert small_config(valid).train.plan == ((0, 10), (5, 30))
    for plan in ([[1, 30]], [[0, 10], [0, 30]], [[0, 10], [5, 29]], [[0, 0], [5, 30]]):
        with pytest.raises(UserError, match="plan must begin at step 0"):
            small_config({**valid, "train.plan": plan})


def test_another_duration_replaces_the_plan(tmp_path: Path) -> None:
    from m1clip.config import make_config, to_toml

    (tmp_path / "config.toml").write_text(
        to_toml(small_config({"train.steps": 30, "train.plan": [[0, 10], [5, 30]]}))
    )
    assert make_config({}, tmp_path / "config.toml").train.plan
    changed = make_config({"steps": 7}, tmp_path / "config.toml").train
    assert (changed.steps, changed.plan) == (7, ())


def test_weights_do_not_depend_on_the_clock_without_minutes(
    tmp_path: Path, on_clock: SimulatedTime
) -> None:
    run_small(tmp_path / "quiet")
    on_clock.slowdown = load_from(on_clock.now + 3, 3.0)
    run_small(tmp_path / "busy")
    one = torch.tensor(losses_of(tmp_path / "quiet"))
    assert torch.equal(one, torch.tensor(losses_of(tmp_path / "busy")))


def test_purpose_of_a_step_is_known_before_it() -> None:
    plan = StepPlan((Segment(0, 40),), eval_every=15)
    purposes = {step: plan.purpose(step) for step in range(1, 41)}
    assert [step for step, purpose in purposes.items() if purpose.evaluates] == [15, 30, 40]
    assert all(purpose.logs and purpose.checks_clock for purpose in purposes.values()), (
        "short runs log each step"
    )
    long = StepPlan((Segment(0, 10_000),), eval_every=0)
    assert [step for step in range(1, 51) if long.purpose(step).logs] == [10, 20, 30, 40, 50]
    assert [step for step in range(1, 101) if long.purpose(step).checks_clock] == [50, 100]
    assert long.purpose(10_000)[:3] == (True, True, True)
    assert [analysis.name for analysis in long.purpose(10_000).analyses] == [
        *(entry.name for entry in ANALYSES.values() if entry.record_kind == RECORD)
    ]
    assert long.purpose(50).analyses == (), "nothing looks at the gradients of other steps"
