"""The chunked gradient against the definition: all rows in one graph. No tower of ours is needed for that."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from m1clip.losses import OBJECTIVES
from m1clip.model.clip import Features
from m1clip.training.grad_cache import Plan, Side, chunked_backward

IMAGES, CAPTIONS = 10, 30  # three captions for each image


class Toy(nn.Module):
    """Two small networks with dropout, a temperature and a bias."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.image = nn.Sequential(nn.Linear(7, 16), nn.GELU(), nn.Dropout(0.3), nn.Linear(16, 5))
        self.text = nn.Sequential(nn.Linear(9, 16), nn.GELU(), nn.Dropout(0.3), nn.Linear(16, 5))
        self.logit_scale = nn.Parameter(torch.tensor(2.0))
        self.logit_bias = nn.Parameter(torch.tensor(-1.0))


def seeded(tower: nn.Module, rows_of: Tensor) -> Callable[[slice], Tensor]:
    def encode(rows: slice) -> Tensor:
        torch.manual_seed(rows.start)
        return F.normalize(tower(rows_of[rows]), dim=-1)

    return encode


def make(chunk: int, samples: bool) -> tuple[Toy, list[Side], Tensor]:
    model, captions = Toy(), IMAGES if samples else CAPTIONS
    torch.manual_seed(1)
    pixels, tokens = torch.randn(IMAGES, 7), torch.randn(captions, 9)
    owner = torch.arange(captions) % IMAGES
    sides = [
        Side(seeded(model.image, pixels), IMAGES, chunk),
        Side(seeded(model.text, tokens), captions, chunk * captions // IMAGES),
    ]
    return model, sides, torch.arange(IMAGES)[:, None] == owner


def loss_with(model: Toy, objective: str, positive: Tensor) -> Callable[[list[Tensor]], Tensor]:
    def loss_of(features: list[Tensor]) -> Tensor:
        image, text = features
        return OBJECTIVES[objective](Features(image, text, model.logit_scale.exp(), model.logit_bias), positive, 0.0)

    return loss_of


def gradients(model: nn.Module) -> dict[str, Tensor]:
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


@pytest.mark.parametrize("chunk", [1, 3, 4, 10])
@pytest.mark.parametrize(
    ("objective", "samples"), [("infonce", True), ("multi", True), ("multi", False), ("sigmoid", False)]
)
def test_every_gradient_is_that_of_one_pass(chunk: int, objective: str, samples: bool) -> None:
    model, sides, positive = make(chunk, samples)
    loss_of = loss_with(model, objective, positive)
    whole = loss_of([torch.cat([side.encode(rows) for rows in side.chunks()]) for side in sides])
    whole.backward()
    wanted = gradients(model)
    loss = chunked_backward(sides, loss_of)
    found = gradients(model)
    assert not loss.requires_grad
    torch.testing.assert_close(loss, whole.detach(), rtol=1e-6, atol=0)
    assert found.keys() == wanted.keys()
    assert "logit_scale" in found
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-7, msg=lambda m, n=name: f"{n}: {m}")


def test_gradients_are_added_to_what_is_there_and_scaled_as_asked() -> None:
    model, sides, positive = make(3, samples=False)
    loss_of = loss_with(model, "multi", positive)
    chunked_backward(sides, loss_of)
    once = gradients(model)
    chunked_backward(sides, loss_of, Plan(scale=lambda loss: 8 * loss))
    chunked_backward(sides, loss_of)
    for name, value in gradients(model).items():
        torch.testing.assert_close(value, 9 * once[name], rtol=1e-5, atol=1e-7)


def test_only_the_graph_of_one_chunk_is_alive_at_a_time() -> None:
    """Counts what the towers keep for the backward pass, which is what fills memory."""
    model, sides, positive = make(2, samples=True)
    alive, most = 0, 0

    class Keep(torch.autograd.Function):
        @staticmethod
        def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor) -> Tensor:
            nonlocal alive, most
            if ctx.needs_input_grad[0]:
                alive += len(x)
                most = max(most, alive)
            return x.clone()

        @staticmethod
        def backward(ctx: torch.autograd.function.FunctionCtx, gradient: Tensor) -> Tensor:
            nonlocal alive
            alive -= len(gradient)
            return gradient

    def counted(side: Side) -> Side:
        return Side(
            lambda rows: Keep.apply(side.encode(rows)) if torch.is_grad_enabled() else side.encode(rows),
            side.rows,
            side.chunk,
        )

    chunked_backward([counted(side) for side in sides], loss_with(model, "multi", positive))
    assert (alive, most) == (0, 2)


def test_rows_are_split_in_order_and_the_last_chunk_may_be_smaller() -> None:
    side = Side(lambda rows: torch.empty(0), rows=10, chunk=4)
    assert side.chunks() == [slice(0, 4), slice(4, 8), slice(8, 10)]
