"""What is concluded from measured steps: cost model, crossover, sentences, table, document, page."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from m1clip.bench.candidate import Candidate
from m1clip.bench.compare import read_document, write_document
from m1clip.bench.report import matched, page, side_by_side
from m1clip.bench.verdict import (
    NOT_MEASURED,
    CostModel,
    Point,
    cost_models,
    crossing,
    crossovers,
    fit,
    left_out_errors,
    sentences,
    split,
    summarise,
    times_faster,
    usage_table,
)
from m1clip.errors import UserError

from .made import document, result, sweep_results

TRUE = CostModel(fixed=0.01, per_parameter=1e-10, per_flop=1e-12)


def points(model: CostModel = TRUE) -> list[Point]:
    sizes = {"a": (1e7, 1e9), "b": (1e8, 3e10), "c": (2e8, 5e10)}
    return [Point(name, p, f * batch, model.seconds(p, f * batch))
            for name, (p, f) in sizes.items() for batch in (1, 4, 16, 64)]  # fmt: skip


def test_the_fit_finds_a_true_model() -> None:
    found = fit(points())
    assert found is not None
    assert found.fixed == pytest.approx(TRUE.fixed, rel=1e-6)
    assert found.per_parameter == pytest.approx(TRUE.per_parameter, rel=1e-6)
    assert found.per_flop == pytest.approx(TRUE.per_flop, rel=1e-6)


def test_no_cost_is_negative_however_odd_the_points() -> None:
    odd = [Point("a", 1e7, 1e9, 5.0), Point("a", 1e7, 1e10, 1.0), Point("b", 1e8, 1e11, 0.5)]
    found = fit(odd)
    assert found is not None
    assert min(found.fixed, found.per_parameter, found.per_flop) >= 0
    assert fit(odd[:1]) is None


def test_a_size_left_out_is_foretold() -> None:
    errors = left_out_errors(points())
    assert set(errors) == {"a", "b", "c"}
    assert max(abs(e) for values in errors.values() for e in values) < 1e-3
    assert left_out_errors([p for p in points() if p.size == "a"]) == {}


def test_where_two_models_cross() -> None:
    cpu, card = CostModel(0.0, 0.0, 1e-12), CostModel(0.02, 0.0, 1e-14)
    batch = crossing(cpu, card, parameters=1e7, flops_per_pair=2e9)
    assert batch == pytest.approx(0.02 / (2e9 * (1e-12 - 1e-14)))
    assert crossing(CostModel(0.1, 0, 1e-12), card, 1e7, 2e9) is None  # the card is faster at every batch


def test_the_crossover_is_bracketed_by_measured_batches() -> None:
    results = sweep_results()
    fits = cost_models(results)
    assert {(f["device"], f["points"]) for f in fits} == {("cpu", 15), ("cuda", 15)}
    found = {item["model"]: item for item in crossovers(results, fits)}
    assert (found["tiny"]["cpu_wins_up_to"], found["tiny"]["cpu_loses_from"]) == (4, 16)
    assert found["tiny"]["model_batch"] == pytest.approx(10, rel=0.05)
    assert found["small"]["cpu_wins_up_to"] is None  # 66 ms against 21 ms at batch 1
    assert found["small"]["cpu_loses_from"] == 1


def test_overlapping_times_are_not_called_different() -> None:
    ways = [Candidate(model="tiny", batch=8, device=d, precision="bf16", graph=d == "cuda") for d in ("cpu", "cuda")]
    results = [result(ways[0], 1.00, spread=0.2), result(ways[1], 1.02, spread=0.2)]
    item = crossovers(results, [])[0]
    assert item["cpu_wins_up_to"] is None
    assert item["cpu_loses_from"] is None
    made = document(results)
    made["crossovers"] = [item]
    assert any("cannot be told apart" in line for line in sentences(made))


def test_the_verdict_names_the_fastest_with_its_interval() -> None:
    ways = [Candidate(model="tiny", batch=8, device=d, precision="bf16", graph=d == "cuda") for d in ("cpu", "cuda")]
    made = document([result(ways[0], 4.1), result(ways[1], 0.1)])
    made["crossovers"] = []
    text = "\n".join(sentences(made))
    assert "For tiny at batch 8, cuda bf16 sdpa replayed is the fastest of 2" in text
    assert "41 times faster [40, 42] than cpu bf16 sdpa" in text
    assert "No mps here: no Apple GPU" in text
    assert times_faster(made["results"][0], made["results"][1])[0] == pytest.approx(41)


def test_wrong_gradients_lose_whatever_their_speed() -> None:
    ways = [Candidate(model="tiny", batch=8, device=d, precision="bf16", graph=d == "cuda") for d in ("cpu", "cuda")]
    made = document([result(ways[0], 4.0), result(ways[1], 0.1, gradient=0.9)])
    made["crossovers"] = []
    text = "\n".join(sentences(made))
    assert "cuda bf16 sdpa replayed computes other gradients" in text
    assert "For tiny at batch 8, cpu bf16 sdpa takes" in text
    assert not made["results"][1]["parity"]["ok"]


def test_one_change_at_a_time_is_told() -> None:
    base = {"model": "tiny", "batch": 8, "device": "cpu"}
    made = document([
        result(Candidate(**base, precision="bf16", attention="bmm"), 1.0),
        result(Candidate(**base, precision="fp32", attention="bmm"), 2.0),
        result(Candidate(**base, precision="bf16", attention="sdpa"), 1.01),
        result(Candidate(**base, precision="bf16", attention="bmm", threads=1), 1.8),
        result(Candidate(**base, precision="fp32", attention="sdpa"), 2.0),
    ])  # fmt: skip
    made["crossovers"] = []
    text = "\n".join(sentences(made))
    assert "bf16 instead of fp32 is 2.00 times faster [1.9" in text
    assert "attention by bmm instead of sdpa makes no clear difference" in text


def test_every_cell_is_measured_or_says_that_it_is_not() -> None:
    rows = usage_table(sweep_results())
    cells = {row["size"].split(",")[0]: row["cells"] for row in rows}
    assert cells["tiny"][0].startswith("cpu bf16 sdpa (tiny, batch 4")
    assert cells["tiny"][2].startswith("cuda bf16 sdpa replayed (tiny, batch 256")
    assert "times faster" in cells["small"][1]
    assert set(cells["large"]) == {NOT_MEASURED}
    assert cells["tiny"][3] == NOT_MEASURED


def test_the_time_split_adds_up() -> None:
    made = result(Candidate(model="tiny", batch=8, device="cpu", precision="fp32"), 2.0)
    assert sum(made["phases"].values()) == pytest.approx(2.0, rel=0.01)
    assert split([{"seconds": 1.0, "data": 0.1}]) == {}  # a device that cannot tell


def test_joules_are_none_without_a_meter_and_per_step_with_one() -> None:
    candidate = Candidate(model="tiny", batch=8, device="cpu", precision="fp32")
    assert result(candidate, 1.0)["joules_per_step"] is None
    opened = {"parameters": 1, "text_tokens": 8, "flops": 1.0, "threads": 1, "first_step_seconds": 1, "meter": "RAPL"}
    visit = {"samples": [{"seconds": 1.0, "data": 0.0}] * 4, "joules": 10.0, "others": None, "temperature": 50.0}
    made = summarise(candidate.to_dict(), opened, [visit, visit], None, None, None)
    assert made["joules_per_step"] == 2.5
    assert made["gemm_share"] is None


def test_a_document_is_written_and_read(tmp_path: Path) -> None:
    made = document(sweep_results())
    write_document(made, tmp_path / "comparison.json")
    assert read_document(tmp_path)["results"] == json.loads(json.dumps(made["results"]))
    assert read_document(tmp_path / "comparison.json")["crossovers"]


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "not a JSON file"), ("[]", "not a comparison"), ('{"format": "other"}', "not a comparison"),
     ('{"format": "m1clip-comparison", "version": 99}', "version 99"),
     ('{"format": "m1clip-comparison", "version": 1}', "incomplete, without facts")],
)  # fmt: skip
def test_a_bad_document_is_one_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "comparison.json"
    path.write_text(text)
    with pytest.raises(UserError, match=message):
        read_document(path)
    with pytest.raises(UserError, match="cannot be read"):
        read_document(tmp_path / "missing.json")


class Outside(HTMLParser):
    """Collects everything that a browser would fetch, and tags left open."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.asked += [f"{tag} {name}" for name, _ in attributes if name in ("src", "href", "xlink:href")]
        if tag not in ("meta", "br", "rect", "line", "circle", "polyline", "i"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag in self.open:
            while self.open.pop() != tag:
                pass


def test_the_page_asks_nothing_of_the_network_and_escapes(tmp_path: Path) -> None:
    made = document(sweep_results())
    made["facts"]["cpu"] = "<script>alert(1)</script>"
    made["left_out"] = [{"label": "1B <b>", "kind": "memory", "why": "too large & so on"}]
    write_document(made, tmp_path / "c.json")
    html = page(made, made)
    reader = Outside()
    reader.feed(html)
    assert reader.asked == []
    assert "<script" not in html
    assert "url(" not in html
    assert "@import" not in html
    assert "prefers-color-scheme: dark" in html
    assert "1B &lt;b&gt;" in html
    assert html.count("<svg") >= 4
    assert not re.search(r"\bnan\b|Infinity|None<", html)
    assert all(line.replace("&", "&amp;")[:40] in html for line in made["verdict"][:3])


def test_two_machines_side_by_side() -> None:
    ways = [Candidate(model="tiny", batch=8, device=d, precision="bf16", graph=d == "cuda") for d in ("cpu", "cuda")]
    here, there = document([result(ways[0], 1.0)]), document([result(ways[0], 2.0), result(ways[1], 0.5)])
    assert len(matched(here, there)) == 1
    html = side_by_side(here, there)
    assert "cuda bf16 sdpa" in html  # the best there
    assert "2 [1.96, 2.04]" in html
    other = document([result(Candidate(model="small", batch=8, device="cpu", precision="bf16"), 1.0)])
    assert "no model and batch in common" in side_by_side(here, other)
