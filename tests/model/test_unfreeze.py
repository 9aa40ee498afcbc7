"""Learning rates by depth."""

import torch
from tiny_model import tiny_clip

from m1clip.config import OptimConfig
from m1clip.model.unfreeze import layer_lr_factors
from m1clip.optimizers import OPTIMIZERS
from m1clip.training.optim import BuildOptions, Optimizer


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
        optimizer = Optimizer(model, config, BuildOptions())
        optimizer.set_lr(0.5)
        peak = {part.name: getattr(config, part.lr_setting) for part in OPTIMIZERS[kind].parts}
        seen = {}
        for part, inner in optimizer.parts.items():
            for group in inner.param_groups:
                seen |= dict.fromkeys(group["param_names"], (group["lr"], peak[part]))
        assert seen.keys() == factors.keys()
        assert all(abs(lr - 0.5 * top * factors[name]) < 1e-12 for name, (lr, top) in seen.items())
