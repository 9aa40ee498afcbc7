"""Labelling and training over HTTP: pages at once, photos that go away, bad requests, a run from start to switch."""

import errno
import json
import os
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import ANY, Mock

import pytest
from image_sets import image
from photos import make_photos, save_model
from PIL import Image
from small_run import TIMEOUT

from m1clip.data.caption_table import read_captions
from m1clip.errors import UserError
from m1clip.io import RUN_LOCK
from m1clip.search.index import update_index
from m1clip.search.labels import Labels
from m1clip.search.query import Index
from m1clip.training.process import OUTPUT, name_owner
from m1clip.web import label as label_module
from m1clip.web import new_captions, training
from m1clip.web.photos import Photos
from m1clip.web.server import Server, Store
from web.client import ask, running
from web.test_photos import post, read

COUNT = 40


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model") / "model")


@pytest.fixture
def folder(tmp_path: Path, model: Path) -> Path:
    photos = make_photos(tmp_path / "photos", COUNT)
    update_index(photos, model)
    return photos


@pytest.fixture
def server(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.chdir(folder.parent)
    runs = Path("runs")  # relative, as the command gives it
    with running(Server(Store([runs]), 0, Photos(folder, runs=runs))) as made:
        yield made


def label(server: Server, photos: list[dict[str, Any]], *captions: str, **more: Any) -> Any:
    versions = [{"id": photo["id"], "version": photo["version"]} for photo in photos]
    body = {"photos": versions, "captions": captions, "page": "test", **more}
    return post(server, "/api/label", json.dumps(body).encode())


def queue(server: Server, page: str = "test", count: int = 5) -> list[dict[str, Any]]:
    return list(read(server, "/api/label/queue", page=page, count=count)["photos"])


def until(server: Server, **expected: Any) -> dict[str, Any]:
    """Wait until the training has these values."""
    deadline = time.monotonic() + TIMEOUT
    while True:
        status = read(server, "/api/train")
        if all(status.get(name) == value for name, value in expected.items()):
            return status
        assert time.monotonic() < deadline, status
        time.sleep(0.1)


def test_pages_get_different_photos_and_labelled_ones_do_not_come_back(server: Server) -> None:
    first = queue(server)
    assert [photo["id"] for photo in queue(server)] == [photo["id"] for photo in first]
    other = queue(server, "other", 60)
    ids = {photo["id"] for photo in first} | {photo["id"] for photo in other}
    assert len(ids) == len(first) + len(other) == COUNT
    assert len(first[0]["suggestions"]) == 9
    assert all(isinstance(word, str) for word in first[0]["suggestions"])
    status, answer = label(server, first[:1], "a dog")
    assert status == 200
    assert (answer["labelled"], answer["needed"]) == (1, 29)
    status, answer = label(server, first[1:2], skip=True)
    left = [photo["id"] for photo in queue(server)]
    assert left == [photo["id"] for photo in first[2:]]
    shown = read(server, "/api/label/labelled")["photos"]
    assert [(photo["id"], photo["captions"]) for photo in shown] == [(first[0]["id"], ["a dog"])]
    similar = read(server, "/api/label/similar", id=first[2]["id"])["photos"]
    assert not {photo["id"] for photo in similar} & {photo["id"] for photo in first[:3]}


def test_photos_with_a_caption_inside_count_as_labelled_and_are_not_shown(
    server: Server, folder: Path
) -> None:
    for name in ("a/0000.jpg", "b/0001.jpg"):
        exif = Image.Exif()
        exif[0x010E] = f"written in a camera: {name}"
        with Image.open(folder / name) as photo:
            photo.save(folder / name, exif=exif)
    update_index(folder)
    first = queue(server, count=60)
    assert len(first) == COUNT - 2
    progress = read(server, "/api/label")
    assert (progress["labelled"], progress["from_metadata"]) == (2, 2)
    shown = read(server, "/api/label/labelled")["photos"]
    captions = {photo["path"]: photo["captions"] for photo in shown}
    assert captions["b/0001.jpg"] == ["written in a camera: b/0001.jpg"]


def look_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look for new captions with each request, and wait for what is found, however slow this is."""
    for name, value in (("REST", 0), ("IMPORT_RETRY_SECONDS", 0.0), ("LOOK_SECONDS", TIMEOUT)):
        monkeypatch.setattr(new_captions, name, value)


XMP = """<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:RDF
 xmlns:rdf="http://www.w3.org/1999/02/22-rdf-syntax-ns#"><rdf:Description
 xmlns:dc="http://purl.org/dc/elements/1.1/"><dc:description><rdf:Alt>
 <rdf:li xml:lang="x-default">{}</rdf:li></rdf:Alt></dc:description></rdf:Description></rdf:RDF></x:xmpmeta>"""


def test_sidecar_written_while_the_page_is_open_is_read_at_the_next_look(
    server: Server, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    look_each_time(monkeypatch)
    first = queue(server, count=6)
    label(server, first[:1], "a label of the page")
    paths = [photo["path"] for photo in first]
    (folder / f"{paths[0]}.xmp").write_text(XMP.format("not read, as it has a label"))
    (folder / f"{paths[1]}.xmp").write_text(XMP.format(""))  # as programs write it at import
    (folder / f"{paths[2]}.json").write_text(json.dumps({"description": "from Takeout"}))
    assert [photo["path"] for photo in queue(server, count=5)] == [paths[1], *paths[3:6], ANY]
    (folder / f"{paths[1]}.xmp").write_text(XMP.format("written into a sidecar"))
    assert paths[1] not in [photo["path"] for photo in queue(server, count=5)]
    shown = read(server, "/api/label/labelled")["photos"]
    assert {photo["path"]: photo["captions"] for photo in shown} == {
        paths[0]: ["a label of the page"],
        paths[1]: ["written into a sidecar"],
        paths[2]: ["from Takeout"],
    }
    assert read(server, "/api/label")["from_metadata"] == 2


def test_full_disk_while_captions_are_read_is_tried_again(
    server: Server,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    look_each_time(monkeypatch)
    (path,) = [photo["path"] for photo in queue(server, count=1)]
    (folder / f"{path}.xmp").write_text(XMP.format("in a sidecar"))
    read_labels = Labels.import_metadata
    full = UserError("captions.csv: the disk is full")
    monkeypatch.setattr(Labels, "import_metadata", Mock(side_effect=full))
    assert [photo["path"] for photo in queue(server, count=1)] == [path]
    assert "the disk is full" in capsys.readouterr().out
    monkeypatch.setattr(Labels, "import_metadata", read_labels)
    assert [photo["path"] for photo in queue(server, count=1)] != [path]


def test_photos_of_a_closed_page_go_to_another(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue(server, "closed", 60)
    assert queue(server, "open") == []
    monkeypatch.setattr(label_module, "RESERVED_SECONDS", 0.0)
    assert len(queue(server, "open", 60)) == COUNT


def test_two_pages_at_once_conflict_and_are_not_mixed(server: Server, folder: Path) -> None:
    photos = queue(server)
    answers: list[Any] = []
    threads = [
        threading.Thread(
            target=lambda text=text: answers.append(label(server, photos[:1], text)[1])
        )
        for text in ("a dog", "a cat")
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    conflicts = [answer["photos"][0]["conflict"] for answer in answers]
    assert sorted(conflicts) == [False, True]
    assert answers[0]["photos"][0]["captions"] == answers[1]["photos"][0]["captions"]
    assert len(read_captions(folder / "captions.csv").rows) == 1


def test_photo_deleted_or_renamed_meanwhile_keeps_its_label(server: Server, folder: Path) -> None:
    renamed, deleted, *_ = queue(server)
    new = folder / "renamed.jpg"
    (folder / renamed["path"]).rename(new)
    (folder / deleted["path"]).unlink()
    for photo in (renamed, deleted):
        status, answer = label(server, [photo], f"label of {photo['path']}")
        assert status == 200
        assert answer["note"].startswith(f"{photo['path']} is no longer there. Its label is saved")
    update_index(folder)
    queue(server)
    labels = Labels(folder, folder / ".m1clip-index").labelled()
    assert labels["renamed.jpg"].captions == (f"label of {renamed['path']}",)
    assert labels[deleted["path"]].captions == (f"label of {deleted['path']}",)
    status, answer = label(server, [deleted], "again")
    assert status == 400
    assert "no longer in the index" in answer["error"]


def test_same_split_for_photos_that_are_labelled_together_and_for_near_duplicates(
    server: Server, folder: Path
) -> None:
    photos = queue(server, count=8)
    label(server, photos, "a dog")
    splits = {row[-1] for row in read_captions(folder / "captions.csv").rows}
    assert len(splits) == 1
    image(int(Path(photos[0]["path"]).stem)).save(folder / "again.png")
    update_index(folder)
    (twin,) = (
        photo
        for photo in read(server, "/api/label/similar", id=photos[0]["id"])["photos"]
        if photo["path"] == "again.png"
    )
    label(server, [twin], "the same dog")
    assert {row[-1] for row in read_captions(folder / "captions.csv").rows} == splits


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[" * 100_000,
        b"{}",
        b'{"photos": [], "captions": [], "page": ""}',
        b'{"photos": [{"id": true, "version": ""}], "captions": [], "page": ""}',
        b'{"photos": [{"id": 1, "version": ""}], "captions": [1], "page": ""}',
        b'{"photos": [{"id": 1e99, "version": ""}], "captions": ["a"], "page": ""}',
        b'{"photos": [{"id": 99999999999, "version": ""}], "captions": ["a"], "page": ""}',
    ],
)
def test_bad_request_is_one_line_and_changes_nothing(
    server: Server, folder: Path, body: bytes
) -> None:
    status, answer = post(server, "/api/label", body)
    assert status == 400
    assert "\n" not in answer["error"]
    assert not (folder / "captions.csv").exists()


def test_bad_captions_are_explained_over_http(server: Server, folder: Path) -> None:
    photos = queue(server)
    for text, expected in (
        ("x" * 10_000, "at most 1,000 characters, this one 10,000"),
        ("half \ud83d", "lone surrogate"),
    ):
        status, answer = label(server, photos[:1], text)
        assert status == 400
        assert expected in answer["error"]
    status, answer = label(server, photos[:1], "=HYPERLINK()\x1b[2J\u202e\n<script>")
    assert answer["photos"][0]["captions"] == ["=HYPERLINK() [2J <script>"]
    assert ask(server, "/api/label", b"{}")[0] == 403
    assert ask(server, "/api/label/queue", Host="evil.example")[0] == 403
    for path in ("/api/train/start", "/api/train/stop", "/api/train/switch", "/api/train/back"):
        assert ask(server, path, b"{}")[0] == 403
    assert post(server, "/api/label", b"x" * 2**19)[0] == 413


def test_damaged_table_is_one_line_and_stays(server: Server, folder: Path) -> None:
    photos = queue(server)
    (folder / "captions.csv").write_bytes(b"PK\x03\x04 a spreadsheet")
    status, answer = label(server, photos[:1], "a dog")
    assert status == 400
    assert "captions.csv: is a zip archive" in answer["error"]
    assert (folder / "captions.csv").read_bytes() == b"PK\x03\x04 a spreadsheet"


def test_no_training_without_labels(server: Server) -> None:
    status, answer = post(server, "/api/train/start", b"{}")
    assert status == 400
    assert answer["error"] == "30 more labels are needed before the first training"
    assert post(server, "/api/train/stop", b"{}")[1]["error"] == "there is no run to stop"
    assert post(server, "/api/train/switch", b"{}")[0] == 400
    answer = post(server, "/api/train/back", b"{}")[1]
    assert answer["error"] == "there is no previous model"
    assert read(server, "/api/train")["state"] == "none"


def label_alone(server: Server, count: int) -> None:
    """Label photos one by one, which divides them into splits by their content."""
    for photo in queue(server, count=count):
        label(server, [photo], f"a dog number {photo['id']}")


def test_second_start_is_rejected_while_the_first_is_slow(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process of a run may take half a minute of imports before it writes anything."""
    label_alone(server, 36)
    begun, may_start = threading.Event(), threading.Event()
    started = list[Path]()

    def start_slowly(words: list[str], run: Path, name: str, resume: None) -> None:
        started.append(run)
        begun.set()
        may_start.wait(TIMEOUT)

    monkeypatch.setattr(training, "start_in_background", start_slowly)
    assert post(server, "/api/train/start", b"{}")[0] == 200
    assert read(server, "/api/train")["state"] == "starting"
    status, answer = post(server, "/api/train/start", b"{}")
    assert (status, answer["error"]) == (400, "starting now; wait until it is done")
    assert begun.wait(TIMEOUT)
    # The process has not taken the lock, but the folder names it as its owner.
    (run,) = started
    name_owner(run, os.getpid())
    may_start.set()
    shown = until(server, work="", state="preparing")
    assert shown["name"] == "labels"
    status, answer = post(server, "/api/train/start", b"{}")
    assert (status, answer["error"]) == (400, "labels is still running; wait for it, or stop it")
    assert len(started) == 1


def start_and_end(words: list[str], run: Path, name: str, resume: None) -> None:
    """Leave a run as a process does that has failed."""
    (run / RUN_LOCK).write_text("")
    (run / OUTPUT).write_text("data  36 images\nm1clip: captions.csv: no image to train on\n")


def test_run_that_fails_later_shows_its_error_and_its_output(
    server: Server, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    label_alone(server, 36)

    monkeypatch.setattr(training, "start_in_background", start_and_end)
    post(server, "/api/train/start", b"{}")
    shown = until(server, work="", state="crashed")
    assert shown["message"] == "captions.csv: no image to train on"
    assert shown["output"] == str(folder.parent / "runs/labels/train.log")
    post(server, "/api/train/start", b"{}")
    assert until(server, work="", state="crashed")["name"] == "labels-2"


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (UserError("no memory"), "no memory"),
        (
            OSError(errno.ENOSPC, "No space left on device"),
            "runs: the disk is full; free some space",
        ),
    ],
)
def test_run_that_fails_at_once_leaves_no_folder(
    server: Server, folder: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, reason: str
) -> None:
    label_alone(server, 36)

    def fail(words: list[str], run: Path, name: str, resume: None) -> None:
        name_owner(run, os.getpid())
        raise error

    monkeypatch.setattr(training, "start_in_background", fail)
    post(server, "/api/train/start", b"{}")
    shown = until(server, work="", state="none")
    assert shown["failure"].startswith("the training did not start: ")
    assert shown["failure"].endswith(reason)
    assert list((folder.parent / "runs").iterdir()) == []


