"""The sentences that a comparison ends with, and its report."""

from __future__ import annotations

import dataclasses
import re

import pytest

from m1clip.bench.report import page, text
from m1clip.bench.verdict import gradient_is_right, speedup, verdict

from .examples import configuration, document, result, sweep_results


def words(*results: dict[str, object]) -> str:
    return "\n".join(verdict(document(list(results))))


def test_verdict_names_the_fastest_with_its_interval() -> None:
    slow, fast = result(configuration(device="cpu"), 4.1), result(configuration(device="cuda"), 0.1)
    found = words(slow, fast)
    assert "tiny, batch 8: cuda bf16 sdpa CUDA graph is the fastest of 2" in found
    assert "41 times faster [40, 42] than cpu bf16 bmm" in found
    assert "No mps here: no Apple GPU" in found
    assert speedup(slow, fast)[0] == pytest.approx(41)


def test_wrong_gradients_are_left_out_whatever_their_speed() -> None:
    wrong = result(configuration(device="cuda"), 0.1, gradient=0.9)
    found = words(result(configuration(device="cpu"), 4.0), wrong)
    assert "cuda bf16 sdpa CUDA graph: gradients differ from the CPU's in fp32 by 90.0%" in found
    assert "tiny, batch 8: cpu bf16 bmm is the fastest of 1" in found
    assert not gradient_is_right(wrong)


def test_verdict_reports_what_one_setting_gains() -> None:
    base = configuration()
    variants = (({}, 1.0), ({"precision": "fp32"}, 2.0), ({"attention": "sdpa"}, 1.01), ({"threads": 1}, 1.8))
    both = dataclasses.replace(base, precision="fp32", attention="sdpa")
    results = [result(dataclasses.replace(base, **change), seconds) for change, seconds in variants]  # type: ignore[arg-type]
    found = words(*results, result(both, 2.0))
    assert "There, bf16 instead of fp32 is 2.00 times faster [1.9" in found
    assert "There, bmm attention instead of sdpa makes no clear difference" in found


@pytest.mark.parametrize(
    ("seconds", "message"),
    [
        ((0.1, 1.0), "the CPU is faster than cuda at every batch size measured, up to 8"),
        ((1.0, 0.1), "cuda is faster than the CPU at every batch size measured, 10.0 times at 8"),
        ((1.0, 1.0), "no clear difference between the CPU and cuda"),
    ],
)
def test_crossover_in_words(seconds: tuple[float, float], message: str) -> None:
    assert message in words(
        *(result(configuration(device=d), s) for d, s in zip(("cpu", "cuda"), seconds, strict=True))
    )


def test_page_needs_no_network_and_escapes() -> None:
    made = document(sweep_results())
    made["facts"]["cpu"] = "<script>alert(1)</script>"
    made["skipped"] = [{"label": "1B <b>", "kind": "memory", "reason": "too large & so on"}]
    made["verdict"] = verdict(made)
    html = page(made)
    assert "tiny in bf16: the CPU is faster up to batch 4, cuda from batch 16" in html
    assert not re.search(r"<script|@import|url\(|(src|href)=(?!'data:)", html)
    assert "1B &lt;b&gt;" in html
    assert not re.search(r"\bnan\b|Infinity|None<", html)
    shown = text(made)
    assert "skipped: 1B <b>: too large & so on" in shown
    assert "small, batch 64, cuda bf16 sdpa CUDA graph" in shown


def test_page_has_plots_where_matplotlib_is_installed() -> None:
    pytest.importorskip("matplotlib")
    html = page(document(sweep_results()))
    assert html.count("data:image/svg+xml;base64,") == 3  # one per model
    assert "tiny, batch 8: images per second" in page(document([result(configuration(), s) for s in (1.0, 2.0, 3.0)]))
