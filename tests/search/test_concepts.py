"""Taught words: found by their examples, combined with text, forgotten.

Duplicates in groups with the best first.
"""

import json
import shutil
import sqlite3
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from image_sets import image
from photos import make_photos, save_model
from small_run import exit_code

import m1clip
from m1clip.data.sources import open_source
from m1clip.errors import UserError
from m1clip.search import concepts, query
from m1clip.search.concepts import TEXT_ONLY, Choice, fit_concept, split_text
from m1clip.search.index import update_index
from m1clip.search.query_vectors import QueryEncoder


@pytest.fixture
def index(tmp_path: Path) -> m1clip.Index:
    photos = make_photos(tmp_path / "photos", 30)
    update_index(photos, save_model(tmp_path / "model"))
    return m1clip.Index(photos)


def test_folder_that_is_not_writable_is_not_reported_as_damage(
    index: m1clip.Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect = sqlite3.connect

    def connect_read_only(path: Path, **options: Any) -> sqlite3.Connection:
        return connect(f"file:{path}?mode=ro", uri=True, **options)

    monkeypatch.setattr(concepts.sqlite3, "connect", connect_read_only)
    with pytest.raises(UserError, match=r"cannot be written to.*check who may write") as error:
        index.teach("Rex", [1])
    assert "delete it" not in str(error.value)


def test_full_disk_is_not_reported_as_damage(
    index: m1clip.Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    index.teach("Rex", [1])
    connect = sqlite3.connect

    def connect_full(*args: Any, **options: Any) -> sqlite3.Connection:
        db = connect(*args, **options)
        db.execute("PRAGMA max_page_count = 1")
        return db

    with monkeypatch.context() as patch:
        patch.setattr(concepts.sqlite3, "connect", connect_full)
        with pytest.raises(UserError, match=r"concepts\.sqlite: the disk is full; free some space"):
            index.teach("a long name" * 500, range(1, 20))
    assert list(index.concepts.names()) == ["Rex"]


@pytest.mark.parametrize("count", [3, 10])
def test_head_separates_a_class_that_the_text_does_not(count: int) -> None:
    rng = np.random.default_rng(count)
    # Directions in which all images vary.
    wide = np.concatenate([np.full(8, 3.0), np.full(24, 0.3)])
    library, members = rng.normal(size=(500, 32)) * wide, rng.normal(size=(60, 32)) * wide
    members[:, 20] += 1.5
    library_stats = library.mean(axis=0), np.cov(library.T, bias=True)
    direction, choice = fit_concept(
        members[:count], np.zeros((0, 32)), library_stats, np.eye(32)[0], library
    )

    def above(direction: np.ndarray) -> float:
        """Probability that a new member scores above an image of the library."""
        return float((members[20:, None] @ direction > library @ direction).mean())

    assert choice.shrinkage < 1e6
    assert choice.text < 1
    prototype = members[:count].mean(axis=0) - library_stats[0]
    assert above(direction) > max(0.8, above(prototype) + 0.1)


class Library:
    """Vectors of which the first coordinate is what the text asks for, the second something that marks may share."""

    def __init__(self, text_knows: float) -> None:
        rng = np.random.default_rng(0)
        self.relevant = np.arange(1000) < 100
        self.vectors = rng.normal(size=(1000, 16))
        self.vectors[:, 0] += text_knows * self.relevant
        self.vectors[:, 1] *= 4  # most of the variance
        mean = self.vectors.mean(axis=0)
        self.library_stats = mean, (self.vectors - mean).T @ (self.vectors - mean) / 1000
        self.text = np.eye(16)[0]

    def fit(self, right: list[int], negative: list[int]) -> tuple[np.ndarray, Choice]:
        examples = self.vectors[right], self.vectors[negative]
        return fit_concept(*examples, self.library_stats, self.text, self.vectors)

    def precision(self, direction: np.ndarray, marked: list[int]) -> float:
        """Of the first 20 that are not marked."""
        order = np.argsort(-self.vectors @ direction)
        return float(self.relevant[order[~np.isin(order, marked)][:20]].mean())


@pytest.mark.parametrize("wrong_count", [0, 2])
def test_marks_that_would_rank_other_photos_worse_than_the_text_are_not_used(
    wrong_count: int,
) -> None:
    library = Library(text_knows=4.0)
    top = np.argsort(-library.vectors @ library.text)
    right = [int(row) for row in top if library.relevant[row]][:3]
    negative = [int(row) for row in top if not library.relevant[row]][:wrong_count]
    direction, choice = library.fit(right, negative)
    assert choice is TEXT_ONLY
    np.testing.assert_allclose(direction, library.text)


@pytest.mark.parametrize("seed", range(20))
def test_marks_of_top_results_keep_the_precision_of_the_text(seed: int) -> None:
    library = Library(text_knows=2.5)
    top = np.argsort(-library.vectors @ library.text)[:60]
    marked = [int(row) for row in np.random.default_rng(seed).permutation(top)[:5]]
    right = [row for row in marked if library.relevant[row]]
    negative = [row for row in marked if not library.relevant[row]]
    direction, _ = library.fit(right, negative)
    assert library.precision(direction, marked) >= library.precision(library.text, marked) - 0.1


def test_marks_that_rank_left_out_ones_better_than_the_text_are_used() -> None:
    library = Library(text_knows=0.0)
    library.vectors[library.relevant, 2] += 4.0  # known to the examples alone
    direction, choice = library.fit([0, 1, 2, 3], [200, 201])
    assert choice is not TEXT_ONLY
    assert library.precision(direction, [0, 1, 2, 3]) > library.precision(library.text, []) + 0.5


def test_single_example_counts_if_the_text_does_not_find_it() -> None:
    library = Library(text_knows=0.0)
    order = np.argsort(-library.vectors @ library.text)
    assert library.fit([int(order[0])], [])[1] is TEXT_ONLY
    assert library.fit([int(order[500])], [])[1] is not TEXT_ONLY
    # Nothing says what is right.
    assert library.fit([], [int(order[0]), int(order[1])])[1] is TEXT_ONLY


def test_marked_photos_are_first_and_last_and_others_keep_their_order(
    index: m1clip.Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(query, "has_probabilities", lambda _: True)
    before = [result.id for result in index.search("a dog", k=30)]
    assert all(result.probability is not None for result in index.search("a dog"))
    right, negative = before[1], before[0]
    index.mark("A  dog", right, True)
    index.mark("a dog", negative, False)
    results = index.search("a dog", k=30)
    others = [id_ for id_ in before if id_ not in (right, negative)]
    assert [result.id for result in results] == [right, *others, negative]
    # The text is calibrated, as it stays.
    assert (results[0].probability, results[-1].probability) == (1.0, 0.0)
    assert [result.id for result in index.search("a dog", k=4)] == [right, *others[:3]]
    assert [result.id for result in index.negatives("a dog")] == [negative]
    assert [result.id for result in index.search("a dog", k=30, exclude=["night"])][-1:] != [
        negative
    ]


def test_taught_word_finds_its_images_also_within_a_text(index: m1clip.Index) -> None:
    names = ["rex-0.png", "rex-1.png", "rex-2.png"]
    for number, name in enumerate(names):
        image(77, (52 + 20 * number, 40 + 20 * number)).save(index.root / name)
    update_index(index.root)
    index.teach("Rex", [index.root / name for name in names])
    assert {result.path for result in index.search("rex", k=3, collapse=False)} == set(names)
    names, rest = split_text("a Rex, on the T-Rex beach", ["T-Rex", "Rex"])
    assert (names, rest) == (["T-Rex", "Rex"], "a , on the beach")
    assert split_text("Rexona", ["Rex"]) == ([], "Rexona")
    parts, taught = index._encoder.parts("Rex at night", [], [])
    assert taught
    assert [weight for weight, _ in parts] == [1.0, 1.0]
    before = index.search("Rex").nearest[0]
    index.teach("Rex", [before.id], positive=False)  # marked as wrong
    assert index.concepts.names() == {"Rex": (2, 1)}
    assert index.search("Rex").nearest[0].path != before.path
    assert index.concepts.remove("REX") == 3
    assert index.concepts.names() == {}


def test_teach_and_duplicates_on_the_command_line(
    index: m1clip.Index, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--index", str(index.root)]
    shutil.copy(index.root / "a/0000.jpg", index.root / "copy.jpg")
    image(0, (208, 160)).save(index.root / "large.png")
    update_index(index.root)
    commands = (
        ["teach", "Rex", str(index.root / "a/0000.jpg"), str(index.root / "large.png"), *options],
        ["teach", *options],
        ["teach", "Rex", "--forget", *options],
        ["duplicates", str(index.root), "--json"],
    )
    for words in commands:
        assert exit_code(*words) == 0
    text, _, json_text = capsys.readouterr().out.partition("[")
    assert text.count("Rex: 2 photos with it") == 2
    assert "forgot Rex and its 2 examples" in text
    (group,) = json.loads("[" + json_text)
    assert [copy["path"] for copy in group] == ["large.png", "copy.jpg", "a/0000.jpg"]
    assert [copy["equal"] for copy in group] == [True, False, False]
    with pytest.raises(UserError, match="the file is missing"):
        index.teach("Rex", ["nowhere.jpg"])


def test_marks_cannot_control_the_terminal(
    index: m1clip.Index, capsys: pytest.CaptureFixture[str]
) -> None:
    index.mark("\x1b[2Jred \u202egpj", index.search("red")[0].id, True)
    assert exit_code("teach", "--index", index.root) == 0
    assert exit_code("teach", "\x1b[31mno", "--forget", "--index", index.root) == 2
    out, error = capsys.readouterr()
    assert out == "\\x1b[2Jred \\u202egpj: 1 photo with it\n"
    assert error.startswith("m1clip: \\x1b[31mno: was not taught")


@pytest.mark.parametrize(
    ("marked", "removed"),
    [("Éclair", "éclair"), ("red BALL", "Red ball"), ("a ball", "a  ball"), ("2*ball", "2*ball")],
)
def test_mark_is_removed_in_any_spelling(index: m1clip.Index, marked: str, removed: str) -> None:
    number = index.newest(20)[0].id
    index.mark(marked, number, False)
    assert index.marks(removed, [number]) == {number: False}
    assert [result.id for result in index.negatives(removed)] == [number]
    index.mark(removed, number, None)
    assert index.marks(marked, [number]) == {}
    assert index.negatives(marked) == []


def test_marks_are_captions_for_training(index: m1clip.Index, tmp_path: Path) -> None:
    ids = {photo.path: photo.id for photo in index.newest(20).nearest}
    index.mark('a "red", ball', ids["a/0002.jpg"], True)
    index.mark("A RED DOG", ids["a/0002.jpg"], False)  # a wrong one is no caption
    index.teach("Rex", [index.root / "b/0001.jpg"])
    assert exit_code("teach", "--captions", tmp_path / "marks.csv", "--index", index.root) == 0
    source = open_source(str(tmp_path / "marks.csv"))
    samples = [sample for split in source.splits() for sample in source.samples(split)]
    captions = {
        (Path(str(sample.image)).relative_to(index.root).as_posix(), *sample.captions)
        for sample in samples
    }
    assert captions == {("a/0002.jpg", 'a "red", ball'), ("b/0001.jpg", "Rex")}


def test_marks_hold_for_another_model_and_for_the_way_back(
    index: m1clip.Index, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ids = {photo.path: photo.id for photo in index.newest(30).nearest}
    right = [ids["a/0000.jpg"], ids["b/0001.jpg"]]
    for id_ in right:
        index.mark("Rex", id_, True)
    index.mark("Rex", ids["a/0002.jpg"], False)
    image(99).save(tmp_path / "elsewhere.png")
    index.teach("Rex", [tmp_path / "elsewhere.png"])  # not in the folder: no vector of a new model
    assert index.model_before is None

    other = save_model(tmp_path / "other", embed_dim=8)
    assert exit_code("index", index.root, "--model", other) == 0
    printed = capsys.readouterr().out
    assert "1 taught word fitted again to this model, from 3 marked photos" in printed
    assert "1 example of images that are not in this folder must be taught again" in printed
    assert exit_code("index", index.root) == 0
    assert "taught" not in capsys.readouterr().out, "only said when the model changes"
    new = m1clip.Index(index.root)
    assert new.concepts.names() == {"Rex": (2, 1)}
    positive, _ = new.concepts.examples()["Rex"]
    assert positive.shape == (2, new.dim)
    expected = np.stack([new.image_vector(id_) for id_ in right])
    assert positive == pytest.approx(expected, abs=1e-3)
    assert exit_code("teach", "--index", index.root) == 0
    assert "Rex: 1 example taught with another model" in capsys.readouterr().out

    new.mark("Rex", ids["a/0002.jpg"], True)  # marked anew
    new.mark("Rex", right[0], None)
    assert exit_code("index", index.root, "--back") == 0
    first = m1clip.Index(index.root)
    assert first.model_path == index.model_path
    assert first.marks("Rex", list(ids.values())) == {right[1]: True, ids["a/0002.jpg"]: True}
    assert first.concepts.names() == {"Rex": (3, 0)}  # with the one of elsewhere
    assert exit_code("index", index.root, "--back") == 0
    assert m1clip.Index(index.root).model_path == str(other)


def test_words_of_images_that_are_gone_are_not_said_to_be_fitted_again(
    index: m1clip.Index, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    image(99).save(tmp_path / "elsewhere.png")
    index.teach("Rex", [tmp_path / "elsewhere.png"])
    other = save_model(tmp_path / "other", embed_dim=8)
    assert exit_code("index", index.root, "--model", other) == 0
    printed = capsys.readouterr().out
    assert "1 example of images that are not in this folder must be taught again" in printed
    assert "fitted again" not in printed


def test_way_back_needs_a_model_before(index: m1clip.Index) -> None:
    assert exit_code("index", index.root, "--back") == 2


def test_teach_without_taught_words_prints_one_line(
    index: m1clip.Index, capsys: pytest.CaptureFixture[str]
) -> None:
    for taught in ("no word was taught yet; for example: m1clip teach", "Rex: 1 photo with it"):
        assert exit_code("teach", "--index", index.root) == 0
        (line,) = capsys.readouterr().out.splitlines()
        assert line.startswith(taught)
        index.teach("Rex", [1])


@pytest.mark.parametrize("knows", ["examples", "text"])
def test_teach_says_whether_the_examples_help(
    index: m1clip.Index,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    knows: str,
) -> None:
    photos = [index.root / f"a/000{number}.jpg" for number in (0, 2, 4)]
    examples = np.stack([index.image_vector(path) for path in photos])
    mean, _ = index.library_stats
    text = examples.mean(axis=0) - mean  # of a model that knows the word
    sign = 1 if knows == "text" else -1
    text *= sign / np.linalg.norm(text)
    index.teach("Tim", [1])  # of whom nothing is said
    index.teach("big rex", [index.root / "b/0001.jpg"], positive=False)
    monkeypatch.setattr(QueryEncoder, "query_vectors", lambda self, texts: text[None])
    assert exit_code("teach", " big  Rex", *photos, "--index", index.root) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "big rex: 3 photos with it, 1 without"
    assert m1clip.Index(index.root).uses_examples("BIG rex") == (knows == "examples")
    assert len(lines) == 2
    assert lines[1].startswith("now search for it") == (knows == "examples")
    assert lines[1].startswith("these examples find no further photos") == (knows == "text")


@pytest.fixture
def two_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """Two indexed folders, the first in the home folder and indexed last."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    last = make_photos(tmp_path / "home/Pictures", 3)
    other = make_photos(tmp_path / "other", 3)
    model = save_model(tmp_path / "model")
    for folder in (other, last):
        update_index(folder, model)
    return last, other


@pytest.mark.parametrize(
    "words", [["search", "dog", "--json"], ["teach"], ["duplicates", "--json"]], ids=" ".join
)
def test_index_of_another_folder_is_named_on_standard_error(
    two_folders: tuple[Path, Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
) -> None:
    last, other = two_folders
    assert exit_code(*words) == 0
    out, error = capsys.readouterr()
    assert error.startswith("index      ~/Pictures (indexed last; ")
    assert error.count("\n") == 1
    assert "Pictures (" not in out
    if words[0] == "search":
        assert json.loads(out)["root"] == str(last)
    monkeypatch.chdir(other / "a")
    assert exit_code(*words) == 0
    assert capsys.readouterr().err == ""


def test_index_that_was_asked_for_is_not_announced(
    two_folders: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    _, other = two_folders
    for words in (["search", "dog", "--index"], ["teach", "--index"], ["duplicates"]):
        assert exit_code(*words, other) == 0
        assert capsys.readouterr().err == ""


def test_word_is_taught_in_the_index_of_its_images(
    two_folders: tuple[Path, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    last, other = two_folders

    def words(folder: Path) -> list[str]:
        return list(m1clip.Index(folder).concepts.names())

    assert exit_code("teach", "Rex", other / "a/0000.jpg", other / "b/0001.jpg") == 0
    assert capsys.readouterr().err == (
        f"index      {other} (that of the images; --index chooses another)\n"
    )
    assert (words(last), words(other)) == ([], ["Rex"])
    image(99).save(tmp_path / "elsewhere/new.png")  # not indexed
    assert exit_code("teach", "Tim", "new.png") == 0
    assert "~/Pictures (indexed last; " in capsys.readouterr().err
    assert (words(last), words(other)) == (["Tim"], ["Rex"])


def test_images_of_several_indexes_need_a_choice(
    two_folders: tuple[Path, Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    last, other = two_folders
    assert exit_code("teach", "Rex", last / "a/0000.jpg", other / "a/0000.jpg") == 2
    assert "--index" in capsys.readouterr().err
    monkeypatch.chdir(last)
    assert exit_code("teach", "Rex", "a/0000.jpg", "--negative", other / "a/0000.jpg") == 2
    assert exit_code("teach", "Rex", other / "a/0000.jpg") == 2
    error = capsys.readouterr().err
    assert error.count(f"choose one with --index {last} or --index {other}\n") == 1
    assert error.count(f"choose one with --index {other} or --index {last}\n") == 1
    assert m1clip.Index(last).concepts.names() == m1clip.Index(other).concepts.names() == {}
    assert exit_code("teach", "Rex", other / "a/0000.jpg", "--index", last) == 0
    assert m1clip.Index(last).concepts.names() == {"Rex": (1, 0)}


def test_duplicates_of_a_folder_that_does_not_exist_are_an_error(
    two_folders: tuple[Path, Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    last, _ = two_folders
    monkeypatch.chdir(last)  # the folder above it has an index
    for words in (["duplicates", "nowhere"], ["search", "dog", "--index", "a/nowhere"]):
        assert exit_code(*words) == 2
        out, error = capsys.readouterr()
        assert (out, error) == ("", f"m1clip: {words[-1]}: no such folder\n")
