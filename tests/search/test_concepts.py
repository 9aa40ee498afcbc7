"""Taught words: found by their examples, combined with text, forgotten; duplicates in groups with the best first."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from image_sets import image
from photos import make_photos, save_model
from small_run import exit_code

import m1clip
from m1clip.data.sources import open_source
from m1clip.errors import UserError
from m1clip.search.concepts import fit_concept, split_text
from m1clip.search.index import update_index


@pytest.fixture
def index(tmp_path: Path) -> m1clip.Index:
    photos = make_photos(tmp_path / "photos", 30)
    update_index(photos, save_model(tmp_path / "model"))
    return m1clip.Index(photos)


@pytest.mark.parametrize("count", [3, 10])
def test_head_separates_a_class_that_the_text_does_not(count: int) -> None:
    rng = np.random.default_rng(count)
    wide = np.concatenate([np.full(8, 3.0), np.full(24, 0.3)])  # directions in which all images vary
    library, members = rng.normal(size=(500, 32)) * wide, rng.normal(size=(60, 32)) * wide
    members[:, 20] += 1.5
    moments = library.mean(axis=0), np.cov(library.T, bias=True)
    direction, choice = fit_concept(members[:count], np.zeros((0, 32)), moments, np.eye(32)[0])

    def above(direction: np.ndarray) -> float:
        """Probability that a new member scores above an image of the library."""
        return float((members[20:, None] @ direction > library @ direction).mean())

    assert choice["shrinkage"] < 1e6
    assert choice["text"] < 1
    prototype = members[:count].mean(axis=0) - moments[0]
    assert above(direction) > max(0.8, above(prototype) + 0.1)


def test_taught_word_finds_its_images_also_within_a_text(index: m1clip.Index) -> None:
    paths = [index.root / f"a/{number:04d}.jpg" for number in (0, 2, 4)]
    index.teach("Rex", paths)
    assert {each.path for each in index.search("rex", k=3).nearest} == {f"a/{n:04d}.jpg" for n in (0, 2, 4)}
    names, rest = split_text("a Rex, on the T-Rex beach", ["T-Rex", "Rex"])
    assert (names, rest) == (["T-Rex", "Rex"], "a , on the beach")
    assert split_text("Rexona", ["Rex"]) == ([], "Rexona")
    assert [weight for weight, _ in index._parts("Rex at night", [], [], index.concepts.examples())] == [1.0, 1.0]
    before = index.search("Rex").nearest[0]
    index.teach("Rex", [before.id], good=False)  # marked as wrong
    assert index.concepts.names() == {"Rex": (2, 1)}
    assert index.search("Rex").nearest[0].path != before.path
    assert index.concepts.remove("REX") == 3
    assert index.concepts.names() == {}


def test_teach_and_duplicates_on_the_command_line(index: m1clip.Index, capsys: pytest.CaptureFixture[str]) -> None:
    place = ["--in", str(index.root)]
    shutil.copy(index.root / "a/0000.jpg", index.root / "copy.jpg")
    image(0, (208, 160)).save(index.root / "large.png")
    update_index(index.root)
    commands = (
        ["teach", "Rex", str(index.root / "a/0000.jpg"), str(index.root / "large.png"), *place],
        ["teach", *place],
        ["teach", "Rex", "--forget", *place],
        ["duplicates", str(index.root), "--json"],
    )
    for words in commands:
        assert exit_code(*words) == 0
    text, _, found = capsys.readouterr().out.partition("[")
    assert text.count("Rex: 2 examples") == 2
    assert "forgot Rex and its 2 examples" in text
    (group,) = json.loads("[" + found)
    assert [copy["path"] for copy in group] == ["large.png", "copy.jpg", "a/0000.jpg"]
    assert [copy["equal"] for copy in group] == [True, False, False]
    with pytest.raises(UserError, match="the file is missing"):
        index.teach("Rex", ["nowhere.jpg"])


def test_marks_are_captions_for_training(index: m1clip.Index, tmp_path: Path) -> None:
    ids = {each.path: each.id for each in index.newest(20).nearest}
    index.mark('a "red", ball', ids["a/0002.jpg"], True)
    index.mark("A RED DOG", ids["a/0002.jpg"], False)  # a wrong one is no caption
    index.teach("Rex", [index.root / "b/0001.jpg"])
    assert exit_code("teach", "--captions", tmp_path / "marks.csv", "--in", index.root) == 0
    source = open_source(str(tmp_path / "marks.csv"))
    samples = [sample for split in source.splits() for sample in source.samples(split)]
    found = {(Path(str(sample.image)).relative_to(index.root).as_posix(), *sample.captions) for sample in samples}
    assert found == {("a/0002.jpg", 'a "red", ball'), ("b/0001.jpg", "Rex")}
