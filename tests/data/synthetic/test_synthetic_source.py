"""The source keeps the protocol; the folder it writes can be read with csv and PIL alone."""

from __future__ import annotations

import csv
import json
import pickle
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from m1clip.data.synthetic import source as write_module
from m1clip.data.synthetic.drawing import draw
from m1clip.data.synthetic.scene import Scene, Thing
from m1clip.data.synthetic.source import SyntheticSource, shares, write_folder
from m1clip.errors import UserError


@pytest.fixture(scope="module")
def source() -> SyntheticSource:
    return SyntheticSource(64, train=40, val=12, test=0, seed=1, captions_per_image=3)


def test_pairs_have_names_images_and_captions(source: SyntheticSource) -> None:
    assert source.splits() == ("train", "val")
    samples = source.samples("train")
    assert [sample.id for sample in samples[:2]] == ["train-000000", "train-000001"]
    assert len(samples) == 40
    assert len(source.samples("test")) == 0
    for sample in samples:
        assert len(set(sample.captions)) == 3
        image = sample.image.open()
        assert (image.mode, image.size) == ("RGB", (64, 64))


def test_scene_of_gives_what_is_drawn(source: SyntheticSource) -> None:
    sample = source.samples("val")[3]
    assert source.scene_of(sample.id) == sample.image.scene  # type: ignore[attr-defined]
    for wrong in ("val-999999", "dev-000000", "nonsense", "val--1"):
        with pytest.raises(UserError, match="no sample"):
            source.scene_of(wrong)


def test_a_image_pickles_small_and_opens_the_same(source: SyntheticSource) -> None:
    sample = source.samples("train")[0]
    packed = pickle.dumps(sample.image)
    assert len(packed) < 1000
    again = pickle.loads(packed)
    assert again.stamp() == sample.image.stamp()
    assert again.open(want=32).tobytes() == sample.image.open().tobytes()


def test_stamps_tell_images_sizes_and_seeds_apart(source: SyntheticSource) -> None:
    stamps = {p.image.stamp() for split in source.splits() for p in source.samples(split)}
    assert len(stamps) == 52
    for other in (SyntheticSource(48, 40, 12, 0, seed=1), SyntheticSource(64, 40, 12, 0, seed=2)):
        assert stamps.isdisjoint(p.image.stamp() for p in other.samples("train"))


def test_wrong_requests_are_refused(source: SyntheticSource) -> None:
    with pytest.raises(UserError, match="'dev'"):
        source.samples("dev")
    with pytest.raises(UserError, match="32 to 224"):
        SyntheticSource(16)
    with pytest.raises(UserError, match="at least one caption"):
        SyntheticSource(64, captions_per_image=0)
    with pytest.raises(UserError, match="seed"):
        SyntheticSource(64, seed=-1)


def _rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_a_folder_is_readable_by_anyone(tmp_path: Path) -> None:
    steps: list[tuple[int, int]] = []
    folder = tmp_path / "a set"
    done = write_folder(folder, 20, image_size=48, seed=2, captions_per_image=4, progress=lambda *s: steps.append(s))
    assert done.images == {"train": 16, "val": 2, "test": 2}
    assert (done.captions, done.negatives) == (80, 20 * 12)
    assert str(done).endswith("20 images (train 16, val 2, test 2), 80 captions, 240 negatives")
    assert steps == [(n, 20) for n in range(1, 21)]
    assert sorted(p.name for p in folder.iterdir()) == ["captions.csv", "images", "negatives.csv", "scenes.jsonl"]

    source = SyntheticSource(48, 16, 2, 2, seed=2, captions_per_image=4)
    expected = {p.id: p for split in source.splits() for p in source.samples(split)}
    rows = _rows(folder / "captions.csv")
    assert len(rows) == 80
    for row in rows:
        sample = expected[Path(row["image"]).stem]
        assert row["split"] == sample.id.split("-")[0]
        assert row["caption"] == sample.captions[int(row["caption_index"])]
        with Image.open(folder / row["image"]) as image:
            assert np.array_equal(np.asarray(image.convert("RGB")), np.asarray(sample.image.open()))

    facts = [json.loads(line) for line in (folder / "scenes.jsonl").read_text(encoding="utf-8").splitlines()]
    assert len(facts) == 20
    for fact in facts:
        scene = Scene(tuple(Thing(**thing) for thing in fact["things"]), fact["time"])
        assert scene == source.scene_of(Path(fact["image"]).stem)

    true = {(row["image"], row["caption"]) for row in rows}
    wrong = _rows(folder / "negatives.csv")
    assert {row["difficulty"] for row in wrong} == {"easy", "medium", "hard"}
    assert not true & {(row["image"], row["caption"]) for row in wrong}


@pytest.mark.parametrize(("count", "parts"), [(3, (1, 1, 1)), (10, (8, 1, 1)), (240, (192, 24, 24)), (14, (12, 1, 1))])
def test_images_are_shared_out(count: int, parts: tuple[int, int, int]) -> None:
    assert tuple(shares(count).values()) == parts


def test_too_few_images_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="at least 3"):
        write_folder(tmp_path / "x", 2)
    assert not (tmp_path / "x").exists()


def test_a_folder_with_something_in_it_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("keep")
    with pytest.raises(UserError, match="name a new folder"):
        write_folder(tmp_path, 5)
    with pytest.raises(UserError, match="is a file"):
        write_folder(tmp_path / "mine.txt", 5)
    assert [p.name for p in tmp_path.iterdir()] == ["mine.txt"]


def test_a_broken_write_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(write_module, "negatives", fail)
    with pytest.raises(OSError, match="disk full"):
        write_folder(tmp_path / "set", 5, image_size=32)
    assert not (tmp_path / "set" / "captions.csv").exists()


def test_an_empty_folder_that_exists_is_used(tmp_path: Path) -> None:
    write_folder(tmp_path, 3, image_size=32)
    assert (tmp_path / "captions.csv").exists()


def test_the_image_is_the_drawing(source: SyntheticSource) -> None:
    image = source.samples("train")[0].image
    assert np.array_equal(np.asarray(image.open()), draw(image.scene, 64, image.seed))  # type: ignore[attr-defined]
