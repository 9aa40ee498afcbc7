"""tools/train_general.py, which trains the model in the box: it runs, repeats, and writes what is loaded."""

import csv
import importlib.util
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
from image_sets import image
from tower_run import patch_towers

from m1clip.model import named
from m1clip.model.named import BOXED, CONFIG, GENERAL, HEADS

TOOL = Path(__file__).parents[2] / "tools" / "train_general.py"
IMAGES, CLASSES = 12, 5


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script with random towers, few classes and short stages."""
    patch_towers(monkeypatch)
    spec = importlib.util.spec_from_file_location("train_general", TOOL)
    assert spec is not None
    assert spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "train_general", tool)  # for its dataclasses
    spec.loader.exec_module(tool)
    boxed = replace(BOXED[GENERAL], towers=("efficientnet-lite0", "minilm"))
    monkeypatch.setitem(named.BOXED, GENERAL, boxed)
    monkeypatch.setattr(tool, "EMBED_DIM", 4)
    stages = [replace(stage, epochs=1, batch=6, class_batch=4) for stage in tool.STAGES]
    monkeypatch.setattr(tool, "STAGES", stages)
    monkeypatch.setattr(tool, "tower_image_size", lambda name: 64)
    # The classifiers are in packages that are not installed here.
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(CLASSES, 4120, generator=generator)
    logits = lambda features, towers: features @ weight[:, : features.shape[1]].T  # noqa: E731
    monkeypatch.setattr(tool, "class_logits", logits)
    return tool


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "captioned"
    folder.mkdir()
    with (folder / "captions.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(("image", "caption", "split"))
        for number in range(IMAGES):
            image(number).save(folder / f"{number}.png")
            writer.writerow((f"{number}.png", f"photo {'abcdefghijkl'[number]}", "train"))
            writer.writerow((f"{number}.png", f"an image {number}", "train"))
    (tmp_path / "names.txt").write_text("cat\ndog\nbird\nfish\ncow\n", encoding="utf-8")
    return folder


def test_same_data_gives_the_same_file_without_class_folders(
    tool: ModuleType, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = []
    for number in (1, 2):
        words = ["--captions", data, "--names", tmp_path / "names.txt"]
        words += ["--cache", tmp_path / "cache", "--out", tmp_path / f"out{number}"]
        monkeypatch.setattr(sys, "argv", ["train_general.py", *map(str, words)])
        tool.main()
        written.append(
            {name: (tmp_path / f"out{number}" / name).read_bytes() for name in (CONFIG, HEADS)}
        )
    assert written[0] == written[1]
    assert len(written[0][HEADS]) > 1000
