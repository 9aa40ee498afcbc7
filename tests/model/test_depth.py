"""How deep a parameter lies, in towers of any make; and the learning rates that follow from it."""

from __future__ import annotations

import torch
from tiny_model import tiny_clip
from torch import nn

from m1clip.config import OptimConfig
from m1clip.model.lora import blocks_of, ladder, rate_shares
from m1clip.model.pretrained import BertSize, BertTower, EfficientNetLite0
from m1clip.training.optim import Optimizer


def names(rung: list[tuple[str, nn.Parameter]]) -> set[str]:
    return {name for name, _ in rung}


def test_towers_of_ours() -> None:
    rungs = ladder(tiny_clip(vision_layers=3).image_tower)
    assert len(rungs) == 5
    assert {"patch.weight", "norm_pre.weight"} <= names(rungs[0])
    assert all(name.startswith("transformer.blocks.1.") for name in names(rungs[2]))
    assert names(rungs[-1]) == {"norm.weight", "norm.bias"}


def test_towers_of_others() -> None:
    bert = ladder(BertTower(10, size=BertSize(width=8, layers=3, heads=2, hidden=8, positions=4)))
    assert len(bert) == 5
    assert "tokens.weight" in names(bert[0])
    assert "norm.weight" in names(bert[0])  # of the embeddings, before the first block
    assert names(bert[-1]) == set()
    found = blocks_of(EfficientNetLite0())
    assert found is not None
    assert found[0] == "stages"
    lite = ladder(EfficientNetLite0())
    assert names(lite[0]) == {"stem.weight", "stem.bias"}
    assert names(lite[-1]) == {"head.weight", "head.bias"}
    assert len(ladder(nn.Linear(2, 2))) == 2  # no blocks: one piece


def test_every_parameter_has_one_place() -> None:
    for tower in (
        tiny_clip(vision_layers=3).text_tower,
        EfficientNetLite0(),
        nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)),
    ):
        placed = [name for rung in ladder(tower) for name, _ in rung]
        assert sorted(placed) == sorted(name for name, _ in tower.named_parameters())


def test_rates_fall_with_depth() -> None:
    torch.manual_seed(0)
    model = tiny_clip(vision_layers=3)
    shares = rate_shares(model, ("image_tower", "text_tower"), 0.5)
    assert shares["image_tower.norm.weight"] == shares["image_head.weight"] == shares["logit_scale"] == 1
    assert shares["image_tower.transformer.blocks.2.attn.qkv.weight"] == 0.5
    assert shares["image_tower.transformer.blocks.0.attn.qkv.weight"] == 0.125
    assert shares["image_tower.patch.weight"] == 0.0625
    assert shares["text_tower.transformer.blocks.1.mlp.up.weight"] == 0.5
    for kind in ("adamw", "muon"):
        optimizer = Optimizer(model, OptimConfig(optimizer=kind, lr=1e-3, muon_lr=0.02, layer_decay=0.5), fused=False)  # type: ignore[arg-type]
        optimizer.set_rate(0.5)
        peak = {"adamw": 1e-3, "muon": 0.02}
        seen = {}
        for part, inner in optimizer.parts.items():
            for group in inner.param_groups:
                seen |= dict.fromkeys(group["param_names"], (group["lr"], peak[part]))
        assert seen.keys() == shares.keys()
        assert all(abs(lr - 0.5 * top * shares[name]) < 1e-12 for name, (lr, top) in seen.items())
