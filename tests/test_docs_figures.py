"""Figures in docs/ that follow from docs/results/*.json: a page that is not updated with its result fails here."""

import json
import statistics
from pathlib import Path
from typing import Any

import pytest

import m1clip

DOCS = Path(m1clip.__file__).parent.parent / "docs"
pytestmark = pytest.mark.skipif(not DOCS.exists(), reason="not run from the repository")


def page(name: str) -> str:
    return (DOCS / name).read_text(encoding="utf-8")


def sentences(name: str) -> str:
    """A page as one line: where a sentence is broken does not matter."""
    return " ".join(page(name).split())


def result(name: str) -> Any:
    return json.loads((DOCS / "results" / name).read_text(encoding="utf-8"))


def test_loading_images() -> None:
    speed = result("loader.json")["images_per_second"]
    loaded = speed["cached, float batch"]["median"]
    trained = speed["tiny training step"]["median"]
    text = (
        f"one process prepares {loaded:,.0f} images/s, and training `tiny` needs about"
        f" {trained:.0f} "
    )
    assert text in sentences("findings.md")
    assert f"cached images are loaded {loaded / trained:.1f} times" in sentences("dos-and-donts.md")


@pytest.mark.parametrize("name", ["how-many-images.md", "lab-general.md"])
def test_heads_by_number_of_images(name: str) -> None:
    heads = {"own-300": "300 of your own", "own-3000": "3,000 of your own", "general": "general"}
    rows = [line for line in page(name).splitlines() if line.startswith("| ")]
    for key, label in heads.items():
        values = result("general.json")["results"][key]
        classes = values["classes"]
        row = next(row for row in rows if label in row and f"[{classes['low']:.1f}, " in row)
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        for column, data in ((1, "flickr8k-112"), (2, "coco")):
            assert float(cells[column]) == pytest.approx(values[data]["recall@10"], abs=0.06)
        assert cells[3].startswith(f"{classes['accuracy']:.1f} [")


def test_readme_has_the_recall_of_the_model_in_the_box() -> None:
    recall = result("general.json")["results"]["general"]["flickr8k-112"]["recall@10"]
    row = f"| the model in the box, no training | {recall:.1f} |"
    assert row in (DOCS.parent / "README.md").read_text(encoding="utf-8")


def test_adapting_to_new_images() -> None:
    text = page("how-many-images.md")
    runs = result("adapt_heads.json")["runs"]
    for adapted in (run for run in runs if run["recipe"] == "heads" and run["seed"] == 0):
        images = adapted["images"]
        of = {"recipe": "new", "images": images, "seed": 0}
        new = next(run for run in runs if {key: run[key] for key in of} == of)
        values = [adapted["new_before"], adapted["new_after"], new["new_after"]]
        general = [adapted["general_before"], adapted["general_after"]]
        cells = " | ".join(f"{100 * value:.1f}" for value in values)
        others = ", ".join(f"{100 * value:.1f}" for value in general)
        assert f"| {images:,} | {cells} | {others} |" in text


def test_adapting_a_small_clip() -> None:
    labels = {
        "heads": "heads",
        "lora": "LoRA of rank 8",
        "last": "the last block of both towers",
        "all": "all blocks",
    }
    by_row: dict[tuple[int, str], list[dict[str, float]]] = {}
    for run in result("adapt_towers.json")["runs"]:
        by_row.setdefault((run["images"], run["recipe"]), []).append(run)
    text = page("lab-finetune.md")
    for (images, recipe), runs in by_row.items():
        cells = []
        for role in ("new", "general"):
            after = statistics.fmean(100 * run[f"{role}_after"] for run in runs)
            change = after - statistics.fmean(100 * run[f"{role}_before"] for run in runs)
            cells.append(f"{after:.1f}, {change:+.1f}")
        row = f"| {images:,} | {labels[recipe]} | "
        line = next(line for line in text.splitlines() if line.startswith(row))
        assert [
            cell.split(" (")[0] for cell in line.removeprefix(row).rstrip(" |").split(" | ")
        ] == cells


