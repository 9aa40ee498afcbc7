"""Search over HTTP: what a page of this machine may ask and change, and what no request ever receives."""

import asyncio
import contextlib
import http.client
import io
import json
import os
import shutil
import sqlite3
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlencode

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from image_sets import encoded, image
from photos import make_photos, save_model
from PIL import Image
from reliability.test_soak import ALLOWED, growth
from small_run import Command

from m1clip import console
from m1clip.data.images import BadImage
from m1clip.search import concepts as concepts_module
from m1clip.search import database, reader
from m1clip.search.index import update_index
from m1clip.search.location import DATABASE, thumbnail
from m1clip.search.query import Index
from m1clip.web import photos as photos_module
from m1clip.web import server as server_module
from m1clip.web.photos import Photos
from m1clip.web.server import Server, Store
from web.client import ask, connect, running

HOSTILE = "<img src=x onerror=alert(1)>\u202e.jpg"


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight photos, one with a hostile name and one that is stored sideways.

    And a secret beside them.
    """
    folder = tmp_path_factory.mktemp("library")
    photos = make_photos(folder / "photos", 8)
    image(50).save(photos / HOSTILE)
    exif = Image.Exif()
    exif[0x0112] = 6  # turn by 90 degrees
    image(51, (90, 60)).save(photos / "sideways.jpg", exif=exif)
    image(99).save(folder / "secret.jpg")
    update_index(photos, save_model(folder / "model"))
    return photos


@pytest.fixture
def server(library: Path) -> Iterator[Server]:
    with running(Server(Store([]), 0, Photos(library))) as made:
        yield made


def read(server: Server, path: str, **values: Any) -> dict[str, Any]:
    status, body, _ = ask(server, f"{path}?{urlencode(values)}")
    assert status == 200, body
    return dict(json.loads(body, parse_constant=pytest.fail))


def post(server: Server, path: str, body: bytes) -> tuple[int, dict[str, Any]]:
    status, data, _ = ask(server, path, body, X_M1clip_Token=read(server, "/api/library")["token"])
    return status, json.loads(data)


def ids(server: Server) -> dict[str, int]:
    return {photo["path"]: photo["id"] for photo in read(server, "/api/search")["results"]}


def opened(data: bytes) -> Image.Image:
    return Image.open(io.BytesIO(data))


def test_page_library_and_results(server: Server, library: Path) -> None:
    for page, title in (("/", b"<title>m1clip search"), ("/runs", b"<title>m1clip monitor")):
        assert title in ask(server, page)[1]
    facts = read(server, "/api/library")
    assert (facts["images"], facts["folders"], facts["progress"]) == (10, ["a", "b"], None)
    library_page = read(server, "/api/search", text="a red dog")
    same = Index(library).search("a red dog", 60)
    assert [photo["id"] for photo in library_page["results"]] == [
        photo.id for photo in same.nearest
    ]
    assert library_page["matches"] == len(same.matches)
    assert library_page["searched"] == facts["images"]
    assert "file" not in library_page["results"][0]  # the page need not know where the folder is
    assert {
        photo["path"][0] for photo in read(server, "/api/search", text="dog", under="a")["results"]
    } == {"a"}
    assert read(server, "/api/search", text="dog", since="2999")["results"] == []
    excluded = read(server, "/api/search", text='dog -"a beach" -night')
    expected = Index(library).search(("dog",), 60, exclude=["a beach", "night"])
    assert [photo["id"] for photo in excluded["results"]] == [
        photo.id for photo in expected.nearest
    ]
    number = ids(server)["sideways.jpg"]
    assert read(server, "/api/search", like=number)["results"][0]["id"] == number
    assert json.loads(ask(server, "/api/search?since=tomorrow")[1])["error"].startswith(
        "--since tomorrow"
    )


def test_thumbnails_are_upright_bounded_without_exif_and_made_once(
    server: Server, library: Path
) -> None:
    number = ids(server)["sideways.jpg"]
    status, small, headers = ask(server, f"/photo/small?id={number}")
    assert (status, headers["Content-Type"], opened(small).size) == (200, "image/jpeg", (60, 90))
    assert not opened(small).getexif()
    assert opened(ask(server, f"/photo?id={number}")[1]).size == (60, 90)
    (library / "sideways.jpg").rename(library / "away")
    try:
        assert ask(server, f"/photo/small?id={number}")[1] == small  # from the cache
        assert ask(server, f"/photo?id={number}")[0] == 404
    finally:
        (library / "away").rename(library / "sideways.jpg")


def test_thumbnails_of_deleted_images_are_deleted(server: Server, library: Path) -> None:
    for name in ("deleted.jpg", "moved.jpg"):
        image(len(name)).save(library / name)
    update_index(library)
    before = set((library / ".m1clip-index").rglob("*.jpg"))
    id_of = ids(server)
    assert ask(server, f"/photo/small?id={id_of['moved.jpg']}")[0] == 200
    (thumbnail_path,) = set((library / ".m1clip-index").rglob("*.jpg")) - before
    assert ask(server, f"/photo/small?id={id_of['deleted.jpg']}")[0] == 200
    (library / "deleted.jpg").unlink()
    (library / "moved.jpg").rename(library / "there.jpg")
    update_index(library)
    assert set((library / ".m1clip-index").rglob("*.jpg")) - before == {thumbnail_path}
    (library / "there.jpg").unlink()
    update_index(library)


def test_thumbnail_is_that_of_the_indexed_content_and_no_link(
    server: Server, library: Path
) -> None:
    path, number = library / "b/0001.jpg", ids(server)["b/0001.jpg"]
    original, cached = (
        path.read_bytes(),
        library / ".m1clip-index" / thumbnail(Index(library).sha256(number)),
    )
    try:
        path.write_bytes((library.parent / "secret.jpg").read_bytes())
        assert ask(server, f"/photo/small?id={number}")[0] == 200
        assert not cached.exists()  # it would stay after the file is restored
    finally:
        path.write_bytes(original)
    small = ask(server, f"/photo/small?id={number}")[1]
    assert cached.read_bytes() == small
    cached.unlink()
    cached.symlink_to(library.parent / "secret.jpg")
    assert ask(server, f"/photo/small?id={number}")[1] == small


def test_few_images_are_decoded_at_a_time(shared: Photos, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as may be are decoded when the others have asked; then these follow."""
    uploads = 4 * photos_module.DECODERS
    asked, started = threading.Semaphore(0), threading.Semaphore(0)
    decoding, most, lock, go_on = 0, 0, threading.Lock(), threading.Event()

    class CountedSemaphore(threading.Semaphore):
        def __enter__(self) -> bool:
            asked.release()
            return self.acquire()

    def slow_decode(*_: object) -> None:
        nonlocal decoding, most
        with lock:
            decoding += 1
            most = max(most, decoding)
        started.release()
        go_on.wait(300)
        with lock:
            decoding -= 1
        raise BadImage("x", "not an image")

    monkeypatch.setattr(shared, "_decoders", CountedSemaphore(photos_module.DECODERS))
    monkeypatch.setattr(photos_module, "decode", slow_decode)
    threads = [
        threading.Thread(target=shared.post, args=("/api/upload", b"x")) for _ in range(uploads)
    ]
    for thread in threads:
        thread.start()
    for semaphore, count in ((asked, uploads), (started, photos_module.DECODERS)):
        for _ in range(count):
            assert semaphore.acquire(timeout=300)
    go_on.set()
    for thread in threads:
        thread.join()
    assert most == photos_module.DECODERS


