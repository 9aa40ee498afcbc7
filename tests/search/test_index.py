"""An index after any changes, kills and full disks equals a new one.

Unchanged files are not read, bad ones listed.
"""

import contextlib
import errno
import functools
import http.client
import itertools
import json
import math
import os
import random
import shutil
import signal
import sqlite3
import struct
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from filelock import FileLock
from hypothesis import given, settings
from hypothesis import strategies as st
from image_sets import image
from photos import content, make_photos, save_model
from PIL import Image
from small_run import Command, exit_code

import m1clip
from m1clip import console
from m1clip.data.images import FileImage
from m1clip.errors import UserError
from m1clip.model.pretrained import packages
from m1clip.search import database, location, read_photos, reader, writer
from m1clip.search import index as module
from m1clip.search import vectors as vectors_module
from m1clip.search.database import connect
from m1clip.search.index import update_index
from m1clip.search.labels import LABELS_DATABASE, Change, Label, Labels
from m1clip.search.location import DATABASE, INDEX_FOLDER, find_index
from m1clip.web.photos import Photos


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("models") / "model")


@pytest.fixture(autouse=True)
def _data_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))


def close(one: Path, other: Path) -> None:
    """Equal facts, and vectors that differ by no more than the order of sums in a batch."""
    first, second = content(one), content(other)
    assert first.keys() == second.keys()
    for path, (*facts, vectors) in first.items():
        *other_facts, other_vectors = second[path]
        assert facts == other_facts
        assert (vectors is None) == (other_vectors is None)
        for key in vectors or ():  # type: ignore[union-attr]
            np.testing.assert_allclose(vectors[key], other_vectors[key], atol=2e-3)  # type: ignore[index]


def fresh(photos: Path, model: Path) -> Path:
    """A new index of the same files."""
    copy = Path(tempfile.mkdtemp(dir=photos.parent)) / "copy"
    shutil.copytree(photos, copy, ignore=shutil.ignore_patterns(INDEX_FOLDER), symlinks=True)
    return update_index(copy, model).folder


NAMES = st.sampled_from(["a.jpg", "b.jpg", "x/a.jpg", "x/c.png", "x/y/d.jpg", "e.txt", ".f.jpg"])
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["write", "break", "move", "copy", "delete", "index"]),
        NAMES,
        NAMES,
        st.integers(0, 5),
    ),
    min_size=4,
    max_size=12,
)


@pytest.mark.parametrize("seconds", [-(2**31), 2**36])
def test_photo_of_a_time_that_no_clock_shows_is_indexed_once(
    model: Path, tmp_path: Path, seconds: int
) -> None:
    """SQLite cannot store the nanoseconds of the year 4147."""
    make_photos(tmp_path, 2)
    photo = next(tmp_path.rglob("*.jpg"))
    os.utime(photo, (seconds, seconds))
    assert update_index(tmp_path, model).added == 2
    again = update_index(tmp_path, model)
    assert (again.added, again.reused, again.indexed) == (0, 0, 2)


