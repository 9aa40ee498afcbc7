"""Objectives: functions of matrices, against matrices written by hand and loops in float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from m1clip.losses import OBJECTIVES, infonce, own_pairs, positives, same_pairs, sigmoid
from m1clip.model.clip import Features


def features(n: int = 6, scale: float = 5.0, bias: float | None = None, dtype: torch.dtype = torch.float64) -> Features:
    torch.manual_seed(0)
    image, text = (torch.nn.functional.normalize(torch.randn(n, 8, dtype=dtype), dim=1) for _ in range(2))
    return Features(
        image.requires_grad_(),
        text.requires_grad_(),
        torch.tensor(scale, dtype=dtype, requires_grad=True),
        None if bias is None else torch.tensor(bias, dtype=dtype, requires_grad=True),
    )


def of_logits(logits: list[list[float]], bias: float | None = None) -> Features:
    """Features whose product is this matrix."""
    image = torch.tensor(logits, dtype=torch.float64)
    size = len(image)
    one = torch.tensor(1.0, dtype=torch.float64)
    return Features(image, torch.eye(size, dtype=torch.float64), one, None if bias is None else bias * one)


def naive_cross_entropy(logits: Tensor, target: Tensor) -> float:
    """Minus the sum of target times log softmax, entry by entry, the mean over rows."""
    total = 0.0
    for row, wanted in zip(logits.tolist(), target.tolist(), strict=True):
        log_sum = math.log(sum(math.exp(value) for value in row))
        total -= sum(share * (value - log_sum) for value, share in zip(row, wanted, strict=True))
    return total / len(logits)


def naive_infonce(f: Features, positive: Tensor, smoothing: float = 0.0) -> float:
    logits = (f.scale * f.image @ f.text.T).detach()
    results = []
    for matrix, same in ((logits, positive), (logits.T, positive.T)):
        target = same.double() / same.double().sum(1, keepdim=True)
        results.append(naive_cross_entropy(matrix, (1 - smoothing) * target + smoothing / len(matrix)))
    return sum(results) / 2


NO_DUPLICATES = torch.eye(6, dtype=torch.bool)
DUPLICATES = same_pairs(torch.tensor([0, 1, 2, 0, 4, 5]), torch.tensor([10, 11, 12, 13, 11, 15]), torch.arange(6))


def test_same_pairs_are_equal_images_or_equal_captions() -> None:
    found = {(int(i), int(j)) for i, j in DUPLICATES.nonzero() if i < j}
    assert found == {(0, 3), (1, 4)}
    assert torch.equal(DUPLICATES, DUPLICATES.T)
    assert DUPLICATES.diagonal().all()


def test_a_matrix_written_by_hand() -> None:
    logits = [[math.log(2.0), 0.0], [0.0, math.log(4.0)]]
    # Rows: -log(2/3), -log(4/5); the columns are the same here.
    expected = -(math.log(2 / 3) + math.log(4 / 5)) / 2
    positive = torch.eye(2, dtype=torch.bool)
    assert infonce(of_logits(logits), positive).item() == pytest.approx(expected)
    # sigmoid: (softplus(-log 2) + softplus(0) + softplus(0) + softplus(-log 4)) / 2
    expected = (math.log(1.5) + 2 * math.log(2.0) + math.log(1.25)) / 2
    assert sigmoid(of_logits(logits, bias=0.0), positive).item() == pytest.approx(expected)


def test_a_model_that_knows_nothing_pays_log_n() -> None:
    flat = of_logits([[0.0] * 5] * 5)
    assert infonce(flat, torch.eye(5, dtype=torch.bool)).item() == pytest.approx(math.log(5))


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("positive", [NO_DUPLICATES, DUPLICATES])
def test_infonce_against_a_loop(positive: Tensor, smoothing: float) -> None:
    assert infonce(features(), positive, smoothing).item() == pytest.approx(
        naive_infonce(features(), positive, smoothing), rel=1e-12
    )


def test_several_captions_of_a_image() -> None:
    images, captions = torch.tensor([7, 8, 7]), torch.tensor([1, 2, 3, 2, 4])
    image_index = torch.tensor([0, 0, 1, 1, 2])
    own = [[1, 1, 0, 0, 0], [0, 0, 1, 1, 0], [0, 0, 0, 0, 1]]
    # Rows 0 and 2 are one image; caption 2 stands with images 7 and 8, so it is no negative of either.
    same = [[1, 1, 0, 1, 1], [0, 1, 1, 1, 0], [1, 1, 0, 0, 1]]
    assert own_pairs(3, image_index).int().tolist() == own
    assert same_pairs(images, captions, image_index).int().tolist() == same
    assert positives("infonce", images, captions, image_index).int().tolist() == own
    for name in ("multi", "sigmoid"):
        assert positives(name, images, captions, image_index).int().tolist() == same


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_infonce_is_clips_where_each_image_has_one_caption(smoothing: float) -> None:
    f, target = features(), torch.arange(6)
    logits = f.scale * f.image @ f.text.T
    entropies = [torch.nn.functional.cross_entropy(m, target, label_smoothing=smoothing) for m in (logits, logits.T)]
    torch.testing.assert_close(infonce(f, NO_DUPLICATES, smoothing), sum(entropies) / 2)


@pytest.mark.parametrize("positive", [NO_DUPLICATES, DUPLICATES])
def test_sigmoid_against_a_loop(positive: Tensor) -> None:
    f = features(bias=-3.0)
    logits = (f.scale * f.image @ f.text.T).tolist()
    total = 0.0
    for i in range(6):
        for j in range(6):
            logit = logits[i][j] - 3.0
            total += math.log1p(math.exp(-logit if positive[i, j] else logit))
    assert sigmoid(f, positive).item() == pytest.approx(total / 6, rel=1e-12)


def test_a_duplicate_is_no_negative() -> None:
    """Where the logits are right for the duplicates too, only the objectives that know of them are content."""
    f = of_logits([[20.0 if same else -20.0 for same in row] for row in DUPLICATES.tolist()], bias=0.0)
    assert infonce(f, NO_DUPLICATES).item() == pytest.approx(4 / 6 * math.log(2), abs=1e-6)
    gradient_free = f._replace(image=f.image.clone().requires_grad_())
    infonce(gradient_free, DUPLICATES).backward()
    assert gradient_free.image.grad is not None
    assert gradient_free.image.grad.abs().max() < 1e-12  # nothing is pushed apart
    assert sigmoid(f, DUPLICATES).item() < 1e-6
    assert sigmoid(f, NO_DUPLICATES).item() > 10


@pytest.mark.parametrize("name", OBJECTIVES)
def test_images_and_captions_play_the_same_part(name: str) -> None:
    f = features(bias=-2.0)
    swapped = f._replace(image=f.text, text=f.image)
    torch.testing.assert_close(OBJECTIVES[name](f, DUPLICATES, 0.0), OBJECTIVES[name](swapped, DUPLICATES.T, 0.0))


@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_order_of_the_batch_does_not_matter(name: str) -> None:
    f, order = features(bias=-2.0), torch.tensor([3, 1, 5, 0, 2, 4])
    mixed = f._replace(image=f.image[order], text=f.text[order])
    torch.testing.assert_close(
        OBJECTIVES[name](f, DUPLICATES, 0.0), OBJECTIVES[name](mixed, DUPLICATES[order][:, order], 0.0)
    )


@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_gradient_reaches_all_and_is_right(name: str) -> None:
    f = features(n=4, bias=-2.0)
    positive = torch.eye(4, dtype=torch.bool)

    def loss(image: Tensor, text: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
        return OBJECTIVES[name](Features(image, text, scale, bias), positive, 0.0)

    assert f.bias is not None
    assert torch.autograd.gradcheck(loss, (f.image, f.text, f.scale, f.bias))
    wanted = (f.image, f.text, f.scale) + ((f.bias,) if name == "sigmoid" else ())
    for gradient in torch.autograd.grad(loss(f.image, f.text, f.scale, f.bias), wanted):
        assert gradient.abs().max() > 0
