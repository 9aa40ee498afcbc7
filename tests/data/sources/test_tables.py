"""CSV, TSV, JSONL, JSON and Parquet tables."""

import json
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from source_helpers import everything, image_bytes

from m1clip.data.images import BadImage
from m1clip.data.sources import Options, open_source
from m1clip.errors import UserError

Write = Callable[[Iterable[str]], Path]


def test_csv_joins_rows_and_respects_splits(images: Write) -> None:
    root = images(["set/a.jpg", "set/images/b.jpg", "up.jpg"]) / "set"
    rows = ['a.jpg,"one, two",train', "b.jpg,three,validation", "./a.jpg,four,train"]
    rows += ["../up.jpg,five,test", f"{root}/images/b.jpg,six,test"]
    (root / "captions.csv").write_text("\n".join(["image,caption,split", *rows]))
    source = open_source(str(root))
    assert source.splits() == ("train", "val", "test")
    assert source.samples("train")[0].captions == ("one, two", "four")
    assert all(sample.image.open().size == (24, 16) for sample in everything(source).values())
    assert source.origin("a.jpg", 1) == "captions.csv row 4"
    assert source.problems == []


@pytest.mark.parametrize("delimiter", [",", "\t", ";", "|"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "cp1252"])
def test_delimiters_and_encodings(images: Write, delimiter: str, encoding: str) -> None:
    root = images(["ä.jpg"])
    (root / "t.csv").write_bytes(
        f"File_Name{delimiter}Title\r\nä.jpg{delimiter}café\r\n".encode(encoding)
    )
    sample = everything(open_source(str(root)))["ä.jpg"]
    assert sample.captions == ("café",)
    assert sample.image.open().mode == "RGB"


def test_columns_can_be_named_or_numbered(images: Write) -> None:
    root = images(["a.jpg"])
    table = root / "t.tsv"
    table.write_text("foo\tbar\tcaption_0\tcaption_1\nx\ta.jpg\tone\t\n")
    with pytest.raises(UserError, match=r"no image column among foo, bar, caption_0"):
        open_source(str(table))
    source = open_source(str(table), options=Options(image_column="bar"))
    assert everything(source)["a.jpg"].captions == ("one",)
    assert source.problems == []
    named = open_source(
        str(table), options=Options(image_column="BAR", caption_columns=("foo", "caption_0"))
    )
    assert everything(named)["a.jpg"].captions == ("x", "one")
    with pytest.raises(UserError, match="no column 'nope'"):
        open_source(str(table), options=Options(image_column="nope"))


def test_bad_rows_are_problems_with_their_row(images: Write) -> None:
    root = images(["a.jpg"])
    (root / "t.csv").write_text(
        "image,caption\na.jpg,fine\na.jpg,\n,text\na.jpg,one,two\nx\0y.jpg,zero\nhttp://x/y.jpg,net\nshort\n"
    )
    source = open_source(str(root / "t.csv"))
    assert [problem.where for problem in source.problems] == [
        f"t.csv row {n}" for n in (3, 4, 5, 6, 7, 8)
    ]
    assert "quotes" in source.problems[2].message
    assert "img2dataset" in source.problems[4].message


def test_giant_caption_is_a_problem_in_every_format(images: Write) -> None:
    """A Parquet file of some kB may contain gigabytes of text, which would be tokenized for minutes."""
    root = images(["a.jpg", "b.jpg"])
    rows = [
        {"image": "a.jpg", "caption": "x" * (2**17 + 1)},
        {"image": "b.jpg", "caption": "a dog"},
    ]
    (root / "t.jsonl").write_text("\n".join(map(json.dumps, rows)))
    source = open_source(str(root / "t.jsonl"))
    assert list(everything(source)) == ["b.jpg"]
    assert [problem.message for problem in source.problems] == [
        "the caption is too long (131,073 characters; at most 131,072)"
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a.jpg,a dog\nb.jpg,a cat\n", "first row is an image"),
        ("", "no image and no caption column"),
        ("image,foo\na.jpg,b\n", "no caption column"),
        ("image,caption\n", "no images with captions"),
        ('image,caption\na.jpg,"' + "open\n" * 40_000, "unclosed quote"),
        ('image,caption\na.jpg,x\nb.jpg,"y\nc.jpg,z\n', "row 3: a quote is not closed"),
    ],
)
def test_clear_errors(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "t.csv").write_text(text)
    with pytest.raises(UserError, match=message):
        open_source(str(tmp_path / "t.csv"))


def test_jsonl_lists_and_bad_lines(images: Write) -> None:
    root = images(["a.jpg", "b.jpg"])
    lines = [
        '{"image": "a.jpg", "captions": ["x", "y"]}',
        "{bad",
        "[1]",
        '{"image": 3, "captions": "z"}',
    ]
    lines += [
        '{"image": "b.jpg", "captions": [{"raw": "r"}, 5]}',
        "",
        '{"image": "b.jpg", "captions": "\\ud800 s"}',
    ]
    (root / "captions.jsonl").write_text("\ufeff" + "\n".join(lines), encoding="utf-8")
    source = open_source(str(root))
    assert everything(source)["a.jpg"].captions == ("x", "y")
    assert everything(source)["b.jpg"].captions == ("r", "? s")
    assert [problem.where for problem in source.problems] == [
        f"captions.jsonl row {n}" for n in (2, 3, 4, 5)
    ]


