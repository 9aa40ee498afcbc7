"""The naive baseline: size, attention, samples, and that it learns."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from m1clip.model.clip import count_parameters
from m1clip.model.presets import preset, with_fields
from m1clip.training.setup import Setup

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def naive() -> ModuleType:
    sys.path.insert(0, str(BENCHMARKS))
    try:
        import naive
    finally:
        sys.path.remove(str(BENCHMARKS))
    return naive


@pytest.fixture(scope="module")
def setup(naive: ModuleType) -> Setup:
    """The prior art's setup with 24 images of 32 px and towers of one narrow block."""
    from m1clip.config import from_dict, read_preset

    config = from_dict(read_preset("prior-art"), "prior-art")
    model = {"vision_width": 64, "vision_layers": 1, "text_width": 64, "text_layers": 1, "image_size": 32}
    return naive.prior_art_job(
        dataclasses.replace(
            config,
            model=dataclasses.replace(config.model, **model),
            data=dataclasses.replace(config.data, train_count=24),
            optim=dataclasses.replace(config.optim, lr=3e-3),
            train=dataclasses.replace(config.train, epochs=100.0),
        )
    )


def count(model: torch.nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def test_baseline_has_size_of_prior_art_and_m1clip(naive: ModuleType) -> None:
    shape = with_fields(preset("small"), vocab_size=33)
    with torch.device("meta"):
        model = naive.NaiveClip(shape, eot_id=2)
    assert count(model) == count_parameters(shape) == 76_736_001


def test_baseline_attention_matches_torch(naive: ModuleType) -> None:
    layer = naive.NaiveAttention(16, heads=2).eval()
    x = torch.randn(2, 5, 16)
    q, k, v = layer.qkv(x).view(2, 5, 3, 2, 8).permute(2, 0, 3, 1, 4)
    mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(2, 5, 16)
    torch.testing.assert_close(layer(x), layer.out(mixed))


def test_baseline_samples_are_float_images_and_padded_captions(naive: ModuleType, setup: Setup) -> None:
    samples = naive.NaivePairs(setup.splits["train"])
    image, ids = samples[3]
    assert len(samples) == 24
    assert image.shape == (3, 32, 32)
    assert image.dtype == torch.float32
    assert -1 <= image.min() < image.max() <= 1
    assert ids.shape == (77,)
    own = setup.splits["train"].captions
    rows = own.tokens[own.first[3] : own.first[4]]
    assert any((row == ids.numpy()).all() for row in rows)


def test_baseline_learns(naive: ModuleType, setup: Setup) -> None:
    trainer = naive.NaiveTrainer(setup)
    batch = next(iter(trainer.loader))
    losses = [trainer.step(batch) for _ in range(100)]
    assert losses[-1] < 0.75 * losses[0]
