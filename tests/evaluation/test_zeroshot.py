"""Zero-shot classification and the linear probe: known values, and a model that classifies colors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn.functional import normalize

from m1clip.data.images import Preprocess
from m1clip.errors import UserError
from m1clip.evaluation.probe import linear_probe, stratified_test_mask
from m1clip.evaluation.zeroshot import class_folders, top_k_accuracy, zero_shot
from m1clip.inference.model import Model
from m1clip.inference.onnx_encoder import ArrayEncoder

COLORS = {"red": (230, 20, 20), "green": (20, 230, 20), "deep_blue": (20, 20, 230)}


class ColorEncoder(ArrayEncoder):
    """Encodes an image as its mean color."""

    preprocess = Preprocess(image_size=8, mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))

    def pixels(self, pixels: np.ndarray) -> np.ndarray:
        colors = pixels.mean(axis=(1, 2))
        return colors / np.linalg.norm(colors, axis=1, keepdims=True)

    def tokens(
        self, tokens: np.ndarray, lengths: np.ndarray, max_batch: int | None = None
    ) -> np.ndarray:
        raise NotImplementedError

    def describe(self) -> str:
        return "colors"


class ColorModel(Model):
    """Encodes a text as the colors it names."""

    def __init__(self) -> None:
        super().__init__(ColorEncoder())

    def encode_text(self, texts: Any, batch_size: int | None = None) -> np.ndarray:
        colors = (
            np.array([[float(word in text) for word in ("red", "green", "blue")] for text in texts])
            + 1e-3
        )
        return colors / np.linalg.norm(colors, axis=1, keepdims=True)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    for name, color in COLORS.items():
        (tmp_path / "set" / name).mkdir(parents=True)
        for number in range(6):
            noisy = np.clip(np.array(color) + rng.normal(0, 12, (8, 8, 3)), 0, 255).astype(np.uint8)
            Image.fromarray(noisy).save(tmp_path / "set" / name / f"{number}.png")
    return tmp_path / "set"


def test_top_k_accuracy_known_values() -> None:
    scores = np.zeros((4, 6))
    scores[:, :3] = np.array([[0.9, 0.1, 0.2], [0.2, 0.3, 0.5], [0.1, 0.8, 0.1], [0.1, 0.6, 0.4]])
    result = top_k_accuracy(scores, np.array([0, 1, 1, 2]), "zero_shot")
    assert [(metric.name, metric.value, metric.chance, metric.n) for metric in result.metrics] == [
        ("zero_shot/top1", 0.5, 1 / 6, 4),
        ("zero_shot/top5", 1.0, 5 / 6, 4),
    ]
    assert [
        metric.name for metric in top_k_accuracy(scores[:, :3], np.zeros(4, int), "a").metrics
    ] == ["a/top1"]


def test_class_folders(folder: Path) -> None:
    names, images = class_folders(folder)
    assert names == ["deep blue", "green", "red"]
    assert [path.parent.name for path, _ in images[:7]] == ["deep_blue"] * 6 + ["green"]
    assert [label for _, label in images] == [0] * 6 + [1] * 6 + [2] * 6
    for name, message in (("nowhere", "no such folder"), ("red", "has 0 class folders")):
        with pytest.raises(UserError, match=message):
            class_folders(folder / name)


def test_zero_shot_accuracy_and_confusion(folder: Path) -> None:
    (folder / "red" / "broken.png").write_bytes(b"no image")
    result = zero_shot(ColorModel(), folder, probe=True)
    assert result.scores["zero_shot/top1"].value == result.scores["linear_probe/top1"].value == 1.0
    assert result.scores["zero_shot/top1"].n == 18
    assert [(metric.name, metric.n) for metric in result.scores.classes] == [
        ("deep blue", 6),
        ("green", 6),
        ("red", 6),
    ]
    assert result.confusion.tolist() == [[6, 0, 0], [0, 6, 0], [0, 0, 6]]
    assert len(result.unreadable) == 1
    (folder / "red").rename(folder / "x")
    (folder / "green").rename(folder / "red")
    (folder / "x").rename(folder / "green")
    swapped = zero_shot(ColorModel(), folder)
    assert swapped.scores["zero_shot/top1"].value == 1 / 3
    assert str(swapped).splitlines()[-2:] == [
        "green  red             6",
        "red    green           6",
    ]


def test_linear_probe_learns_linear_classes() -> None:
    torch.manual_seed(0)
    labels = torch.arange(90) % 3
    features = normalize(
        torch.eye(3)[labels] @ torch.randn(3, 16) + 0.1 * torch.randn(90, 16), dim=-1
    )
    assert linear_probe(features.numpy(), labels.numpy())["linear_probe/top1"].value > 0.95
    shuffled = labels[torch.randperm(90)]
    assert linear_probe(features.numpy(), shuffled.numpy())["linear_probe/top1"].value < 0.7


def test_stratified_test_mask() -> None:
    labels = torch.tensor([0] * 10 + [1] * 2 + [2])
    chosen = stratified_test_mask(labels, 0)
    assert [int(chosen[labels == label].sum()) for label in range(3)] == [3, 1, 0]
    assert torch.equal(chosen, stratified_test_mask(labels, 0))
