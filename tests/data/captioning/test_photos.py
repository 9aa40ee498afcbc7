"""`m1clip data caption` against a server whose answers are slow, wrong, huge, interrupted or missing."""

import base64
import csv
import errno
import io
import itertools
import json
import os
import shutil
import signal
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock
from PIL import Image
from small_run import Command

import m1clip.data.captioning.photos as photos_module
from captioning.fake_server import Response, completion, serve
from m1clip.data.captioning.journal import JOURNAL
from m1clip.data.captioning.photos import (
    MAX_FAILURES,
    CaptionSettings,
    caption_photos,
    sample_captions,
)
from m1clip.data.sources import Options, open_source
from m1clip.data.sources.formats import FORMATS
from m1clip.errors import UserError

MakePhotos = Callable[[int], Path]
ONE_AT_A_TIME = CaptionSettings(parallel=1)


@pytest.fixture
def make_photos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MakePhotos:
    """Returns a function that writes a number of photos; retries are made at once."""
    monkeypatch.setattr(photos_module, "FIRST_WAIT_SECONDS", 0.0)

    def make(count: int) -> Path:
        for number in range(count):
            color = (number * 9 % 256, 100, 50)
            Image.new("RGB", (60, 40), color).save(tmp_path / f"{number:02}.jpg")
        return tmp_path

    return make


def describe(request: dict[str, Any], number: int) -> Response:
    return completion(f"A red wall with the number {number} on it.")


def rows(folder: Path) -> dict[str, tuple[str, str]]:
    """{image: (caption, source)} of captions.csv."""
    with (folder / "captions.csv").open(encoding="utf-8-sig", newline="") as file:
        return {row["image"]: (row["caption"], row["source"] or "") for row in csv.DictReader(file)}


def test_each_photo_gets_a_caption_and_is_asked_about_once(make_photos: MakePhotos) -> None:
    folder = make_photos(5)
    (folder / "more").mkdir()
    Image.new("RGB", (3000, 1000)).save(folder / "more" / "large.png")
    with serve(describe) as server:
        report = caption_photos(folder, server.url, settings=CaptionSettings(parallel=3))
        again = caption_photos(folder, server.url)
    assert (report.photos, report.generated, again.generated) == (6, 6, 0)
    assert len(server.requests) == 6
    assert rows(folder).keys() == {*(f"{n:02}.jpg" for n in range(5)), "more/large.png"}
    assert {source for _, source in rows(folder).values()} == {"model:vision"}
    assert not (folder / JOURNAL).exists()
    assert len(open_source(str(folder)).samples("train")) > 0


def test_small_upright_jpeg_without_metadata_is_sent(make_photos: MakePhotos) -> None:
    folder = make_photos(0)
    exif = Image.Exif()
    exif[0x0112] = 6  # rotated
    exif[0x010F] = "a camera"
    Image.new("RGB", (400, 200), (200, 9, 9)).save(folder / "a.jpg", exif=exif)
    with serve(describe) as server:
        caption_photos(folder, server.url, settings=CaptionSettings(max_side=100, prompt="What?"))
    text, image = server.requests[0]["messages"][0]["content"]
    assert text == {"type": "text", "text": "What?"}
    prefix, _, encoded = image["image_url"]["url"].partition(",")
    assert prefix == "data:image/jpeg;base64"
    sent = Image.open(io.BytesIO(base64.b64decode(encoded)))
    assert sent.size == (50, 100)
    assert not sent.getexif()


def test_captions_of_people_and_of_photos_are_kept(make_photos: MakePhotos) -> None:
    folder = make_photos(3)
    exif = Image.Exif()
    exif[0x010E] = "Grandma in the garden"
    Image.new("RGB", (60, 40)).save(folder / "exif.jpg", exif=exif)
    table = "image,caption,mood\n00.jpg,My own words,happy\n01.jpg,,\n"
    (folder / "captions.csv").write_text(table, encoding="utf-8")
    with serve(describe) as server:
        report = caption_photos(folder, server.url, settings=ONE_AT_A_TIME)
    assert (report.generated, report.from_metadata) == (2, 1)
    captions_of = rows(folder)
    assert captions_of["00.jpg"] == ("My own words", "")
    assert captions_of["exif.jpg"] == ("Grandma in the garden", "EXIF")
    assert captions_of["01.jpg"][1] == captions_of["02.jpg"][1] == "model:vision"
    assert "happy" in (folder / "captions.csv").read_text(encoding="utf-8-sig")
    assert len(server.requests) == 2


