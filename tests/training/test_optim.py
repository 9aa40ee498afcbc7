"""Optimizer groups, learning rates, and state round trip."""

import ast
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import m1clip
from m1clip.config import OptimConfig
from m1clip.model.clip import CLIP, build_clip
from m1clip.model.presets import CLIPConfig, with_fields
from m1clip.optimizers import ADAMW, MUON, MUON_WEIGHT_DECAY, OPTIMIZERS, OptimizerEntry
from m1clip.training.logger import logged_learning_rates
from m1clip.training.optim import Optimizer
from m1clip.training.torch_optimizers import ADAMW_EPS, BUILDERS, BuildOptions

SHAPE = with_fields(CLIPConfig(),
    image_size=16, patch_size=8, vision_width=16, vision_layers=2, vision_heads=2, text_width=16, text_layers=1,
    text_heads=2, context_length=8, vocab_size=20, embed_dim=8, patch_bias=True, projection_bias=True, logit_bias=True,
)  # fmt: skip


def clip() -> CLIP:
    torch.manual_seed(0)
    return build_clip(with_fields(SHAPE, eot_id=2))


def groups_of(optimizer: Optimizer) -> dict[str, tuple[str, float]]:
    """Parameter name -> (optimizer, weight decay); fails if one is in two groups."""
    group_of: dict[str, tuple[str, float]] = {}
    for part_name, part in optimizer.parts.items():
        for group in part.param_groups:
            for name in group["param_names"]:
                assert name not in group_of
                group_of[name] = (part_name, group["weight_decay"])
    return group_of


def give_gradients(model: CLIP, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=generator)


def test_weight_decay_applies_to_matrices_only() -> None:
    model = clip()
    group_of = groups_of(
        Optimizer(model, OptimConfig(optimizer="adamw", wd=0.3), BuildOptions(fused=True))
    )
    for name, parameter in model.named_parameters():
        spared = (
            "norm" in name or name.endswith("bias") or name == "logit_scale" or name.endswith("cls")
        )
        assert group_of[name][1] == (0.0 if spared else 0.3), name
        assert spared == (parameter.ndim < 2), name
    assert group_of["logit_bias"][1] == group_of["logit_scale"][1] == 0.0


def test_muon_optimizes_the_matrices_inside_the_blocks() -> None:
    model = clip()
    group_of = groups_of(Optimizer(model, OptimConfig(optimizer="muon"), BuildOptions(fused=True)))
    kinds = ("attn.qkv", "attn.out", "mlp.up", "mlp.down")
    blocks = [f"image_tower.transformer.blocks.{i}" for i in (0, 1)] + [
        "text_tower.transformer.blocks.0"
    ]
    expected = {f"{block}.{kind}.weight" for block in blocks for kind in kinds}
    assert {name for name, (part, _) in group_of.items() if part == "muon"} == expected
    assert all(group_of[name][1] == MUON_WEIGHT_DECAY for name in expected)
    assert group_of["text_tower.tokens.weight"][0] == group_of["image_head.weight"][0] == "adamw"


def test_first_adamw_step_matches_formula() -> None:
    model = clip()
    optimizer = Optimizer(
        model, OptimConfig(optimizer="adamw", lr=0.1, wd=0.5), BuildOptions(fused=True)
    )
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    give_gradients(model, 1)
    optimizer.step()
    for name, p in model.named_parameters():
        assert p.grad is not None
        decay = 0.1 * 0.5 if p.ndim >= 2 else 0.0
        # Both moments are bias-corrected in the first step.
        update = p.grad / (p.grad.abs() + ADAMW_EPS)
        torch.testing.assert_close(
            p.detach(), before[name] * (1 - decay) - 0.1 * update, atol=1e-5, rtol=1e-5
        )
    optimizer.zero_grad()
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer_state_round_trip(name: str) -> None:
    config = OptimConfig(optimizer=name)
    model, twin = clip(), clip()
    optimizer = Optimizer(model, config, BuildOptions(fused=True))
    for seed in range(3):
        give_gradients(model, seed)
        optimizer.step()
    state_before = {key: t.clone() for key, t in optimizer.tensors().items()}
    assert all(isinstance(t, Tensor) for t in state_before.values())
    twin.load_state_dict(model.state_dict())
    other = Optimizer(twin, config, BuildOptions(fused=True))
    assert other.tensors() == {}
    other.load_tensors(state_before)
    assert other.tensors().keys() == state_before.keys()
    for m, o in ((model, optimizer), (twin, other)):
        o.set_lr(0.7)
        give_gradients(m, 9)
        o.step()
    for one, same in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(one, same)
    for key, tensor in optimizer.tensors().items():
        assert torch.equal(tensor, other.tensors()[key]), key


