"""Closed-form initialization of two heads: canonical correlation analysis (CCA) of images and captions."""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from m1clip.data.prepare import Split
from m1clip.evaluation.analysis import even_indices
from m1clip.model.heads import Head

# Added to the covariances of standardized features, over the root of the number of images; chosen
# on 300 and 6,000.
IMAGE_RIDGE = 0.1456  # for each feature: two towers side by side need twice that of one
TEXT_RIDGE = 40.0
OUTPUT_NORM = 16.0  # root mean square over the training set
CCA_IMAGES = 20_000  # used to estimate the covariances
CCA_BLOCK = 1024  # images at a time
SPANNED_IMAGES = 1_000  # images whose features are reduced to what they span


@torch.no_grad()
def fit_projections(image_head: Head, text_head: Head, train: Split) -> None:
    """Set both projections to the canonical directions, each multiplied by its correlation."""
    wx = image_head.project.weight  # (embed_dim, width)
    bases = _bases(image_head, text_head, train)
    widths = [basis.shape[1] for basis in bases]
    xx, yy, xy = (
        torch.zeros(widths[a], widths[b], dtype=torch.float64) for a, b in ((0, 0), (1, 1), (0, 1))
    )
    x_sum, y_sum, ybar_sum = torch.zeros(len(xx)), torch.zeros(len(yy)), torch.zeros(len(yy))
    images = captions = 0
    for x_raw, y_raw, image_index in _blocks(train):
        x = image_head.standardized(x_raw) @ bases[0]
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
    found = canonical(xx, yy, xy, len(wx), images, wx.shape[1])
    sides = zip((image_head, text_head), found, (x_mean, y_mean), (xx, yy), bases, strict=True)
    for head, directions, mean, covariance, basis in sides:
        norm = ((directions @ covariance) * directions).sum().sqrt().clamp(min=1e-12)
        matrix = torch.zeros(len(wx), len(covariance), dtype=torch.float64)
        matrix[: len(directions)] = directions * (OUTPUT_NORM / norm)
        head.project.weight.copy_(matrix @ basis.double().T)
        head.project.bias.copy_(-matrix @ mean)


def _bases(image_head: Head, text_head: Head, train: Split) -> tuple[Tensor, Tensor]:
    """(width, k) an orthonormal basis of the standardized features of each side.

    What is outside of it has no part in canonical directions. With few images it is a small part of
    the width.
    """
    is_small = len(train.samples) <= SPANNED_IMAGES
    blocks = [(image, text) for image, text, _ in _blocks(train)] if is_small else []
    found = []
    for side, head in enumerate((image_head, text_head)):
        width = head.project.weight.shape[1]
        rows = sum(len(block[side]) for block in blocks)
        if not 0 < rows < width:
            found.append(torch.eye(width))
            continue
        x = head.standardized(torch.cat([block[side] for block in blocks]))
        found.append(torch.linalg.qr(x.T.double()).Q.float())
    return found[0], found[1]


def canonical(
    xx: Tensor, yy: Tensor, xy: Tensor, count: int, images: int, image_width: int | None = None
) -> tuple[Tensor, Tensor]:
    """The first `count` canonical directions of both sides as rows, times their correlations.

    Whitening with Cholesky factors differs from symmetric whitening only by a rotation, which
    cancels. `image_width` is the number of image features, if `xx` is of fewer coordinates in their
    space.
    """
    ridge = IMAGE_RIDGE * (image_width or len(xx)) / images**0.5
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
    """(features of images, features of their captions, the row of each caption's image), block by block."""
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
