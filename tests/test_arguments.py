"""Words of the command line that cyclopts alone would misread."""

from __future__ import annotations

from pathlib import Path

import pytest

from m1clip.cli.main import layers, spelled_out
from m1clip.errors import UserError


def test_short_names_of_sections_are_spelled_out_for_train_alone() -> None:
    assert spelled_out(["train", "--model", "tiny", "--data=a", "--data.workers", "2"]) == [
        "train", "--model.preset", "tiny", "--data.source=a", "--data.workers", "2",
    ]  # fmt: skip
    assert spelled_out(["eval", "run", "--data", "a"]) == ["eval", "run", "--data", "a"]


@pytest.mark.parametrize("words", [["--steps", "2.5"], ["--batch=12.7"], ["--data.train-count", "1.0"]])
def test_a_fraction_is_no_whole_number(words: list[str]) -> None:
    with pytest.raises(UserError, match="must be a whole number"):
        layers(["train", *words])


def test_another_size_takes_the_place_of_the_whole_shape_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text('[model]\npreset = "tiny"\nvision_width = 64\nrecompute = true\n[train]\nsteps = 5\n')
    (same,) = layers(["train", "--config", str(file)])
    assert same.data["model.vision_width"] == 64
    (other,) = layers(["train", "--config", str(file), "--model.preset", "small"])
    assert "model.vision_width" not in other.data
    assert other.data["model.recompute"] is True
    assert other.data["train.steps"] == 5


def test_long_names_bring_the_settings_of_a_recipe_too(tmp_path: Path) -> None:
    (short,), (long,) = layers(["train", "--recipe", "frozen"]), layers(["train", "--transfer.recipe=frozen"])
    assert long.data == short.data
    assert long.data["train.epochs"] == 20
    (tmp_path / "config.json").write_text('{"towers": {}}')
    (short,) = layers(["train", "--init", str(tmp_path)])
    (long,) = layers(["train", "--transfer.init", str(tmp_path)])
    assert long.data == short.data
    assert long.data["optim.layer_decay"] == 0.8


def test_resume_takes_no_other_setting() -> None:
    assert layers(["train", "--resume", "runs/x"]) == ()
    with pytest.raises(UserError, match="leave out --steps"):
        layers(["train", "--resume", "runs/x", "--steps", "9"])
    with pytest.raises(UserError, match="not both"):
        layers(["train", "--config", "a", "--preset", "demo"])
