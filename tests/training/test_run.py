"""A complete training run: its files, refused settings, duration, and that it learns."""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import small_run
import torch
from safetensors.torch import load_file
from small_run import (
    exit_code,
    finished_run,
    losses_of,
    run_small,
    small_arguments,
    small_config,
    small_options,
    tensors_of,
)

import m1clip
from m1clip import console
from m1clip.data.prepare import open_data
from m1clip.errors import UserError
from m1clip.inference import load
from m1clip.losses.registry import DEFAULT_LOSS, LOSSES
from m1clip.runlog import read_log
from m1clip.training import run as run_module
from m1clip.training.run import train_config
from m1clip.training.spec import read_spec
from m1clip.training.training_data import check_training_data


@pytest.fixture(scope="module")
def run() -> Path:
    """A finished small run with evaluations."""
    return finished_run({"train.eval_every": 5})


def test_plan_of_data_is_the_run_that_train_makes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`plan` prints and saves every decision and trains nothing; `train --config` makes that run."""
    monkeypatch.chdir(tmp_path)
    words = small_arguments({"train.steps": 2})
    assert exit_code("plan", "synthetic", *words, "--save", "plan.toml") == 0
    assert [path.name for path in tmp_path.iterdir()] == ["plan.toml"], "no run folder"
    printed = capsys.readouterr().out
    assert re.search(r"--batch-size +16 +user\n", printed)
    assert re.search(r"--fsdp +off +rule\n", printed)
    spec = m1clip.plan("synthetic", **small_options({"train.steps": 2}))
    assert spec.to_toml() == Path("plan.toml").read_text()
    run = m1clip.train(config="plan.toml", out="run")
    assert read_spec(run.path).config == spec.config


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["synthetic", "--images", "5"], "--images is for a plan without data"),
        (["--lr", "1e-3"], "--lr needs the data of the run: m1clip plan photos --lr ..."),
        (["--minutes", "5"], "name them: m1clip plan photos --minutes 10"),
        (["--save", "plan.toml"], "--save writes the run on some data; name it"),
        (["missing"], "missing: no such file or folder"),
    ],
)
def test_plan_says_what_needs_data(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code("plan", *words) == 2
    assert message in capsys.readouterr().err


def test_files_of_a_run_folder(run: Path) -> None:
    names = {path.name for path in run.iterdir()}
    assert names >= {
        "config.toml",
        "environment.json",
        "run.jsonl",
        "checkpoints",
        "model",
        "best",
        "retrieval.png",
    }
    assert not list(run.rglob("*.partial"))
    environment = json.loads((run / "environment.json").read_text())
    assert environment["m1clip"] == m1clip.__version__
    assert environment["facts"]["torch"] == torch.__version__
    assert (run / "retrieval.png").read_bytes().startswith(b"\x89PNG")


def test_run_log(run: Path) -> None:
    log = list(read_log(run))
    assert [line["kind"] for line in log][:1] == ["start"]
    assert log[-1]["kind"] == "end"
    assert [line["step"] for line in log if line["kind"] == "step"] == list(range(1, 11))
    assert [line["step"] for line in log if line["kind"] == "eval"] == [5, 10]
    assert [line["step"] for line in log if line["kind"] == "checkpoint"] == [5, 10]
    for line in log:
        if line["kind"] == "step":
            assert all(
                math.isfinite(line[name])
                for name in ("loss", "grad_norm", "lr", "muon_lr", "temperature")
            )
            assert line["epoch"] == pytest.approx(line["step"] / 4)
            assert line["images_per_second"] > 0
    assert {line["split"] for line in log if line["kind"] == "eval"} == {"val"}
    assert log[-1]["split"] == "test"


def of(run: Path, kind: str) -> list[dict[str, Any]]:
    return [record for record in read_log(run) if record["kind"] == kind]


def test_time_split_adds_up_to_the_time_of_a_step(run: Path) -> None:
    for record in of(run, "step"):
        assert set(record["seconds"]) >= {"data", "forward", "backward", "optimizer", "rest"}
        assert sum(record["seconds"].values()) == pytest.approx(record["step_seconds"], rel=0.02)
        assert all(0 <= use <= 100 for use in record["cores"])
        assert record["elapsed"] > 0
        assert ("joules" in record) == ("watts" in record)


def test_memory_and_analysis_are_logged(run: Path) -> None:
    memory, at_the_end = of(run, "memory")
    assert at_the_end["peak"] >= memory["peak"]
    assert memory["weights"] >= memory["gradients"] > 100_000  # buffers have no gradient
    assert memory["peak"] > memory["optimizer"] > 0
    for record in of(run, "eval"):
        assert {"alignment", "modality_gap", "difficulty"} <= record["analysis"].keys()
        assert record["seconds"] > 0


def test_snapshots_contain_retrieval_examples(run: Path) -> None:
    folder = run / "snapshots"
    names = sorted(path.name for path in folder.glob("*.json"))
    assert names == ["step-00000005.json", "step-00000010.json"]
    content = json.loads((folder / names[-1]).read_text())
    assert len(content["matrix"]["values"]) == 8
    shown = set(content["matrix"]["images"]).union(
        *(query["found"] for query in content["queries"])
    )
    assert all((folder / "thumbnails" / f"{image}.jpg").is_file() for image in shown)
    for query in content["queries"]:
        assert (query["rank"] == 1) == (query["found"][0] == query["right"])


def test_best_model_is_chosen_on_validation(run: Path) -> None:
    evaluations = {
        line["step"]: line["mean_recall"] for line in read_log(run) if line["kind"] == "eval"
    }
    # The first, where two are equal.
    best_step = max(evaluations, key=lambda step: evaluations[step])
    end = list(read_log(run))[-1]
    assert end["best_step"] == best_step
    weights = load_file(run / "best" / "model.safetensors")
    best_tensors = {
        key.removeprefix("weights:"): t
        for key, t in tensors_of(run, best_step).items()
        if key.startswith("weights:")
    }
    assert weights.keys() == best_tensors.keys()
    assert all(torch.equal(weights[name], best_tensors[name]) for name in weights)


REFUSALS: list[tuple[dict[str, Any], str]] = [
    (
        {"train.batch_size": 73},
        "72 training images do not fill one batch of 73: lower --batch-size to 36",
    ),
    ({"optim.warmup": 2000.0}, "warmup of 2,000 steps would never end: the run has 10 steps"),
    ({"train.steps": None, "train.epochs": 0.01}, "--epochs 0.01 is less than one step"),
    ({"train.device": "mps"}, "--device mps: not available on this machine"),
    ({"data.source": ["/nowhere/at/all"]}, "/nowhere/at/all"),
    ({"model.image_size": 33}, "image_size 33 is not a multiple of patch_size 8: try 32"),
    ({"model.name": "tinny"}, "unknown model preset 'tinny': did you mean 'tiny'"),
    ({"data.synthetic_images": 1}, "1 training images found; contrastive training"),
]


@pytest.mark.parametrize(
    ("changes", "message"), REFUSALS, ids=[repr(changes) for changes, _ in REFUSALS]
)
def test_impossible_settings_leave_no_folder(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    if "train.device" in changes and torch.backends.mps.is_available():
        pytest.skip("this machine has the device that the test wants to be missing")
    with pytest.raises(UserError) as caught:
        run_small(tmp_path / "run", changes)
    assert message in str(caught.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("objective", LOSSES)
def test_every_loss_learns_a_few_images(tmp_path: Path, objective: str) -> None:
    optimizer = "muon" if objective == DEFAULT_LOSS else "adamw"
    changes = {"train.loss": objective, "optim.optimizer": optimizer, "train.steps": 24}
    run_small(tmp_path / "run", {**changes, "optim.lr": 3e-3})
    values = losses_of(tmp_path / "run")
    assert values[-1] < 0.85 * values[0]


def test_bf16_trains_like_fp32(tmp_path: Path) -> None:
    for precision in ("fp32", "bf16"):
        # AdamW: Muon makes even the smallest direction of a gradient count as much as the largest,
        # rounding too.
        changes = {"train.precision": precision, "optim.optimizer": "adamw"}
        run_small(tmp_path / precision, changes)
    exact, rough = losses_of(tmp_path / "fp32"), losses_of(tmp_path / "bf16")
    assert exact != rough
    assert rough == pytest.approx(exact, rel=0.03)


@pytest.mark.slow
def test_held_out_combinations_are_learned(tmp_path: Path) -> None:
    """Held-out combinations, 100 images: far above chance after some seconds."""
    changes = {
        "model.vision_width": 64, "model.text_width": 64, "model.embed_dim": 64,
        "data.synthetic_images": 1000,
        "train.batch_size": 64, "train.steps": 75,
    }  # fmt: skip
    result = run_small(tmp_path / "run", changes)
    values = losses_of(tmp_path / "run")
    assert values[-1] < 0.6 * values[0]
    assert result.split == "test"
    for way in ("text_to_image", "image_to_text"):
        recall = result.scores[f"{way}/recall@5"]
        assert recall.interval.low > 2 * recall.chance
    assert result.scores["negatives"].value > 0.55
    bundle = load(tmp_path / "run")
    assert bundle.encode_text(["a red ball"]).norm().item() == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize(("recipe", "expected"), [("frozen", "small gain"), ("scratch", "overfit")])
def test_warning_of_few_images_depends_on_the_recipe(recipe: str, expected: str) -> None:
    config = small_config({"transfer.recipe": recipe, "data.synthetic_images": 40})
    with console.capture() as output:
        check_training_data(open_data(config.data, 32, 0), config)
    assert expected in output.getvalue()


def test_run_that_gains_nothing_says_that_the_initial_model_is_unchanged(tmp_path: Path) -> None:
    start = finished_run()
    changes = {
        **dict.fromkeys(small_run.SMALL, None),  # of the initial model, or decided
        "transfer.init": str(start),
        "transfer.recipe": "frozen",
        "data.synthetic_images": 72,
        "optim.lr": 1e-9,
        "train.steps": 2,
        "train.batch_size": 16,
        "train.device": "cpu",
        "train.precision": "fp32",
        "train.threads": 1,
    }
    with console.capture() as output:
        train_config(small_config(changes), tmp_path / "run")
    printed = output.getvalue()
    assert (
        "only 72 training images: expect a small gain over the pretrained model or none" in printed
    )
    (line,) = (line for line in printed.splitlines() if line.startswith("best "))
    assert line.startswith("best       step 0: validation ")
    assert f"did not improve on the start: {start} is unchanged; more captions may help" in line


@pytest.mark.parametrize(
    "content", ["", "[" * 5000, "null", '{"minutes": [', '{"minutes": "many"}']
)
def test_damaged_environment_of_a_run_does_not_stop_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str
) -> None:
    """One that was nested deeply ended in a traceback."""
    (tmp_path / "environment.json").write_text(content)
    (tmp_path / "config.toml").touch()
    assert run_module._promised_minutes(tmp_path) is None
    monkeypatch.setattr(run_module, "launched", lambda: True)
    assert run_module.started_before(tmp_path, "x") is None
