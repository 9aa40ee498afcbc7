"""Predicted memory, time and energy of a run."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from m1clip.bench.configurations import model_shape
from m1clip.bench.cost_model import save_measured
from m1clip.bench.options import PlanOptions
from m1clip.bench.plan import energy, make_plan, plan_text, step_time
from m1clip.errors import UserError
from m1clip.hardware.device import Device
from m1clip.hardware.facts import read_facts
from m1clip.model.presets import PRESETS, with_fields

from .examples import configuration, result


@pytest.fixture(autouse=True)
def shallow_model_and_own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    shallow = with_fields(PRESETS["tiny"], vision_layers=2, text_layers=1)  # a plan traces it seven times
    monkeypatch.setitem(PRESETS, "tiny", shallow)
    model_shape.cache_clear()
    yield
    model_shape.cache_clear()


def test_complete_plan() -> None:
    options = PlanOptions(
        batch_size=16, images=1600, epochs=2, device="cpu", precision="bf16", rate="1TFLOP", watts=50.0, memory="4GB"
    )
    plan = make_plan(options)
    memory = plan["memory"]
    assert plan["parameters"] > 1e5
    assert plan["steps"] == 200
    assert plan["step_seconds"] == pytest.approx(plan["flops_per_image"] * 16 / 0.5e12)
    assert plan["seconds"] == pytest.approx(200 * plan["step_seconds"])
    assert plan["energy"] == f"{50 * plan['seconds'] / 3600:.3g} Wh at the given 50 W"
    parts = memory["parts"]
    assert parts["weights"] == pytest.approx(4 * plan["parameters"], rel=0.1)
    assert {"process", "data", "optimizer", "activations", "rest"} <= set(parts)
    assert memory["total"] == sum(parts.values())
    assert memory["fits"] == (memory["total"] <= 4e9)
    assert 16 < memory["max_batch_size"] <= memory["max_batch_size_checkpointing"] < 65_536
    assert "assuming 50% of 1 TFLOP/s" in plan_text(plan)


def test_plan_time_uses_measured_steps() -> None:
    facts = read_facts()
    device = Device("cpu", facts)
    measured = dataclasses.replace(result(configuration(batch_size=8), 2.0), joules_per_step=30.0)
    save_measured(facts, [measured])
    seconds, source, joules = step_time(configuration(batch_size=16), facts, device, 2 * measured.flops, None)
    assert (seconds, joules) == (pytest.approx(4.0), pytest.approx(60.0))
    assert source == "measured on this machine at batch 8"
    others = {"tiny": 0.02, "small": 0.6, "ViT-B-32": 0.3}
    save_measured(facts, [result(configuration(model, precision="fp32"), s) for model, s in others.items()])
    seconds, source, joules = step_time(configuration("200M", precision="fp32"), facts, device, 1.5e12, None)
    assert "cost model of 3 steps" in source
    assert seconds > 0.6
    assert joules is None


def test_plan_without_measurements_measures_matmul_speed() -> None:
    facts = read_facts()
    seconds, source, joules = step_time(configuration(precision="fp32"), facts, Device("cpu", facts), 1e9, None)
    assert seconds > 0
    assert "measured on this machine; m1clip compare measures the step itself" in source
    assert joules is None


def test_energy_is_never_estimated() -> None:
    assert energy(None, None, 1.0, 10).startswith("not measured")
    assert energy(36.0, None, 1.0, 100).startswith("1 Wh")
    assert energy(None, 360.0, 1.0, 10) == "1 Wh at the given 360 W"


@pytest.mark.parametrize("values", [{"batch_size": 1}, {"images": 0}, {"epochs": 0.0}])
def test_invalid_options_are_one_line_errors(values: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="must be at least"):
        PlanOptions(**values)


def test_rate_without_unit_is_rejected() -> None:
    with pytest.raises(UserError, match="--rate fast"):
        make_plan(PlanOptions(device="cpu", precision="fp32", rate="fast"))
