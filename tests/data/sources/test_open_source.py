"""Format detection, missing libraries and Hugging Face folders."""

import importlib
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from small_run import exit_code
from source_helpers import everything, image_bytes

from m1clip.data import sources
from m1clip.data.lint import lint
from m1clip.data.sources import (
    FORMATS,
    DataFormat,
    DataPath,
    DataSource,
    Options,
    formats,
    open_source,
)
from m1clip.data.sources.base import Row
from m1clip.errors import UserError

Write = Callable[[Iterable[str]], Path]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("", "the path to the data is empty"),
        ("nowhere", "no such file"),
        ("owner/name", "hf:owner/name"),
        ("csv:gone.csv", r"gone\.csv: cannot be read"),
        ("cvs:gone", r"'cvs' is not a format; did you mean csv:\? \(formats: hf, webdataset, "),
        ("kohya:photos", r"'kohya' is not a format \(formats: hf, webdataset, "),
        ("C:/photos", "no such file"),
        ("a\0b", "no such file"),
        (".", "the folder is empty: it has no images and no captions"),
    ],
)
def test_missing_and_unknown_paths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spec: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=message):
        open_source(spec)


@pytest.mark.parametrize("byte", [b"\0", b'"', b",", b"\x80"])
@pytest.mark.parametrize("name", ["t.csv", "t.tsv", "t.jsonl", "t.json", "t.txt", "t.tar"])
def test_large_file_of_one_byte_is_a_one_line_error(tmp_path: Path, byte: bytes, name: str) -> None:
    (tmp_path / name).write_bytes(byte * 200_000)
    with pytest.raises(UserError, match=name) as caught:
        open_source(str(tmp_path / name))
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("name", ["t.parquet", "hf:x/y"])
def test_missing_library_error_names_hint(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(module: str, *rest: Any) -> Any:
        if module.partition(".")[0] in {"pyarrow", "datasets"}:
            raise ModuleNotFoundError(module)
        return real(module, *rest)

    real = importlib.import_module
    monkeypatch.setattr(importlib, "import_module", missing)
    (tmp_path / name.replace(":", "_").replace("/", "_")).write_bytes(b"x")
    with pytest.raises(UserError, match=r"pip install 'm1clip\[data\]'"):
        open_source(name if name.startswith("hf:") else str(tmp_path / name))


def test_importing_sources_loads_no_optional_library() -> None:
    extras = "{'torch', 'pyarrow', 'webdataset', 'datasets'}"
    code = (
        f"import sys, m1clip.data.sources, m1clip.data.lint; print(sorted({extras} &"
        " set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_hugging_face_folder(tmp_path: Path) -> None:
    datasets = pytest.importorskip(
        "datasets", reason="datasets is an extra: pip install 'm1clip[data]'"
    )

    def part(count: int) -> Any:
        cells = {
            "image": [{"bytes": image_bytes(n), "path": None} for n in range(count)],
            "caption": [[f"c{n}", "x"] for n in range(count)],
        }
        return datasets.Dataset.from_dict(cells).cast_column("image", datasets.Image())

    datasets.DatasetDict({"train": part(12), "validation": part(3)}).save_to_disk(tmp_path / "both")
    source = open_source(str(tmp_path / "both"))
    assert source.format == "hf"
    assert [len(source.samples(split)) for split in source.splits()] == [12, 3]
    sample = source.samples("val")[2]
    assert sample.captions == ("c2", "x")
    copy = pickle.loads(pickle.dumps(sample.image))
    assert abs(copy.open().getpixel((3, 3))[0] - 40) < 6
    assert copy.stamp() == sample.image.stamp()
    part(12).save_to_disk(tmp_path / "one")
    assert "val" in open_source(str(tmp_path / "one")).splits()
    (tmp_path / "both/dataset_dict.json").write_text("{")
    from m1clip.data.sources.hugging_face import open_dataset

    open_dataset.cache_clear()
    with pytest.raises(UserError, match="not a readable dataset"):
        open_source(str(tmp_path / "both"))


def test_images_without_captions_error_names_hint(images: Write) -> None:
    folder = images(["images/IMG_1.jpg", "images/IMG_2.jpg", "images/1000268201_693b08cb0e.jpg"])
    with pytest.raises(UserError, match="images but no captions") as raised:
        open_source(str(folder))
    assert "one folder for each class" in raised.value.__notes__[0]
    assert "filenames:" not in raised.value.__notes__[0]
    words = (
        images(["words/two-dogs_on a beach (2).jpg", "words/an old red bus.jpg", "words/IMG_7.jpg"])
        / "words"
    )
    with pytest.raises(UserError, match="images but no captions") as raised:
        open_source(str(words))
    assert f"m1clip train filenames:{words}" in raised.value.__notes__[0]
    captions = {
        sample.captions for sample in everything(open_source(f"filenames:{words}")).values()
    }
    assert captions == {("two dogs on a beach",), ("an old red bus",), ("IMG",)}


def test_template_names_every_image_and_is_read_once_it_has_captions(
    images: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = images(["a, b.jpg", "below/größe.jpg", "c.jpg"])

    def template(code: int) -> str:
        assert exit_code("data", "template", folder) == code
        return "".join(capsys.readouterr())

    assert "3 images" in template(0)
    with pytest.raises(
        UserError, match=r"no caption in any of its 3 rows \(the first: captions.csv row 2\)"
    ):
        open_source(str(folder))
    table = folder / "captions.csv"
    rows = table.read_text(encoding="utf-8-sig").splitlines()
    rows[1:] = [f"{row}a caption of {number}" for number, row in enumerate(rows[1:])]
    table.write_text("\n".join(rows), encoding="utf-8")
    samples = everything(open_source(str(folder)))
    assert {sample.id for sample in samples.values()} == {"a, b.jpg", "below/größe.jpg", "c.jpg"}
    assert all(sample.image.open() for sample in samples.values())
    assert "already exists" in template(2)
    assert table.read_text(encoding="utf-8") == "\n".join(rows)


def test_unknown_columns_error_names_columns_and_options(images: Write) -> None:
    folder = images(["a.jpg", "b.jpg"])
    (folder / "list.csv").write_text("which,words\na.jpg,a dog\nb.jpg,a cat\n")
    with pytest.raises(
        UserError, match=r"list\.csv: no image and no caption column among which, words"
    ) as caught:
        open_source(str(folder))
    assert "--image-column and --caption-column" in str(caught.value)
    named = open_source(str(folder), options=Options("which", ("words",)))
    assert (named.format, len(everything(named))) == ("csv", 2)
    (folder / "other.csv").write_text("image,caption\na.jpg,x\n")
    with pytest.raises(
        UserError, match=r"contains 2 tables \(list\.csv, other\.csv\); .*--data .*list\.csv"
    ):
        open_source(str(folder))


def test_class_folders_note_tables_that_were_not_read(images: Write) -> None:
    folder = images(["cat/1.jpg", "dog/2.jpg"])
    (folder / "list.csv").write_text("which,words\ncat/1.jpg,a small cat\n")
    source = open_source(str(folder))
    assert source.format == "classes"
    assert "captions are generated from the names of 2 folders: cat, dog" in source.notes
    assert (
        f"{folder}/list.csv was not read; if it contains the captions, use --data {folder}/list.csv"
        in source.notes
    )


@pytest.mark.parametrize("below", ["captions.csv", "train/cat/1.jpg"])
def test_folder_of_datasets_is_not_read_as_classes(images: Write, below: str) -> None:
    folder = images(["sets/b/x/1.jpg", "sets/c/x/1.jpg"]) / "sets"
    for name in ("b", "c"):
        (folder / name / below).parent.mkdir(parents=True, exist_ok=True)
        (folder / name / below).write_text("image,caption\nx/1.jpg,a dog\n")
    with pytest.raises(UserError, match=r"a folder of datasets \(b, c\)") as caught:
        open_source(str(folder))
    assert f"--data {folder}/b --data {folder}/c" in str(caught.value)
    assert open_source(f"classes:{folder}").format == "classes"


def toy_rows(source: DataSource) -> Iterator[Row]:
    """Read captions.toy, a caption for each image in a line such as a.jpg=a dog."""
    for number, line in enumerate((source.path / "captions.toy").read_text().splitlines(), start=1):
        name, _, caption = line.partition("=")
        yield Row(("captions.toy", number), caption, None, source.image_file(name), name)


def has_toy_table(data: DataPath) -> bool:
    return (data.path / "captions.toy").is_file()


def add_format(monkeypatch: pytest.MonkeyPatch, before: str) -> None:
    """Put a new format before another one in the table."""
    toy = DataFormat(name="toy", help="a toy", item="line", read=toy_rows, matches=has_toy_table)
    entries = list(FORMATS.values())
    entries.insert(list(FORMATS).index(before), toy)
    table = {entry.name: entry for entry in entries}
    monkeypatch.setattr(formats, "FORMATS", table)
    monkeypatch.setattr(sources, "FORMATS", table)


def test_new_entry_in_table_of_formats_is_detected_named_and_listed(
    images: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = images(["set/a.jpg", "set/b.jpg"]) / "set"
    (folder / "captions.toy").write_text("a.jpg=a dog\nb.jpg=a cat\n")
    with pytest.raises(UserError, match="images but no captions"):
        open_source(str(folder))
    add_format(monkeypatch, before="classes")
    for spec in (str(folder), f"toy:{folder}"):
        source = open_source(spec)
        assert source.format == "toy"
        assert {sample.captions for sample in everything(source).values()} == {
            ("a dog",),
            ("a cat",),
        }
    with pytest.raises(UserError, match=r"a folder of datasets \(set\)"):
        open_source(str(folder.parent))
    other = folder.parent / "other"
    other.mkdir()
    (other / "notes.docx").write_bytes(b"text")
    with pytest.raises(UserError, match=r"unknown format; .*\(formats: hf, .*, toy, classes, "):
        open_source(str(other))


@pytest.mark.parametrize(("before", "detected"), [("csv", "toy"), ("txt", "csv")])
def test_first_format_of_the_table_that_matches_is_used(
    images: Write, monkeypatch: pytest.MonkeyPatch, before: str, detected: str
) -> None:
    folder = images(["a.jpg"])
    (folder / "captions.toy").write_text("a.jpg=a dog\n")
    (folder / "captions.csv").write_text("image,caption\na.jpg,a dog\n")
    add_format(monkeypatch, before)
    assert open_source(str(folder)).format == detected


def test_formats_are_listed_with_their_help_in_order_of_detection(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    add_format(monkeypatch, before="webdataset")
    assert exit_code("data", "formats") == 0
    listed = [tuple(line.split(maxsplit=1)) for line in capsys.readouterr().out.splitlines()]
    assert [name for name, _ in listed[:4]] == ["name", "hf", "toy", "webdataset"]
    assert listed[1:] == [(entry.name, entry.help) for entry in formats.FORMATS.values()]


def test_formats_with_class_captions_are_listed_after_those_that_are_tried_first() -> None:
    stages = [
        (entry.after_classes, entry.class_captions) for entry in FORMATS.values() if entry.matches
    ]
    assert stages == sorted(stages)


@pytest.mark.parametrize("item", ["row", "file"])
def test_messages_call_entries_as_their_format_does(
    images: Write, monkeypatch: pytest.MonkeyPatch, item: str
) -> None:
    folder = images(["a.jpg", "b.jpg"])
    (folder / "captions.toy").write_text("a.jpg=\nb.jpg=\n")
    toy = DataFormat(name="toy", help="a toy", item=item, read=toy_rows)
    with pytest.raises(UserError, match=f"no caption in any of its 2 {item}s "):
        DataSource(folder, toy)
    (folder / "captions.toy").write_text("a.jpg=\nb.jpg=a dog\n")
    report = lint(DataSource(folder, toy), 1)
    (skipped,) = [finding for finding in report.findings if finding.code == "skipped-empty-caption"]
    assert skipped.message == f"{item}s without a caption, skipped"
    assert skipped.hint == f"write the missing captions, or remove the {item}s"


@pytest.mark.parametrize("content", ['{"model": "blip"}', "[]", "not JSON", '{"a.jpg": "a dog"}'])
@pytest.mark.parametrize("name", ["captions_config.json", "annotations/captions_x.json"])
def test_json_with_the_name_of_captions_but_other_content_is_left_to_other_formats(
    images: Write, name: str, content: str
) -> None:
    folder = images(["a.jpg"])
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text(content)
    with pytest.raises(UserError, match=rf"{name}: neither a list of objects .* nor captions of"):
        open_source(str(folder))
    (folder / "a.txt").write_text("a dog\n")
    assert open_source(str(folder)).format == "txt"


def test_json_with_the_name_of_captions_may_have_other_columns(images: Write) -> None:
    folder = images(["a.jpg"])
    (folder / "captions_de.json").write_text('\n [{"Bild ": "a.jpg", "caption": "ein Hund"}]')
    source = open_source(str(folder), options=Options("bild"))
    assert (source.format, len(everything(source))) == ("json", 1)


@pytest.mark.parametrize("name", FORMATS)
def test_each_format_of_a_missing_path_is_a_one_line_error(tmp_path: Path, name: str) -> None:
    if name == "hf":
        pytest.skip("a missing path is a name on the hub")
    with pytest.raises(UserError, match="gone") as caught:
        open_source(f"{name}:{tmp_path / 'gone'}")
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("name", ["classes", "metadata", "filenames"])
def test_file_named_as_folder_format_is_a_one_line_error(tmp_path: Path, name: str) -> None:
    (tmp_path / "a.csv").write_text("image,caption\n")
    with pytest.raises(UserError, match=f"read as {name}, no images with captions"):
        open_source(f"{name}:{tmp_path / 'a.csv'}")
