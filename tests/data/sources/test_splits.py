"""Which split an image is in, and mixtures of datasets."""

from pathlib import Path

import pytest

from m1clip.data.sources import DataSource, open_source, open_sources
from m1clip.data.sources.splits import assign, from_file_name, from_value, held_out_fraction
from m1clip.data.types import Source
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


@pytest.mark.parametrize(
    ("images", "held_out"), [(9, 0), (10, 1), (48, 4), (100, 10), (200, 20), (303, 20), (399, 20)]
)
def test_small_data_has_an_exact_number_of_images_in_each_split(images: int, held_out: int) -> None:
    for first in range(0, 1000, 50):  # names with other hashes
        ids = [f"{number}.jpg" for number in range(first, first + images)]
        names = list(assign(dict.fromkeys(ids))[0].values())
        assert (names.count("val"), names.count("test")) == (held_out, held_out)
        names = list(assign(dict.fromkeys(ids, "train") | {"x.jpg": "test"})[0].values())
        assert names.count("val") == held_out


def test_no_image_goes_from_one_held_out_split_to_the_other_when_small_data_grows() -> None:
    before: dict[str, str] = {}
    changed = 0
    for images in range(20, 600, 20):
        split_of = assign({f"{number}.jpg": None for number in range(images)})[0]
        pairs = [(before[id_], split_of[id_]) for id_ in before]
        assert ("val", "test") not in pairs
        assert ("test", "val") not in pairs
        changed += sum(old != new for old, new in pairs)
        before = split_of
    assert changed < 120, "of 8,400 comparisons"


def class_ids(classes: int, images: int) -> dict[str, str]:
    """The class of each id."""
    return {f"class {c}/{n}.jpg": f"class {c}" for c in range(classes) for n in range(images)}


def counts_by_class(class_of: dict[str, str], split_of: dict[str, str], split: str) -> list[int]:
    inside = [class_of[id_] for id_ in class_of if split_of[id_] == split]
    return [inside.count(name) for name in dict.fromkeys(class_of.values())]


@pytest.mark.parametrize("images", [10, 30, 47])
def test_each_class_has_its_fraction_in_each_split(images: int) -> None:
    class_of = class_ids(10, images)
    split_of = assign(dict.fromkeys(class_of), class_of)[0]
    backward = {id_: class_of[id_] for id_ in reversed(class_of)}
    assert assign(dict.fromkeys(backward), backward)[0] == split_of
    for split in ("val", "test"):
        counts = counts_by_class(class_of, split_of, split)
        fraction = held_out_fraction(len(class_of))
        assert all(abs(count - fraction * images) < 1 for count in counts)
        assert min(counts) >= 1


def test_small_classes_add_up_to_the_fraction_and_keep_a_training_image() -> None:
    class_of = class_ids(400, 2) | class_ids(400, 3) | {"alone/1.jpg": "alone"}
    split_of = assign(dict.fromkeys(class_of), class_of)[0]
    assert min(counts_by_class(class_of, split_of, "train")) >= 1
    held_out = len(class_of) - list(split_of.values()).count("train")
    assert abs(held_out / len(class_of) - 0.1) < 0.03


def test_val_of_class_folders_is_taken_from_each_class_of_train() -> None:
    class_of = class_ids(5, 40)
    split_of, (note,) = assign(
        {id_: "test" if id_.endswith("/0.jpg") else "train" for id_ in class_of}, class_of
    )
    assert counts_by_class(class_of, split_of, "test") == [1] * 5
    assert set(counts_by_class(class_of, split_of, "val")) <= {3, 4}
    assert "the data has no val split" in note


def test_val_is_taken_from_train_with_a_note(tmp_path: Path) -> None:
    source = open_source(str(table(tmp_path, "t" * 40 + "e" * 10)))
    assert len(source.samples("test")) == 10
    assert len(source.samples("train")) + len(source.samples("val")) == 40
    assert source.notes == [
        f"the data has no val split: {len(source.samples('val'))} of 40 train images moved there"
    ]


def named_table(folder: Path, name: str, images: int, split: str = "") -> str:
    """A table of this name, with a column of splits if `split` is given."""
    stem = name.partition(".")[0]
    rows = [f"{stem}-{n}.jpg,caption {n}" + (split and f",{split}") for n in range(images)]
    header = "image,caption" + (split and ",split")
    lines = "\n".join([header, *rows])
    (folder / name).write_text(lines.replace(",", "\t") if name.endswith(".tsv") else lines)
    return str(folder / name)


def images_of(source: Source) -> dict[str, list[str]]:
    """The table that each split's images are from."""
    return {
        split: sorted({sample.id.partition("/")[2].partition("-")[0] for sample in of_split})
        for split in source.splits()
        for of_split in [source.samples(split)]
    }


