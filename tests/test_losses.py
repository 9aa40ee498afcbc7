"""Losses against known values, float64 loops and autograd.

Blocks and ranks against the whole batch.
"""

import math
import re
import typing
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from m1clip.cli.options import help_texts
from m1clip.config import Config, LossName, TrainConfig, from_dict
from m1clip.errors import UserError
from m1clip.losses import fused, run_loss
from m1clip.losses.fused import true_positions
from m1clip.losses.positives import own_captions, same_image_or_caption, targets
from m1clip.losses.registry import DEFAULT_LOSS, LOSSES, Array, Ids, Loss, Ops
from m1clip.losses.run_loss import Rows, RunLoss
from m1clip.model.clip import Features


def decoupled_rows(ops: Ops, logits: Array, positive: Array) -> Array:
    """InfoNCE of one caption whose denominator has only the negatives; infinite without any."""
    negatives = ops.log_sum_exp(ops.masked_fill(logits, positive, float("-inf")))
    target = ops.cast(positive, logits)
    return -(target * (logits - negatives)).sum()


def hinge_rows(ops: Ops, logits: Array, positive: Array) -> Array:
    """A new loss: pairs on the wrong side of a margin."""
    margin = 1.0 - (2.0 * ops.cast(positive, logits) - 1.0) * logits
    return (margin * (margin > 0)).sum()


def squared_rows(ops: Ops, logits: Array, positive: Array) -> Array:
    """Another one: squared error of each pair's sigmoid."""
    return ((math.e ** ops.log_sigmoid(logits) - ops.cast(positive, logits)) ** 2).sum()


# Losses that only these tests know.
NEW_LOSSES = {
    "decoupled": Loss("without positives below", decoupled_rows, own_captions),
    "hinge": Loss("of each row", hinge_rows, same_image_or_caption),
    "squared": Loss("of each pair", squared_rows, own_captions, pairwise=True, needs_bias=True),
    "smoothed": LOSSES["multi-positive"].smoothed(0.1),
}
ALL = slice(None)
NO_IDS = Ids(*(torch.empty(0, dtype=torch.int64) for _ in range(3)))


def loss_of(name: str, f: Features, positive: Tensor, fused: bool = True) -> Tensor:
    """The loss of a batch with given positives."""
    loss = replace(LOSSES[name], positives=lambda ids, images, captions: positive[images, captions])
    return RunLoss(loss, fused=fused).value(f, NO_IDS)


def text_contrast(f: Features, ids: Ids, fused: bool) -> Tensor:
    """The loss between captions alone."""
    nothing = Loss("", lambda ops, logits, positive: 0.0 * logits.sum(), own_captions)
    return RunLoss(nothing, text_contrast=1.0, fused=fused).value(f, ids)


def features(n: int = 6, scale: float = 5.0, bias: float | None = None) -> Features:
    torch.manual_seed(0)
    image, text = (
        F.normalize(torch.randn(n, 8, dtype=torch.float64), dim=1).requires_grad_()
        for _ in range(2)
    )
    scale_, bias_ = (
        torch.tensor(v or 0.0, dtype=torch.float64, requires_grad=True) for v in (scale, bias)
    )
    return Features(image, text, scale_, None if bias is None else bias_)


def of_logits(logits: list[list[float]]) -> Features:
    """Features whose product is this matrix."""
    image = torch.tensor(logits, dtype=torch.float64)
    one = torch.tensor(1.0, dtype=torch.float64)
    return Features(image, torch.eye(len(image), dtype=torch.float64), one, 0 * one)


def loop_infonce(f: Features, positive: Tensor) -> float:
    """Minus the sum of target times log softmax, entry by entry, over both directions."""
    logits, total = (f.scale * f.image @ f.text.T).detach(), 0.0
    for matrix, same in ((logits, positive), (logits.T, positive.T)):
        target = same.double() / same.sum(1, keepdim=True)
        for row, target_row in zip(matrix.tolist(), target.tolist(), strict=True):
            log_sum = math.log(sum(map(math.exp, row)))
            total -= sum(
                w * (value - log_sum) for value, w in zip(row, target_row, strict=True)
            ) / len(matrix)
    return total / 2


def fused_infonce(
    image: Tensor, text: Tensor, scale: Tensor, positive: Tensor, dtype: torch.dtype | None = None
) -> Tensor:
    return fused.infonce(Features(image, text, scale, None), positive, dtype)


