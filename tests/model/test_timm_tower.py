"""timm's towers where timm can be imported; elsewhere the one line that says what is missing."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from m1clip.errors import UserError
from m1clip.model import pretrained as timm_tower
from m1clip.model.pretrained import build_image_tower, load_image_tower

NAME = "resnet10t"


def timm_or_skip() -> Any:
    try:
        return importlib.import_module("timm")
    except (ImportError, RuntimeError) as error:  # torchvision's compiled part may be for another torch
        pytest.skip(f"timm cannot be imported here: {str(error).splitlines()[0]}")


def test_a_tower_from_a_file(tmp_path: Path) -> None:
    timm = timm_or_skip()
    torch.manual_seed(0)
    theirs = timm.create_model(NAME, pretrained=False, num_classes=7).eval()
    file = tmp_path / "weights.safetensors"
    save_file({name: t.contiguous() for name, t in theirs.state_dict().items()}, file)
    config, weights, preprocess = load_image_tower(f"timm:{NAME}={file}")
    assert json.loads(config.settings) == {"name": NAME}
    assert preprocess.image_size == config.image_size
    tower = build_image_tower(config).eval()
    tower.load_state_dict(weights)
    pixels = torch.randn(2, 3, 64, 64)
    with torch.inference_mode():
        wanted = theirs.forward_head(theirs.forward_features(pixels), pre_logits=True)
        torch.testing.assert_close(tower(pixels), wanted)
    assert tower.width == wanted.shape[1]


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    timm = timm_or_skip()
    with pytest.raises(UserError, match="timm has no model of this name"):
        load_image_tower("timm:resnet10q")
    weights = timm.create_model(NAME, pretrained=False).state_dict()
    weights.pop("layer1.0.conv1.weight")
    save_file({name: t.contiguous() for name, t in weights.items()}, tmp_path / "part.safetensors")
    with pytest.raises(UserError, match=r"missing tensor 'layer1\.0\.conv1\.weight'"):
        load_image_tower(f"timm:{NAME}={tmp_path / 'part.safetensors'}")
    weights |= {"layer1.0.conv1.weight": torch.zeros(64, 64, 3, 3), "odd": torch.zeros(1)}
    save_file({name: t.contiguous() for name, t in weights.items()}, tmp_path / "more.safetensors")
    with pytest.raises(UserError, match="unknown tensor 'odd'"):
        load_image_tower(f"timm:{NAME}={tmp_path / 'more.safetensors'}")


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ImportError("No module named 'timm'"), "needs timm: pip install timm torchvision"),
        (RuntimeError("operator torchvision::nms does not exist\nmore"), "cannot be imported: operator"),
    ],
)
def test_without_timm_it_says_so(error: Exception, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> Any:
        raise error

    monkeypatch.setattr(timm_tower.importlib, "import_module", absent)
    with pytest.raises(UserError, match=words) as caught:
        load_image_tower("timm:resnet18")
    assert "\n" not in str(caught.value)
