"""The commands export, classify and eval: output and exit code."""

import json
import os
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from small_run import exit_code
from tiny_model import tiny_model

import m1clip
from m1clip.model.folder import newest_run
from m1clip.model.pretrained import packages


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "model"
    tiny_model("bpe").save(folder)
    return folder


@pytest.fixture
def images(tmp_path: Path) -> Path:
    for number, name in enumerate(("red", "green")):
        (tmp_path / "set" / name).mkdir(parents=True)
        for image_number in range(3):
            color = np.full((20, 24, 3), 40 * image_number, np.uint8)
            color[..., number] = 250
            Image.fromarray(color).save(tmp_path / "set" / name / f"{image_number}.png")
    return tmp_path / "set"


def run_command(capsys: pytest.CaptureFixture[str], *words: str | Path) -> tuple[int, str, str]:
    return exit_code(*words), *capsys.readouterr()


@pytest.mark.parametrize("to", ["openclip", "hf", "safetensors"])
def test_export(model: Path, to: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run_command(capsys, "export", model, "--to", to, "--out", tmp_path / "out")
    assert code == 0
    assert f"exported   {tmp_path / 'out'}" in out
    torch.testing.assert_close(
        m1clip.load(tmp_path / "out").encode_text(["a"]), m1clip.load(model).encode_text(["a"])
    )
    code, _, error = run_command(capsys, "export", model, "--to", to, "--out", tmp_path / "out")
    assert code == 2
    assert "already exists" in error


def test_classify(model: Path, images: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run_command(
        capsys,
        "classify",
        images / "red" / "0.png",
        "--labels",
        "red, green,blue",
        "--model",
        model,
    )
    lines = out.strip().splitlines()
    assert code == 0
    assert {line.split("  ")[-1] for line in lines} == {"red", "green", "blue"}
    assert sum(float(line.split("%")[0]) for line in lines) == pytest.approx(100, abs=0.2)


def test_classify_many_images_and_folders(
    model: Path, images: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [images / "red" / "0.png", *(images / "green" / f"{number}.png" for number in range(3))]
    options = ("--labels", "red,green", "--model", model)
    code, out, _ = run_command(
        capsys, "classify", images / "red" / "0.png", images / "green", *options
    )
    lines = out.splitlines()
    assert code == 0
    assert [line for line in lines if "%" not in line] == [str(path) for path in paths]
    assert len(lines) == 3 * len(paths)  # a block per image: its path and a line per label

    code, out, _ = run_command(capsys, "classify", images, *options, "--json")
    rows = json.loads(out)
    assert code == 0
    assert [row["image"] for row in rows] == [str(path) for path in sorted(images.rglob("*.png"))]
    expected = m1clip.load(model).classify(rows[0]["image"], ["red", "green"])[0]
    assert [row["label"] for row in rows[0]["labels"]] == [name for name, _ in expected]
    assert [row["probability"] for row in rows[0]["labels"]] == pytest.approx(
        [p for _, p in expected], abs=1e-5
    )


def test_classify_skips_what_is_no_image_and_says_so(
    model: Path, images: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (images / "red" / "bad\x1b.png").write_bytes(b"no image")
    code, out, error = run_command(
        capsys, "classify", images / "red", "--labels", "a,b", "--model", model
    )
    assert code == 2
    assert out.count("%") == 6
    skipped, summary = error.splitlines()
    assert skipped.startswith("skipped ")
    assert "bad\\x1b.png: not an image" in skipped
    assert summary == "m1clip: 1 of 4 images cannot be used"


def test_zero_shot(
    model: Path,
    images: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, _ = run_command(
        capsys, "eval", model, "--classes", images, "--device", "cpu", "--template", "{}"
    )
    assert code == 0
    classes = ["green", "red"]
    truth = [name for name in classes for _ in range(3)]
    ranked = m1clip.load(model).classify(
        [images / name / f"{n}.png" for name in classes for n in range(3)], classes
    )
    pairs = [(name, labels[0][0]) for name, labels in zip(truth, ranked, strict=True)]
    mistakes = Counter(pair for pair in pairs if pair[0] != pair[1])
    correct = len(pairs) - mistakes.total()
    (score,) = [line for line in out.splitlines() if line.startswith("zero shot, top1")]
    assert f" {100 * correct / len(pairs):.1f}%" in score
    assert mistakes, "this model must confuse classes, or the rest checks nothing"
    _, listed = out.split("taken for")
    rows = [line.split() for line in listed.splitlines()[1:] if line.strip()]
    confusions = {
        (true, predicted): int(count) for true, predicted, count in rows if true in classes
    }
    assert confusions == mistakes


START = '{"kind": "start", "time": 1}\n'
END = '{"kind": "end", "time": 2}\n'


def test_default_model_is_newest_run(tmp_path: Path) -> None:
    for number, name in enumerate(("b", "a")):
        (tmp_path / name / "best").mkdir(parents=True)
        (tmp_path / name / "best" / "model.safetensors").touch()
        (tmp_path / name / "run.jsonl").write_text(f"{START}{END}", encoding="utf-8")
        os.utime(tmp_path / name / "run.jsonl", (number, number))
    assert newest_run(tmp_path) == tmp_path / "a"
    (tmp_path / "a" / "config.toml").write_text('[data]\nsource = ["synthetic"]\n')
    (tmp_path / "b" / "config.toml").write_text('[data]\nsource = ["photos"]\n')
    assert newest_run(tmp_path) == tmp_path / "a"
    assert newest_run(tmp_path, of_photos=True) == tmp_path / "b"


@pytest.mark.parametrize(
    ("log", "about", "is_default"),
    [
        (START, None, False),
        (f"{START}{END}", None, True),
        (f"{START}{END}{START}", None, False),  # continued
        (f"{START}{END}", "{}", False),
        (f"{START}{END}", '{"agreed": false}', False),
        (f"{START}{END}", "damaged", False),
        (f"{START}{END}", '{"agreed": true}', True),
        (START, '{"agreed": true}', False),
    ],
)
def test_run_is_the_default_only_if_it_is_finished_and_agreed_to(
    tmp_path: Path, log: str, about: str | None, is_default: bool
) -> None:
    run = tmp_path / "labels"
    (run / "best").mkdir(parents=True)
    (run / "best" / "model.safetensors").touch()
    (run / "run.jsonl").write_text(log, encoding="utf-8")
    if about is not None:
        (run / "labels.json").write_text(about, encoding="utf-8")
    assert newest_run(tmp_path) == (run if is_default else None)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("classify", "set/red/0.png", "--labels", "a,b"), "no trained model in runs/"),
        (("classify", "set/red/0.png", "--labels", "a", "--model", "MODEL"), "two or more"),
        (
            ("classify", "--labels", "a,b", "--model", "MODEL"),
            "give an image or a folder of images",
        ),
        (
            ("classify", "nowhere", "--labels", "a,b", "--model", "MODEL"),
            "nowhere: the file is missing",
        ),
        (
            ("classify", "empty", "--labels", "a,b", "--model", "MODEL"),
            "empty: no images in this folder",
        ),
        (("classify", "notes.txt", "--labels", "a,b", "--model", "MODEL"), "notes.txt"),
        (
            (
                "classify",
                "set/red/0.png",
                "--labels",
                "a,b",
                "--template",
                "a thing",
                "--model",
                "MODEL",
            ),
            "has no {}",
        ),
        (
            ("export", "MODEL", "--to", "hf", "--image-size", "1.5"),
            "--image-size 1.5: expected an integer",
        ),
        (("eval", "MODEL"), "specify data with --data"),
        (
            ("train", "--init", "nothing", "--recipe", "scratch"),
            "--init cannot be combined with --recipe scratch",
        ),
        (("eval", "MODEL", "--classes", "set/red"), "0 class folders"),
    ],
)
def test_user_errors_are_one_line(
    words: tuple[str, ...],
    message: str,
    model: Path,
    images: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(packages, "installed", lambda tower: False)
    (tmp_path / "notes.txt").write_text("not an image")
    (tmp_path / "empty").mkdir()
    code, _, error = run_command(capsys, *(model if word == "MODEL" else word for word in words))
    assert (code, error.count("\n")) == (2, 1)
    assert message in error
