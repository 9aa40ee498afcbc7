"""The search page in a real browser, where Playwright and Chromium are installed."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from image_sets import image
from photos import make_photos, save_model

from m1clip.search.index import update_index
from m1clip.web.photos import Photos
from m1clip.web.server import Server, Store
from web.test_page import TIMEOUT, browser, pytestmark, until

__all__ = ["browser", "pytestmark"]
HOSTILE = "<img src=x onerror=alert(1)>.jpg"


@pytest.fixture
def page(browser: Any, tmp_path: Path) -> Iterator[Any]:
    """The page of ten photos; any error, warning or request to another server fails the test."""
    with opened_page(browser, tmp_path) as made:
        yield made


@contextmanager
def opened_page(browser: Any, tmp_path: Path, **options: Any) -> Iterator[Any]:
    photos = make_photos(tmp_path / "photos", 8)
    image(50).save(photos / HOSTILE)
    image(0, (104, 80)).save(photos / "larger.png")  # looks like a/0000.jpg
    update_index(photos, save_model(tmp_path / "model"))
    server = Server(Store([]), 0, Photos(photos))
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    context = browser.new_context(
        locale="en-US", viewport={"width": 1200, "height": 800}, **options
    )
    made, problems = context.new_page(), list[str]()
    made.set_default_timeout(1000 * TIMEOUT)
    made.on("pageerror", lambda error: problems.append(str(error)))
    # The answers to a file that is not an image, and to a wrong token.
    expected = ("400 (Bad Request)", "403 (Forbidden)")

    def note(message: Any) -> None:
        if message.type == "error" and not message.text.endswith(expected):
            problems.append(message.text)

    made.on("console", note)
    made.on(
        "request",
        lambda request: (
            None if request.url.startswith((server.url, "data:")) else problems.append(request.url)
        ),
    )
    made.goto(server.url)
    yield made
    context.close()
    server.shutdown()
    server.server_close()
    assert problems == []


def test_type_open_mark_similar_and_clear_by_keyboard(page: Any) -> None:
    # The near-duplicate is not listed.
    until(page, "document.querySelectorAll('.photo').length === 9")
    assert page.inner_text("#status") == "Newest photos"
    page.keyboard.type("a red dog")
    until(page, "document.querySelector('#status').textContent.includes('of 10 in')")
    until(page, "state.text === 'a red dog'")
    before = page.evaluate("state.results.map((each) => each.id)")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Space")
    until(
        page,
        "document.querySelector('#large').open &&"
        " document.querySelector('#large-image').naturalWidth > 0",
    )
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowLeft")
    assert page.evaluate("state.large") == 1
    page.keyboard.press("y")
    until(page, f"state.results[1].id === {before[1]} && state.results[1].mark === true")
    page.keyboard.press("Escape")
    until(page, "state.large === null")
    page.keyboard.press("r")
    until(page, f"state.results[0].id === {before[1]} && state.results[0].mark === true")
    page.keyboard.press("s")
    until(
        page, "document.querySelector('#likes img') && document.querySelector('#text').value === ''"
    )
    until(page, "document.querySelector('#clear').hidden === false && state.text === ''")
    page.keyboard.press("/")
    assert page.evaluate("document.activeElement.id") == "text"
    page.keyboard.press("Escape")
    until(page, "document.querySelector('#status').textContent === 'Newest photos'")
    page.click("#duplicates")
    until(page, "document.querySelectorAll('.group .photo').length === 2")


def focused_id(page: Any) -> int:
    """The number of the photo that has the focus."""
    return int(page.evaluate("state.results[indexOf(document.activeElement.closest('.photo'))].id"))


def shown_ids(page: Any) -> list[int]:
    return list(page.evaluate("state.results.map((each) => each.id)"))


def type_query(page: Any, text: str) -> None:
    until(page, "document.querySelectorAll('.photo').length === 9")
    page.keyboard.type(text)
    until(
        page,
        f"state.text === {text!r} && document.querySelector('#status').textContent.includes('of 10"
        " in')",
    )


def wait_for_marks(page: Any, expected: dict[int, bool]) -> None:
    """Wait until the marks that a new visit would show are these, and the page has answered to them."""
    deadline = time.monotonic() + TIMEOUT
    marks = None
    while marks != expected:
        assert time.monotonic() < deadline, marks
        answer = page.evaluate("fetch(`/api/search?${query()}`).then((answer) => answer.json())")
        photos = answer["results"] + answer["wrong"]
        marks = {photo["id"]: photo["mark"] for photo in photos if photo["mark"] is not None}
    page.wait_for_load_state("networkidle")


def test_focus_and_places_stay_after_a_mark(page: Any) -> None:
    type_query(page, "a red dog")
    before = shown_ids(page)
    page.keyboard.press("ArrowDown")
    for key in ("y", "ArrowRight", "n", "ArrowRight", "y"):  # one after the other, without waiting
        page.keyboard.press(key)
    wait_for_marks(page, {before[0]: True, before[1]: False, before[2]: True})
    assert focused_id(page) == before[2]
    assert shown_ids(page) == before
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("n")  # the same key again removes the mark
    wait_for_marks(page, {before[0]: True, before[2]: True})
    assert focused_id(page) == before[1]
    page.keyboard.press("n")
    page.keyboard.press("r")
    until(
        page,
        "document.querySelector('#rerank').hidden && !document.querySelector('#wrong-head').hidden",
    )
    assert focused_id(page) == before[1]  # the photo moved, with the focus
    assert shown_ids(page)[-1] == before[1]
    page.keyboard.press("n")  # it can still be taken back
    page.keyboard.press("r")
    until(page, "document.querySelector('#wrong-head').hidden")
    wait_for_marks(page, {before[0]: True, before[2]: True})


def send_old_token(route: Any) -> None:
    route.continue_(headers={**route.request.headers, "x-m1clip-token": "other"})


def test_large_view_stays_at_its_photo_after_a_mark(page: Any) -> None:
    type_query(page, "a red dog")
    before = shown_ids(page)
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Space")
    until(page, "document.querySelector('#large').open")
    for key in ("y", "n", "n", "y"):
        page.keyboard.press(key)
    wait_for_marks(page, {before[1]: True})
    assert page.evaluate("current().id") == before[1]
    assert page.get_attribute("#large-right", "aria-pressed") == "true"
    page.keyboard.press("ArrowRight")
    page.keyboard.press("n")
    wait_for_marks(page, {before[1]: True, before[2]: False})
    # As after a restart of the server. Not in the page, which may read its token again at any moment.
    page.route("**/api/mark", send_old_token)
    page.keyboard.press("y")
    until(
        page,
        "document.querySelector('#large-error').textContent.startsWith('The mark was not stored')",
    )
    until(page, "current().mark === false")
    page.keyboard.press("Escape")
    until(page, "state.large === null")
    assert focused_id(page) == before[2]


def test_photos_that_are_indexed_meanwhile_do_not_move_what_is_marked(
    page: Any, tmp_path: Path
) -> None:
    type_query(page, "a red dog")
    before = shown_ids(page)
    page.keyboard.press("ArrowDown")
    page.keyboard.press("y")
    image(60).save(tmp_path / "photos" / "new.png")
    update_index(tmp_path / "photos")
    until(page, "state.library.images === 11 && state.stale")
    assert shown_ids(page) == before
    assert focused_id(page) == before[0]
    page.click("#rerank")
    until(
        page,
        "state.results.length === 10 && document.querySelector('#status').textContent.includes('of"
        " 11 in')",
    )
    assert page.inner_text("#link-text").startswith("11 photos")
    assert page.evaluate("document.activeElement.closest('.photo') !== null")


def test_bad_date_is_explained_and_not_used(page: Any) -> None:
    until(page, "document.querySelectorAll('.photo').length === 9")
    for text in ("2024-13", "2023-02-30", "May"):
        page.fill("#since", text)
        assert f"“{text}” is not a date yet" in page.inner_text("#date-error")
        assert page.get_attribute("#since", "aria-invalid") == "true"
    page.fill("#text", "dog")
    until(page, "document.querySelector('#status').textContent.includes('of 10 in')")
    page.fill("#since", "2999-02")
    assert page.inner_text("#date-error") == ""
    until(
        page,
        "document.querySelector('#message-text').textContent === 'No photo passes the filters.'",
    )
    page.fill("#until", "x")
    page.click("#clear")
    assert page.inner_text("#date-error") == ""


def test_answers_are_shown_while_the_index_grows_and_queries_are_slow(page: Any) -> None:
    until(page, "document.querySelector('#status').textContent === 'Newest photos'")
    page.evaluate(
        """() => {
            const ask = window.askNow = window.ask;
            window.released = [];
            window.ask = window.askLater = async (path, options) => {
                if (path.startsWith('/api/search')) await new Promise((done) => window.released.push(done));
                return ask(path, options);
            };
        }"""
    )
    old = "document.querySelector('main').getAttribute('aria-busy') === 'true'"
    assert not page.evaluate(old)
    page.fill("#text", "dog")
    assert page.inner_text("#status") == "Searching…"
    assert page.evaluate(old)
    page.evaluate("refresh()")  # more photos were indexed
    page.evaluate("released.shift()()")
    until(page, "document.querySelector('#status').textContent.includes('of 10 in')")  # not dropped
    assert not page.evaluate(old)
    page.evaluate("window.ask = window.askNow; released.forEach((done) => done())")
    page.fill("#since", "2999")
    until(page, "document.querySelector('#message-head').textContent === 'No photos'")
    page.evaluate("void (window.ask = window.askLater)")
    page.fill("#text", "cat")  # no photo passes the filter, but that was for another text
    assert page.inner_text("#message") == "Searching…"


def test_slash_in_the_focused_box_is_the_key_for_focus_and_not_a_query(page: Any) -> None:
    until(page, "document.activeElement.id === 'text'")
    page.keyboard.type("/dog")
    assert page.input_value("#text") == "dog"
    page.keyboard.type("/cat")
    assert page.input_value("#text") == "dog/cat"
    page.evaluate("document.activeElement.blur()")
    page.keyboard.press("/")  # focuses the box and selects its text
    page.keyboard.press("/")
    assert page.input_value("#text") == "dog/cat"


def test_deleted_photo_says_so_instead_of_its_name_in_place_of_the_image(page: Any) -> None:
    until(page, "document.querySelectorAll('.photo').length === 9")
    page.route("**/photo/small*", lambda route: route.fulfill(status=400))
    page.reload()
    until(page, "document.querySelectorAll('.photo.lost').length > 0")
    seen = page.evaluate(
        """() => {
            const tile = document.querySelector('.photo.lost');
            return [getComputedStyle(tile.querySelector('img')).visibility,
                getComputedStyle(tile, '::before').content];
        }"""
    )
    assert seen == ["hidden", '"cannot be read: was it deleted? Index again."']


def test_first_click_on_the_theme_changes_it(browser: Any, tmp_path: Path) -> None:
    for scheme, others in (
        ("light", ["dark", "light", "light"]),
        ("dark", ["light", "dark", "dark"]),
    ):
        with opened_page(browser, tmp_path / scheme, color_scheme=scheme) as page:
            assert page.evaluate("document.documentElement.dataset.theme") == scheme
            for theme in others:
                page.click("#theme")
                assert page.evaluate("document.documentElement.dataset.theme") == theme
            assert page.inner_text("#theme") == "Theme: system"


def test_dropped_image_hostile_name_filters_and_phone_width(page: Any, tmp_path: Path) -> None:
    until(page, "document.querySelectorAll('.photo').length === 9")
    page.set_input_files("#pick", tmp_path / "photos" / HOSTILE)
    until(page, f"state.results[0]?.path === {HOSTILE!r} && state.like?.upload !== undefined")
    assert page.locator(".photo .name").first.inner_text() == HOSTILE
    (tmp_path / "bad.jpg").write_bytes(b"no image")
    page.set_input_files("#pick", tmp_path / "bad.jpg")
    until(page, "document.querySelector('#message-text').textContent.includes('not an image')")
    page.click("#clear")
    page.select_option("#under", "b")
    until(
        page,
        "state.results.length === 4 && state.results.every((each) => each.path.startsWith('b/'))",
    )
    page.set_viewport_size({"width": 360, "height": 700})
    until(page, "document.documentElement.scrollWidth <= 360")
    assert page.locator("nav, main, header").count() >= 2
