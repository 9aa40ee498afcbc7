"""The ledger of live bytes: on a model small enough to count by hand, on real and on fake tensors."""

from __future__ import annotations

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from m1clip.training.memory import COMPONENTS, Ledger


def watched(rows: int) -> Ledger:
    torch.manual_seed(0)
    layer = nn.Linear(100, 100, bias=False)  # 40,000 bytes
    ledger = Ledger(layer)
    x = torch.ones(rows, 100)
    ledger.claim("batch", [x])
    with ledger:
        layer(x).relu().sum().backward()
    ledger.close()
    return ledger


def test_the_peak_by_hand() -> None:
    peak = watched(1000).peak
    assert set(peak) == set(COMPONENTS)
    assert (peak["weights"], peak["batch"]) == (40_000, 400_000)
    # The product and the rectified product live together; the gradient of the weight comes when one is gone.
    assert 800_000 <= peak["activations"] + peak["temporaries"] <= 1_250_000


def test_a_small_batch_peaks_later_with_the_gradient() -> None:
    peak = watched(1).peak
    assert peak["gradients"] == 40_000
    assert peak["weights"] == 40_000


def test_what_is_freed_is_forgotten() -> None:
    ledger = watched(1000)
    ledger_now = ledger._now
    assert ledger_now["activations"] == ledger_now["temporaries"] == 0


def test_fake_tensors_give_the_same_count() -> None:
    real = watched(64).peak
    with FakeTensorMode():
        fake = watched(64).peak
    assert fake == real


def test_it_leaves_no_hooks_behind() -> None:
    layer = nn.Linear(4, 4)
    ledger = Ledger(layer)
    ledger.close()
    layer(torch.ones(1, 4)).sum().backward()
    assert ledger._now["gradients"] == 0


def test_other_devices_are_not_counted() -> None:
    layer = nn.Linear(4, 4, device="meta")
    ledger = Ledger(layer)
    with ledger:
        torch.ones(1000)
        torch.ones(10, device="meta")
    assert ledger.peak["activations"] == 40
