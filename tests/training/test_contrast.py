"""The loss written out by hand against the one that autograd knows: value and gradient."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from m1clip.losses import SAFE_SCALE, fused_infonce, infonce, places, positives, same_pairs
from m1clip.model.clip import Features


def plain(image: Tensor, text: Tensor, scale: Tensor, positive: Tensor) -> Tensor:
    logits = scale * image @ text.T
    target = positive.to(logits.dtype)
    ways = ((logits, target), (logits.T, target.T))
    return sum(F.cross_entropy(x, t / t.sum(dim=1, keepdim=True)) for x, t in ways) / 2  # type: ignore[return-value]


def vectors(seed: int, kind: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(seed)
    image, text = (
        F.normalize(torch.randn(7, 5, dtype=kind), dim=1),
        F.normalize(torch.randn(16, 5, dtype=kind), dim=1),
    )
    image_index = torch.arange(16) % 7
    images, captions = torch.tensor([0, 1, 2, 3, 4, 0, 6]), torch.arange(16)
    captions[9] = captions[3]
    return image, text, positives("multi", images, captions, image_index)


@pytest.mark.parametrize("scale", [1.0, 14.3, SAFE_SCALE - 1, SAFE_SCALE + 1, 100.0])
def test_value_and_gradient(scale: float) -> None:
    image, text, positive = vectors(3, torch.double)
    results = []
    for loss_of in (fused_infonce, plain):
        inputs = [image.clone().requires_grad_(), text.clone().requires_grad_()]
        by_scale = torch.tensor(scale, dtype=torch.double, requires_grad=True)
        loss = loss_of(*inputs, by_scale, positive)
        (3.0 * loss).backward()
        results.append([loss.detach(), *(t.grad for t in inputs), by_scale.grad])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-10, rtol=1e-8)


@pytest.mark.parametrize("scale", [1.0, 30.0, 100.0])
def test_float32_is_near_the_truth(scale: float) -> None:
    image, text, positive = vectors(5, torch.double)
    truth = plain(image, text, torch.tensor(scale, dtype=torch.double), positive)
    found = fused_infonce(image.float(), text.float(), torch.tensor(scale), positive)
    assert float(found) == pytest.approx(float(truth), rel=2e-6, abs=2e-5)


def test_far_vectors_at_the_largest_shared_offset() -> None:
    # All point away from each other: every logit is -scale, the smallest there is.
    image, text = torch.tensor([[1.0, 0.0]]).repeat(3, 1), torch.tensor([[-1.0, 0.0]]).repeat(3, 1)
    positive = torch.eye(3, dtype=torch.bool)
    for scale in (SAFE_SCALE, 99.0):
        loss = infonce(Features(image, text, torch.tensor(scale), None), positive)
        assert float(loss) == pytest.approx(float(torch.tensor(3.0).log()), abs=1e-4)


def test_smoothing_takes_the_plain_way() -> None:
    image, text, positive = vectors(1, torch.float32)
    features = Features(image, text, torch.tensor(5.0), None)
    assert float(infonce(features, positive, 0.1)) != pytest.approx(float(infonce(features, positive)), abs=1e-4)


def test_positives_by_sorting_are_those_by_comparing_all() -> None:
    torch.manual_seed(0)
    for _ in range(20):
        n, m = 9, 30
        images, captions = torch.randint(0, 7, (n,)), torch.randint(0, 18, (m,))
        image_index = torch.randint(0, n, (m,))
        same_caption = (captions[:, None] == captions).float()
        shared = torch.zeros(n, m).index_add_(0, image_index, same_caption) > 0
        wanted = (images[:, None] == images[image_index]) | shared
        assert torch.equal(same_pairs(images, captions, image_index), wanted)


def test_large_steps_under_autocast_have_products_in_bf16() -> None:
    torch.manual_seed(0)
    n, m = 512, 2048
    image, text = F.normalize(torch.randn(n, 32), dim=1), F.normalize(torch.randn(m, 32), dim=1)
    positive = torch.arange(n)[:, None] == torch.arange(m) // 4
    gradients = []
    for on in (False, True):
        mine, theirs = image.clone().requires_grad_(), text.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=on):
            loss = infonce(Features(mine, theirs, torch.tensor(10.0), None), positive)
        loss.backward()
        assert loss.dtype == torch.float32
        assert mine.grad is not None
        gradients.append((loss.detach(), mine.grad))
    exact, rounded = gradients
    assert float(rounded[0]) == pytest.approx(float(exact[0]), rel=2e-3)
    assert not torch.equal(rounded[1], exact[1])
    assert float((rounded[1] - exact[1]).norm() / exact[1].norm()) < 0.02


@pytest.mark.parametrize("columns", [64, 61])
def test_places_are_those_of_nonzero(columns: int) -> None:
    torch.manual_seed(1)
    for share in (0.0, 0.02, 0.6):
        positive = torch.rand(37, columns) < share
        for mask in (positive, positive.T):
            for ours, theirs in zip(places(mask), mask.nonzero(as_tuple=True), strict=True):
                assert torch.equal(ours, theirs)


@pytest.mark.parametrize("scale", [14.5, 60.0])  # as bf16 has them
def test_what_is_learned_has_no_gradient_left_in_bf16(scale: float) -> None:
    # Share and target are both rounded to 1/256 of their size; their difference must not be.
    image = text = torch.eye(64)
    mine = image.clone().requires_grad_()
    by_scale = torch.tensor(scale, requires_grad=True)
    positive = torch.eye(64, dtype=torch.bool)
    loss = fused_infonce(mine, text, by_scale, positive, torch.bfloat16)
    loss.backward()
    exact = plain(image, text, torch.tensor(scale), positive)
    assert float(loss.detach()) == pytest.approx(float(exact), abs=2e-5)
    assert mine.grad is not None
    assert by_scale.grad is not None
    off = 63 / (64 + torch.tensor(scale, dtype=torch.double).exp())  # the share of all wrong captions, about
    assert float(mine.grad.diagonal().abs().max()) <= 1.1 * scale * float(off) / 64 + 1e-7
    assert abs(float(by_scale.grad)) <= 1.1 * float(off) + 1e-6


def test_fp16_does_not_overflow() -> None:
    image, text, positive = vectors(2, torch.float32)
    scale = torch.tensor(30.0)
    found = fused_infonce(image, text, scale, positive, torch.float16)
    assert float(found) == pytest.approx(float(plain(image, text, scale, positive)), rel=2e-3)