def test_replace_asks_again_but_never_about_captions_of_people(make_photos: MakePhotos) -> None:
    folder = make_photos(2)
    (folder / "captions.csv").write_text("image,caption\n00.jpg,My own words\n", encoding="utf-8")
    with serve(lambda *_: completion("The first words about it."), ["old"]) as server:
        caption_photos(folder, server.url)
    settings = CaptionSettings(replace=True)
    with serve(lambda *_: completion("Better words about it."), ["new"]) as server:
        caption_photos(folder, server.url, settings=settings)
    assert rows(folder) == {
        "00.jpg": ("My own words", ""),
        "01.jpg": ("Better words about it.", "model:new"),
    }


def test_training_can_leave_out_generated_captions(make_photos: MakePhotos) -> None:
    folder = make_photos(30)
    table = "image,caption\n" + "".join(f"{n:02}.jpg,words of mine {n}\n" for n in range(10))
    (folder / "captions.csv").write_text(table, encoding="utf-8")
    with serve(describe) as server:
        caption_photos(folder, server.url)
    everything = open_source(str(folder))
    own = open_source(str(folder), options=Options(captions="person"))
    assert (everything.caption_count(), own.caption_count()) == (30, 10)
    assert any("20 rows with a caption of a model" in note for note in everything.notes)
    assert any("skipped" in note for note in own.notes)


def test_killed_run_continues_without_asking_twice(make_photos: MakePhotos) -> None:
    folder = make_photos(6)

    def stop_at_four(request: dict[str, Any], number: int) -> Response:
        if number == 3:
            raise_in_main.set()
            return Response(b"", hang=True, length=10)
        return describe(request, number)

    raise_in_main = threading.Event()

    def handle_then_die(*args: Any) -> None:
        original(*args)
        if args[0].report.generated == 3:
            raise KeyboardInterrupt

    from m1clip.data.captioning.photos import _Run

    original = _Run._handle
    with serve(stop_at_four) as server, pytest.MonkeyPatch.context() as patch:
        patch.setattr(_Run, "_handle", handle_then_die)
        patch.setattr(_Run, "save", lambda _: None)  # killed: nothing is written at the end
        with pytest.raises(KeyboardInterrupt):
            caption_photos(folder, server.url, settings=ONE_AT_A_TIME)
    assert not (folder / "captions.csv").exists()
    with (folder / JOURNAL).open("ab") as file:
        file.write(b'{"photo": "04.jpg", "capt')  # the last line of a killed process
    with serve(describe) as server:
        report = caption_photos(folder, server.url, settings=ONE_AT_A_TIME)
    assert report.generated == 3
    assert len(server.requests) == 3
    assert len(rows(folder)) == 6


def save_after_each_photo() -> None:
    """In the captioning process: save the table as often as possible."""
    photos_module.TABLE_SECONDS = 0.0
    photos_module.FIRST_WAIT_SECONDS = 0.0


def die_in_save(number: int, save_all: bool) -> None:
    """In the captioning process: SIGKILL just before a file gets its name."""
    if save_all:
        save_after_each_photo()
    saves = itertools.count(1)
    replace = Path.replace

    def replace_or_die(path: Path, target: Path) -> Path:
        if next(saves) == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return replace(path, target)

    Path.replace = replace_or_die  # type: ignore[method-assign, assignment]


