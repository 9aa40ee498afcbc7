"""Closed-form initialization of heads."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from m1clip.data.array_view import ArrayView
from m1clip.model.heads import Head
from m1clip.model.presets import HeadConfig, PretrainedImageConfig
from m1clip.model.pretrained.dinov2 import DinoSize
from m1clip.model.pretrained.folders import settings_of
from m1clip.training import cca


def split(image: np.ndarray, text: np.ndarray, counts: list[int]) -> Any:
    first = np.concatenate([[0], np.cumsum(counts)])
    captions = SimpleNamespace(first=first, features=ArrayView(text))
    return SimpleNamespace(
        samples=range(len(image)), image_features=ArrayView(image), captions=captions
    )


def test_canonical_directions_match_symmetric_whitening_and_svd() -> None:
    torch.manual_seed(0)
    x, y = torch.randn(200, 12).double(), torch.randn(200, 9).double()
    y[:, :3] += x[:, :3] * torch.tensor([3.0, 2.0, 1.0])
    xx, yy, xy = x.T @ x / 200, y.T @ y / 200, x.T @ y / 200

    def whitening(matrix: torch.Tensor, ridge: float) -> torch.Tensor:
        values, vectors = torch.linalg.eigh(matrix)
        return vectors @ ((values + ridge) ** -0.5)[:, None].mul(vectors.T)

    wx, wy = (
        whitening(xx, cca.IMAGE_RIDGE * len(xx) / 200**0.5),
        whitening(yy, cca.TEXT_RIDGE / 200**0.5),
    )
    u, s, v = torch.linalg.svd(wx @ xy @ wy, full_matrices=False)
    canonical = cca.canonical(xx, yy, xy, 4, 200)
    expected = ((wx @ u)[:, :4] * s[:4], (wy @ v.T)[:, :4] * s[:4])
    torch.testing.assert_close(
        canonical[0].T @ canonical[1], expected[0] @ expected[1].T
    )  # up to signs


def test_fitted_heads_find_the_captions_of_unseen_images(monkeypatch: Any) -> None:
    """Latent factors, seen through two random maps with noise: the heads find them, in blocks as at once."""
    rng = np.random.default_rng(0)
    counts = [1 + number % 3 for number in range(400)]
    factors = rng.normal(size=(400, 6))
    maps = rng.normal(size=(6, 20)), rng.normal(size=(6, 15))
    image = (factors @ maps[0] + 0.3 * rng.normal(size=(400, 20)) + 5).astype(np.float16)
    text = (
        np.repeat(factors, counts, axis=0) @ maps[1] + 0.3 * rng.normal(size=(sum(counts), 15))
    ).astype(np.float16)
    train = split(image[:300], text[: sum(counts[:300])], counts[:300])
    weights = []
    for block in (cca.CCA_BLOCK, 7):
        monkeypatch.setattr(cca, "CCA_BLOCK", block)
        heads = [Head(HeadConfig(kind="adapter", hidden=4), width, 8) for width in (20, 15)]
        for head, table in zip(heads, (image, text), strict=True):
            head.initialize()
            features = torch.from_numpy(table).float()
            head.standardize(features.mean(dim=0), features.std(dim=0))
        cca.fit_projections(*heads, train, torch.full((20,), cca.IMAGE_RIDGE * 20))
        weights.append([head.project.weight.detach().clone() for head in heads])
    for one, other in zip(*weights, strict=True):
        torch.testing.assert_close(one.T @ one, other.T @ other, atol=1e-4, rtol=1e-4)
    with torch.inference_mode():
        images, texts = (
            head.eval()(torch.from_numpy(table))
            for head, table in zip(heads, (image, text), strict=True)
        )
    norm = float(images[:300].square().sum(dim=1).mean().sqrt())
    assert abs(norm - cca.OUTPUT_NORM) < 0.1
    first = np.cumsum([0, *counts])[300:-1]
    similarity = (
        torch.nn.functional.normalize(images[300:], dim=1)
        @ torch.nn.functional.normalize(texts[first], dim=1).T
    )
    assert float((similarity.argmax(dim=1) == torch.arange(100)).float().mean()) > 0.8


def test_few_images_are_reduced_to_what_they_span(monkeypatch: Any) -> None:
    """The heads are the same as with all coordinates."""
    rng = np.random.default_rng(0)
    counts = [1, 2, 1, 3, 1, 2]
    image = rng.normal(size=(6, 20)).astype(np.float16)
    text = rng.normal(size=(10, 15)).astype(np.float16)
    ridges = torch.cat([torch.full((12,), 1.5), torch.full((8,), 0.4)])
    products = []
    for small in (cca.SPANNED_IMAGES, 0):
        monkeypatch.setattr(cca, "SPANNED_IMAGES", small)
        heads = [Head(HeadConfig(kind="adapter", hidden=4), width, 8) for width in (20, 15)]
        cca.fit_projections(*heads, split(image, text, counts), ridges)
        x, y = (head.project.weight.detach() for head in heads)
        products.append([x.T @ y, *(head.project.bias.detach().square().sum() for head in heads)])
    for one, other in zip(*products, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-3)


def test_each_family_of_towers_has_its_own_ridge() -> None:
    """That of a family grows with its features; towers of one family share it."""
    dino = DinoSize(width=8, layers=1, heads=2, patch_size=7, registers=1)
    parts = (
        PretrainedImageConfig(kind="efficientnet-lite0", image_size=56),
        PretrainedImageConfig(kind="dinov2", settings=settings_of(dino), image_size=28),
        PretrainedImageConfig(kind="efficientnet-lite2", name="lite2", image_size=65),
    )
    together = PretrainedImageConfig(kind="concat", image_size=65, parts=parts)
    widths = [cca.part_width(part) for part in parts]
    ridges = cca.image_ridges(together, sum(widths))
    lite0, middle, lite2 = ridges.split(widths)
    assert widths[1] == 16
    assert middle.unique().tolist() == pytest.approx([16 * cca.DINO_RIDGE])
    lite_ridge = (widths[0] + widths[2]) * cca.IMAGE_RIDGE
    assert lite0.unique().tolist() == pytest.approx([lite_ridge])
    torch.testing.assert_close(lite2, lite0[:1].expand(widths[2]))
    alone = cca.image_ridges(parts[0], widths[0])
    assert alone.unique().tolist() == pytest.approx([widths[0] * cca.IMAGE_RIDGE])


def test_features_with_a_smaller_ridge_count_for_more() -> None:
    """Of two copies of the same features, the heads use the one with the smaller ridge."""
    rng = np.random.default_rng(0)
    counts = [1] * 60
    factors = rng.normal(size=(60, 4))
    image = np.repeat(factors @ rng.normal(size=(4, 6)), 2, axis=1).astype(np.float16)
    text = (factors @ rng.normal(size=(4, 5))).astype(np.float16)
    heads = [Head(HeadConfig(kind="adapter", hidden=4), width, 4) for width in (12, 5)]
    ridges = torch.tensor([8.0, 0.5] * 6)
    cca.fit_projections(*heads, split(image, text, counts), ridges)
    weight = heads[0].project.weight.detach()
    assert float(weight[:, 1::2].norm()) > 10 * float(weight[:, ::2].norm())