def test_json_list_and_list_in_a_cell(images: Write) -> None:
    root = images(["a.jpg"])
    (root / "t.json").write_text(json.dumps([{"image": "a.jpg", "caption": "one"}, 7]))
    assert everything(open_source(str(root / "t.json")))["a.jpg"].captions == ("one",)
    (root / "t.csv").write_text('image,raw\na.jpg,"[""x"", ""y""]"\n')
    assert everything(open_source(str(root / "t.csv")))["a.jpg"].captions == ("x", "y")


def test_order_of_tables_in_a_folder(images: Write) -> None:
    root = images(["Images/a.jpg"])
    for name, start in (
        ("captions.txt", "image,caption\na.jpg,txt"),
        ("captions.csv", "image,caption\na.jpg,csv"),
    ):
        (root / name).write_text(start)  # Kaggle's Flickr8k is a captions.txt next to Images/
        sample = everything(open_source(str(root)))["a.jpg"]
        assert sample.captions == (name[-3:],)
        assert sample.image.open()
    (root / "captions.jsonl").write_text('{"image": "a.jpg", "caption": "jsonl"}')
    assert everything(open_source(str(root)))["a.jpg"].captions == ("csv",)
    assert everything(open_source(f"jsonl:{root}"))["a.jpg"].captions == ("jsonl",)


def test_parquet_paths_and_bytes(images: Write) -> None:
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    root = images(["a.jpg"])
    parquet.write_table(
        pa.table({"filepath": ["a.jpg", None], "texts": [["x", "y"], ["z"]]}),
        root / "paths.parquet",
    )
    source = open_source(str(root / "paths.parquet"))
    assert everything(source)["a.jpg"].captions == ("x", "y")
    assert source.problems[0].where == "paths.parquet row 2"
    data = root / "set/data"
    data.mkdir(parents=True)
    for split, count in (("train", 5), ("test", 2)):
        cells = [{"bytes": image_bytes(n), "path": "image.jpg"} for n in range(count)]
        table = pa.table({"image": cells, "caption": [f"{split} {n}" for n in range(count)]})
        parquet.write_table(table, data / f"{split}-00000-of-00001.parquet", row_group_size=2)
    inside = open_source(str(root / "set"))
    samples = everything(inside)
    assert len(samples) == 7
    assert len(inside.samples("test")) == 2
    for sample in samples.values():
        number = int(sample.captions[0].split()[1])
        assert abs(sample.image.open().getpixel((3, 3))[0] - number * 20) < 6  # type: ignore[index]


def test_missing_image_is_not_taken_from_a_dataset_beside_this_one(images: Write) -> None:
    root = images(["photos/images/a.jpg", "images/b.jpg", "b.jpg"])
    (root / "photos" / "captions.csv").write_text("image,caption\na.jpg,one\nb.jpg,two\n")
    samples = everything(open_source(str(root / "photos")))
    assert samples["a.jpg"].image.open().size == (24, 16)
    with pytest.raises(BadImage, match="the file is missing"):
        samples["b.jpg"].image.open()


def workbook(path: Path) -> Path:
    """A zip with the first files of an Excel workbook."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("[Content_Types].xml", "<Types/>")
        archive.writestr("xl/workbook.xml", "<workbook/>")
    return path


@pytest.mark.parametrize("prefix", ["", "csv:", "tsv:", "jsonl:", "json:"])
@pytest.mark.parametrize("name", ["captions.xlsx", "captions.csv"])
def test_excel_workbook_error_says_how_to_save_it_as_csv(
    tmp_path: Path, prefix: str, name: str
) -> None:
    path = workbook(tmp_path / name)
    with pytest.raises(UserError) as caught:
        open_source(f"{prefix}{path}")
    assert str(caught.value).startswith(
        f"{path}: is an Excel workbook; open it in a spreadsheet program and save it"
    )


def test_images_beside_a_spreadsheet_error_names_it(images: Write) -> None:
    folder = images(["a.jpg", "b.jpg"])
    workbook(folder / "list.xlsx")
    with pytest.raises(UserError, match=r"list\.xlsx is an Excel workbook; .* save it as CSV"):
        open_source(str(folder))


@pytest.mark.parametrize(
    ("start", "expected"),
    [
        (
            b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1",
            "is an old Excel workbook; open it in a spreadsheet program",
        ),
        (b"PK\x03\x04", "is a zip archive; unpack it first"),
        (b"PAR1", "is a Parquet file; use parquet:"),
        (b"\x1f\x8b\x08", "is a gzip archive; unpack it first"),
        (b"SQLite format 3\0", "is an SQLite database; export its table as CSV"),
        (b"\xff\xd8\xff\xe0", "is a JPEG image; use the folder"),
        (b"any\0thing", "is a binary file, not a table; use a CSV"),
    ],
)
def test_binary_file_given_as_a_table_is_a_one_line_error(
    tmp_path: Path, start: bytes, expected: str
) -> None:
    for name in ("t.csv", "t.jsonl", "t.json", "t.dat"):
        (tmp_path / name).write_bytes(start + bytes(range(256)) * 20)
        with pytest.raises(UserError) as caught:
            open_source(str(tmp_path / name))
        assert str(caught.value).startswith(f"{tmp_path / name}: {expected}")
        assert "\n" not in str(caught.value)


def test_json_of_another_program_is_explained_by_an_example(tmp_path: Path) -> None:
    task = {"id": 1, "data": {"image": "a.jpg"}, "annotations": [{"result": []}]}
    (tmp_path / "export.json").write_text(json.dumps([task]))
    with pytest.raises(UserError, match=r'expected objects such as \{"image": "a.jpg"'):
        open_source(str(tmp_path / "export.json"))