def test_killed_captioning_loses_and_doubles_nothing(make_photos: MakePhotos) -> None:
    """SIGKILL while it waits for an answer, and while it writes the table."""
    folder = make_photos(14)
    (folder / "captions.csv").write_text("image,caption\n03.jpg,A person wrote this.\n")
    captioning: list[Command] = []
    answered: list[str] = []

    def describe_or_kill(request: dict[str, Any], number: int) -> Response:
        if number in (2, 6, 9):
            captioning[-1].send_signal(signal.SIGKILL)
            return Response(b"")
        answered.append(f"A red wall with the number {number} on it.")
        return completion(answered[-1])

    deaths: list[Callable[[], None] | None] = [
        None,  # at the third request
        save_after_each_photo,  # at the seventh
        partial(die_in_save, 2, True),
        partial(die_in_save, 1, False),  # what the run before could not save
        save_after_each_photo,  # at the tenth
        None,
    ]
    before: dict[str, str] = {}
    with serve(describe_or_kill) as server:
        for run, death in enumerate(deaths, start=1):
            words = ("data", "caption", str(folder), "--server", server.url, "--parallel", "1")
            captioning.append(Command(*words, cwd=folder, prepare=death))
            code = captioning[-1].wait()
            assert code == (0 if run == len(deaths) else -signal.SIGKILL), captioning[-1].read()
            with (folder / "captions.csv").open(encoding="utf-8-sig", newline="") as file:
                table = [(row["image"], row["caption"]) for row in csv.DictReader(file)]
            captions = dict(table)
            assert len(captions) == len(table), "no row twice"
            assert before.items() <= captions.items(), "nothing lost"
            before = captions
    assert captions.keys() == {f"{number:02}.jpg" for number in range(14)}
    # An answer that arrived just before a kill may be lost, and its photo is asked about again.
    assert set(captions.values()) <= {"A person wrote this.", *answered}
    assert len(set(captions.values())) == 14
    assert not list(folder.glob("*.partial"))
    assert not (folder / JOURNAL).exists()


def test_bad_answers_are_counted_and_not_asked_again(make_photos: MakePhotos) -> None:
    folder = make_photos(4)
    answers = ["I'm sorry, I can't help with that.", "<b>bold words</b>", "A dog.", "A black cat."]
    with serve(lambda _, number: completion([*answers, *answers[2:]][number])) as server:
        report = caption_photos(folder, server.url, settings=ONE_AT_A_TIME)
        again = caption_photos(folder, server.url, settings=ONE_AT_A_TIME)
        assert len(server.requests) == 4
        caption_photos(folder, server.url, settings=CaptionSettings(prompt="Another?", parallel=1))
    assert report.faults == {"refusal": 1, "markup": 1}
    assert (again.generated, again.rejected_before) == (0, 2)
    assert "not asked  2 photos" in str(again)
    assert "not used   1 answer: refusal, such as" in str(report)
    assert len(server.requests) == 6  # another prompt
    assert len(rows(folder)) == 4


@pytest.mark.parametrize(
    "bad",
    [
        Response(b'{"error": {"message": "loading"}}', 503),
        Response(b"slow down", 429, {"Retry-After": "0"}),
        Response(b"oops", 500),
        Response(b"<!doctype html><p>Welcome"),
        Response(b'{"choices": [{"messa', length=500),
        Response(b""),
    ],
    ids=["503", "429", "500", "html", "truncated", "empty"],
)
def test_temporary_failures_are_tried_again(make_photos: MakePhotos, bad: Response) -> None:
    folder = make_photos(1)
    with serve(lambda r, number: bad if number < 2 else describe(r, number)) as server:
        report = caption_photos(folder, server.url)
    assert (report.generated, len(server.requests)) == (1, 3)


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (Response(b'{"error": {"message": "no images"}}', 400), "HTTP 400: no images"),
        (Response(b"x" * (2**20 + 1)), "larger than 1,048,576 bytes"),
        (Response(b'{"choices": []}'), "no choices"),
        (Response(b'{"choices": [{"message": {"content": 5}}]}'), "no text"),
        (Response(b'{"error": "out of memory"}'), "out of memory"),
        (Response(b"[" * 100_000), "not JSON"),
    ],
)
def test_failed_photo_is_reported_and_asked_again_later(
    make_photos: MakePhotos, bad: Response, reason: str
) -> None:
    folder = make_photos(2)
    settings = CaptionSettings(parallel=1, tries=1)
    with serve(lambda r, number: describe(r, number) if number else bad) as server:
        report = caption_photos(folder, server.url, settings=settings)
        assert report.generated == 1
        assert reason in report.failures[0]
        assert caption_photos(folder, server.url, settings=settings).generated == 1


