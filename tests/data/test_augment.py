"""Random views: crop, flip, color, resizing and patch dropout."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from m1clip.data.augment import Augmentation, _resampler, draw_patches, draw_views, render
from m1clip.data.images import Preprocess

PLAIN = Preprocess(image_size=16, mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))


def images(n: int = 3, side: int = 16) -> Tensor:
    return torch.from_numpy(np.random.default_rng(0).integers(0, 256, (n, side, side, 3), np.uint8))


def views(
    n: int, box: tuple[float, ...] = (0, 0, 1, 1), flip: bool = False, gains: tuple[float, float] = (1, 1)
) -> Tensor:
    return torch.tensor([*box, flip, *gains], dtype=torch.float32).repeat(n, 1)


def as_image(x: Tensor) -> Tensor:
    """(n, 3, h, w) in [0, 1] -> (n, h, w, 3) in 0 .. 255."""
    return x.permute(0, 2, 3, 1) * 255


@pytest.mark.parametrize("given", [None, views(3)])
def test_full_view_at_the_same_size_has_the_same_pixels(given: Tensor | None) -> None:
    shown = render(images(), given, PLAIN)
    torch.testing.assert_close(shown, images().permute(0, 3, 1, 2).float() / 255, atol=1e-7, rtol=0)


@pytest.mark.parametrize("vertical", [False, True])
def test_crop_shows_only_its_box(vertical: bool) -> None:
    halves = torch.full((1, 16, 16, 3), 100, dtype=torch.uint8)
    halves[:, :, 8:] = 255
    boxes = [(0, 0, 0.5, 1), (0.5, 0, 0.5, 1)]
    if vertical:
        halves, boxes = halves.transpose(1, 2), [(0, 0, 1, 0.5), (0, 0.5, 1, 0.5)]
    near, far = (as_image(render(halves, views(1, box), PLAIN))[0] for box in boxes)
    near = near[:-1] if vertical else near[:, :-1]  # at the edge the filter reaches over it
    torch.testing.assert_close(near, torch.full_like(near, 100.0), atol=1e-3, rtol=0)
    assert far.mean() > 240


def test_crop_with_flip_mirrors_the_box() -> None:
    for box in ((0, 0, 1, 1), (0.1, 0.2, 0.5, 0.6)):
        plain, mirrored = (render(images(), views(3, box, flip), PLAIN) for flip in (False, True))
        torch.testing.assert_close(mirrored, plain.flip(3), atol=1e-5, rtol=0)


@pytest.mark.parametrize(("side", "size"), [(16, 16), (40, 16), (8, 16)])
def test_resampling_weights_sum_to_one(side: int, size: int) -> None:
    start, extent = torch.tensor([0.0, 0.3, 0.0, 0.5]), torch.tensor([1.0, 0.7, 0.2, 0.5])
    weights = _resampler(start, extent, torch.tensor([False, True, False, True]), side, size)
    assert weights.shape == (4, size, side)
    assert (weights >= 0).all()
    torch.testing.assert_close(weights.sum(2), torch.ones(4, size))


def test_downsizing_averages() -> None:
    checkers = ((torch.arange(32)[:, None] + torch.arange(32)) % 2 * 255).to(torch.uint8)
    shown = as_image(render(checkers[None, :, :, None].expand(1, 32, 32, 3), views(1), PLAIN))[0]
    torch.testing.assert_close(shown[1:-1, 1:-1], torch.full((14, 14, 3), 127.5), atol=0.1, rtol=0)


def test_larger_image_is_resized_in_full_without_views() -> None:
    """Splits decoded with a margin for crops are also evaluated."""
    shown = render(images(side=20), None, PLAIN)
    assert shown.shape == (3, 3, 16, 16)
    torch.testing.assert_close(shown, render(images(side=20), views(3), PLAIN))


def test_normalization() -> None:
    preprocess = Preprocess(image_size=16)
    shown = render(images(), None, preprocess)
    mean, std = (torch.tensor(t).view(1, 3, 1, 1) for t in (preprocess.mean, preprocess.std))
    torch.testing.assert_close(shown * std + mean, render(images(), None, PLAIN))


def test_brightness_and_contrast() -> None:
    bright = render(images(), views(3, gains=(1.2, 1.0)), PLAIN)
    torch.testing.assert_close(bright, (images().permute(0, 3, 1, 2) / 255 * 1.2).clamp(0, 1))
    grey = render(images(), views(3, gains=(1.0, 0.0)), PLAIN)
    torch.testing.assert_close(grey.std(dim=(1, 2, 3)), torch.zeros(3), atol=1e-6, rtol=0)


def test_rendering_does_not_depend_on_the_batch() -> None:
    varied = Augmentation(crop_min=0.4, flip=0.5, color_jitter=0.3)
    batch = images(6)
    many, few = np.array([0, 1, 2, 3, 4, 5]), np.array([4, 1])
    together = render(batch, draw_views(varied, 7, 2, many), PLAIN)
    apart = render(batch[few], draw_views(varied, 7, 2, few), PLAIN)
    torch.testing.assert_close(together[few], apart, atol=1e-6, rtol=0)
    later = render(batch, draw_views(varied, 7, 3, many), PLAIN)
    assert not torch.allclose(together, later, atol=0.05)


def test_random_views_stay_in_range() -> None:
    samples = np.arange(5000)
    drawn = draw_views(Augmentation(crop_min=0.5, flip=0.25, color_jitter=0.2), 1, 0, samples)
    left, top, width, height, flips, brightness, contrast = drawn.unbind(1)
    assert (drawn >= 0).all()
    assert (left + width <= 1 + 1e-6).all()
    assert (top + height <= 1 + 1e-6).all()
    assert (width * height).min() > 0.5 * 0.7  # cut at the edge, a stretched box may lose a little more
    assert abs(flips.mean() - 0.25) < 0.03
    assert max((brightness - 1).abs().max(), (contrast - 1).abs().max()) <= 0.2 + 1e-6
    assert draw_views(Augmentation(), 1, 0, samples) is None
    flips_only = draw_views(Augmentation(flip=1.0), 1, 0, samples[:2])
    assert flips_only.tolist() == [[0, 0, 1, 1, 1, 1, 1]] * 2


@given(st.integers(1, 60), st.floats(0, 0.99), st.integers(0, 5))
def test_kept_patches_are_distinct_sorted_and_reproducible(count: int, dropout: float, epoch: int) -> None:
    samples = np.array([3, 9, 4])
    kept = draw_patches(dropout, count, 1, epoch, samples)
    assert kept.shape == (3, max(1, round(count * (1 - dropout))))
    assert ((kept >= 0) & (kept < count)).all()
    assert (np.diff(kept, axis=1) > 0).all()
    assert (draw_patches(dropout, count, 1, epoch, samples[::-1]) == kept[::-1]).all()


def test_patches_are_kept_equally_often() -> None:
    kept = draw_patches(0.5, 16, 0, 0, np.arange(4000))
    counts = np.bincount(kept.ravel(), minlength=16)
    assert (np.abs(counts - 2000) < 5 * np.sqrt(1000)).all()
    assert (draw_patches(0.5, 16, 0, 1, np.arange(4000)) != kept).any()
