"""From the config to splits: caches, unreadable images, and the quick check before a run."""

import json
from pathlib import Path

import numpy as np
import pytest
from image_sets import break_files, make_set, plan
from small_run import command, small_config

from m1clip import console
from m1clip.config import DataConfig
from m1clip.data.array_view import ArrayView
from m1clip.data.decoding import LazyImages
from m1clip.data.images import Preprocess
from m1clip.data.prepare import (
    Split,
    choose_augmentation,
    crop_margin,
    load_split,
    often_mention_sides,
    open_data,
    quick_check,
)
from m1clip.errors import UserError
from m1clip.text.bpe import BpeTokenizer
from m1clip.training.workbench import prepare


def loaded(folder: Path | None, split: str, **more: object) -> Split:
    config = DataConfig(**({"source": (str(folder),)} if folder else {}), **more)  # type: ignore[arg-type]
    source = open_data(config, 24 if folder else 32, 0)
    preprocess = Preprocess(image_size=24)
    return load_split(source, split, config, BpeTokenizer(), 32, preprocess, 1.15, plan())


@pytest.mark.parametrize(
    ("cache", "kind"), [("disk", ArrayView), ("ram", ArrayView), ("off", LazyImages)]
)
def test_each_cache_gives_the_same_split(tmp_path: Path, cache: str, kind: type) -> None:
    folder = make_set(tmp_path / "set")
    break_files(folder, [1], split="val")
    split = loaded(folder, "val", cache=cache, max_unreadable=0.2)
    assert isinstance(split.images, kind)
    assert split.cache == cache
    assert [failure.index for failure in split.failures] == [1]
    assert len(split.images) == len(split.samples) == len(split.captions.first) - 1 == 7
    assert split.samples[1].id == "images/val-0002.jpg"
    lazy = LazyImages([sample.image for sample in split.samples], 28)
    np.testing.assert_array_equal(split.images.read(np.arange(7)), lazy.read(np.arange(7)))


def test_uncached_training_split_keeps_bad_images_and_names_them(tmp_path: Path) -> None:
    folder = make_set(tmp_path / "set")
    break_files(folder, [4])
    split = loaded(folder, "train", cache="off")
    assert len(split.samples) == len(split.images) == 40
    assert [failure.where[-14:] for failure in split.failures] == ["train-0004.jpg"]


def test_synthetic_and_few_images_write_nothing_to_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    monkeypatch.chdir(tmp_path)
    assert loaded(None, "val", synthetic_images=9).cache == "ram"
    assert loaded(make_set(tmp_path / "set"), "train").cache == "ram"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["set"]
    assert sorted(path.name for path in (tmp_path / "set").iterdir()) == [
        "captions.jsonl",
        "images",
    ]


def test_synthetic_images_are_scaled_up_for_a_model_with_larger_ones() -> None:
    config = DataConfig(synthetic_images=4)
    split = load_split(
        open_data(config, 260, 0),
        "val",
        config,
        BpeTokenizer(),
        32,
        Preprocess(image_size=260),
        1.0,
        plan(),
    )
    assert split.images.read(np.array([0])).shape == (1, 260, 260, 3)


def test_split_without_a_readable_image_is_a_one_line_error(tmp_path: Path) -> None:
    folder = make_set(tmp_path / "set")
    break_files(folder, range(8), split="val")
    with pytest.raises(UserError, match="none of the 8 val images can be read"):
        loaded(folder, "val", max_unreadable=1.0)


@pytest.mark.parametrize(
    ("image_size", "margin"), [(24, 1.15), (36, 40 / 36), (40, 1.0), (80, 1.0)]
)
def test_images_are_not_cached_larger_than_the_files(
    tmp_path: Path, image_size: int, margin: float
) -> None:
    # 52 x 40.
    samples = open_data(DataConfig(source=(str(make_set(tmp_path / "set")),)), 24, 0).samples(
        "train"
    )
    assert crop_margin(0.6, image_size, samples) == pytest.approx(margin)
    assert crop_margin(1.0, image_size, samples) == 1
    break_files(tmp_path / "set", range(20))
    assert crop_margin(0.6, image_size, samples) == pytest.approx(margin)
    break_files(tmp_path / "set", range(40))
    assert crop_margin(0.6, image_size, samples) == crop_margin(0.6, image_size) == 1.15


def test_quick_check_is_short_on_screen_and_complete_in_the_log(tmp_path: Path) -> None:
    folder = make_set(tmp_path / "set", train=20)
    break_files(folder, [1])
    break_files(folder, [2], data=b"")
    (folder / "images" / "train-0003.jpg").unlink()
    source = open_data(DataConfig(source=(str(folder),)), 24, 0)
    with console.record_warnings() as warnings:
        report = quick_check(source, 32)
    assert len(warnings) == 3
    assert quick_check(source, 4)["findings"] != report["findings"]
    assert warnings[2] == "data: 1 more finding; m1clip data lint shows all"
    assert report["verdict"] == "problems"
    assert {finding["code"] for finding in report["findings"]} == {
        "missing",
        "empty",
        "not-an-image",
    }
    json.dumps(report)


@pytest.mark.slow
def test_commands_lint_and_pack(tmp_path: Path) -> None:
    folder = make_set(tmp_path / "set")
    good = command("data", "lint", "set", cwd=tmp_path)
    assert (good.returncode, good.stderr) == (0, "")
    assert "56 images (train 40, val 8, test 8)" in good.stdout
    packed = command("data", "pack", "set", "shards", "--shard-size", "20", cwd=tmp_path)
    assert packed.stdout == "shards: 56 images (train 40, val 8, test 8) in 4 shards\n"
    break_files(folder, [1])
    bad = command("data", "lint", "set", "--json", cwd=tmp_path)
    assert bad.returncode == 1
    assert json.loads(bad.stdout)["verdict"] == "problems"
    assert command("data", "lint", "set", "--quick", cwd=tmp_path).returncode == 1
    wrong = command("data", "lint", "set", "--image-column", "nonsense", cwd=tmp_path)
    assert wrong.returncode == 2
    assert "no column 'nonsense'" in wrong.stderr
    assert "Traceback" not in wrong.stderr


@pytest.mark.parametrize(("tokenizer", "fraction"), [("char", 0.0), ("clip-bpe-pruned", 0.3)])
def test_char_tokenizer_has_no_word_dropout(
    tmp_path: Path, tokenizer: str, fraction: float
) -> None:
    folder = make_set(tmp_path / "set", train=16, val=2, test=2)
    config = small_config(
        {"data.source": str(folder), "data.cache": "ram", "model.tokenizer": tokenizer}
    )
    setup = prepare(config)
    assert setup.config.data.word_dropout == setup.training.augmentation.word_dropout == fraction


def test_captions_that_mention_left_and_right_disable_flips() -> None:
    photos = DataConfig(source=("photos",))
    everyday = ["a dog runs"] * 99 + ["a man turns left"]
    assert not often_mention_sides(everyday)
    assert often_mention_sides(["two cats on the left", "a red car on the right"])
    assert choose_augmentation(photos, mentions_sides=False).flip == 0.5
    assert choose_augmentation(photos, mentions_sides=True).flip == 0.0
    assert (
        choose_augmentation(DataConfig(source=("photos",), flip=0.3), mentions_sides=True).flip
        == 0.3
    )
