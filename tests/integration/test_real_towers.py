"""The pretrained towers of the extra `towers`: what most users train on, index with and export.

Other tests of these recipes give random weights to the towers, so that they run without the packages.
"""

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_run import exit_code, made_once

import m1clip
from m1clip import console
from m1clip.config import load_config
from m1clip.data.synthetic.source import write_folder
from m1clip.export import parity
from m1clip.model.named import BOXED, GENERAL, INSTALL_TOWERS
from m1clip.runlog import read_log
from m1clip.training.run import Run

pytestmark = pytest.mark.skipif(
    not BOXED[GENERAL].towers_installed(), reason=f"needs the pretrained towers: {INSTALL_TOWERS}"
)


def photos() -> Path:
    """32 training images with five captions each, and 4 each for validation and test."""
    return made_once("photos", lambda folder: write_folder(folder, 40, 64, seed=0))


def first_captions(folder: Path) -> dict[str, str]:
    """The first caption of each photo by its path."""
    with (folder / "captions.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    return {row["image"]: row["caption"] for row in reversed(rows)}


def train(out: Path, **options: Any) -> Run:
    """Train on the photos; all runs share one cache of features."""
    cache = made_once("tower-features", Path.mkdir)
    common = {"device": "cpu", "threads": 1, "precision": "fp32"}
    with console.quiet():
        return m1clip.train(str(photos()), out=out, cache_dir=str(cache), **common, **options)


def finetuned_run() -> Path:
    """Both towers and the heads trained for two steps, after the heads alone."""
    options = {"recipe": "finetune", "image_tower": "efficientnet-lite0"}
    options |= {"unfreeze_image": 2, "unfreeze_text": 1, "steps": 2}
    options |= {"eval_every": 0, "patience": 0, "batch_size": 4}
    return made_once("finetuned-towers", lambda folder: train(folder, **options))


def test_train_without_options_trains_heads_on_frozen_towers(tmp_path: Path) -> None:
    run = train(tmp_path / "run", batch_size=8, steps=4, eval_every=0)
    config = load_config(run.path)
    assert config.transfer.recipe == "frozen"
    assert config.transfer.image_tower == "efficientnet-lite0+lite2"
    assert run.split == "test"
    losses = [record["loss"] for record in read_log(run.path) if record["kind"] == "step"]
    assert losses[-1] < losses[0]
    model = m1clip.load(run.path)
    captions = first_captions(photos())
    images = model.encode_image([str(photos() / name) for name in captions])
    cosines = model.encode_text(list(captions.values())) @ images.T
    better = (cosines > cosines.diagonal()[:, None]).sum(dim=1).float()
    assert better.mean() < 0.3 * len(captions), "half by chance"


def test_general_finds_photos_by_what_is_on_them(tmp_path: Path) -> None:
    folder = tmp_path / "album"
    write_folder(folder, 40, 64, seed=1)
    with console.quiet():
        index = m1clip.Index.build(folder, "general")
    assert index.model_path == "general"
    captions = first_captions(folder)
    model = m1clip.load("general")
    images = model.encode_image([str(folder / name) for name in captions])
    cosines = model.encode_text(list(captions.values())) @ images.T
    better = (cosines > cosines.diagonal()[:, None]).sum(dim=1).float()
    assert better.mean() < 14.5, "19.5 by chance"
    names = list(captions)
    for caption, row in zip(list(captions.values())[:5], cosines[:5], strict=True):
        best = index.search(caption, k=1).nearest[0]
        assert row[names.index(best.path)] >= row.max() - 0.01


def test_general_is_adapted_with_its_towers_frozen(tmp_path: Path) -> None:
    run = train(tmp_path / "run", init="general", batch_size=8, steps=1, eval_every=0)
    config = load_config(run.path)
    assert (config.transfer.init, config.transfer.recipe) == ("general", "frozen")
    before, after = (m1clip.load(model) for model in ("general", run.path / "model"))
    assert not np.array_equal(before.encode_text(["a dog"]), after.encode_text(["a dog"]))
    towers = {
        name: (tensor, after.clip.state_dict()[name])
        for name, tensor in before.clip.state_dict().items()
        if name.startswith(("image_tower.", "text_tower."))
    }
    assert len(towers) > 100
    assert all((one == other).all() for one, other in towers.values())


def test_finetune_trains_the_last_blocks_of_real_towers() -> None:
    run = finetuned_run()
    assert (run.parent / f"{run.name}-frozen").is_dir(), "the heads are trained first"
    before = m1clip.load(run.parent / f"{run.name}-frozen" / "model").clip.state_dict()
    after = m1clip.load(run / "model").clip.state_dict()
    assert before.keys() == after.keys()
    changed = {name for name in before if not before[name].equal(after[name])}
    assert any(name.startswith("image_tower.") for name in changed)
    assert any(name.startswith("text_tower.") for name in changed)
    assert len(changed) < len(before) / 2, "the first blocks are frozen"


def test_finetuned_model_is_exported_to_onnx(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("onnx", reason="needs the extra `export`")
    monkeypatch.setattr(parity, "TIMING_SECONDS", 0.0)
    run, out = finetuned_run(), tmp_path / "onnx"
    assert exit_code("export", run / "model", "--to", "onnx", "--out", out) == 0
    texts = ["a red ball", "two dogs at night"]
    images = [str(path) for path in sorted((photos() / "images").iterdir())[:3]]
    ours, theirs = m1clip.load(run / "model", precision="fp32"), m1clip.load(out)
    np.testing.assert_allclose(theirs.encode_text(texts), ours.encode_text(texts), atol=1e-5)
    np.testing.assert_allclose(theirs.encode_image(images), ours.encode_image(images), atol=1e-4)
