"""auto: what may be chosen, who wins, what is remembered; and what fits into a memory limit."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from small_run import small_config

from m1clip.config import TrainConfig
from m1clip.data.images import Preprocess
from m1clip.errors import UserError
from m1clip.hardware.device import Device
from m1clip.hardware.facts import Facts, read_facts
from m1clip.model.clip import build_clip, count_parameters
from m1clip.model.presets import clip_config, with_fields
from m1clip.training import autotune as choose_module
from m1clip.training.autotune import (
    Choice,
    Fit,
    Tried,
    affordable,
    candidates,
    check_gradient,
    choose,
    decide,
    fit_memory,
    power_of_two,
)
from m1clip.training.memory import (
    Forecast,
    forecast,
    kept_by_mlp,
    predict_memory,
    predicted_peak,
    stand_in,
    tensor_limit,
    watched,
)
from m1clip.training.step import TrainStep
from m1clip.training.transfer import Start

H200 = Facts(system="Linux", machine="x86_64", cpu="Intel Xeon", cores=48, performance_cores=48, memory_bytes=2**38,
             cuda="NVIDIA H200", cuda_capability=(9, 0))  # fmt: skip
M1 = Facts(system="Darwin", machine="arm64", cpu="Apple M1", cores=8, performance_cores=4, memory_bytes=2**33, mps=True)
M4 = dataclasses.replace(M1, cpu="Apple M4")
TURING = dataclasses.replace(H200, cuda="Tesla T4", cuda_capability=(7, 5))


@pytest.mark.parametrize(
    ("facts", "device", "precision", "options"),
    [
        (H200, "auto", "auto", ["cuda bf16", "cpu fp32", "cpu bf16"]),
        (H200, "cuda", "auto", ["cuda bf16"]),
        (H200, "cpu", "fp32", ["cpu fp32"]),
        (H200, "auto", "fp32", ["cuda fp32", "cpu fp32"]),
        (TURING, "auto", "bf16", ["cpu bf16"]),
        (M1, "auto", "auto", ["mps fp32", "cpu fp32", "cpu bf16"]),
        (M4, "mps", "auto", ["mps fp32", "mps bf16"]),
    ],
)
def test_what_may_be_chosen(facts: Facts, device: str, precision: str, options: list[str]) -> None:
    assert [" ".join(option) for option in candidates(device, precision, facts)] == options


def auto(**changes: Any) -> Any:
    return small_config({"train.device": "auto", "train.precision": "auto", **changes})


SHAPE = clip_config(small_config().model, vocab_size=64)
START = Start(SHAPE)


@pytest.fixture
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """The batch does not depend on how busy this machine is."""
    monkeypatch.setattr(choose_module, "affordable", lambda batch, *rest: batch)


def measured(seconds: dict[str, float | None]) -> Any:
    """A measurement that answers from a table, and notes what it was asked."""
    asked = []

    def measure(config: Any, start: Start, facts: Facts, kind: Any, precision: Any, *rest: Any) -> Tried:
        asked.append(f"{kind} {precision}")
        value = seconds[asked[-1]]
        return Tried(kind, precision, value, 0.0, "" if value else "gradients 90% different from the CPU's")

    measure.asked = asked  # type: ignore[attr-defined]
    return measure


@pytest.mark.usefixtures("unhurried")
def test_the_fastest_wins_and_is_remembered(tmp_path: Path) -> None:
    measure = measured({"cuda bf16": 0.1, "cpu fp32": 3.0, "cpu bf16": 2.0})
    first = choose(auto(), START, H200, 16, tmp_path, measure)
    assert (first.device, first.precision, first.cached) == ("cuda", "bf16", False)
    assert "30.0x as fast as cpu fp32, 20.0x as fast as cpu bf16; measured with batch 8" in first.why
    again = choose(auto(), START, H200, 16, tmp_path, measured({}))
    assert (again.device, again.cached) == ("cuda", True)
    assert "in an earlier run" in again.why


@pytest.mark.parametrize(
    "change", [{"facts": dataclasses.replace(H200, torch="9.9")}, {"start": Start(with_fields(SHAPE, embed_dim=64))},
               {"config": auto(**{"optim.optimizer": "adamw"})}, {"tokens": 24}]
)  # fmt: skip
def test_another_machine_model_or_version_is_measured_anew(tmp_path: Path, change: dict[str, Any]) -> None:
    table = {"cuda bf16": 0.1, "cpu fp32": 3.0, "cpu bf16": 2.0}
    choose(auto(), START, H200, 16, tmp_path, measured(table))
    measure = measured(table)
    facts, start = change.get("facts", H200), change.get("start", START)
    choose(change.get("config", auto()), start, facts, change.get("tokens", 16), tmp_path, measure)
    assert len(measure.asked) == 3


def test_a_device_with_wrong_gradients_is_out(tmp_path: Path) -> None:
    measure = measured({"cuda bf16": None, "cpu fp32": 3.0, "cpu bf16": 2.0})
    found = choose(auto(), START, H200, 16, tmp_path, measure)
    assert (found.device, found.precision) == ("cpu", "bf16")
    assert "cuda bf16 rejected: gradients 90% different" in found.why
    nobody = measured({"cuda bf16": None, "cpu fp32": None, "cpu bf16": None})
    with pytest.raises(UserError, match="no device passed its test"):
        choose(auto(), START, H200, 24, tmp_path / "other", nobody)


CPU_ONLY = dataclasses.replace(H200, cuda=None, cuda_capability=None)


def disturbed(table: dict[str, tuple[float, float, float]]) -> Any:
    """A measurement beside other programs: (seconds, processor seconds, their share) of each candidate."""

    def measure(config: Any, start: Start, facts: Facts, kind: Any, precision: Any, *rest: Any) -> Tried:
        taken, used, others = table[f"{kind} {precision}"]
        return Tried(kind, precision, taken, 0.0, processor_seconds=used, others=others)

    return measure


@pytest.mark.usefixtures("unhurried")
def test_beside_other_programs_processor_time_decides_and_nothing_is_remembered(tmp_path: Path) -> None:
    # The other program came when bf16 had its turn: by the clock it looks slower than it is.
    table = {"cpu fp32": (2.0, 2.6, 0.02), "cpu bf16": (2.6, 2.0, 0.5)}
    found = choose(auto(), START, CPU_ONLY, 16, tmp_path, disturbed(table))
    assert found.precision == "bf16"
    assert found.why.startswith("1.3x as fast as cpu fp32; measured")
    assert found.why.endswith("while other programs ran")
    assert not (tmp_path / "choices").exists()
    quiet = {"cpu fp32": (2.0, 4.0, 0.02), "cpu bf16": (1.1, 2.0, 0.0)}
    assert "1.8x as fast as cpu fp32" in choose(auto(), START, CPU_ONLY, 16, tmp_path, disturbed(quiet)).why
    assert choose(auto(), START, CPU_ONLY, 16, tmp_path, measured({})).cached


@pytest.mark.usefixtures("unhurried")
def test_an_accelerator_is_judged_by_the_clock_on_a_busy_machine_too(tmp_path: Path) -> None:
    table = {"cuda bf16": (0.1, 0.1, 0.5), "cpu fp32": (3.0, 0.05, 0.5), "cpu bf16": (2.0, 0.05, 0.5)}
    found = choose(auto(), START, H200, 16, tmp_path, disturbed(table))
    assert found.device == "cuda"
    assert "20.0x as fast as cpu bf16" in found.why
    assert choose(auto(), START, H200, 16, tmp_path, measured({})).cached  # clear all the same


def test_one_possibility_is_not_measured(tmp_path: Path) -> None:
    found = choose(auto(**{"train.device": "cuda"}), START, H200, 16, tmp_path, measured({}))
    assert found == Choice("cuda", "bf16")
    assert found.why == ""
    assert list(tmp_path.iterdir()) == []


def test_the_time_is_kept_by_a_smaller_batch() -> None:
    assert affordable(128, 0.001, 2) == 128
    assert affordable(128, 0.1, 2) == 50
    assert affordable(128, 10.0, 3) == 8  # never below what parity needs
    assert affordable(4, 10.0, 3) == 4


def test_a_torn_cache_is_measured_again(tmp_path: Path) -> None:
    table = {"cuda bf16": 0.1, "cpu fp32": 3.0, "cpu bf16": 2.0}
    choose(auto(), START, H200, 16, tmp_path, measured(table))
    for path in (tmp_path / "choices").iterdir():
        path.write_text('{"device": "cuda"')
    measure = measured(table)
    choose(auto(), START, H200, 16, tmp_path, measure)
    assert len(measure.asked) == 3


def test_the_cpu_is_really_measured(tmp_path: Path) -> None:
    facts = dataclasses.replace(read_facts(), cuda=None, mps=False)
    found = choose(auto(), START, facts, 16, tmp_path)
    assert found.device == "cpu"
    assert {(t.precision, t.out) for t in found.tried} == {("fp32", ""), ("bf16", "")}
    assert all((t.gradient_difference or 0.0) < 0.1 for t in found.tried)


def test_a_gradient_that_is_off_refuses_the_step() -> None:
    facts = read_facts()
    samples = stand_in(SHAPE, 8, 16)
    count = count_parameters(SHAPE)
    found = check_gradient(small_config(), START, facts, "cpu", "fp32", samples, torch.ones(count))
    assert found.step_seconds is None
    assert "different from the CPU's" in found.out


LINE = Forecast(least=1.01e9, fixed=1e9, per_pair=1e7)
FRUGAL = Forecast(least=1.005e9, fixed=1e9, per_pair=4e6)


def lines(recompute: bool) -> Forecast:
    return FRUGAL if recompute else LINE


@pytest.mark.parametrize(
    ("batch", "chunk", "room", "expected"),
    [
        (128, 0, 3e9, Fit(128, 0, False, "batch 128 fits")),
        (0, 0, 3e9, Fit(128, 0, False, "batch 128 fits")),  # 200 would fit: the power of two below
        (0, 0, 1e12, Fit(1024, 0, False, "batch 1024 fits")),
        (128, 0, 2e9, Fit(128, 0, True, "batch 128 fits with gradient checkpointing")),
        (128, 0, 1.4e9, Fit(128, 32, False, "batch 128 fits in micro-batches of 32")),
        (128, 0, 1.015e9, Fit(128, 2, True, "batch 128 fits in micro-batches of 2 and gradient checkpointing")),
        (128, 16, 1.2e9, Fit(128, 16, False, "batch 128 fits in micro-batches of 16")),
        (128, 64, 1.2e9, Fit(128, 16, False, "batch 128 fits in micro-batches of 16")),
        (128, 0, 0.9e9, None),
        (0, 0, 0.9e9, None),
    ],
)
def test_what_a_limit_asks_for(batch: int, chunk: int, room: float, expected: Fit | None) -> None:
    assert decide(batch, chunk, False, 1024, room, lines) == expected


def test_powers_of_two() -> None:
    assert [power_of_two(n) for n in (0, 1, 2, 3, 64, 100)] == [0, 1, 2, 2, 64, 64]


def test_what_is_foretold_is_what_is_watched() -> None:
    """The same step on fake and on real tensors, in both precisions."""
    facts, config = read_facts(), small_config()
    host = Device("cpu", facts)
    for precision in ("fp32", "bf16"):
        predicted = predict_memory(config, START, "cpu", precision, facts, 16, 16)  # type: ignore[arg-type]
        model = build_clip(with_fields(SHAPE, eot_id=0))
        model.set_attention("bmm")
        update = TrainStep(model, config, host, precision, Preprocess(image_size=32))  # type: ignore[arg-type]
        samples = stand_in(SHAPE, 16, 16)
        update(samples, 1)
        real = watched(update, samples, lambda batch: update(batch, 2))  # noqa: B023
        assert sum(predicted.values()) == pytest.approx(sum(real.values()), rel=0.05)
        assert predicted["weights"] == real["weights"]


def test_the_captions_against_each_other_are_foretold_where_they_are_made_at_once() -> None:
    """On the CPU they are made in blocks; on a card all m x m logits lie in memory, some times over."""
    facts, config = read_facts(), small_config({"data.captions_per_step": 5, "train.batch_size": 64})
    m = 5 * 64
    found = {
        kind: sum(predict_memory(config, START, kind, "fp32", facts, 64, 16).values())  # type: ignore[arg-type]
        for kind in ("cpu", "cuda")
    }
    alone = dataclasses.replace(config, train=dataclasses.replace(config.train, text_contrast=0.0))
    without = sum(predict_memory(alone, START, "cuda", "fp32", facts, 64, 16).values())
    assert found["cuda"] - without > 2 * m * m * 4
    assert found["cuda"] > found["cpu"]


def test_memory_grows_with_the_batch_and_shrinks_with_recomputation_and_chunks() -> None:
    facts, config = read_facts(), small_config()

    def total(batch: int, **changes: Any) -> int:
        wanted = small_config({"train.batch_size": batch, **changes})
        return sum(predict_memory(wanted, START, "cpu", "fp32", facts, batch, 16).values())

    assert total(64) > total(32)
    assert total(64, **{"model.grad_checkpointing": True}) < total(64)
    assert total(64, **{"train.micro_batch": 8}) < total(64)
    line = forecast(lambda batch: predict_memory(config, START, "cpu", "fp32", facts, batch, 16))
    assert line.total(64) == pytest.approx(total(64), rel=0.05)
    assert line.largest(line.total(100), 4096) in (99, 100, 101)


def test_an_accelerator_keeps_what_the_cpu_computes_again() -> None:
    facts, config = read_facts(), small_config()
    here = predict_memory(config, START, "cpu", "fp32", facts, 8, 16)
    there = predict_memory(config, START, "cuda", "fp32", facts, 8, 16)
    assert there["activations"] - here["activations"] == kept_by_mlp(START, 8, 16, 4)


def test_the_limit_is_the_inverse_of_the_peak() -> None:
    parts = {"weights": 400_000_000, "activations": 600_000_000}
    peak = sum(predicted_peak(parts, "cpu", 300_000_000, 50_000_000).values())
    assert tensor_limit(peak, "cpu", 300_000_000, 50_000_000) == pytest.approx(1e9, rel=1e-6)
    assert predicted_peak(parts, "cuda", 1, 1) == parts


def test_a_limit_is_kept_or_refused() -> None:
    facts = read_facts()
    host = Device("cpu", facts)
    assert fit_memory(small_config(), START, host, "fp32", facts, 16, 100) is None
    free = fit_memory(small_config({"train.batch_size": 0}), START, host, "fp32", facts, 16, 4000)
    assert free is not None
    assert free.batch == 256  # a power of two that leaves eight steps an epoch
    tight = small_config({"train.memory": "1MB"})
    with pytest.raises(UserError, match=r"--memory 1MB: .* needs at least"):
        fit_memory(tight, START, host, "fp32", facts, 16, 100)


def test_the_words_of_the_config() -> None:
    assert TrainConfig(batch_size=0, micro_batch=64).batch_size == 0
    with pytest.raises(UserError, match="or auto, not 1"):
        TrainConfig(batch_size=1)
    with pytest.raises(UserError, match="--memory lots"):
        TrainConfig(memory="lots")


def test_the_peak_of_measuring_is_not_the_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    forgotten: list[str] = []
    monkeypatch.setattr(Device, "reset_peak", lambda self: forgotten.append(self.kind) or True)
    choose(auto(), START, dataclasses.replace(read_facts(), cuda=None, mps=False), 16, tmp_path)
    assert forgotten == ["cpu"] * 4  # two candidates, their gradients and their steps
