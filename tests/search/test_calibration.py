"""Probabilities follow the score; the size of the library and the scale of its scores do not matter."""

from __future__ import annotations

import numpy as np
import pytest

from m1clip.search.calibration import CUTOFF, height, probabilities


@pytest.mark.parametrize("count", [50, 5000])
@pytest.mark.parametrize("scale", [1.0, 0.01])
def test_probability_depends_on_the_height_above_the_mean_only(count: int, scale: float) -> None:
    rng = np.random.default_rng(0)
    images = scale * rng.normal(size=(50, 8)).repeat(count // 50, axis=0) + 3.0
    moments, query = (images.mean(axis=0), np.cov(images.T, bias=True)), np.ones(8) / 8**0.5
    scores = query @ moments[0] + scale * np.array([0.0, 4.0, 8.0, 12.0])
    heights = height(scores, query, moments)
    spread = np.sqrt(images.var(axis=0).mean()) / scale
    np.testing.assert_allclose(heights, np.array([0, 4, 8, 12]) / spread, atol=1e-9)
    chance = probabilities(heights)
    assert (np.diff(chance) > 0).all()
    assert chance[0] < 0.05 < CUTOFF < chance[3]
