"""No matmul of a training step exceeds what MPS computes right: the real step, walked on meta tensors."""

import dataclasses
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from machines import M1, product_is_wrong
from small_run import small_config
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from m1clip.data.images import Preprocess
from m1clip.hardware.device import Device
from m1clip.model.presets import (
    CLIPConfig,
    HeadConfig,
    PretrainedImageConfig,
    PretrainedTextConfig,
    clip_config,
)
from m1clip.model.pretrained import registry
from m1clip.model.pretrained.bert import BertSize
from m1clip.training.compose import compose_step
from m1clip.training.memory import random_batch
from m1clip.training.step import make_parts
from m1clip.training.transfer import ModelInit, Trainable


class WrongProducts(TorchDispatchMode):
    """Collects the products of a step that an M1 would compute wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.wrong: set[tuple[str, int]] = set()
        self.longest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in ("mm", "bmm", "addmm", "baddbmm", "addbmm", "linear"):
            a, b = args[-2:] if name in ("mm", "bmm") else args[1:3]
            reduction, sides = a.shape[-1], (a.shape[-2], b.shape[-1])
            self.longest = max(self.longest, reduction)
            if product_is_wrong(reduction, sides):
                self.wrong.add((name, reduction))
        return func(*args, **(kwargs or {}))


class LinearWeights(TorchFunctionMode):
    """Fails where a linear layer gets a weight that is not contiguous, or half precision without a bias in 3-D."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear:
            x, weight, bias = (*args, (kwargs or {}).get("bias"))[:3]
            assert weight.is_contiguous()
            assert bias is not None or x.ndim == 2
        return func(*args, **(kwargs or {}))


ADAPTER = HeadConfig(kind="adapter", hidden=512)


def frozen_shape(image: Any, text: Any) -> CLIPConfig:
    return CLIPConfig(
        image_tower=image, text_tower=text, image_head=ADAPTER, text_head=ADAPTER, embed_dim=256
    )


SIZE = {
    "model.image_size": 224,
    "model.patch_size": 16,
    "model.context_length": 77,
    "model.text_layers": 1,
}
OURS = clip_config(small_config(SIZE).model)
TOWERS = frozen_shape(
    PretrainedImageConfig(
        kind="efficientnet-lite0", name="efficientnet-lite0", image_size=64, settings=""
    ),
    PretrainedTextConfig(
        kind="minilm", name="minilm", context_length=64, vocab_size=1000, settings=""
    ),
)
# Recipe -> (start, images, captions per image, tokens, settings): each passes the limit somewhere.
RECIPES: dict[str, tuple[ModelInit, int, int, int, dict[str, Any]]] = {
    "scratch": (ModelInit(OURS), 180, 3, 77, {}),
    "scratch, sigmoid": (
        ModelInit(dataclasses.replace(OURS, logit_bias=True)),
        430,
        1,
        77,
        {"train.loss": "sigmoid", "optim.optimizer": "adamw"},
    ),
    "scratch, micro-batches": (ModelInit(OURS), 500, 1, 77, {"train.micro_batch": 450}),
    "frozen": (ModelInit(TOWERS, {}, Trainable(False, False), new_heads=True), 33_000, 2, 64, {}),
    "frozen image, own text": (
        ModelInit(
            frozen_shape(TOWERS.image_tower, OURS.text_tower),
            {},
            Trainable(False, True),
            new_heads=True,
        ),
        430,
        1,
        77,
        {},
    ),
    "finetune": (ModelInit(TOWERS, {}, Trainable(True, True)), 520, 1, 64, {}),
}


def walk(recipe: str, **changes: Any) -> WrongProducts:
    """The products of a step of a recipe, with the rules of an M1 or with some of them changed."""
    model_init, images, captions, tokens, settings = RECIPES[recipe]
    names = {
        "data.captions_per_step": captions,
        "train.batch_size": images,
        "train.text_contrast": 0.2,
    }
    config = small_config({**names, **settings})
    device = Device("mps", M1)
    device.torch = torch.device("meta")
    device.capabilities = dataclasses.replace(device.capabilities, fused_optimizer=False, **changes)
    with torch.device("meta"), mock.patch.object(registry, "MINILM", BertSize(layers=1)):
        model = model_init.build(load_weights=False)
        step = compose_step(
            make_parts(
                model, config, device, "fp32", Preprocess(image_size=model_init.config.image_size)
            )
        )
        step.parts.update.skip = "never"  # meta tensors have no values to check
        widths = zip(
            (model.image_tower.width, model.text_tower.width), model_init.trainable, strict=True
        )
        frozen = tuple(0 if trained else width for width, trained in widths)
        batch = random_batch(model_init.config, images, tokens, captions, frozen)  # type: ignore[arg-type]
        # It does not know the meta device.
        no_autocast = mock.patch("torch.is_autocast_enabled", return_value=False)
        # Few blocks of the loss instead of 800: meta tensors take no memory, and each block time.
        few_blocks = mock.patch("m1clip.losses.run_loss.TERM_LOGITS", 1 << 27)
        with no_autocast, few_blocks, LinearWeights(), WrongProducts() as operations:
            step.run(batch, 1)
    return operations


@pytest.mark.parametrize("recipe", RECIPES)
def test_step_stays_below_the_limit_of_an_m1(recipe: str) -> None:
    operations = walk(recipe)
    assert operations.longest > 16_000, "the walk sees the gradients of the weights"
    assert not operations.wrong


@pytest.mark.parametrize(
    "recipe", ["scratch", "scratch, micro-batches", "frozen image, own text", "finetune"]
)
def test_walk_finds_wrong_products_without_the_rule(recipe: str) -> None:
    assert walk(recipe, max_reduction=None, max_sequences=None).wrong


def test_losses_without_their_split_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("m1clip.losses.run_loss.MAX_ROWS", 1 << 30)
    assert {reduction for _, reduction in walk("frozen").wrong} == {33_000, 66_000}
