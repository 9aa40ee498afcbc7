"""Closed-form initialization of two heads: canonical correlation analysis (CCA) of images and
captions.
"""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from m1clip.data.prepare import Split
from m1clip.evaluation.split_analyses import even_indices
from m1clip.model.heads import Head
from m1clip.model.presets import PretrainedImageConfig, VisionTowerConfig
from m1clip.model.pretrained.registry import build_image_tower

# Added to the covariances of standardized features, over the root of the number of images; chosen
# on 300 and 6,000.
IMAGE_RIDGE = 0.1456  # for each feature of a family: two EfficientNets need twice that of one
DINO_RIDGE = 0.058  # chosen on validation, beside two EfficientNets (docs/lab-finetune.md)
TEXT_RIDGE = 40.0
OUTPUT_NORM = 16.0  # root mean square over the training set
CCA_IMAGES = 20_000  # used to estimate the covariances
CCA_BLOCK = 1024  # images at a time
SPANNED_IMAGES = 1_000  # images whose features are reduced to what they span


def image_ridges(tower: VisionTowerConfig | PretrainedImageConfig, width: int) -> Tensor:
    """(width,) the ridge of each feature of an image tower, times the root of the number of images.

    Towers of one family share theirs, which grows with their number of features. Each family has
    its own: with a common one, that with fewer features would count for less (docs/lab-finetune.md).
    """
    parts = tower.parts if isinstance(tower, PretrainedImageConfig) else ()
    if not parts:
        return torch.full((width,), family_ridge(tower.kind) * width)
    widths = [part_width(part) for part in parts]
    families = [part.kind.partition("-")[0] for part in parts]
    totals = {
        family: sum(size for size, other in zip(widths, families, strict=True) if other == family)
        for family in families
    }
    return torch.cat(
        [
            torch.full((size,), family_ridge(family) * totals[family])
            for size, family in zip(widths, families, strict=True)
        ]
    )


def family_ridge(kind: str) -> float:
    """The ridge of an image tower of this kind, for each of its features."""
    return DINO_RIDGE if kind == "dinov2" else IMAGE_RIDGE


def part_width(part: PretrainedImageConfig) -> int:
    """How many features an image tower has."""
    with torch.device("meta"):
        return build_image_tower(part).width


@torch.no_grad()
def fit_projections(image_head: Head, text_head: Head, train: Split, ridges: Tensor) -> None:
    """Set both projections to the canonical directions, each multiplied by its correlation.

    `ridges` is that of each image feature. Features are divided by its root, so that all have the
    same one.
    """
    wx = image_head.project.weight  # (embed_dim, width)
    scale = ridges.rsqrt()
    bases = _bases(image_head, text_head, train, scale)
    widths = [basis.shape[1] for basis in bases]
    xx, yy, xy = (
        torch.zeros(widths[a], widths[b], dtype=torch.float64) for a, b in ((0, 0), (1, 1), (0, 1))
    )
    x_sum, y_sum, ybar_sum = torch.zeros(len(xx)), torch.zeros(len(yy)), torch.zeros(len(yy))
    images = captions = 0
    for x_raw, y_raw, image_index in _blocks(train):
        x = (image_head.standardized(x_raw) * scale) @ bases[0]
        y = text_head.standardized(y_raw) @ bases[1]
        count = torch.bincount(image_index, minlength=len(x)).clamp(min=1)[:, None]
        # Mean of an image's captions.
        ybar = torch.zeros(len(x), y.shape[1]).index_add_(0, image_index, y) / count
        xx += x.T @ x
        yy += y.T @ y
        xy += x.T @ ybar
        x_sum, y_sum, ybar_sum = (
            x_sum + x.sum(dim=0),
            y_sum + y.sum(dim=0),
            ybar_sum + ybar.sum(dim=0),
        )
        images, captions = images + len(x), captions + len(y)
    x_mean, y_mean, ybar_mean = (
        total.double() for total in (x_sum / images, y_sum / captions, ybar_sum / images)
    )
    xx = (xx / images).addr_(x_mean, x_mean, alpha=-1)
    yy = (yy / captions).addr_(y_mean, y_mean, alpha=-1)
    xy = (xy / images).addr_(x_mean, ybar_mean, alpha=-1)
    projections = canonical(xx, yy, xy, len(wx), images, image_ridge=1.0)
    scales = (scale, torch.ones(text_head.project.weight.shape[1]))
    sides = zip(
        (image_head, text_head), projections, (x_mean, y_mean), (xx, yy), bases, scales, strict=True
    )
    for head, directions, mean, covariance, basis, factor in sides:
        norm = ((directions @ covariance) * directions).sum().sqrt().clamp(min=1e-12)
        matrix = torch.zeros(len(wx), len(covariance), dtype=torch.float64)
        matrix[: len(directions)] = directions * (OUTPUT_NORM / norm)
        head.project.weight.copy_(matrix @ basis.double().T * factor.double())
        head.project.bias.copy_(-matrix @ mean)


