"""Steps as one thing: compiled blocks give the plain model's numbers, a captured step is the step."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import torch
from torch import Tensor

from m1clip.config import OptimConfig
from m1clip.model.clip import CLIP, build_clip
from m1clip.model.presets import CLIPConfig, Pooling, with_fields
from m1clip.training.optim import Optimizer

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
try:
    fused = importlib.import_module("fused")
finally:
    del sys.path[0]
CapturedStep, compile_blocks = fused.CapturedStep, fused.compile_blocks


def clip(pooling: Pooling) -> CLIP:
    shape = with_fields(CLIPConfig(),
        image_size=16, patch_size=8, vision_width=16, vision_layers=2, vision_heads=2, text_width=16, text_layers=2,
        text_heads=2, context_length=8, vocab_size=20, embed_dim=8, pooling=pooling,
    )  # fmt: skip
    torch.manual_seed(0)
    return build_clip(with_fields(shape, eot_id=2))


def test_compiled_blocks_give_the_same_features() -> None:
    for pooling in ("cls", "mean"):
        plain, compiled = clip(pooling), clip(pooling)
        seen: list[str] = []

        def backend(graph: torch.fx.GraphModule, inputs: list[Tensor], seen: list[str] = seen) -> object:
            seen.append("graph")
            return graph.forward

        compile_blocks(compiled, backend=backend)
        pixels, ids = torch.randn(3, 3, 16, 16), torch.tensor([[1, 5, 2, 0], [1, 2, 0, 0], [1, 7, 8, 2]])
        for one, other in zip(plain(pixels, ids)[:3], compiled(pixels, ids)[:3], strict=True):
            torch.testing.assert_close(one, other)
        assert len(seen) >= 4, "the first and the last block of each tower"
        assert compiled.state_dict().keys() == plain.state_dict().keys()


def test_without_cuda_a_captured_step_is_the_step() -> None:
    calls = []

    def work(x: Tensor) -> tuple[Tensor, ...]:
        calls.append(x)
        return (x + 1,)

    step = CapturedStep(work, torch.nn.Linear(1, 1))
    for value in range(6):
        assert step(torch.tensor([value]))[0].item() == value + 1
    assert len(calls) == 6


def test_rates_on_the_device_move_the_weights_alike() -> None:
    models = clip("cls"), clip("cls")
    config = OptimConfig(lr=0.01, muon_lr=0.02)
    plain = Optimizer(models[0], config, fused=True)
    # AdamW itself refuses capturable on a CPU, so only the rates are made tensors here.
    tensor = Optimizer(models[1], config, fused=True)
    for part in tensor.parts.values():
        for group in part.param_groups:
            group["lr"] = torch.tensor(float(group["lr"]))
    rates = [group["lr"] for part in tensor.parts.values() for group in part.param_groups]
    for step, share in enumerate((0.3, 1.0)):
        for model, optimizer in zip(models, (plain, tensor), strict=True):
            generator = torch.Generator().manual_seed(step)
            for p in model.parameters():
                p.grad = torch.randn(p.shape, generator=generator)
            optimizer.set_rate(share)
            optimizer.step()
    kept = [group["lr"] for part in tensor.parts.values() for group in part.param_groups]
    assert all(one is other for one, other in zip(rates, kept, strict=True)), "a graph reads the first tensor"
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(one, other, atol=2e-4, rtol=1e-3)
