"""Every benchmark runs with tiny sizes; tests of its arithmetic, parsing and tables."""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import re
import shlex
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from PIL import Image
from small_run import command, finished_run

import m1clip
from m1clip.config import read_recipe
from m1clip.data.images import FileImage
from m1clip.data.types import Sample
from m1clip.model.clip import count_parameters
from m1clip.model.presets import preset, with_fields

ROOT = Path(__file__).parents[2]
BENCHMARKS, TOOLS = ROOT / "benchmarks", ROOT / "tools"


def script(name: str) -> ModuleType:
    """Import a benchmark script with its folder on the path."""
    sys.path[:0] = [str(BENCHMARKS), str(TOOLS)]
    try:
        return importlib.import_module(name)
    finally:
        del sys.path[:2]


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A captioned folder of 40 images with train, val and test."""
    folder = tmp_path_factory.mktemp("photos")
    lines = ["image,caption,split"]
    for index in range(40):
        Image.new("RGB", (40, 40), (6 * index, 0, 0)).save(folder / f"{index}.jpg")
        lines.append(
            f"{index}.jpg,a photo of number {index},{('train', 'train', 'val', 'test')[index % 4]}"
        )
    (folder / "captions.csv").write_text("\n".join(lines), encoding="utf-8")
    return folder


SMALL = "--vision-width 32 --vision-layers 1 --text-width 32 --text-layers 1"
SMOKE = {
    "step": ("--quick", {"naive", "m1clip", "ratio", "gemm_rate", "peak_bytes"}),
    "same_work": ("--quick --jobs 76.7M --peers=", {"jobs", "machine"}),
    "cpu_matmuls": ("--rounds 1", {"figures", "rows", "machine"}),
    "large_batch": ("--quick --peers=", {"ratio", "peak_bytes"}),
    "loader": ("PHOTOS --rounds 1 --batch-size 4", {"images_per_second", "ratios"}),
    "decoding": (
        "--images 40 --rounds 1 --batch-size 8 --workers 2",
        {"images_per_second", "batches", "rows"},
    ),
    "probes": ("--rounds 1 --steps 2 --eval-every 2", {"rounds", "seconds_by_probe", "fraction"}),
    "original_run": (
        f"--flags '{SMALL} --image-size 32 --patch-size 16 --embed-dim 16 --steps 2 --workers 0"
        " --synthetic-images 24 --threads 1'",
        {"rows", "measured", "epochs", "machine", "other_programs"},
    ),
    "scale_arithmetic": ("--simulate 1e6", {"table", "order"}),
    "cuda_step": ("--device cpu --quick --models tiny --variants m1clip", {"models", "facts"}),
    "speedrun": (
        f"PHOTOS --quick --seeds 0 --entry m1clip --options '{SMALL} --batch-size 8'",
        {"runs"},
    ),
}
MINUTES_OF_CPU = ("step", "same_work", "large_batch", "loader", "speedrun")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.long] if name in MINUTES_OF_CPU else [])
        for name in SMOKE
    ],
)
def test_benchmark_script_runs_and_writes_json(name: str, photos: Path, tmp_path: Path) -> None:
    words, keys = SMOKE[name]
    out = tmp_path / f"{name}.json"
    (tmp_path / "here").mkdir()
    options = shlex.split(words.replace("PHOTOS", str(photos)))
    result = command(
        *options,
        "--json",
        str(out),
        cwd=tmp_path / "here",
        timeout=900,
        script=BENCHMARKS / f"{name}.py",
        XDG_CACHE_HOME=str(tmp_path / "cache"),
    )
    assert result.returncode == 0, result.stderr + result.stdout
    figures = json.loads(out.read_text(encoding="utf-8"))
    assert keys <= figures.keys()
    for model in figures["models"].values() if name == "cuda_step" else ():
        assert [line for line in model["lines"] if "seconds" in line]
        assert not [line for line in model["lines"] if "skipped" in line]
    table = script("results_table").render(tmp_path)
    assert (
        name in ("cuda_step", "original_run", "probes", "speedrun", "scale_arithmetic")
        or out.name in table
    )


def test_baseline_has_the_size_of_m1clips_model() -> None:
    shape = with_fields(preset("original"), vocab_size=33)
    with torch.device("meta"):
        model = script("naive").NaiveClip(shape, eot_id=2)
    assert sum(p.numel() for p in model.parameters()) == count_parameters(shape) == 76_736_001


def test_peer_scripts_do_not_import_m1clip() -> None:
    files = sorted((BENCHMARKS / "peers").glob("*.py"))
    assert {"steps.py", "open_clip_entry.py"} <= {file.name for file in files}
    for file in files:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not any(name.partition(".")[0] == "m1clip" for name in names), file.name


def taken(naive: float, own: float, default: float) -> dict[str, dict[str, float]]:
    step = {"flops": 100.0, "text_tokens": 32, "samples": 8}
    return {
        "naive": {"seconds": naive, "cpu_seconds": 2 * naive},
        "m1clip": {"seconds": own, "cpu_seconds": 2 * own, **step},
        "default": {
            "seconds": default,
            "cpu_seconds": default,
            "flops": 50.0,
            "text_tokens": 16,
            "samples": 40,
        },
    }


def test_ratios_compare_steps_of_same_round() -> None:
    # The machine was twice as slow in the second round: ratios of medians would blur, paired ones
    # do not.
    summary = script("same_work").summary([taken(3, 1, 0.5), taken(6, 2, 1)], [200.0, 100.0])
    assert summary["ratio"]["naive"] == {"median": 3.0, "low": 3.0, "high": 3.0, "n": 2}
    assert summary["gemm_fraction"]["median"] == pytest.approx(
        0.5
    )  # 100 / 1 / 200 and 100 / 2 / 100
    assert summary["limit_seconds"]["median"] == pytest.approx(0.75)
    assert summary["tokens"] == {"m1clip": 32, "default": 16}
    assert summary["samples"] == {"m1clip": 8, "default": 40}


def test_speedrun_entry_reads_the_log_of_m1clip() -> None:
    entry = script("entry_m1clip")
    recalls, better = (
        {"text_to_image/recall@10": value, "image_to_text/recall@10": value + 0.1}
        for value in (0.1, 0.3)
    )
    records = [
        {"kind": "start", "time": 1010.0, "steps": 20},
        {
            "kind": "step",
            "time": 1020.0,
            "step": 10,
            "images_per_second": 100.0,
            "step_seconds": 0.64,
        },
        {"kind": "eval", "time": 1021.0, "step": 10, "split": "val", **recalls},
        {
            "kind": "step",
            "time": 1030.0,
            "step": 20,
            "images_per_second": 120.0,
            "step_seconds": 64 / 120,
        },
        {"kind": "eval", "time": 1031.0, "step": 20, "split": "val", **better},
    ]
    summary = entry.summary(records, begin=1000.0)
    assert summary["images_seen"] == 20 * 64
    assert summary["images_per_second"] == 110.0
    assert summary["curve"] == [[21.0, pytest.approx(0.15)], [31.0, pytest.approx(0.35)]]
    with pytest.raises(SystemExit, match="no evaluation"):
        entry.summary(records[:2], begin=1000.0)


@pytest.mark.parametrize("module", ["", "open_clip_train.train | "])  # 3.3 and 4.2
def test_open_clip_log_line_is_parsed(module: str) -> None:
    line = (
        f"2026-11-15,11:43:31 | INFO | {module}Train Epoch: 0 [  256/2048 (12%)] Data (t): 2.239 Batch (t): 33.714, "
        "7.59339/s, 7.59339/s/gpu LR: 0.001000 Logit Scale: 14.286 Contrastive_loss: 5.6385 (5.6385)"
    )
    assert script("peers.open_clip_entry").LINE.findall(line) == [("2026-11-15,11:43:31", "256")]


def test_open_clip_entry_uses_the_last_batch_size() -> None:
    batch_size = script("peers.open_clip_entry").batch_size
    assert (
        batch_size({"options": ["--batch-size", "64", "--lr", "1", "--batch-size", "128"]}) == 128
    )
    assert batch_size({"options": ["--lr", "1"]}) == 256


def test_speedrun_hides_the_test_split_from_training(photos: Path, tmp_path: Path) -> None:
    speedrun = script("speedrun")
    (tmp_path / "again").mkdir()
    assert speedrun.write_splits(str(photos), tmp_path) == speedrun.write_splits(
        str(photos), tmp_path / "again"
    )
    rows = [
        json.loads(line)
        for line in (tmp_path / "data.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    assert len(rows) == 30
    assert {row["split"] for row in rows} == {"train", "val"}
    assert len((tmp_path / "test.jsonl").read_text(encoding="utf-8").splitlines()) == 10


def test_speedrun_ranks_entries_and_shows_runs_over_the_clock_last() -> None:
    speedrun = script("speedrun")

    def run(
        entry: str, seed: int, recall: float, seconds: float = 590.0, cpu: str = "a CPU"
    ) -> dict[str, object]:
        where = {"cpu": cpu, "cores": 2, "commit": "abc"}
        scores = {split: dict.fromkeys(speedrun.RECALLS, recall) for split in ("val", "test")}
        facts = {
            "entry": entry,
            "track": "cpu",
            "seed": seed,
            "clock": 600,
            "seconds": seconds,
            "machine": where,
        }
        made = {
            "images_seen": 1000,
            "captions_per_image": 1,
            "curve": [[60.0, 0.01], [90.0, recall]],
        }
        source = {
            "version": "1",
            "source_hash": "h",
            "date": "d",
            "data": "photos",
            "data_hash": "x",
        }
        return {**facts, **made, **source, **scores}

    runs = [
        run("slow", 0, 0.5, 601.0),
        run("open_clip-muon", 0, 0.1),
        run("m1clip", 0, 0.2),
        run("m1clip", 1, 0.4),
    ]
    lines = [line for line in speedrun.table(runs).splitlines() if "`" in line]
    assert lines[0].startswith(
        "| 1 | `m1clip` | **30.0 ± 14.1** | 30.0 | 9.83 ± 0.00 | 1,000 | 0, 1 | a CPU, 2 cores |"
    )
    assert lines[1].startswith("| 2 | `open_clip-muon` | **10.0** |")
    assert "(10.0) after 1.5 ± 0.0 minutes." in lines[3]
    assert lines[2].startswith("| - | `slow` | **50.0** | 50.0 | 10.02 (over the clock) |")
    runs += [
        run("m1clip", 0, 0.6, cpu="fast, without a peer"),
        run("open_clip-muon", 0, 0.3, cpu="another"),
    ]
    assert "(10.0) after 1.5 ± 0.0 minutes." in speedrun.table(runs), "both on the same processor"


def test_speedrun_page_shows_the_stored_runs() -> None:
    speedrun = script("speedrun")
    runs = json.loads(speedrun.LOG.read_text(encoding="utf-8"))["runs"]
    assert speedrun.MARKS[0] + speedrun.table(runs) + speedrun.MARKS[1] in speedrun.PAGE.read_text(
        encoding="utf-8"
    )


def test_frozen_trains_on_drawn_images_and_shows_test_only_when_asked(
    photos: Path, tmp_path: Path
) -> None:
    frozen = script("frozen")
    script("speedrun").write_splits(str(photos), tmp_path)

    def chosen(images: int | None, seed: int, test: bool) -> list[tuple[str, str]]:
        path = frozen.choose(tmp_path, tmp_path / "table.jsonl", images, seed, test)
        table = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        return [(row["split"], row["image"]) for row in table]

    counts = [
        Counter(split for split, _ in chosen(*which)) for which in ((5, 0, False), (None, 0, True))
    ]
    assert counts == [{"train": 5, "val": 10}, {"train": 20, "val": 10, "test": 10}]
    assert chosen(5, 0, False) == chosen(5, 0, False) != chosen(5, 1, False)


def test_frozen_rows_join_seeds_of_a_split() -> None:
    frozen = script("frozen")
    facts = {"row": "both", "split": "val", "machine": {"data": "photos"}}
    runs = [
        {
            **facts,
            **dict.fromkeys(frozen.RECALLS, recall),
            "seconds": 100 * recall,
            "empty_cache": recall == 0.6,
        }
        for recall in (0.6, 0.8)
    ]
    (row,) = frozen.rows(runs)
    assert (
        row["figure"]
        == "**70.0 ± 14.1%**, mean of six recalls 70.0 ± 14.1; 1:00 from an empty cache"
    )
    assert (row["n"], row["command"]) == ("2 seeds", "python benchmarks/frozen.py DATA --rows both")


def test_class_of_an_image_is_the_only_word_in_its_captions() -> None:
    zeroshot = script("zeroshot")
    captions = ["A dog .", "A dog in the snow", "A dogged man", "Dog, on a chair"]
    labelled, labels = zeroshot.labeled(
        [Sample(FileImage(f"{i}.jpg"), (text,), str(i)) for i, text in enumerate(captions)]
    )
    assert [sample.id for sample in labelled] == ["0", "3"]
    assert labels.tolist() == [zeroshot.WORDS.index("dog")] * 2
    accuracy = zeroshot.accuracy(torch.eye(2)[[0, 0, 0, 1]], torch.tensor([0, 0, 1, 1]))
    assert (accuracy["top1"], accuracy["per_class"], accuracy["n"]) == (0.75, 0.75, 4)
    assert (
        zeroshot.accuracy(torch.eye(2)[[0, 0, 0, 0]], torch.tensor([0, 0, 0, 1]))["per_class"]
        == 0.5
    )


def test_stored_results_make_a_table() -> None:
    text = script("results_table").render(script("sides").RESULTS)
    assert "|  |" not in text, "a row without a title"
    for result in ("step", "same_work", "speedrun", "loader", "large_batch", "memory", "cuda_step"):
        assert f"{result}.json)" in text
    assert "on a GPU: fraction of the bf16 GEMM rate" in text
    assert re.search(r"peak memory of `m1clip train --preset prior-art.*GB \(maximum\)", text)


def test_encode_prints_each_figure_beside_its_peer(tmp_path: Path) -> None:
    encode = script("encode")
    rate = {"median": 100.0, "low": 90.0, "high": 110.0, "n": 5}
    change = {"before": 0.5, "after": 0.499, "change": -0.001, "low": -0.004, "high": 0.002}
    result = {
        "per_second": {
            **{f"m1clip {name}: {own}": rate for name, own, *_ in encode.FIGURES},
            **{
                f"onnxruntime {name}: {theirs}": rate
                for name, _, theirs, *_ in encode.FIGURES
                if theirs
            },
        },
        "ratios": {
            f"onnxruntime {name}: {theirs}": {**rate, "median": 1.25}
            for name, _, theirs, *_ in encode.FIGURES
            if theirs
        },
        "evaluation_seconds": {"": rate},
        "peak_bytes": 600_000_000,
        "recall": {"images": 1000, "captions": 5000, "recall@1": change},
    }
    rows = encode.rows(result)
    assert len(rows) == len(encode.FIGURES) + 3
    assert all(row["figure"].startswith("**1.25 [") for row in rows if "times" in row["goal"])
    assert [row["figure"] for row in rows[-2:]] == ["600 MB", "recall@1 -0.10 [-0.40, +0.20]"]
    alone = encode.rows({**result, "ratios": {}})  # without onnxruntime
    assert [row["figure"] for row in alone[:2]] == ["100 [90, 110]"] * 2
    assert "onnxruntime" not in "".join(row["figure"] + row["what"] for row in alone)
    model = m1clip.load(encode.tiny_folder(tmp_path))
    Image.new("RGB", (20, 30)).save(tmp_path / "a.png")
    images, texts = [str(tmp_path / "a.png")] * 3, ["a", "a red ball"]
    jobs = encode.own_jobs(model, images, texts)
    assert {name: len(job()) for name, job in jobs.items()} == {
        "images": 3,
        "texts": 2,
        "image": 3,
        "text": 2,
    }
    assert [len(batch) for batch in encode.decoded_ahead(model, images)] == [3]


def test_more_time_never_gives_a_worse_model_by_the_rule() -> None:
    plot = script("plot_time")
    runs = json.loads((ROOT / "docs/results/recipe_budget.json").read_text(encoding="utf-8"))
    lines = plot.points(runs["runs"])
    means = [sum(values) / len(values) for _, values in lines["rule"]]
    assert [minutes for minutes, _ in lines["rule"]] == [2, 5, 10, 30, 60]
    assert means == sorted(means)
    assert lines["none"][-1][1][0] < means[-1], "an hour without the rule is worse"
    assert means[-1] - means[-2] > 2, "an hour is for two models"


def test_more_time_is_not_worse_on_images_the_rule_was_not_fitted_on() -> None:
    runs = json.loads((ROOT / "docs/results/recipe_coco.json").read_text(encoding="utf-8"))["runs"]
    for images in (0, 3000, 1500):
        by_minutes: dict[int, list[float]] = {}
        for run in runs:
            if run["images"] == images:
                by_minutes.setdefault(run["minutes"], []).append(run["validation"][-1][1])
        means = [sum(values) / len(values) for _, values in sorted(by_minutes.items())]
        assert len(means) >= 3
        assert means == sorted(means)


def test_more_time_table_has_what_the_rule_chooses_for_parts_of_the_data(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    study = script("more_time")
    path = str(ROOT / "docs/results/more_time.json")
    monkeypatch.setattr(sys, "argv", ["more_time.py", "--json", path, "--table"])
    study.main()
    printed = capsys.readouterr().out.splitlines()
    recipe = (ROOT / "docs/recipe.md").read_text(encoding="utf-8")
    rows = [line for line in printed if line.startswith("| ") and "steps" not in line]
    assert len(rows) > 20
    for row in rows:
        assert row.replace(" | ", "|") in recipe.replace("**", "").replace(" | ", "|"), row
    assert [line for line in printed if line.startswith("test, 6,000 images, 60 minutes")]


def test_more_time_records_the_score_of_the_test_split(tmp_path: Path) -> None:
    study = script("more_time")
    run = finished_run({"model.members": 2, "data.cutmix": 0.5, "data.word_dropout": 0.1})
    found = study.record(study.Job(60, members=2), run, 1.0)
    assert 0 <= found["test"] <= 100
    assert found["steps"] == study.STEPS_BY_MINUTES[60] // 2


def test_recipe_study_trains_with_mixed_images() -> None:
    study = script("recipe_study")
    torch.manual_seed(0)
    size, captions = study.IMAGE_SIZE, study.CAPTIONS
    tokens = torch.randint(1, 90, (8, captions, study.CONTEXT), dtype=torch.int32)
    tokens[:, :, 9] = 99  # EOT
    split = {
        "pixels": torch.randint(0, 255, (8, size, size, 3), dtype=torch.uint8),
        "larger": torch.randint(0, 255, (8, study.LARGER, study.LARGER, 3), dtype=torch.uint8),
        "tokens": tokens,
    }
    data = {"vocab": 100, "train": split, "val": split}
    job = study.Job("mixed", steps=1, batch=4, cutmix=1.0, evaluations=1)
    trainer = study.Trainer(job, data, "cpu", Path())
    x = torch.ones(4, 3, size, size) * torch.arange(4.0)[:, None, None, None]
    target = trainer._targets(4, torch.arange(4).repeat_interleave(captions))
    mixed = trainer._mix(x, target.clone())
    part = (x[1] != 1).float().mean()
    assert 0 < part <= study.Job("", 1).paste_area
    assert mixed[1, 0] == pytest.approx(float(part), abs=1e-5), "the box is of image 0"
    assert mixed[1, captions] == pytest.approx(1 - float(part), abs=1e-5)
    record = trainer.train()
    assert len(record["curve"]) == 1


def test_fine_tuning_study_trains_each_setting_for_the_same_work() -> None:
    study = script("finetune_study")
    base = study.Job("default", "default", "frozen")
    assert base.steps == 158
    for changes in study.STAGES.values():
        for change in changes:
            job = base.changed("stage", change)
            batch = job.options.get("batch_size", study.BATCH)
            work = job.steps * batch * job.work
            assert work == pytest.approx(study.IMAGES, rel=0.5 / job.steps), change.name


def test_defaults_of_fine_tuning_are_what_the_study_chose() -> None:
    recipe = read_recipe("finetune")
    stored = json.loads((ROOT / "docs/results/finetune_study.json").read_text(encoding="utf-8"))
    chosen = stored["best"]["options"]
    assert chosen == {"batch_size": recipe.batch_size, "lr": recipe.settings["optim"]["lr"]}
    best, default = (
        [run for run in stored["runs"] if run["stage"] == "confirm" and run["name"] == name]
        for name in ("best", "default")
    )
    view = "last, mirror"
    gains = [
        one["val"][view][0] - other["val"][view][0]
        for one in best
        for other in default
        if one["seed"] == other["seed"]
    ]
    assert len(gains) == 3
    assert min(gains) > 1


def test_fine_tuning_study_searches_from_the_best_settings_so_far() -> None:
    study = script("finetune_study")
    starts = {"frozen": ["a"], "general": ["b"]}
    options = argparse.Namespace(starts=starts, processes=2, seconds=100.0, search_part=0.7)
    tried = []

    class FakeStudy:
        seconds = 0.0

        def run(self, jobs: list[Any], until: float) -> list[Any]:
            tried.extend(jobs)
            good = {"lr 3e-4", "CutMix 0.3"}
            return [
                (
                    job,
                    {"val": {"last, mirror": [70.0 + (job.name in good) + bool(job.options)] * 2}},
                )
                for job in jobs
            ]

    best = study.search(FakeStudy(), options)
    assert best.options == {"lr": 3e-4}, "the first of equal settings"
    later = [job for job in tried if job.stage not in ("default", "learning rate")]
    assert all(job.options["lr"] == 3e-4 for job in later)
    assert "tuned" not in {job.start for job in tried}, "no such start"


def test_table_of_few_images_has_each_way_and_draw() -> None:
    few_images = script("few_images")
    runs = [
        {"images": 50, "draw": draw, "way": way, "validation": [[0, 17.0 + draw], [8, end]]}
        for draw in (0, 1)
        for way, end in (("lr 1e-4", 16.0), ("rule", 18.0))
    ]
    *_, row = few_images.table(runs).splitlines()
    assert row == "| 50 | 17.5 (17.0, 18.0) | 16.0 (16.0, 16.0) | 18.0 (18.0, 18.0) | 2 |"


def test_page_shows_the_stored_runs_of_few_images() -> None:
    stored = json.loads((ROOT / "docs/results/few_images.json").read_text(encoding="utf-8"))
    page = (ROOT / "docs/how-many-images.md").read_text(encoding="utf-8")
    assert script("few_images").table(stored["runs"]) in page