@settings(max_examples=10)
@given(STEPS)
def test_incremental_index_equals_new_index(
    model: Path, steps: list[tuple[str, str, str, int]]
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        photos = Path(folder) / "photos"
        make_photos(photos, 2)
        clock = 10**18
        for action, name, other, seed in steps:
            path, second = photos / name, photos / other
            second.parent.mkdir(parents=True, exist_ok=True)
            path.parent.mkdir(parents=True, exist_ok=True)
            if action == "write":
                image(seed).save(path, "png")
            elif action == "break":
                path.write_bytes(b"no image")
            elif action == "index":
                update_index(photos, model)
            elif path.is_file() and path != second:
                {"move": shutil.move, "copy": shutil.copy2, "delete": lambda a, _: os.unlink(a)}[
                    action
                ](path, second)
            clock += 10**9
            if action in ("write", "break"):
                os.utime(path, ns=(clock, clock))
        report = update_index(photos, model)
        close(report.folder, fresh(photos, model))
        rows = (
            np.memmap(report.folder / next(report.folder.glob("vectors-*")), np.float16)
            if report.indexed
            else ()
        )
        assert report.indexed <= 7
        assert len(rows) // 16 <= 2 + len(steps)


def test_folder_without_photos_is_an_error_before_the_model_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setattr(m1clip.search.index, "resolve_model", lambda _: pytest.fail("a model"))
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(UserError, match="empty: contains no photos; give the folder that"):
        update_index(empty)
    (empty / "notes.txt").touch()
    (empty / ".hidden.jpg").touch()
    with pytest.raises(UserError, match=r"no photos \(there are 1 other files, 1 hidden ones\)"):
        update_index(empty)
    assert sorted(path.name for path in empty.iterdir()) == [".hidden.jpg", "notes.txt"]
    assert not (tmp_path / "data").exists()


def test_unchanged_files_are_not_read_and_moved_ones_keep_their_vectors(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    photos = make_photos(tmp_path / "photos", 10)
    shutil.copy2(photos / "b/0003.jpg", photos / "b/0004.jpg")
    report = update_index(photos, model)
    assert (report.added, report.reused, report.indexed) == (10, 1, 11)
    before = content(photos / INDEX_FOLDER)
    (photos / "a/0000.jpg").rename(photos / "new name.jpg")
    shutil.copy2(photos / "a/0002.jpg", photos / "copy.jpg")
    (photos / "b/0001.jpg").unlink()
    read: list[str] = []
    original = FileImage.read
    monkeypatch.setattr(
        FileImage, "read", lambda self: read.append(os.path.basename(self.path)) or original(self)
    )
    monkeypatch.setattr(m1clip.Model, "encode_image", lambda *_: pytest.fail("encoded again"))
    report = update_index(photos)
    assert sorted(read) == ["copy.jpg", "new name.jpg"]
    # One file is gone; the renamed one is not.
    assert (report.added, report.reused, report.removed, report.indexed) == (0, 2, 1, 11)
    after = content(photos / INDEX_FOLDER)
    assert after[b"new name.jpg"] == before[b"a/0000.jpg"]
    read.clear()
    update_index(photos)
    assert read == []


def test_each_model_has_its_own_vectors(model: Path, tmp_path: Path) -> None:
    photos, other = (
        make_photos(tmp_path / "photos", 4),
        save_model(tmp_path / "other", embed_dim=24),
    )
    update_index(photos, model)
    assert update_index(photos, other).added == 4
    assert {len(vectors) for *_, vectors in content(photos / INDEX_FOLDER).values()} == {2}  # type: ignore[arg-type]
    assert m1clip.Index(photos).dim == 24
    assert m1clip.Index(photos, model).dim == 16
    with pytest.raises(UserError, match="no vectors of"):
        m1clip.Index(photos, tmp_path)


def test_last_model_is_searched_although_the_clock_was_set_back(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    photos, other = make_photos(tmp_path / "photos", 4), save_model(tmp_path / "other", 24)
    update_index(photos, model)
    now = time.time
    for hours, path, dim in ((1, other, 24), (2, model, 16), (3, other, 24)):
        monkeypatch.setattr(time, "time", lambda hours=hours: now() - 3600 * hours)
        update_index(photos, path)
        assert m1clip.Index(photos).dim == dim
        assert update_index(photos).added == 0, "without a model: the last one"
        assert m1clip.Index(photos).dim == dim


def test_model_for_later_is_searched_once_all_images_have_its_vectors(
    model: Path, tmp_path: Path
) -> None:
    """What the button of the Label page does with a trained model."""
    photos, other = make_photos(tmp_path / "photos", 4), save_model(tmp_path / "other", 24)
    update_index(photos, model)
    before = m1clip.Index(photos)
    hashes = []

    def interrupt(done: int, total: int) -> None:
        hashes.append(m1clip.Index(photos).dim)
        if done:
            raise KeyboardInterrupt

    with console.on_progress(interrupt), pytest.raises(KeyboardInterrupt):
        update_index(photos, other, when_done=True)
    assert set(hashes) == {16}
    update_index(photos, other, when_done=True)
    assert m1clip.Index(photos).dim == 24
    before.refresh()
    assert before.outdated


def test_interrupted_index_says_that_the_same_command_continues(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    photos = make_photos(tmp_path / "photos", 4)

    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with console.on_progress(interrupt):
        assert exit_code("index", photos, "--model", model) == 130
    assert capsys.readouterr().err == (
        "m1clip: interrupted; the same command continues with the other images\n"
    )
    assert exit_code("index", photos, "--model", model) == 0
    assert "images     4 (" in capsys.readouterr().out


def test_bad_files_are_skipped_counted_and_listed(model: Path, tmp_path: Path) -> None:
    photos = make_photos(tmp_path / "photos", 3)
    hostile = [
        b"new\nline.jpg",
        b"\xff\xfe.jpg",
        "émoji 🐕 '\"; DROP TABLE files.jpg".encode(),
        b"-k.jpg",
        b"%s<b>.JPG",
    ]
    for number, name in enumerate(hostile):
        image(100 + number).save(os.path.join(os.fsencode(photos), name), "jpeg")
    (photos / "empty.jpg").touch()
    (photos / "text.png").write_text("no image")
    (photos / "cut.jpg").write_bytes((photos / "a/0000.jpg").read_bytes()[:300])
    (photos / "folder.jpg").mkdir()
    os.mkfifo(photos / "pipe.jpg")
    (photos / "link.jpg").symlink_to("/etc/passwd")
    (photos / "loop").symlink_to(photos)
    (photos / "notes.txt").touch()
    (photos / ".hidden.jpg").touch()
    report = update_index(photos, model)
    assert (report.indexed, report.hidden, report.links, report.other) == (8, 1, 2, 2)
    assert [name for name, _ in report.problems] == ["cut.jpg", "empty.jpg", "text.png"]
    assert all("\n" not in why for _, why in report.problems)
    stored = content(report.folder)
    assert set(hostile) < stored.keys()
    assert update_index(photos).problems == report.problems
    for name in hostile:
        results = m1clip.Index(photos).search(
            like=[os.fsdecode(os.path.join(os.fsencode(photos), name))], k=1
        )
        assert os.fsencode(results.nearest[0].path) == name


def test_index_with_decoding_processes_equals_that_with_threads(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    photos = make_photos(tmp_path / "photos", 40)
    (photos / "bad.jpg").write_bytes(b"no image")
    other = tmp_path / "other"
    shutil.copytree(photos, other)  # modification times are kept
    in_threads = update_index(photos, model)
    monkeypatch.setattr(read_photos, "decode_processes", lambda items, cpus: 2)
    monkeypatch.setattr(read_photos, "read_file", None)  # not read in this process
    report = update_index(other, model)
    assert report.indexed == 40
    assert [(name, "not an image" in why) for name, why in report.problems] == [("bad.jpg", True)]
    close(in_threads.folder, report.folder)


def test_exif_date_and_orientation(model: Path, tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    exif.get_ifd(0x8769)[0x9003] = "2024:05:31 12:13:14"
    (tmp_path / "photos").mkdir()
    image(1, (60, 40)).save(tmp_path / "photos/a.jpg", exif=exif)
    update_index(tmp_path / "photos", model)
    (facts,) = content(tmp_path / "photos" / INDEX_FOLDER).values()
    assert facts[4:8] == (40, 60, "2024-05-31T12:13:14", 6)


def test_second_indexer_reports_the_first(model: Path, tmp_path: Path) -> None:
    photos = make_photos(tmp_path / "photos", 2)
    index_folder = update_index(photos, model).folder
    with (
        FileLock(index_folder / "lock"),
        pytest.raises(UserError, match="another process is indexing"),
    ):
        update_index(photos)


def test_read_only_folder_has_index_in_user_data(model: Path, tmp_path: Path) -> None:
    photos = make_photos(tmp_path / "photos", 2)
    (photos / INDEX_FOLDER).touch()  # root may write everywhere, but not into a file
    report = update_index(photos, model)
    assert report.folder.is_relative_to(tmp_path / "data")
    assert find_index(photos / "a") == (report.folder, photos)
    assert find_index() == (report.folder, photos)  # indexed last
    assert m1clip.Index(photos).root == photos


@pytest.mark.parametrize("when", [1, 2, 4])  # the first is of the folder that contains the new file
def test_full_disk_keeps_what_was_indexed(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: int
) -> None:
    photos = make_photos(tmp_path / "photos", 12)
    calls = iter(range(1, 100))

    def fsync(handle: int) -> None:
        if next(calls) >= when:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(read_photos, "ENCODED_BATCH", 3)
        patch.setattr(writer, "SAVE_SECONDS", 0.0)
        patch.setattr(writer.os, "fsync", fsync)
        with pytest.raises(UserError, match="the disk is full"):
            update_index(photos, model)
    saved = 3 * max(0, when - 2)
    assert len(content(photos / INDEX_FOLDER)) == saved
    assert update_index(photos).added == 12 - saved
    close(photos / INDEX_FOLDER, fresh(photos, model))


def test_vectors_that_a_killed_indexer_left_uncommitted_are_not_searched(
    model: Path, tmp_path: Path
) -> None:
    photos = make_photos(tmp_path / "photos", 3)
    (file,) = update_index(photos, model).folder.glob("vectors-*")
    with file.open("ab") as end:
        end.write(bytes(16 * 2 + 5))  # a vector and a part of the next
    assert m1clip.Index(photos).search("a").searched == 3
    image(9).save(photos / "new.jpg")
    size = file.stat().st_size
    update_index(photos)
    assert file.stat().st_size == size  # overwritten, not truncated
    assert m1clip.Index(photos).search("a").searched == 4
    close(photos / INDEX_FOLDER, fresh(photos, model))


def test_vectors_of_deleted_images_are_removed(model: Path, tmp_path: Path) -> None:
    photos = make_photos(tmp_path / "photos", 10)
    index_folder = update_index(photos, model).folder
    opened = m1clip.Index(photos)
    for path in sorted((photos / "a").iterdir())[:3]:
        path.unlink()
    update_index(photos)
    (file,) = index_folder.glob("vectors-*")
    assert file.stat().st_size == 7 * 16 * 2
    close(index_folder, fresh(photos, model))
    assert len(opened.search(like=[photos / "b/0001.jpg"]).nearest) == 7  # opened before


@pytest.mark.slow
def test_watched_folder_is_kept_up_to_date(model: Path, tmp_path: Path) -> None:
    pytest.importorskip("watchfiles")
    photos = make_photos(tmp_path / "photos", 2)
    process = Command("index", str(photos), "--model", str(model), "--watch", cwd=tmp_path)

    def indexed() -> set[bytes]:
        with contextlib.suppress(UserError):  # the index is being created
            return (
                set(content(photos / INDEX_FOLDER))
                if (photos / INDEX_FOLDER / DATABASE).exists()
                else set()
            )
        return set()

    process.wait_until(lambda: len(indexed()) == 2)
    image(7).save(photos / "new.jpg")
    process.wait_until(lambda: b"new.jpg" in indexed())
    (photos / "new.jpg").unlink()
    process.wait_until(lambda: b"new.jpg" not in indexed())
    process.send_signal(2)
    assert process.wait() == 0


def slow_saves(hang_after: float = math.inf) -> None:
    """In the process that is killed: many commits, slow reads, and the precision of the other tests.

    After some reads it waits for the kill, which so comes before the end on any schedule.
    """
    read_photos.ENCODED_BATCH = 4
    writer.SAVE_SECONDS = 0.0
    read, reads = read_photos.read_file, itertools.count()

    def slow_read(*args: Any) -> Any:
        time.sleep(0.05)
        while next(reads) >= hang_after:
            time.sleep(0.01)
        return read(*args)

    read_photos.read_file = slow_read


def kill_at_random_moments(
    photos: Path, model: Path, kills: int, seconds: float, hang_after: float = math.inf
) -> int:
    """Index again and again, and kill it each time.

    Returns the number of kills before it was finished.
    """
    chance, interrupted, database = random.Random(0), 0, photos / INDEX_FOLDER / DATABASE
    for _ in range(kills):
        began = time.time()  # it writes to the database when it starts
        prepare = functools.partial(slow_saves, hang_after)
        process = Command(
            "index", str(photos), "--model", str(model), cwd=photos.parent, prepare=prepare
        )
        process.wait_until(
            lambda began=began: database.exists() and database.stat().st_mtime > began
        )  # type: ignore[misc]
        time.sleep(seconds * chance.random())
        process.send_signal(9)
        interrupted += process.wait() == -9
    update_index(photos)
    return interrupted


@pytest.mark.slow
def test_index_after_sigkills_equals_undisturbed_index(model: Path, tmp_path: Path) -> None:
    photos = make_photos(tmp_path / "photos", 60)
    assert kill_at_random_moments(photos, model, 3, 0.6, hang_after=15) == 3
    close(photos / INDEX_FOLDER, fresh(photos, model))


@pytest.mark.long("Kill while indexing photos")
def test_many_kills_while_indexing(model: Path, tmp_path: Path, counts: dict[str, float]) -> None:
    photos = make_photos(tmp_path / "photos", 10_000)
    counts["SIGKILLs at random moments, 10,000 images"] = kill_at_random_moments(
        photos, model, 20, 20.0
    )
    close(photos / INDEX_FOLDER, fresh(photos, model))


# A reader in every state that a writer leaves


def test_index_without_a_model_leaves_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    photos = make_photos(tmp_path / "photos", 1)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(packages, "installed", lambda tower: False)  # the towers of `general`
    messages = {
        (): "m1clip: there is no model yet; to get one:\n",
        ("--model", str(tmp_path / "nowhere")): "m1clip: ",
    }
    for words, start in messages.items():
        assert exit_code("index", photos, *words) == 2
        printed = capsys.readouterr()
        assert printed.err.startswith(start)
        assert (printed.err + printed.out).count("m1clip: ") == 1
        assert not (photos / INDEX_FOLDER).exists()


def test_folder_that_does_not_exist_is_not_called_unindexed(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="photoz: no such folder"):
        find_index(tmp_path / "photoz")


@pytest.mark.parametrize("state", ["nothing", "tables", "model"])
def test_index_without_vectors_is_reported_in_one_line(
    state: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    photos = make_photos(tmp_path / "photos", 1)
    (photos / INDEX_FOLDER).mkdir()
    if state == "nothing":  # killed before the tables were created
        (photos / INDEX_FOLDER / DATABASE).touch()
    else:
        with contextlib.closing(connect(photos / INDEX_FOLDER, write=True)) as db:
            if state == "model":
                db.execute(
                    "INSERT INTO models (hash, path, stamp, used) VALUES ('a', ?, '', 1)",
                    (str(model),),
                )
                db.commit()
    image(1).save(tmp_path / "rex.jpg")
    commands = (
        ["search", "a", "--index", photos],
        ["duplicates", photos],
        ["teach", "Rex", tmp_path / "rex.jpg"],
    )
    for words in commands:
        more = ["--index", photos] if words[0] == "teach" else []
        assert exit_code(*words, *more) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        assert "m1clip index" in error
    served = Photos(photos)
    served.warm_up()  # in a thread: prints nothing
    answer = served.get("/api/library", {})
    assert answer is not None
    assert (answer[0], b"m1clip index" in answer[2]) == (400, True)
    assert update_index(photos, model).indexed == 1


def the_file(index_folder: Path) -> Path:
    (file,) = index_folder.glob("vectors-*")
    return file


@pytest.mark.parametrize("damage", ["shorter", "empty", "missing", "not finite"])
def test_damaged_vectors_are_reported_with_a_hint_and_restored(
    damage: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    photos = make_photos(tmp_path / "photos", 6)
    file = the_file(update_index(photos, model).folder)
    opened = m1clip.Index(photos)
    before = opened.search("a dog")
    if damage == "not finite":
        file.write_bytes(b"\xff" * file.stat().st_size)
    elif damage == "missing":
        file.unlink()
    else:
        os.truncate(file, 0 if damage == "empty" else 2 * 16 * 2 + 5)
    assert exit_code("search", "a dog", "--index", photos) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert file.name in error
    assert f"m1clip index {photos}" in error
    assert opened.search("a dog") == before  # it has read them
    if damage == "not finite":
        file.unlink()  # as the hint says
    report = update_index(photos)
    assert report.added == (4 if damage == "shorter" else 6)
    close(report.folder, fresh(photos, model))
    for index in (opened, m1clip.Index(photos)):
        assert index.search("a dog").searched == 6


def test_index_that_has_lost_all_vectors_is_empty_until_they_are_restored(
    model: Path, tmp_path: Path
) -> None:
    photos = make_photos(tmp_path / "photos", 3)
    index_folder = update_index(photos, model).folder
    opened = m1clip.Index(photos)
    os.truncate(the_file(index_folder), 0)
    with contextlib.closing(connect(index_folder, write=True)) as db:
        writer.drop_lost_rows(db, index_folder, photos, 1)  # then the indexer is killed
    for call in (lambda: m1clip.Index(photos), lambda: opened.search(["a", "b"])):
        with pytest.raises(UserError, match="is empty; run m1clip index"):
            call()
    assert update_index(photos).added == 3
    assert opened.search(["a", "b"]).searched == 3


def kill_at(point: str) -> None:
    """In the process that is killed: it kills itself at a point of a save, or of a rewrite of the vectors."""
    read_photos.ENCODED_BATCH = 2
    writer.SAVE_SECONDS = 0.0
    save, create, remove_others = (
        writer.Writer.save,
        vectors_module.create,
        vectors_module.remove_others,
    )
    calls = iter(range(1, 100))

    def saved(own: Any) -> None:
        last = next(calls) == 2
        if last and point == "before the commit":
            own.file.flush()
            os.kill(os.getpid(), signal.SIGKILL)
        save(own)
        if last and point == "after the commit":
            os.kill(os.getpid(), signal.SIGKILL)

    def created(*args: Any) -> Any:
        made = create(*args)
        if point == "before the rewrite":
            os.kill(os.getpid(), signal.SIGKILL)
        return made

    def removed(index_folder: Path, model_id: int, generation: int | None) -> None:
        if point == "after the rewrite" and generation == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        remove_others(index_folder, model_id, generation)

    writer.Writer.save = saved  # type: ignore[method-assign]
    vectors_module.create = created
    vectors_module.remove_others = removed


@pytest.mark.slow
@pytest.mark.parametrize(
    ("point", "committed"),
    [
        ("before the commit", 8),
        ("after the commit", 10),
        ("before the rewrite", 4),
        ("after the rewrite", 4),
    ],
)
def test_reader_survives_the_death_of_a_writer(
    point: str, committed: int, model: Path, tmp_path: Path
) -> None:
    photos = make_photos(tmp_path / "photos", 6)
    index_folder = update_index(photos, model).folder
    opened = m1clip.Index(photos)
    if "rewrite" in point:
        for number in (0, 2):
            (photos / f"a/{number:04d}.jpg").unlink()
    else:
        for number in range(100, 108):
            image(number).save(photos / f"{number}.jpg")
    process = Command("index", str(photos), cwd=tmp_path, prepare=functools.partial(kill_at, point))
    assert process.wait() == -signal.SIGKILL
    for index in (opened, m1clip.Index(photos)):
        results = index.search(like=[photos / "b/0001.jpg"], k=20)
        assert results.searched == committed
        assert results.nearest[0].path == "b/0001.jpg"
        assert results.nearest[0].score == pytest.approx(1, abs=1e-3)
    on_disk = sum(file.stat().st_size for file in index_folder.glob("vectors-*")) // (16 * 2)
    assert on_disk == {"before the rewrite": 6}.get(point, 10)
    report = update_index(photos)
    the_file(index_folder)  # what the process left is deleted
    for index in (opened, m1clip.Index(photos)):
        assert index.search(like=[photos / "b/0001.jpg"], k=20).searched == report.indexed
    close(index_folder, fresh(photos, model))


@pytest.mark.slow
def test_server_survives_a_vectors_file_that_gets_shorter(model: Path, tmp_path: Path) -> None:
    photos = make_photos(tmp_path / "photos", 20)
    file = the_file(update_index(photos, model).folder)
    process = Command("serve", str(photos), "--port", "0", "--no-browser", cwd=tmp_path)
    process.wait_until(lambda: "http://" in process.read()[0])
    port = int(process.read()[0].partition("127.0.0.1:")[2].partition("/")[0])

    def searched() -> Any:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        connection.request("GET", "/api/search?text=dog")
        answer = json.loads(connection.getresponse().read())
        connection.close()
        return answer.get("searched", answer.get("error"))

    assert searched() == 20
    os.truncate(file, 0)
    assert searched() == 20  # of what it has read
    with contextlib.closing(connect(photos / INDEX_FOLDER, write=True)) as db:
        db.execute("INSERT OR REPLACE INTO about VALUES ('changed', 1)")
        db.commit()
    assert "truncated (0 of 20 vectors are left)" in searched()
    assert update_index(photos).added == 20
    assert searched() == 20
    assert process.process.is_alive()


def write_half_a_transaction(database: Path) -> None:
    """Write a part of a transaction to a database in a process that is killed before it commits."""
    code = (
        "import os, sqlite3, sys; db = sqlite3.connect(sys.argv[1]); db.execute('PRAGMA cache_size = 1')\n"
        "db.execute('BEGIN'); db.execute('DELETE FROM vectors')\n"
        "for number in range(300): db.execute('INSERT INTO about VALUES (?, ?)', (str(number), 'x' * 2000))\n"
        "os.kill(os.getpid(), 9)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(database)], check=False, timeout=300)
    assert done.returncode == -signal.SIGKILL
    assert database.with_name(f"{database.name}-journal").stat().st_size > 0


def test_reader_undoes_the_commit_of_a_killed_writer(model: Path, tmp_path: Path) -> None:
    photos = make_photos(tmp_path / "photos", 3)
    index_folder = update_index(photos, model).folder
    opened = m1clip.Index(photos)
    for _ in range(2):
        write_half_a_transaction(index_folder / DATABASE)
        assert opened.search("a").searched == 3
        write_half_a_transaction(index_folder / DATABASE)
        assert m1clip.Index(photos).search("a").searched == 3


def test_search_sees_rows_and_vectors_of_one_state(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a query is encoded, the rows are renumbered."""
    photos = make_photos(tmp_path / "photos", 10)
    update_index(photos, model)
    opened = m1clip.Index(photos)
    encode = type(opened.model).encode_image

    def slow_encode(self: Any, images: Any) -> Any:
        monkeypatch.undo()
        for path in sorted((photos / "a").iterdir())[:3]:
            path.unlink()
        update_index(photos, model)
        return encode(self, images)

    monkeypatch.setattr(type(opened.model), "encode_image", slow_encode)
    results = opened.search(like=[photos / "b/0009.jpg"], k=3)
    assert (results.nearest[0].path, results.searched) == ("b/0009.jpg", 7)


def test_index_keeps_its_model_until_it_is_opened_again(model: Path, tmp_path: Path) -> None:
    photos = make_photos(tmp_path / "photos", 4)
    update_index(photos, model)
    served = Photos(photos)
    assert json.loads(served.get("/api/library", {})[2])["images"] == 4  # type: ignore[index]
    opened = m1clip.Index(photos)
    update_index(photos, save_model(tmp_path / "other", embed_dim=24))
    assert len(opened.search("a dog").nearest) == 4
    assert (opened.dim, opened.outdated, m1clip.Index(photos).dim) == (16, True, 24)
    (photos / "a/0000.jpg").unlink()
    update_index(photos)
    for _ in range(2):  # the first finds that it is outdated
        assert served.get("/api/search", {"text": "dog"})[0] == 200  # type: ignore[index]
    facts = json.loads(served.get("/api/library", {})[2])  # type: ignore[index]
    assert (facts["model"], facts["images"]) == ("other", 3)


# An index from a stranger


def change(index_folder: Path, *statements: str) -> None:
    with contextlib.closing(sqlite3.connect(index_folder / DATABASE)) as db:
        for statement in statements:
            db.execute(statement)
        db.commit()


@pytest.fixture
def gift(model: Path, tmp_path: Path) -> Path:
    """A folder of photos with an index, beside it files that no command on the folder may touch."""
    photos = make_photos(tmp_path / "gift", 4)
    update_index(photos, model)
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_bytes(bytes(10_000))
    image(5).save(outside / "secret.jpg")
    return photos


def outside_files(photos: Path) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in (photos.parent / "outside").rglob("*")}


VALUES = ("-1", "2.5", "'../../outside/precious'", "'/etc/passwd'", "x'00'", f"{10**17}")


@pytest.mark.parametrize("column", ["generation", "dim"])
def test_only_numbers_name_a_file_of_vectors(gift: Path, column: str) -> None:
    before = outside_files(gift)
    image(9).save(gift / "new.jpg")
    for value in VALUES:
        shutil.copytree(gift / INDEX_FOLDER, gift.parent / "copy", dirs_exist_ok=True)
        change(gift / INDEX_FOLDER, f"UPDATE models SET {column} = {value}")
        with pytest.raises(UserError, match=r"not a valid index|No such file|vectors-1-"):
            m1clip.Index(gift)
        with contextlib.suppress(UserError):
            update_index(gift)
        shutil.rmtree(gift / INDEX_FOLDER)
        (gift.parent / "copy").rename(gift / INDEX_FOLDER)
    assert outside_files(gift) == before


def test_tables_of_others_and_stored_roots_are_not_used(gift: Path) -> None:
    change(gift / INDEX_FOLDER, "INSERT OR REPLACE INTO about VALUES ('root', '/')")
    assert m1clip.Index(gift).root == gift
    change(
        gift / INDEX_FOLDER,
        "CREATE TRIGGER evil AFTER INSERT ON files BEGIN DELETE FROM images; END",
    )
    for call in (m1clip.Index, update_index):
        with pytest.raises(UserError, match="other tables than m1clip's"):
            call(gift)


COLUMNS = {
    "about": ("value",),
    "files": ("path", "bytes", "mtime_ns", "image", "problem"),
    "images": ("sha256", "width", "height", "taken", "perceptual_hash", "thumb"),
    "models": ("hash", "path", "stamp", "used"),
    "vectors": ("image", "row"),
}


@pytest.mark.parametrize("table", COLUMNS)
def test_values_of_any_type_are_rejected_or_do_not_count(
    gift: Path, model: Path, table: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = m1clip.load(model)
    monkeypatch.setattr(m1clip, "load", lambda path: loaded)
    database = gift / INDEX_FOLDER / DATABASE
    original = database.read_bytes()
    first = "image = 1" if table == "vectors" else "rowid = 1"
    for column, value in itertools.product(COLUMNS[table], ("NULL", "'text'", "x'00ff'")):
        database.unlink()
        database.write_bytes(original)
        try:
            change(gift / INDEX_FOLDER, f"UPDATE {table} SET {column} = {value} WHERE {first}")
        except sqlite3.IntegrityError:
            continue
        with contextlib.suppress(UserError):
            index = m1clip.Index(gift)
            results = index.search(["a", "b"], like=[2])
            assert 3 <= len(results.nearest) <= 4
            assert 3 <= len(index.newest().nearest) <= 4
            index.duplicates()
            index.folders()
            update_index(gift)


def test_trigger_whose_name_belongs_to_sqlite_is_rejected(gift: Path) -> None:
    change(
        gift / INDEX_FOLDER,
        "CREATE TRIGGER hidden AFTER UPDATE ON models BEGIN DELETE FROM images; END",
        "PRAGMA writable_schema = ON",
        "UPDATE sqlite_master SET name = 'sqlite_hidden', sql = replace(sql, 'hidden',"
        " 'sqlite_hidden') WHERE type = 'trigger'",
    )
    for call in (m1clip.Index, update_index):
        with pytest.raises(UserError, match="other tables than m1clip's"):
            call(gift)


@pytest.mark.parametrize("database", [DATABASE, "concepts.sqlite"])
def test_view_in_place_of_a_table_is_not_computed(gift: Path, database: str) -> None:
    """It could be computed forever; this one is an error."""
    m1clip.Index(gift).teach("Rex", [1])
    table = "about" if database == DATABASE else "examples"
    names = ("name", "value", "sha256", "model", "vector", "positive", "time")
    columns = ", ".join(f"abs(-9223372036854775807 - 1) AS {name}" for name in names)
    with contextlib.closing(sqlite3.connect(gift / INDEX_FOLDER / database)) as db:
        db.execute(f"DROP TABLE {table}")
        db.execute(f"CREATE VIEW {table} AS SELECT {columns}")
        db.commit()
    with pytest.raises(UserError, match="other tables than m1clip's"):
        m1clip.Index(gift).concepts.names()


def test_one_large_number_of_a_vector_needs_no_memory(gift: Path) -> None:
    change(gift / INDEX_FOLDER, "UPDATE vectors SET row = 1000000 WHERE row = 3")
    os.truncate(gift / INDEX_FOLDER / "vectors-1-0.f16", 2**30)  # sparse
    image(9).save(gift / "new.jpg")
    for call in (m1clip.Index, update_index):
        with pytest.raises(UserError, match="bad numbers of vectors"):
            call(gift)


def test_vectors_of_another_length_than_those_of_the_model_are_reported(gift: Path) -> None:
    change(gift / INDEX_FOLDER, "UPDATE models SET dim = 8")
    index = m1clip.Index(gift)
    for query in ({"text": "dog"}, {"text": ["dog", "beach"]}, {"like": [gift / "a/0000.jpg"]}):
        with pytest.raises(UserError, match="has vectors of 8 values, the model 16; delete"):
            index.search(**query)  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.filterwarnings("error")
def test_vectors_that_are_not_finite_are_reported_and_never_used(gift: Path, value: float) -> None:
    index = m1clip.Index(gift)
    index.teach("Rex", [1, 2])
    file = gift / INDEX_FOLDER / "vectors-1-0.f16"
    values = np.fromfile(file, np.float16)
    values[17] = value
    values.tofile(file)
    with pytest.raises(UserError, match=r"vectors-1-0\.f16: damaged"):
        m1clip.Index(gift)
    photos = Photos(gift)
    for path in ("/api/search", "/api/label/queue", "/api/label/similar", "/api/duplicates"):
        answer = photos.get(path, {"text": "dog", "page": "a", "id": "1"})
        assert answer is not None
        assert answer[0] == 400
        assert b"damaged (not finite)" in answer[2]


EXAMPLE = {
    "name": "'dog'",
    "sha256": "zeroblob(32)",
    "vector": "zeroblob(32)",
    "positive": "1",
    "time": "1",
}
ODD_EXAMPLES = [
    *(("positive", value) for value in ("5", "-9", "'x'", "NULL", "0.5")),
    *(
        ("vector", value)
        for value in ("zeroblob(33)", "zeroblob(30)", "NULL", "'text'", f"x'{'007e' * 16}'")
    ),
    *(("name", value) for value in ("NULL", "x'ff'")),
    *(("sha256", value) for value in ("'x'", "NULL", "7", "x'00'")),
]


@pytest.mark.parametrize(("column", "value"), ODD_EXAMPLES)
def test_examples_that_m1clip_did_not_write_do_not_count(
    gift: Path, column: str, value: str
) -> None:
    index = m1clip.Index(gift)
    index.teach("Rex", [1])
    values = EXAMPLE | {column: value}
    with contextlib.closing(sqlite3.connect(gift / INDEX_FOLDER / "concepts.sqlite")) as db:
        (model,) = db.execute("SELECT model FROM examples").fetchone()
        names = ", ".join(values)
        db.execute(
            f"INSERT INTO examples (model, {names}) VALUES (?, {', '.join(values.values())})",
            (model,),
        )
        db.commit()
    index.teach("Rex", [2])
    assert index.concepts.names() == {"Rex": (2, 0)}
    assert len(index.search("dog").nearest) == 4
    assert index.concepts.remove("dog") == (0 if column == "name" else 1)


def test_rows_of_files_outside_the_folder_do_not_count(gift: Path) -> None:
    """Their paths must not reach a script that reads `search --json`, or a training run on `teach --captions`."""
    index = m1clip.Index(gift)
    for text in ("Rex", "dog"):
        index.teach(text, [1, 2])
    for path in ("../outside/secret.jpg", "a/../../outside/secret.jpg", "/etc/x.jpg", "a/\\0.jpg"):
        name = path.replace("\\0", "\0").encode().hex()
        change(gift / INDEX_FOLDER, f"UPDATE files SET path = x'{name}' WHERE id = 1")
        index = m1clip.Index(gift)
        results = [*index.search("dog").nearest, *index.newest().nearest]
        assert [result.id for result in results].count(1) == 0
        assert len(results) == 6
        assert len(index.captions()) == 2
        assert len(index) == 3
        served = Photos(gift)
        served.get("/api/library", {})
        assert served.get("/photo", {"id": "1"}) is None
        with pytest.raises(UserError, match="no longer in the index"):
            index.file(1)
    update_index(gift)
    assert len(m1clip.Index(gift)) == 4


def test_only_images_of_the_folder_are_opened_in_a_viewer(
    gift: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An index may name a program, which the viewer of some systems would start."""
    started: list[list[str]] = []
    monkeypatch.setattr(subprocess, "Popen", lambda words, **_: started.append(words))
    words = ("search", "--like", gift / "a/0000.jpg", "-k", "1", "--index", gift, "--open")
    assert exit_code(*words) == 0
    assert started.pop()[1] == str(gift / "a/0000.jpg")
    (gift / "program.command").write_text("echo started")
    (gift / "link.jpg").symlink_to(gift.parent / "outside/secret.jpg")
    for name in ("program.command", "link.jpg"):
        change(
            gift / INDEX_FOLDER,
            f"UPDATE files SET path = CAST('{name}' AS BLOB) WHERE id = 1",
            "DELETE FROM files WHERE id != 1",
        )
        assert exit_code("search", "dog", "--all", "--index", gift, "--open") == 2
        assert f"--open: {gift / name}" in capsys.readouterr().err
    assert started == []


FILES = (DATABASE, "lock", "thumbnails", "concepts.sqlite", "vectors-1-0.f16")


@pytest.mark.parametrize("name", [INDEX_FOLDER, *(f"{INDEX_FOLDER}/{name}" for name in FILES)])
def test_links_in_an_index_are_rejected(
    gift: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    target = gift.parent / "outside" / "target"
    if (gift / name).exists():
        shutil.move(gift / name, target)
    elif name.endswith("thumbnails"):
        target.mkdir()
    (gift / name).symlink_to(target)
    before = outside_files(gift)
    image(9).save(gift / "new.jpg")
    for words in (
        ["index", gift],
        ["search", "a", "--index", gift],
        ["teach", "Rex", gift / "new.jpg", "--index", gift],
    ):
        assert exit_code(*words) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        assert f"{gift / name}: is a symbolic link" in error
    assert Photos(gift).get("/api/library", {})[0] == 400  # type: ignore[index]
    assert outside_files(gift) == before


@pytest.mark.parametrize("name", [name for name in FILES if name != "thumbnails"])
def test_hard_links_in_an_index_are_not_written_to(gift: Path, name: str) -> None:
    m1clip.Index(gift).teach("Rex", [1])
    precious = gift.parent / "outside" / "target"
    index_folder = gift / INDEX_FOLDER
    shutil.copy(index_folder / name, precious)
    (index_folder / name).unlink()
    (index_folder / name).hardlink_to(precious)
    before = precious.read_bytes()
    image(9).save(gift / "new.jpg")
    with pytest.raises(UserError, match=f"{name}: is a hard link"):
        update_index(gift)
    index = m1clip.Index(gift)
    assert len(index.search("Rex").nearest) == 4  # it can be read
    if name == "concepts.sqlite":
        with pytest.raises(UserError, match="is a hard link"):
            index.teach("Max", [2])
    assert precious.read_bytes() == before


@pytest.mark.parametrize("database", [DATABASE, "concepts.sqlite", LABELS_DATABASE])
def test_journal_that_names_another_file_is_rejected(gift: Path, database: str) -> None:
    """SQLite takes the name for that of a journal of several databases, and deletes it."""
    m1clip.Index(gift).teach("Rex", [1])
    labels = Labels(gift, gift / INDEX_FOLDER)
    skip = Change("a/0000.jpg", bytes(32), Label(()).version, (), skipped=True)
    labels.change([skip])
    before = outside_files(gift)
    victim, magic = os.fsencode(gift.parent / "outside/precious"), bytes.fromhex("d9d505f920a163d7")
    pages = (gift / INDEX_FOLDER / database).stat().st_size // 4096
    header = (magic + struct.pack(">IIIII", 0, 0, pages, 512, 4096)).ljust(512, b"\0")
    name = (
        struct.pack(">I", 2**30 // 4096 + 1) + victim + struct.pack(">II", len(victim), sum(victim))
    )
    (gift / INDEX_FOLDER / f"{database}-journal").write_bytes(header + name + magic)
    for call in (m1clip.Index, update_index):
        with pytest.raises(UserError, match="was not written by m1clip"):
            call(gift)
    if database == LABELS_DATABASE:  # a journal that came after the index was opened
        with pytest.raises(UserError, match="was not written by m1clip"):
            labels.change([replace(skip, sha256=bytes(range(32)))])
    assert outside_files(gift) == before


def test_index_of_another_user_is_used_only_if_its_folder_is_named(
    gift: Path, model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    below = gift / "a"
    update_index(make_photos(gift.parent / "mine", 1), model)  # the one indexed last
    user = os.geteuid()
    monkeypatch.setattr(location.os, "geteuid", lambda: user + 1)
    (gift.parent / "data/m1clip/last-folder").unlink()
    monkeypatch.chdir(below)
    for words in ([], ["--index", below]):
        assert exit_code("search", "a", *words) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        assert f"the index in {gift} belongs to another user" in error
    monkeypatch.chdir(gift)
    with pytest.raises(UserError, match="belongs to another user"):
        m1clip.Index()
    assert len(m1clip.Index(gift)) == 4  # asked for
    files = content(gift / INDEX_FOLDER)
    # What this user makes is their own.
    for imported in (location, module):
        monkeypatch.setattr(imported, "is_own", lambda folder: INDEX_FOLDER not in folder.parts)
    report = update_index(gift, model)
    # Nothing is written to the index of another user.
    assert report.folder.is_relative_to(gift.parent / "data")
    assert content(gift / INDEX_FOLDER) == files
    assert m1clip.Index(gift).folder == m1clip.Index().folder == report.folder


def test_file_replaced_by_a_link_while_indexing_is_not_read(
    gift: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    image(9).save(gift / "new.jpg")
    load = m1clip.load

    def swap_first(path: str) -> Any:  # after the folder was listed
        (gift / "new.jpg").unlink()
        (gift / "new.jpg").symlink_to(gift.parent / "outside/secret.jpg")
        return load(path)

    monkeypatch.setattr(m1clip, "load", swap_first)
    report = update_index(gift, model)
    assert (report.added, report.indexed) == (0, 4)
    assert report.problems == [("new.jpg", f"cannot be opened (a link out of {gift})")]


def test_index_that_another_program_has_locked_is_reported(
    gift: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(reader, "READ_SECONDS", 0.0)
    for name in ("READ_SECONDS", "WRITE_SECONDS"):
        monkeypatch.setattr(database, name, 0.0)
    with contextlib.closing(sqlite3.connect(gift / INDEX_FOLDER / DATABASE)) as other:
        other.execute("BEGIN EXCLUSIVE")
        for words in (["search", "a", "--index", gift], ["index", gift]):
            assert exit_code(*words) == 2
            error = capsys.readouterr().err
            assert (
                error.count("\n"),
                "another program has locked it; try again later" in error,
            ) == (1, True)
