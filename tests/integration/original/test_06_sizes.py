"""6: models from tiny to 1B with parameters, memory and a recommended device."""

import dataclasses
from collections.abc import Iterator

import pytest
from machines import XEON
from small_run import exit_code

from m1clip.bench.sizes import (
    SIZE_MODELS,
    list_sizes,
    recommend_device,
    size_name,
    sizes_text,
    smallest_gpu,
)
from m1clip.bench.steps import Configuration, model_shape, size_of
from m1clip.model.presets import PRESETS, with_fields


def test_every_size_has_a_model() -> None:
    sizes = [size_of(Configuration(model, 1, "cpu", "fp32"))[0] for model in SIZE_MODELS]
    names = [size_name(parameters) for parameters in sizes]
    assert names == ["tiny", "small", "medium", "large", "large"]
    assert sizes[SIZE_MODELS.index("original")] == 76_736_001
    assert size_name(10e6 - 1) == "tiny"
    assert size_name(10e6) == "small"


@pytest.fixture
def shallow_models(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One block in each tower: tracing a step takes as long as there are operations."""
    for name in ("tiny", "original"):
        shallow = with_fields(PRESETS[name], vision_layers=1, text_layers=1)
        monkeypatch.setitem(PRESETS, name, shallow)
    for cached in (model_shape, size_of):
        cached.cache_clear()
    yield
    for cached in (model_shape, size_of):
        cached.cache_clear()


@pytest.mark.usefixtures("shallow_models")
def test_memory_grows_with_model_and_batch() -> None:
    small, large = list_sizes(XEON, ("tiny", "original"), batch_size=2, measured=[])
    (larger_batch,) = list_sizes(XEON, ("tiny",), batch_size=16, measured=[])
    assert small.cpu_bytes < large.cpu_bytes
    assert small.gpu_bytes < larger_batch.gpu_bytes
    assert large.parameters > 2 * small.parameters
    assert large.weight_bytes == 4 * large.parameters
    # Weights, gradients and two moments of AdamW are the least that a step needs.
    assert large.gpu_bytes > 4 * large.weight_bytes
    assert (small.device, small.reason[:20]) == ("cpu", "the only device here")
    text = sizes_text([small, dataclasses.replace(large, gpu_gigabytes=None)], 2)
    assert f"{large.parameters:,}" in text
    assert "several GPUs" in text
    assert "at batch 2" in text


@pytest.mark.parametrize(
    ("memory", "seconds", "device", "reason"),
    [
        ({"cpu": 8e9}, {}, "cpu", "the only device here; rule"),
        ({"cuda": 8e9, "cpu": 8e9}, {}, "cuda", "enough memory; rule"),
        ({"mps": 8e9, "cpu": 8e9}, {}, "mps", "enough memory; rule"),
        ({"cuda": 2e9, "cpu": 8e9}, {}, "cpu", "enough memory"),
        ({"cuda": 8e9, "cpu": 8e9}, {"cuda": 2.0, "cpu": 1.0}, "cpu", "measured: 1 s per step"),
        ({"cuda": 8e9, "cpu": 8e9}, {"cuda": 0.5, "cpu": 1.0}, "cuda", "measured: "),
        ({"cuda": 8e9, "cpu": 8e9}, {"cpu": 1.0}, "cuda", "rule"),
        ({"cuda": 1e9, "cpu": 2e9}, {}, "", "cpu has 2 GB"),
    ],
)
def test_recommended_device_follows_memory_and_measured_steps(
    memory: dict[str, float], seconds: dict[str, float], device: str, reason: str
) -> None:
    recommended = recommend_device(dict.fromkeys(memory, 3e9), memory, seconds)
    assert recommended[0] == device
    assert reason in recommended[1]


def test_smallest_gpu_that_is_enough() -> None:
    assert [smallest_gpu(needed) for needed in (1e9, 8e9, 8.1e9, 1e12)] == [8, 8, 12, None]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--model", "tiny"), "remove --model"),
        (("--batch-size", "1"), "from 2 to 65536"),
        (("--batch-size", "auto"), "from 2 to 65536"),
    ],
)
def test_other_options_are_an_error(
    words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code("plan", "--sizes", *words) == 2
    assert message in capsys.readouterr().err
