"""Splits hold out combinations, samples follow the protocol, and other tools can read the folder."""

from __future__ import annotations

import pickle
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from m1clip.data.sources import open_source
from m1clip.data.synthetic.scene import CATEGORIES, COLORS, KINDS, Scene
from m1clip.data.synthetic.source import (
    SPLITS,
    SyntheticImage,
    SyntheticSource,
    looks,
    sample_scenes,
    scenes_available,
    split_of,
    write_folder,
)
from m1clip.errors import UserError


def _splits_in(scene: Scene) -> list[str]:
    return [split_of(thing.kind, thing.color) for thing in scene.things]


def test_kinds_and_colors_are_spread_evenly_over_the_splits() -> None:
    assert Counter(kind.category for kind in KINDS.values()) == dict.fromkeys(CATEGORIES, 6)
    assert {split: len(looks(split)) for split in SPLITS} == {"train": 144, "val": 24, "test": 24}
    assert set(Counter(kind for kind, _ in looks("train")).values()) == {6}
    assert set(Counter(color for _, color in looks("train")).values()) == {18}
    for split in ("val", "test"):
        assert set(Counter(color for _, color in looks(split)).values()) == {3}
        # Two colors per kind: with one, the kind would determine the color.
        assert set(Counter(kind for kind, _ in looks(split)).values()) == {2}
        assert len({kind for kind, _ in looks(split)}) == 12


def test_train_never_shows_a_held_out_combination_and_val_always_does() -> None:
    for scene in sample_scenes("train", 3000, seed=1):
        assert set(_splits_in(scene)) == {"train"}
    for split in ("val", "test"):
        for scene in sample_scenes(split, 1500, seed=1):
            assert _splits_in(scene).count(split) == 1
            assert set(_splits_in(scene)) <= {split, "train"}


def test_scenes_are_distinct_and_use_every_attribute_value() -> None:
    sampled = [scene for split in SPLITS for scene in sample_scenes(split, 2500, seed=5)]
    assert len(set(sampled)) == len(sampled)
    train = sample_scenes("train", 3000, seed=0)
    things = [thing for scene in train for thing in scene.things]
    assert {thing.kind for thing in things} == set(KINDS)
    assert {thing.color for thing in things} == set(COLORS)
    assert {scene.category for scene in train} == set(CATEGORIES)
    assert sum(len(scene.things) == 2 for scene in train) == 1500
    assert sample_scenes("train", 3000, seed=0) == train != sample_scenes("train", 3000, seed=5)


def test_no_more_scenes_than_there_are() -> None:
    singles, doubles = scenes_available("val", 1), scenes_available("val", 2)
    assert singles == 24 * 4 * 2 * 4 * 4
    every = sample_scenes("val", 2 * singles + 10, seed=0)
    assert sum(len(scene.things) == 1 for scene in every) == singles
    with pytest.raises(UserError, match=f"{singles + doubles:,}"):
        sample_scenes("val", singles + doubles + 1, seed=0)


@pytest.fixture(scope="module")
def source() -> SyntheticSource:
    return SyntheticSource(64, train=40, val=12, test=0, seed=1)


def test_samples_have_ids_captions_and_images_that_pickle_small(source: SyntheticSource) -> None:
    assert source.splits() == ("train", "val")
    samples = source.samples("train")
    assert [sample.id for sample in samples[:2]] == ["train-000000", "train-000001"]
    assert (len(samples), len(source.samples("test"))) == (40, 0)
    for sample in samples:
        assert len(set(sample.captions)) == 5
        assert isinstance(sample.image, SyntheticImage)
        assert source.scene_of(sample.id) == sample.image.scene
    image = samples[0].image
    packed = pickle.dumps(image)
    assert len(packed) < 1000
    assert pickle.loads(packed).stamp() == image.stamp()
    assert pickle.loads(packed).open(want=32).tobytes() == image.open().tobytes()


def test_stamps_depend_on_image_size_and_seed(source: SyntheticSource) -> None:
    stamps = {sample.image.stamp() for split in source.splits() for sample in source.samples(split)}
    assert len(stamps) == 52
    for other in (SyntheticSource(48, 40, 12, 0, seed=1), SyntheticSource(64, 40, 12, 0, seed=2)):
        assert stamps.isdisjoint(sample.image.stamp() for sample in other.samples("train"))


def test_wrong_requests_are_refused(source: SyntheticSource) -> None:
    with pytest.raises(UserError, match="'dev'"):
        source.samples("dev")
    with pytest.raises(UserError, match="32 to 224"):
        SyntheticSource(16)
    with pytest.raises(UserError, match="seed"):
        SyntheticSource(64, seed=-1)


def test_the_folder_has_the_same_images_and_captions_as_the_source(tmp_path: Path) -> None:
    steps: list[tuple[int, int]] = []
    folder = tmp_path / "a set"
    done = write_folder(folder, 20, image_size=48, seed=2, progress=lambda *s: steps.append(s))
    assert done.endswith("a set: 20 images (train 16, val 2, test 2), 100 captions")
    assert steps == [(n, 20) for n in range(1, 21)]
    expected, written = SyntheticSource(48, 16, 2, 2, seed=2), open_source(str(folder))
    for split in SPLITS:
        for one, other in zip(expected.samples(split), written.samples(split), strict=True):
            assert one.captions == other.captions
            np.testing.assert_array_equal(one.image.open(), other.image.open())


@pytest.mark.parametrize(("count", "train"), [(3, 1), (10, 8), (14, 12)])
def test_every_split_has_images(tmp_path: Path, count: int, train: int) -> None:
    assert f"train {train}, val 1, test 1" in write_folder(tmp_path, count, image_size=32)  # an empty folder is used


def test_only_an_empty_folder_is_written_to(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("keep")
    for folder, count, message in (
        (tmp_path, 5, "choose a new one"),
        (tmp_path / "mine.txt", 5, "choose a new one"),
        (tmp_path / "x", 2, "at least 3"),
    ):
        with pytest.raises(UserError, match=message):
            write_folder(folder, count)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_an_interrupted_write_leaves_no_captions(tmp_path: Path) -> None:
    def fail(*_: object) -> None:
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_folder(tmp_path / "set", 5, image_size=32, progress=fail)
    assert not (tmp_path / "set" / "captions.csv").exists()
