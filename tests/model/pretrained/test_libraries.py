"""Models that open_clip or transformers builds, with fakes of these libraries.

`make parity` has the real ones.
"""

import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from parity.tokenizer_files import write_gemma
from safetensors.torch import save_file
from torch import Tensor, nn

import m1clip
from m1clip.errors import UserError
from m1clip.model import folder as folders
from m1clip.model.pretrained import libraries
from m1clip.model.weights import read_tensors

IMAGE = torch.arange(40 * 50 * 3).view(40, 50, 3).remainder(251).to(torch.uint8).numpy()
EMBED = 8


class FakeVisual(nn.Module):
    """An image tower with blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(nn.Conv2d(3, 4, 8, 8), nn.Conv2d(4, EMBED, 1))

    def forward(self, pixels: Tensor) -> Tensor:
        features: Tensor = self.blocks(pixels).mean(dim=(2, 3))
        return features


class FakeText(nn.Module):
    """A text tower that reads every position, so that the fill matters."""

    def __init__(self, vocab_size: int, context_length: int) -> None:
        super().__init__()
        self.context_length = context_length
        self.table = nn.Embedding(vocab_size, EMBED)
        self.positions = nn.Parameter(torch.randn(context_length, EMBED))

    def forward(self, tokens: Tensor) -> Tensor:
        assert tokens.shape[1] == self.context_length
        features: Tensor = (self.table(tokens) * self.positions).sum(dim=1)
        return features


class FakeClip(nn.Module):
    """What open_clip.CustomTextCLIP builds."""

    def __init__(
        self, embed_dim: int, vision_cfg: dict[str, Any], text_cfg: dict[str, Any], **rest: Any
    ) -> None:
        super().__init__()
        assert embed_dim == EMBED
        assert "custom_text" not in rest
        assert not vision_cfg.get("timm_model_pretrained")
        self.visual = FakeVisual()
        self.text = FakeText(text_cfg["vocab_size"], text_cfg["context_length"])
        self.logit_scale = nn.Parameter(torch.tensor(3.0))


@pytest.fixture
def with_library(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, ModuleType], None]:
    """Put a module in place of a library, which is then found as if it were installed."""
    real = importlib.util.find_spec

    def install(name: str, module: ModuleType) -> None:
        monkeypatch.setitem(sys.modules, name, module)
        spec = SimpleNamespace(name=name)
        for importer in (folders, importlib.util):
            monkeypatch.setattr(
                importer,
                "find_spec",
                lambda requested, *_: spec if requested == name else real(requested),
            )

    return install


def openclip_folder(folder: Path, **model: Any) -> Path:
    """A folder of open_clip with a tower of timm; random weights."""
    folder.mkdir()
    config: dict[str, Any] = {"embed_dim": EMBED, "custom_text": True}
    config["vision_cfg"] = {"timm_model_name": "fastvit_mci0", "image_size": 32}
    config["text_cfg"] = {"context_length": 12, "vocab_size": 49408, "no_causal_mask": True}
    config |= model
    record = {"model_cfg": config, "preprocess_cfg": {"interpolation": "bilinear"}}
    (folder / "open_clip_config.json").write_text(json.dumps(record))
    torch.manual_seed(0)
    built = FakeClip(EMBED, {}, {"vocab_size": 49408, "context_length": 12})
    save_file(dict(built.state_dict()), folder / "open_clip_model.safetensors")
    return folder


def fake_open_clip() -> ModuleType:
    module = ModuleType("open_clip")
    module.CustomTextCLIP = FakeClip  # type: ignore[attr-defined]
    return module


def test_model_of_open_clip_is_encoded_saved_and_fine_tuned_by_its_own_towers(
    tmp_path: Path, with_library: Callable[[str, ModuleType], None]
) -> None:
    with_library("open_clip", fake_open_clip())
    folder = openclip_folder(tmp_path / "theirs")
    model = m1clip.load(folder, precision="fp32")
    assert (model.embed_dim, model.context_length) == (EMBED, 12)
    assert model.preprocess.bilinear
    ids = model.tokenizer.tokenize(["a cat"], 12)
    theirs = FakeClip(EMBED, {}, {"vocab_size": 49408, "context_length": 12})
    theirs.load_state_dict(read_tensors(folder / "open_clip_model.safetensors"))
    expected = nn.functional.normalize(theirs.text(torch.from_numpy(ids).long()), dim=-1)
    torch.testing.assert_close(model.encode_text("a cat"), expected.detach())
    # A longer text in the same batch does not change it.
    beside = model.encode_text(["a cat", "a dog that runs on the beach"])
    torch.testing.assert_close(beside[:1], expected.detach())
    model.save(tmp_path / "saved")
    again = m1clip.load(tmp_path / "saved", precision="fp32")
    torch.testing.assert_close(again.encode_image(IMAGE), model.encode_image(IMAGE))
    with pytest.raises(UserError, match="image size of open_clip's towers is fixed: 32"):
        m1clip.load(folder, image_size=64)
    model.clip.train()
    model.clip.encode_image(torch.rand(2, 3, 32, 32)).sum().backward()
    assert all(p.grad is not None for p in model.clip.image_tower.parameters())


def test_missing_library_is_one_line_with_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("m1clip.model.folder.find_spec", lambda name: None)
    folder = openclip_folder(tmp_path / "theirs")
    with pytest.raises(UserError, match=r"timm_model_name: fastvit_mci0' .* 'm1clip\[openclip\]'"):
        m1clip.load(folder)
    other = tmp_path / "align"
    other.mkdir()
    config = {"model_type": "align", "text_config": {}, "vision_config": {}}
    (other / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"align is a model of transformers, .* 'm1clip\[hf\]'"):
        m1clip.load(other)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"multimodal_cfg": {"width": 8}}, "CoCa"),
        ({"vision_cfg": {"timm_model_name": "hf-hub:someone/model"}}, "is not a name of timm"),
        ({"text_cfg": {"hf_model_name": "someone/bert"}}, "m1clip download someone/bert"),
        ({"text_cfg": {"tokenizer_mode": "clips"}}, "tokenizer of this kind"),
        (
            {"vision_cfg": {"timm_model_name": "any", "image_size": [32, 64]}},
            r"image_size must be an integer",
        ),
    ],
)
def test_what_the_adapter_cannot_build_is_named(
    tmp_path: Path,
    with_library: Callable[[str, ModuleType], None],
    change: dict[str, Any],
    words: str,
) -> None:
    with_library("open_clip", fake_open_clip())
    sections: dict[str, Any] = {"vision_cfg": {"timm_model_name": "x"}, "text_cfg": {}}
    folder = openclip_folder(tmp_path / "theirs", **{**sections, **change})
    with pytest.raises(UserError, match=words):
        m1clip.load(folder)


def test_error_of_the_library_becomes_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("open_clip")

    def fail(**settings: Any) -> None:
        raise RuntimeError("Unknown model (nothing)\nmore lines")

    module.CustomTextCLIP = fail  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "open_clip", module)
    settings = {"embed_dim": 8, "vision_cfg": {}, "text_cfg": {}}
    with pytest.raises(UserError, match=r"cannot build this model: Unknown model \(nothing\)$"):
        libraries.OpenClipImageTower(json.dumps(settings))


class FakeTransformers(nn.Module):
    """A model of transformers with two sides, and a part that neither uses."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        self.vision_model = FakeVisual()
        self.text_model = FakeText(400, 6)
        self.decoder = nn.Linear(3, 3)
        self.logit_scale = nn.Parameter(torch.tensor(2.0))

    def get_image_features(self, pixel_values: Tensor) -> Tensor:
        features: Tensor = self.vision_model(pixel_values)
        return features

    def get_text_features(self, input_ids: Tensor, attention_mask: Tensor) -> Any:
        """An output object, as transformers 5 returns it; masked tokens have no effect."""
        embedded = self.text_model.table(input_ids) * attention_mask[..., None]
        return SimpleNamespace(pooler_output=embedded.sum(dim=1))


