"""A small run on pretrained towers with random weights, so that their packages are not needed."""

from pathlib import Path
from typing import Any

import pytest
import torch
from small_run import small_config, small_options

from m1clip.config import Config
from m1clip.model.pretrained import registry
from m1clip.model.pretrained.bert import BertSize, BertTower
from m1clip.model.pretrained.efficientnet import EfficientNetLite

LETTERS = "abcdefghijklmnopqrstuvwxyz"
PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *LETTERS, ",", ".", *(f"##{c}" for c in LETTERS)]


def patch_towers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the weights of the two packages with random ones."""
    torch.manual_seed(0)
    image = EfficientNetLite().state_dict()
    for weight in (tensor for tensor in image.values() if tensor.ndim == 4):
        # With torch's default initialization the signal would vanish.
        torch.nn.init.kaiming_normal_(weight)
    # As deep as MiniLM, but narrow: saving a full-size one would take most of the test's time.
    thin = BertSize(width=48, heads=4, hidden=96, positions=64)
    monkeypatch.setattr(registry, "MINILM", thin)
    text = BertTower(len(PIECES), size=thin).state_dict()
    monkeypatch.setattr(
        registry, "package_weights", lambda name: dict(text if name == "minilm" else image)
    )
    monkeypatch.setattr(registry, "wordpieces", lambda: PIECES)


def frozen_changes(tmp_path: Path, **changes: Any) -> dict[str, Any]:
    """Changes to the small run for the frozen recipe; features are cached in `tmp_path`."""
    sizes = {
        "data.synthetic_images": 40,
        "train.batch_size": 16,
        "train.save_every": 3,
        "train.steps": 6,
    }
    frozen = {
        "transfer.recipe": "frozen",
        "transfer.image_tower": "efficientnet-lite0",
        # Chosen, so that no trials of heads are run.
        "transfer.heads": "cca",
        "optim.lr": 3e-4,
        "model.embed_dim": 16,
        "optim.optimizer": "adamw",
    }
    return {**frozen, **sizes, "data.cache_dir": str(tmp_path / "cache"), **changes}


def frozen_config(tmp_path: Path, **changes: Any) -> Config:
    return small_config(frozen_changes(tmp_path, **changes))


def frozen_options(tmp_path: Path, **changes: Any) -> dict[str, Any]:
    """`frozen_config` as flat options."""
    return small_options(frozen_changes(tmp_path, **changes))
