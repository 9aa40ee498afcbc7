"""The cost model fitted to measured steps, stored measurements, and what `plan` predicts from them."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from machines import H200, M1

from m1clip.bench.plan import make_plan, plan_text, step_time
from m1clip.bench.steps import (
    CostModel,
    crossing,
    fit,
    load_measured,
    model_shape,
    save_measured,
    size_of,
)
from m1clip.errors import UserError
from m1clip.hardware.device import Device
from m1clip.hardware.machine_info import read_machine_info
from m1clip.model.presets import PRESETS, with_fields
from m1clip.training.memory import MemoryEstimate

from .examples import FLOPS_PER_IMAGE, PARAMETERS, configuration, result


def test_fit_recovers_the_coefficients() -> None:
    true = CostModel(fixed=0.01, per_parameter=1e-10, per_flop=1e-12)
    measured = [
        result(configuration(name, b), true.seconds(PARAMETERS[name], b * FLOPS_PER_IMAGE[name]))
        for name in ("tiny", "original", "ViT-B-32")
        for b in (1, 4, 16, 64)
    ]
    costs = fit(measured)
    assert costs is not None
    assert (costs.fixed, costs.per_parameter, costs.per_flop) == pytest.approx(
        (0.01, 1e-10, 1e-12), rel=1e-6
    )


def test_fit_has_no_negative_coefficient() -> None:
    odd = [result(configuration(batch_size=b), s) for b, s in ((1, 5.0), (8, 1.0), (64, 0.5))]
    costs = fit(odd)
    assert costs is not None
    assert min(costs.fixed, costs.per_parameter, costs.per_flop) >= 0
    assert fit(odd[:2]) is None


def test_crossing_of_two_cost_models() -> None:
    cpu, gpu = CostModel(0.0, 0.0, 1e-12), CostModel(0.02, 0.0, 1e-14)
    batch_size = crossing(cpu, gpu, parameters=1e7, flops_per_image=2e9)
    assert batch_size == pytest.approx(0.02 / (2e9 * (1e-12 - 1e-14)))
    # The GPU is faster at every batch size.
    assert crossing(CostModel(0.1, 0, 1e-12), gpu, 1e7, 2e9) is None


def test_newer_measurements_replace_older_ones(tmp_path: Path) -> None:
    for seconds in (2.0, 1.0):
        save_measured(H200, [result(configuration(), seconds)], tmp_path)
    assert [r.seconds.median for r in load_measured(H200, tmp_path)] == [1.0]
    assert load_measured(M1, tmp_path) == []
    (file,) = (tmp_path / "compare").iterdir()
    for damaged in ('{"a": 1}', "[1]", "[{}]", "no JSON"):
        file.write_text(damaged)
        assert load_measured(H200, tmp_path) == []


def test_measurements_beside_other_programs_are_not_saved(tmp_path: Path) -> None:
    save_measured(H200, [result(configuration(), 1.0)], tmp_path)
    save_measured(H200, [result(configuration(), 3.0, other_load=0.5)], tmp_path)
    assert [r.seconds.median for r in load_measured(H200, tmp_path)] == [1.0]


@pytest.mark.parametrize(
    ("model", "vocabulary", "tokens"), [("original", 33, 77), ("ViT-B-32", 49408, 24)]
)
def test_caption_length_in_tokens(model: str, vocabulary: int, tokens: int) -> None:
    shape, token_count = model_shape(model)
    assert shape.vocab_size == vocabulary
    assert abs(token_count - tokens) <= 8


@pytest.fixture
def shallow_model_and_own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    # A plan traces it several times.
    shallow = with_fields(PRESETS["tiny"], vision_layers=1, text_layers=1)
    monkeypatch.setitem(PRESETS, "tiny", shallow)
    for cached in (model_shape, size_of):
        cached.cache_clear()
    yield
    for cached in (model_shape, size_of):
        cached.cache_clear()


SMALL_PLAN = {"batch_size": 16, "epochs": 2, "device": "cpu", "precision": "bf16"}


@pytest.mark.usefixtures("shallow_model_and_own_cache")
def test_complete_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = result(configuration(batch_size=8), 2.0)
    save_measured(read_machine_info(), [measured])
    plan = make_plan({**SMALL_PLAN, "memory": "4GB"}, 1600)
    assert plan["steps"] == 200
    assert plan["step_seconds"] == pytest.approx(
        2.0 * 16 * plan["flops_per_image"] / measured.flops
    )
    assert plan["seconds"] == pytest.approx(200 * plan["step_seconds"])
    assert plan["memory_bytes"] > 12 * plan["parameters"] > 1e6
    assert 16 < plan["max_batch_size"] <= plan["max_batch_size_checkpointing"] < 65_536
    assert "measured at batch 8 on this machine" in plan_text(plan)
    assert ": fits in 4 GB" in plan_text(plan)

    for name in ("peak", "largest"):
        monkeypatch.setattr(MemoryEstimate, name, lambda *arguments: 10**9)
    more = make_plan(SMALL_PLAN, 1600, ranks=4, bandwidth="1MB")
    run_plan, sent = (
        more["ranks"],
        0.75 * (10 * plan["parameters"] + 16 * 16 * model_shape("tiny")[0].embed_dim),
    )
    assert (run_plan["batch_size"], run_plan["sent_bytes"], run_plan["fsdp"]) == (4, sent, "off")
    assert more["step_seconds"] == pytest.approx(plan["step_seconds"] / 4 + sent / 1e6)
    assert run_plan["efficiency"] == pytest.approx(
        plan["step_seconds"] / (4 * more["step_seconds"])
    )
    assert "ranks      4, PREDICTED: " in plan_text(more)
    assert "at 1 MB/s (as given)" in plan_text(more)
    with pytest.raises(UserError, match="--ranks 4 needs --bandwidth, such as 10GB"):
        make_plan(ranks=4)
    with pytest.raises(
        UserError, match="--batch-size 16 is less than one image for each of 17 ranks"
    ):
        make_plan(SMALL_PLAN, 1600, ranks=17, bandwidth="1MB")
    two: Any = SimpleNamespace(
        size=2, bandwidth=lambda device: 2e6, on_rank0=lambda work: work(), host=None
    )
    monkeypatch.setattr("m1clip.bench.plan.connect", lambda device: two)
    assert "(measured between 2 ranks)" in plan_text(make_plan(SMALL_PLAN, 1600, ranks=8))


@pytest.mark.usefixtures("shallow_model_and_own_cache")
def test_plan_uses_the_cost_model_or_the_speed_of_matrix_products() -> None:
    facts = read_machine_info()
    c, device = configuration("200M", precision="fp32"), Device("cpu", facts)
    seconds, source = step_time(c, facts, device)
    assert seconds > 0
    assert "measured on this machine; m1clip compare measures the step itself" in source
    others = {"tiny": 0.02, "original": 0.6, "ViT-B-32": 0.3}
    save_measured(
        facts, [result(configuration(model, precision="fp32"), s) for model, s in others.items()]
    )
    seconds, source = step_time(c, facts, device)
    assert source == "cost model of 3 measured steps on this machine"
    assert seconds > 0.6


@pytest.mark.parametrize(
    "values", [{"batch_size": 1}, {"images": 0}, {"epochs": 0.0}, {"memory": "much"}]
)
def test_invalid_options_of_plan_are_one_line_errors(values: dict[str, Any]) -> None:
    images = values.pop("images", 8000)
    with pytest.raises(UserError, match=f"--{next(iter(values), 'images').replace('_', '-')}"):
        make_plan(values, images)
