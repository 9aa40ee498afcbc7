"""Table and verdict of a comparison."""

import json
import platform
from pathlib import Path

import pytest
from machines import M1

from m1clip.bench.report import shared, text, verdict

from .examples import configuration, result, sweep_results


def test_fastest_is_named_with_its_interval() -> None:
    slow, fast = result(configuration(device="cpu"), 4.1), result(configuration(device="cuda"), 0.1)
    assert "tiny, batch 8: cuda bf16 CUDA graph is the fastest of 2" in "\n".join(
        verdict([slow, fast])
    )
    assert "41 times as fast [40, 42] as cpu bf16" in "\n".join(verdict([slow, fast]))
    assert verdict([slow, fast])[-1] == "Use --device cuda --precision bf16 for it."
    assert verdict([slow])[-1] == "Only the CPU was measured."


def test_configuration_with_wrong_gradients_is_excluded() -> None:
    wrong = result(configuration(device="cuda"), 0.1, gradient=0.9)
    found = "\n".join(verdict([result(configuration(device="cpu"), 4.0), wrong]))
    assert "cuda bf16 CUDA graph: gradients differ from the CPU's in fp32 by 90.0%" in found
    assert "tiny, batch 8: cpu bf16 is the fastest of 1" in found


@pytest.mark.parametrize(
    ("seconds", "message"),
    [
        ((0.1, 1.0), "the CPU is faster than cuda at every batch size measured, up to 8"),
        ((1.0, 0.1), "cuda is faster than the CPU at every batch size measured, 10.0 times at 8"),
        ((1.0, 1.005), "no clear difference between the CPU and cuda"),  # their quartiles overlap
    ],
)
def test_crossover_in_words(seconds: tuple[float, float], message: str) -> None:
    measured = zip(("cpu", "cuda"), seconds, strict=True)
    assert message in "\n".join(
        verdict([result(configuration(device=device), s) for device, s in measured])
    )


def test_crossover_lies_between_measured_batch_sizes() -> None:
    found = "\n".join(verdict(sweep_results()))
    assert (
        "tiny in bf16: the CPU is faster up to batch 4, cuda from batch 16 (the cost model predicts equal"
        in found
    )
    # 66 ms against 21 ms.
    assert "small in bf16: cuda is faster than the CPU at every batch size measured" in found


def test_shared_results_have_no_names_or_paths() -> None:
    found = shared(M1, sweep_results())
    assert set(found) == {
        "chip",
        "cores",
        "memory_gib",
        "system",
        "m1clip",
        "torch",
        "mlx",
        "results",
    }
    assert (found["chip"], found["system"]) == (
        M1.cpu,
        f"macOS {M1.macos}" if M1.macos else M1.system,
    )
    assert {key for row in found["results"] for key in row} == {
        "configuration",
        "images_per_second",
        "n",
        "gradient_difference",
    }
    written = json.dumps(found)
    assert str(Path.home()) not in written
    assert platform.node() not in written


def test_table_and_skipped_configurations() -> None:
    busy = result(configuration("1B"), 1.0, other_load=0.4)
    shown = text([*sweep_results(), busy], {"1B": "needs about 90 GB of 69 GB"})
    assert "warning: 1B, batch 8, cpu bf16: other programs used 40% of the CPU" in shown
    assert shown.endswith("skipped: 1B: needs about 90 GB of 69 GB")
    (line,) = [line for line in shown.splitlines() if line.startswith("small, batch 64, cpu bf16")]
    assert line.split()[-7:-1] == ["15.2", "100%", "1", "GB", "not", "measured"]
