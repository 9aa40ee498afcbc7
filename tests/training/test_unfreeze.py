"""Fine-tuning from frozen towers: last blocks, all of a tower, or LoRA, for each tower separately."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from small_run import assert_same_bits, resume_quietly, screen, tensors_of
from tower_run import frozen_config, patch_towers

import m1clip
from m1clip.config import load_config
from m1clip.errors import UserError
from m1clip.inference.encoder import Encoder
from m1clip.monitor.report import write_report
from m1clip.runlog import read_log
from m1clip.training.run import decode_plan, train_config
from m1clip.training.setup import prepare


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on frozen towers to start from; its features lie beside it."""
    folder = tmp_path_factory.mktemp("frozen")
    with pytest.MonkeyPatch.context() as patch:
        patch_towers(patch)
        train_config(frozen_config(folder, **{"train.steps": 3}), folder / "run", screen())
    return folder / "run"


@pytest.fixture(autouse=True)
def random_towers(monkeypatch: pytest.MonkeyPatch) -> None:
    patch_towers(monkeypatch)


def config_of(first: Path, **changes: Any) -> Any:
    start = {"transfer.recipe": "scratch", "transfer.init": str(first), "train.steps": 4, "train.batch_size": 8}
    return frozen_config(first.parent, **{**start, "optim.lr": 1e-3, "train.save_every": 2, **changes})


def weights(run: Path, kind: str = "model") -> dict[str, torch.Tensor]:
    return load_file(run / kind / "model.safetensors")


def moved(first: Path, run: Path) -> set[str]:
    old, new = weights(first, "best"), weights(run)
    assert old.keys() == new.keys()
    return {name for name in old if not torch.equal(old[name], new[name])}


def tower_part(names: set[str], tower: str) -> set[str]:
    return {name.removeprefix(f"{tower}_tower.") for name in names if name.startswith(f"{tower}_tower.")}


