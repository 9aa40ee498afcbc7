"""Fine-tuning: it starts where the model stood, moves only what it may, and the saved model is plain."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from small_run import assert_same_bits, resume_quietly, run_small, screen, small_config, tensors_of

import m1clip
from m1clip.errors import UserError
from m1clip.export.layouts import export
from m1clip.model.clip import build_clip
from m1clip.model.lora import add_lora, merged_state
from m1clip.model.presets import CLIPConfig, with_fields
from m1clip.model.pretrained import EfficientNetLite0
from m1clip.runlog import read_log
from m1clip.training.run import decode_plan, train_config
from m1clip.training.setup import prepare
from m1clip.training.transfer import interpolated


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run to start from."""
    run = tmp_path_factory.mktemp("first") / "run"
    run_small(run, {"train.steps": 3})
    return run


def weights(run: Path, kind: str = "model") -> dict[str, torch.Tensor]:
    return load_file(run / kind / "model.safetensors")


def tuned(first: Path, run: Path, **changes: Any) -> Path:
    train_config(
        small_config({"transfer.init": str(first), "train.steps": 4, "optim.optimizer": "adamw", **changes}),
        run,
        screen(),
    )
    return run


def moved(first: Path, run: Path) -> set[str]:
    """The names of what is no longer as it was."""
    old, new = weights(first, "best"), weights(run)
    assert old.keys() == new.keys()
    return {name for name in old if not torch.equal(old[name], new[name])}


def test_what_helps_random_weights_is_off_unless_asked_for(first: Path) -> None:
    init = {"transfer.init": str(first), "data.captions_per_step": 2}
    plain = prepare(small_config(init), lambda line: None, decode_plan(screen())).config
    assert (plain.data.word_dropout, plain.data.patch_dropout, plain.train.text_contrast) == (0.0, 0.0, 0.0)
    asked = {"data.word_dropout": 0.1, "data.patch_dropout": 0.2, "train.text_contrast": 0.3}
    found = prepare(small_config({**init, **asked}), lambda line: None, decode_plan(screen())).config
    assert (found.data.word_dropout, found.data.patch_dropout, found.train.text_contrast) == (0.1, 0.2, 0.3)


def test_it_starts_from_the_model(first: Path) -> None:
    config = small_config({"transfer.init": str(first)})
    job = prepare(config, lambda line: None, decode_plan(screen()))
    assert all(torch.equal(t, weights(first, "best")[name]) for name, t in job.build_model().state_dict().items())
    assert job.config.train.text_contrast == 0.0
    with pytest.raises(UserError, match=r"no trained model found"):
        train_config(small_config({"transfer.init": "/nowhere"}), None, screen())


def test_frozen_parts_stand_still(first: Path, tmp_path: Path) -> None:
    changes = moved(
        first, tuned(first, tmp_path / "run", **{"transfer.unfreeze_image": 0, "transfer.unfreeze_text": 1})
    )
    assert not [name for name in changes if name.startswith("image_tower.")]
    assert not [
        name
        for name in changes
        if name.startswith(("text_tower.transformer.blocks.0", "text_tower.tokens", "text_tower.pos"))
    ]
    assert {"text_tower.transformer.blocks.1.attn.qkv.weight", "image_head.weight", "text_tower.norm.weight"} <= changes
    with pytest.raises(UserError, match="the tower has 2 blocks"):
        tuned(first, tmp_path / "deep", **{"transfer.unfreeze_image": 3})


