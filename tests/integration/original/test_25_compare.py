"""MISSION 25: `compare` measures time, spread, memory, stages, gradients and loss spikes."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from m1clip.bench import worker
from m1clip.bench.steps import Configuration, model_shape, size_of
from m1clip.model.presets import PRESETS, with_fields


@pytest.fixture(autouse=True)
def shallow_model(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The preset `tiny` with one layer per tower and small images."""
    shallow = with_fields(PRESETS["tiny"], vision_layers=1, text_layers=1, image_size=32)
    monkeypatch.setitem(PRESETS, "tiny", shallow)
    threads = torch.get_num_threads()
    for cached in (model_shape, size_of):
        cached.cache_clear()
    yield
    torch.set_num_threads(threads)
    for cached in (model_shape, size_of):
        cached.cache_clear()


def test_figures_of_a_step_are_measured() -> None:
    small = Configuration("tiny", 2, "cpu", "fp32", threads=1)
    fp32 = worker.measure(small, 0.0, 2, True)
    bf16 = worker.measure(replace(small, precision="bf16", batch_size=4), 0.0, 3, True)
    assert (len(fp32.seconds), len(bf16.seconds)) == (2, 3)
    assert fp32.seconds != bf16.seconds[:2]
    assert fp32.peak_bytes > 1e7
    for measurement in (fp32, bf16):
        assert {"copy", "forward", "backward", "optimizer"} <= measurement.stages.keys()
        assert measurement.stages_problem == ""
    assert fp32.stages != bf16.stages
    assert fp32.gradient_difference is not None
    assert bf16.gradient_difference is not None
    assert fp32.gradient_difference < 1e-4 < bf16.gradient_difference


def test_spikes_and_skipped_updates_are_counted_on_the_cpu_in_fp16_too() -> None:
    fp32 = Configuration("tiny", 4, "cpu", "fp32", threads=1)
    steady = worker.measure_stability(fp32, reduced=True, steps=4)
    scaled = worker.measure_stability(replace(fp32, precision="fp16"), reduced=True, steps=6)
    assert (steady.steps, scaled.steps) == (4, 6)
    assert steady.skipped == 0
    assert scaled.skipped > 0, "the first loss scales overflow"
    assert steady.last_loss != scaled.last_loss
