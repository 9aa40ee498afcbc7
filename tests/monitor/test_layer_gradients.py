"""The rule for vanishing and exploding gradients.

tests/training/test_step_analyses.py judges real models.
"""

import pytest

from m1clip.monitor.layer_gradients import gradient_problems


def tower(*norms: float | str, side: str = "image") -> dict[str, float | str]:
    return {f"{side}/block {number}": norm for number, norm in enumerate(norms, start=1)}


@pytest.mark.parametrize(
    ("norms", "words"),
    [
        (tower(1e-6, 1e-4, 0.01, 1.0), "image tower vanish towards its input: 1e-6 in block 1, 1 "),
        (tower(900.0, 1.0, 0.01, side="text"), "text tower explode towards its input: 0.01 in bl"),
        (tower(0.1, "nan", 0.1), "image tower explode: not finite in block 2"),
        (tower("inf", 0.1), "image tower explode: not finite in block 1"),
        (tower(0.0, 0.0), "image tower vanish: they are 0 in every block"),
        (tower(0.0, 0.5), "image tower vanish towards its input: 0 in block 1, 0.5 in block 2"),
    ],
)
def test_problem_of_a_tower_is_named(norms: dict[str, float | str], words: str) -> None:
    (problem,) = gradient_problems({**norms, "image/head": 1.0, "scale": 1e-9})
    assert words in problem


def test_healthy_towers_have_no_verdict() -> None:
    healthy = tower(0.02, 0.1, 0.3, 0.05) | tower(0.4, 0.1, side="text")
    assert gradient_problems({**healthy, "image/input": 1e-9, "text/head": 1e9, "scale": 0.0}) == []
    assert gradient_problems(tower(5.0)) == []
    assert gradient_problems({}) == []


def test_both_towers_are_judged() -> None:
    assert len(gradient_problems(tower(1e-9, 1.0) | tower(1.0, 1e-9, side="text"))) == 2
