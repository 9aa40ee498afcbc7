"""Exact search: equal to brute force in float64, whichever library computes the fast scores."""

import sys

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from m1clip.search import nearest as module
from m1clip.search.nearest import nearest


@pytest.fixture(params=["torch", "numpy"])
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What computes the fast scores: torch if a search can see that it is loaded."""
    if request.param == "numpy":
        monkeypatch.delitem(sys.modules, "torch", raising=False)
    return str(request.param)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.integers(1, 400),
    st.integers(1, 24),
    st.integers(1, 60),
    st.integers(0, 2**32 - 1),
    st.booleans(),
    st.booleans(),
)
def test_nearest_equals_brute_force_in_float64(
    library: str, n: int, dim: int, k: int, seed: int, coarse: bool, filtered: bool
) -> None:
    rng = np.random.default_rng(seed)
    vectors = rng.normal(size=(n, dim))
    vectors = np.round(vectors) + 1e-3 if coarse else vectors  # many ties and near-ties
    vectors = (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float16)
    query = rng.normal(size=dim).astype(np.float32)
    query /= np.linalg.norm(query)
    rows = np.flatnonzero(rng.random(n) < 0.5) if filtered else None
    exact = vectors.astype(np.float64) @ query.astype(np.float64)
    candidates = np.arange(n) if rows is None else rows
    expected = candidates[np.lexsort((candidates, -exact[candidates]))][:k]
    rows_found, scores = nearest(vectors, query, k, rows)
    assert rows_found.tolist() == expected.tolist()
    np.testing.assert_array_equal(scores, exact[expected])


def test_error_of_the_fast_scores_is_below_its_bound(library: str) -> None:
    rng = np.random.default_rng(0)
    vectors = rng.normal(size=(20_000, 256))  # more than one block
    vectors = (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float16)
    # Zeros and subnormal numbers.
    vectors[0, :9] = [0, -0.0, 6e-8, -6e-8, 6.1e-5, -6.1e-5, 0.1, -0.1, 0.05]
    query = vectors[7].astype(np.float32)
    scores, bound = module._fast_scores(vectors, query)
    error = np.abs(scores - vectors.astype(np.float64) @ query.astype(np.float64)).max()
    assert error <= bound < {"torch": 2e-3, "numpy": 1e-4}[library]


def test_inaccurate_fast_scores_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    vectors = rng.normal(size=(500, 8)).astype(np.float16)
    monkeypatch.setattr(module, "_fast_scores", lambda v, q: (rng.normal(size=len(v)), 1e-3))
    query = np.ones(8, np.float32)
    rows_found, _ = nearest(vectors, query, 5)
    assert rows_found.tolist() == np.argsort(-(vectors.astype(np.float64) @ query))[:5].tolist()


def test_vectors_that_are_not_finite_are_an_error(library: str) -> None:
    vectors = np.eye(4, dtype=np.float16)
    vectors[2, 1] = np.nan
    with pytest.raises(FloatingPointError, match="not finite"):
        nearest(vectors, np.ones(4, np.float32), 2)
    assert nearest(vectors, np.ones(4, np.float32), 2, np.array([0, 3]))[0].tolist() == [0, 3]


def test_widened_bits_are_the_values_of_every_finite_float16() -> None:
    halves = np.arange(2**16, dtype=np.uint16).view(np.float16)
    halves = halves[np.isfinite(halves)]
    widened = module._widen(halves, np.empty(len(halves), np.int32))
    np.testing.assert_array_equal(widened.astype(np.float64) * 2.0**112, halves.astype(np.float64))