def test_last_blocks_of_each_tower(first: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    train_config(config_of(first, **{"transfer.unfreeze_image": 1, "transfer.unfreeze_text": 2}), run, screen())
    changed = moved(first, run)
    image, text = tower_part(changed, "image"), tower_part(changed, "text")
    assert {name.split(".")[0] for name in image} == {"stages", "head"}
    assert {name.split(".")[1] for name in image if name.startswith("stages")} == {"6"}
    assert {".".join(name.split(".")[:2]) for name in text} == {"blocks.4", "blocks.5"}
    assert "text_head.up.weight" in changed
    assert m1clip.load(run).encode_text(["a red ball"]).shape == (1, 16)

    whole = tensors_of(run, 4)  # four steps equal two, resume, two
    shutil.rmtree(run / "checkpoints" / "step-000004")
    shutil.rmtree(run / "model")
    resume_quietly(run)
    assert_same_bits(tensors_of(run, 4), whole)


def test_a_tower_that_stands_still_is_read_from_its_features(
    first: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = prepare(config_of(first, **{"transfer.unfreeze_text": 0}), lambda line: None, decode_plan(screen()))
    assert job.splits["val"].captions.features is not None
    assert job.splits["val"].image_features is None
    batch = job.training[0]
    assert (batch.images.dtype, batch.text_features.dtype) == (torch.uint8, torch.float32)

    def forbidden(*arguments: Any) -> Any:
        raise AssertionError("the features of the frozen run were not found")

    monkeypatch.setattr(Encoder, "files", forbidden)
    run = tmp_path / "run"
    train_config(config_of(first, **{"transfer.unfreeze_image": 0}), run, screen())
    changed = moved(first, run)
    assert not tower_part(changed, "image")
    assert "text_tower.tokens.weight" in changed


def test_lora_in_the_last_blocks_is_merged(first: Path, tmp_path: Path) -> None:
    lora = {"transfer.lora_rank": 2, "transfer.unfreeze_text": 3}
    train_config(config_of(first, **lora, **{"transfer.unfreeze_image": 0}), tmp_path / "run", screen())
    changed = moved(first, tmp_path / "run")
    assert tower_part(changed, "text") == {
        f"blocks.{n}.{layer}.weight" for n in (3, 4, 5) for layer in ("qkv", "out", "up", "down")
    }
    name = "text_tower.blocks.5.qkv.weight"
    difference = weights(tmp_path / "run")[name] - weights(first, "best")[name]
    assert int(torch.linalg.matrix_rank(difference, atol=1e-5)) == 2
    # A tower of convolutions has no place for it: said so, or its last blocks are trained whole beside it.
    with pytest.raises(UserError, match="convolutions and no linear layer"):
        train_config(config_of(first, **lora), tmp_path / "conv", screen())
    beside = config_of(first, **lora, **{"transfer.unfreeze_image": 1, "train.steps": 1})
    model = prepare(beside, lambda line: None, decode_plan(screen())).build_model()
    moving = {name for name, p in model.named_parameters() if p.requires_grad}
    assert any(name.startswith("image_tower.stages.6") for name in moving)
    assert any("parametrizations" in name for name in moving)


def test_dead_channels_do_not_blow_up_the_gradient(first: Path) -> None:
    job = prepare(config_of(first), lambda line: None, decode_plan(screen()))
    model = job.build_model()
    head: Any = model.text_head
    usual = float(head.deviation.median())
    head.deviation[0] = 1e-6
    head.spare_dead_channels()
    assert float(head.deviation[0]) == pytest.approx(usual, rel=0.02)
    assert float(head.deviation.min()) >= 0.01 * usual


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model.image_size": 64}, "is fixed, 32"),
        ({"transfer.unfreeze_text": 9}, "the tower has 6 blocks"),
        ({"train.loss": "sigmoid"}, "has no logit bias for --loss sigmoid"),
    ],
)
def test_what_cannot_be_done_is_said(first: Path, tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        train_config(config_of(first, **changes), tmp_path / "run", screen())


def test_the_base_set_is_measured_at_each_evaluation(first: Path, tmp_path: Path) -> None:
    changes = {
        "transfer.retention_data": ["synthetic"],
        "train.eval_every": 2,
        "transfer.wise_ft": "0.5",
        "optim.lr": 0.01,
    }
    said = screen()
    train_config(config_of(first, **changes, **{"transfer.unfreeze_image": 0}), tmp_path / "run", said)
    log = list(read_log(tmp_path / "run"))
    evaluations = [record for record in log if record["kind"] == "eval"]
    assert [record["step"] for record in evaluations] == [2, 4]
    assert len({record["retention_before"] for record in evaluations}) == 1
    assert all(0 <= record["retention"] <= 1 for record in evaluations)
    words = said.console.file.getvalue()  # type: ignore[attr-defined]
    assert words.count("retention ") == 2
    page = write_report([tmp_path / "run"], tmp_path / "report.html").read_text(encoding="utf-8")
    assert "Retention (--retention-data)" in page
    assert next(r for r in log if r["kind"] == "forgetting")["before"] == evaluations[0]["retention_before"]
    start, end, best = weights(first, "best"), weights(tmp_path / "run"), weights(tmp_path / "run", "best")
    name = "text_tower.blocks.5.up.weight"
    if evaluations[1]["mean_recall"] > evaluations[0]["mean_recall"]:  # the last one was the best
        torch.testing.assert_close(best[name], (start[name] + end[name]) / 2)
    assert not torch.equal(best[name], start[name])


def test_a_base_of_class_folders_is_measured_zero_shot(first: Path, tmp_path: Path) -> None:
    for number, name in enumerate(("red ball", "green box", "blue cone")):
        (tmp_path / "base" / name).mkdir(parents=True)
        for each in range(2):
            pixels = np.full((24, 20, 3), 30 * each, np.uint8)
            pixels[..., number] = 240
            Image.fromarray(pixels).save(tmp_path / "base" / name / f"{each}.png")
    changes = {"transfer.retention_data": [str(tmp_path / "base")], "transfer.unfreeze_image": 0, "train.steps": 1}
    train_config(config_of(first, **changes), tmp_path / "run", screen())
    record = next(r for r in read_log(tmp_path / "run") if r["kind"] == "eval")
    assert record["retention_metric"] == "zero-shot top-1"
    assert record["retention"] * 6 == pytest.approx(round(record["retention"] * 6))  # a share of six images


@pytest.mark.parametrize("own", ["image", "text"])
def test_a_tower_of_ours_beside_a_frozen_one(own: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    patch_towers(monkeypatch)
    names = {"image": {"transfer.image_tower": "vit"}, "text": {"transfer.text_tower": "text"}}
    changes = {**names[own], "train.steps": 8, "optim.lr": 3e-3, "data.patch_dropout": 0.5}
    config = frozen_config(tmp_path, **changes)
    train_config(config, tmp_path / "run", screen())
    job = prepare(config, lambda line: None, decode_plan(screen()))
    start, end = job.build_model().state_dict(), weights(tmp_path / "run")
    changed = {name for name in end if not torch.equal(start[name], end[name])}
    still = "text" if own == "image" else "image"
    assert not tower_part(changed, still)
    assert any(".attn.qkv.weight" in name for name in tower_part(changed, own))
    losses = [r["loss"] for r in read_log(tmp_path / "run") if r["kind"] == "step"]
    assert all(np.isfinite(losses))
    told = load_config(tmp_path / "run" / "config.toml")
    assert told.model.stem == ("conv" if own == "image" else None)
    assert None not in (told.data.crop_min, told.data.flip, told.data.word_dropout)
    bundle = m1clip.load(tmp_path / "run")
    assert bundle.encode_image([np.zeros((9, 12, 3), np.uint8)]).shape == (1, 16)
    assert bundle.encode_text(["a red ball"]).shape == (1, 16)


def test_two_towers_of_ours_are_no_frozen_recipe(tmp_path: Path) -> None:
    own = {"transfer.image_tower": "vit", "transfer.text_tower": "text"}
    with pytest.raises(UserError, match="use --recipe scratch"):
        train_config(frozen_config(tmp_path, **own), tmp_path / "run", screen())
