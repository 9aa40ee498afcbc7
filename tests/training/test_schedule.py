"""The learning rate as a function of the step."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from m1clip.config import OptimConfig
from m1clip.errors import UserError
from m1clip.formatting import plural
from m1clip.training.duration import Segment, StepPlan
from m1clip.training.schedule import lr_fraction, scheduled_lr_fraction, warmup_steps


def test_lr_fraction_known_values() -> None:
    assert [lr_fraction(step, 4, 104) for step in range(4)] == pytest.approx([0.2, 0.4, 0.6, 0.8])
    assert lr_fraction(4, 4, 104) == 1.0
    assert lr_fraction(54, 4, 104) == pytest.approx(0.5)
    assert lr_fraction(29, 4, 104) == pytest.approx((1 + math.cos(math.pi / 4)) / 2)
    assert lr_fraction(104, 4, 104) == pytest.approx(0.0)
    assert lr_fraction(200, 4, 104) == pytest.approx(0.0), "after the end it does not rise again"
    assert lr_fraction(0, 0, 10) == 1.0
    assert lr_fraction(9, 8, 9) == pytest.approx(0.0)


@given(total=st.integers(1, 500), warmup=st.integers(0, 499))
def test_lr_rises_to_peak_then_decays(total: int, warmup: int) -> None:
    warmup = min(warmup, total - 1)
    rates = [lr_fraction(step, warmup, total) for step in range(total)]
    assert all(0 < value <= 1 for value in rates)
    assert rates[: warmup + 1] == sorted(rates[: warmup + 1])
    assert rates[warmup:] == sorted(rates[warmup:], reverse=True)
    assert rates[warmup] == 1.0


def test_warmup_as_fraction_or_number_of_steps() -> None:
    assert warmup_steps(0.05, 200) == 10
    assert warmup_steps(0.05, 3) == 0
    assert warmup_steps(7.0, 200) == 7
    assert warmup_steps(0.0, 1) == 0
    assert warmup_steps(1.0, 200) == 1, "a number of steps, not the whole run"


def test_learning_rate_follows_the_plan_of_the_run() -> None:
    plan = StepPlan((Segment(0, 104),))
    config = OptimConfig(warmup=4.0)
    fractions = [scheduled_lr_fraction(config, plan, step) for step in (0, 4, 54)]
    assert fractions == pytest.approx([0.2, 1.0, 0.5])


@pytest.mark.parametrize(("warmup", "total"), [(2000.0, 270), (10.0, 10), (0.99, 5), (1.0, 1)])
def test_warmup_longer_than_run_is_rejected(warmup: float, total: int) -> None:
    with pytest.raises(
        UserError, match=f"would never end: the run has {plural(total, 'step')};.*--warmup"
    ):
        warmup_steps(warmup, total)
