"""Item 13: several Macs.

Ranks exchange MPS tensors through host memory; forced here on CPU tensors.
"""

from typing import Any

import torch
from ranks import on_ranks
from small_run import figures_of, prepared, small_config

from m1clip.training.distributed import Ranks, needs_host_copy


def results_of(ranks: Ranks) -> list[Any]:
    if ranks.size > 1:
        ranks.needs_host_copy = lambda device_type: True
    inputs = prepared(small_config()).for_rank(ranks)
    step = inputs.make_step()
    return [step.run(inputs.training[number], number) for number in range(2)]


def test_two_processes_with_host_copies_train_like_one() -> None:
    assert needs_host_copy("mps")
    expected = figures_of(results_of(Ranks()))
    assert not torch.equal(expected[0], expected[1]), "measured, not typed in"
    for result in on_ranks(2, results_of):
        torch.testing.assert_close(figures_of(result), expected, rtol=1e-4, atol=1e-4)
