"""Attention: both implementations against a plain loop in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from m1clip.hardware.device import Device
from m1clip.hardware.facts import read_facts
from m1clip.hardware.timing import Timing
from m1clip.model.layers import AttentionKind, attention
from m1clip.training import autotune as choose

KINDS: tuple[AttentionKind, ...] = ("bmm", "sdpa")


def reference(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """Softmax of q k / sqrt(dim) over what may be seen, one query at a time."""
    length, dim = q.shape[2:]
    rows = []
    for i in range(length):
        seen = i + 1 if causal else length
        scores = torch.stack([(q[:, :, i] * k[:, :, j]).sum(-1) for j in range(seen)], -1) / dim**0.5
        weights = scores.exp() / scores.exp().sum(-1, keepdim=True)
        rows.append(sum(weights[..., j, None] * v[:, :, j] for j in range(seen)))
    return torch.stack(rows, dim=2)  # type: ignore[arg-type]


def inputs(dtype: torch.dtype) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(2, 3, 7, 5, dtype=torch.float64).to(dtype).requires_grad_() for _ in range(3)]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 2e-6)])
def test_forward_and_gradient_agree_with_the_reference(
    kind: AttentionKind, causal: bool, dtype: torch.dtype, tolerance: float
) -> None:
    q, k, v = inputs(dtype)
    exact = [t.detach().double().requires_grad_() for t in (q, k, v)]
    cotangent = torch.randn(q.shape, dtype=torch.float64)
    ours, theirs = attention(q, k, v, causal, kind), reference(*exact, causal)
    torch.testing.assert_close(ours.double(), theirs, atol=tolerance, rtol=tolerance)
    ours_grad = torch.autograd.grad(ours, (q, k, v), cotangent.to(dtype))
    for one, other in zip(ours_grad, torch.autograd.grad(theirs, exact, cotangent), strict=True):
        torch.testing.assert_close(one.double(), other, atol=10 * tolerance, rtol=10 * tolerance)


@pytest.mark.parametrize("kind", KINDS)
def test_bf16_stays_within_its_rounding(kind: AttentionKind) -> None:
    q, k, v = inputs(torch.bfloat16)
    exact = reference(*(t.detach().double() for t in (q, k, v)), causal=True)
    torch.testing.assert_close(attention(q, k, v, True, kind).double(), exact, atol=0.03, rtol=0.03)


@pytest.mark.parametrize("kind", KINDS)
def test_the_future_is_hidden(kind: AttentionKind) -> None:
    q, k, v = (t.detach() for t in inputs(torch.float32))
    changed_k, changed_v = k.clone(), v.clone()
    changed_k[:, :, 4:] += 100.0
    changed_v[:, :, 4:] -= 100.0
    before, after = attention(q, k, v, True, kind), attention(q, changed_k, changed_v, True, kind)
    assert torch.equal(before[:, :, :4], after[:, :, :4])
    assert not torch.allclose(before[:, :, 4:], after[:, :, 4:])
    assert not torch.allclose(attention(q, k, v, False, kind)[:, :, :4], before[:, :, :4])


def test_a_wish_is_followed_without_measuring(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "attention_timings", lambda *_: pytest.fail("measured"))
    device = Device("cpu", read_facts())
    for kind in KINDS:
        assert choose.choose_attention(kind, device, torch.float32, 4, 2, 8, 16, True) == (kind, {})


@pytest.mark.parametrize("faster", KINDS)
def test_auto_takes_what_was_measured_faster(monkeypatch: pytest.MonkeyPatch, faster: AttentionKind) -> None:
    times = {kind: Timing(2.0, 1.0 if kind == faster else 1.5, 3.0, 7) for kind in KINDS}
    monkeypatch.setattr(choose, "attention_timings", lambda *_: times)
    device = Device("cpu", read_facts())
    assert choose.choose_attention("auto", device, torch.float32, 4, 2, 8, 16, False) == (faster, times)


def test_both_kinds_are_really_timed() -> None:
    times = choose.attention_timings(Device("cpu", read_facts()), torch.float32, 2, 2, 8, 16, True)
    assert set(times) == set(KINDS)
    assert all(time.n >= 1 and time.median > 0 for time in times.values())
