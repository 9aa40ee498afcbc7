"""The page in a real browser, where Playwright and Chromium are installed."""

import importlib.util
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from monitor.made_runs import append, ended, evaluation, full_run, make_run, step, write_example
from small_run import environment, small_arguments

from m1clip.io import lock_content
from m1clip.web.server import Server, Store

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
CHROMIUM = next((path for name in BROWSERS if (path := shutil.which(name))), None)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("playwright") is None,
        reason="needs Playwright (pip install playwright)",
    ),
    pytest.mark.skipif(
        CHROMIUM is None, reason=f"needs a Chromium in the PATH ({', '.join(BROWSERS)})"
    ),
]
TIMEOUT = 300.0  # seconds for anything the page should do


class Site:
    """A server that can be stopped and started again on its port."""

    def __init__(self, folders: list[Path]) -> None:
        self.places, self.port = folders, 0
        self.start()

    def start(self) -> None:
        self.server = Server(Store(self.places), self.port)
        self.port = self.server.server_address[1]
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()

    def stop(self) -> None:
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        made = playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox"], timeout=300_000
        )
        yield made
        made.close()


@pytest.fixture
def visit(browser: Any) -> Iterator[Callable[..., Any]]:
    """Open a page that fails the test on any error, warning or request to another server."""
    problems: list[str] = []
    closes: list[Callable[[], None]] = []

    def go(
        folders: list[Path], expected: str = "none expected", **options: Any
    ) -> tuple[Any, Site]:
        def note(message: Any) -> None:
            if message.type in ("error", "warning") and expected not in message.text:
                problems.append(f"{message.type}: {message.text}")

        def outside(request: Any) -> None:
            if not request.url.startswith((site.server.url, "data:")):
                problems.append(f"request to {request.url}")

        site = Site(folders)
        context = browser.new_context(
            locale="en-US", viewport={"width": 1200, "height": 800}, **options
        )
        closes.extend((context.close, site.stop))
        page = context.new_page()
        page.set_default_timeout(1000 * TIMEOUT)
        page.on("pageerror", lambda error: problems.append(f"error: {error}"))
        page.on("console", note)
        page.on("request", outside)
        page.goto(site.server.url)
        return page, site

    yield go
    for close in closes:
        close()
    assert problems == []


def until(page: Any, true: str) -> None:
    """Wait until an expression is true.

    wait_for_function is forbidden by the page's content security policy.
    """
    deadline = time.monotonic() + TIMEOUT
    while not page.evaluate(true):
        assert time.monotonic() < deadline, f"never came true: {true}"
        page.wait_for_timeout(50)


def wait_for_points(page: Any, min_points: int, plot: str = "loss") -> None:
    until(
        page,
        f"Number(document.querySelector('[data-plot={plot}] .plot').dataset.points) >= {min_points}",
    )


def test_live_run_updates_without_reload(visit: Any, tmp_path: Path) -> None:
    run = make_run(tmp_path / "runs" / "live", [step(1), step(2), step(3)])
    (run / "run.lock").write_text(lock_content())
    page, site = visit([tmp_path / "runs"], expected="ERR_")
    wait_for_points(page, 3)
    assert page.inner_text("#state") == "running"
    assert "left, until" in page.inner_text("#progress-text")
    page.evaluate("window.sameDocument = true")
    for number in range(4, 9):
        append(run, [step(number)])
        wait_for_points(page, number)
    append(run, [evaluation(8, 0.3)])
    write_example(run, 8)
    wait_for_points(page, 1, "recall")
    page.wait_for_selector("#queries .query")
    assert "<script>alert(1)</script> a red cat" in page.inner_text("#queries")
    assert page.locator("#queries .thumb.right").count() == 1

    site.stop()
    until(page, "document.querySelector('#link').className.includes('lost')")
    append(run, [step(number) for number in range(9, 13)])
    site.start()
    until(page, "document.querySelector('#link').className.includes('live')")
    wait_for_points(page, 12)

    append(run, [ended(12, 0.5)])
    (run / "run.lock").unlink()
    until(page, "document.querySelector('#state').textContent === 'finished'")
    assert page.evaluate("window.sameDocument") is True