class FakeConfig:
    """The config of the model, with its parts."""

    def __init__(self, **values: Any) -> None:
        self.vision_config = SimpleNamespace(image_size=32)
        self.values = values

    def to_json_string(self, use_diff: bool) -> str:
        parts = {"vision_config": {"image_size": 32}, "text_config": {"vocab_size": 400}}
        return json.dumps({"model_type": "fake", "architectures": ["Fake"], **parts})


def test_model_of_transformers_is_two_towers_without_unused_parts(
    tmp_path: Path, with_library: Callable[[str, ModuleType], None]
) -> None:
    torch.manual_seed(0)
    original = FakeTransformers(FakeConfig())
    module = ModuleType("transformers")
    module.AutoModel = SimpleNamespace(  # type: ignore[attr-defined]
        from_pretrained=lambda *_, **options: original, from_config=FakeTransformers
    )
    module.AutoConfig = SimpleNamespace(  # type: ignore[attr-defined]
        for_model=lambda model_type, **values: FakeConfig(**values)
    )
    with_library("transformers", module)
    folder = tmp_path / "theirs"
    folder.mkdir()
    write_gemma(folder)
    config = {"model_type": "fake", "text_config": {}, "vision_config": {"image_size": 32}}
    (folder / "config.json").write_text(json.dumps(config))
    model = m1clip.load(folder, precision="fp32")
    assert model.clip.image_tower.width == model.clip.text_tower.width == EMBED
    names = set(model.clip.state_dict())
    assert not any("decoder" in name for name in names)
    assert not any(name.startswith("image_tower.model.text_model") for name in names)
    assert float(model.clip.logit_scale.detach()) == 2.0
    ids = torch.from_numpy(model.tokenizer.tokenize(["a cat", "a"], model.context_length)).long()
    mask = (ids != 0).long()
    expected = original.get_text_features(ids, mask).pooler_output
    expected = nn.functional.normalize(expected, dim=-1).detach()
    torch.testing.assert_close(model.encode_text(["a cat", "a"]), expected)
    model.save(tmp_path / "saved")
    again = m1clip.load(tmp_path / "saved", precision="fp32")
    torch.testing.assert_close(again.encode_text(["a cat", "a"]), expected)
    del FakeTransformers.get_text_features
    with pytest.raises(UserError, match="no features of images and texts in one space"):
        m1clip.load(folder)
