"""Positions of patches: fixed codes that tell them apart, learned ones that can be resized."""

from __future__ import annotations

import pytest
import torch

from m1clip.model.towers import resize_positions, sincos_2d


@pytest.mark.parametrize(("grid", "width"), [(7, 32), (14, 64), (28, 256)])
def test_no_two_patches_share_a_code(grid: int, width: int) -> None:
    table = sincos_2d(grid, width)
    assert table.shape == (grid * grid, width)
    apart = torch.cdist(table, table) + 10 * torch.eye(len(table))
    assert apart.min() > 0.1


def test_half_of_the_channels_code_the_row_half_the_column() -> None:
    table = sincos_2d(5, 16).reshape(5, 5, 16)
    assert torch.equal(table[2, 0, :8], table[2, 4, :8])
    assert torch.equal(table[0, 3, 8:], table[4, 3, 8:])
    assert torch.equal(table[1, 3, :8], table[3, 1, 8:])
    torch.testing.assert_close(table[2, 0, 0], torch.tensor(2.0).sin())


@pytest.mark.parametrize("prefix", [0, 1])
def test_the_same_grid_is_left_alone(prefix: int) -> None:
    positions = torch.randn(49 + prefix, 8)
    assert torch.equal(resize_positions(positions, 7), positions)


@pytest.mark.parametrize("prefix", [0, 1])
@pytest.mark.parametrize("grid", [4, 10, 14])
def test_another_grid_keeps_the_class_token_and_constants(prefix: int, grid: int) -> None:
    positions = torch.full((49 + prefix, 8), 0.25)
    positions[:prefix] = 3.0
    resized = resize_positions(positions, grid)
    assert resized.shape == (grid * grid + prefix, 8)
    assert torch.equal(resized[:prefix], positions[:prefix])
    torch.testing.assert_close(resized[prefix:], torch.full((grid * grid, 8), 0.25))


def test_a_slope_stays_a_slope() -> None:
    column = torch.arange(8.0).repeat(8)[:, None]  # grows to the right, the same in each row
    resized = resize_positions(column, 16).reshape(16, 16)
    torch.testing.assert_close(resized, resized[:1].expand(16, 16))
    assert (resized[0].diff() > 0).all()


def test_what_is_no_grid_is_refused() -> None:
    with pytest.raises(ValueError, match="neither a square grid"):
        resize_positions(torch.zeros(52, 4), 7)