def test_zoom_by_mouse_and_by_key_applies_to_all_plots(visit: Any, tmp_path: Path) -> None:
    page, _ = visit([full_run(tmp_path / "demo")])
    wait_for_points(page, 50)
    before = page.evaluate("[plots.loss.u.scales.x.min, plots.loss.u.scales.x.max]")
    box = page.locator("[data-plot=loss] .u-over").bounding_box()
    page.mouse.move(box["x"] + 0.25 * box["width"], box["y"] + 50)
    page.mouse.down()
    page.mouse.move(box["x"] + 0.75 * box["width"], box["y"] + 60, steps=5)
    page.mouse.up()
    until(page, "Zoom.range !== null")
    # Another plot follows.
    low, high = page.evaluate("[plots.lr.u.scales.x.min, plots.lr.u.scales.x.max]")
    assert before[0] < low < high < before[1]
    page.dblclick("[data-plot=loss] .u-over")
    until(page, "Zoom.range === null")
    assert page.evaluate("[plots.loss.u.scales.x.min, plots.loss.u.scales.x.max]") == before
    page.focus("[data-plot=temperature] .plot")
    page.keyboard.press("+")
    until(page, "Zoom.range !== null && Zoom.range[1] - Zoom.range[0] < 60")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("0")
    until(page, "Zoom.range === null")


def test_runs_are_switched_and_overlaid_and_the_theme_changes(visit: Any, tmp_path: Path) -> None:
    full_run(tmp_path / "runs" / "first", 0.3)
    full_run(tmp_path / "runs" / "second", 0.6)
    page, _ = visit([tmp_path / "runs"], color_scheme="dark")
    wait_for_points(page, 50)
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    assert page.evaluate("css('--card')") == "rgb(26, 32, 41)"
    page.keyboard.press("t")
    until(page, "document.documentElement.dataset.theme === 'light'")
    assert page.evaluate("css('--card')") == "rgb(255, 255, 255)"
    page.click("nav li:has-text('first') button")
    until(page, "document.querySelector('#run-name').textContent === 'first'")
    page.check("nav li:has-text('second') input")
    until(page, "plots.loss.series.length === 2 && plots.recall.series.length === 2")
    assert page.locator("[data-plot=loss] .u-label").all_inner_texts()[-2:] == ["first", "second"]
    page.select_option("#axis", "elapsed")
    until(page, "Math.abs(plots.loss.u.scales.x.max - 50 / 60) < 0.01")
    page.click("#pause")
    assert page.get_attribute("#pause", "aria-pressed") == "true"


COLORED_PIXELS = """[...plots.loss.u.ctx.getImageData(
    plots.loss.u.bbox.left, plots.loss.u.bbox.top, plots.loss.u.bbox.width, plots.loss.u.bbox.height
).data].reduce((count, value, i, data) => count + (i % 4 === 0 && data[i + 3] > 200
    && Math.max(...data.slice(i, i + 3)) - Math.min(...data.slice(i, i + 3)) > 60 ? 1 : 0), 0)"""


def test_plot_of_one_value_has_a_dot(visit: Any, tmp_path: Path) -> None:
    run = make_run(tmp_path / "runs" / "young", [step(1)])
    page, _ = visit([tmp_path / "runs"])
    wait_for_points(page, 1)
    until(page, f"{COLORED_PIXELS} >= 3")
    append(run, [step(number) for number in range(2, 120)])
    wait_for_points(page, 119)
    assert page.evaluate("plots.loss.u.series[1].points.show()") is False, "a line without dots"


def test_best_score_of_each_run_stands_beside_its_chance_level(visit: Any, tmp_path: Path) -> None:
    full_run(tmp_path / "runs" / "demo", 0.4)
    page, _ = visit([tmp_path / "runs"])
    until(page, "document.querySelector('#runs').textContent.includes('mean recall 40.0%')")
    assert "mean recall 40.0% (chance 1.00%)" in page.inner_text("#runs")


