"""Probabilities of results: fitted weights are the most likely ones, and follow the library's size and the captions."""

from __future__ import annotations

import numpy as np
import pytest

from m1clip.search.calibration import CAPTIONS, CUTOFF, WEIGHTS, fit_weights, probabilities, standard_scores


def test_fitted_weights_predict_the_fraction_that_is_right() -> None:
    rng = np.random.default_rng(0)
    standard = np.concatenate([np.ones((200_000, 1)), rng.normal(size=(200_000, 2))], axis=1)
    true = np.array([-1.0, 1.5, 0.5])
    right = rng.random(len(standard)) < probabilities(standard, 20, true)
    found = fit_weights(standard, right, 20, np.ones(len(right)))
    np.testing.assert_allclose(found, true, atol=0.06)
    chance = probabilities(standard, 20, found)
    for low, high in ((0, 0.05), (0.05, 0.2), (0.2, 0.5), (0.5, 1)):
        inside = (chance >= low) & (chance < high)
        assert right[inside].mean() == pytest.approx(chance[inside].mean(), abs=0.02)


def test_standard_scores_compare_with_the_library_and_the_captions() -> None:
    rng = np.random.default_rng(1)
    images, captions, query = rng.normal(size=(500, 8)), rng.normal(size=(60, 8)), rng.normal(size=8)
    moments = images.mean(axis=0), np.cov(images.T, bias=True)
    found = standard_scores(images @ query, query, images, moments, captions)
    assert found[:, 1].max() < 4
    np.testing.assert_allclose([found[:, 1].mean(), found[:, 1].std()], [0, 1], atol=1e-9)
    unrelated = images[3] @ captions.T
    assert found[3, 2] == pytest.approx((images[3] @ query - unrelated.mean()) / unrelated.std())


def test_a_result_must_be_more_unusual_in_a_larger_library() -> None:
    standard = np.array([[1.0, 3.0, 2.0], [1.0, 4.0, 2.0]])
    small, large = probabilities(standard, 100), probabilities(standard, 100_000)
    assert (small > large).all()
    assert (np.diff([small, large], axis=1) > 0).all()
    assert len(set(CAPTIONS)) == 512
    assert min(WEIGHTS[1:]) > 0
    assert 0 < CUTOFF < 0.5