def test_run_stops_when_all_photos_fail(make_photos: MakePhotos) -> None:
    folder = make_photos(MAX_FAILURES + 5)
    with (
        serve(lambda *_: Response(b"", 400)) as server,
        pytest.raises(UserError, match=r"8 failures in a row.*HTTP 400"),
    ):
        caption_photos(folder, server.url, settings=ONE_AT_A_TIME)
    assert len(server.requests) < MAX_FAILURES + 4


def test_model_that_sees_nothing_stops_the_run(make_photos: MakePhotos) -> None:
    folder = make_photos(20)
    with (
        serve(lambda *_: completion("A beautiful sunset over the sea.")) as server,
        pytest.raises(UserError, match=r"12 of the first 12 photos.*does vision see images"),
    ):
        caption_photos(folder, server.url, settings=ONE_AT_A_TIME)
    assert not (folder / "captions.csv").exists()
    assert not (folder / JOURNAL).exists()


def test_caption_of_too_many_photos_is_removed(make_photos: MakePhotos) -> None:
    folder = make_photos(30)

    def answer(request: dict[str, Any], number: int) -> Response:
        return completion("A blurry photo.") if number % 4 == 3 else describe(request, number)

    with serve(answer) as server:
        report = caption_photos(folder, server.url, settings=ONE_AT_A_TIME)
    assert report.faults == {"repeated": 7}
    assert report.generated == len(rows(folder)) == 23


def test_no_table_is_written_if_no_answer_was_a_caption(make_photos: MakePhotos) -> None:
    """Not for 6 photos, which are too few to stop the run, either: it would hide other captions."""
    folder = make_photos(6)
    with serve(lambda *_: completion("A beautiful sunset over the sea.")) as server:
        report = caption_photos(folder, server.url, settings=ONE_AT_A_TIME)
    assert report.faults == {"repeated": 6}
    assert not (folder / "captions.csv").exists()
    assert "captions.csv" not in str(report)


def test_unreadable_photo_is_skipped(make_photos: MakePhotos) -> None:
    folder = make_photos(2)
    (folder / "00.jpg").write_bytes(b"\xff\xd8 not an image")
    with serve(describe) as server:
        report = caption_photos(folder, server.url)
    assert report.generated == 1
    assert "00.jpg" in report.failures[0]


def test_photo_that_was_deleted_meanwhile_gets_no_row(make_photos: MakePhotos) -> None:
    folder = make_photos(2)

    def delete_then_answer(request: dict[str, Any], number: int) -> Response:
        if number == 1:
            (folder / "00.jpg").unlink()
        return describe(request, number)

    with serve(delete_then_answer) as server:
        caption_photos(folder, server.url, settings=ONE_AT_A_TIME)
    assert list(rows(folder)) == ["01.jpg"]


def test_caption_that_a_person_writes_meanwhile_wins(make_photos: MakePhotos) -> None:
    folder = make_photos(1)

    def write_then_answer(request: dict[str, Any], number: int) -> Response:
        table = "image,caption,source\n00.jpg,My own words,person\n"
        (folder / "captions.csv").write_text(table, encoding="utf-8")
        return describe(request, number)

    with serve(write_then_answer) as server:
        caption_photos(folder, server.url)
    assert rows(folder) == {"00.jpg": ("My own words", "person")}


def test_two_runs_in_a_folder_are_rejected(make_photos: MakePhotos) -> None:
    folder = make_photos(1)
    with (
        serve(describe) as server,
        FileLock(folder / ".m1clip-captions.lock"),
        pytest.raises(UserError, match="another m1clip data caption is at work"),
    ):
        caption_photos(folder, server.url)


def test_captions_of_another_format_are_not_hidden(make_photos: MakePhotos) -> None:
    folder = make_photos(2)
    (folder / "00.txt").write_text("a dog", encoding="utf-8")
    with serve(describe) as server, pytest.raises(UserError, match="in the format txt"):
        caption_photos(folder, server.url)
    assert not server.requests


