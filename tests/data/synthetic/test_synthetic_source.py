"""The synthetic source: held-out combinations, samples, and the written folder."""

import pickle
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from m1clip import console
from m1clip.data.sources import open_source
from m1clip.data.synthetic import source as synthetic
from m1clip.data.synthetic.scene import COLORS, KINDS, SCENE_TABLES
from m1clip.errors import UserError


def test_kinds_and_colors_are_spread_evenly_over_the_splits() -> None:
    assert Counter(kind.category for kind in KINDS.values()) == dict.fromkeys(
        SCENE_TABLES["grounds"], 6
    )
    assert {split: len(synthetic.looks(split)) for split in synthetic.SPLITS} == {
        "train": 144,
        "val": 24,
        "test": 24,
    }
    assert set(Counter(kind for kind, _ in synthetic.looks("train")).values()) == {6}
    assert set(Counter(color for _, color in synthetic.looks("train")).values()) == {18}
    for split in ("val", "test"):
        assert set(Counter(color for _, color in synthetic.looks(split)).values()) == {3}
        # Two colors per kind: with one, the kind would determine the color.
        assert set(Counter(kind for kind, _ in synthetic.looks(split)).values()) == {2}
        assert len({kind for kind, _ in synthetic.looks(split)}) == 12


def test_scenes_are_distinct_and_held_out_combinations_are_never_in_train() -> None:
    sampled = {split: synthetic.sample_scenes(split, 2500, seed=5) for split in synthetic.SPLITS}
    every = [scene for scenes in sampled.values() for scene in scenes]
    assert len(set(every)) == len(every)
    for split, scenes in sampled.items():
        for scene in scenes:
            shown = [synthetic.split_of(thing.kind, thing.color) for thing in scene.things]
            assert set(shown) == {"train"} if split == "train" else shown.count(split) == 1
            assert set(shown) <= {split, "train"}
    train = sampled["train"]
    things = [thing for scene in train for thing in scene.things]
    assert {thing.kind for thing in things} == set(KINDS)
    assert {thing.color for thing in things} == set(COLORS)
    assert sum(len(scene.things) == 2 for scene in train) == 1250
    assert (
        synthetic.sample_scenes("train", 2500, seed=5)
        == train
        != synthetic.sample_scenes("train", 2500, seed=0)
    )


def test_too_many_scenes_are_rejected() -> None:
    singles, doubles = synthetic.scenes_available("val", 1), synthetic.scenes_available("val", 2)
    assert singles == 24 * 4 * 2 * 4 * 4
    every = synthetic.sample_scenes("val", 2 * singles + 10, seed=0)
    assert sum(len(scene.things) == 1 for scene in every) == singles
    with pytest.raises(UserError, match=f"{singles + doubles:,}"):
        synthetic.sample_scenes("val", singles + doubles + 1, seed=0)


@pytest.fixture(scope="module")
def source() -> synthetic.SyntheticSource:
    return synthetic.SyntheticSource(64, train=40, val=12, test=0, seed=1)


def test_samples_have_ids_captions_and_images_that_pickle_small(
    source: synthetic.SyntheticSource,
) -> None:
    assert source.splits() == ("train", "val")
    samples = source.samples("train")
    assert [sample.id for sample in samples[:2]] == ["train-000000", "train-000001"]
    assert len(samples) == 40
    for sample in samples:
        assert len(set(sample.captions)) == 5
        assert isinstance(sample.image, synthetic.SyntheticImage)
        assert source.scene_of[sample.id] == sample.image.scene
    image = samples[0].image
    packed = pickle.dumps(image)
    assert len(packed) < 1000
    assert pickle.loads(packed).stamp() == image.stamp()
    assert pickle.loads(packed).open(min_side=32).tobytes() == image.open().tobytes()


def test_stamps_depend_on_image_size_and_seed(source: synthetic.SyntheticSource) -> None:
    stamps = {sample.image.stamp() for split in source.splits() for sample in source.samples(split)}
    assert len(stamps) == 52
    for other in (
        synthetic.SyntheticSource(48, 40, 12, 0, seed=1),
        synthetic.SyntheticSource(64, 40, 12, 0, seed=2),
    ):
        assert stamps.isdisjoint(sample.image.stamp() for sample in other.samples("train"))


def test_invalid_arguments_are_rejected(source: synthetic.SyntheticSource) -> None:
    with pytest.raises(UserError, match="'dev'"):
        source.samples("dev")
    with pytest.raises(UserError, match="32 to 224"):
        synthetic.SyntheticSource(16)
    with pytest.raises(UserError, match="seed"):
        synthetic.SyntheticSource(64, seed=-1)


def test_folder_has_the_same_images_and_captions_as_the_source(tmp_path: Path) -> None:
    steps: list[tuple[int, int]] = []
    folder = tmp_path / "a set"
    with console.on_progress(lambda *step: steps.append(step)):
        done = synthetic.write_folder(folder, 20, image_size=48, seed=2)
    assert done.endswith("a set: 20 images (train 16, val 2, test 2), 100 captions")
    assert steps == [(n, 20) for n in range(1, 21)]
    expected, written = synthetic.SyntheticSource(48, 16, 2, 2, seed=2), open_source(str(folder))
    for split in synthetic.SPLITS:
        for one, other in zip(expected.samples(split), written.samples(split), strict=True):
            assert one.captions == other.captions
            np.testing.assert_array_equal(one.image.open(), other.image.open())


def test_every_split_has_images_and_only_an_empty_folder_is_written_to(tmp_path: Path) -> None:
    for count, train in ((3, 1), (10, 8), (14, 12)):
        assert f"train {train}, val 1, test 1" in synthetic.write_folder(
            tmp_path / str(count), count, image_size=32
        )
    (tmp_path / "mine.txt").write_text("keep")
    before = sorted(tmp_path.rglob("*"))
    for folder, count, message in (
        (tmp_path, 5, "choose a new one"),
        (tmp_path / "mine.txt", 5, "choose a new one"),
        (tmp_path / "x", 2, "at least 3"),
    ):
        with pytest.raises(UserError, match=message):
            synthetic.write_folder(folder, count)
    assert sorted(tmp_path.rglob("*")) == before


def test_interrupted_write_leaves_nothing_and_the_same_command_works_again(tmp_path: Path) -> None:
    def fail(done: int, total: int) -> None:
        if done == 2:
            raise OSError("disk full")

    with console.on_progress(fail), pytest.raises(OSError, match="disk full"):
        synthetic.write_folder(tmp_path / "set", 5, image_size=32)
    assert not list((tmp_path / "set").iterdir())
    assert "5 images" in synthetic.write_folder(tmp_path / "set", 5, image_size=32)


def test_images_of_another_process_are_not_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both find the folder empty, and one is faster."""
    real = Path.mkdir

    def after_another(path: Path, *arguments: Any, **options: Any) -> None:
        real(path, parents=True)
        (path / "train-000000.png").touch()
        real(path, *arguments, **options)

    monkeypatch.setattr(Path, "mkdir", after_another)
    with pytest.raises(FileExistsError):
        synthetic.write_folder(tmp_path / "set", 5, image_size=32)
    assert (tmp_path / "set" / "images" / "train-000000.png").exists()