def test_fine_tuning_on_the_test_split() -> None:
    study = result("finetune_study.json")
    figure = study["rows"][0]["figure"]
    mean = figure.removeprefix("**").split("%")[0]  # 78.0 [77.7, 78.3]
    for name in ("finetune.md", "how-many-images.md", "lab-finetune.md"):
        assert mean in page(name), name
    assert f"{mean.split()[0]} instead of" in page("dos-and-donts.md")
    tested = [run["test"] for run in study["runs"] if run["name"] == "best"]
    recalls = [scores["last, mirror"][0] for scores in tested]
    assert mean.startswith(f"{statistics.fmean(recalls):.1f} ")


def test_speedrun_on_two_cores() -> None:
    runs = [run for run in result("speedrun.json")["runs"] if "test" in run]
    newest = [run for run in runs if run["source_hash"] == runs[-1]["source_hash"]]
    names = ("text_to_image/recall@10", "image_to_text/recall@10")
    recalls = [50 * sum(run["test"][name] for name in names) for run in newest]
    shown = f"{statistics.fmean(recalls):.1f} ± {statistics.stdev(recalls):.1f}"
    for name in ("../README.md", "recipe.md", "open-clip.md", "how-many-images.md"):
        assert shown in sentences(name), name


def test_open_clip_at_each_budget() -> None:
    runs = [run for run in result("open_clip_budget.json")["runs"] if run["minutes"] < 60]
    settings = ("lr", "batch", "crop_min")
    text = sentences("recipe.md")
    for minutes in sorted({run["minutes"] for run in runs}):
        trials: dict[tuple[float, ...], list[float]] = {}
        for run in (run for run in runs if run["minutes"] == minutes):
            trials.setdefault(tuple(run[name] for name in settings), []).append(run["validation"])
        assert len(trials) == 4
        best = max(trials.values(), key=len)
        assert f"{statistics.fmean(best):.1f} after {minutes}" in text


def test_step_of_open_clip() -> None:
    text = sentences("open-clip.md")
    for name, keys in {
        "same_work.json": ("open_clip", "open_clip_pure"),
        "same_work_fp32.json": ("open_clip",),
    }.items():
        ratios = result(name)["jobs"]["76.7M"]["ratio"]
        for key in keys:
            ratio = ratios[key]
            low, high = f"{ratio['low']:.2f}", f"{ratio['high']:.2f}"
            times = f"{ratio['median']:.2f} times, "
            assert f"{times}{low} to {high}" in text or f"{times}interval {low} to {high}" in text


def test_devices_of_the_h200_machine() -> None:
    fastest: dict[tuple[str, int, str], float] = {}
    for row in result("h200/comparison.json")["results"]:
        candidate = row["candidate"]
        key = (candidate["model"], candidate["batch"], candidate["device"])
        fastest[key] = min(fastest.get(key, 1e9), 1e3 * row["seconds"]["median"])
    rows = [
        line.strip("|").split("|")
        for line in page("lab-compare.md").splitlines()
        if " ms |" in line
    ]
    checked = 0
    for cells in rows:
        model, _, batch = cells[0].strip().partition(", ")
        key = (model.split(" ")[0], int(batch)) if batch.isdigit() else ("", 0)
        for device, cell in (("cpu", cells[1]), ("cuda", cells[2])):
            if (*key, device) in fastest and cell.strip() != "-":
                shown = float(cell.split()[0])
                assert shown == pytest.approx(fastest[*key, device], rel=0.005, abs=0.06)
                checked += 1
    assert checked > 15


def test_shared_machines() -> None:
    text = page("machines.md")
    for path in (DOCS / "results" / "machines").glob("*.json"):
        results = json.loads(path.read_text(encoding="utf-8"))["results"]
        best = max(results, key=lambda row: float(row["images_per_second"]))
        model, batch, configuration = best["configuration"].split(", ")
        batch = batch.removeprefix("batch ")
        cells = f"{model}, {batch} | {configuration} | {best['images_per_second']:.0f} |"
        assert cells in text, path.name