def autograd_infonce(image: Tensor, text: Tensor, scale: Tensor, positive: Tensor) -> Tensor:
    logits = scale * image @ text.T
    target = positive.to(logits.dtype)
    directions = ((logits, target), (logits.T, target.T))
    return sum(F.cross_entropy(x, t / t.sum(dim=1, keepdim=True)) for x, t in directions) / 2  # type: ignore[return-value]


def unit_vectors(seed: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """7 images, two of them the same, with 16 captions, two of them equal."""
    torch.manual_seed(seed)
    image, text = (F.normalize(torch.randn(n, 5, dtype=dtype), dim=1) for n in (7, 16))
    sample_ids, caption_ids = torch.tensor([0, 1, 2, 3, 4, 0, 6]), torch.arange(16)
    caption_ids[9] = caption_ids[3]
    return image, text, same_image_or_caption(Ids(sample_ids, caption_ids, torch.arange(16) % 7))


NO_DUPLICATES = torch.eye(6, dtype=torch.bool)
DUPLICATES = same_image_or_caption(
    Ids(torch.tensor([0, 1, 2, 0, 4, 5]), torch.tensor([10, 11, 12, 13, 11, 15]), torch.arange(6))
)


def test_positives_with_several_captions_per_image() -> None:
    ids = Ids(torch.tensor([7, 8, 7]), torch.tensor([1, 2, 3, 2, 4]), torch.tensor([0, 0, 1, 1, 2]))
    own = [[1, 1, 0, 0, 0], [0, 0, 1, 1, 0], [0, 0, 0, 0, 1]]
    # Rows 0 and 2 are one image; caption 2 belongs to images 7 and 8, so it is a negative of
    # neither.
    same = [[1, 1, 0, 1, 1], [0, 1, 1, 1, 0], [1, 1, 0, 0, 1]]
    assert own_captions(ids).int().tolist() == own
    assert same_image_or_caption(ids).int().tolist() == same
    assert LOSSES["infonce"].positives(ids, ALL, ALL).int().tolist() == own
    assert LOSSES["multi-positive"].positives(ids, ALL, ALL).int().tolist() == same


@pytest.mark.parametrize("everything_matches", [True, False])
@pytest.mark.parametrize("name", LOSSES)
def test_rows_without_negatives_or_positives_stay_finite(
    name: str, everything_matches: bool
) -> None:
    f = features(4, bias=-2.0)
    value = loss_of(name, f, torch.full((4, 4), everything_matches))
    value.backward()
    assert value.isfinite()
    assert f.image.grad is not None
    assert f.image.grad.isfinite().all()


@pytest.mark.parametrize("name", LOSSES)
def test_positives_of_a_block_are_those_of_the_batch(name: str) -> None:
    torch.manual_seed(1)
    ids = Ids(torch.randint(0, 4, (5,)), torch.randint(0, 6, (9,)), torch.randint(0, 5, (9,)))
    whole = LOSSES[name].positives(ids, ALL, ALL)
    assert whole[ids.image_index, torch.arange(9)].all(), "a caption matches its image"
    for rows, columns in (
        (slice(1, 3), slice(2, 7)),
        (slice(0, 5), slice(4, 9)),
        (slice(2, 5), ALL),
    ):
        assert torch.equal(LOSSES[name].positives(ids, rows, columns), whole[rows, columns])


def test_same_image_or_caption_matches_pairwise_comparison() -> None:
    torch.manual_seed(0)
    for _ in range(20):
        n, m = 9, 30
        sample_ids, caption_ids = torch.randint(0, 7, (n,)), torch.randint(0, 18, (m,))
        image_index = torch.randint(0, n, (m,))
        same_caption = (caption_ids[:, None] == caption_ids).float()
        shared = torch.zeros(n, m).index_add_(0, image_index, same_caption) > 0
        expected = (sample_ids[:, None] == sample_ids[image_index]) | shared
        assert torch.equal(
            same_image_or_caption(Ids(sample_ids, caption_ids, image_index)), expected
        )


def test_losses_known_values() -> None:
    logits, positive = [[math.log(2.0), 0.0], [0.0, math.log(4.0)]], torch.eye(2, dtype=torch.bool)
    # Rows: -log(2/3), -log(4/5); the columns are the same.
    assert loss_of("infonce", of_logits(logits), positive).item() == pytest.approx(
        -(math.log(2 / 3) + math.log(4 / 5)) / 2
    )
    # (softplus(-log 2) + softplus(0) + softplus(0) + softplus(-log 4)) / 2
    expected = (math.log(1.5) + 2 * math.log(2.0) + math.log(1.25)) / 2
    assert loss_of("sigmoid", of_logits(logits), positive).item() == pytest.approx(expected)
    assert loss_of(
        "infonce", of_logits([[0.0] * 5] * 5), torch.eye(5, dtype=torch.bool)
    ).item() == pytest.approx(math.log(5))


@pytest.mark.parametrize("positive", [NO_DUPLICATES, DUPLICATES])
def test_losses_match_loop(positive: Tensor) -> None:
    assert loss_of("infonce", features(), positive).item() == pytest.approx(
        loop_infonce(features(), positive), rel=1e-12
    )
    f = features(bias=-3.0)
    logits = (f.scale * f.image @ f.text.T - 3.0).tolist()
    pairs = [-logits[i][j] if positive[i, j] else logits[i][j] for i in range(6) for j in range(6)]
    assert loss_of("sigmoid", f, positive).item() == pytest.approx(
        sum(math.log1p(math.exp(x)) for x in pairs) / 6, rel=1e-12
    )


def test_duplicates_are_not_negatives() -> None:
    f = of_logits([[20.0 if same else -20.0 for same in row] for row in DUPLICATES.tolist()])
    assert loss_of("infonce", f, NO_DUPLICATES).item() == pytest.approx(
        4 / 6 * math.log(2), abs=1e-6
    )
    f = f._replace(image=f.image.clone().requires_grad_())
    loss_of("infonce", f, DUPLICATES).backward()
    assert f.image.grad is not None
    assert f.image.grad.abs().max() < 1e-12
    assert loss_of("sigmoid", f, DUPLICATES).item() < 1e-6
    assert loss_of("sigmoid", f, NO_DUPLICATES).item() > 10


@pytest.mark.parametrize("name", LOSSES)
def test_symmetry_and_gradients(name: str) -> None:
    loss = partial(loss_of, name)
    f, order = features(bias=-2.0), torch.tensor([3, 1, 5, 0, 2, 4])
    expected = loss(f, DUPLICATES)
    torch.testing.assert_close(loss(f._replace(image=f.text, text=f.image), DUPLICATES.T), expected)
    shuffled = f._replace(image=f.image[order], text=f.text[order])
    torch.testing.assert_close(loss(shuffled, DUPLICATES[order][:, order]), expected)

    def of_inputs(*inputs: Tensor) -> Tensor:
        return loss(Features(*inputs), torch.eye(4, dtype=torch.bool))

    inputs = tuple(features(n=4, bias=-2.0))
    assert torch.autograd.gradcheck(of_inputs, inputs)
    used = inputs if LOSSES[name].needs_bias else inputs[:3]
    assert all(
        gradient.abs().max() > 0 for gradient in torch.autograd.grad(of_inputs(*inputs), used)
    )


@pytest.mark.parametrize(
    "scale", [1.0, 14.3, fused.MAX_SHARED_SCALE - 1, fused.MAX_SHARED_SCALE + 1, 100.0]
)
def test_fused_infonce_matches_autograd(scale: float) -> None:
    image, text, positive = unit_vectors(3, torch.double)
    results = []
    for loss_function in (fused_infonce, autograd_infonce):
        inputs = [
            t.clone().requires_grad_()
            for t in (image, text, torch.tensor(scale, dtype=torch.double))
        ]
        loss = loss_function(*inputs, positive)
        (3.0 * loss).backward()
        results.append([loss.detach(), *(t.grad for t in inputs)])
    for ours, expected in zip(*results, strict=True):
        torch.testing.assert_close(ours, expected, atol=1e-10, rtol=1e-8)
    actual = fused_infonce(image.float(), text.float(), torch.tensor(scale), positive)
    assert float(actual) == pytest.approx(float(results[1][0]), rel=2e-6, abs=2e-5)


def test_fused_infonce_with_the_smallest_logits() -> None:
    image, text = torch.tensor([[1.0, 0.0]]).repeat(3, 1), torch.tensor([[-1.0, 0.0]]).repeat(3, 1)
    for scale in (fused.MAX_SHARED_SCALE, 99.0):
        loss = loss_of(
            "infonce",
            Features(image, text, torch.tensor(scale), None),
            torch.eye(3, dtype=torch.bool),
        )
        assert float(loss) == pytest.approx(math.log(3.0), abs=1e-4)


def test_fused_infonce_in_fp16_does_not_overflow() -> None:
    image, text, positive = unit_vectors(2, torch.float32)
    actual = fused_infonce(image, text, torch.tensor(30.0), positive, torch.float16)
    assert float(actual) == pytest.approx(
        float(autograd_infonce(image, text, torch.tensor(30.0), positive)), rel=2e-3
    )


def test_large_batches_use_the_precision_of_autocast() -> None:
    torch.manual_seed(0)
    n, m = 512, 2048
    image, text = F.normalize(torch.randn(n, 32), dim=1), F.normalize(torch.randn(m, 32), dim=1)
    positive = torch.arange(n)[:, None] == torch.arange(m) // 4
    results = []
    for enabled in (False, True):
        leaf = image.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            loss = loss_of("infonce", Features(leaf, text, torch.tensor(10.0), None), positive)
        loss.backward()
        assert loss.dtype == torch.float32
        assert leaf.grad is not None
        results.append((loss.detach(), leaf.grad))
    exact, rounded = results
    assert float(rounded[0]) == pytest.approx(float(exact[0]), rel=2e-3)
    assert 0 < float((rounded[1] - exact[1]).norm() / exact[1].norm()) < 0.02


def loss_by_rows(
    loss: RunLoss, n: int, m: int, parts: list[Rows | None], dtype: torch.dtype | None
) -> tuple[Tensor, list[Tensor]]:
    """The loss and all gradients, added up over ranks, with autocast around it and inside."""
    torch.manual_seed(3)
    image, text = (F.normalize(torch.randn(k, 16), dim=1) for k in (n, m))
    scale, bias = (torch.tensor(value, requires_grad=True) for value in (14.3, -9.7))
    ids = Ids(torch.arange(n) % (n - 2), torch.arange(m) % (m - 3), torch.arange(m) % n)
    autocast = partial(torch.autocast, "cpu", dtype, enabled=dtype is not None)
    results = []
    for rows in parts:
        with autocast():
            results.append(
                loss.loss_and_grads(
                    Features(image, text, scale, bias), ids, rows, autocast=autocast
                )
            )
    gradients = [
        sum(shares, torch.zeros(())) for shares in zip(*(g for _, g in results), strict=True)
    ]
    gradients += [leaf.grad for leaf in (scale, bias) if leaf.grad is not None]
    return torch.stack([value for value, _ in results]).sum(), gradients


@pytest.mark.parametrize("fused_form", [True, False])
@pytest.mark.parametrize("name", [*LOSSES, *NEW_LOSSES])
def test_autocast_does_not_change_loss_of_single_pass_blocks_and_ranks(
    name: str, fused_form: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    n, m = 12, 30
    teacher_logits = torch.linspace(-3, 3, n * m).view(n, m)

    def teacher(sample_ids: Tensor, caption_ids: Tensor) -> Tensor:
        return teacher_logits[sample_ids][:, caption_ids]

    loss = RunLoss((LOSSES | NEW_LOSSES)[name], 0.3, teacher, fused=fused_form)
    expected, expected_gradients = loss_by_rows(loss, n, m, [None], None)
    ranks: list[Rows | None] = [Rows(slice(0, 5), slice(0, 17)), Rows(slice(5, 12), slice(17, 30))]
    for max_logits, parts in ((n * m, [None]), (0, [None]), (n * m, ranks)):
        monkeypatch.setattr(run_loss, "MAX_LOGITS", max_logits)
        value, gradients = loss_by_rows(loss, n, m, parts, torch.bfloat16)
        assert value.dtype == torch.float32
        torch.testing.assert_close(value, expected, rtol=1e-6, atol=0)
        for ours, theirs in zip(gradients, expected_gradients, strict=True):
            assert ours.dtype == torch.float32
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", [*LOSSES, *NEW_LOSSES])
def test_only_matmul_of_large_batch_uses_the_precision_of_autocast(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each row term sees float32 logits, which bf16 has rounded; it is not itself in bf16."""
    original = (LOSSES | NEW_LOSSES)[name]
    dtypes = []

    def row_term(ops: Ops, logits: Array, positive: Array) -> Array:
        dtypes.append(logits.dtype)
        return original.row_term(ops, logits, positive)

    loss = RunLoss(replace(original, row_term=row_term), fused=False)
    expected, expected_gradients = loss_by_rows(loss, 12, 30, [None], None)
    monkeypatch.setattr(run_loss, "HALF_PRECISION_PAIRS", 12 * 30)
    value, gradients = loss_by_rows(loss, 12, 30, [None], torch.bfloat16)
    assert set(dtypes) == {torch.float32}
    assert value.dtype == torch.float32
    assert 0 < abs(float(value - expected)) < 0.01 * abs(float(expected))
    assert (
        0
        < float((gradients[0] - expected_gradients[0]).norm() / expected_gradients[0].norm())
        < 0.05
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_targets_add_up_to_one_in_any_precision_of_the_logits(dtype: torch.dtype) -> None:
    positive = torch.ones(1, 3, dtype=torch.bool)
    target = run_loss.TORCH.cast(positive, torch.zeros(1, 3, dtype=dtype)) / 3
    assert float(target.sum()) == pytest.approx(1.0, abs=1e-7)
    loss = LOSSES["infonce"].row_term(run_loss.TORCH, torch.zeros(1, 3, dtype=dtype), positive)
    assert loss.dtype == torch.promote_types(dtype, torch.float32)


@pytest.mark.parametrize("scale", [14.5, 60.0])  # exact in bf16
def test_learned_pairs_have_zero_gradient_in_bf16(scale: float) -> None:
    """Probability and target are rounded to 1/256 of their size; their difference must not be."""
    leaf, by_scale = torch.eye(64).requires_grad_(), torch.tensor(scale, requires_grad=True)
    positive = torch.eye(64, dtype=torch.bool)
    loss = fused_infonce(leaf, torch.eye(64), by_scale, positive, torch.bfloat16)
    loss.backward()
    exact = autograd_infonce(torch.eye(64), torch.eye(64), torch.tensor(scale), positive)
    assert float(loss.detach()) == pytest.approx(float(exact), abs=2e-5)
    assert leaf.grad is not None
    assert by_scale.grad is not None
    wrong_probability = 63 / (64 + math.exp(scale))  # probability of all wrong captions, about
    assert float(leaf.grad.diagonal().abs().max()) <= 1.1 * scale * wrong_probability / 64 + 1e-7
    assert abs(float(by_scale.grad)) <= 1.1 * wrong_probability + 1e-6


@pytest.mark.parametrize("columns", [64, 61])
def test_true_positions_matches_nonzero(columns: int) -> None:
    torch.manual_seed(1)
    for fraction in (0.0, 0.02, 0.6):
        positive = torch.rand(37, columns) < fraction
        for mask in (positive, positive.T):
            for ours, expected in zip(
                true_positions(mask), mask.nonzero(as_tuple=True), strict=True
            ):
                assert torch.equal(ours, expected)


def test_text_contrast_matches_loop() -> None:
    f = features(6)
    sample_ids, image_index = torch.tensor([7, 8, 7]), torch.tensor([0, 0, 1, 1, 2, 1])
    # The second image 7 repeats a caption of the first.
    caption_ids = torch.tensor([0, 1, 2, 3, 1, 5])
    samples, logits, rows = (
        sample_ids[image_index].tolist(),
        (f.scale * f.text @ f.text.T).tolist(),
        [],
    )
    for i in range(6):
        others = [j for j in range(6) if caption_ids[j] != caption_ids[i]]
        right = [j for j in others if samples[j] == samples[i]]
        log_sum = math.log(sum(math.exp(logits[i][j]) for j in others))
        rows += [sum(log_sum - logits[i][j] for j in right) / len(right)] if right else []
    for fused_form in (True, False):
        loss = text_contrast(f, Ids(sample_ids, caption_ids, image_index), fused_form)
        assert loss.item() == pytest.approx(sum(rows) / len(rows))


@pytest.mark.parametrize("caption_ids", [[0, 1, 2, 2, 2, 5], [0] * 6])
def test_text_contrast_without_positives_is_zero(caption_ids: list[int]) -> None:
    f = features(6)
    ids = Ids(torch.arange(6), torch.tensor(caption_ids), torch.arange(6))
    for fused_form in (True, False):
        loss = text_contrast(f, ids, fused_form)
        loss.backward()
        assert loss.item() == 0
        assert f.text.grad is not None
        assert not f.text.grad.any()


@given(st.data())
def test_fused_text_contrast_matches_its_row_term(data: st.DataObject) -> None:
    m = data.draw(st.integers(2, 12))
    numbers = st.lists(st.integers(0, 3), min_size=m, max_size=m).map(torch.tensor)
    sample_ids, caption_ids, image_index = (
        data.draw(numbers),
        data.draw(numbers),
        data.draw(numbers) % m,
    )
    block, scale = data.draw(st.integers(1, m * m)), data.draw(st.sampled_from([1.0, 20.0, 100.0]))
    results = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fused, "TEXT_BLOCK", block)
        for fused_form in (True, False):
            f = features(m, scale=scale)
            loss = text_contrast(f, Ids(sample_ids, caption_ids, image_index), fused_form)
            (3 * loss).backward()
            assert f.text.grad is not None
            assert f.scale.grad is not None
            results.append((loss.detach(), f.text.grad, f.scale.grad))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other)


def test_similarity_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = (
        torch.randn(9, 4, dtype=torch.float64, requires_grad=True),
        torch.randn(14, 4, dtype=torch.float64),
    )
    expected, weight = a @ b.T, torch.randn(9, 14, dtype=torch.float64)
    (gradient,) = torch.autograd.grad((expected * weight).sum(), a)
    monkeypatch.setattr(run_loss, "MAX_ROWS", 4)
    actual = run_loss.similarity(a, b)
    assert torch.allclose(actual, expected)
    assert torch.allclose(torch.autograd.grad((actual * weight).sum(), a)[0], gradient)


FUSED = [name for name, loss in LOSSES.items() if loss.fused is not None]


@given(
    st.sampled_from(FUSED),
    st.integers(0, 999),
    st.sampled_from([1.0, 14.3, 74.0, 76.0, 100.0]),
    st.sampled_from([0.0, 0.1, 0.9]),
)
def test_fused_loss_matches_its_row_term(
    name: str, seed: int, scale: float, smoothing: float
) -> None:
    torch.manual_seed(seed)
    objective = LOSSES[name].smoothed(smoothing)
    n, m = 1 + seed % 7, 8 + seed % 5
    image, text = (F.normalize(torch.randn(k, 5, dtype=torch.double), dim=1) for k in (n, m))
    ids = Ids(torch.randint(0, 5, (n,)), torch.randint(0, 9, (m,)), torch.arange(m) % n)
    results = []
    for fused_form in (True, False):
        scale_leaf = torch.tensor(scale, dtype=torch.double, requires_grad=True)
        f = Features(image, text, scale_leaf, None)
        loss, gradients = RunLoss(objective, fused=fused_form).loss_and_grads(f, ids)
        results.append([loss, *gradients, scale_leaf.grad])
    for ours, expected in zip(*results, strict=True):
        torch.testing.assert_close(ours, expected, atol=1e-10, rtol=1e-8)


def test_label_smoothing_is_that_of_torch() -> None:
    f = features(6, scale=9.0)
    ids = Ids(*(torch.arange(6) for _ in range(3)))
    logits = (f.scale * f.image @ f.text.T).detach()
    both = [F.cross_entropy(x, torch.arange(6), label_smoothing=0.2) for x in (logits, logits.T)]
    for fused_form in (True, False):
        loss = RunLoss(LOSSES["infonce"].smoothed(0.2), fused=fused_form).value(f, ids)
        torch.testing.assert_close(loss.detach(), sum(both) / 2)


@given(st.data())
def test_blocks_and_ranks_add_up_to_loss_and_gradients(data: st.DataObject) -> None:
    """The whole batch, blocks of any size, and the rows of two ranks.

    Also for losses that are new to the registry.
    """
    n, m = data.draw(st.integers(1, 6)), data.draw(st.integers(6, 12))
    numbers = {
        name: st.lists(st.integers(0, 4), min_size=k, max_size=k)
        for name, k in (("image", n), ("text", m))
    }
    ids = Ids(
        *(torch.tensor(data.draw(numbers[name])) for name in ("image", "text")), torch.arange(m) % n
    )
    torch.manual_seed(0)
    image, text = (F.normalize(torch.randn(k, 5, dtype=torch.double), dim=1) for k in (n, m))
    teacher_logits = torch.randn(5, 5, dtype=torch.double)

    def teacher(sample_ids: Tensor, caption_ids: Tensor) -> Tensor:
        return teacher_logits[sample_ids][:, caption_ids]

    def parameters() -> tuple[Tensor, Tensor]:
        log_scale, bias = (
            torch.tensor(v, dtype=torch.double, requires_grad=True) for v in (2.0, -2.0)
        )
        return log_scale, bias

    with pytest.MonkeyPatch.context() as patch:
        for name, new in NEW_LOSSES.items():
            patch.setitem(LOSSES, name, new)
        loss = RunLoss(
            LOSSES[data.draw(st.sampled_from(list(LOSSES)))],
            data.draw(st.sampled_from([0.0, 0.3])),
            data.draw(st.sampled_from([None, teacher])),
        )
        patch.setattr(run_loss, "TERM_LOGITS", data.draw(st.integers(1, 40)))
        patch.setattr(run_loss, "TEACHER_WEIGHT", 0.4)

        # Reference: autograd through the loss of the batch.
        expected = parameters()
        inputs = (image.clone().requires_grad_(), text.clone().requires_grad_())
        value = replace(loss, fused=False).value(
            Features(*inputs, expected[0].exp(), expected[1]), ids
        )
        value.backward()

        cuts = [data.draw(st.integers(0, k)) for k in (n, m)]
        first, second = (
            Rows(slice(0, cuts[0]), slice(0, cuts[1])),
            Rows(slice(cuts[0], n), slice(cuts[1], m)),
        )
        for max_logits, parts in ((n * m, [None]), (0, [None]), (n * m, [first, second])):
            patch.setattr(run_loss, "MAX_LOGITS", max_logits)
            actual = parameters()
            results = [
                loss.loss_and_grads(Features(image, text, actual[0].exp(), actual[1]), ids, rows)
                for rows in parts
            ]
            torch.testing.assert_close(sum(total for total, _ in results), value.detach())
            for side, leaf in enumerate(inputs):
                torch.testing.assert_close(
                    sum(gradients[side] for _, gradients in results), leaf.grad
                )
            torch.testing.assert_close(actual[0].grad, expected[0].grad)
            torch.testing.assert_close(actual[1].grad, expected[1].grad)
            assert (actual[1].grad is not None) == loss.objective.needs_bias


@pytest.mark.parametrize("max_logits", [run_loss.MAX_LOGITS, 0])
def test_scaled_backward_scales_gradients_but_not_the_loss(
    max_logits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the gradient scaler of fp16 does; the graphs of the features are not used."""
    monkeypatch.setattr(run_loss, "MAX_LOGITS", max_logits)
    ids, loss = Ids(torch.arange(6), torch.arange(6), torch.arange(6)), RunLoss(LOSSES["sigmoid"])
    plain, scaled = features(bias=-2.0), features(bias=-2.0)
    value, gradients = loss.loss_and_grads(plain, ids)
    scaled_value, scaled_gradients = loss.loss_and_grads(
        scaled, ids, backward=lambda term: (8.0 * term).backward()
    )
    assert torch.equal(scaled_value, value)
    assert not value.requires_grad
    for one, other in zip(
        [*gradients, plain.scale.grad], [*scaled_gradients, scaled.scale.grad], strict=True
    ):
        assert one is not None
        torch.testing.assert_close(other, 8.0 * one)
    assert plain.image.grad is None


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("max_logits", [run_loss.MAX_LOGITS, 0])
def test_values_are_not_read_on_an_accelerator(
    name: str, max_logits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Meta tensors have none: a step that reads one would wait for the device.

    Nor have fake tensors on the CPU.
    """
    monkeypatch.setattr(run_loss, "MAX_LOGITS", max_logits)
    loss = RunLoss(
        LOSSES[name], text_contrast=0.3, teacher=lambda images, texts: images[:, None] + 0.5 * texts
    )
    for context in (torch.device("meta"), FakeTensorMode()):
        with context:
            numbers = (torch.ones((), requires_grad=True) for _ in range(2))
            f = Features(torch.ones(6, 8), torch.ones(12, 8), *numbers)
            ids = Ids(torch.arange(6), torch.arange(12), torch.arange(12) % 6)
            value, gradients = loss.loss_and_grads(f, ids)
        assert value.shape == ()
        assert [gradient.shape for gradient in gradients] == [(6, 8), (12, 8)]


def test_rank_without_rows_has_no_part_in_the_loss() -> None:
    f, ids = features(bias=-2.0), Ids(torch.arange(6), torch.arange(6), torch.arange(6))
    loss, gradients = RunLoss(LOSSES["sigmoid"]).loss_and_grads(
        f, ids, Rows(slice(6, 6), slice(6, 6))
    )
    assert loss == 0
    assert [gradient.abs().sum() for gradient in gradients] == [0, 0]
    assert f.scale.grad == 0
    assert f.bias is not None
    assert f.bias.grad == 0, "ranks add their gradients: each needs one"


@pytest.mark.parametrize("name", [name for name, loss in LOSSES.items() if loss.needs_bias])
def test_loss_that_needs_a_bias_does_not_train_without_it(name: str) -> None:
    ids = Ids(torch.arange(6), torch.arange(6), torch.arange(6))
    with pytest.raises(AssertionError, match="needs a model with a logit bias"):
        RunLoss(LOSSES[name]).loss_and_grads(features(), ids)


def test_option_and_help_follow_from_the_registry() -> None:
    assert typing.get_args(LossName) == tuple(LOSSES)
    assert Config().train.loss == DEFAULT_LOSS in LOSSES
    for name, loss in LOSSES.items():
        assert from_dict({"train": {"loss": name}}, "file").train == TrainConfig(loss=name)
        assert f"{name}: {loss.help}" in help_texts()["TrainConfig", "loss"]
    for typed, suggestion in (
        ("multi", "multi-positive"),
        ("infonze", "infonce"),
        ("Sigmoid", "sigmoid"),
    ):
        message = f"one of {', '.join(LOSSES)}, not '{typed}': did you mean '{suggestion}'?"
        with pytest.raises(UserError, match=re.escape(message)):
            from_dict({"train": {"loss": typed}}, "file")


@pytest.mark.parametrize("captions", [1, 5])
def test_loss_of_guessing_is_that_of_the_glossary(captions: int) -> None:
    """ln n + (ln m) / 2 for n images with m captions each."""
    n = 64
    features = Features(torch.zeros(n, 8), torch.zeros(n * captions, 8), torch.tensor(14.0), None)
    matches = torch.arange(n)[:, None] == torch.arange(n * captions)[None] // captions
    expected = math.log(n) + math.log(captions) / 2
    assert fused.infonce(features, matches).item() == pytest.approx(expected, abs=1e-5)
    glossary = (Path(__file__).parents[1] / "docs" / "reference" / "glossary.md").read_text(
        encoding="utf-8"
    )
    assert f"({expected:.2f} for 64" in glossary


def test_untrained_demo_starts_below_guessing_as_learn_explains() -> None:
    """Captions of one image are closer to each other than to those of other images."""
    n = 128
    captions = 5
    image_index = torch.arange(n).repeat_interleave(captions)
    ids = Ids(torch.arange(n), torch.arange(n * captions), image_index)
    loss = RunLoss(LOSSES[DEFAULT_LOSS], text_contrast=0.5)
    equal = F.normalize(torch.ones(n * captions, 256), dim=1)
    guessing = loss.value(Features(equal[:n], equal, torch.tensor(14.3), None), ids).item()
    # Cosines of an untrained demo: 0.88 between captions of one image, 0.70 between others.
    random = torch.Generator().manual_seed(0)
    shared = torch.zeros(256)
    shared[0] = 0.70**0.5
    of_image = torch.randn(n, 256, generator=random) * (0.18 / 256) ** 0.5
    of_caption = torch.randn(n * captions, 256, generator=random) * (0.12 / 256) ** 0.5
    text = F.normalize(shared + of_image[image_index] + of_caption, dim=1)
    untrained = loss.value(Features(equal[:n], text, torch.tensor(14.3), None), ids).item()
    page = (Path(__file__).parents[1] / "docs" / "learn.md").read_text(encoding="utf-8")
    assert f"{guessing:.1f} for the demo" in page
    assert guessing - 1.5 < untrained < guessing - 0.5
    assert "untrained model starts at 8.0" in page
    assert "`--loss multi-positive`" in page


@pytest.mark.parametrize("name", [name for name, loss in LOSSES.items() if loss.takes_targets])
def test_targets_of_mixed_images(name: str) -> None:
    """Partners share their captions by the parts of the image, in every form of the loss."""
    torch.manual_seed(0)
    n, m = 5, 11
    mixed = torch.tensor([0.0, 0.3, 0.5, 0.1, 0.4])
    ids = Ids(torch.tensor([0, 1, 2, 3, 2]), torch.arange(m) % 9, torch.arange(m) % n, mixed)
    positives = LOSSES[name].positives
    plain = positives(ids, ALL, ALL).float()
    expected = plain.clone()
    for row, partner in enumerate((1, 0, 3, 2, 4)):
        expected[row] = (1 - mixed[row]) * plain[row] + mixed[row] * plain[partner]
    torch.testing.assert_close(targets(positives, ids), expected)
    for rows in (slice(0, 3), slice(1, 2), slice(3, 5), slice(4, 5)):
        torch.testing.assert_close(targets(positives, ids, rows), expected[rows])
        captions = slice(2, 9)
        torch.testing.assert_close(targets(positives, ids, ALL, captions), expected[:, captions])
    image, text = (F.normalize(torch.randn(k, 8), dim=1) for k in (n, m))
    losses = []
    for is_fused in (False, True):
        leaves = [x.clone().requires_grad_() for x in (image, text)]
        scale = torch.tensor(9.0, requires_grad=True)
        loss = RunLoss(LOSSES[name], fused=is_fused).value(Features(*leaves, scale, None), ids)
        loss.backward()
        losses.append([loss.detach(), *(leaf.grad for leaf in (*leaves, scale))])
    for one, other in zip(*losses, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
    logits = 9.0 * image @ text.T
    by_row = -(expected / expected.sum(1, keepdim=True) * logits.log_softmax(1)).sum(1).mean()
    by_column = -(expected.T / expected.T.sum(1, keepdim=True) * logits.T.log_softmax(1)).sum(1)
    torch.testing.assert_close(losses[0][0], (by_row + by_column.mean()) / 2)