def _bases(
    image_head: Head, text_head: Head, train: Split, image_scale: Tensor
) -> tuple[Tensor, Tensor]:
    """(width, k) an orthonormal basis of the standardized features of each side.

    Those of images are multiplied by `image_scale`.

    What is outside of it has no part in canonical directions. With few images it is a small part of
    the width.
    """
    is_small = len(train.samples) <= SPANNED_IMAGES
    blocks = [(image, text) for image, text, _ in _blocks(train)] if is_small else []
    bases = []
    for side, head in enumerate((image_head, text_head)):
        width = head.project.weight.shape[1]
        rows = sum(len(block[side]) for block in blocks)
        if not 0 < rows < width:
            bases.append(torch.eye(width))
            continue
        x = head.standardized(torch.cat([block[side] for block in blocks]))
        x = x * image_scale if side == 0 else x
        bases.append(torch.linalg.qr(x.T.double()).Q.float())
    return bases[0], bases[1]


def canonical(
    xx: Tensor, yy: Tensor, xy: Tensor, count: int, images: int, image_ridge: float | None = None
) -> tuple[Tensor, Tensor]:
    """The first `count` canonical directions of both sides as rows, times their correlations.

    Whitening with Cholesky factors differs from symmetric whitening only by a rotation, which
    cancels. `image_ridge` is that of each image feature, times the root of the number of images;
    None: that of one family of towers with as many features.
    """
    ridge = (IMAGE_RIDGE * len(xx) if image_ridge is None else image_ridge) / images**0.5
    lx = torch.linalg.cholesky(xx + ridge * torch.eye(len(xx), dtype=xx.dtype))
    ly = torch.linalg.cholesky(yy + TEXT_RIDGE / images**0.5 * torch.eye(len(yy), dtype=yy.dtype))
    m = torch.linalg.solve_triangular(lx, xy, upper=False)
    m = torch.linalg.solve_triangular(
        ly, m.T, upper=False
    ).T  # (x width, y width), whitened on both sides
    squared, v = torch.linalg.eigh(m.T @ m)  # ascending
    squared, v = squared.flip(0)[:count].clamp(min=0), v.flip(1)[:, :count]
    # M @ v are the left singular vectors, scaled.
    wx = torch.linalg.solve_triangular(lx.T, m @ v, upper=True)
    wy = torch.linalg.solve_triangular(ly.T, v * squared.sqrt(), upper=True)
    return wx.T, wy.T


def _blocks(train: Split) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """(features of images, features of their captions, the row of each caption's image), block by
    block.
    """
    captions, images = train.captions, train.image_features
    assert images is not None
    assert captions.features is not None
    chosen = np.asarray(even_indices(len(train.samples), CCA_IMAGES))
    for start in range(0, len(chosen), CCA_BLOCK):
        block = chosen[start : start + CCA_BLOCK]
        counts = captions.first[block + 1] - captions.first[block]
        image_index = np.repeat(np.arange(len(block)), counts)
        rows = np.concatenate([np.arange(captions.first[i], captions.first[i + 1]) for i in block])
        image, text = (
            torch.from_numpy(images.read(block)),
            torch.from_numpy(captions.features.read(rows)),
        )
        yield image, text, torch.from_numpy(image_index)
