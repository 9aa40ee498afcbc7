"""The two sides of cuda_step.py: a function that makes one step, for m1clip and for open_clip with its best flags."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from fused import CapturedStep, compile_blocks
from torch import Tensor, nn

from m1clip.config import OptimConfig
from m1clip.hardware.device import Device
from m1clip.losses import OBJECTIVES, own_pairs
from m1clip.model.clip import build_clip
from m1clip.model.presets import CLIPConfig, with_fields
from m1clip.training.optim import Optimizer

AUTOTUNE = "max-autotune-no-cudagraphs"
BATCHES = 3  # different inputs, taken in turn
Step = Callable[[], Tensor]


@dataclass(frozen=True)
class Setting:
    """What both sides get."""

    shape: CLIPConfig
    batch: int
    tokens: int
    device: Device
    backend: str = "inductor"  # of torch.compile; "eager" traces only, for a smoke run

    def compiled(self, function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        """torch.compile for one shape."""
        return torch.compile(function, dynamic=False, backend=self.backend, **options)

    def inputs(self, dtype: torch.dtype = torch.float32) -> list[tuple[Tensor, Tensor]]:
        """Images and captions on the device; the end mark is the largest id, as open_clip wants it."""
        draw = torch.Generator().manual_seed(0)
        size, end = self.shape.image_size, self.shape.vocab_size - 1
        made = []
        for _ in range(BATCHES):
            pixels = torch.randn(self.batch, 3, size, size, generator=draw)
            ids = torch.randint(1, end, (self.batch, self.tokens), generator=draw)
            ids[:, -1] = end
            made.append((pixels.to(self.device.torch, dtype), ids.to(self.device.torch)))
        return made


def in_turn(step: Callable[..., Tensor], inputs: list[tuple[Tensor, Tensor]]) -> Step:
    """The step with the next inputs at each call."""
    count = 0

    def run() -> Tensor:
        nonlocal count
        count += 1
        return step(*inputs[count % len(inputs)])

    return run


def our_step(setting: Setting, variant: str) -> Step:
    """m1clip's model, loss and optimizer; words: eager, compiled, autotune, blocks, plain, graph, muon."""
    words, device = variant.split(), setting.device
    torch.manual_seed(0)
    model = build_clip(with_fields(setting.shape, eot_id=setting.shape.vocab_size - 1)).to(device.torch)
    model.set_attention("sdpa", "sdpa")
    if {"compiled", "blocks"} & set(words) and "plain" not in words and device.kind == "cuda":
        model.use_triton()  # as `m1clip train --compile` does
    model.train()
    config = OptimConfig(optimizer="muon" if "muon" in words else "adamw", lr=1e-4)
    optimizer = Optimizer(model, config, fused=True, capturable="graph" in words and device.kind == "cuda")
    forward: Callable[..., Any] = model
    if "compiled" in words:
        forward = setting.compiled(model, **({"mode": AUTOTUNE} if "autotune" in words else {}))
    if "blocks" in words:
        compile_blocks(model, dynamic=False, backend=setting.backend)
    parameters = list(model.parameters())
    positive = own_pairs(setting.batch, torch.arange(setting.batch, device=device.torch))
    objective = OBJECTIVES["infonce"]

    def work(pixels: Tensor, ids: Tensor) -> tuple[Tensor, ...]:
        with torch.autocast(device.kind, torch.bfloat16):
            features = forward(pixels, ids)
        loss = objective(features, positive)
        loss.backward()
        norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        torch.nn.utils.clip_grads_with_norm_(parameters, 1.0, norm)
        optimizer.step()
        optimizer.zero_grad()
        model.clamp_scale()
        return (loss.detach(),)

    whole = CapturedStep(work, model) if "graph" in words else work

    def step(pixels: Tensor, ids: Tensor) -> Tensor:
        optimizer.set_rate(0.5)
        return whole(pixels, ids)[0]

    return in_turn(step, setting.inputs())


def open_clip_model(shape: CLIPConfig, tokens: int) -> nn.Module:
    """open_clip's CLIP of the same shape, for texts of this length."""
    sys.path.append(str(Path(__file__).parent / "peers"))
    import torchvision_ops  # noqa: F401  first: open_clip imports torchvision
    from open_clip.model import CLIP

    vision = {
        "layers": shape.vision_layers, "width": shape.vision_width, "patch_size": shape.patch_size,
        "head_width": shape.vision_width // shape.vision_heads, "image_size": shape.image_size,
        "mlp_ratio": shape.mlp_ratio, "no_ln_pre": not shape.vision_pre_norm,
    }  # fmt: skip
    text = {
        "context_length": tokens, "vocab_size": shape.vocab_size, "width": shape.text_width,
        "heads": shape.text_heads, "layers": shape.text_layers, "mlp_ratio": shape.mlp_ratio,
    }  # fmt: skip
    model: nn.Module = CLIP(shape.embed_dim, vision, text, output_dict=True)
    return model


def open_clip_step(setting: Setting, variant: str) -> Step:
    """open_clip as its trainer runs it with --precision amp_bf16 or pure_bf16, [--torchcompile], fused AdamW."""
    words, device = variant.split(), setting.device
    torch.manual_seed(0)
    try:
        model = open_clip_model(setting.shape, setting.tokens)
    except SystemExit as error:  # no torchvision
        raise ImportError(str(error)) from None
    from open_clip.loss import ClipLoss

    pure = "pure_bf16" in words
    model = model.to(device.torch, torch.bfloat16 if pure else torch.float32).train()
    mixed = contextlib.nullcontext if pure else lambda: torch.autocast(device.kind, torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.2, fused=True)
    criterion, scale = ClipLoss(cache_labels=True), model.logit_scale
    forward: Callable[..., Any] = setting.compiled(model) if "compiled" in words else model

    def step(pixels: Tensor, ids: Tensor) -> Tensor:
        optimizer.zero_grad()
        with mixed():
            loss: Tensor = criterion(**forward(pixels, ids))
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            scale.clamp_(0, 4.6052)
        return loss.detach()

    return in_turn(step, setting.inputs(torch.bfloat16 if pure else torch.float32))
