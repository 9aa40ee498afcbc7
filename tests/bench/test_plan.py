"""What a job will take: memory by component, time from what is known, energy only from a meter or a given power."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from m1clip.bench.candidate import Candidate, config_of, remember
from m1clip.bench.plan import PlanAsk, caption_shape, energy_words, make_plan, on_machines, step_time
from m1clip.bench.report import plan_json, plan_lines
from m1clip.errors import UserError
from m1clip.hardware.device import Device
from m1clip.hardware.facts import read_facts
from m1clip.model.presets import PRESETS, shape_of
from m1clip.training.memory import foretell, foretold_peak

from .made import result


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    shallow = dataclasses.replace(PRESETS["tiny"], vision_layers=2, text_layers=1)  # traced seven times for a plan
    monkeypatch.setitem(PRESETS, "tiny", shallow)


def test_a_whole_plan() -> None:
    found = make_plan(PlanAsk(model="tiny", batch=16, images=1600, epochs=2, device="cpu", precision="bf16",
                              rate="1TFLOP", bandwidth="100GB", watts=50.0, memory="4GB"))  # fmt: skip
    job, memory = found["job"], found["memory"]
    assert job["parameters"] > 1e5
    assert found["steps"] == 200
    flops = job["flops_per_pair"] * 16
    assert found["step_seconds"] == pytest.approx(flops / 0.5e12 + 28 * job["parameters"] / 100e9)
    assert found["seconds"] == pytest.approx(200 * found["step_seconds"])
    assert found["energy"].startswith(f"{50 * found['seconds'] / 3600:.3g} Wh at the given 50 W")
    parts = memory["parts"]
    assert parts["weights"] == pytest.approx(4 * job["parameters"], rel=0.1)
    assert {"process", "data", "optimizer", "activations", "rest"} <= set(parts)
    assert memory["total"] == sum(parts.values())
    assert memory["fits"] == (memory["total"] <= 4e9)
    assert 16 < memory["largest_batch"] < memory["largest_batch_recompute"] < 65_536
    text = plan_lines(found)
    assert "1 TFLOP/s, assumed" in text
    assert plan_json(found).startswith("{")


def test_the_largest_batch_is_the_largest() -> None:
    ask = PlanAsk(model="tiny", batch=256, images=100, device="cpu", precision="fp32", rate="1TFLOP", memory="2GB")
    memory = make_plan(ask)["memory"]
    facts, (vocabulary, tokens) = read_facts(), caption_shape("tiny")
    config = config_of(Candidate(model="tiny", batch=2, device="cpu", precision="fp32", attention="bmm"), 64)
    shape = shape_of(config.model, vocabulary)
    parts = foretell(config, shape, "cpu", "fp32", facts, memory["largest_batch"], tokens)
    whole = foretold_peak(parts, "cpu", memory["parts"]["process"], memory["parts"]["data"])
    assert sum(whole.values()) == pytest.approx(2e9, rel=0.02)


def test_what_was_measured_here_is_used() -> None:
    facts = read_facts()
    device = Device("cpu", facts)
    asked = Candidate(model="tiny", batch=16, device="cpu", precision="bf16")
    measured = result(Candidate(model="tiny", batch=8, device="cpu", precision="bf16"), 2.0)
    measured["joules_per_step"] = 30.0
    remember(facts, [measured])
    seconds, words, joules = step_time(asked, facts, device, 8_000_000, 2 * measured["flops"], None, None)
    assert seconds == pytest.approx(4.0)
    assert joules == pytest.approx(60.0)
    assert words == "measured here at batch 8"
    others = [result(Candidate(model=m, batch=8, device="cpu", precision="fp32"), s) for m, s in
              (("tiny", 0.02), ("small", 0.6), ("ViT-B-32", 0.3))]  # fmt: skip
    remember(facts, others)
    unseen = Candidate(model="200M", batch=8, device="cpu", precision="fp32")
    seconds, words, joules = step_time(unseen, facts, device, 200_000_000, 1.5e12, None, None)
    assert "cost model of 3 steps" in words
    assert seconds > 0.6
    assert joules is None


def test_nothing_is_known_so_the_rate_is_measured_and_the_share_assumed() -> None:
    facts = read_facts()
    asked = Candidate(model="tiny", batch=8, device="cpu", precision="fp32")
    seconds, words, joules = step_time(asked, facts, Device("cpu", facts), 1, 1e9, None, None)
    assert seconds > 0
    assert "assumed; m1clip compare measures it" in words
    assert joules is None


def test_energy_is_never_guessed() -> None:
    assert energy_words(None, None, 1.0, 10).startswith("not measured")
    assert energy_words(36.0, None, 1.0, 100).startswith("1 Wh")
    assert energy_words(None, 360.0, 1.0, 10) == "1 Wh at the given 360 W"


def test_machines_share_the_steps_and_pay_for_the_gradients() -> None:
    one, two, eight = (on_machines(n, step=1.0, steps=800, gradient=400_000_000, network=1e9) for n in (1, 2, 8))
    assert one["seconds"] == 800
    assert (two["traffic_bytes"], eight["traffic_bytes"]) == (400_000_000, 700_000_000)
    assert two["seconds"] == pytest.approx(400 * 1.4)
    assert eight["speedup"] == pytest.approx(8 / 1.7)


@pytest.mark.parametrize(("model", "vocabulary", "tokens"), [("small", 33, 77), ("ViT-B-32", 49408, 24)])
def test_captions_have_the_length_that_the_models_tokenizer_gives(model: str, vocabulary: int, tokens: int) -> None:
    found = caption_shape(model)
    assert found[0] == vocabulary
    assert abs(found[1] - tokens) <= 8


@pytest.mark.parametrize("values", [{"batch": 1}, {"images": 0}, {"epochs": 0.0}])
def test_a_wrong_question_is_one_line(values: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="must be at least"):
        PlanAsk(**values)
    with pytest.raises(UserError, match="--rate fast"):
        make_plan(PlanAsk(device="cpu", precision="fp32", rate="fast"))
