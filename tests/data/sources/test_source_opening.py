"""Splits, mixtures, finding the kind, missing libraries, and Hugging Face folders."""

from __future__ import annotations

import importlib
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from source_helpers import everything, image_bytes

from m1clip.data.sources import KINDS, open_source, open_sources
from m1clip.data.sources.base import BaseSource, Options
from m1clip.data.sources.mixture import MixedSource, parse_weight
from m1clip.data.sources.splits import from_file_name, normalise
from m1clip.errors import UserError

Write = Callable[[Iterable[str]], Path]


def table(folder: Path, count: int, name: str = "t.csv", splits: str = "", reverse: bool = False) -> Path:
    rows = [f"{n}.jpg,caption {n},{splits[n] if splits else ''}" for n in range(count)]
    names = {"t": "train", "e": "test", "v": "val"}
    rows = [row[:-1] + names[row[-1]] if splits else row for row in rows]
    folder.mkdir(exist_ok=True)
    (folder / name).write_text("\n".join(["image,caption,split", *(reversed(rows) if reverse else rows)]))
    return folder / name


def ids(source: BaseSource | MixedSource, split: str) -> set[str]:
    return {sample.id for sample in source.samples(split)}


def test_seeded_split_depends_on_ids_alone(tmp_path: Path) -> None:
    forward = open_source(str(table(tmp_path, 1000)))
    backward = open_source(str(table(tmp_path / "b", 1000, reverse=True)))
    for split, near in (("train", 900), ("val", 50), ("test", 50)):
        assert ids(forward, split) == ids(backward, split)
        assert abs(len(forward.samples(split)) - near) < 35
    other = open_source(str(tmp_path / "t.csv"), options=Options(split_seed=1))
    assert ids(other, "val") != ids(forward, "val")
    halves = open_source(str(tmp_path / "t.csv"), options=Options(split_fractions=(0.5, 0.5, 0.0)))
    assert halves.splits() == ("train", "val")
    assert abs(len(halves.samples("val")) - 500) < 60


@pytest.mark.parametrize("count", [10, 11, 15])
def test_val_is_never_empty_from_ten_images_on(tmp_path: Path, count: int) -> None:
    for seed in range(10):
        source = open_source(str(table(tmp_path, count)), options=Options(split_seed=seed))
        assert source.samples("val")


def test_val_is_carved_from_train_and_said(tmp_path: Path) -> None:
    source = open_source(str(table(tmp_path, 50, splits="t" * 40 + "e" * 10)))
    assert len(source.samples("test")) == 10
    assert len(source.samples("train")) + len(source.samples("val")) == 40
    assert source.notes == [
        f"the data has no val split: {len(source.samples('val'))} of 40 train images were taken for it"
    ]


def test_a_image_in_two_splits_stays_in_the_first(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("image,caption,split\na.jpg,x,train\nb.jpg,z,val\na.jpg,y,test\n")
    source = open_source(str(tmp_path / "t.csv"))
    assert source.samples("train")[0].captions == ("x", "y")
    assert source.problems[0].kind == "split-conflict"
    with pytest.raises(UserError, match="no split 'test'; it has train, val"):
        source.samples("test")


def test_split_names() -> None:
    assert [normalise(name) for name in ("dev", "Valid", "validation", "restval", "odd")] == ["val"] * 3 + [
        "train",
        "odd",
    ]
    names = ("captions_train2017.json", "val-00001.tar", "trainer.csv", "cc_test.parquet", "constrain.tar")
    assert [from_file_name(name) for name in names] == ["train", "val", None, "test", None]


def test_options_are_checked() -> None:
    for fractions in ((0.5, 0.5, 0.5), (1.5, -0.5, 0.0)):
        with pytest.raises(UserError, match="split fractions"):
            Options(split_fractions=fractions)


def test_parse_weight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "odd:2").mkdir()
    cases = {
        "a": ("a", 1.0),
        "b:0.3": ("b", 0.3),
        "b:.5": ("b", 0.5),
        "C:\\photos": ("C:\\photos", 1.0),
        "C:\\photos:2": ("C:\\photos", 2.0),
        "hf:owner/name": ("hf:owner/name", 1.0),
        "hf:owner/name:0.5": ("hf:owner/name", 0.5),
        "csv:2024": ("csv:2024", 1.0),
        "odd:2": ("odd:2", 1.0),
    }
    assert {spec: parse_weight(spec, KINDS) for spec in cases} == cases
    for bad in ("a:0", "a:-1", "a:5000"):
        with pytest.raises(UserError, match="weight"):
            parse_weight(bad, KINDS)


def test_mixture(tmp_path: Path) -> None:
    one = table(tmp_path / "one", 40, splits="t" * 30 + "v" * 10)
    two = table(tmp_path / "two", 40, splits="t" * 30 + "v" * 5 + "e" * 5)
    mixed = open_sources([f"{one}:0.5", f"{two}:2.1"])
    train = mixed.samples("train")
    assert len(train) == len({sample.id for sample in train}) == 15 + 63
    assert [sample.id for sample in train] == [
        sample.id for sample in open_sources([f"{one}:0.5", f"{two}:2.1"]).samples("train")
    ]
    assert len(mixed.samples("val")) == 15
    assert len(mixed.samples("test")) == 5
    assert mixed.origin("1/0.jpg#2") == "t.csv row 2"
    assert isinstance(open_sources([str(one)]), BaseSource)
    with pytest.raises(UserError, match="at least one source"):
        open_sources([])