def test_page_with_keyboard_screen_reader_and_phone(visit: Any, tmp_path: Path) -> None:
    page, _ = visit([full_run(tmp_path / "demo")])
    wait_for_points(page, 50)
    page.wait_for_selector("#queries .query")
    page.set_viewport_size({"width": 360, "height": 700})  # a phone
    until(page, "document.documentElement.scrollWidth <= 360")
    nameless = page.evaluate(
        """() => [...document.querySelectorAll('button, input, select, canvas, img, [role=img]')].filter((each) =>
        !(each.getAttribute('aria-label') || each.textContent.trim() || each.labels && each.labels.length || each.alt
        || each.parentElement.closest('[role=img][aria-label]')))
        .map((each) => each.outerHTML.slice(0, 80))"""
    )
    assert nameless == []
    label = page.get_attribute("[data-plot=loss] .plot", "aria-label")
    assert label.startswith(
        "Loss. demo: now 1.33, first 3.85, lowest 1.33, highest 3.85, 50 points"
    )
    assert page.get_attribute("#progress", "aria-valuenow") == "100"
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the run"
    norms = page.locator("[data-panel=layer_grad_norms]")
    assert norms.locator("tbody tr").count() == 6
    strip = norms.locator("tbody tr:first-child canvas")
    assert strip.get_attribute("aria-label") == "image/input: first 0.05, now 0.0333, 2 evaluations"
    assert "0.0333 (dark) to 0.05 (bright)" in norms.inner_text()
    page.focus("#snapshot")
    page.keyboard.press("ArrowLeft")
    until(page, "document.querySelector('#snapshot-text').textContent.startsWith('step 50')")


def panel(page: Any, name: str) -> str:
    """The text of a card, when it has been filled."""
    until(page, f"document.querySelector('[data-panel={name}] div').childElementCount > 0")
    return " ".join(page.inner_text(f"[data-panel={name}]").split())


def test_cards_of_the_machine_and_of_the_analysis(visit: Any, tmp_path: Path) -> None:
    page, _ = visit([full_run(tmp_path / "demo")])
    wait_for_points(page, 50)
    memory = panel(page, "parts")
    assert "peak 0.03 GB" in memory
    assert "weights 10 MB, 33%" in memory
    assert "rest 5 MB, 17%" in memory
    cores = panel(page, "cores")
    assert "performance cores: mean 90%, efficiency cores: mean 40%" in cores
    assert "90%, mean 90%" in cores
    stages = panel(page, "split")
    assert "forward 40.0%" in stages
    assert "backward 50.0%" in stages
    assert "not measured: no meter here" in panel(page, "energy")
    assert "not measured: no sensor here" in panel(page, "heat")
    wait_for_points(page, 2, "difficulty")
    labels = page.locator("[data-plot=difficulty] .u-label").all_inner_texts()
    assert labels[-4:] == ["easy", "medium", "hard", "chance"]
    epochs = page.locator("[data-panel=epochs] table")
    head = epochs.locator("thead th").all_inner_texts()
    assert head[:5] == ["epoch", "loss", "train accuracy", "val accuracy", "chance 1/B"]
    assert epochs.locator("tbody tr").count() == 10, "100 steps of a tenth of an epoch"
    assert "chance level is 1/B" in panel(page, "epochs")
    assert "trend" in panel(page, "phases")


def test_real_training_process_is_shown(visit: Any, tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    page, _ = visit([tmp_path / "runs"])
    page.wait_for_selector("#empty:not([hidden])")
    words = small_arguments({"train.steps": 60, "train.eval_every": 20})
    training = subprocess.Popen(
        [sys.executable, "-m", "m1clip", "train", *words, "--out", "runs/real"],
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        page.wait_for_selector("#run:not([hidden])")  # it appeared by itself
        wait_for_points(page, 5)
        page.wait_for_selector("#queries .query img")
        until(page, "document.querySelector('#state').textContent === 'finished'")
        assert training.wait(timeout=TIMEOUT) == 0
        wait_for_points(page, 30)
        wait_for_points(page, 3, "recall")
        wait_for_points(page, 3, "difficulty")
    finally:
        training.kill()
        training.wait(timeout=TIMEOUT)
