"""MISSION 27: one HTML page with the plots of a comparison."""

from dataclasses import replace

from machines import H200

from m1clip.bench.page import comparison_page
from m1clip.bench.report import Comparison
from m1clip.bench.steps import Configuration, Result
from m1clip.hardware.timing import timing


def page_of(seconds: float) -> str:
    """The page of a CPU and a GPU at two batch sizes."""
    results = []
    for batch_size in (1, 8):
        cpu = Configuration("tiny", batch_size, "cpu", "fp32")
        gpu = replace(cpu, device="cuda", cuda_graph=True)
        for c, step_seconds in ((cpu, seconds * batch_size), (gpu, seconds)):
            stages = {"forward": 0.25 * step_seconds, "backward": 0.75 * step_seconds}
            times = timing([step_seconds, step_seconds])
            result = Result(c, 2_000_000, 1e9, times, 0.5, 10**9, 3.0, 0.0, 0.0, stages)
            results.append(result)
    return comparison_page(Comparison(facts=H200, results=results)).decode()


def test_page_shows_what_was_measured() -> None:
    slow, fast = page_of(0.05), page_of(0.0125)
    assert "50 ms" in slow
    assert "50 ms" not in fast
    assert "12.5 ms" in fast
    assert "backward 75%, 37.5 ms" in slow
    assert slow.count("data:image/svg+xml") == 2, "step time and crossover"
    for title in ("Step time", "Crossover", "Time by stage", "Memory", "Energy"):
        assert f"<h2>{title}</h2>" in slow
