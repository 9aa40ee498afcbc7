"""Predicted memory of a training step: known values, and the real step."""

import dataclasses
from typing import Any

import pytest
import torch
from small_run import small_config
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from m1clip.data.images import Preprocess
from m1clip.hardware.device import Device
from m1clip.hardware.machine_info import read_machine_info
from m1clip.model.clip import build_clip
from m1clip.model.presets import PretrainedTextConfig, clip_config, with_fields
from m1clip.training import memory as memory_module
from m1clip.training.compose import compose_step
from m1clip.training.memory import MemoryEstimate, PeakMemory, power_of_two, random_batch
from m1clip.training.step import make_parts
from m1clip.training.transfer import ModelInit

SHAPE = clip_config(small_config().model, vocab_size=64)
FACTS = read_machine_info()


class Accelerator(Device):
    """A device that does not need to exist."""

    def __init__(self) -> None:
        super().__init__("cpu", FACTS)
        self.kind = "cuda"


def estimate(
    device: Device | None = None, precision: Any = "fp32", **changes: Any
) -> MemoryEstimate:
    config = small_config(changes)
    return MemoryEstimate(
        config, ModelInit(SHAPE), FACTS, device or Device("cpu", FACTS), precision, text_tokens=16
    )


def tracked(rows: int) -> PeakMemory:
    layer = nn.Linear(100, 100, bias=False)  # 40,000 bytes
    with PeakMemory(layer.parameters()) as memory:
        layer(torch.ones(rows, 100)).relu().sum().backward()
    return memory


def test_peak_memory_known_value() -> None:
    memory = tracked(1000)
    # The weight, the input, the product and the rectified product live together.
    assert 40_000 + 3 * 400_000 <= memory.peak <= 40_000 + 4 * 400_000
    assert memory.now == 0, "all of it was freed"
    with FakeTensorMode():
        assert tracked(1000).peak == memory.peak


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_estimate_matches_the_real_step(precision: Any) -> None:
    config, samples = small_config({"data.captions_per_step": 1}), random_batch(SHAPE, 16, 16)
    model = build_clip(with_fields(SHAPE, eot_id=0))
    step = compose_step(
        make_parts(model, config, Device("cpu", FACTS), precision, Preprocess(image_size=32))
    )
    step.run(samples, 1)
    persistent = [
        *model.parameters(),
        *model.buffers(),
        *step.optimizer.tensors().values(),
        *samples.tensors().values(),
    ]
    with PeakMemory(persistent) as memory:
        step.run(samples, 2)
    predicted = estimate(precision=precision, **{"data.captions_per_step": 1}).step_bytes(16, False)
    assert predicted == pytest.approx(memory.peak, rel=0.05)


def test_memory_grows_with_the_batch_and_shrinks_with_checkpointing() -> None:
    predicted = estimate()
    assert predicted.peak(64, False) > predicted.peak(32, False)
    assert predicted.peak(64, True) < predicted.peak(64, False)
    assert predicted.largest(predicted.peak(64, False), 128, False) == 64
    assert predicted.largest(predicted.peak(64, False) - 1, 64, False) == 32
    assert predicted.largest(1, 64, False) == 0


def test_very_large_batches_are_extrapolated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_module, "TRACED", 8)
    predicted = estimate()
    traced: list[int] = []
    monkeypatch.setattr(
        MemoryEstimate, "peak", lambda self, batch, _: traced.append(batch) or 1000 + 10 * batch
    )
    assert [predicted.largest(1000 + 10 * n, 512, False) for n in (4, 8, 100, 512, 4000)] == [
        4,
        8,
        64,
        512,
        512,
    ]
    assert max(traced) == 8


def test_accelerator_stores_logits_and_mlp_activations() -> None:
    captions = {"data.captions_per_step": 5}
    cpu, cuda = estimate(**captions), estimate(Accelerator(), **captions)
    assert cuda.peak(64, False) > cpu.step_bytes(64, False)
    without = estimate(Accelerator(), **captions, **{"train.text_contrast": 0.0})
    logits = (5 * 64) ** 2 * 4
    assert cuda.peak(64, False) - without.peak(64, False) > 2 * logits
    half = dataclasses.replace(cuda, precision="bf16")
    assert 0 < half._mlp_bytes(8, 16) == cuda._mlp_bytes(8, 16) / 2


def test_powers_of_two() -> None:
    assert [power_of_two(n) for n in (0, 1, 2, 3, 64, 100)] == [0, 1, 2, 2, 64, 64]


def test_random_batch_ends_the_captions_of_a_pretrained_tower() -> None:
    """Such a tower names no EOT token."""
    shape = dataclasses.replace(SHAPE, text_tower=PretrainedTextConfig())
    tokens = random_batch(shape, 3, 7).tokens
    assert tokens is not None
    assert tokens[:, -1].tolist() == [1, 1, 1]
    assert random_batch(SHAPE, 3, 7).tokens[:, -1].tolist() == [SHAPE.text_tower.eot_id] * 3
