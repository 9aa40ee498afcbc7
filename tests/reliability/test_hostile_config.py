"""Promise 10: a hostile config gives one line, and changes no existing files."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from bounded import bounded, files_under
from image_sets import make_set
from small_run import run_small

from m1clip.cli.main import main
from m1clip.config import load_config


@pytest.mark.parametrize(
    "text",
    [
        "a = " + "[" * 100_000,
        "a = " + "9" * 10_000,
        'data = "x"',
        "[[data]]",
        "seed = 1e999",
        "\ufeff\0",
        "a.b.c.d = 1",
        '[data]\nsource = ["\\u0000"]',
        "[train]\nsteps = " + "1_" * 3000 + "1",
    ],
)
def test_untrusted_config_gives_one_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.toml").write_text(text)
    result = bounded(lambda: load_config(tmp_path / "config.toml"))
    assert result.startswith("UserError") or (result == "ok" and "source" in text), result


def test_cache_dir_of_an_untrusted_config_keeps_other_files(tmp_path: Path) -> None:
    data = make_set(tmp_path / "set", train=16, val=4, test=4)
    victim = tmp_path / "victim"
    victim.mkdir()
    for name in ("precious.txt", "pixels.npy", "bad.json"):
        (victim / name).write_text("mine")
    before = files_under(victim)
    changes = {"data.source": [str(data)], "data.cache": "disk", "data.cache_dir": str(victim)}
    run_small(tmp_path / "run", {**changes, "train.steps": 2})
    made = {name.partition("/")[0] for name in files_under(victim) - before}
    assert made, "the cache was written there"
    assert all(re.search(r"[0-9a-f]{8}", name) for name in made), made
    assert all((victim / name).read_text() == "mine" for name in before)


SIZES = (
    "image-size",
    "patch-size",
    "vision-width",
    "vision-layers",
    "text-width",
    "text-layers",
    "context-length",
)


@pytest.mark.parametrize(
    "words",
    [
        *(f"--{name} {value}" for name in (*SIZES, "embed-dim") for value in ("1000000000", "-1")),
        "--vision-width 16384 --vision-layers 256",
        "--image-size 4096 --patch-size 1",
        "--workers 100000",
        "--workers 200",
        "--threads 100000",
        "--synthetic-images 100000000000",
        "--recipe frozen --embed-dim 1000000000",
    ],
)
def test_absurd_sizes_are_a_one_line_error_before_the_model_is_created(
    tmp_path: Path, words: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("m1clip.training.run.usable_cpus", lambda: 4)

    def refused() -> None:
        with pytest.raises(SystemExit) as end:
            main(["train", "--out", "run", "--steps", "1", "--device", "cpu", *words.split()])
        assert end.value.code == 2

    assert bounded(refused) == "ok"
    error = capfd.readouterr().err
    assert error.startswith("m1clip: "), error
    assert error.count("\n") == 1, error
    assert re.search(
        "must be a|patches per side|billion parameters|this machine has|cannot be split|multiple",
        error,
    )
    assert not (tmp_path / "run").exists()