def test_device_learning_rate_is_updated_in_place() -> None:
    """A CUDA graph reads the tensor that it was captured with."""
    models = clip(), clip()
    config = OptimConfig(lr=0.01, muon_lr=0.02)
    plain, tensor = (Optimizer(model, config, BuildOptions(fused=True)) for model in models)
    groups = [group for part in tensor.parts.values() for group in part.param_groups]
    for group in groups:  # AdamW refuses capturable on a CPU
        group["lr"] = torch.tensor(float(group["lr"]))
    before = [group["lr"] for group in groups]
    for step, factor in enumerate((0.3, 1.0)):
        for model, optimizer in zip(models, (plain, tensor), strict=True):
            give_gradients(model, step)
            optimizer.set_lr(factor)
            optimizer.step()
    assert all(group["lr"] is old for group, old in zip(groups, before, strict=True))
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(one, other, atol=2e-4, rtol=1e-3)


def test_every_optimizer_of_the_settings_is_built_from_parts() -> None:
    assert {part.name for entry in OPTIMIZERS.values() for part in entry.parts} == BUILDERS.keys()
    model = clip()
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    for name in OPTIMIZERS:
        assert (
            groups_of(
                Optimizer(model, OptimConfig(optimizer=name), BuildOptions(fused=True))
            ).keys()
            == trained
        )


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_part_stores_as_many_moments_as_its_entry_says(name: str) -> None:
    model = clip()
    optimizer = Optimizer(model, OptimConfig(optimizer=name), BuildOptions(fused=True))
    give_gradients(model, 0)
    optimizer.step()
    sizes = {key: p.numel() for key, p in model.named_parameters()}
    state = optimizer.tensors()
    for part in OPTIMIZERS[name].parts:
        names = {key.split("/")[1] for key in state if key.startswith(f"{part.name}/")}
        values = sum(t.numel() for key, t in state.items() if key.startswith(f"{part.name}/"))
        counters = len(names)  # at most one number per parameter, such as the step
        weights = sum(sizes[parameter] for parameter in names)
        assert weights
        assert 0 <= values - part.moments * weights <= counters
    assert OPTIMIZERS[name].trained_bytes == 4 * (
        1 + max(p.moments for p in OPTIMIZERS[name].parts)
    )


def test_every_part_that_mlx_trains_has_its_update() -> None:
    """Read from the source: most machines have no MLX."""
    tree = ast.parse((Path(m1clip.__file__).parent / "mlx/step.py").read_text())
    (table,) = (
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "UPDATES"
    )
    assert isinstance(table, ast.Dict)
    updates = {key.value for key in table.keys if isinstance(key, ast.Constant)}
    parts = {part for entry in OPTIMIZERS.values() for part in entry.parts}
    assert {part.name for part in parts if part.in_mlx} == updates


class SignSGD(torch.optim.Optimizer):
    """An optimizer of a stranger: it knows nothing of `found_inf`."""

    def __init__(self, groups: Any) -> None:
        super().__init__(groups, {"lr": 0.0, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.sub_(group["lr"] * parameter.grad.sign())


def test_another_optimizer_is_an_entry_and_a_builder(monkeypatch: pytest.MonkeyPatch) -> None:
    sign = replace(ADAMW, name="sign", skips_on_device=False, in_mlx=False)
    entry = OptimizerEntry("The sign of the gradient", (MUON, sign), lr_factor=0.3)
    monkeypatch.setitem(OPTIMIZERS, "sign", entry)
    monkeypatch.setitem(BUILDERS, "sign", lambda groups, options: SignSGD(groups))
    model = clip()
    config = OptimConfig()
    # The choices of the setting are fixed at import.
    object.__setattr__(config, "optimizer", "sign")
    optimizer = Optimizer(model, config, BuildOptions(fused=True))
    assert list(optimizer.parts) == ["muon", "sign"]
    assert not entry.skips_on_device, "the host decides whether its steps are skipped"
    assert not entry.in_mlx
    assert all(OPTIMIZERS[name].skips_on_device for name in ("muon", "adamw"))
    assert entry.help_text == "The sign of the gradient (default: --lr x 0.3)"
    assert entry.lr_options == ["--lr", "--muon-lr"]
    optimizer.set_lr(0.5)
    assert logged_learning_rates(optimizer) == {"lr": config.lr / 2, "muon_lr": config.muon_lr / 2}
    optimizer.set_lr(1.0)
    before = model.logit_scale.detach().clone()
    give_gradients(model, 1)
    optimizer.step()
    torch.testing.assert_close(
        model.logit_scale.detach(), before - config.lr * model.logit_scale.grad.sign()
    )
