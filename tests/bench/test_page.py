"""The HTML page of a comparison."""

from dataclasses import replace

from machines import H200, M1

from m1clip.bench.loading import Loading
from m1clip.bench.page import comparison_page
from m1clip.bench.report import Comparison
from m1clip.bench.stability import Stability
from m1clip.hardware.timing import timing

from .examples import configuration, result, sweep_results
from .test_overhead import matmuls


def complete_comparison() -> Comparison:
    """A comparison of a CPU and a GPU with everything that a page shows."""
    results = [
        replace(r, stages={"copy": 0.1, "forward": 0.4, "backward": 0.5}, joules_per_step=2.0)
        for r in sweep_results()
    ]
    return Comparison(
        facts=H200,
        results=results,
        skipped={"tiny, batch 8, <b>mps</b>": "out of memory"},
        overheads={"cuda": matmuls({32: 1e-5, 512: 1e-4}), "cpu": matmuls({32: 1e-6, 512: 1e-3})},
        stability={"tiny, cpu fp16": Stability("reduced", 8, 50, 3, 2, 2.3, 0.1)},
        loading=[Loading(0, timing([100.0, 110.0])), Loading(4, timing([200.0, 220.0]))],
        date="2026-11-18",
    )


def test_page_is_self_contained_and_has_every_section() -> None:
    page = comparison_page(complete_comparison()).decode()
    titles = ("Verdict", "When to use which", "Step time", "Crossover", "Time by stage", "Memory")
    for title in (*titles, "Energy", "Threads and workers", "Stability", "Overhead"):
        assert f"<h2>{title}</h2>" in page
    assert "default-src 'none'" in page
    assert "http://" not in page
    assert "https://" not in page
    assert "<script" not in page
    assert "&lt;b&gt;mps&lt;/b&gt;" in page
    assert "forward 40%" in page
    assert page.count("data:image/svg+xml") == 12  # 3 models, 5 batch sizes, 3 speedups, matmuls


def test_page_of_a_cpu_says_what_was_not_measured() -> None:
    comparison = Comparison(facts=M1, results=[result(configuration(), 1.0)])
    page = comparison_page(comparison).decode()
    assert "Only the CPU was measured: there is no crossover" in page
    assert "no energy counter can be read" in page
    assert "<h2>Overhead</h2>" not in page
