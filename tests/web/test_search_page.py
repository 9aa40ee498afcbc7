"""The search page in a real browser, where Playwright and Chromium are installed."""

import threading
from collections.abc import Iterator
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
    photos = make_photos(tmp_path / "photos", 8)
    image(50).save(photos / HOSTILE)
    image(0, (104, 80)).save(photos / "larger.png")  # looks like a/0000.jpg
    update_index(photos, save_model(tmp_path / "model"))
    server = Server(Store([]), 0, Photos(photos))
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    context = browser.new_context(locale="en-US", viewport={"width": 1200, "height": 800})
    made, problems = context.new_page(), list[str]()
    made.set_default_timeout(1000 * TIMEOUT)
    made.on("pageerror", lambda error: problems.append(str(error)))
    refused = "400 (Bad Request)"  # the answer to a file that is not an image
    made.on(
        "console",
        lambda each: problems.append(each.text) if each.type == "error" and refused not in each.text else None,
    )
    made.on("request", lambda each: None if each.url.startswith((server.url, "data:")) else problems.append(each.url))
    made.goto(server.url)
    yield made
    context.close()
    server.shutdown()
    server.server_close()
    assert problems == []


def test_type_open_mark_similar_and_clear_by_keyboard(page: Any) -> None:
    until(page, "document.querySelectorAll('.photo').length === 9")  # the near-duplicate is not listed
    assert page.inner_text("#status") == "Newest photos"
    page.keyboard.type("a red dog")
    until(page, "document.querySelector('#status').textContent.includes('of 10 in')")
    until(page, "state.text === 'a red dog'")
    before = page.evaluate("state.results.map((each) => each.id)")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Space")
    until(page, "document.querySelector('#large').open && document.querySelector('#large-image').naturalWidth > 0")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowLeft")
    assert page.evaluate("state.large") == 1
    page.keyboard.press("y")
    until(page, f"state.results[0].id === {before[1]} && state.results[0].mark === true")
    page.keyboard.press("Escape")
    until(page, "!document.querySelector('#large').open")
    page.keyboard.press("s")
    until(page, "document.querySelector('#likes img') && document.querySelector('#text').value === ''")
    until(page, "document.querySelector('#clear').hidden === false && state.text === ''")
    page.keyboard.press("/")
    assert page.evaluate("document.activeElement.id") == "text"
    page.keyboard.press("Escape")
    until(page, "document.querySelector('#status').textContent === 'Newest photos'")
    page.click("#duplicates")
    until(page, "document.querySelectorAll('.group .photo').length === 2")


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
    until(page, "state.results.length === 4 && state.results.every((each) => each.path.startsWith('b/'))")
    page.set_viewport_size({"width": 360, "height": 700})
    until(page, "document.documentElement.scrollWidth <= 360")
    assert page.locator("nav, main, header").count() >= 2
