"""The micro-batched gradient against that of all rows in one graph."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from m1clip.losses import OBJECTIVES
from m1clip.model.clip import Features
from m1clip.training.grad_cache import GradCache, Tower

IMAGES, CAPTIONS = 10, 30


class TwoTowers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.image = nn.Sequential(nn.Linear(7, 16), nn.GELU(), nn.Dropout(0.3), nn.Linear(16, 5))
        self.text = nn.Sequential(nn.Linear(9, 16), nn.GELU(), nn.Dropout(0.3), nn.Linear(16, 5))
        self.logit_scale = nn.Parameter(torch.tensor(2.0))
        self.logit_bias = nn.Parameter(torch.tensor(-1.0))

    def gradients(self) -> dict[str, Tensor]:
        found = {name: p.grad.clone() for name, p in self.named_parameters() if p.grad is not None}
        self.zero_grad(set_to_none=True)
        return found


def seeded(tower: nn.Module, inputs: Tensor) -> Callable[[slice], Tensor]:
    def encode(rows: slice) -> Tensor:
        torch.manual_seed(rows.start)
        return F.normalize(tower(inputs[rows]), dim=-1)

    return encode


def gradients_of(
    towers: list[Tower], loss_function: Callable[..., Tensor], scale: Callable[[Tensor], Tensor] = lambda loss: loss
) -> Tensor:
    """Both passes, with the gradient of the features between them; returns the loss."""
    cache = GradCache()
    features = [feature.requires_grad_() for feature in cache.encode(towers)]
    loss = loss_function(*features)
    scale(loss).backward()
    cache.backward(towers, [feature.grad for feature in features if feature.grad is not None])
    return loss.detach()


def make(micro_batch: int, captions: int, objective: str) -> tuple[TwoTowers, list[Tower], Callable[..., Tensor]]:
    model = TwoTowers()
    torch.manual_seed(1)
    pixels, tokens = torch.randn(IMAGES, 7), torch.randn(captions, 9)
    towers = [
        Tower(seeded(model.image, pixels), IMAGES, micro_batch),
        Tower(seeded(model.text, tokens), captions, micro_batch * captions // IMAGES),
    ]
    positive = torch.arange(IMAGES)[:, None] == torch.arange(captions) % IMAGES

    def loss(image: Tensor, text: Tensor) -> Tensor:
        return OBJECTIVES[objective](Features(image, text, model.logit_scale.exp(), model.logit_bias), positive)

    return model, towers, loss


@pytest.mark.parametrize("micro_batch", [1, 3, 4, 10])
@pytest.mark.parametrize(
    ("objective", "captions"), [("infonce", IMAGES), ("multi", IMAGES), ("multi", CAPTIONS), ("sigmoid", CAPTIONS)]
)
def test_gradients_match_single_pass(micro_batch: int, objective: str, captions: int) -> None:
    model, towers, loss_function = make(micro_batch, captions, objective)
    one_pass = loss_function(*(torch.cat([t.encode(rows) for rows in t.micro_batches()]) for t in towers))
    one_pass.backward()
    expected = model.gradients()
    loss = gradients_of(towers, loss_function)
    found = model.gradients()
    torch.testing.assert_close(loss, one_pass.detach(), rtol=1e-6, atol=0)
    assert found.keys() == expected.keys()
    assert "logit_scale" in found
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-7, msg=lambda m, n=name: f"{n}: {m}")


def test_gradients_accumulate_and_scale() -> None:
    model, towers, loss_function = make(3, CAPTIONS, "multi")
    gradients_of(towers, loss_function)
    once = model.gradients()
    gradients_of(towers, loss_function, lambda loss: 8 * loss)
    gradients_of(towers, loss_function)
    for name, value in model.gradients().items():
        torch.testing.assert_close(value, 9 * once[name], rtol=1e-5, atol=1e-7)


def test_only_one_micro_batch_of_activations_is_alive() -> None:
    _, towers, loss_function = make(2, IMAGES, "multi")
    alive, most = 0, 0

    class Count(torch.autograd.Function):
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

    def counted(tower: Tower) -> Tower:
        return Tower(
            lambda rows: Count.apply(tower.encode(rows)) if torch.is_grad_enabled() else tower.encode(rows),
            tower.rows,
            tower.micro_batch,
        )

    gradients_of([counted(tower) for tower in towers], loss_function)
    assert (alive, most) == (0, 2)
    tower = Tower(lambda rows: torch.empty(0), rows=10, micro_batch=4)
    assert tower.micro_batches() == [slice(0, 4), slice(4, 8), slice(8, 10)]