def test_tables_named_like_splits_are_these_splits(tmp_path: Path) -> None:
    names = ("train.csv", "validation.tsv", "test.csv")
    source = open_sources([named_table(tmp_path, name, 60) for name in names])
    assert images_of(source) == {"train": ["train"], "val": ["validation"], "test": ["test"]}
    assert len(source.samples("train")) == 60
    ids = [sample.id for sample in source.samples("train")]
    assert ids == [f"0/train-{n}.jpg" for n in range(60)]
    assert source.notes == []


def test_table_of_json_lines_has_the_split_of_its_name(tmp_path: Path) -> None:
    for name in ("train", "dev"):
        rows = [f'{{"image": "{name}-{n}.jpg", "caption": "x"}}' for n in range(30)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(rows))
    source = open_sources([str(tmp_path / "train.jsonl"), str(tmp_path / "dev.jsonl")])
    assert images_of(source) == {"train": ["train"], "val": ["dev"]}


def test_folder_of_tables_named_like_splits_is_read_together(tmp_path: Path) -> None:
    for name, images in (("train.csv", 40), ("val.csv", 5), ("test.csv", 6)):
        named_table(tmp_path, name, images)
    source = open_source(str(tmp_path))
    counts = {split: len(source.samples(split)) for split in source.splits()}
    assert counts == {"train": 40, "val": 5, "test": 6}
    named_table(tmp_path, "other.csv", 5)
    with pytest.raises(UserError, match="contains 4 tables"):
        open_source(str(tmp_path))


def test_folder_with_a_split_table_without_captions_is_not_read(tmp_path: Path) -> None:
    named_table(tmp_path, "train.csv", 40)
    (tmp_path / "test.csv").write_text("id\n1.jpg\n")
    with pytest.raises(UserError, match="contains 2 tables"):
        open_source(str(tmp_path))


def test_column_of_splits_wins_over_the_name_of_the_table(tmp_path: Path) -> None:
    source = open_source(named_table(tmp_path, "test.csv", 5, split="train"))
    assert source.splits() == ("train",)


def test_val_is_held_out_from_a_lone_train_table(tmp_path: Path) -> None:
    path = named_table(tmp_path, "train.csv", 100)
    source = open_source(path)
    assert source.splits() == ("train", "val")
    (note,) = source.notes
    assert "the data has no val split" in note
    # Still so next to a test table.
    mixed = open_sources([path, named_table(tmp_path, "test.csv", 7)])
    assert images_of(mixed) == {"train": ["train"], "val": ["train"], "test": ["test"]}
    assert len(mixed.samples("test")) == 7


@pytest.mark.parametrize("name", ["captions.csv", "train_photos.csv", "contest.csv"])
def test_table_of_another_name_is_split_by_hash(tmp_path: Path, name: str) -> None:
    source = open_source(named_table(tmp_path, name, 100))
    assert source.splits() == ("train", "val", "test")
    assert source.notes == []


def test_error_for_a_missing_split_says_where_splits_come_from(tmp_path: Path) -> None:
    source = open_source(named_table(tmp_path, "test.csv", 100))
    with pytest.raises(UserError, match=r"it has test .*the names of its files") as error:
        source.samples("train")
    assert "\n" not in str(error.value)


def test_image_in_two_splits_stays_in_the_first(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text(
        "image,caption,split\na.jpg,x,train\nb.jpg,z,val\na.jpg,y,test\n"
    )
    source = open_source(str(tmp_path / "t.csv"))
    assert source.samples("train")[0].captions == ("x", "y")
    assert source.problems[0].kind == "split-conflict"
    with pytest.raises(UserError, match="no split 'test'; it has train, val"):
        source.samples("test")


def test_split_names() -> None:
    values = ("dev", " Valid", "validation", "restval", "odd", "", None, 3)
    assert [from_value(value) for value in values] == ["val"] * 3 + [
        "train",
        "odd",
        None,
        None,
        None,
    ]
    names = (
        "captions_train2017.json",
        "val-00001.tar",
        "trainer.csv",
        "cc_test.parquet",
        "constrain.tar",
    )
    assert [from_file_name(name) for name in names] == ["train", "val", None, "test", None]


def test_several_datasets_together(tmp_path: Path) -> None:
    one = table(tmp_path / "one", "t" * 3 + "v" * 2)
    two = table(tmp_path / "two", "t" * 4 + "v" * 1 + "e" * 5)
    both = open_sources([str(one), str(two)])
    assert [len(both.samples(split)) for split in both.splits()] == [7, 3, 5]
    assert len({sample.id for sample in both.samples("train")}) == 7
    assert both.origin("1/0.jpg") == "t.csv row 2"
    assert isinstance(open_sources([str(one)]), DataSource)
    with pytest.raises(UserError, match="at least one source"):
        open_sources([])
