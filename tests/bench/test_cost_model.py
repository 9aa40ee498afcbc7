"""The cost model fitted to measured steps, the crossover of two devices, and the history of measurements."""

from __future__ import annotations

from pathlib import Path

import pytest

from m1clip.bench.cost_model import (
    CostModel,
    cost_models,
    crossing,
    crossovers,
    errors,
    fit,
    load_measured,
    save_measured,
)

from .examples import LAPTOP, MACHINE, configuration, result, sweep_results

TRUE = CostModel(fixed=0.01, per_parameter=1e-10, per_flop=1e-12)


def measured(model: CostModel) -> list[dict[str, object]]:
    found = []
    for name in ("tiny", "small", "ViT-B-32"):
        for batch_size in (1, 4, 16, 64):
            one = result(configuration(name, batch_size), 1.0)
            found.append(result(configuration(name, batch_size), model.seconds(one["parameters"], one["flops"])))
    return found


def test_fit_recovers_the_coefficients() -> None:
    found = fit(measured(TRUE))
    assert found is not None
    assert found.fixed == pytest.approx(TRUE.fixed, rel=1e-6)
    assert found.per_parameter == pytest.approx(TRUE.per_parameter, rel=1e-6)
    assert found.per_flop == pytest.approx(TRUE.per_flop, rel=1e-6)


def test_fit_has_no_negative_coefficient() -> None:
    odd = [result(configuration(batch_size=b), s) for b, s in ((1, 5.0), (8, 1.0), (64, 0.5))]
    found = fit(odd)
    assert found is not None
    assert min(found.fixed, found.per_parameter, found.per_flop) >= 0
    assert fit(odd[:2]) is None


def test_a_model_size_left_out_of_the_fit_is_predicted() -> None:
    (model,) = cost_models(measured(TRUE))
    assert set(model["held_out_errors"]) == {"tiny", "small", "ViT-B-32"}
    assert max(abs(error) for values in model["held_out_errors"].values() for error in values) < 1e-3
    (one_size,) = cost_models([r for r in measured(TRUE) if r["configuration"]["model"] == "tiny"])  # type: ignore[index]
    assert one_size["held_out_errors"] == {}


def test_crossing_of_two_cost_models() -> None:
    cpu, gpu = CostModel(0.0, 0.0, 1e-12), CostModel(0.02, 0.0, 1e-14)
    batch_size = crossing(cpu, gpu, parameters=1e7, flops_per_image=2e9)
    assert batch_size == pytest.approx(0.02 / (2e9 * (1e-12 - 1e-14)))
    assert crossing(CostModel(0.1, 0, 1e-12), gpu, 1e7, 2e9) is None  # the GPU is faster at every batch size


def test_crossover_lies_between_measured_batch_sizes() -> None:
    results = sweep_results()
    models = cost_models(results)
    assert {(m["device"], m["points"]) for m in models} == {("cpu", 15), ("cuda", 15)}
    found = {item["model"]: item for item in crossovers(results, models)}
    assert (found["tiny"]["cpu_wins_up_to"], found["tiny"]["cpu_loses_from"]) == (4, 16)
    assert found["tiny"]["predicted"] == pytest.approx(10, rel=0.05)
    assert (found["small"]["cpu_wins_up_to"], found["small"]["cpu_loses_from"]) == (None, 1)  # 66 ms against 21 ms


def test_overlapping_quartiles_are_no_difference() -> None:
    results = [result(configuration(device=d), s, spread=0.2) for d, s in (("cpu", 1.0), ("cuda", 1.02))]
    (item,) = crossovers(results, [])
    assert (item["cpu_wins_up_to"], item["cpu_loses_from"]) == (None, None)


def test_errors_are_relative() -> None:
    one = result(configuration(), 2.0)
    assert errors(CostModel(3.0, 0, 0), [one]) == pytest.approx([0.5])


def test_newer_measurements_replace_older_ones(tmp_path: Path) -> None:
    for seconds in (2.0, 1.0):
        save_measured(MACHINE, [result(configuration(), seconds)], tmp_path)
    assert [r["seconds"]["median"] for r in load_measured(MACHINE, tmp_path)] == [1.0]
    assert load_measured(LAPTOP, tmp_path) == []
    for path in (tmp_path / "compare").iterdir():
        path.write_text('[{"seconds": 1}, 5]')
    assert load_measured(MACHINE, tmp_path) == []
