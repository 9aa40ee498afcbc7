"""Which configurations are measured, what is skipped and why, and processes that really measure."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from m1clip.bench import compare as module
from m1clip.bench.compare import Session, compare
from m1clip.bench.configurations import Configuration, groups, model_shape, precisions_of
from m1clip.bench.cost_model import load_measured
from m1clip.bench.options import CompareOptions
from m1clip.bench.worker import MeasurementError, Worker
from m1clip.errors import UserError
from m1clip.hardware.facts import Facts, read_facts

from .examples import LAPTOP, MACHINE, configuration, document, result

OLD_CARD = dataclasses.replace(MACHINE, cuda_capability=(7, 5))


@pytest.mark.parametrize(
    ("facts", "asked", "found"),
    [(MACHINE, (), ["bf16", "fp32"]), (MACHINE, ("fp16",), ["fp16"]), (OLD_CARD, (), ["fp32"])],
)
def test_precisions_of_a_card(facts: Facts, asked: tuple[str, ...], found: list[str]) -> None:
    assert precisions_of(facts, "cuda", asked) == found


def test_one_model_also_changes_one_setting_at_a_time() -> None:
    (found,) = groups(MACHINE, CompareOptions(model=("small",), batch_size=(12,)), ["cuda", "cpu"])
    variants = [c.variant for c in found]
    assert variants[:4] == ["cuda bf16 sdpa CUDA graph", "cuda fp32 sdpa CUDA graph", "cpu bf16 bmm", "cpu fp32 bmm"]
    for extra in (
        "cpu bf16 sdpa",
        "cuda bf16 sdpa",
        "cuda bf16 sdpa compiled CUDA graph",
        "cpu bf16 bmm 4 threads",
        "cpu bf16 bmm gradient checkpointing",
    ):
        assert extra in variants
    assert len(set(found)) == len(found)


def test_several_models_go_from_small_to_large() -> None:
    options = CompareOptions(model=("tiny", "small"), batch_size=(64, 1))
    found = groups(LAPTOP, options, ["mps", "cpu"])
    jobs = [(group[0].model, group[0].batch_size) for group in found]
    assert jobs == [("tiny", 1), ("tiny", 64), ("small", 1), ("small", 64)]
    assert [c.variant for c in found[0]] == ["mps bf16 sdpa", "mps fp32 sdpa", "cpu bf16 bmm", "cpu fp32 bmm"]


def test_labels_and_settings_of_a_configuration() -> None:
    one = dataclasses.replace(configuration(), threads=1)
    assert one.label == "tiny, batch 8, cpu bf16 bmm 1 thread"
    assert not one.is_default
    assert Configuration(**json.loads(json.dumps(one.to_dict()))) == one


@pytest.mark.parametrize(("model", "vocabulary", "tokens"), [("small", 33, 77), ("ViT-B-32", 49408, 24)])
def test_captions_have_the_length_that_the_tokenizer_gives(model: str, vocabulary: int, tokens: int) -> None:
    shape, found = model_shape(model)
    assert shape.vocab_size == vocabulary
    assert abs(found - tokens) <= 8


class FixedClock(Session):
    """A session with a fixed time left."""

    def __init__(self, folder: Path, left: float, facts: Facts = MACHINE) -> None:
        self._left = left
        super().__init__(CompareOptions(minutes=8), facts, folder, lambda text, used: None)
        self.document["devices"] = document([])["devices"]

    @property
    def left(self) -> float:
        return self._left


def obstacle(session: Session, c: Configuration, fair: float = 10.0) -> tuple[str, str]:
    return session.obstacle(c, fair) or ("", "")


def test_what_takes_too_long_or_does_not_fit_is_not_tried(tmp_path: Path) -> None:
    session = FixedClock(tmp_path, left=400.0)
    session.document["results"] = [result(configuration(batch_size=b), 1.0) for b in (1, 2)]
    kind, reason = obstacle(session, configuration("200M", 1024))
    assert kind == "time"
    assert "too long for --minutes 8" in reason
    small = configuration("tiny", 8, "cuda")
    assert obstacle(session, small) == ("", "")
    # 60 GB at batch 8 are more than 100 GB at batch 16: the card has 69 GB.
    large = configuration("1B", 16, "cuda")
    last = {"configuration": {"batch_size": 8}, "seconds": {"median": 0.1}, "peak_bytes": 60e9}
    session.measured["1B", large.variant] = [last]
    assert obstacle(session, large)[0] == "memory"
    session.skip(small, "memory", "out of memory")
    assert obstacle(session, dataclasses.replace(small, batch_size=16)) == ("memory", "batch 8 did not fit")


def test_without_time_everything_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session = FixedClock(tmp_path, left=-1.0)
    monkeypatch.setattr(Session, "probe", lambda self, kind, precisions: None)
    session.run()
    assert {item["kind"] for item in session.document["skipped"]} == {"time"}
    written = json.loads((tmp_path / "comparison.json").read_text())
    assert written["results"] == []
    assert not written["complete"]


def test_only_devices_that_nobody_named_are_reported_absent(tmp_path: Path) -> None:
    assert set(FixedClock(tmp_path, 1.0, LAPTOP).document["absent"]) == {"cuda"}
    named = Session(CompareOptions(device=("cpu",)), LAPTOP, tmp_path, lambda text, used: None)
    assert named.document["absent"] == {}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"model": ("smal",)}, "did you mean 'small'"),
        ({"device": ("mps",)}, "--device mps: not available on this machine"),
        ({"batch_size": (0,)}, "--batch-size"),
        ({"batch_size": ()}, "--batch-size"),
        ({"minutes": 0.0}, "--minutes"),
    ],
)
def test_wrong_options_are_one_line(tmp_path: Path, values: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        compare(CompareOptions(**values), tmp_path, lambda text, used: None)


@pytest.mark.slow
def test_a_worker_measures_the_training_step(tmp_path: Path) -> None:
    one = Configuration(model="tiny", batch_size=2, device="cpu", precision="bf16", attention="bmm", threads=1)
    worker = Worker(tmp_path / "log")
    try:
        opened = worker.call("open", 300, one, 60.0)
        assert opened["parameters"] > 1e6
        found = worker.call("steps", 300, 2, 60.0)
        assert len(found["samples"]) == 2
        assert {"seconds", "forward", "backward", "optimizer"} <= set(found["samples"][0])
        assert found["peak_bytes"] > 4 * opened["parameters"]
        assert 0 < worker.call("gradient_difference", 300) < 0.15
        # Another batch size in another precision in the same process, then one that is impossible.
        other = dataclasses.replace(one, batch_size=1, precision="fp32")
        assert worker.call("open", 300, other, 60.0)["parameters"] == opened["parameters"]
        assert worker.call("gradient_difference", 300) < 1e-4
        with pytest.raises(MeasurementError, match="fp16"):
            worker.call("open", 300, dataclasses.replace(one, precision="fp16"), 60.0)
        assert worker.alive
        with pytest.raises(MeasurementError, match="timed out after"):
            worker.call("open", 0.0, one, 60.0)
    finally:
        worker.close()
    with pytest.raises(MeasurementError, match="worker process"):
        worker.call("open", 5, one, 60.0)


@pytest.mark.slow
def test_a_complete_comparison(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(module, "MAX_ROUNDS", 1)
    monkeypatch.setattr(module, "groups", lambda *values: [groups(*values)[0][:1]])
    shown = []
    options = CompareOptions(batch_size=(2,), device=("cpu",), minutes=10.0)
    found = compare(options, tmp_path / "out", lambda text, used: shown.append(text))
    assert found["complete"]
    assert len(found["results"]) == 1
    assert found["results"][0]["seconds"]["n"] >= 1
    assert found["results"][0]["gradient_difference"] < 0.15
    assert any("first steps" in text for text in shown)
    assert json.loads((tmp_path / "out" / "comparison.json").read_text())["verdict"]
    assert len(load_measured(read_facts())) == 1


def test_a_result_sums_up_its_steps() -> None:
    one = result(configuration(), 2.0)
    assert sum(one["phases"].values()) == pytest.approx(2.0)
    assert one["images_per_second"] == pytest.approx(4.0)
    assert one["joules_per_step"] is None
