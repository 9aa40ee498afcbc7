"""The table of results."""

from __future__ import annotations

import subprocess
import sys

import torch
from rich.console import Console

from m1clip.evaluation.retrieval import held_out
from m1clip.evaluation.statistics import Interval, Metric, Scores, cells, scores_table


def test_shows_value_interval_chance_and_n() -> None:
    console = Console(width=100, record=True, file=None, force_terminal=False)
    with console.capture() as capture:
        console.print(scores_table(held_out(torch.eye(20), torch.eye(20), torch.arange(20)), "Held out"))
    shown = capture.get()
    assert "Held out" in shown
    line = next(line for line in shown.splitlines() if "text_to_image/recall@1 " in line)
    assert line.split() == ["text_to_image/recall@1", "100.0%", "83.9", "-", "100.0%", "5%", "20"]
    line = next(line for line in shown.splitlines() if "image_to_text/median_rank" in line)
    assert line.split()[1:] == ["1", "1", "-", "1", "10", "20"]


def test_small_chance_is_not_shown_as_nothing() -> None:
    metric = Metric("a/recall@1", 0.5, 1 / 5000, Interval(0.4, 0.6), 5000)
    assert cells(metric) == ("50.0%", "40.0 - 60.0%", "0.02%", "5,000")


def test_a_label_is_not_read_as_markup() -> None:
    scores = Scores((Metric("negatives/[red]/accuracy", 0.5, 0.5, Interval(0.4, 0.6), 3),))
    console = Console(width=100)
    with console.capture() as capture:
        console.print(scores_table(scores))
    assert "negatives/[red]/accuracy" in capture.get()


def test_importing_the_table_imports_neither_rich_nor_torch() -> None:
    code = "import sys, m1clip.evaluation.statistics; print({'rich', 'torch'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
