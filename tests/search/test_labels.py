"""Labels of an index: saved in captions.csv, once, whatever else happens to the photos, the disk or the process."""

import os
import shutil
import sqlite3
import subprocess
import sys
import threading
from collections import Counter
from contextlib import closing
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import pytest
from PIL import Image

from m1clip.data.caption_table import read_captions
from m1clip.data.sources import open_sources
from m1clip.data.sources.metadata import PhotoCaptions, find_captions
from m1clip.errors import UserError
from m1clip.io import open_for_write
from m1clip.search.labels import (
    LABELS_DATABASE,
    Change,
    Label,
    Labels,
    choose_split,
    labels_path,
    split_by_content,
)
from m1clip.search.location import INDEX_FOLDER

EMPTY = Label(()).version


@pytest.fixture
def labels(tmp_path: Path) -> Labels:
    (tmp_path / INDEX_FOLDER).mkdir()
    return Labels(tmp_path, tmp_path / INDEX_FOLDER)


def change(name: str, *captions: str, version: str = EMPTY, skipped: bool = False) -> Change:
    return Change(name, sha256(name.encode()).digest(), version, captions, skipped)


def test_labels_are_a_dataset_for_training(labels: Labels) -> None:
    (labels.root / "a").mkdir()
    for number in range(60):
        name = f"a/{number}.jpg"
        (labels.root / name).write_bytes(b"x")
        labels.change([change(name, f"photo {number}", "dog, beach")])
    source = open_sources([str(labels.root)])
    assert {split: len(samples) for split, samples in source.by_split.items()} == {
        split: sum(label.split == split for label in labels.labelled().values())
        for split in ("train", "val", "test")
    }
    assert 6 <= len(source.by_split["test"]) <= 20
    assert source.by_split["train"][0].captions[1] == "dog, beach"
    assert not source.problems


def test_change_of_another_page_is_a_conflict_and_a_repeated_request_is_none(
    labels: Labels,
) -> None:
    first = change("a.jpg", "a dog")
    assert not labels.change([first])[0].conflict
    assert not labels.change([first])[0].conflict  # sent twice
    (outcome,) = labels.change([change("a.jpg", "a cat")])
    assert outcome.conflict
    assert outcome.label.captions == ("a dog",)
    assert labels.labelled()["a.jpg"].captions == ("a dog",)
    (outcome,) = labels.change([change("a.jpg", "a dog", "a cat", version=outcome.label.version)])
    assert outcome.label.captions == ("a dog", "a cat")
    (outcome,) = labels.change([change("a.jpg", version=outcome.label.version)])  # undone
    assert labels.labelled() == {}
    assert outcome.label.version == EMPTY


def test_skipped_photo_can_be_labelled_later(labels: Labels) -> None:
    (outcome,) = labels.change([change("a.jpg", skipped=True)])
    assert outcome.label.skipped
    assert labels.skipped() == {change("a.jpg").sha256}
    assert not labels.path.exists()
    labels.change([change("a.jpg", "a dog", version=outcome.label.version)])
    assert labels.skipped() == set()
    assert list(labels.labelled()) == ["a.jpg"]


def test_split_belongs_to_the_content_or_to_the_group(labels: Labels) -> None:
    copies = [replace(change("a.jpg", "one"), path=name) for name in ("a.jpg", "b/a.jpg", "c.jpg")]
    splits = {outcome.label.split for outcome in labels.change(copies)}
    assert splits == {split_by_content(copies[0].sha256)}
    later = replace(copies[0], path="later.jpg")
    assert labels.change([later])[0].label.split in splits
    group = [replace(change(f"{number}.jpg", "one"), split="val") for number in range(9)]
    assert {outcome.label.split for outcome in labels.change(group)} == {"val"}


def test_few_labels_are_not_split_by_chance_alone() -> None:
    for first in range(0, 4_800, 48):  # 100 folders of 48 photos with other contents
        counts: Counter[str] = Counter()
        for number in range(first, first + 48):
            counts[choose_split(sha256(str(number).encode()).digest(), counts)] += 1
        assert 8 <= counts["test"] <= 12
        assert 3 <= counts["val"] <= 7
    by_content = [
        split_by_content(sha256(str(number).encode()).digest()) for number in range(4_800)
    ]
    assert abs(by_content.count("test") / 4_800 - 0.2) < 0.03


