"""Muon against torch.optim.Muon: update and state; and the accuracy of `orthogonalize`."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from m1clip.training import muon
from m1clip.training.muon import Muon, balance, orthogonalize

SHAPES = {
    "a.qkv.weight": (24, 8),
    "a.up": (32, 8),
    "a.down": (8, 32),
    "b.up": (32, 8),
    "b.out": (8, 8),
    "odd": (5, 7),
}
Made = tuple[dict[str, nn.Parameter], torch.optim.Optimizer]


def made(make: Callable[[list[tuple[str, nn.Parameter]]], torch.optim.Optimizer]) -> Made:
    generator = torch.Generator().manual_seed(0)
    named = {
        name: nn.Parameter(torch.randn(shape, generator=generator))
        for name, shape in SHAPES.items()
    }
    return named, make(list(named.items()))


def run(one: Made, steps: int, seed: int = 1, without: str = "") -> None:
    generator = torch.Generator().manual_seed(seed)
    named, optimizer = one
    for _ in range(steps):
        for name, p in named.items():
            grad = torch.randn(p.shape, generator=generator)
            p.grad = None if name == without else grad
        optimizer.step()


def jordan(x: Tensor) -> Tensor:
    """The five iterations of torch.optim.Muon (Keller Jordan, 2024)."""
    x = x / torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(5):
        gram = x @ x.transpose(1, 2)
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x


def assert_same(one: Made, other: Made, tolerance: float) -> None:
    for name, p in one[0].items():
        torch.testing.assert_close(p, other[0][name], atol=tolerance, rtol=tolerance)
        state = one[1].state[p], other[1].state[other[0][name]]
        assert state[0].keys() == state[1].keys()
        for key in state[0]:
            torch.testing.assert_close(state[0][key], state[1][key])


@pytest.mark.parametrize(
    ("dtype", "decay", "tolerance"),
    # Rounding.
    [
        (torch.float32, 0.0, 2e-5),
        (torch.float32, 0.3, 2e-5),
        (torch.bfloat16, 0.1, 0.05 * 4 * 0.03),
    ],
)
def test_update_matches_torch(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, decay: float, tolerance: float
) -> None:
    if dtype == torch.float32:
        # In torch's Muon, which divides in place.
        monkeypatch.setattr(Tensor, "bfloat16", Tensor.clone)
    monkeypatch.setattr(muon, "orthogonalize", jordan)
    ours = made(lambda named: Muon(named, lr=0.05, weight_decay=decay, dtype=dtype))
    theirs = made(lambda named: torch.optim.Muon(named, lr=0.05, weight_decay=decay))
    run(ours, 4)
    run(theirs, 4)
    assert_same(ours, theirs, tolerance)


def test_learning_rate_as_device_tensor() -> None:
    plain = made(lambda named: Muon(named, lr=0.05, dtype=torch.float32))
    tensor = made(lambda named: Muon(named, lr=torch.tensor(0.05), dtype=torch.float32))
    run(plain, 3)
    run(tensor, 3)
    assert_same(plain, tensor, 1e-6)


def test_matrix_without_gradient_is_unchanged() -> None:
    one = made(lambda named: Muon(named, lr=0.05))
    before = one[0]["b.up"].detach().clone()
    run(one, 2, without="b.up")
    assert torch.equal(one[0]["b.up"], before)
    assert one[0]["b.up"] not in one[1].state


def test_matrices_of_equal_shape_are_batched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wide and transposed tall matrices share a batch."""
    shapes: list[tuple[int, ...]] = []
    real = muon.orthogonalize

    def watched(x: Tensor) -> Tensor:
        shapes.append(tuple(x.shape))
        return real(x)

    monkeypatch.setattr(muon, "orthogonalize", watched)
    run(made(Muon), 1)
    assert sorted(shapes) == [(1, 5, 7), (1, 8, 8), (1, 8, 24), (3, 8, 32)]


def decaying(k: int, m: int, n: int) -> tuple[Tensor, Tensor]:
    """Matrices with singular values from 1 to 0.01, as momentum has them, and their orthogonal factors."""
    generator = torch.Generator().manual_seed(m + n)
    u, _, v = torch.linalg.svd(torch.randn(k, m, n, generator=generator), full_matrices=False)
    values = torch.logspace(0, -2, m)
    return 1e-4 * (u * values) @ v, u @ v


@pytest.mark.parametrize(
    ("m", "n", "dtype"),
    [
        (48, 48, torch.float32),
        (48, 60, torch.float32),
        (48, 96, torch.float32),
        (48, 192, torch.float32),
        # Bf16 has too few digits for our iterations where matrices are small.
        (192, 192, torch.bfloat16),
        (192, 768, torch.bfloat16),
    ],
)
def test_orthogonalize_is_more_accurate_than_torch(m: int, n: int, dtype: torch.dtype) -> None:
    x, factor = decaying(2, m, n)
    errors = []
    for iterate in (orthogonalize, jordan):
        result = iterate(x.to(dtype)).float()
        errors.append(float((result - factor).norm() / factor.norm()))
        assert torch.linalg.svdvals(result).max() < 1.3
    assert errors[0] < errors[1] < 0.25
    assert torch.equal(orthogonalize(torch.zeros(2, m, n)), torch.zeros(2, m, n))


def test_vectors_are_rejected() -> None:
    with pytest.raises(ValueError, match="matrices"):
        Muon([("x", nn.Parameter(torch.zeros(3)))])


def test_convolution_is_updated_as_a_matrix() -> None:
    generator = torch.Generator().manual_seed(0)
    start, grad = (torch.randn(16, 4, 3, 3, generator=generator) for _ in range(2))
    kernel, matrix = nn.Parameter(start.clone()), nn.Parameter(start.flatten(1).clone())
    kernel.grad, matrix.grad = grad.clone(), grad.flatten(1).clone()
    for p in (kernel, matrix):
        Muon([p], lr=0.1, dtype=torch.float32).step()
    assert not torch.equal(kernel, start)
    assert torch.equal(kernel.flatten(1), matrix)


def test_long_rows_are_summed_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(2, 6, 40, generator=torch.Generator().manual_seed(0))
    expected = orthogonalize(x)
    monkeypatch.setattr(muon, "MAX_COLUMNS", 7)
    assert torch.allclose(orthogonalize(x), expected, atol=1e-5)


def test_matrices_are_divided_by_cost() -> None:
    parts = balance([1, 8, 2, 4, 4, 3], 3)
    assert sorted(index for part in parts for index in part) == list(range(6))
    assert [sum([1, 8, 2, 4, 4, 3][index] for index in part) for part in parts] == [8, 7, 7]
    assert balance([5], 3) == [[0], [], []]
