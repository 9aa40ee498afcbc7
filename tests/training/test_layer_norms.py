"""What the probe says of layers, against the same computed by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from m1clip.config import OptimConfig
from m1clip.training.logger import LayerProbe, layer_of, layers_interval
from m1clip.training.optim import Optimizer


def test_parameters_belong_to_layers_with_plain_names() -> None:
    assert layer_of("image_tower.transformer.blocks.0.attn.qkv.weight") == "image block 1"
    assert layer_of("text_tower.transformer.blocks.11.mlp.up.bias") == "text block 12"
    assert layer_of("text_tower.tokens.weight") == "text stem"
    assert layer_of("image_tower.norm.weight") == "image head"
    assert layer_of("image_head.weight") == "image head"
    assert layer_of("logit_scale") == "temperature"


def test_looks_fall_on_lines_of_the_log() -> None:
    assert layers_interval(None, 4000, 10) == 100
    assert layers_interval(None, 20, 10) == 10
    assert layers_interval(25, 4000, 10) == 30
    assert layers_interval(0, 4000, 10) == 0


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.image_tower = nn.ModuleDict({"patch": nn.Linear(3, 4), "norm": nn.LayerNorm(4)})
        self.text_tower = nn.ModuleDict({"tokens": nn.Linear(4, 2, bias=False)})


@pytest.mark.parametrize("scale", [1.0, 0.25])  # 0.25: as if the gradients had been clipped to a quarter
def test_norms_are_those_of_the_gradients_and_of_the_move(scale: float) -> None:
    torch.manual_seed(0)
    model = Small()
    optimizer = Optimizer(model, OptimConfig(optimizer="adamw", wd=0.0), fused=False)
    probe = LayerProbe(model, optimizer)
    grads = {name: torch.randn_like(p) for name, p in model.named_parameters()}
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for name, p in model.named_parameters():
        p.grad = scale * grads[name]
    probe.arm()
    optimizer.step()
    total = math.sqrt(sum(float(g.square().sum()) for g in grads.values()))
    found = probe.take(total)
    assert found is not None
    groups = {
        "image stem": ["image_tower.patch.weight", "image_tower.patch.bias"],
        "image head": ["image_tower.norm.weight", "image_tower.norm.bias"],
        "text stem": ["text_tower.tokens.weight"],
    }
    assert found.keys() == groups.keys()
    after = {name: p.detach() for name, p in model.named_parameters()}
    for layer, names in groups.items():
        norm = math.sqrt(sum(float(grads[n].square().sum()) for n in names))
        moved = math.sqrt(sum(float((after[n] - before[n]).square().sum()) for n in names))
        weight = math.sqrt(sum(float(before[n].square().sum()) for n in names))
        assert found[layer] == pytest.approx([norm, moved / weight], rel=1e-3)


def test_it_looks_once_and_leaves_no_trace() -> None:
    model = Small()
    optimizer = Optimizer(model, OptimConfig(optimizer="adamw"), fused=False)
    probe = LayerProbe(model, optimizer)
    assert probe.take(1.0) is None  # nothing was moved
    probe.arm()
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert probe.take(1.0) is not None
    optimizer.step()
    assert probe.take(1.0) is None
    assert all(not part._optimizer_step_pre_hooks for part in optimizer.parts.values())
