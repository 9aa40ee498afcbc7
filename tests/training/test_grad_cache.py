"""The micro-batched gradient against that of all rows in one graph."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from m1clip.losses import OBJECTIVES
from m1clip.model.clip import Features
from m1clip.training.step import Tower, split

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
    with torch.no_grad():
        features = [tower.features_only() for tower in towers]
    loss = loss_function(*(feature.requires_grad_() for feature in features))
    scale(loss).backward()
    for tower, feature in zip(towers, features, strict=True):
        assert feature.grad is not None
        tower.backward(feature.grad)
    return loss.detach()


def make(micro_batch: int, captions: int, objective: str) -> tuple[TwoTowers, list[Tower], Callable[..., Tensor]]:
    model = TwoTowers()
    torch.manual_seed(1)
    pixels, tokens = torch.randn(IMAGES, 7), torch.randn(captions, 9)
    towers = [
        Tower(seeded(model.image, pixels), split(slice(0, IMAGES), micro_batch)),
        Tower(seeded(model.text, tokens), split(slice(0, captions), micro_batch * captions // IMAGES), extra=2),
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
    one_pass = loss_function(*(tower.features() for tower in towers))
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
            tower.slices,
        )

    gradients_of([counted(tower) for tower in towers], loss_function)
    assert (alive, most) == (0, 2)
    assert split(slice(0, 10), 4) == [slice(0, 4), slice(4, 8), slice(8, 10)]
