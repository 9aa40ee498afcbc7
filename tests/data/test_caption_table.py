"""Reading and changing captions.csv: nothing that another program or a person wrote is lost."""

import errno
import os
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from m1clip.data import caption_table
from m1clip.data.caption_table import Caption, clean_caption, lock_captions, read_captions
from m1clip.errors import UserError


def table(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "captions.csv"
    path.write_text(text, encoding="utf-8")
    return path


def test_new_table_has_the_columns_of_the_data_docs(tmp_path: Path) -> None:
    made = read_captions(tmp_path / "captions.csv")
    made.replace("a/1.jpg", ["a dog", "dog, beach"], split="test")
    made.replace("b.jpg", ['ein Hund; «am Strand», "müde"'], split="train")
    made.write()
    data = made.path.read_bytes()
    assert data.startswith("\ufeffimage,caption,source,split\r\n".encode())
    again = read_captions(made.path)
    assert again.of("a/1.jpg") == [
        Caption("a dog", split="test"),
        Caption("dog, beach", split="test"),
    ]
    assert [caption.text for caption in again.of("b.jpg")] == ['ein Hund; «am Strand», "müde"']
    again.write()
    assert made.path.read_bytes() == data


def test_rows_columns_and_captions_of_others_stay(tmp_path: Path) -> None:
    path = table(
        tmp_path,
        "filename;author;text;source\na.jpg;Ann;a cat;model:x\nb.jpg;Bob;mine;person\nb.jpg;;made;model:x\n",
    )
    changed = read_captions(path)
    changed.replace("b.jpg", ["better"], split="val")
    changed.replace("a.jpg", ["a tabby"])
    changed.write()
    lines = path.read_text(encoding="utf-8-sig").splitlines()
    assert lines == [
        "filename;author;text;source;split",
        "a.jpg;Ann;a cat;model:x",
        "a.jpg;;a tabby;person;",
        "b.jpg;Bob;better;person;val",
        "b.jpg;;made;model:x;val",
    ]
    changed = read_captions(path)
    changed.replace("b.jpg", [])
    assert [caption.source for caption in changed.of("b.jpg")] == ["model:x"]


def test_template_rows_are_filled_and_stay_when_a_caption_is_removed(tmp_path: Path) -> None:
    path = table(tmp_path, "image,caption\na.jpg,\nb.jpg,\n")
    changed = read_captions(path)
    changed.replace("b.jpg", ["a dog"])
    assert changed.rows == [["a.jpg", ""], ["b.jpg", "a dog"]]
    changed.replace("b.jpg", [])
    assert changed.rows == [["a.jpg", ""], ["b.jpg", ""]]
    changed.replace("c.jpg", ["a cat"])
    assert changed.images() == ["a.jpg", "b.jpg", "c.jpg"]


def test_image_in_a_folder_beside_the_table_is_the_same_image(tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    changed = read_captions(table(tmp_path, "image,caption\na.jpg,a dog\n"))
    changed.replace("images/a.jpg", ["a dog", "two"])
    assert changed.rows == [["a.jpg", "a dog"], ["a.jpg", "two"]]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a,b\n1,2\n", "no image and no caption column"),
        (b"\x89PNG\r\n\x1a\n", "a PNG image"),
        (b"image,caption\na.jpg,caf\x81\xe9\n", "contains bytes that are not text"),
        (b'image,caption\na.jpg,"a dog\nb.jpg,a cat\n', "a quote is not closed"),
    ],
)
def test_what_is_not_a_table_is_an_error_and_stays(
    tmp_path: Path, content: bytes, message: str
) -> None:
    path = tmp_path / "captions.csv"
    path.write_bytes(content)
    with pytest.raises(UserError, match=message):
        read_captions(path)
    assert path.read_bytes() == content
    link = tmp_path / "other.csv"
    link.symlink_to(path)
    with pytest.raises(UserError, match="symbolic link"):
        read_captions(link)
    with pytest.raises(UserError, match="not a regular file"):
        read_captions(tmp_path)


def test_bad_captions_are_explained() -> None:
    assert clean_caption(" a\x00dog\non\ta\x7fbeach\x85 ") == "a dog on a beach"
    with pytest.raises(UserError, match="at most 1,000 characters, this one 10,000"):
        clean_caption("x" * 10_000)
    with pytest.raises(UserError, match="lone surrogate"):
        clean_caption("a \ud83d dog")
    assert clean_caption("a 🐕") == "a 🐕"
    assert clean_caption("a \u202egod\u202c") == "a god"
    assert clean_caption("👩\u200d🌾 می\u200cخواهم") == "👩\u200d🌾 می\u200cخواهم", (
        "joiners are a part of words"
    )
    assert clean_caption("caf\ufffd au lait") == "caf au lait", "no table may contain U+FFFD"


def test_full_disk_keeps_the_old_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changed = read_captions(table(tmp_path, "image,caption\na.jpg,a dog\n"))
    changed.replace("b.jpg", ["a cat"])

    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError, match="not saved: the disk is full"):
        changed.write()
    assert changed.path.read_text(encoding="utf-8") == "image,caption\na.jpg,a dog\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["captions.csv"]


def test_writers_at_the_same_time_lose_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "captions.csv"

    def write(writer: int) -> None:
        for number in range(5):
            with lock_captions(path):
                changed = read_captions(path)
                changed.replace(f"{writer}-{number}.jpg", ["a dog"])
                changed.write()

    threads = [threading.Thread(target=write, args=(writer_number,)) for writer_number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(read_captions(path).images()) == 20
    monkeypatch.setattr(caption_table, "LOCK_SECONDS", 0.01)
    with (
        lock_captions(path),
        pytest.raises(UserError, match="another program is writing it"),
        lock_captions(path),
    ):
        pass


@settings(max_examples=50, deadline=None)
@given(captions=st.lists(st.text(st.characters(exclude_categories=["Cs"])), max_size=3))
def test_any_text_is_read_back(
    tmp_path_factory: pytest.TempPathFactory, captions: list[str]
) -> None:
    path = tmp_path_factory.mktemp("any") / "captions.csv"
    made = read_captions(path)
    cleaned = [text for caption in captions if (text := clean_caption(caption))]
    made.replace("a.jpg", cleaned)
    made.replace("b.jpg", ["last"])
    made.write()
    again = read_captions(path)
    assert [caption.text for caption in again.of("a.jpg")] == list(dict.fromkeys(cleaned))
    assert [caption.text for caption in again.of("b.jpg")] == ["last"]
