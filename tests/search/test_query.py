"""Search is exact, filters and combines queries, and lists near-duplicates with their best."""

import itertools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from image_sets import image
from photos import make_photos, save_model
from small_run import exit_code

import m1clip
from m1clip.cli.search import _show, _suggest_sentence
from m1clip.errors import UserError
from m1clip.model.named import EXPORT_REPORT, exported_from
from m1clip.search import indexed_files, match, query_vectors, reader
from m1clip.search.concepts import Choice
from m1clip.search.index import update_index
from m1clip.search.indexed_files import duplicate_groups
from m1clip.search.match import CUTOFF, probabilities, zscore
from m1clip.search.query import Index
from m1clip.search.query_vectors import NOT_WEIGHT
from m1clip.search.results import Filter, Result, Results


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve photos of twelve months in two folders, and copies of the first."""
    folder = tmp_path_factory.mktemp("library")
    photos = make_photos(folder / "photos", 12)
    for number, path in enumerate(sorted(photos.rglob("*.jpg"))):
        os.utime(path, (0, 1_700_000_000 + 86_400 * 31 * number))
    image(0, (104, 80)).save(photos / "larger.png")
    update_index(photos, save_model(folder / "model"))
    return photos


def test_search_equals_brute_force(photos: Path) -> None:
    index = m1clip.Index(photos)
    query = np.asarray(index.model.encode_text("a dog on a beach"))[0]
    results = index.search("a dog on a beach", k=5, collapse=False)
    paths = sorted(path for path in photos.rglob("*.*") if path.suffix in (".jpg", ".png"))
    scores = np.asarray(index.model.encode_image(paths)) @ query
    best = [paths[best_index] for best_index in np.argsort(-scores)[:5]]
    assert [photos / result.path for result in results.nearest] == best
    assert [result.score for result in results.nearest] == pytest.approx(
        np.sort(scores)[::-1][:5], abs=1e-3
    )
    assert results.searched == len(index) == 13


def test_near_duplicates_are_grouped_with_best_result(photos: Path) -> None:
    results = Index(photos).search(like=[photos / "a/0000.jpg"], k=20)
    assert results.nearest[0].path == "a/0000.jpg"
    assert results.nearest[0].copies == ("larger.png",)
    assert len(results.nearest) == 12
    assert (
        len(Index(photos).search(like=[photos / "a/0000.jpg"], k=20, collapse=False).nearest) == 13
    )


@given(
    st.lists(st.integers(0, 12), max_size=30),
    st.sets(st.tuples(st.integers(0, 12), st.integers(0, 12))),
)
def test_groups_are_connected_and_equal_images_are_compared_once(
    looks: list[int], alike: set[tuple[int, int]]
) -> None:
    compared: list[bytes] = []

    def pairs(images: list[tuple[bytes, bytes]]) -> Iterator[list[int]]:
        compared.extend(look for look, _ in images)
        for i, j in itertools.combinations(range(len(images)), 2):
            if {(images[i][0][0], images[j][0][0]), (images[j][0][0], images[i][0][0])} & alike:
                yield [i, j]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(indexed_files, "near_duplicates", pairs)
        groups = duplicate_groups([(bytes([look]), b"") for look in looks])
    assert len(compared) == len(set(looks))
    expected = {index: {index} for index in range(len(looks))}
    for _ in looks:
        for i, j in itertools.combinations(range(len(looks)), 2):
            if looks[i] == looks[j] or {(looks[i], looks[j]), (looks[j], looks[i])} & alike:
                expected[i] = expected[j] = expected[i] | expected[j]
    assert groups == sorted(
        sorted(group) for group in {frozenset(group) for group in expected.values()}
    )


@pytest.mark.parametrize(
    ("where", "count"),
    [
        (Filter(), 13),
        (Filter(since="2024"), 11),
        (Filter(since="2023-12", until="2024-02"), 3),
        (Filter(until="2023"), 2),
        (Filter(since="2023-12-15", until="2023-12-15"), 1),
        (Filter(subfolder="a"), 6),
        (Filter(subfolder="./b/"), 6),
        (Filter(subfolder="c"), 0),
        (Filter(orientation="portrait"), 0),
        (Filter(orientation="landscape", min_side=50), 1),
    ],
)
def test_filters(photos: Path, where: Filter, count: int) -> None:
    assert len(Index(photos).search("x", where=where, collapse=False).nearest) == count


def test_sums_and_differences_of_queries(photos: Path) -> None:
    index = Index(photos)
    parts, taught = index._encoder.parts({"red": 1.0, "night": 2.0}, [3], ["dog"])
    assert not taught
    assert [weight for weight, _ in parts] == [1.0, 1.0, 2.0, NOT_WEIGHT]
    query = index._encoder.combine(parts)
    scores = sum(
        w * (index.vectors @ v) / np.std(index.vectors.astype(np.float32) @ v) for w, v in parts
    )
    correlation = np.corrcoef(scores, index.vectors.astype(np.float32) @ query)[0, 1]
    assert correlation > 0.999  # each part counts by its weight, whatever the spread of its scores
    same = index.search(["red", "2*night"], like=[3], exclude=["dog"])
    assert (
        same.nearest[0]
        == index.search({"red": 1, "night": 2}, like=[3], exclude=["dog"]).nearest[0]
    )
    with pytest.raises(UserError, match="an empty query"):
        index.search()


@pytest.mark.parametrize("weight", ["0", "0.0", "1001", "9" * 39, "9" * 400])
def test_weight_without_a_meaning_is_a_user_error(photos: Path, weight: str) -> None:
    with pytest.raises(
        UserError, match=r"^dog: its weight must be above 0 and at most 1,000, not "
    ):
        Index(photos).search([f"{weight}*dog"])
    with pytest.raises(UserError, match="its weight must be"):
        Index(photos).search({"dog": float("nan")})


def test_results_are_a_sequence_with_relative_and_absolute_paths(photos: Path) -> None:
    results = Index(photos).search("a dog", k=5)
    assert len(results) == 5
    assert list(results) == results.nearest
    assert results[0] is results.nearest[0]
    for result in results:
        assert result.file == str(photos / result.path)
        assert os.path.isabs(result.file)
    for group in Index(photos).duplicates():
        assert all(copy.file == str(photos / copy.path) for copy in group)


@pytest.mark.parametrize(
    "date", ["2024-13", "2024-02-30", "2024-5", "24", "0000", "２０２４", "tomorrow"]
)
def test_only_dates_of_the_calendar_are_accepted(date: str) -> None:
    for field in ("since", "until"):
        with pytest.raises(
            UserError, match=f"--{field} {date}: give a date as 2024, 2024-05 or 2024-05-31"
        ):
            Filter(**{field: date})
    Filter("2024", "2024-02-29")


def test_copies_count_as_images_in_every_number(tmp_path: Path) -> None:
    photos = make_photos(tmp_path / "photos", 3)
    shutil.copy(photos / "a/0000.jpg", photos / "a/copy.jpg")
    update_index(photos, save_model(tmp_path / "model"))
    index = Index(photos)
    assert len(index) == index.search("x").searched == 4
    assert index.search("x", where=Filter(subfolder="a")).searched == 3
    (photos / "b/0001.jpg").unlink()
    update_index(photos)
    assert len(index) == index.search("x").searched == 3  # its vector may still be in the file


def test_folder_as_a_text_is_an_error_with_a_hint(
    photos: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(photos)
    for words in (["dog", "a"], ["a", "dog"], ["dog", str(photos)], [str(photos)]):
        assert exit_code("search", *words) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        assert "is a folder; to search in it: --index" in error
    for words in (["a"], ["dog", "1*a"]):  # the word
        assert exit_code("search", *words) == 0


def test_several_words_without_quotes_are_mentioned(
    photos: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def printed(*words: str) -> tuple[str, str]:
        assert exit_code("search", *words, "--index", photos) == 0
        return capsys.readouterr()

    for more in ([], ["--json"]):
        out, error = printed("birthday", "cake", *more)
        assert error == 'note       2 texts combined; for a phrase: "birthday cake"\n'
        assert "combined" not in out
    for words in (["cake"], ["birthday cake"], ["birthday cake", "dog"], ["2*birthday", "cake"]):
        assert printed(*words)[1] == ""


def test_changed_model_is_refused(tmp_path: Path) -> None:
    photos, model = make_photos(tmp_path / "photos", 2), save_model(tmp_path / "model")
    update_index(photos, model)
    save_model(model)  # the same weights: only the times differ
    assert Index(photos).search("a").nearest
    save_model(model, embed_dim=8)
    with pytest.raises(UserError, match="has changed since"):
        Index(photos).search("a")


def test_search_without_results_says_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    photos = make_photos(tmp_path / "photos", 2)
    update_index(photos, save_model(tmp_path / "model"))

    def printed(*options: str) -> str:
        assert exit_code("search", "a", "--index", photos, *options) == 0
        return capsys.readouterr().out.strip()

    assert printed("--since", "2999") == "no image passes the filters"
    for path in photos.rglob("*.jpg"):
        path.unlink()
    update_index(photos)
    assert printed() == "no image is left in the indexed folder"
    if find_spec("pyarrow"):
        with pytest.raises(UserError, match="no image is left"):
            Index(photos).export(tmp_path / "vectors.parquet")


def test_exported_vectors_are_those_of_the_index(photos: Path, tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    index = Index(photos)
    for folder in (tmp_path, Path("/")):
        with pytest.raises(UserError, match="is a folder; give the name of a file"):
            index.export(folder)
    assert index.export(tmp_path / "vectors.parquet") == 13
    table = parquet.read_table(tmp_path / "vectors.parquet").to_pylist()
    best = max(
        table,
        key=lambda row: float(np.dot(row["vector"], index.image_vector(photos / "b/0003.jpg"))),
    )
    assert (best["path"], best["width"], best["height"]) == ("b/0003.jpg", 52, 40)


WITHOUT_TORCH = """
import sys

