"""Folders: text files, classes, a table for each split, Karpathy, COCO."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from source_helpers import everything, image_bytes

from m1clip.data.sources import open_source
from m1clip.data.sources.base import MAX_TEXT_BYTES
from m1clip.errors import UserError

Write = Callable[[Iterable[str]], Path]
FLICKR8K = Path(__file__).parents[3] / "../shared/data/flickr8k-112"


def test_text_file_for_each_image(images: Write) -> None:
    root = images(["train/a.jpg", "train/b.jpg", "val/c.jpg", "._a.jpg", "test/d.jpg"])
    (root / "train/a.txt").write_text("one\n\n two  words \n")
    (root / "val/c.jpg.txt").write_text("three")
    (root / "test/d.txt").write_text(" \n")
    source = open_source(str(root))
    assert source.format == "txt"
    assert source.splits() == ("train", "val")
    assert source.samples("train")[0].captions == ("one", "two words")
    assert sorted(problem.where for problem in source.problems) == ["test/d.txt", "train/b.jpg"]


def test_text_file_that_cannot_be_read_is_reported_with_the_reason(images: Write) -> None:
    root = images(["a.jpg", "b.jpg"])
    (root / "a.txt").write_text("a dog")
    (root / "b.txt").write_bytes(b"x" * (MAX_TEXT_BYTES + 1))
    (problem,) = open_source(str(root)).problems
    expected = f"b.jpg: b.txt cannot be read as a caption (larger than {MAX_TEXT_BYTES:,} bytes)"
    assert (str(problem), problem.kind) == (expected, "unreadable")


def test_class_folders(images: Write) -> None:
    root = images(
        [
            f"{split}/{name}/{n}.jpg"
            for split in ("train", "dev")
            for name in ("tabby_cat", "dog")
            for n in (1, 2)
        ]
    )
    source = open_source(str(root))
    assert source.format == "classes"
    assert [len(source.samples(split)) for split in ("train", "val")] == [4, 4]
    assert everything(source)["train/tabby_cat/1.jpg"].captions == ("a photo of a tabby cat.",)


def test_imagefolder_with_metadata_in_each_split(images: Write) -> None:
    root = images(["train/a.jpg", "test/a.jpg"])
    for split in ("train", "test"):
        (root / split / "metadata.jsonl").write_text(
            json.dumps({"file_name": "a.jpg", "text": split})
        )
    source = open_source(str(root))
    assert source.splits() == ("train", "test")
    assert source.samples("test")[0].captions == ("test",)
    assert source.origin("test/a.jpg") == "test/metadata.jsonl row 1"
    # Would hide the other table.
    (root / "test/metadata.csv").write_text("file_name,text\na.jpg,test\n")
    with pytest.raises(UserError, match="tables in 2 formats; choose one"):
        open_source(str(root))
    assert open_source(f"jsonl:{root}").splits() == ("train", "test")


def test_karpathy_json(images: Write) -> None:
    root = images(["images/a.jpg", "images/b.jpg", "images/c.jpg"])
    entries = [
        {
            "filename": f"{name}.jpg",
            "split": split,
            "sentences": [{"raw": f"{name} {n}"} for n in range(2)],
        }
        for name, split in (("a", "train"), ("b", "restval"), ("c", "val"))
    ]
    document = {
        "images": [*entries, {"filename": "d.jpg", "sentences": []}, 5],
        "dataset": "flickr8k",
    }
    (root / "dataset_flickr8k.json").write_text(json.dumps(document))
    for spec in (root, root / "dataset_flickr8k.json"):
        source = open_source(str(spec))
        assert source.format == "json"
        assert [sample.id for sample in source.samples("train")] == ["a.jpg", "b.jpg"]
        assert source.samples("val")[0].captions == ("c 0", "c 1")
        assert source.samples("val")[0].image.open()
        assert len(source.problems) == 2


def coco(names: Iterable[str]) -> str:
    images = [{"id": n, "file_name": name} for n, name in enumerate(names)]
    captions = [
        {"image_id": n, "caption": f"{name} {i}"} for n, name in enumerate(names) for i in (0, 1)
    ]
    return json.dumps(
        {"images": images, "annotations": [*captions, {"image_id": 99, "caption": "x"}]}
    )


def test_coco_folder_and_file(images: Write) -> None:
    root = images([*(f"train2017/{n}.jpg" for n in range(20)), "val2017/v.jpg"])
    (root / "annotations").mkdir()
    (root / "annotations/captions_train2017.json").write_text(coco([f"{n}.jpg" for n in range(20)]))
    (root / "annotations/captions_val2017.json").write_text(coco(["v.jpg"]))
    source = open_source(str(root))
    assert source.format == "json"
    assert [len(source.samples(split)) for split in source.splits()] == [20, 1]
    assert source.samples("val")[0].captions == ("v.jpg 0", "v.jpg 1")
    assert all(sample.image.open() for sample in everything(source).values())
    assert len(source.problems) == 2
    alone = open_source(str(root / "annotations/captions_train2017.json"))
    assert len(alone.samples("train")) + len(alone.samples("val")) == 20
    assert "no val split" in alone.notes[0]
    boxes = {
        "images": [{"id": 1, "file_name": "a.jpg"}],
        "annotations": [{"image_id": 1, "bbox": []}],
    }
    (root / "instances.json").write_text(json.dumps(boxes))
    with pytest.raises(UserError, match="no caption"):
        open_source(str(root / "instances.json"))


def test_flickr8k_is_read_alike_from_both_its_tables() -> None:
    if not FLICKR8K.is_dir():
        pytest.skip("shared/data/flickr8k-112 is not here")
    csv, jsonl = (open_source(str(FLICKR8K / f"captions.{kind}")) for kind in ("csv", "jsonl"))
    assert [len(csv.samples(split)) for split in csv.splits()] == [6000, 1000, 1000]
    assert all(csv.samples(split) == jsonl.samples(split) for split in csv.splits())
    assert csv.problems == jsonl.problems == []


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "cp1252"])
def test_text_files_are_read_in_their_encoding(images: Write, encoding: str) -> None:
    root = images(["a.jpg", "b.jpg"])
    (root / "a.txt").write_text("ein Café für Hunde", encoding=encoding)
    (root / "b.txt").write_text("a dog", encoding="utf-8")
    source = open_source(f"txt:{root}")
    captions = {id_: sample.captions for id_, sample in everything(source).items()}
    assert captions == {"a.jpg": ("ein Café für Hunde",), "b.jpg": ("a dog",)}
    notes = [note for note in source.notes if "Windows-1252" in note]
    assert len(notes) == (encoding == "cp1252")


@pytest.mark.parametrize(
    "data",
    [image_bytes(), bytes(range(256)), "a dog".encode("utf-16-le"), b"\xff\xfe\x00\xd8"],
    ids=["JPEG", "all bytes", "UTF-16 without its mark", "half of a UTF-16 pair"],
)
def test_text_file_that_is_no_text_is_reported(images: Write, data: bytes) -> None:
    root = images(["a.jpg", "b.jpg"])
    (root / "a.txt").write_text("a dog")
    (root / "b.txt").write_bytes(data)
    source = open_source(f"txt:{root}")
    assert [problem.where for problem in source.problems] == ["b.jpg"]
    assert "neither UTF-8" in source.problems[0].message
    assert list(everything(source)) == ["a.jpg"]
