"""tools/general_data.py, which collects the data of the model in the box from clones."""

import csv
import importlib.util
import io
import json
import subprocess
from pathlib import Path
from types import ModuleType

import pytest
from image_sets import image

TOOL = Path(__file__).parents[2] / "tools" / "general_data.py"


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("general_data", TOOL)
    assert spec is not None
    assert spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    return tool


def repository(folder: Path, *commits: dict[str, bytes]) -> Path:
    """A repository with one commit for each set of files."""
    git = ["git", "-C", str(folder), "-c", "user.name=x", "-c", "user.email=x@example.com"]
    folder.mkdir(parents=True)
    subprocess.run([*git, "init", "-q"], check=True)
    for files in commits:
        for name, content in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)
        for command in (["add", "."], ["commit", "-q", "-m", "x"]):
            subprocess.run([*git, *command], check=True)
    return folder


@pytest.mark.parametrize(
    ("alt", "text"),
    [
        ("This photo shows a dog on a beach.", "a dog on a beach."),
        ("A black and white photograph of two men in hats.", "two men in hats."),
        ("Photo (a) shows a large crowd of people.", "a large crowd of people."),
        ("Picture of a red car &amp; a house", "a red car & a house"),
        ("Two children read a book in a library.", "Two children read a book in a library."),
        ("This image depicts a mother cat with kittens.", "a mother cat with kittens."),
        ("A graph shows the number of dogs.", None),
        ("A dog", None),
    ],
)
def test_alternative_text_of_a_photograph(tool: ModuleType, alt: str, text: str | None) -> None:
    assert tool.plain_alt(alt, drawings=False) == text


def test_book_with_drawings_needs_the_word_photograph(tool: ModuleType) -> None:
    assert tool.plain_alt("A dog sits on a chair.", drawings=True) is None
    assert tool.plain_alt("A photo of a dog on a chair.", drawings=True) == "a dog on a chair."


def test_books_give_each_photograph_once(tool: ModuleType, tmp_path: Path) -> None:
    module = b"""<media id="x" alt="A photo of a dog on a chair.">
        <image mime-type="image/jpeg" src="../../media/dog.jpg"/></media>
        <media alt="The same photo of a dog."><image src="../../media/copy.jpg"/></media>
        <media alt="A photo that is not there."><image src="../../media/none.jpg"/></media>"""
    files = {"modules/m1/index.cnxml": module, "media/dog.jpg": b"dog", "media/copy.jpg": b"dog"}
    books = {"osbooks-x": tool.Clone(repository(tmp_path / "osbooks-x", files))}
    ((_, split, content, captions),) = tool.book_images(books)
    assert (split, content, captions) == ("train", b"dog", ["a dog on a chair."])


FREE = b"Attribution 4.0 International\n"
NOT_FREE = b"Attribution-NonCommercial-ShareAlike 4.0 International\n"


def test_book_is_read_from_its_last_commit_under_cc_by(tool: ModuleType, tmp_path: Path) -> None:
    book = repository(
        tmp_path / "book",
        {"LICENSE": FREE, "a.jpg": b"first"},
        {"a.jpg": b"second"},
        {"LICENSE": NOT_FREE, "a.jpg": b"third"},
        {"a.jpg": b"fourth"},
    )
    assert tool.Clone(book, tool.last_free_commit(book)).read("a.jpg") == b"second"


def test_book_that_is_under_cc_by_is_read_from_its_last_commit(
    tool: ModuleType, tmp_path: Path
) -> None:
    book = repository(tmp_path / "book", {"LICENSE": FREE}, {"a.jpg": b"last"})
    assert tool.Clone(book, tool.last_free_commit(book)).read("a.jpg") == b"last"


def test_book_that_was_never_under_cc_by_is_not_read(tool: ModuleType, tmp_path: Path) -> None:
    never = repository(tmp_path / "never", {"LICENSE": NOT_FREE, "a.jpg": b"image"})
    assert tool.last_free_commit(never) is None
    assert tool.last_free_commit(repository(tmp_path / "none", {"a.jpg": b"image"})) is None


def test_images_of_test_splits_are_in_no_train_split(
    tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "general_ids.json").write_text(json.dumps({"train": [1], "test": [2]}))
    (tmp_path / "coco_ids.json").write_text(json.dumps({"train": [4], "val": [], "test": [3]}))
    monkeypatch.setattr(tool, "BENCHMARKS", tmp_path)
    monkeypatch.setattr(tool, "MORE_CAPTIONS", {"more": "more.json"})
    monkeypatch.setattr(tool, "CAPTION_TABLES", {})
    numbers = range(1, 6)
    images = {f"train2017/{number:012d}.jpg": b"%d" % number for number in numbers}
    table = b"image_id,id,caption\n1,1,one\n2,2,two\n"
    more = [{"image": f"val2014/COCO_val2014_{n:012d}.jpg", "caption": [f"{n}\n"]} for n in numbers]
    clones = {
        tool.IMAGES: tool.Clone(repository(tmp_path / "a", images)),
        tool.CAPTIONS: tool.Clone(repository(tmp_path / "b", {"coco_captions.csv": table})),
        "more": tool.Clone(repository(tmp_path / "c", {"more.json": json.dumps(more).encode()})),
    }
    assert tool.write_captions(tmp_path / "out", tool.coco_images(clones)) == 4
    with (tmp_path / "out" / "captions.csv").open(newline="", encoding="utf-8") as file:
        rows = [
            (int(row["image"][-16:-4]), row["split"], row["caption"])
            for row in csv.DictReader(file)
        ]
    assert rows == [(1, "train", "one"), (2, "test", "two"), (4, "train", "4"), (5, "train", "5")]
    assert (tmp_path / "out" / "images" / f"{5:012d}.jpg").read_bytes() == b"5"


def test_tables_add_images_that_have_no_captions_yet(
    tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables = {"a": ("a.csv", "image_id", "prompt"), "b": ("b.csv", "file_name", "text")}
    monkeypatch.setattr(tool, "CAPTION_TABLES", tables)
    first = b"image_id,prompt\n000000000001,known\n2,A  dog.\n3,A cat.\n"
    second = b"file_name,text\nCOCO_val2014_000000000002.jpg,A dog.\nx_000000000003.jpg,Two cats\n"
    clones = {
        "a": tool.Clone(repository(tmp_path / "a", {"a.csv": first})),
        "b": tool.Clone(repository(tmp_path / "b", {"b.csv": second})),
    }
    texts = tool.add_tables({1: ["one"]}, clones)
    assert texts == {1: ["one"], 2: ["A dog."], 3: ["A cat.", "Two cats"]}


def test_images_that_look_like_one_of_a_folder_are_left_out(
    tool: ModuleType, tmp_path: Path
) -> None:
    known = image(1, size=(300, 200))
    known.save(tmp_path / "known.jpg")
    rows = []
    for name, picture in (("copy", known.resize((180, 120))), ("other", image(2, size=(300, 200)))):
        content = io.BytesIO()
        picture.save(content, "JPEG")
        rows.append((f"{name}.jpg", "train", content.getvalue(), [name]))
    left = list(tool.without_copies(rows, tmp_path))
    assert [(name, split, captions) for name, split, _, captions in left] == [
        ("other.jpg", "val", ["other"])
    ]


def test_other_books_are_those_of_the_list(tool: ModuleType) -> None:
    assert tool.is_other_book("openstax+osbooks-physics")
    assert tool.is_other_book("osbooks-physics")
    assert not tool.is_other_book("openstax+osbooks-university-physics-bundle")