class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ImportError("this command must not import torch")

sys.meta_path.insert(0, NoTorch())
from m1clip.__main__ import main
main()
"""


def test_commands_on_an_onnx_folder_run_without_torch(photos: Path, tmp_path: Path) -> None:
    for name in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(name)
    from m1clip.export.layouts import export

    copied = shutil.copytree(photos, tmp_path / "photos")
    onnx = export(Path(Index(photos).model_path), "onnx", tmp_path / "onnx")
    commands = {
        "index": [copied, "--model", onnx],
        "search": ["a dog", "--index", copied, "--count", "3", "--all", "--json"],
        "duplicates": [copied],
        "classify": [copied / "a" / "0000.jpg", "--labels", "a dog,a beach", "--model", onnx],
    }
    output = {}
    for command, words in commands.items():
        arguments = [sys.executable, "-c", WITHOUT_TORCH, command, *map(str, words)]
        done = subprocess.run(arguments, capture_output=True, text=True, timeout=600, check=False)
        assert done.returncode == 0, f"{command}: {done.stderr}"
        output[command] = done.stdout
    expected = [result.path for result in Index(photos).search("a dog", k=3).nearest]
    assert [result["path"] for result in json.loads(output["search"])["nearest"]] == expected
    assert "13 (" in output["index"]
    assert len(output["classify"].splitlines()) == 2


@pytest.mark.parametrize("original", [None, "runs/frozen", "general"])
def test_other_models_than_general_rank_and_claim_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], original: str | None
) -> None:
    """Random weights, whose best results are no better than those of everyday words."""
    photos = make_photos(tmp_path / "photos", 6)
    model = save_model(tmp_path / "model")
    if original is not None:
        (model / EXPORT_REPORT).write_text(json.dumps({"model": original}), encoding="utf-8")
    update_index(photos, model)
    is_known = original == "general"
    index = Index(photos)
    assert index.has_probabilities is is_known
    results = index.search("a dog on a beach", k=3)
    assert results.has_probabilities is is_known
    assert all((result.probability is not None) is is_known for result in results)
    assert exit_code("search", "a dog on a beach", "--index", str(photos), "-k", "3") == 0
    printed = capsys.readouterr()
    heading = f"nearest of 6 images (which of them match is not known with {model}):"
    assert (printed.out.splitlines()[0] == heading) is not is_known
    assert ("%" in printed.out) is is_known
    words = ["search", "a dog on a beach", "--index", str(photos), "--json", "--all"]
    assert exit_code(*words) == 0
    read = json.loads(capsys.readouterr().out)
    assert (read["matches"] is None) is not is_known
    assert (read["possible"] is None) is not is_known


def test_damaged_report_of_an_export_names_no_model(tmp_path: Path) -> None:
    for text in ("{", "[]", '{"model": ["general"]}', '{"model": "a\\u0000"}', "[" * 100_000):
        (tmp_path / EXPORT_REPORT).write_text(text, encoding="utf-8")
        assert exported_from(tmp_path) is None
        assert not match.has_probabilities(tmp_path)


@pytest.mark.parametrize(
    ("transfer", "is_known"),
    [
        ({"recipe": "frozen", "heads": "general"}, True),
        ({"recipe": "frozen", "init": "general"}, True),
        ({"recipe": "frozen", "init": "first"}, True),
        ({"recipe": "frozen", "heads": "cca"}, False),
        ({"recipe": "finetune", "init": "general"}, False),
        ({"recipe": "scratch"}, False),
        ({"recipe": "frozen", "init": "run"}, False),
    ],
)
def test_probabilities_hold_for_heads_that_were_adapted_from_general(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, transfer: dict[str, str], is_known: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    for run, settings in (("first", {"recipe": "frozen", "heads": "general"}), ("run", transfer)):
        (tmp_path / run / "best").mkdir(parents=True)
        lines = [f'{name} = "{value}"' for name, value in settings.items()]
        (tmp_path / run / "config.toml").write_text("\n".join(["[transfer]", *lines]))
    assert match.has_probabilities("first")
    assert match.has_probabilities("run/best") is is_known
    assert not match.has_probabilities("run/model"), "it may have been trained for too long"
    (tmp_path / "run" / "config.toml").write_text("[transfer")
    assert not match.has_probabilities("run"), "a damaged config"


def test_command_line(
    photos: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(photos / "a")  # a folder below the indexed one
    for words in (["red", "--not", "dog", "-k", "3"], ["--like", "0000.jpg", "-k", "3", "--json"]):
        assert exit_code("search", *words) == 0
    text, _, json_text = capsys.readouterr().out.partition("{")
    heading, *listed = text.splitlines()
    assert heading.startswith("nearest of 13 images (which of them match is not known with ")
    assert len(listed) == 3
    read = json.loads("{" + json_text)
    assert (read["nearest"][0]["path"], read["matches"], read["possible"]) == (
        "a/0000.jpg",
        None,
        None,
    )
    for words in (["x", "--since", "May"], [], ["x", "--index", "/nowhere"]):
        assert exit_code("search", *words) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        assert error.startswith("m1clip: ")


@pytest.mark.parametrize("count", [50, 5000])
@pytest.mark.parametrize("scale", [1.0, 0.01])
def test_probability_depends_on_the_zscore_only(count: int, scale: float) -> None:
    rng = np.random.default_rng(0)
    images = scale * rng.normal(size=(50, 8)).repeat(count // 50, axis=0)
    words = rng.normal(size=(5, 8))
    library_stats = images.mean(axis=0), np.cov(images.T, bias=True)
    of_words = images @ words.T
    spread = np.sqrt(of_words.var(axis=0).mean())
    scores = of_words.mean() + spread * np.array([0.0, 3.0, 6.0, 9.0])
    zscores = zscore(scores, words, library_stats)
    np.testing.assert_allclose(zscores, [0, 3, 6, 9], atol=1e-9)
    chance = probabilities(zscores)
    assert (np.diff(chance) > 0).all()
    assert chance[0] < 0.05 < CUTOFF < chance[3]


def test_one_image_is_compared_with_the_spread_of_the_words() -> None:
    rng = np.random.default_rng(0)
    image, *words = rng.normal(size=(11, 16)) / 4
    stats = image, np.zeros((16, 16))
    of_words = np.stack(words) @ image
    scores = of_words.mean() + of_words.std() * np.array([-2.0, 0.0, 2.0])
    np.testing.assert_allclose(zscore(scores, np.stack(words), stats), [-2, 0, 2])


def test_many_matching_images_do_not_hide_each_other() -> None:
    """The score of a query is as high in a library that is full of its subject."""
    rng = np.random.default_rng(0)
    query, *words = np.linalg.qr(rng.normal(size=(16, 16)))[0]
    others = rng.normal(size=(200, 16)) / 4
    others -= np.outer(others @ query, query)
    zscores = []
    for fraction in (0.01, 0.9):
        library = others.copy()
        library[: round(200 * fraction)] += query
        stats = library.mean(axis=0), np.cov(library.T, bias=True)
        zscores.append(zscore(np.array([1.0]), np.stack(words), stats)[0])
    assert zscores[1] > 0.9 * zscores[0]


LESS = "1 nearest image of less than 20% not listed (--all lists them)"


@pytest.mark.parametrize(
    ("chances", "printed"),
    [
        ((0.6, 0.3), [" 60%   0.500  0.jpg", "less likely:", " 30%   0.500  1.jpg"]),
        (
            (0.6, 0.1, 0.1),
            [
                " 60%   0.500  0.jpg",
                "2 nearest images of less than 20% not listed (--all lists them)",
            ],
        ),
        (
            (0.3, 0.2, 0.1),
            [
                "no sure match in 9 images; perhaps:",
                " 30%   0.500  0.jpg",
                " 20%   0.500  1.jpg",
                LESS,
            ],
        ),
        (
            (0.1, 0.1, 0.1, 0.1),
            [
                "nothing here matches, in 9 images; the nearest, all unlikely:",
                *(f" 10%   0.500  {number}.jpg" for number in range(3)),
                LESS,
            ],
        ),
        ((None,), [" 0.500  0.jpg"]),
    ],
)
def test_results_are_sure_or_possible_or_nothing_matches(
    chances: tuple[float | None, ...], printed: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    results = [
        Result(i, f"{i}.jpg", f"/{i}.jpg", 0.5, chance, 1, 1, "", 1)
        for i, chance in enumerate(chances)
    ]
    results_ = Results(results, 9)
    _show(results_, results_.possible, {}, filtered=False)
    assert capsys.readouterr().out.splitlines() == printed


def test_marked_results_say_so_instead_of_a_probability(capsys: pytest.CaptureFixture[str]) -> None:
    chances = (1.0, 0.9, 0.0)
    results = Results(
        [Result(i, f"{i}", f"/{i}", 0.5, c, 1, 1, "", 1) for i, c in enumerate(chances)], 9
    )
    _show(results, results.nearest, {0: True, 2: False}, filtered=False)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "       0.500  0  (marked by you)"
    assert lines[1] == " 90%   0.500  1"
    assert lines[3] == "       0.500  2  (marked by you as wrong)"


@pytest.mark.parametrize(
    ("texts", "is_suggested"),
    [
        (("dog",), True),
        (("a dog",), False),
        (("dog", "cat"), False),
        (("2*dog",), False),
        ((), False),
    ],
)
def test_scene_is_suggested_for_a_single_word(
    texts: tuple[str, ...], is_suggested: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    _suggest_sentence(texts)
    printed = capsys.readouterr()
    assert printed.out == ""
    assert ("describe a scene" in printed.err) is is_suggested


def test_missing_image_is_reported_before_the_model_is_loaded(
    photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(m1clip, "load", lambda _: pytest.fail("the model"))
    with pytest.raises(UserError, match=r"nothere\.jpg"):
        Index(photos).search(like=["nothere.jpg"])


@pytest.fixture
def own_photos(photos: Path, tmp_path: Path) -> Path:
    """A copy whose marks no other test sees."""
    return Path(shutil.copytree(photos, tmp_path / "photos", symlinks=True))


def test_marks_are_read_back_changed_and_removed(own_photos: Path) -> None:
    index = Index(own_photos)
    first, second, third = index.search("x").nearest[:3]
    ids = [first.id, second.id, third.id]
    assert index.marks("dog", ids) == {}
    index.mark("dog", first.id, True)
    index.mark("dog", second.id, False)
    assert index.marks("dog", ids) == {first.id: True, second.id: False}
    assert index.marks("cat", ids) == {}
    assert index.captions() == [(str(own_photos / first.path), "dog")], "of right images only"
    index.mark("dog", first.id, None)
    index.mark("dog", second.id, True)
    assert index.marks("dog", ids) == {second.id: True}
    assert index.captions() == [(str(own_photos / second.path), "dog")]


def test_text_of_taught_words_alone_adds_no_other_vector(
    own_photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = Index(own_photos)
    taught = np.eye(index.dim, dtype=np.float32)[0]
    index.mark("rex", index.search("x").nearest[0].id, True)
    monkeypatch.setattr(query_vectors, "fit_concept", lambda *_: (taught, Choice(0.5, 1.0)))

    def parts(text: str) -> list[tuple[float, list[float]]]:
        found, uses_examples = index._encoder.parts(text, (), ())
        assert uses_examples
        return [(weight, vector.tolist()) for weight, vector in found]

    assert parts("rex") == [(1.0, taught.tolist())]
    rest = np.asarray(index._encoder.query_vectors(["on a beach"])[0])
    assert parts("rex on a beach") == [(1.0, taught.tolist()), (1.0, rest.tolist())]


def test_vector_of_a_result_is_the_stored_one(photos: Path) -> None:
    index = Index(photos)
    result = index.search("x").nearest[0]
    vector = index.image_vector(result.id)
    assert np.linalg.norm(vector) == pytest.approx(1, abs=2e-3)
    encoded = np.asarray(index.model.encode_image([photos / result.path]))[0]
    assert vector == pytest.approx(encoded, abs=2e-3)
    with pytest.raises(UserError, match="no longer in the index"):
        index.image_vector(10**6)
    with pytest.raises(UserError, match="a vector of 3 values"):
        index.image_vector(np.zeros(3, np.float32))


@pytest.mark.parametrize("change", ["removed", "other length"])
def test_vectors_replaced_while_the_index_is_open_are_reported(
    photos: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    index = Index(photos)
    assert index.search("x").nearest
    stored = reader.vectors_of

    def replaced(*arguments: Any) -> Any:
        file = stored(*arguments)
        if change == "removed":
            return None
        file.dim += 1
        return file

    monkeypatch.setattr(reader, "vectors_of", replaced)
    index._reader.version = -1  # as after another process has written to the database
    with pytest.raises(UserError, match=r"index\.sqlite: was replaced while it was open"):
        index.search("x")