def test_labels_in_one_split_are_not_trained_on(server: Server) -> None:
    photos = queue(server, count=36)
    label(server, photos, "a dog")
    status, answer = post(server, "/api/train/start", b"{}")
    assert status == 400
    assert "label some other photos one by one" in answer["error"]
    assert read(server, "/api/train")["state"] == "none"


@pytest.mark.slow
def test_train_compare_and_switch(
    server: Server, folder: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    label_alone(server, 36)
    options = (
        "--init",
        str(model),
        "--device",
        "cpu",
        "--precision",
        "fp32",
        "--steps",
        "2",
        "--batch-size",
        "8",
    )
    monkeypatch.setattr(training, "start_options", lambda _: (*options, "--no-such-option"))
    post(server, "/api/train/start", b"{}")
    error = until(server, work="", state="none")["failure"]
    assert "did not start" in error
    assert "--no-such-option" in error
    monkeypatch.setattr(training, "start_options", lambda _: options)
    post(server, "/api/train/start", b"{}")
    until(server, state="finished")
    done = until(server, work="", state="finished")
    assert done["problem"] == ""
    result = done["result"]
    held_out = read(server, "/api/label")["held_out"]
    assert (result["photos"], result["candidates"]) == (held_out, COUNT)
    low, high = result["gain"][1:]
    assert low <= result["gain"][0] <= high
    assert not result["verdict"]["use_new"], "two steps do not improve the model"
    run = Path(folder.parent / "runs/labels")
    trained = json.loads((run / "labels.json").read_text(encoding="utf-8"))
    assert trained["labels"] == 36
    assert not done["in_use"]
    # Two steps leave the best model as it was; a model with other weights has vectors of its own.
    shutil.rmtree(run / "best")
    save_model(run / "best", embed_dim=24)
    post(server, "/api/train/switch", b"{}")
    until(server, work="", in_use=True)
    assert read(server, "/api/library")["model"] == "labels"
    assert read(server, "/api/search", text="a dog")["searched"] == COUNT
    assert Index(folder).dim == 24
    assert read(server, "/api/train")["can_go_back"]
    monkeypatch.setattr(training, "start_in_background", start_and_end)
    post(server, "/api/train/start", b"{}")
    another = until(server, work="", state="crashed")
    assert (another["name"], another["in_use"]) == ("labels-2", False)
    assert another["can_go_back"], "also after another run"
    post(server, "/api/train/back", b"{}")
    assert not until(server, work="", in_use=False)["can_go_back"]
    assert Index(folder).model_path == str(model)
    assert read(server, "/api/search", text="a dog")["searched"] == COUNT
