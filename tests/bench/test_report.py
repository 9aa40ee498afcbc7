"""Table and verdict of a comparison."""

import json
import platform
from dataclasses import replace
from pathlib import Path

import pytest
from machines import M1

from m1clip.bench.report import Comparison, shared, text, thread_rows, verdict, when_to_use

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
    sentences = "\n".join(verdict([result(configuration(device="cpu"), 4.0), wrong]))
    assert "cuda bf16 CUDA graph: gradients differ from the CPU's in fp32 by 90.0%" in sentences
    assert "tiny, batch 8: cpu bf16 is the fastest of 1" in sentences


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
    sentences = "\n".join(verdict(sweep_results()))
    assert (
        "tiny in bf16: the CPU is faster up to batch 4, cuda from batch 16 (the cost model predicts"
        " equal" in sentences
    )
    # 66 ms against 21 ms.
    assert "original in bf16: cuda is faster than the CPU at every batch size measured" in sentences


def test_shared_results_have_no_names_or_paths() -> None:
    document = shared(M1, sweep_results())
    assert set(document) == {
        "chip",
        "cores",
        "memory_gib",
        "system",
        "m1clip",
        "torch",
        "mlx",
        "results",
    }
    assert (document["chip"], document["system"]) == (
        M1.cpu,
        f"macOS {M1.macos}" if M1.macos else M1.system,
    )
    assert {key for row in document["results"] for key in row} == {
        "configuration",
        "images_per_second",
        "n",
        "gradient_difference",
    }
    written = json.dumps(document)
    assert str(Path.home()) not in written
    assert platform.node() not in written


def test_table_and_skipped_configurations() -> None:
    busy = result(configuration("1B"), 1.0, other_load=0.4)
    skipped = {"1B": "needs about 90 GB of 69 GB"}
    shown = text(Comparison(facts=M1, results=[*sweep_results(), busy], skipped=skipped))
    lines = shown.splitlines()
    (line,) = [line for line in lines if line.startswith("1B, batch 8, cpu bf16")]
    assert line.endswith("other programs used 40% of the CPU")
    (line,) = [line for line in lines if line.startswith("1B   ")]
    assert line.endswith("not measured: needs about 90 GB of 69 GB")
    (line,) = [line for line in lines if line.startswith("original, batch 64, cpu bf16")]
    assert line.split()[-7:-1] == ["15.2", "100%", "1", "GB", "not", "measured"]
    assert line.split()[-10] == "2%", "the spread of the steps"


def test_when_to_use_which_follows_the_measurements() -> None:
    head, (tiny, small, vit) = when_to_use(sweep_results())
    assert head == ["model", "batch 1", "batch 4", "batch 16", "batch 64", "batch 256"]
    assert tiny[0] == "tiny (8.0M)"
    assert tiny[1] == "cpu bf16, 9.5x as fast as cuda bf16 CUDA graph, n=5"
    assert tiny[3] == "cuda bf16 CUDA graph, 1.6x as fast as cpu bf16, n=5"
    assert small[1] == "cuda bf16 CUDA graph, 3.2x as fast as cpu bf16, n=5"
    assert vit[5].startswith("cuda bf16 CUDA graph, ")
    # A GPU without its fixed cost wins at batch 1, too.
    _, (tiny, *_) = when_to_use(sweep_results(gpu_fixed=1e-4))
    assert tiny[1].startswith("cuda bf16 CUDA graph, ")


def test_when_to_use_which_names_ties_and_gaps() -> None:
    alone = result(configuration(batch_size=1), 1.0)
    tied = [result(configuration(device=d), s) for d, s in (("cpu", 1.0), ("cuda", 1.005))]
    wrong = result(configuration(batch_size=64, device="cuda"), 0.1, gradient=0.9)
    head, ((_, *cells),) = when_to_use([alone, *tied, wrong])
    assert head == ["model", "batch 1", "batch 8"]
    assert cells[0] == "cpu bf16 (nothing else measured), n=5"
    assert cells[1] == "cpu bf16 or cuda bf16 CUDA graph: no clear difference, n=5"
    _, rows = when_to_use([alone, result(configuration("original"), 1.0)])
    assert rows[0][2] == rows[1][1] == "not measured"


def test_threads_are_compared_with_the_default() -> None:
    default = configuration(device="cpu")
    times = {0: 1.0, 8: 1.5, 2: 1.8}
    results = [result(replace(default, threads=n), seconds) for n, seconds in times.items()]
    cells = [(row[0], row[-1]) for row in thread_rows(M1, results)]
    assert cells == [
        ("4 (performance cores, default)", "1.00"),
        ("8 (all cores)", "1.50"),
        ("2 (half)", "1.80"),
    ]
    assert thread_rows(M1, results[:1]) == []
