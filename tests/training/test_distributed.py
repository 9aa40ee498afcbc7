"""Several ranks against one process: batches, losses, gradients, weights; memory, evaluation, checkpoints."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from ranks import on_ranks
from small_run import screen, small_config
from torch import Tensor

from m1clip.model.clip import normalize
from m1clip.training.distributed import Ranks
from m1clip.training.muon import Muon
from m1clip.training.run import decode_plan
from m1clip.training.setup import Setup, prepare
from m1clip.training.step import TrainStep
from m1clip.training.transfer import Teacher

TINY = {
    "model.patch_size": 16,
    "model.vision_width": 16,
    "model.text_width": 16,
    "model.vision_layers": 1,
    "model.text_layers": 1,
    "model.embed_dim": 8,
    "train.batch_size": 18,  # divided unevenly by 4
    "train.text_contrast": 0.0,
    "optim.optimizer": "adamw",
    "data.crop_min": 0.5,
}
CASES: dict[str, dict[str, Any]] = {
    "infonce": {"train.loss": "infonce"},
    "multi": {"optim.optimizer": "muon"},
    "multi in micro-batches": {"train.micro_batch": 2},
    "text-text": {"train.text_contrast": 0.3, "data.captions_per_step": 3},
    "sigmoid": {"train.loss": "sigmoid", "optim.optimizer": "muon"},
    "sigmoid in micro-batches": {"train.loss": "sigmoid", "train.micro_batch": 4},
    "distillation": {"train.text_contrast": 0.2, "teacher": True},
    "distillation of sigmoid": {"train.loss": "sigmoid", "teacher": True, "train.micro_batch": 3},
}
LONG = ("multi in micro-batches", "sigmoid")  # 20 steps with AdamW and with Muon, two of the others


def prepared() -> Setup:
    return prepare(small_config(TINY), lambda line: None, decode_plan(screen()))


def make(setup: Setup, ranks: Ranks, changes: dict[str, Any]) -> tuple[Setup, TrainStep]:
    """A training step in float64."""
    changes = TINY | changes
    teacher = changes.pop("teacher", False)
    config = small_config({**changes, "train.device": "cpu"})
    training = dataclasses.replace(setup.training, captions_per_image=config.data.captions_per_step or 1)
    start = setup.start.config
    start = dataclasses.replace(
        setup.start, config=dataclasses.replace(start, logit_bias=config.train.loss == "sigmoid")
    )
    setup = dataclasses.replace(setup, config=config, training=training, start=start).divided(ranks)
    if teacher:
        draw, captions = np.random.default_rng(0), int(setup.training.captions.caption_ids.max()) + 1
        images = setup.training.plan.images
        image, text = (draw.normal(size=(count, 6)).astype(np.float16) for count in (images, captions))
        setup = dataclasses.replace(setup, teacher=Teacher(image, np.arange(images), text, np.arange(captions), 2.0))
    step = setup.make_step()
    model = step.model.double()
    step.encode_image = lambda pixels, *kept: normalize(model.image_head(model.image_tower(pixels.double(), *kept)))
    step.encode_text = lambda tokens: normalize(model.text_head(model.text_tower(tokens)))
    muon = step.optimizer.parts.get("muon")
    if isinstance(muon, Muon):
        muon.dtype = torch.float64
    return setup, step


def train(ranks: Ranks, cases: list[str]) -> dict[str, dict[str, Any]]:
    """For each case the ids of the batches, the losses, the first gradient and the last weights."""
    found, common = {}, prepared()
    for name in cases:
        setup, step = make(common, ranks, CASES[name])
        batches = [setup.training[number] for number in range(20 if name in LONG else 2)]
        step.compute_gradients(batches[1], 1)
        gradients = {key: p.grad.clone() for key, p in step.model.named_parameters() if p.grad is not None}
        step.clear()
        results = [step(batch, number) for number, batch in enumerate(batches)]
        found[name] = {
            "ids": [batch.sample_ids for batch in batches],
            "views": [batch.views for batch in batches],
            "gradients": gradients,
            "losses": torch.stack([torch.stack(pair) for pair in results]),
            "weights": {key: p.detach() for key, p in step.model.named_parameters()},
        }
    return found


@pytest.fixture(scope="module")
def one_process() -> dict[str, dict[str, Any]]:
    return train(Ranks(), list(CASES))


def assert_close(found: Tensor, wanted: Tensor, what: str) -> None:
    assert found.dtype == wanted.dtype
    difference = float((found - wanted).norm() / wanted.norm().clamp(min=1e-9))
    assert difference < 1e-5, f"{what}: relative difference {difference:.1e}"


@pytest.mark.parametrize(("size", "cases"), [(2, list(CASES)), (4, ["text-text", "distillation of sigmoid"])])
def test_ranks_train_like_one_process(size: int, cases: list[str], one_process: dict[str, dict[str, Any]]) -> None:
    results = on_ranks(size, train, cases)
    for name in cases:
        wanted = one_process[name]
        for key in ("ids", "views"):
            for step, whole in enumerate(wanted[key]):
                assert torch.equal(torch.cat([result[name][key][step] for result in results]), whole), (name, key)
        for result in results:
            found = result[name]
            assert_close(found["losses"], wanted["losses"], f"{name}: losses and gradient norms")
            for key in ("gradients", "weights"):
                assert found[key].keys() == wanted[key].keys()
                for parameter, value in wanted[key].items():
                    assert_close(found[key][parameter], value, f"{name}: {key} of {parameter}")
            for parameter, value in results[0][name]["weights"].items():
                assert torch.equal(found["weights"][parameter], value), f"{name}: ranks differ in {parameter}"