def test_only_captions_that_a_table_would_hide_stop_the_captioner() -> None:
    hidden = {name for name, data_format in FORMATS.items() if data_format.hidden_by_table}
    assert set(FORMATS) - hidden == {"classes", "metadata", "filenames"}


def test_captions_of_a_table_with_another_name_are_not_hidden(make_photos: MakePhotos) -> None:
    folder = make_photos(2)
    (folder / "mine.csv").write_text("image,caption\n00.jpg,a dog\n", encoding="utf-8")
    with serve(describe) as server, pytest.raises(UserError, match="in the format csv"):
        caption_photos(folder, server.url)
    assert not server.requests


def test_dry_run_asks_about_three_photos_and_writes_nothing(make_photos: MakePhotos) -> None:
    folder = make_photos(9)
    before = sorted(folder.iterdir())
    with serve(lambda r, n: describe(r, n) if n else completion("dog")) as server:
        shown = str(sample_captions(folder, server.url))
    assert len(server.requests) == 3
    assert sorted(folder.iterdir()) == before
    assert "prompt     Describe this photo" in shown
    assert "not used   too short" in shown
    assert "caption    A red wall with the number 2 on it." in shown
    assert "9 without a caption; nothing was written" in shown


def test_limit_and_bad_settings(make_photos: MakePhotos) -> None:
    folder = make_photos(5)
    with serve(describe) as server:
        caption_photos(folder, server.url, settings=CaptionSettings(limit=2))
    assert len(rows(folder)) == len(server.requests) == 2
    with pytest.raises(UserError, match="--prompt: expected"):
        CaptionSettings(prompt=" ")
    with pytest.raises(UserError, match=r"--parallel 99: expected 1 to 32"):
        CaptionSettings(parallel=99)


def test_journal_of_another_kind_is_ignored(make_photos: MakePhotos) -> None:
    folder = make_photos(1)
    lines = [b"\xff\xfe", b"[1]", b'{"photo": 5}', json.dumps({"photo": "00.jpg"}).encode(), b"{"]
    (folder / JOURNAL).write_bytes(b"\n".join(lines))
    with serve(describe) as server:
        assert caption_photos(folder, server.url).generated == 1


@pytest.mark.parametrize(
    "values",
    [
        {"caption": "a \x1b[31mred wall"},
        {"caption": "half a \ud83d character"},
        {"caption": "two\nlines of it"},
        {"caption": "a wall " * 100},
        {"model": "evil\x1b[2J"},
        {"photo": "../outside.jpg"},
        {"photo": "{folder}/../outside.jpg"},
        {"photo": "a" * 9000},
    ],
)
def test_answers_that_no_run_has_written_are_ignored(
    make_photos: MakePhotos, values: dict[str, str]
) -> None:
    """The folder may be that of a stranger, with a journal in it."""
    folder = make_photos(1) / "photos"
    folder.mkdir()
    (folder.parent / "00.jpg").rename(folder / "00.jpg")
    shutil.copy(folder / "00.jpg", folder.parent / "outside.jpg")
    entry = {"photo": "00.jpg", "model": "x", "prompt": "x", "caption": "a red wall", **values}
    entry["photo"] = entry["photo"].format(folder=folder)
    (folder / JOURNAL).write_text(json.dumps(entry) + "\n")
    with serve(describe) as server:
        report = caption_photos(folder, server.url)
    assert (report.generated, report.captioned_before) == (1, 0)
    assert rows(folder) == {"00.jpg": ("A red wall with the number 0 on it.", "model:vision")}


def test_full_disk_loses_no_answer_that_was_saved(
    make_photos: MakePhotos, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_photos(6)
    synced: list[int] = []

    def sync(handle: int) -> None:
        synced.append(handle)
        if len(synced) > 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with serve(describe) as server:
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", sync)
            with pytest.raises(UserError, match="the disk is full; free some space") as caught:
                caption_photos(folder, server.url, settings=ONE_AT_A_TIME)
        assert "\n" not in str(caught.value)
        caption_photos(folder, server.url, settings=ONE_AT_A_TIME)
    captions_of = rows(folder)
    assert len(captions_of) == 6
    assert all(source == "model:vision" for _, source in captions_of.values())
    assert len(server.requests) <= 8  # those that were saved are not asked about again
