"""The Label page in a real browser, where Playwright and Chromium are installed."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from monitor.made_runs import ended, evaluation, make_run, step
from photos import make_photos, save_model

from m1clip.data.caption_table import read_captions
from m1clip.errors import UserError
from m1clip.io import RUN_LOCK
from m1clip.runlog import ABOUT_LABELS
from m1clip.search.compare import Verdict
from m1clip.search.index import update_index
from m1clip.training.process import OUTPUT
from m1clip.web import training
from m1clip.web.photos import Photos
from m1clip.web.server import Server, Store
from web.test_page import TIMEOUT, browser, pytestmark, until

__all__ = ["browser", "pytestmark"]
COUNT = 34


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    photos = make_photos(tmp_path / "photos", COUNT)
    update_index(photos, save_model(tmp_path / "model"))
    return photos


@contextmanager
def opened(browser: Any, folder: Path, **options: Any) -> Iterator[tuple[Any, Server]]:
    """The page; any error, warning or request to another server fails the test."""
    server = Server(Store([]), 0, Photos(folder, runs=folder.parent / "runs"))
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    context = browser.new_context(
        locale="en-US", viewport={"width": 1200, "height": 800}, **options
    )
    page, problems = context.new_page(), list[str]()
    page.set_default_timeout(1000 * TIMEOUT)
    page.on("pageerror", lambda error: problems.append(str(error)))
    expected = ("400 (Bad Request)", "403 (Forbidden)", "404 (Not Found)")

    def note(message: Any) -> None:
        if message.type == "error" and not message.text.endswith(expected):
            problems.append(message.text)

    page.on("console", note)
    page.on(
        "request",
        lambda request: (
            None if request.url.startswith((server.url, "data:")) else problems.append(request.url)
        ),
    )
    page.goto(f"{server.url}label")
    until(page, "state.photos.length > 0 && !state.loading")
    yield page, server
    context.close()
    server.shutdown()
    server.server_close()
    assert problems == []


def captions(folder: Path) -> dict[str, list[str]]:
    table = read_captions(folder / "captions.csv")
    return {name: [caption.text for caption in table.of(name)] for name in table.images()}


def labelled(page: Any, count: int) -> None:
    until(page, f"state.progress.labelled === {count} && !state.busy")


def test_label_by_keyboard_skip_undo_several_and_correct(browser: Any, folder: Path) -> None:
    with opened(browser, folder) as (page, _):
        paths = page.evaluate("state.photos.map((photo) => photo.path)")
        words = page.evaluate("state.photos[0].suggestions")
        for key in ("1", "3", "Enter"):
            page.keyboard.press(key)
        labelled(page, 1)
        page.keyboard.press("c")
        page.keyboard.type("a dog on a beach")
        page.keyboard.press("Enter")
        labelled(page, 2)
        assert captions(folder) == {
            paths[0]: [f"{words[0]}, {words[2]}"],
            paths[1]: ["a dog on a beach"],
        }
        assert page.evaluate("document.activeElement.id") != "caption"
        page.keyboard.press("1")  # of the next photo: a word, not a caption
        assert page.evaluate("[...state.chosen]") == [page.evaluate("current().suggestions[0]")]
        page.keyboard.press("1")
        assert page.evaluate("current().path") == paths[2]
        page.keyboard.press("n")
        until(page, f"current().path === {paths[3]!r}")
        page.keyboard.press("u")
        until(page, f"current().path === {paths[2]!r}")
        page.keyboard.press("u")
        until(page, f"current().path === {paths[1]!r} && state.progress.labelled === 1")
        assert list(captions(folder)) == paths[:1]
        page.keyboard.press("x")
        boxes = page.locator("#queue input")
        boxes.nth(1).check()
        boxes.nth(2).check()
        assert page.inner_text("#save") == "Save for 3 photos"
        page.keyboard.press("Escape")
        page.fill("#caption", "people")
        page.click("#save")
        labelled(page, 4)
        page.click("#labelled")
        until(page, "state.view === 'labelled' && state.kept.length === 1")
        page.locator("#kept button").first.click()
        page.fill("#caption", "two people")
        page.click("#save")
        until(page, "!state.busy && state.photos[0].captions.join() === 'two people'")
        assert ["two people"] in captions(folder).values()
        page.keyboard.press("Escape")
        page.keyboard.press("Escape")
        until(page, "state.view === 'next'")


def test_caption_of_digits_is_only_saved_when_it_is_confirmed(browser: Any, folder: Path) -> None:
    with opened(browser, folder) as (page, _):
        path = page.evaluate("current().path")
        page.fill("#caption", "12")
        page.keyboard.press("Enter")
        until(page, "document.querySelector('#error').textContent.includes('only “12”')")
        assert not (folder / "captions.csv").exists()
        page.keyboard.press("Backspace")  # another caption of digits is asked for again
        page.keyboard.press("Enter")
        until(page, "document.querySelector('#error').textContent.includes('only “1”')")
        assert not (folder / "captions.csv").exists()
        page.keyboard.press("Enter")
        labelled(page, 1)
        assert captions(folder) == {path: ["1"]}


def test_page_says_that_it_is_loading_and_offers_nothing_until_it_knows_the_labels(
    browser: Any, folder: Path
) -> None:
    server = Server(Store([]), 0, Photos(folder, runs=folder.parent / "runs"))
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    context = browser.new_context(viewport={"width": 1200, "height": 800})
    page = context.new_page()
    page.set_default_timeout(1000 * TIMEOUT)
    held: list[Any] = []

    def hold(route: Any) -> None:
        held.append(route)

    page.route("**/api/label/queue*", hold)
    page.goto(f"{server.url}label")
    until(page, "run.status !== null && state.loading")
    assert page.inner_text("#train-text") == page.inner_text("#goal") == "Loading…"
    assert page.locator("main button:enabled:visible").all_inner_texts() == []
    for route in held:
        route.continue_()
    until(page, "state.photos.length > 0 && !state.loading")
    assert page.inner_text("#train-text") == "30 more labels needed before the first training."
    assert page.is_enabled("#skip")
    assert page.is_enabled("#save")
    context.close()
    server.shutdown()
    server.server_close()


def test_error_keeps_what_was_typed_and_a_restarted_server_takes_it(
    browser: Any, folder: Path
) -> None:
    with opened(browser, folder) as (page, server):
        page.fill("#caption", "x" * 1001)
        page.click("#save")
        until(page, "document.querySelector('#error').textContent.includes('at most 1,000')")
        assert page.input_value("#caption") == "x" * 1001
        page.fill("#caption", "a <b>dog</b>")
        page.reload()
        until(page, "state.photos.length > 0 && !state.loading")
        # The page before still holds its photos; its draft is there when its photo is.
        drafts = page.evaluate("Object.values(sessionStorage)")
        assert "a <b>dog</b>" in drafts
        server.photos.token = "another"  # as after a restart
        page.fill("#caption", "a <b>cat</b>")
        page.keyboard.press("Enter")
        labelled(page, 1)
        page.keyboard.press("l")
        until(page, "state.view === 'labelled'")
        assert page.inner_text("#kept li").startswith("a <b>cat</b>")


def test_conflict_with_another_page_is_shown_and_nothing_is_lost(
    browser: Any, folder: Path
) -> None:
    with opened(browser, folder) as (page, _):
        path = page.evaluate("current().path")
        page.evaluate(
            "send('/api/label', {photos: [{id: current().id, version: current().version}], "
            "captions: ['theirs'], page: 'x'})"
        )
        until(page, "!state.busy")
        page.fill("#caption", "mine")
        page.click("#save")
        until(page, "document.querySelector('#error').textContent.startsWith('Another page')")
        assert page.input_value("#caption") == "mine"
        page.click("#save")
        labelled(page, 1)
        assert captions(folder) == {path: ["theirs", "mine"]}


def test_phone_shows_all_and_train_says_how_many_labels_are_needed(
    browser: Any, folder: Path
) -> None:
    phone = {"has_touch": True, "color_scheme": "dark"}
    with opened(browser, folder, **phone) as (page, _):
        page.set_viewport_size({"width": 360, "height": 700})
        until(page, "document.documentElement.scrollWidth <= 360")
        until(page, "document.querySelector('#train-text').textContent !== ''")
        assert page.inner_text("#train-text") == "30 more labels needed before the first training."
        assert page.is_disabled("#train-start")
        page.tap("#words button >> nth=0")
        page.tap("#save")
        labelled(page, 1)
        assert page.inner_text("#goal").startswith("1 of 30 labels until the first training.")


def write_labels(folder: Path) -> None:
    """A table as the page would write it: two of three labels are trained on, some photos are left."""
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.jpg"))[:-3]
    splits = ("train", "test", "train")
    rows = [f"{name},a dog,person,{splits[at % 3]}" for at, name in enumerate(names)]
    table = "\n".join(["image,caption,source,split", *rows, ""])
    (folder / "captions.csv").write_text(table, encoding="utf-8")


def test_slow_start_and_its_failure_are_shown_and_cannot_be_clicked_twice(
    browser: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_labels(folder)
    may_end, started = threading.Event(), list[Path]()

    def start(words: list[str], run: Path, name: str, resume: None) -> None:
        started.append(run)
        may_end.wait(TIMEOUT)
        (run / RUN_LOCK).write_text("")  # as a process leaves it that has ended
        (run / OUTPUT).write_text("m1clip: captions.csv: no image can be read\n")

    monkeypatch.setattr(training, "start_in_background", start)
    with opened(browser, folder) as (page, _):
        until(page, "!document.querySelector('#train-start').disabled")
        shown = page.evaluate(
            "(() => { $('train-start').click(); $('train-start').click();"
            " return [$('train-state').textContent, $('train-start').disabled]; })()"
        )
        assert shown == ["starting", True]
        until(page, "run.status.work === 'starting'")
        assert page.inner_text("#train-text") == "Starting the training…"
        answer = page.evaluate("send('/api/train/start', {})")  # as another page would
        assert answer["error"] == "starting now; wait until it is done"
        may_end.set()
        until(page, "run.status.state === 'crashed'")
        assert "captions.csv: no image can be read" in page.inner_text("#train-error")
        assert "train.log" in page.inner_text("#train-error")
        assert page.inner_text("#train-start") == "Train again"
        until(page, "!document.querySelector('#train-start').disabled")
        assert len(started) == 1


def test_labels_that_cannot_be_divided_are_explained_and_the_error_stays(
    browser: Any, folder: Path
) -> None:
    write_labels(folder)
    table = folder / "captions.csv"
    table.write_text(table.read_text().replace(",test", ",train"))
    with opened(browser, folder) as (page, _):
        until(page, "!document.querySelector('#train-start').disabled")
        page.click("#train-start")
        until(page, "document.querySelector('#train-error').textContent.includes('one by one')")
        page.evaluate("poll()")  # a later status does not remove it
        assert "one by one" in page.inner_text("#train-error")
        assert page.is_hidden("#train-state")


def test_page_warns_of_equal_captions_and_of_few_validation_photos_and_says_that_it_compares(
    browser: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_labels(folder)
    table = folder / "captions.csv"
    header, *rows = table.read_text().splitlines()
    for number, row in enumerate(rows[:-2]):
        name, _, *rest = row.split(",")
        rows[number] = ",".join([name, "1", *rest])
    table.write_text("\n".join([header, *rows, ""]))
    few = {"mean_recall/n": 3, "mean_recall/chance": 0.8}
    records = [step(1), evaluation(1, 0.9, **few), ended(1, 0.9)]
    run = make_run(folder.parent / "runs" / "labels", records)
    about = {"root": str(folder), "labels": len(rows), "before_name": "model"}
    (run / ABOUT_LABELS).write_text(json.dumps(about), encoding="utf-8")
    may_end = threading.Event()

    def compare(*_: Any) -> None:
        may_end.wait(TIMEOUT)
        raise UserError("the models were not compared")

    monkeypatch.setattr(training, "compare_models", compare)
    with opened(browser, folder) as (page, server):
        server.store = Store([folder.parent / "runs"])
        until(page, "document.querySelector('#train-warning').textContent !== ''")
        warning = f"{len(rows) - 2} photos of {len(rows)} have the same caption, “1”"
        assert page.inner_text("#train-warning").startswith(warning)
        until(page, "run.evaluations.length === 1")
        assert page.inner_text("#train-state") == "comparing"
        assert page.inner_text("#train-text").startswith("Comparing the model before and after")
        assert page.inner_text("#recall-note") == (
            "Recall is measured on 3 validation photos: too few to judge the model by. "
            "Chance level: 80.0%."
        )
        may_end.set()
        until(page, "document.querySelector('#train-state').textContent === 'finished'")


BETTER = Verdict(True, "it is better")
CHANCE = Verdict(False, "the difference may be chance")


@pytest.mark.parametrize("verdict", [BETTER, CHANCE])
def test_button_returns_to_the_previous_model_and_a_phone_shows_the_result_in_full(
    browser: Any, folder: Path, monkeypatch: pytest.MonkeyPatch, verdict: Verdict
) -> None:
    run = save_model(folder.parent / "trained", embed_dim=8)
    pair = {"name": "mean_recall", "before": (0.4, 0.3, 0.5), "after": (0.5, 0.4, 0.6)}
    result = {"metrics": [pair], "gain": (0.1, 0.05, 0.15), "verdict": asdict(verdict)}
    result |= {"captions": 20, "photos": 20, "candidates": COUNT}
    about = {"labels": 40, "before_name": "model", "result": result}
    (run / ABOUT_LABELS).write_text(json.dumps(about), encoding="utf-8")
    update_index(folder, run)  # last: the file counts as a part of the model
    finished = SimpleNamespace(state="finished", message="finished")
    monkeypatch.setattr(training, "status_of", lambda poll: finished)
    monkeypatch.setattr(training.TrainPage, "_newest", lambda *_: (run, about))

    def is_main(button: str) -> bool:
        return bool(page.evaluate(f"$('{button}').classList.contains('main')"))

    with opened(browser, folder) as (page, _):
        page.set_viewport_size({"width": 390, "height": 800})
        until(page, "!document.querySelector('#back').hidden")
        assert page.is_hidden("#switch")
        assert is_main("back") is not verdict.use_new
        assert page.inner_text("#link-text").endswith("trained")
        assert page.evaluate("$('result').scrollWidth <= $('result').clientWidth")
        page.click("#back")
        until(page, "!document.querySelector('#switch').hidden")
        assert page.is_hidden("#back")
        assert is_main("switch") is verdict.use_new
        until(page, "document.querySelector('#link-text').textContent.endsWith('model')")
        advice = "Use trained: it is better" if verdict.use_new else f"Keep model: {CHANCE.reason}"
        gain = "+10.0 points of recall@10 [+5.0, +15.0]"
        assert page.inner_text("#result-head") == f"{advice}. {gain}."
        anyway = "" if verdict.use_new else " anyway"
        assert page.inner_text("#switch") == f"Search with the new model{anyway}"
