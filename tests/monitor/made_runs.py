"""Run folders with known values, written without training."""

import json
from pathlib import Path
from typing import Any

from PIL import Image

from m1clip.analyses import ANALYSES

BEGIN = 1_700_000_000.0


def line(kind: str, **values: Any) -> dict[str, Any]:
    return {"v": 1, "kind": kind, "time": BEGIN, **values}


def step(number: int, **values: Any) -> dict[str, Any]:
    """A step record whose values depend on its number."""
    usual: dict[str, Any] = {
        **{
            "time": BEGIN + 0.5 * number,
            "loss": 4.0 / (1 + number / 50),
            "grad_norm": 1.0,
            "lr": 5e-4,
        },
        **{
            "temperature": 0.07,
            "images_per_second": 256.0,
            "step_seconds": 0.5,
            "data_fraction": 0.01,
        },
        "seconds": {
            "data": 0.005,
            "copy": 0.005,
            "forward": 0.2,
            "backward": 0.25,
            "optimizer": 0.03,
            "rest": 0.01,
        },
        **{
            "memory_bytes": 1_000_000_000,
            "cores": [90, 40],
            "batch_accuracy": 0.5,
            "batch_chance": 1 / 12,
            "epoch": number / 10,
            "elapsed": 0.5 * number,
        },
    }
    return line("step", step=number, **{**usual, **values})


def rate(value: float, n: int, chance: float = 0.5) -> dict[str, Any]:
    """A rate with an interval of five points to either side."""
    low = max(0.0, value - 0.05)
    return {"value": value, "low": low, "high": min(1.0, value + 0.05), "chance": chance, "n": n}


def evaluation(
    number: int, recall: float, low: float | None = None, **values: Any
) -> dict[str, Any]:
    """An evaluation with an interval of five points to either side."""
    low = max(0.0, recall - 0.05) if low is None else low
    parts = {"": recall, "/low": low, "/high": min(1.0, recall + 0.05), "/chance": 0.01, "/n": 500}
    names = ("mean_recall", "text_to_image/recall@1", "image_to_text/recall@1")
    figures = {name + part: value for name in names for part, value in parts.items()}
    analysis = {
        **{
            "alignment": 1.0 - recall / 2,
            "uniformity_image": -2.0,
            "uniformity_text": -2.1,
            "modality_gap": 0.5,
        },
        "difficulty": {"easy": rate(0.99, 100), "medium": rate(0.9, 80), "hard": rate(0.6, 20)},
        "held_out_batch_accuracy": {"val": rate(recall / 2, 24, chance=1 / 12)},
        "category_recall": {"animals": rate(recall, 250, chance=0.01), "food": rate(0.2, 250)},
    }
    usual = {"time": BEGIN + 0.5 * number, "split": "val", "seconds": 2.0, "analysis": analysis}
    return line("eval", step=number, **{**usual, **figures, **values})


LAYERS = ("image/input", "image/block 1", "image/block 2", "image/head", "text/block 1", "scale")


def analysis(number: int, norm: float = 0.1, **layers: Any) -> dict[str, Any]:
    """The analyses of a step by layer: a value that depends on its number, except those given."""
    values = dict.fromkeys(LAYERS, norm / (1 + number / 50)) | layers
    heat_maps = [entry.name for entry in ANALYSES.values() if entry.shown_as == "heat map"]
    return line("analysis", step=number, **dict.fromkeys(heat_maps, values))


def ended(number: int, recall: float) -> dict[str, Any]:
    """The last line of a finished run."""
    record = evaluation(number, recall)
    scores = {key: value for key, value in record.items() if key not in ("analysis", "kind")}
    return {
        **scores,
        "kind": "end",
        "split": "test",
        "peak_bytes": 2_000_000_000,
        "best_step": number,
    }


def make_run(
    folder: Path, records: list[dict[str, Any]], config: str = "", steps: int = 100
) -> Path:
    """A run folder with these records after its start."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.toml").write_text(
        config or 'seed = 0\n[train]\neval_every = 50\ndevice = "cpu"\n'
    )
    environment = {
        "command": ["m1clip", "train"],
        "data": "0" * 64,
        "facts": {"memory_bytes": 8_000_000_000, "cpu": "Test"},
    }
    (folder / "environment.json").write_text(json.dumps(environment))
    append(folder, [line("start", step=0, steps=steps), *records])
    return folder


def append(folder: Path, records: list[dict[str, Any]]) -> None:
    """More lines, as a training process writes them."""
    with (folder / "run.jsonl").open("ab") as file:
        for record in records:
            file.write(json.dumps(record, separators=(",", ":")).encode() + b"\n")


def full_run(folder: Path, recall: float = 0.4, finished: bool = True) -> Path:
    """A hundred steps, four evaluations, memory, examples with thumbnails."""
    records = [
        line(
            "memory",
            **{"weights": 10_000_000, "gradients": 10_000_000, "activations": 5_000_000},
            **{"rest": 5_000_000, "peak": 30_000_000},
        ),
        line(
            "sensors",
            core_kinds=["performance", "efficiency"],
            not_measured={"temperature": "no sensor here", "energy": "no meter here"},
        ),
    ]
    for number in range(2, 102, 2):
        records.append(step(number))
        if number % 25 == 0:
            records.append(analysis(number))
            records.append(evaluation(number, recall * number / 100))
            records.append(
                line("checkpoint", step=number, time=BEGIN + number, path=f"step-{number:06d}")
            )
    if finished:
        records.append(ended(100, recall))
    run = make_run(folder, records)
    for number in (50, 100):
        write_example(run, number)
    Image.new("RGB", (40, 40), (200, 60, 60)).save(run / "retrieval.png")
    return run


def write_example(run: Path, number: int) -> None:
    """A snapshot of an evaluation; one caption contains a script tag."""
    folder = run / "snapshots"
    (folder / "thumbnails").mkdir(parents=True, exist_ok=True)
    for image in range(4):
        Image.new("RGB", (24, 24), (60 * image, 90, 120)).save(
            folder / "thumbnails" / f"{image}.jpg"
        )
    query = {"caption": "<script>alert(1)</script> a red cat", "right": 1, "rank": 2}
    content = {
        **{"step": number, "split": "val", "images": 4},
        "queries": [
            {
                **query,
                "found": [0, 1, 2],
                "correct": [False, True, False],
                "scores": [0.9, 0.8, 0.1],
            }
        ],
        "matrix": {"images": [0, 1], "captions": ["a", "b"], "values": [[0.9, 0.1], [0.2, 0.8]]},
        "confusions": [
            {"caption": "a red cat", "found": 0, "right": 1, "margin": 0.1, "truth": "a blue dog"}
        ],
    }
    (folder / f"step-{number:08d}.json").write_text(json.dumps(content))
