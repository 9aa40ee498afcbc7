"""The cost model fitted to measured steps, the crossing of two devices, and the stored measurements."""

from __future__ import annotations

from pathlib import Path

import pytest

from m1clip.bench.cost_model import CostModel, by_device, crossing, fit, load_measured, save_measured

from .examples import FLOPS_PER_IMAGE, LAPTOP, MACHINE, PARAMETERS, configuration, result, sweep_results


def test_fit_recovers_the_coefficients() -> None:
    true = CostModel(fixed=0.01, per_parameter=1e-10, per_flop=1e-12)
    measured = [
        result(configuration(name, b), true.seconds(PARAMETERS[name], b * FLOPS_PER_IMAGE[name]))
        for name in ("tiny", "small", "ViT-B-32")
        for b in (1, 4, 16, 64)
    ]
    found = fit(measured)
    assert found is not None
    assert (found.fixed, found.per_parameter, found.per_flop) == pytest.approx((0.01, 1e-10, 1e-12), rel=1e-6)


def test_fit_has_no_negative_coefficient() -> None:
    odd = [result(configuration(batch_size=b), s) for b, s in ((1, 5.0), (8, 1.0), (64, 0.5))]
    found = fit(odd)
    assert found is not None
    assert min(found.fixed, found.per_parameter, found.per_flop) >= 0
    assert fit(odd[:2]) is None


def test_crossing_of_two_cost_models() -> None:
    cpu, gpu = CostModel(0.0, 0.0, 1e-12), CostModel(0.02, 0.0, 1e-14)
    batch_size = crossing(cpu, gpu, parameters=1e7, flops_per_image=2e9)
    assert batch_size == pytest.approx(0.02 / (2e9 * (1e-12 - 1e-14)))
    assert crossing(CostModel(0.1, 0, 1e-12), gpu, 1e7, 2e9) is None  # the GPU is faster at every batch size


def test_fastest_default_configuration_of_each_batch_size_counts() -> None:
    results = sweep_results()
    slow = result(configuration("tiny", 1, "cuda"), 5.0)
    found = by_device([slow, *results])
    assert {key: len(members) for key, members in found.items()} == {("cpu", "bf16"): 15, ("cuda", "bf16"): 15}
    assert slow not in found["cuda", "bf16"]


def test_newer_measurements_replace_older_ones(tmp_path: Path) -> None:
    for seconds in (2.0, 1.0):
        save_measured(MACHINE, [result(configuration(), seconds)], tmp_path)
    assert [r.seconds.median for r in load_measured(MACHINE, tmp_path)] == [1.0]
    assert load_measured(LAPTOP, tmp_path) == []
    (file,) = (tmp_path / "compare").iterdir()
    for damaged in ('{"a": 1}', "[1]", "[{}]", "no JSON"):
        file.write_text(damaged)
        assert load_measured(MACHINE, tmp_path) == []