def test_files_are_read_only_while_they_are_decoded(
    shared: Photos, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file may have 256 MiB, and a page requests many at a time."""
    read_small = photos_module.read_small
    decoders = threading.Semaphore(1)
    found_free = []

    def read(*words: Any, **options: Any) -> bytes:
        is_free = decoders.acquire(blocking=False)
        if is_free:
            decoders.release()
        found_free.append(is_free)
        return read_small(*words, **options)

    shared.get("/api/library", {})  # opens the index
    monkeypatch.setattr(photos_module, "read_small", read)
    monkeypatch.setattr(shared, "_decoders", decoders)
    assert shared.get("/photo", {"id": "1"}) is not None
    assert found_free == [False]


def test_only_indexed_files_inside_the_folder_are_served(server: Server, library: Path) -> None:
    number = ids(server)["a/0000.jpg"]
    for value in (
        "../secret.jpg",
        "0",
        "-1",
        "999999999999",
        "1e3",
        "²",
        "",
        f"{number}/../../secret.jpg",
    ):
        assert ask(server, f"/photo?{urlencode({'id': value})}")[0] == 404, value
    for path in (
        "/secret.jpg",
        "/photo/../secret.jpg",
        "/a/0000.jpg",
        "/.m1clip-index/index.sqlite",
        "/photo",
    ):
        assert ask(server, path)[0] == 404, path
    folder, aside = library / "a", library / "aside"
    folder.rename(aside)
    outside = library.parent / "outside"
    outside.mkdir()
    shutil.copy(library.parent / "secret.jpg", outside / "0000.jpg")
    try:
        folder.symlink_to(outside)  # the folder was replaced by a link after indexing
        assert ask(server, f"/photo?id={number}")[0] == 404
        assert ask(server, f"/photo/small?id={number}")[0] == 404
    finally:
        folder.unlink()
        aside.rename(folder)
        shutil.rmtree(outside)
    assert ask(server, f"/photo?id={number}")[0] == 200


def test_names_are_text_without_control_characters(server: Server) -> None:
    (path,) = (path for path in ids(server) if path.startswith("<img"))
    assert path == "<img src=x onerror=alert(1)>\\u202e.jpg"
    scripts = [
        ask(server, f"/{name}")[1].decode() for name in ("search.js", "common.js", "search.html")
    ]
    assert all(
        word not in text
        for text in scripts
        for word in ("innerHTML", "insertAdjacent", "document.write", "eval(")
    )


def test_changes_need_the_token_and_a_page_of_this_machine(server: Server) -> None:
    mark = json.dumps({"text": "token", "id": ids(server)["a/0000.jpg"], "positive": True}).encode()
    token = read(server, "/api/library")["token"]
    for headers in (
        {},
        {"X_M1clip_Token": ("y" if token[0] == "x" else "x") + token[1:]},
        {"X_M1clip_Token": "ü"},
        {"X_M1clip_Token": token, "Host": "evil.example"},
        {"X_M1clip_Token": token, "Origin": "https://evil.example"},
        {"X_M1clip_Token": token, "Sec_Fetch_Site": "cross-site"},
    ):
        for path in ("/api/mark", "/api/upload"):
            assert ask(server, path, mark, **headers)[0] == 403, headers
    for path in ("/api/library", "/api/search", "/photo?id=1"):
        assert (
            ask(server, path, Host="evil.example")[0] == ask(server, path, Origin="null")[0] == 403
        )
    assert "token" not in read(server, "/api/library")["words"]
    assert ask(server, "/api/mark", mark, X_M1clip_Token=token)[0] == 200
    assert "token" in read(server, "/api/library")["words"]
    assert ask(server, "/api/other", mark, X_M1clip_Token=token)[0] == 404


def test_marks_change_the_ranking_at_once_and_can_be_removed(server: Server) -> None:
    def ids_in_order() -> list[int]:
        return [photo["id"] for photo in read(server, "/api/search", text="red beach")["results"]]

    def mark(id_: int, positive: bool | None) -> None:
        assert (
            post(
                server,
                "/api/mark",
                json.dumps({"text": "red beach", "id": id_, "positive": positive}).encode(),
            )[0]
            == 200
        )

    before = ids_in_order()
    mark(before[0], False)
    assert ids_in_order() == before[1:]
    # Listed apart, to remove the mark.
    negatives = read(server, "/api/search", text="red beach", count=1)["wrong"]
    assert [(photo["id"], photo["mark"]) for photo in negatives] == [(before[0], False)]
    assert read(server, "/api/search", text="dog")["wrong"] == []
    mark(before[0], None)
    assert ids_in_order() == before
    mark(before[-1], True)
    assert ids_in_order()[0] == before[-1]
    (marked,) = (
        photo
        for photo in read(server, "/api/search", text="Red  beach")["results"]
        if photo["mark"] is not None
    )
    assert (marked["id"], marked["mark"]) == (before[-1], True)
    mark(before[-1], None)


@settings(max_examples=60, deadline=None)
@given(
    st.one_of(
        st.binary(max_size=200),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.text(),
            lambda inner: st.lists(inner, max_size=3),
        ).map(lambda value: json.dumps({"text": value, "id": value, "positive": value}).encode()),
    )
)
def test_any_other_body_is_an_error_of_one_line(shared: Photos, body: bytes) -> None:
    for path in ("/api/mark", "/api/upload"):
        answer = shared.post(path, body)
        assert answer is not None
        assert answer[0] == 400
        assert "\n" not in json.loads(answer[2])["error"]


@pytest.mark.parametrize(
    "body",
    [
        '{"text": "a\\ud800", "id": 1, "positive": true}',
        f'{{"text": "a", "id": {10**30}, "positive": true}}',
    ],
)
def test_mark_that_no_database_can_store_is_a_bad_request(shared: Photos, body: str) -> None:
    answer = shared.post("/api/mark", body.encode())
    assert answer is not None
    assert answer[0] == 400
    assert json.loads(answer[2])["error"].startswith("a mark is {text, id, positive}")


@pytest.mark.parametrize("text", ["9" * 39 + "*dog", "9" * 400 + "*dog", "0*dog"])
def test_weight_without_a_meaning_is_a_bad_request(server: Server, text: str) -> None:
    status, body, _ = ask(server, f"/api/search?{urlencode({'text': text})}")
    assert status == 400
    assert json.loads(body)["error"].startswith("dog: its weight must be above 0")


def test_unexpected_error_is_answered(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError("a\nb")

    monkeypatch.setattr(Photos, "get", fail)
    monkeypatch.setattr(Server, "handle_error", lambda *_: None)  # would print the traceback
    status, body, _ = ask(server, "/api/search")
    assert status == 500
    assert (
        json.loads(body)["error"] == "internal error (ZeroDivisionError: a\\nb); please report it"
    )


def test_model_of_a_run_is_shown_by_the_name_of_the_run(tmp_path: Path) -> None:
    photos = make_photos(tmp_path / "photos", 1)
    run = tmp_path / "runs" / "dogs"
    save_model(run / "best")
    (run / "config.toml").touch()
    for model, name in ((run, "dogs"), (save_model(tmp_path / "my-model"), "my-model")):
        update_index(photos, model)
        answer = Photos(photos).get("/api/library", {})
        assert answer is not None
        assert json.loads(answer[2])["model"] == name


@settings(max_examples=60, deadline=None)
@given(
    st.dictionaries(
        st.sampled_from(
            ["text", "since", "until", "under", "orientation", "like", "upload", "count"]
        ),
        st.text(),
    )
)
def test_any_query_is_answered(shared: Photos, values: dict[str, str]) -> None:
    answer = shared.get("/api/search", values)
    assert answer is not None
    assert answer[0] in (200, 400)


@pytest.fixture(scope="module")
def shared(library: Path) -> Photos:
    return Photos(library)


def test_number_of_results_is_bounded(shared: Photos, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(photos_module, "MAX_RESULTS", 3)
    for values in ({"text": "dog"}, {"like": "1"}, {}):
        answer = shared.get("/api/search", {"count": "999999999999", **values})
        assert answer is not None
        assert len(json.loads(answer[2])["results"]) == 3


def test_uploads_are_bounded_in_bytes_pixels_and_number(server: Server, library: Path) -> None:
    status, made = post(server, "/api/upload", (library / "sideways.jpg").read_bytes())
    assert status == 200
    results = read(server, "/api/search", upload=made["upload"])["results"]
    assert results[0]["path"] == "sideways.jpg"
    assert made["preview"].startswith("data:image/jpeg;base64,")
    huge = encoded(Image.new("1", (70_000, 1000)), "PNG")  # 70 megapixels in a few bytes
    status, error = post(server, "/api/upload", huge)
    assert (status, "megapixels" in error["error"]) == (400, True)
    token = read(server, "/api/library")["token"]
    lines = ["POST /api/upload HTTP/1.1", "Host: localhost", f"X-M1clip-Token: {token}"]
    for length in (str(2**25 + 1), "-1", "1e3", ""):
        with connect(server) as client:
            client.sendall("\r\n".join([*lines, f"Content-Length: {length}", "", ""]).encode())
            assert client.recv(100).startswith(b"HTTP/1.1 413 "), length
    for _ in range(40):
        post(server, "/api/upload", (library / "a" / "0000.jpg").read_bytes())
    status, body, _ = ask(server, f"/api/search?upload={made['upload']}")
    assert (status, json.loads(body)["error"]) == (
        400,
        "the image to search by is no longer there; drop it again",
    )


def test_slow_uploads_do_not_stop_the_server(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(server_module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    token = read(server, "/api/library")["token"]
    head = f"POST /api/upload HTTP/1.1\r\nHost: localhost\r\nX-M1clip-Token: {token}\r\nContent-Length: 1000\r\n\r\n"
    slow = [connect(server) for _ in range(server_module.PARALLEL_UPLOADS)]
    for client in slow:
        client.sendall(head.encode())
    deadline = time.monotonic() + 300
    # Until all four are being received.
    while ask(server, "/api/upload", b"x", X_M1clip_Token=token)[0] != 503:
        assert time.monotonic() < deadline
    assert read(server, "/api/search", text="dog")["results"]
    mark = {"text": "slow", "id": ids(server)["a/0000.jpg"]}
    for positive in (True, None):
        assert post(server, "/api/mark", json.dumps({**mark, "positive": positive}).encode()) == (
            200,
            {},
        )
    assert post(server, "/api/mark", bytes(server_module.MAX_BODY + 1))[0] == 413
    now[0] += server_module.UPLOAD_SECONDS + 1
    for client in slow:
        client.sendall(b"x")
        assert client.recv(100).startswith(b"HTTP/1.1 404 ")
        client.close()
    assert ask(server, "/api/upload", b"x", X_M1clip_Token=token)[0] == 400


def test_locked_database_blocks_no_other_request(
    server: Server, library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    number = ids(server)["a/0000.jpg"]
    waiting, released = threading.Barrier(5), threading.Event()

    def wait_together(
        _: float,
    ) -> None:  # all requests get here at the same time: none holds a lock that others need
        if not released.is_set():
            waiting.wait(timeout=300)
            released.wait(timeout=300)

    monkeypatch.setattr(reader, "READ_SECONDS", 600.0)
    monkeypatch.setattr(reader.time, "sleep", wait_together)
    paths = ("/api/search?text=dog", "/api/search", f"/photo?id={number}", "/api/duplicates")
    with ThreadPoolExecutor(len(paths)) as pool:
        with contextlib.closing(sqlite3.connect(library / ".m1clip-index" / DATABASE)) as other:
            other.execute("BEGIN EXCLUSIVE")
            answers = [pool.submit(ask, server, path) for path in paths]
            waiting.wait(timeout=300)
            assert ask(server, "/api/update")[0] == 200
        released.set()
        assert [answer.result()[0] for answer in answers] == [200] * len(paths)


def test_locked_database_is_an_answer_after_a_limited_time(
    shared: Photos, library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert shared.get("/api/library", {})[0] == 200  # type: ignore[index]
    for module in (reader, concepts_module, database):
        monkeypatch.setattr(module, "READ_SECONDS", 0.0)
    mark = json.dumps({"text": "x", "id": 1, "positive": True}).encode()
    for name in (DATABASE, "concepts.sqlite"):
        with contextlib.closing(sqlite3.connect(library / ".m1clip-index" / name)) as other:
            other.execute("BEGIN EXCLUSIVE")
            for answer in (
                shared.get("/api/search", {"text": "a"}),
                shared.post("/api/mark", mark),
            ):
                assert answer is not None
                assert answer[0] == 503
                assert "another program has locked it" in json.loads(answer[2])["error"]
    with contextlib.closing(sqlite3.connect(library / ".m1clip-index" / DATABASE)) as other:
        other.execute("BEGIN EXCLUSIVE")
        assert Photos(library).get("/api/library", {})[0] == 503  # type: ignore[index]


def test_photo_replaced_by_a_link_during_a_request_is_not_served(
    server: Server, library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    photo, number, original = library / "b/0003.jpg", ids(server)["b/0003.jpg"], os.path.realpath

    def swap_after(path: str | Path) -> str:  # when the path was checked
        real = original(path)
        if Path(path) == photo and not photo.is_symlink():
            photo.rename(library / "aside")
            photo.symlink_to(library.parent / "secret.jpg")
        return real

    monkeypatch.setattr(os.path, "realpath", swap_after)
    for path in ("/photo", "/photo/small"):
        try:
            assert ask(server, f"{path}?id={number}")[0] == 404
            assert photo.is_symlink()
        finally:
            (library / "aside").rename(photo)
    monkeypatch.undo()
    assert ask(server, f"/photo?id={number}")[0] == 200


def test_thumbnails_are_not_written_through_a_link(
    server: Server, library: Path, tmp_path: Path
) -> None:
    number = ids(server)["b/0005.jpg"]
    thumbnails = library / ".m1clip-index" / "thumbnails"
    thumbnails.mkdir(exist_ok=True)
    thumbnails.rename(tmp_path / "aside")
    (tmp_path / "elsewhere").mkdir()
    thumbnails.symlink_to(tmp_path / "elsewhere")
    try:
        assert ask(server, f"/photo/small?id={number}")[0] == 200
        assert list((tmp_path / "elsewhere").iterdir()) == []
    finally:
        thumbnails.unlink()
        (tmp_path / "aside").rename(thumbnails)


def test_index_that_is_made_or_replaced_while_serving(tmp_path: Path) -> None:
    photos, served = make_photos(tmp_path / "photos", 2), Photos(tmp_path / "photos")

    def images() -> Any:
        answer = served.get("/api/library", {})
        assert answer is not None
        return json.loads(answer[2]).get("images", json.loads(answer[2]).get("error"))

    assert "not indexed yet; run: m1clip index" in images()
    model = save_model(tmp_path / "model")
    update_index(photos, model)
    assert images() == 2
    image(7).save(photos / "new.png")
    update_index(photos)
    assert images() == 3
    shutil.rmtree(photos / ".m1clip-index")
    (photos / "new.png").unlink()
    update_index(photos, model)
    assert images() == 2


def test_progress_of_a_running_indexer_is_reported(library: Path) -> None:
    states = []
    update_index(library)
    index = Index(library)
    assert index.progress() is None
    image(70).save(library / "one-more.png")

    def during(done: int, total: int) -> None:
        states.append((done, total))

    with console.on_progress(during):
        update_index(library)
    assert states == [(0, 1), (1, 1)]
    assert Index(library).progress() is None  # finished
    (library / "one-more.png").unlink()
    update_index(library)


@pytest.mark.parametrize("hours", [-1, 1])
def test_killed_indexer_is_not_running_although_the_clock_was_set(
    hours: int, library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    update_index(library)
    index, now = Index(library), time.time
    note = f"3 10 {now():.0f}"  # of an indexer that did not end
    with contextlib.closing(sqlite3.connect(library / ".m1clip-index" / "index.sqlite")) as db, db:
        db.execute("INSERT OR REPLACE INTO about VALUES ('progress', ?)", (note,))
    assert index.progress() == (3, 10)
    monkeypatch.setattr(time, "time", lambda: now() + 3600 * hours)
    assert index.progress() is None
    monkeypatch.undo()
    update_index(library)


async def client(port: int, deadline: float, random: Random, answered: list[int]) -> None:
    """One of many clients until a deadline: searches, photos, wrong bytes, and connections that send nothing."""
    kinds = {
        "search": b"GET /api/search?text=dog%d HTTP/1.1\r\nHost: localhost\r\n\r\n"
        % random.randrange(10**6),
        "photo": b"GET /photo/small?id=%d HTTP/1.1\r\nHost: localhost\r\n\r\n"
        % random.randrange(1, 9),
        "upload": b"POST /api/upload HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9999\r\n\r\n"
        + random.randbytes(99),
        "half": b"GET /api/lib",
        "nothing": b"",
    }
    while time.monotonic() < deadline:
        kind = random.choice(list(kinds))
        with contextlib.suppress(OSError, TimeoutError):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(kinds[kind])
            answer = await asyncio.wait_for(reader.read(), 60)
            answered.append(kind in ("search", "photo") and answer.startswith(b"HTTP/1.1 200 "))
            writer.close()
        await asyncio.sleep(8 * random.random())


@pytest.mark.long("Many clients of the search page")
def test_200_clients_for_ten_minutes(
    library: Path, tmp_path: Path, counts: dict[str, float]
) -> None:
    minutes, samples, answered = (
        float(os.environ.get("SOAK_MINUTES", "10")),
        dict[str, list[tuple[float, float]]](),
        [],
    )
    (tmp_path / "runs").mkdir()
    process = Command("serve", str(library), "--port", "0", "--no-browser", cwd=tmp_path / "runs")
    process.wait_until(lambda: "http://" in process.read()[0])
    port, server = (
        int(process.read()[0].partition("127.0.0.1:")[2].partition("/")[0]),
        psutil.Process(process.pid),
    )

    async def soak() -> None:
        deadline = time.monotonic() + 60 * minutes
        clients = [
            asyncio.create_task(client(port, deadline, Random(number), answered))
            for number in range(200)
        ]
        while time.monotonic() < deadline:
            figures = {
                "rss": server.memory_info().rss,
                "fds": server.num_fds(),
                "threads": server.num_threads(),
            }
            for name, value in figures.items():
                samples.setdefault(name, []).append((time.monotonic(), value))
            await asyncio.sleep(60 * minutes / 200)
        await asyncio.gather(*clients)

    asyncio.run(soak())
    assert process.returncode is None
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("GET", "/api/search?text=dog")
    assert connection.getresponse().status == 200
    assert growth(samples["rss"]) <= ALLOWED["rss"], samples["rss"]
    for name in ("fds", "threads"):  # one of each for a connection, and those of the process
        assert max(value for _, value in samples[name]) <= server_module.CONNECTIONS + 50, samples[
            name
        ]
    counts |= {
        "minutes of 200 clients": minutes,
        "connections": len(answered),
        "searches and photos": sum(answered),
    }
    counts["MB of growth"] = round(growth(samples["rss"]) / 1e6, 1)
