"""31: the scaling study: 200M, 500M and 1B, by prediction here and by measurement on the H200."""

import json
from pathlib import Path

from m1clip.bench.steps import Configuration, size_of

RESULTS = Path(__file__).parents[3] / "docs" / "results" / "h200" / "comparison.json"
MODELS = ("200M", "500M", "1B")


def test_parameters_and_operations_grow_with_the_name() -> None:
    sizes = [size_of(Configuration(model, 1, "cpu", "fp32")) for model in MODELS]
    for (parameters, flops), expected in zip(sizes, (200e6, 500e6, 1e9), strict=True):
        assert 0.95 < parameters / expected < 1.1
        assert flops > 2 * parameters
    assert sorted(sizes) == sizes


def test_study_has_measured_steps_of_all_three() -> None:
    text = json.dumps(json.loads(RESULTS.read_text()))
    for model in MODELS:
        assert f'"{model}"' in text
