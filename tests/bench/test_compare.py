"""Choice of configurations, skipped ones with their reason, and worker processes."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from machines import H200, M1, TURING

from m1clip.bench import compare as module
from m1clip.bench import steps
from m1clip.bench.compare import CompareOptions, Session, compare, configurations, precisions_of
from m1clip.bench.steps import Configuration, load_measured
from m1clip.bench.worker import Measurement, MeasurementError, Worker
from m1clip.errors import UserError
from m1clip.hardware.facts import Facts, read_facts

from .examples import configuration


@pytest.mark.parametrize(
    ("facts", "asked", "found"),
    [(H200, (), ["bf16", "fp32"]), (H200, ("fp16",), ["fp16"]), (TURING, (), ["fp32"])],
)
def test_precisions_of_a_gpu(facts: Facts, asked: tuple[str, ...], found: list[str]) -> None:
    assert precisions_of(facts, "cuda", asked) == found


def test_single_model_also_varies_one_setting_at_a_time() -> None:
    found = configurations(
        H200, CompareOptions(models=("small",), batch_sizes=(12,)), ["cuda", "cpu"]
    )
    variants = [c.variant for c in found]
    assert variants[:4] == ["cuda bf16 CUDA graph", "cuda fp32 CUDA graph", "cpu bf16", "cpu fp32"]
    once = {"cuda bf16 compiled CUDA graph", "cpu bf16 compiled"}
    twice = {"cpu bf16", "cuda bf16", "cpu bf16 24 threads", "cpu bf16 gradient checkpointing"}
    assert {variants.count(name) for name in once} == {1}
    assert {variants.count(name) for name in twice} == {2}
    second = variants[len(set(variants)) :]
    assert second == [name for name in reversed(variants[: len(set(variants))]) if name not in once]


def test_mlx_is_measured_without_torchs_variants() -> None:
    found = configurations(
        dataclasses.replace(M1, mlx="0.32.4"), CompareOptions(), ["mps", "cpu", "mlx"]
    )
    variants = {c.variant for c in found if c.device == "mlx"}
    assert variants == {"mlx bf16", "mlx fp32", "mlx bf16 gradient checkpointing"}


def test_several_models_are_ordered_by_size() -> None:
    options = CompareOptions(models=("tiny", "small"), batch_sizes=(64, 1))
    found = configurations(M1, options, ["mps", "cpu"])
    order = dict.fromkeys((c.model, c.batch_size) for c in found)
    assert list(order) == [("tiny", 1), ("tiny", 64), ("small", 1), ("small", 64)]
    assert [c.variant for c in found[:4]] == ["mps bf16", "mps fp32", "cpu bf16", "cpu fp32"]
    assert len(found) == 16


class FixedClock(Session):
    """A session with a fixed time left, on a machine with a GPU of 69 GB."""

    def __init__(self, folder: Path, left: float) -> None:
        self._left = left
        super().__init__(CompareOptions(minutes=8), H200, folder, lambda text, used: None)
        rates = {"fp32": 1e12, "bf16": 2e12}
        self.devices: Any = {"cpu": (2**36, rates), "cuda": (2**36, rates)}

    @property
    def left(self) -> float:
        return self._left


def test_configurations_that_are_too_slow_or_large_are_skipped(tmp_path: Path) -> None:
    session = FixedClock(tmp_path, left=400.0)

    def add(c: Configuration, seconds: float, peak_bytes: int = 10**9) -> None:
        session.measured[c] = [Measurement([seconds] * 3, None, None, peak_bytes, 0.0)]
        session.gradients[c.model, c.variant] = 0.0

    for batch_size in (1, 2):
        add(configuration(batch_size=batch_size), 1.0)
    assert "too long for --minutes 8" in session.obstacle(configuration("200M", 1024), 10.0)
    small = configuration("tiny", 8, "cuda")
    assert session.obstacle(small, 10.0) == ""
    add(configuration("1B", 8, "cuda"), 0.1, 60 * 10**9)
    assert session.obstacle(configuration("1B", 16, "cuda"), 10.0).endswith(" GB of 69 GB")
    session.failed["tiny", small.variant] = 8
    assert session.obstacle(dataclasses.replace(small, batch_size=16), 10.0) == "batch 8 failed"


def test_no_time_left_skips_everything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session = FixedClock(tmp_path, left=-1.0)
    monkeypatch.setattr(module, "available", lambda facts: ())
    session.run()
    written = json.loads((tmp_path / "comparison.json").read_text())
    assert written["results"] == []
    assert written["skipped"]
    assert all("too long for --minutes" in reason for reason in written["skipped"].values())


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"models": ("smal",)}, "did you mean 'small'"),
        ({"devices": ("mps",)}, "--device mps: not available on this machine"),
        ({"batch_sizes": (0,)}, "--batch-size"),
        ({"batch_sizes": ()}, "--batch-size"),
        ({"minutes": 0.0}, "--minutes"),
    ],
)
def test_invalid_options_are_one_line_errors(
    tmp_path: Path, values: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        compare(CompareOptions(**values), tmp_path, lambda text, used: None)


@pytest.mark.slow
def test_worker_measures_the_training_step(tmp_path: Path) -> None:
    one = dataclasses.replace(configuration(batch_size=2), threads=1)
    worker = Worker(tmp_path / "log")
    try:
        found = worker.call("measure", 300, one, 0.0, 2, True)
        assert len(found.seconds) == 2
        assert found.peak_bytes > 1e7
        assert 0 < found.gradient_difference < 0.15
        # Another batch size in another precision in the same process, then one that is impossible.
        found = worker.call(
            "measure", 300, dataclasses.replace(one, batch_size=1, precision="fp32"), 0.0, 1, True
        )
        assert found.gradient_difference < 1e-4
        with pytest.raises(MeasurementError, match="fp16"):
            worker.call("measure", 300, dataclasses.replace(one, precision="fp16"), 0.0, 1, False)
        assert worker.alive
        with pytest.raises(MeasurementError, match="timed out after"):
            worker.call("measure", 0.0, one, 0.0, 1, False)
    finally:
        worker.close()
    with pytest.raises(MeasurementError, match="worker process"):
        worker.call("measure", 5, one, 0.0, 1, False)


@pytest.mark.slow
def test_complete_comparison(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    # Results of a busy machine are not saved otherwise.
    monkeypatch.setattr(steps, "MAX_OTHERS", 1.0)
    monkeypatch.setattr(module, "configurations", lambda *values: configurations(*values)[:1] * 2)
    shown: list[str] = []
    options = CompareOptions(batch_sizes=(2,), devices=("cpu",), minutes=10.0)
    found = compare(options, tmp_path / "out", lambda text, used: shown.append(text))
    (one,) = found.results
    assert one.seconds.n >= 6, "two passes"
    assert one.gradient_difference is not None
    assert one.gradient_difference < 0.15
    assert shown[-1] == one.configuration.label
    written = json.loads((tmp_path / "out" / "comparison.json").read_text())
    assert written["complete"]
    assert "the fastest of 1" in written["verdict"][0]
    assert load_measured(read_facts()) == [one]
