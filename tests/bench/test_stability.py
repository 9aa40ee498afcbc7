"""Loss spikes and skipped updates."""

import math

from m1clip.bench.stability import count_spikes, summarize

STEADY = [2.0 + 0.01 * (step % 3) for step in range(30)]


def test_steady_and_falling_losses_have_no_spike() -> None:
    assert count_spikes(STEADY) == 0
    assert count_spikes([3.0 * 0.9**step for step in range(50)]) == 0


def test_spikes_and_losses_that_are_not_finite_are_counted() -> None:
    losses = list(STEADY)
    losses[12] = 9.0
    losses[20] = 7.0
    assert count_spikes(losses) == 2
    losses[25] = math.nan
    assert count_spikes(losses) == 3


def test_updates_without_a_finite_gradient_were_skipped() -> None:
    stability = summarize("tiny", 8, [2.0, 1.0, 0.5], [math.inf, 1.0, math.nan])
    assert (stability.skipped, stability.steps, stability.spikes) == (2, 3, 0)
    assert str(stability) == "0 spikes and 2 skipped updates in 3 steps (loss 2 to 0.5)"