def test_a_group_that_is_held_out_is_made_up_for_by_later_labels() -> None:
    counts = Counter({"test": 15, "train": 5})
    for number in range(40):
        counts[choose_split(sha256(str(number).encode()).digest(), counts)] += 1
    assert counts["test"] == 15
    assert 5 <= counts["val"] <= 8


@pytest.mark.parametrize(
    ("name", "captions", "message"),
    [
        ("a.jpg", ("x" * 10_000,), "at most 1,000 characters"),
        ("a.jpg", ("half \ud83d",), "lone surrogate"),
        ("a.jpg", tuple(map(str, range(21))), "at most 20 captions"),
        ("a\nb.jpg", ("a dog",), "its name cannot be written into a table"),
        (os.fsdecode(b"\xff.jpg"), ("a dog",), "its name cannot be written into a table"),
    ],
)
def test_bad_label_is_explained_and_changes_nothing(
    labels: Labels, name: str, captions: tuple[str, ...], message: str
) -> None:
    digest = sha256(os.fsencode(name)).digest()
    with pytest.raises(UserError, match=message):
        labels.change([change("good.jpg", "a dog"), Change(name, digest, EMPTY, captions)])
    assert labels.labelled() == {}
    labels.change([change("good.jpg", "a dog\x00 on\n a beach")])
    assert labels.labelled()["good.jpg"].captions == ("a dog on a beach",)


def test_full_disk_loses_no_label(labels: Labels, monkeypatch: pytest.MonkeyPatch) -> None:
    labels.change([change("a.jpg", "a dog")])
    with monkeypatch.context() as patch:

        def full(*_: object) -> None:
            raise OSError(28, "No space left on device")

        patch.setattr(os, "fsync", full)
        with pytest.raises(UserError, match="the disk is full"):
            labels.change([change("b.jpg", "a cat")])
        assert list(labels.labelled()) == ["a.jpg"]
    labels.change([change("b.jpg", "a cat")])
    assert list(Labels(labels.root, labels.path.parent / INDEX_FOLDER).labelled()) == [
        "a.jpg",
        "b.jpg",
    ]


