"""Random views: crop, flip, color, resizing and patch dropout."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from torch import Tensor

from m1clip.data.augment import (
    MAX_BOX_AREA,
    Augmentation,
    box_areas,
    draw_boxes,
    draw_patches,
    draw_views,
    paste_boxes,
    render,
)
from m1clip.data.images import Preprocess

PLAIN = Preprocess(image_size=16, mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))


def images(n: int = 3, side: int = 16) -> Tensor:
    return torch.from_numpy(np.random.default_rng(0).integers(0, 256, (n, side, side, 3), np.uint8))


def views(
    n: int,
    box: tuple[float, ...] = (0, 0, 1, 1),
    flip: bool = False,
    gains: tuple[float, float] = (1, 1),
) -> Tensor:
    return torch.tensor([*box, flip, *gains], dtype=torch.float32).repeat(n, 1)


def as_image(x: Tensor) -> Tensor:
    """(n, 3, h, w) in [0, 1] -> (n, h, w, 3) in 0 .. 255."""
    return x.permute(0, 2, 3, 1) * 255


@pytest.mark.parametrize("view", [None, views(3)])
def test_full_view_at_the_same_size_has_the_same_pixels(view: Tensor | None) -> None:
    shown = render(images(), view, PLAIN)
    torch.testing.assert_close(shown, images().permute(0, 3, 1, 2).float() / 255, atol=1e-7, rtol=0)


@given(st.integers(0, 10**6), st.sampled_from((16, 40, 9)), st.booleans())
def test_views_match_pillow(seed: int, side: int, flip: bool) -> None:
    draw = np.random.default_rng(seed)
    (left, right), (top, bottom) = (
        np.sort(draw.choice(side + 1, 2, replace=False)) / side for _ in range(2)
    )
    pixels = images(1, side)
    box = (left * side, top * side, right * side, bottom * side)
    expected = Image.fromarray(pixels[0].numpy()).resize((16, 16), Image.Resampling.BILINEAR, box)
    shown = as_image(
        render(pixels, views(1, (left, top, right - left, bottom - top), flip), PLAIN)
    )[0].numpy()
    # Pillow rounds to 8 bits after each direction.
    np.testing.assert_allclose(shown[:, ::-1] if flip else shown, expected, atol=1.5)


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
    assert (
        width * height
    ).min() > 0.5 * 0.7  # cut at the edge, a stretched box may lose a little more
    assert abs(flips.mean() - 0.25) < 0.03
    assert max((brightness - 1).abs().max(), (contrast - 1).abs().max()) <= 0.2 + 1e-6
    assert draw_views(Augmentation(), 1, 0, samples) is None
    flips_only = draw_views(Augmentation(flip=1.0), 1, 0, samples[:2])
    assert flips_only.tolist() == [[0, 0, 1, 1, 1, 1, 1]] * 2


@given(st.integers(1, 60), st.floats(0, 0.99), st.integers(0, 5))
def test_kept_patches_are_distinct_sorted_and_reproducible(
    count: int, dropout: float, epoch: int
) -> None:
    samples = np.array([3, 9, 4])
    patches = draw_patches(dropout, count, 1, epoch, samples)
    assert patches.shape == (3, max(1, round(count * (1 - dropout))))
    assert ((patches >= 0) & (patches < count)).all()
    assert (np.diff(patches, axis=1) > 0).all()
    assert (draw_patches(dropout, count, 1, epoch, samples[::-1]) == patches[::-1]).all()


def test_patches_are_kept_equally_often() -> None:
    patches = draw_patches(0.5, 16, 0, 0, np.arange(4000))
    counts = np.bincount(patches.ravel(), minlength=16)
    assert (np.abs(counts - 2000) < 5 * np.sqrt(1000)).all()
    assert (draw_patches(0.5, 16, 0, 1, np.arange(4000)) != patches).any()


def test_boxes_are_a_function_of_seed_epoch_and_sample() -> None:
    samples = np.arange(4_000)
    boxes = draw_boxes(0.5, 0, 3, samples)
    assert torch.equal(draw_boxes(0.5, 0, 3, samples[100:200]), boxes[100:200])
    assert not torch.equal(draw_boxes(0.5, 0, 4, samples), boxes)
    assert not torch.equal(draw_boxes(0.5, 1, 3, samples), boxes)
    areas = box_areas(boxes)
    assert float((areas > 0).float().mean()) == pytest.approx(0.5, abs=0.03)
    assert 0.45 < float(areas.max()) <= MAX_BOX_AREA
    assert float(boxes.min()) >= 0
    assert float(boxes.max()) <= 1
    assert not box_areas(draw_boxes(0.0, 0, 3, samples)).any()


@pytest.mark.parametrize("count", [1, 4, 5])
def test_boxes_show_the_partner(count: int) -> None:
    """Rows 0 and 1, 2 and 3, ...; the last of an odd number stays as it is."""
    shown = torch.arange(count).float().view(-1, 1, 1, 1).expand(-1, 3, 8, 8).contiguous()
    boxes = torch.tensor([[0.25, 0.5, 1.0, 1.0]]).repeat(count, 1)
    boxes[0] = torch.tensor([0.3, 0.3, 0.3, 0.3])  # empty
    mixed_images = paste_boxes(shown, boxes)
    assert torch.equal(mixed_images[0], shown[0])
    for row in range(1, count):
        partner = min(row ^ 1, count - 1)
        assert (mixed_images[row, :, 4:, 2:] == partner).all()
        assert (mixed_images[row, :, :4] == row).all()
        assert (mixed_images[row, :, :, :2] == row).all()
        pasted = (mixed_images[row, 0] == partner).float().mean()
        if partner != row:
            assert float(pasted) == pytest.approx(float(box_areas(boxes)[row]))