def test_lora_is_merged_and_resumes_exactly(first: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    lora = {"transfer.lora_rank": 2, "train.save_every": 2, "optim.lr": 0.01}
    changes = moved(first, tuned(first, run, **lora))
    layers = ("attn.qkv", "attn.out", "mlp.up", "mlp.down")
    places = [f"{tower}.transformer.blocks.{i}" for tower in ("image_tower", "text_tower") for i in range(2)]
    qkv = {f"{place}.{layer}.weight" for place in places for layer in layers}
    assert changes == qkv | {"image_head.weight", "text_head.weight", "logit_scale"}
    difference = weights(run)[min(qkv)] - weights(first, "best")[min(qkv)]
    assert int(torch.linalg.matrix_rank(difference, atol=1e-5)) == 2
    assert m1clip.load(run).encode_text(["a red ball"]).shape == (1, 32)
    whole = tensors_of(run, 4)
    shutil.rmtree(run / "checkpoints" / "step-000004")
    shutil.rmtree(run / "model")
    resume_quietly(run)
    assert_same_bits(tensors_of(run, 4), whole)


def test_lora_changes_nothing_before_it_is_trained() -> None:
    torch.manual_seed(0)
    shape = with_fields(
        CLIPConfig(),
        image_size=16,
        patch_size=8,
        vision_width=16,
        vision_layers=1,
        vision_heads=2,
        text_width=16,
        text_layers=1,
        text_heads=2,
        context_length=8,
        vocab_size=20,
        embed_dim=8,
    )
    model = build_clip(with_fields(shape, eot_id=19)).eval()
    ids = torch.tensor([[1, 5, 19, 0]])
    before, plain = model.encode_text(ids), {name: t.clone() for name, t in model.state_dict().items()}
    assert add_lora(model.text_tower, rank=2, alpha=4.0) == 4
    torch.testing.assert_close(model.encode_text(ids), before)
    assert_same_bits({name: t.detach() for name, t in merged_state(model).items()}, plain)
    with pytest.raises(UserError, match="no linear layer"):
        add_lora(EfficientNetLite0(), 2, 4.0)
    with pytest.raises(UserError, match="--lora-rank 99"):
        add_lora(model.image_tower, 99, 4.0)


def test_wise_and_forgetting(first: Path, tmp_path: Path) -> None:
    drift = {"optim.lr": 0.02, "transfer.retention_data": ["synthetic"]}
    old = tuned(first, tmp_path / "old", **drift, **{"transfer.wise_ft": "0"})
    assert_same_bits(weights(old, "best"), weights(first, "best"))
    found = tuned(first, tmp_path / "search", **drift, **{"transfer.wise_ft": "search"})
    log = list(read_log(found))
    tried = {record["share"]: record["val_mean_recall"] for record in log if record["kind"] == "wise"}
    assert set(tried) == {0.0, 0.25, 0.5, 0.75, 1.0}
    forgetting = next(record for record in log if record["kind"] == "forgetting")
    assert 0 <= forgetting["after"] <= 1
    assert forgetting["before"] == next(r["before"] for r in read_log(old) if r["kind"] == "forgetting")
    chosen = max(tried, key=lambda share: (tried[share], share))
    new = {name: t for name, t in tensors_of(found, 4).items() if name.startswith("weights:")}
    wanted = interpolated(weights(first, "best"), {n.removeprefix("weights:"): t for n, t in new.items()}, chosen)
    assert all(torch.allclose(weights(found, "best")[name], wanted[name], atol=1e-6) for name in wanted)


def test_a_third_party_model_at_another_image_size(first: Path, tmp_path: Path) -> None:
    run_small(tmp_path / "cls", {"train.steps": 1, "model.name": "ViT-S-16", "model.tokenizer": "bpe"})
    export(tmp_path / "cls", "openclip", tmp_path / "openclip")
    run = tuned(tmp_path / "openclip", tmp_path / "run", **{"model.image_size": 48})
    shape = m1clip.load(run).clip.config
    assert shape.image_size == 48


@pytest.mark.parametrize(
    ("changes", "words"), [({"wise_ft": "2"}, "--wise-ft is off"), ({"lora_rank": -1}, "--lora-rank")]
)
def test_what_cannot_be_meant_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        small_config({f"transfer.{name}": value for name, value in changes.items()})
