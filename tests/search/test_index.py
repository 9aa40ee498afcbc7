"""An index after any changes, kills and full disks equals a new one; unchanged files are not read, bad ones listed."""

import contextlib
import errno
import functools
import itertools
import math
import os
import random
import shutil
import tempfile
import time
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
from small_run import Command

import m1clip
from m1clip.data.images import FileImage
from m1clip.errors import UserError
from m1clip.inference import encoder
from m1clip.search import index as module
from m1clip.search.index import DATABASE, FOLDER, find_index, update_index


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
    shutil.copytree(photos, copy, ignore=shutil.ignore_patterns(FOLDER), symlinks=True)
    return update_index(copy, model).place


NAMES = st.sampled_from(["a.jpg", "b.jpg", "x/a.jpg", "x/c.png", "x/y/d.jpg", "e.txt", ".f.jpg"])
STEPS = st.lists(
    st.tuples(st.sampled_from(["write", "break", "move", "copy", "delete", "index"]), NAMES, NAMES, st.integers(0, 5)),
    min_size=4,
    max_size=12,
)


@settings(max_examples=10)
@given(STEPS)
def test_incremental_index_equals_new_index(model: Path, steps: list[tuple[str, str, str, int]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        photos = Path(folder) / "photos"
        make_photos(photos, 2)
        clock = 10**18
        for what, name, other, seed in steps:
            path, second = photos / name, photos / other
            second.parent.mkdir(parents=True, exist_ok=True)
            path.parent.mkdir(parents=True, exist_ok=True)
            if what == "write":
                image(seed).save(path, "png")
            elif what == "break":
                path.write_bytes(b"no image")
            elif what == "index":
                update_index(photos, model)
            elif path.is_file() and path != second:
                {"move": shutil.move, "copy": shutil.copy2, "delete": lambda a, _: os.unlink(a)}[what](path, second)
            clock += 10**9
            if what in ("write", "break"):
                os.utime(path, ns=(clock, clock))
        report = update_index(photos, model)
        close(report.place, fresh(photos, model))
        rows = np.memmap(report.place / next(report.place.glob("vectors-*")), np.float16) if report.indexed else ()
        assert report.indexed <= 7
        assert len(rows) // 16 <= 2 + len(steps)


def test_unchanged_files_are_not_read_and_moved_ones_keep_their_vectors(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    photos = make_photos(tmp_path / "photos", 10)
    shutil.copy2(photos / "b/0003.jpg", photos / "b/0004.jpg")
    report = update_index(photos, model)
    assert (report.added, report.kept, report.indexed) == (10, 1, 11)
    before = content(photos / FOLDER)
    (photos / "a/0000.jpg").rename(photos / "new name.jpg")
    shutil.copy2(photos / "a/0002.jpg", photos / "copy.jpg")
    (photos / "b/0001.jpg").unlink()
    read: list[str] = []
    original = FileImage.read
    monkeypatch.setattr(FileImage, "read", lambda self: read.append(os.path.basename(self.path)) or original(self))
    monkeypatch.setattr(m1clip.Model, "encode_image", lambda *_: pytest.fail("encoded again"))
    report = update_index(photos)
    assert sorted(read) == ["copy.jpg", "new name.jpg"]
    assert (report.added, report.kept, report.removed, report.indexed) == (0, 2, 2, 11)
    after = content(photos / FOLDER)
    assert after[b"new name.jpg"] == before[b"a/0000.jpg"]
    read.clear()
    update_index(photos)
    assert read == []


def test_each_model_has_its_own_vectors(model: Path, tmp_path: Path) -> None:
    photos, other = make_photos(tmp_path / "photos", 4), save_model(tmp_path / "other", embed_dim=24)
    update_index(photos, model)
    assert update_index(photos, other).added == 4
    assert {len(vectors) for *_, vectors in content(photos / FOLDER).values()} == {2}  # type: ignore[arg-type]
    assert m1clip.Index(photos).dim == 24
    assert m1clip.Index(photos, model).dim == 16
    with pytest.raises(UserError, match="no vectors of"):
        m1clip.Index(photos, tmp_path)


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
    stored = content(report.place)
    assert set(hostile) < stored.keys()
    assert update_index(photos).problems == report.problems
    for name in hostile:
        found = m1clip.Index(photos).search(like=[os.fsdecode(os.path.join(os.fsencode(photos), name))], k=1)
        assert os.fsencode(found.nearest[0].path) == name


def test_exif_date_and_orientation(model: Path, tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    exif.get_ifd(0x8769)[0x9003] = "2024:05:31 12:13:14"
    (tmp_path / "photos").mkdir()
    image(1, (60, 40)).save(tmp_path / "photos/a.jpg", exif=exif)
    update_index(tmp_path / "photos", model)
    (facts,) = content(tmp_path / "photos" / FOLDER).values()
    assert facts[4:8] == (40, 60, "2024-05-31T12:13:14", 6)


def test_second_indexer_reports_the_first(model: Path, tmp_path: Path) -> None:
    photos = make_photos(tmp_path / "photos", 2)
    place = update_index(photos, model).place
    with FileLock(place / "lock"), pytest.raises(UserError, match="another process is indexing"):
        update_index(photos)


def test_read_only_folder_has_index_in_user_data(model: Path, tmp_path: Path) -> None:
    photos = make_photos(tmp_path / "photos", 2)
    (photos / FOLDER).touch()  # root may write everywhere, but not into a file
    report = update_index(photos, model)
    assert report.place.is_relative_to(tmp_path / "data")
    assert find_index(photos / "a") == report.place
    assert find_index() == report.place  # indexed last
    assert m1clip.Index(photos).root == photos


@pytest.mark.parametrize("when", [1, 3])
def test_full_disk_keeps_what_was_indexed(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: int
) -> None:
    photos = make_photos(tmp_path / "photos", 12)
    calls = iter(range(1, 100))

    def fsync(handle: int) -> None:
        if next(calls) >= when:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(module, "BATCH", 3)
        patch.setattr(module, "SAVE_SECONDS", 0.0)
        patch.setattr(module.os, "fsync", fsync)
        with pytest.raises(UserError, match="the disk is full"):
            update_index(photos, model)
    assert len(content(photos / FOLDER)) == 3 * (when - 1)
    assert update_index(photos).added == 12 - 3 * (when - 1)
    close(photos / FOLDER, fresh(photos, model))


def test_vectors_that_a_killed_indexer_left_uncommitted_are_dropped(model: Path, tmp_path: Path) -> None:
    photos = make_photos(tmp_path / "photos", 3)
    (file,) = update_index(photos, model).place.glob("vectors-*")
    file.write_bytes(file.read_bytes() + bytes(16 * 2 + 5))  # a vector and a part of the next
    image(9).save(photos / "new.jpg")
    update_index(photos)
    assert file.stat().st_size == 4 * 16 * 2
    close(photos / FOLDER, fresh(photos, model))


def test_vectors_of_deleted_images_are_removed(model: Path, tmp_path: Path) -> None:
    photos = make_photos(tmp_path / "photos", 10)
    place = update_index(photos, model).place
    opened = m1clip.Index(photos)
    for path in sorted((photos / "a").iterdir())[:3]:
        path.unlink()
    update_index(photos)
    (file,) = place.glob("vectors-*")
    assert file.stat().st_size == 7 * 16 * 2
    close(place, fresh(photos, model))
    assert len(opened.search(like=[photos / "b/0001.jpg"]).nearest) == 7  # opened before


@pytest.mark.slow
def test_watched_folder_is_kept_up_to_date(model: Path, tmp_path: Path) -> None:
    pytest.importorskip("watchfiles")
    photos = make_photos(tmp_path / "photos", 2)
    process = Command("index", str(photos), "--model", str(model), "--watch", cwd=tmp_path)

    def indexed() -> set[bytes]:
        with contextlib.suppress(UserError):  # the index is being created
            return set(content(photos / FOLDER)) if (photos / FOLDER / DATABASE).exists() else set()
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
    module.BATCH, module.SAVE_SECONDS = 4, 0.0
    read, reads = module._read, itertools.count()

    def slow_read(*args: Any) -> Any:
        time.sleep(0.05)
        while next(reads) >= hang_after:
            time.sleep(0.01)
        return read(*args)

    module._read = slow_read
    encoder.fastest_precision = lambda kind: "fp32"  # type: ignore[assignment]


def kill_at_random_moments(photos: Path, model: Path, kills: int, seconds: float, hang_after: float = math.inf) -> int:
    """Index again and again, and kill it each time; returns the number of kills before it was finished."""
    chance, interrupted, database = random.Random(0), 0, photos / FOLDER / DATABASE
    for _ in range(kills):
        began = time.time()  # it writes to the database when it starts
        prepare = functools.partial(slow_saves, hang_after)
        process = Command("index", str(photos), "--model", str(model), cwd=photos.parent, prepare=prepare)
        process.wait_until(lambda began=began: database.exists() and database.stat().st_mtime > began)  # type: ignore[misc]
        time.sleep(seconds * chance.random())
        process.send_signal(9)
        interrupted += process.wait() == -9
    update_index(photos)
    return interrupted


@pytest.mark.slow
def test_index_after_sigkills_equals_undisturbed_index(model: Path, tmp_path: Path) -> None:
    photos = make_photos(tmp_path / "photos", 60)
    assert kill_at_random_moments(photos, model, 3, 0.6, hang_after=15) == 3
    close(photos / FOLDER, fresh(photos, model))


@pytest.mark.long("Kill while indexing photos")
def test_many_kills_while_indexing(model: Path, tmp_path: Path, counts: dict[str, float]) -> None:
    photos = make_photos(tmp_path / "photos", 10_000)
    counts["SIGKILLs at random moments, 10,000 images"] = kill_at_random_moments(photos, model, 20, 20.0)
    close(photos / FOLDER, fresh(photos, model))
