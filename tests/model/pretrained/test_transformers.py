"""Towers from transformers, in a frozen run: loaded from a folder, trained, and complete in the model folder."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from small_run import small_config
from tokenizers import Tokenizer
from tokenizers.models import WordPiece
from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import BertPreTokenizer
from tokenizers.processors import TemplateProcessing

import m1clip
from m1clip.errors import UserError
from m1clip.model.pretrained import transformers as towers_module
from m1clip.model.pretrained.registry import (
    build_image_tower,
    build_text_tower,
    load_image_tower,
    load_text_tower,
)
from m1clip.text.tokenizers import FastTokenizer, load_tokenizer
from m1clip.training.run import train_config

transformers = pytest.importorskip("transformers")
PIECES = [
    "[PAD]",
    "[UNK]",
    "[CLS]",
    "[SEP]",
    *"abcdefghijklmnopqrstuvwxyz",
    *(f"##{c}" for c in "abcdefghijklmnopqrstuvwxyz"),
]
SMALL = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
}


def tokenizer_json() -> str:
    made = Tokenizer(WordPiece({piece: i for i, piece in enumerate(PIECES)}, unk_token="[UNK]"))
    made.normalizer, made.pre_tokenizer = BertNormalizer(), BertPreTokenizer()
    made.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return str(made.to_str())


@pytest.fixture
def towers(tmp_path: Path) -> tuple[Path, Path]:
    """A ViT and an ELECTRA as transformers saves them; m1clip builds neither itself."""
    torch.manual_seed(0)
    vit = transformers.ViTModel(
        transformers.ViTConfig(image_size=32, patch_size=16, **SMALL), add_pooling_layer=False
    )
    vit.save_pretrained(tmp_path / "vit")
    preprocess = {
        "image_mean": [0.4, 0.5, 0.6],
        "image_std": [0.2, 0.2, 0.2],
        "size": {"height": 32, "width": 32},
    }
    (tmp_path / "vit" / "preprocessor_config.json").write_text(json.dumps(preprocess))
    electra = transformers.ElectraModel(
        transformers.ElectraConfig(vocab_size=len(PIECES), embedding_size=16, **SMALL)
    )
    electra.save_pretrained(tmp_path / "electra")
    (tmp_path / "electra" / "tokenizer.json").write_text(tokenizer_json())
    return tmp_path / "vit", tmp_path / "electra"


def config_of(towers: tuple[Path, Path], tmp_path: Path) -> Any:
    image, text = map(str, towers)
    return small_config({
        "transfer.recipe": "frozen", "transfer.image_tower": image, "transfer.text_tower": text,
        "data.synthetic_images": 24, "train.steps": 2, "optim.optimizer": "adamw",
        "data.cache_dir": str(tmp_path / "cache"),
    })  # fmt: skip


def test_frozen_run_with_transformers_towers(towers: tuple[Path, Path], tmp_path: Path) -> None:
    train_config(config_of(towers, tmp_path), tmp_path / "run")
    text = transformers.ElectraModel.from_pretrained(towers[1]).eval()
    for folder in towers:
        shutil.rmtree(folder)  # the saved model is complete
    bundle = m1clip.load(tmp_path / "run")
    assert (bundle.preprocess.image_size, bundle.preprocess.mean) == (32, (0.4, 0.5, 0.6))
    assert bundle.encode_image([torch.zeros(9, 9, 3, dtype=torch.uint8).numpy()]).shape == (1, 32)
    ids = torch.from_numpy(bundle.tokenizer.tokenize(["a red ball", "cat"], 12)).long()
    mask = (ids != 0).float()
    with torch.inference_mode():
        last = text(input_ids=ids, attention_mask=mask).last_hidden_state
        mean = (last * mask[..., None]).sum(dim=1) / mask.sum(dim=1, keepdim=True)
        torch.testing.assert_close(bundle.clip.text_tower(ids), mean, atol=1e-5, rtol=1e-5)


def test_image_and_text_tower_of_a_transformers_clip(tmp_path: Path) -> None:
    small = {**SMALL, "projection_dim": 8}
    config = transformers.CLIPConfig(
        text_config={**small, "vocab_size": 60, "max_position_embeddings": 12, "eos_token_id": 59, "bos_token_id": 58},
        vision_config={**small, "image_size": 32, "patch_size": 16}, projection_dim=8,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.CLIPModel(config).eval()
    model.save_pretrained(tmp_path / "clip")
    image_config, image_weights, _ = load_image_tower(str(tmp_path / "clip"))
    (tmp_path / "clip" / "tokenizer.json").write_text(tokenizer_json())
    text_config, text_weights, _ = load_text_tower(str(tmp_path / "clip"))
    pixels, ids = torch.randn(2, 3, 32, 32), torch.tensor([[58, 5, 59, 0], [58, 9, 8, 59]])
    image_tower, text_tower = (
        build_image_tower(image_config).eval(),
        build_text_tower(text_config).eval(),
    )
    image_tower.load_state_dict(image_weights)
    text_tower.load_state_dict(text_weights)
    with torch.inference_mode():
        last = model.vision_model(pixel_values=pixels).last_hidden_state
        torch.testing.assert_close(image_tower(pixels)[:, :16], last[:, 0])
        torch.testing.assert_close(text_tower(ids), model.text_model(input_ids=ids).pooler_output)
    assert image_tower.width == 32


def test_convolutional_transformers_tower(tmp_path: Path) -> None:
    config = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic"
    )
    transformers.ResNetModel(config).save_pretrained(tmp_path / "resnet")
    assert build_image_tower(load_image_tower(str(tmp_path / "resnet"))[0]).width == 16


def test_errors_are_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="no vision tower that transformers can load") as caught:
        load_image_tower(str(tmp_path))
    assert "\n" not in str(caught.value)

    def absent() -> Any:
        raise UserError("this tower needs transformers")

    monkeypatch.setattr(towers_module, "transformers", absent)
    with pytest.raises(UserError, match="needs transformers"):
        load_image_tower(str(tmp_path))


def test_tokenizer_of_transformers_tower(tmp_path: Path) -> None:
    tokenizer = FastTokenizer(tokenizer_json(), 0)
    assert tokenizer.tokenize(["ab", "abcdef"], 5).tolist() == [[2, 4, 31, 3, 0], [2, 4, 31, 32, 3]]
    assert (tokenizer.sot_id, tokenizer.eot_id, tokenizer.vocab_size) == (2, 3, len(PIECES))
    assert tokenizer.encode("ab") == [4, 31]
    tokenizer.save(tmp_path)
    assert load_tokenizer(tmp_path).tokenize(["ab"], 5).tolist() == [[2, 4, 31, 3, 0]]
    assert FastTokenizer(tokenizer_json(), 3).pad_id == 0
    with pytest.raises(ValueError, match="not a tokenizer"):
        FastTokenizer("{}", 0)
