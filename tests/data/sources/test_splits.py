"""Which split an image is in, and mixtures of datasets."""

from __future__ import annotations

from pathlib import Path

import pytest

from m1clip.data.sources import FORMATS, DataSource, open_source, open_sources, parse_weight
from m1clip.data.sources.splits import assign, from_file_name, from_value
from m1clip.errors import UserError


def table(folder: Path, splits: str) -> Path:
    """One row per letter: t, v or e for train, val or test."""
    names = {"t": "train", "e": "test", "v": "val"}
    rows = [f"{n}.jpg,caption {n},{names[letter]}" for n, letter in enumerate(splits)]
    folder.mkdir(exist_ok=True)
    (folder / "t.csv").write_text("\n".join(["image,caption,split", *rows]))
    return folder / "t.csv"


def test_splits_by_hash_depend_only_on_the_ids() -> None:
    ids = [f"{n}.jpg" for n in range(1000)]
    forward, backward = (assign(dict.fromkeys(order))[0] for order in (ids, reversed(ids)))
    assert forward == backward
    counts = [list(forward.values()).count(split) for split in ("train", "val", "test")]
    assert all(abs(count - near) < 35 for count, near in zip(counts, (900, 50, 50), strict=True))
    for start in range(0, 300, 15):  # val is never empty from ten images on
        assert "val" in assign({f"{n}.jpg": None for n in range(start, start + 10)})[0].values()


def test_val_is_taken_from_train_with_a_note(tmp_path: Path) -> None:
    source = open_source(str(table(tmp_path, "t" * 40 + "e" * 10)))
    assert len(source.samples("test")) == 10
    assert len(source.samples("train")) + len(source.samples("val")) == 40
    assert source.notes == [
        f"the data has no val split: {len(source.samples('val'))} of 40 train images were moved there"
    ]


def test_image_in_two_splits_stays_in_the_first(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("image,caption,split\na.jpg,x,train\nb.jpg,z,val\na.jpg,y,test\n")
    source = open_source(str(tmp_path / "t.csv"))
    assert source.samples("train")[0].captions == ("x", "y")
    assert source.problems[0].kind == "split-conflict"
    with pytest.raises(UserError, match="no split 'test'; it has train, val"):
        source.samples("test")


def test_split_names() -> None:
    values = ("dev", " Valid", "validation", "restval", "odd", "", None, 3)
    assert [from_value(value) for value in values] == ["val"] * 3 + ["train", "odd", None, None, None]
    names = ("captions_train2017.json", "val-00001.tar", "trainer.csv", "cc_test.parquet", "constrain.tar")
    assert [from_file_name(name) for name in names] == ["train", "val", None, "test", None]


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
    assert {spec: parse_weight(spec, FORMATS) for spec in cases} == cases
    for bad in ("a:0", "a:-1", "a:5000"):
        with pytest.raises(UserError, match="weight"):
            parse_weight(bad, FORMATS)


def test_mixture(tmp_path: Path) -> None:
    one = table(tmp_path / "one", "t" * 30 + "v" * 10)
    two = table(tmp_path / "two", "t" * 30 + "v" * 5 + "e" * 5)
    mixed, same = (open_sources([f"{one}:0.5", f"{two}:2.1"]) for _ in range(2))
    train = mixed.samples("train")
    assert len(train) == len({sample.id for sample in train}) == 15 + 63
    assert train == same.samples("train")
    assert len(mixed.samples("val")) == 15
    assert len(mixed.samples("test")) == 5
    assert mixed.origin("1/0.jpg#2") == "t.csv row 2"
    assert isinstance(open_sources([str(one)]), DataSource)
    with pytest.raises(UserError, match="at least one source"):
        open_sources([])