def test_what_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for spec, message in {
        "": "the path to the data is empty",
        "nowhere": "no such file",
        "owner/name": "hf:owner/name",
        "csv:gone.csv": r"gone\.csv: cannot be read",
        "a\0b": "no such file",
        ".": "no known kind",
    }.items():
        with pytest.raises(UserError, match=message):
            open_source(spec)
    with pytest.raises(UserError, match="kind 'csvv' is not known"):
        open_source("x", kind="csvv")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
def test_a_pipe_is_not_waited_on(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "t.csv")
    with pytest.raises(UserError, match="neither a file nor a folder"):
        open_source(str(tmp_path / "t.csv"))


@pytest.mark.parametrize("name", ["t.parquet", "t.tar", "hf:x/y"])
def test_a_missing_library_names_the_remedy(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(module: str, *rest: Any) -> Any:
        if module.partition(".")[0] in {"pyarrow", "webdataset", "datasets"}:
            raise ModuleNotFoundError(module)
        return real(module, *rest)

    real = importlib.import_module
    monkeypatch.setattr(importlib, "import_module", missing)
    (tmp_path / name.replace(":", "_").replace("/", "_")).write_bytes(b"x")
    with pytest.raises(UserError, match=r"pip install 'm1clip\[data\]'"):
        open_source(name if name.startswith("hf:") else str(tmp_path / name))


def test_importing_the_sources_loads_no_extra() -> None:
    extras = "{'torch', 'pyarrow', 'webdataset', 'datasets'}"
    code = f"import sys, m1clip.data.sources, m1clip.data.lint; print(sorted({extras} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_hugging_face_folder(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="datasets is an extra: pip install 'm1clip[data]'")

    def part(count: int) -> Any:
        cells = {
            "image": [{"bytes": image_bytes(n), "path": None} for n in range(count)],
            "caption": [[f"c{n}", "x"] for n in range(count)],
        }
        return datasets.Dataset.from_dict(cells).cast_column("image", datasets.Image())

    datasets.DatasetDict({"train": part(12), "validation": part(3)}).save_to_disk(tmp_path / "both")
    source = open_source(str(tmp_path / "both"))
    assert source.kind == "hf"
    assert [len(source.samples(split)) for split in source.splits()] == [12, 3]
    sample = source.samples("val")[2]
    assert sample.captions == ("c2", "x")
    copy = pickle.loads(pickle.dumps(sample.image))
    assert abs(copy.open().getpixel((3, 3))[0] - 40) < 6
    assert copy.stamp() == sample.image.stamp()
    part(12).save_to_disk(tmp_path / "one")
    assert "val" in open_source(str(tmp_path / "one")).splits()
    (tmp_path / "both/dataset_dict.json").write_text("{")
    from m1clip.data.sources.hugging_face import open_tables

    open_tables.cache_clear()
    with pytest.raises(UserError, match="not a dataset"):
        open_source(str(tmp_path / "both"))


def test_a_table_with_unknown_columns_in_a_folder_names_them_and_the_options(images: Write) -> None:
    folder = images(["a.jpg", "b.jpg"])
    (folder / "list.csv").write_text("which,words\na.jpg,a dog\nb.jpg,a cat\n")
    with pytest.raises(UserError, match=r"list\.csv: no image and no caption column among which, words") as caught:
        open_source(str(folder))
    assert "--data.image-column --data.caption-column" in str(caught.value)
    named = open_source(str(folder), options=Options("which", ("words",)))
    assert (named.kind, len(everything(named))) == ("csv", 2)
    (folder / "other.csv").write_text("image,caption\na.jpg,x\n")
    with pytest.raises(UserError, match=r"holds 2 tables \(list\.csv, other\.csv\); name the one .*--data .*list\.csv"):
        open_source(str(folder))


def test_class_folders_say_what_was_read_and_what_was_not(images: Write) -> None:
    folder = images(["cat/1.jpg", "dog/2.jpg"])
    (folder / "list.csv").write_text("which,words\ncat/1.jpg,a small cat\n")
    source = open_source(str(folder))
    assert source.kind == "classes"
    assert "captions are made from the names of 2 folders: cat, dog" in source.notes
    assert f"{folder}/list.csv was not read; if it has the captions: --data {folder}/list.csv" in source.notes


@pytest.mark.parametrize("below", ["captions.csv", "train/cat/1.jpg"])
def test_a_parent_of_data_sets_is_not_read_as_classes(images: Write, below: str) -> None:
    folder = images(["sets/b/x/1.jpg", "sets/c/x/1.jpg"]) / "sets"
    for name in ("b", "c"):
        (folder / name / below).parent.mkdir(parents=True, exist_ok=True)
        (folder / name / below).write_text("image,caption\nx/1.jpg,a dog\n")
    with pytest.raises(UserError, match=r"a folder of data sets \(b, c\)") as caught:
        open_source(str(folder))
    assert f"--data {folder}/b --data {folder}/c" in str(caught.value)
    assert open_source(f"classes:{folder}").kind == "classes"
