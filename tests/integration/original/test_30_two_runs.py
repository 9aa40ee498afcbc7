"""30: two finished runs side by side: time, stability, accuracy."""

from pathlib import Path

from small_run import exit_code, finished_run


def test_report_shows_the_differences_of_two_runs(tmp_path: Path) -> None:
    first, second = finished_run(), finished_run({"train.steps": 3})
    pages = []
    for name, runs in (("both", (first, second)), ("one", (first,)), ("swapped", (second, first))):
        path = tmp_path / f"{name}.html"
        assert exit_code("report", *runs, "--out", path) == 0
        pages.append(path.read_text())
    both, one, swapped = pages
    assert "steps" in both
    assert len(both) > len(one)
    assert both != swapped
