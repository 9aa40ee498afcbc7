"""Layer groups of any tower, and learning rates by depth."""

import torch
from tiny_model import tiny_clip
from torch import nn

from m1clip.config import OPTIMIZERS, OptimConfig
from m1clip.model.pretrained.efficientnet import LITE0, LITE2, ConcatTower, EfficientNetLite
from m1clip.model.pretrained.minilm import BertSize, BertTower
from m1clip.model.unfreeze import find_blocks, layer_groups, layer_lr_factors
from m1clip.training.optim import PARTS, Optimizer


def names(group: list[tuple[str, nn.Parameter]]) -> set[str]:
    return {name for name, _ in group}


def test_layer_groups_of_pretrained_towers() -> None:
    bert = layer_groups(
        BertTower(10, size=BertSize(width=8, layers=3, heads=2, hidden=8, positions=4))
    )
    assert len(bert) == 5
    assert "tokens.weight" in names(bert[0])
    assert "norm.weight" in names(bert[0])  # of the embeddings, before the first block
    assert names(bert[-1]) == set()
    found = find_blocks(EfficientNetLite())
    assert found is not None
    assert found[0] == "stages"
    lite = layer_groups(EfficientNetLite())
    assert names(lite[0]) == {"stem.weight", "stem.bias"}
    assert names(lite[-1]) == {"head.weight", "head.bias"}
    assert len(layer_groups(nn.Linear(2, 2))) == 2  # no blocks: one group


def test_every_parameter_is_in_one_layer_group() -> None:
    for tower in (
        tiny_clip(vision_layers=3).text_tower,
        EfficientNetLite(),
        ConcatTower(LITE0, LITE2),
        nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)),
    ):
        placed = [name for group in layer_groups(tower) for name, _ in group]
        assert sorted(placed) == sorted(name for name, _ in tower.named_parameters())


def test_layer_decay_lowers_learning_rates_of_early_layers() -> None:
    torch.manual_seed(0)
    model = tiny_clip(vision_layers=3)
    factors = layer_lr_factors(model, ("image_tower", "text_tower"), 0.5)
    assert (
        factors["image_tower.norm.weight"]
        == factors["image_head.weight"]
        == factors["logit_scale"]
        == 1
    )
    assert factors["image_tower.transformer.blocks.2.attn.qkv.weight"] == 0.5
    assert factors["image_tower.transformer.blocks.0.attn.qkv.weight"] == 0.125
    assert factors["image_tower.patch.weight"] == 0.0625
    assert factors["text_tower.transformer.blocks.1.mlp.up.weight"] == 0.5
    for kind in OPTIMIZERS:
        config = OptimConfig(optimizer=kind, lr=1e-3, muon_lr=0.02, layer_decay=0.5)
        optimizer = Optimizer(model, config, fused=False)
        optimizer.set_lr(0.5)
        peak = {name: part.peak_lr(config) for name, part in PARTS.items()}
        seen = {}
        for part, inner in optimizer.parts.items():
            for group in inner.param_groups:
                seen |= dict.fromkeys(group["param_names"], (group["lr"], peak[part]))
        assert seen.keys() == factors.keys()
        assert all(abs(lr - 0.5 * top * factors[name]) < 1e-12 for name, (lr, top) in seen.items())
