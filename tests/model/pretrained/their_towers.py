"""DINOv2 and BERT folders as transformers writes them, with small random weights."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordPiece
from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import BertPreTokenizer
from tokenizers.processors import TemplateProcessing
from torch import Tensor

DINO: dict[str, Any] = {
    "model_type": "dinov2_with_registers",
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "mlp_ratio": 2,
    "patch_size": 7,
    "image_size": 35,
    "num_register_tokens": 3,
    "layer_norm_eps": 1e-6,
}
BERT: dict[str, Any] = {
    "model_type": "bert",
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 64,
}
PIXELS = {
    "crop_size": {"height": 28, "width": 28},
    "image_mean": [0.485, 0.456, 0.406],
    "image_std": [0.229, 0.224, 0.225],
}


def layer_norm(name: str, width: int) -> dict[str, Tensor]:
    return {f"{name}.weight": torch.rand(width) + 0.5, f"{name}.bias": torch.randn(width) * 0.1}


def linear(name: str, inputs: int, outputs: int) -> dict[str, Tensor]:
    weight = torch.randn(outputs, inputs) * inputs**-0.5
    return {f"{name}.weight": weight, f"{name}.bias": torch.randn(outputs) * 0.1}


def dino_weights(config: dict[str, Any]) -> dict[str, Tensor]:
    """Random weights under the names of transformers."""
    width = config["hidden_size"]
    patch = config["patch_size"]
    hidden = int(width * config["mlp_ratio"])
    positions = (config["image_size"] // patch) ** 2 + 1
    made = {
        "embeddings.cls_token": torch.randn(1, 1, width),
        "embeddings.mask_token": torch.randn(1, width),
        "embeddings.position_embeddings": torch.randn(1, positions, width),
        "embeddings.patch_embeddings.projection.weight": torch.randn(width, 3, patch, patch) * 0.1,
        "embeddings.patch_embeddings.projection.bias": torch.randn(width) * 0.1,
        **layer_norm("layernorm", width),
    }
    if config["model_type"] == "dinov2_with_registers":
        made["embeddings.register_tokens"] = torch.randn(1, config["num_register_tokens"], width)
    for number in range(config["num_hidden_layers"]):
        block = f"encoder.layer.{number}"
        for part in ("query", "key", "value"):
            made |= linear(f"{block}.attention.attention.{part}", width, width)
        made |= linear(f"{block}.attention.output.dense", width, width)
        made |= linear(f"{block}.mlp.fc1", width, hidden) | linear(
            f"{block}.mlp.fc2", hidden, width
        )
        for name in ("1", "2"):
            made |= layer_norm(f"{block}.norm{name}", width)
            made[f"{block}.layer_scale{name}.lambda1"] = torch.rand(width) + 0.2
    return made


def bert_weights(config: dict[str, Any], vocab_size: int) -> dict[str, Tensor]:
    """Random weights under the names of transformers."""
    width = config["hidden_size"]
    hidden = config["intermediate_size"]
    made = {
        "embeddings.word_embeddings.weight": torch.randn(vocab_size, width),
        "embeddings.position_embeddings.weight": torch.randn(64, width) * 0.3,
        "embeddings.token_type_embeddings.weight": torch.randn(2, width) * 0.3,
        **layer_norm("embeddings.LayerNorm", width),
    }
    for number in range(config["num_hidden_layers"]):
        layer = f"encoder.layer.{number}"
        for part in ("query", "key", "value"):
            made |= linear(f"{layer}.attention.self.{part}", width, width)
        made |= linear(f"{layer}.attention.output.dense", width, width)
        made |= linear(f"{layer}.intermediate.dense", width, hidden)
        made |= linear(f"{layer}.output.dense", hidden, width)
        made |= layer_norm(f"{layer}.attention.output.LayerNorm", width)
        made |= layer_norm(f"{layer}.output.LayerNorm", width)
    return made


def tokenizer_json(pieces: list[str]) -> str:
    """BERT's uncased tokenizer of these pieces, as a tokenizer.json."""
    made = Tokenizer(WordPiece({piece: i for i, piece in enumerate(pieces)}, unk_token="[UNK]"))
    made.normalizer, made.pre_tokenizer = BertNormalizer(), BertPreTokenizer()
    made.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return str(made.to_str())


def write_dino(folder: Path, config: dict[str, Any] = DINO) -> Path:
    """A folder with a DINOv2."""
    folder.mkdir(parents=True)
    save_file(dino_weights(config), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "preprocessor_config.json").write_text(json.dumps(PIXELS))
    return folder


def write_bert(folder: Path, pieces: list[str], config: dict[str, Any] = BERT) -> Path:
    """A folder with a BERT."""
    folder.mkdir(parents=True)
    save_file(bert_weights(config, len(pieces)), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text(tokenizer_json(pieces))
    return folder
