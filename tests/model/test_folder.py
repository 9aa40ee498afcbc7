"""Models of open_clip and Hugging Face in every form, and export to their formats."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_model import tiny_clip, tiny_config

import m1clip
from m1clip import console
from m1clip.data.images import OPENAI_MEAN, Preprocess
from m1clip.errors import UserError
from m1clip.export.layouts import convert
from m1clip.inference.model import Model
from m1clip.inference.torch_encoder import TorchEncoder
from m1clip.model.folder import read_model
from m1clip.model.presets import with_fields
from m1clip.text.bpe import BpeTokenizer
from m1clip.text.tokenizers import CharTokenizer, make_tokenizer

FULL = {
    "vision_width": 64,
    "text_width": 64,
    "vision_heads": 1,
    "text_heads": 1,
    "vocab_size": 49408,
}
SHAPE = tiny_config(**FULL)
TEXTS = ["a red ball", "two cats!"]
IMAGE = torch.arange(40 * 50 * 3).view(40, 50, 3).remainder(251).to(torch.uint8).numpy()


@pytest.fixture(scope="module")
def trained() -> Model:
    torch.manual_seed(0)
    tokenizer = BpeTokenizer()
    model = tiny_clip(**FULL)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            torch.nn.init.normal_(parameter, mean=float("norm" in name), std=0.1)
    return Model(TorchEncoder(model.eval(), tokenizer, Preprocess(image_size=32)))


@pytest.fixture
def exported(trained: Model, tmp_path: Path) -> dict[str, Path]:
    trained.save(tmp_path / "ours")
    for to in ("openclip", "hf"):
        convert(read_model(tmp_path / "ours"), to, tmp_path / to)  # type: ignore[arg-type]
    return {to: tmp_path / to for to in ("openclip", "hf")}


@pytest.fixture
def openclip(exported: dict[str, Path]) -> Path:
    return exported["openclip"]


def assert_same(one: Model, other: Model) -> None:
    torch.testing.assert_close(one.encode_text(TEXTS), other.encode_text(TEXTS), atol=1e-6, rtol=0)
    torch.testing.assert_close(
        one.encode_image([IMAGE]), other.encode_image([IMAGE]), atol=1e-6, rtol=0
    )
    assert torch.equal(one.clip.logit_scale, other.clip.logit_scale)


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(next(folder.glob("*model.safetensors")))


def test_load_open_clip_training_checkpoint_with_module_prefix(
    trained: Model, openclip: Path
) -> None:
    state = {f"module.{name}": tensor for name, tensor in weights_of(openclip).items()}
    torch.save({"epoch": 3, "optimizer": {"step": 1}, "state_dict": state}, openclip / "epoch_3.pt")
    assert_same(m1clip.load(openclip / "epoch_3.pt"), trained)


def test_load_open_clip_training_checkpoint_beside_the_config_of_its_model(
    trained: Model, openclip: Path
) -> None:
    """As open_clip.get_model_config gives it: neither model_cfg nor preprocess_cfg (docs/interop.md)."""
    config = openclip / "open_clip_config.json"
    record = json.loads(config.read_text(encoding="utf-8"))
    torch.save({"epoch": 3, "state_dict": weights_of(openclip)}, openclip / "epoch_3.pt")
    config.unlink()
    with pytest.raises(UserError, match=r"weights without a config.*model_configs/NAME.json"):
        m1clip.load(openclip / "epoch_3.pt")
    config.write_text(json.dumps(record["model_cfg"]), encoding="utf-8")
    model = m1clip.load(openclip / "epoch_3.pt")
    torch.testing.assert_close(model.encode_text(TEXTS), trained.encode_text(TEXTS))
    assert model.preprocess.mean == OPENAI_MEAN


def test_load_open_clip_custom_text_clip(trained: Model, openclip: Path) -> None:
    """Its text tower has the prefix `text.`.

    OpenAI's own files contain numbers besides the weights.
    """
    parts = (
        "token_embedding",
        "positional_embedding",
        "transformer",
        "ln_final",
        "text_projection",
    )
    state = {
        f"text.{name}" if name.startswith(parts) else name: t
        for name, t in weights_of(openclip).items()
    }
    state |= {"input_resolution": torch.tensor(32), "context_length": torch.tensor(16)}
    save_file(state, openclip / "open_clip_model.safetensors")
    assert_same(m1clip.load(openclip), trained)


def test_weights_without_config_are_rejected(openclip: Path, tmp_path: Path) -> None:
    save_file(weights_of(openclip), tmp_path / "alone.safetensors")
    with pytest.raises(UserError, match=r"put their open_clip_config\.json next to them"):
        m1clip.load(tmp_path / "alone.safetensors")


@pytest.mark.parametrize("form", ["openclip", "hf"])
def test_missing_or_unknown_tensor_is_named(form: str, exported: dict[str, Path]) -> None:
    folder = exported[form]
    file = next(folder.glob("*model.safetensors"))
    weights = load_file(file)
    name = sorted(weights)[3]
    save_file({key: tensor for key, tensor in weights.items() if key != name}, file)
    with pytest.raises(UserError, match=f"missing tensor '{name}'"):
        m1clip.load(folder)
    save_file({**weights, "visual.odd": torch.zeros(1)}, file)
    with pytest.raises(UserError, match=r"unknown tensor 'visual\.odd'"):
        m1clip.load(folder)
    save_file({**weights, "logit_scale": torch.zeros(2)}, file)
    with pytest.raises(UserError, match=r"'logit_scale' is \(2,\), the model expects \(\)"):
        m1clip.load(folder)


def test_pickle_that_runs_code_is_rejected(openclip: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return print, ("it ran",)

    torch.save({"state_dict": Evil()}, openclip / "evil.pt")
    with pytest.raises(UserError, match="cannot be loaded as plain tensors"):
        m1clip.load(openclip / "evil.pt")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"vision_cfg": {"timm_model_name": "convnext"}}, "timm_model_name: convnext"),
        ({"text_cfg": {"hf_model_name": "roberta"}}, "hf_model_name: roberta"),
        ({"vision_cfg": {"pool_type": "avg"}}, "pool_type: avg"),
        ({"multimodal_cfg": {"width": 8}}, "multimodal_cfg"),
    ],
)
def test_unsupported_architecture_is_named(
    openclip: Path, change: dict[str, object], words: str
) -> None:
    path = openclip / "open_clip_config.json"
    config = json.loads(path.read_text())
    for key, value in change.items():
        part = config["model_cfg"]
        part[key] = {**part[key], **value} if isinstance(part.get(key), dict) else value  # type: ignore[dict-item]
    path.write_text(json.dumps(config))
    with pytest.raises(UserError, match=words):
        m1clip.load(openclip)


def test_export_with_another_image_size(trained: Model, tmp_path: Path) -> None:
    trained.save(tmp_path / "ours")
    convert(read_model(tmp_path / "ours").resized(48), "openclip", tmp_path / "larger")
    larger = m1clip.load(tmp_path / "larger")
    assert larger.clip.config == with_fields(SHAPE, image_size=48)
    torch.testing.assert_close(
        larger.encode_image([IMAGE]),
        m1clip.load(tmp_path / "ours", image_size=48).encode_image([IMAGE]),
    )


def test_export_expands_cut_vocabulary_and_keeps_features(tmp_path: Path) -> None:
    tokenizer = make_tokenizer("clip-bpe-pruned", TEXTS)
    torch.manual_seed(0)
    model = tiny_clip(
        **FULL | {"vocab_size": tokenizer.vocab_size}, positions="sincos", eot_id=tokenizer.eot_id
    )
    small = Model(TorchEncoder(model.eval(), tokenizer, Preprocess(image_size=32)))
    small.save(tmp_path / "small")
    with console.capture() as output:
        convert(read_model(tmp_path / "small"), "hf", tmp_path / "full")
    assert "grew from" in output.getvalue().splitlines()[0]
    full = m1clip.load(tmp_path / "full")
    assert full.tokenizer.vocab_size == 49408
    assert_same(full, small)


def test_export_of_unsupported_model_is_rejected(trained: Model, tmp_path: Path) -> None:
    torch.manual_seed(0)
    odd = tiny_clip(**FULL, pooling="mean", projection_bias=True, text_pooling="eot+mean")
    Model(TorchEncoder(odd, trained.tokenizer, trained.preprocess)).save(tmp_path / "odd")
    with pytest.raises(
        UserError, match=r"support pooling mean, projection_bias True, text_pooling eot\+mean"
    ):
        convert(read_model(tmp_path / "odd"), "hf", tmp_path / "out")
    letters = CharTokenizer("abc ")
    character = tiny_clip(vocab_size=letters.vocab_size, eot_id=letters.eot_id)
    Model(TorchEncoder(character, letters, trained.preprocess)).save(tmp_path / "char")
    with pytest.raises(UserError, match="character tokenizer"):
        convert(read_model(tmp_path / "char"), "openclip", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    with pytest.raises(UserError, match="already exists"):
        convert(read_model(tmp_path / "char"), "safetensors", tmp_path / "odd")


@pytest.mark.parametrize("weights", ["model.safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize(
    ("config", "words"),
    [
        (
            {"model_type": "dinov2", "architectures": ["Dinov2Model"]},
            (
                r"config.json: dinov2 \(Dinov2Model\), a model of transformers; supported: CLIP and"
                r" .* --image-tower"
            ),
        ),
        ({"model_type": "bert"}, "config.json: bert, a model of transformers; supported: "),
        (
            {"architecture": "vit_base_patch16_224", "num_classes": 1000, "pretrained_cfg": {}},
            (
                "config.json: vit_base_patch16_224, a model of timm; supported: CLIP and SigLIP of"
                " transformers"
            ),
        ),
    ],
)
def test_models_of_another_architecture_are_named(
    config: dict[str, Any], words: str, weights: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / weights).touch()
    with pytest.raises(UserError, match=words):
        read_model(tmp_path)


def test_name_on_the_hub_gets_the_command_that_downloads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    for name in ("openai/clip-vit-base-patch32", "hf-hub:openai/clip-vit-base-patch32"):
        with pytest.raises(
            UserError,
            match=r"not on this computer; to get it: m1clip download openai/clip-vit-base-patch32$",
        ):
            read_model(Path(name))
    for name in ("runs/demo", "models/vit", "/a/b", "../a", "photos", "a/b/c"):
        with pytest.raises(UserError, match="no such file or folder") as caught:
            read_model(Path(name))
        assert "download" not in str(caught.value)
    with pytest.raises(UserError, match="models: no trained model found"):
        read_model(Path("models"))