def test_pages_and_programs_at_the_same_time_lose_nothing(labels: Labels) -> None:
    others = [labels, Labels(labels.root, labels.root / INDEX_FOLDER)]
    conflicts = []

    def label(page: int) -> None:
        for number in range(8):
            own = change(f"{page}-{number}.jpg", "a dog")
            shared = change(f"shared-{number}.jpg", f"by {page}")
            outcomes = others[page % 2].change([own, shared])
            conflicts.extend(outcome for outcome in outcomes if outcome.conflict)

    threads = [threading.Thread(target=label, args=(page,)) for page in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(labels.labelled()) == 4 * 8 + 8
    assert len(conflicts) == 3 * 8
    rows = read_captions(labels.path).rows
    assert len(rows) == 40  # no label twice


def test_edited_table_and_lost_database_are_read_again(labels: Labels) -> None:
    labels.change([change("a.jpg", "a dog"), change("b.jpg", "a cat")])
    text = labels.path.read_text(encoding="utf-8-sig").replace("a cat", "a black cat")
    labels.path.write_text(text, encoding="utf-8")
    (labels.root / INDEX_FOLDER / LABELS_DATABASE).write_bytes(b"no database")
    assert labels.labelled()["b.jpg"].captions == ("a black cat",)
    with pytest.raises(UserError, match="delete it: captions stay"):
        labels.skipped()
    (labels.root / INDEX_FOLDER / LABELS_DATABASE).unlink()
    assert labels.skipped() == set()


def test_renamed_photo_keeps_its_label(labels: Labels) -> None:
    labels.change([change("a.jpg", "a dog", "dog, grass"), change("b.jpg", "a cat")])
    assert labels.contents()["a.jpg"] == change("a.jpg").sha256
    labels.follow({"a.jpg": "2024/a.jpg", "b.jpg": "2024/bad\nname.jpg"})
    assert {name: label.captions for name, label in labels.labelled().items()} == {
        "2024/a.jpg": ("a dog", "dog, grass"),
        "b.jpg": ("a cat",),
    }


def test_labels_are_in_the_index_folder_if_they_would_hide_another_table(tmp_path: Path) -> None:
    index_folder = tmp_path / INDEX_FOLDER
    index_folder.mkdir()
    assert labels_path(tmp_path, index_folder) == tmp_path / "captions.csv"
    assert labels_path(tmp_path, tmp_path.parent / "elsewhere").parent.name == "elsewhere"
    (tmp_path / "captions.jsonl").write_text('{"image": "a.jpg", "caption": "mine"}\n')
    assert labels_path(tmp_path, index_folder) == index_folder / "captions.csv"
    (tmp_path / "a.jpg").write_bytes(b"x")
    labels = Labels(tmp_path, index_folder)
    labels.change([change("a.jpg", "a dog")])
    assert list(labels.labelled()) == ["a.jpg"]
    (sample,) = (
        part_sample
        for part in open_sources([str(labels.path)]).by_split.values()
        for part_sample in part
    )
    assert str(sample.image) == str(tmp_path / "a.jpg")


def test_database_that_is_a_link_is_not_written(labels: Labels, tmp_path: Path) -> None:
    target = tmp_path / "target"
    os.close(open_for_write(target, os.O_CREAT | os.O_WRONLY))
    (labels.root / INDEX_FOLDER / LABELS_DATABASE).symlink_to(target)
    with pytest.raises(UserError, match="symbolic link"):
        labels.change([change("a.jpg", skipped=True)])
    assert target.read_bytes() == b""


@pytest.mark.parametrize("ending", ["", "-wal", "-journal"])
def test_database_with_another_name_is_not_written(
    labels: Labels, tmp_path: Path, ending: str
) -> None:
    labels.change([change("a.jpg", skipped=True)])
    database = labels.root / INDEX_FOLDER / LABELS_DATABASE
    if ending == "-wal":
        with closing(sqlite3.connect(database)) as db:
            db.execute("PRAGMA journal_mode = WAL")
    precious = tmp_path / "precious"
    precious.write_bytes(database.read_bytes() if not ending else b"precious")
    before = precious.read_bytes()
    linked = database.with_name(database.name + ending)
    linked.unlink(missing_ok=True)
    linked.hardlink_to(precious)
    with pytest.raises(UserError, match="is a hard link"):
        labels.change([change("b.jpg", skipped=True)])
    assert precious.read_bytes() == before


@pytest.mark.parametrize("link", ["photo.jpg.xmp", "photo.jpg.json", "photo.jpg"])
def test_captions_are_not_copied_through_a_link_out_of_the_folder(
    labels: Labels, tmp_path_factory: pytest.TempPathFactory, link: str
) -> None:
    outside = tmp_path_factory.mktemp("outside")
    photo = labels.root / "photo.jpg"
    Image.new("RGB", (8, 8)).save(photo)
    save_captioned(outside / "photo.jpg", "a secret of another folder")
    (outside / "photo.jpg.json").write_text('{"description": "a secret of another folder"}')
    (outside / "photo.jpg.xmp").write_text(
        '<rdf:RDF xmlns:rdf="http://www.w3.org/1999/02/22-rdf-syntax-ns#"'
        ' xmlns:dc="http://purl.org/dc/elements/1.1/"><rdf:Description>'
        "<dc:description>a secret of another folder</dc:description></rdf:Description></rdf:RDF>"
    )
    (photo_captions,) = find_captions(outside, ["photo.jpg"])
    assert isinstance(photo_captions[1], PhotoCaptions)
    (labels.root / link).unlink(missing_ok=True)
    (labels.root / link).symlink_to(outside / link)
    assert labels.import_metadata({"photo.jpg": bytes(32)}) == 0
    assert not labels.path.exists()


def save_captioned(path: Path, text: str) -> bytes:
    """A photo with a caption in its EXIF data; returns its content hash."""
    exif = Image.Exif()
    exif[0x010E] = text
    Image.new("RGB", (8, 8), f"#{len(text):06x}").save(path, exif=exif)
    return sha256(path.read_bytes()).digest()


def test_later_copies_of_captioned_photos_are_in_the_same_split(labels: Labels) -> None:
    numbers = range(40)
    contents = {
        f"{number}.jpg": save_captioned(labels.root / f"{number}.jpg", f"inside {number}")
        for number in numbers
    }
    labels.import_metadata(contents)
    for number in numbers:
        shutil.copy(labels.root / f"{number}.jpg", labels.root / f"copy {number}.jpg")
    labels.import_metadata(contents | {f"copy {name}": contents[name] for name in contents})
    labelled = labels.labelled()
    for name in contents:
        assert labelled[f"copy {name}"].split == labelled[name].split


def test_captions_inside_photos_become_labels_and_are_not_hidden(labels: Labels) -> None:
    contents = {
        f"{number}.jpg": save_captioned(labels.root / f"{number}.jpg", f"inside {number}")
        for number in range(40)
    }
    labels.change([change("0.jpg", "typed before")])
    assert labels.import_metadata(contents) == 39
    assert labels.import_metadata(contents) == 0
    labelled = labels.labelled()
    assert labelled["0.jpg"].captions == ("typed before",)
    assert labelled["1.jpg"].captions == ("inside 1",)
    assert [path for path, label in labelled.items() if not label.from_metadata] == ["0.jpg"]
    splits = Counter(label.split for label in labelled.values())
    assert abs(splits["test"] - 8) <= 2
    assert abs(splits["val"] - 4) <= 2
    assert {row[2] for row in read_captions(labels.path).rows} == {"person", "EXIF"}
    source = open_sources([str(labels.root)])
    assert sum(map(len, source.by_split.values())) == 40
    version = labelled["1.jpg"].version
    labels.change([change("1.jpg", "inside 1", "and more", version=version)])
    rows = [row[1:3] for row in read_captions(labels.path).rows if row[0] == "1.jpg"]
    assert sorted(rows) == [["and more", "person"], ["inside 1", "EXIF"]]
    version = labels.labelled()["1.jpg"].version
    labels.change([change("1.jpg", "better", version=version)])
    rows = [row[1:3] for row in read_captions(labels.path).rows if row[0] == "1.jpg"]
    assert rows == [["better", "person"]]


def test_generated_captions_are_no_labels_and_stay(labels: Labels) -> None:
    table = read_captions(labels.path)
    table.replace("a.jpg", ["a generated caption"], "model:vision")
    table.write()
    assert labels.labelled() == {}
    labels.change([change("a.jpg", "typed")])
    assert labels.labelled()["a.jpg"].captions == ("typed",)
    assert len(read_captions(labels.path).rows) == 2


def test_many_images_are_added_to_a_table_without_reading_it_again(
    labels: Labels, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = read_captions(labels.path)
    monkeypatch.setattr(table, "_index", lambda: pytest.fail("reads all rows"))
    for number in range(20):
        table.replace(f"{number}.jpg", ["a", "b"], "EXIF", "train")
    assert [caption.text for caption in table.of("7.jpg")] == ["a", "b"]
    assert table.images() == [f"{number}.jpg" for number in range(20)]


def test_labels_do_not_hide_text_files(tmp_path: Path) -> None:
    save_captioned(tmp_path / "a.jpg", "x")
    (tmp_path / "a.txt").write_text("a dog", encoding="utf-8")
    index_folder = tmp_path / INDEX_FOLDER
    assert labels_path(tmp_path, index_folder) == index_folder / "captions.csv"


LABELLER = """
import sys
from hashlib import sha256
from pathlib import Path
from m1clip.search.labels import Change, Label, Labels
root = Path(sys.argv[1])
labels = Labels(root, root / ".m1clip-index")
for number in range(10_000):
    digest = sha256(str(number).encode()).digest()
    labels.change([Change(f"{number}.jpg", digest, Label(()).version, (f"label {number}",))])
    print(number, flush=True)
"""


def test_killed_server_has_saved_every_label_that_it_confirmed(labels: Labels) -> None:
    words = [sys.executable, "-c", LABELLER, str(labels.root)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        confirmed = [int(process.stdout.readline()) for _ in range(25)]
        process.kill()
        confirmed += [int(line) for line in process.stdout]
    labelled = labels.labelled()
    assert {f"{number}.jpg" for number in confirmed} <= set(labelled)
    assert len(labelled) <= len(confirmed) + 1
    assert all(label.captions == (f"label {path[:-4]}",) for path, label in labelled.items())
    (outcome,) = labels.change([change("after.jpg", "a label of the next server")])
    assert not outcome.conflict
