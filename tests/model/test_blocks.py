"""The layers of any tower, and of a model, by depth."""

import torch
from tiny_model import tiny_clip
from torch import nn

from m1clip.config import OptimConfig
from m1clip.model.blocks import find_blocks, layer_lr_factors, model_layers, tower_layers
from m1clip.model.pretrained.bert import BertSize, BertTower
from m1clip.model.pretrained.concat import ConcatImageTower
from m1clip.model.pretrained.dinov2 import DinoSize, DinoTower
from m1clip.model.pretrained.efficientnet import LITE0, LITE2, EfficientNetLite
from m1clip.optimizers import OPTIMIZERS
from m1clip.training.optim import Optimizer
from m1clip.training.torch_optimizers import BuildOptions


def names(group: list[tuple[str, nn.Parameter]]) -> set[str]:
    return {name for name, _ in group}


def side_by_side() -> ConcatImageTower:
    """Seven stages, seven stages, and nine blocks."""
    dino = DinoTower(DinoSize(width=8, layers=9, heads=2, patch_size=7, registers=1), 14)
    return ConcatImageTower(
        [EfficientNetLite(LITE0), EfficientNetLite(LITE2), dino], (224, 260, 14)
    )


def test_last_blocks_of_towers_side_by_side_are_together() -> None:
    layers = tower_layers(side_by_side())
    assert len(layers.blocks) == 9
    last = names(layers.blocks[-1])
    assert {name.split(".")[1] for name in last} == {"0", "1", "2"}
    assert any(name.startswith("parts.0.stages.6.") for name in last)
    assert any(name.startswith("parts.2.transformer.blocks.8.") for name in last)
    assert {name.split(".")[1] for name in names(layers.blocks[1])} == {"2"}
    assert {"parts.0.head.weight", "parts.2.norm.weight"} <= names(layers.output)
    assert {"parts.1.stem.weight", "parts.2.positions"} <= names(layers.input)


def test_layers_of_pretrained_towers() -> None:
    bert = tower_layers(
        BertTower(10, size=BertSize(width=8, layers=3, heads=2, hidden=8, positions=4))
    )
    assert len(bert.blocks) == 3
    assert "tokens.weight" in names(bert.input)
    assert "norm.weight" in names(bert.input)  # of the embeddings, before the first block
    assert names(bert.output) == set()
    layers = find_blocks(EfficientNetLite())
    assert layers is not None
    assert layers[0] == "stages"
    lite = tower_layers(EfficientNetLite())
    assert names(lite.input) == {"stem.weight", "stem.bias"}
    assert names(lite.output) == {"head.weight", "head.bias"}


def test_tower_without_blocks_has_only_an_output() -> None:
    layers = tower_layers(nn.Linear(2, 2))
    assert (layers.input, layers.blocks) == ([], [])
    assert names(layers.output) == {"weight", "bias"}


def test_every_parameter_is_in_one_layer() -> None:
    for tower in (
        tiny_clip(vision_layers=3).text_tower,
        EfficientNetLite(),
        side_by_side(),
        nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)),
    ):
        layers = tower_layers(tower).from_input_to_output()
        placed = [name for group in layers for name, _ in group]
        assert sorted(placed) == sorted(name for name, _ in tower.named_parameters())


def test_layers_of_a_model_are_named_by_tower_and_depth() -> None:
    model = tiny_clip(vision_layers=3)
    layers = model_layers(model)
    image = [layer for layer in layers if layer.startswith("image/")]
    blocks = ["image/block 1", "image/block 2", "image/block 3"]
    assert image == ["image/input", *blocks, "image/output", "image/head"]
    assert layers["scale"] == ["logit_scale"]
    assert "image_tower.patch.weight" in layers["image/input"]
    assert all(".blocks.1." in name for name in layers["image/block 2"])
    placed = sorted(name for group in layers.values() for name in group)
    assert placed == sorted(name for name, _ in model.named_parameters())


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
        rates = {}
        for part, inner in optimizer.parts.items():
            for group in inner.param_groups:
                rates |= dict.fromkeys(group["param_names"], (group["lr"], peak[part]))
        assert rates.keys() == factors.keys()
        assert all(abs(lr - 0.5 * top * factors[name]) < 1e-12 for name, (lr, top) in rates.items())
