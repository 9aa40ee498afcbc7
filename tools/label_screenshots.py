"""Walk through the Label page in Chromium as a user does, and write its pictures in docs/images/.

    python tools/label_screenshots.py FOLDER       # a new folder; needs Playwright and Chromium

The photos are synthetic images, with their captions as what the user types. Labels, trains, and
switches search to the new model; prints how long each step takes. Ends with an error if one fails.
"""

from __future__ import annotations

import argparse
import csv
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from m1clip.data.synthetic.source import write_folder

IMAGES = Path(__file__).resolve().parent.parent / "docs" / "images"
PHOTOS, LABELS, PICTURE_LABELS = 160, 110, 46
PORT = 8769
SERVER = f"http://127.0.0.1:{PORT}"
PATIENCE = 900.0  # seconds for each step
ANIMATION_MS = 1000  # until bars and plots have their size


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="for the photos and the run; must not exist")
    folder = parser.parse_args().folder.absolute()
    captions = make_photos(folder)
    timed("index", lambda: subprocess.run([*m1clip("index", "photos")], cwd=folder, check=True))
    server = subprocess.Popen(m1clip("serve", "photos", "--port", str(PORT)), cwd=folder)
    try:
        walk(captions)
    finally:
        server.terminate()
        server.wait()


def m1clip(*words: str) -> list[str]:
    return [sys.executable, "-m", "m1clip", *words]


def make_photos(folder: Path) -> dict[str, str]:
    """Write photos/ without captions; return the caption of each."""
    write_folder(folder / "drawn", PHOTOS, image_size=224, seed=0)
    shutil.copytree(folder / "drawn" / "images", folder / "photos")
    with (folder / "drawn" / "captions.csv").open(newline="", encoding="utf-8") as table:
        return {Path(row["image"]).name: row["caption"] for row in csv.DictReader(table)}


def walk(captions: dict[str, str]) -> None:
    """Label, train, compare, switch and search, with a picture of the main stages."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"], timeout=300_000
        )
        page = browser.new_page(viewport={"width": 1200, "height": 860})
        page.set_default_timeout(1000 * PATIENCE)
        timed("server", lambda: open_page(page))
        timed("first photos", lambda: until(page, "state.photos.length > 0 && !state.loading"))
        timed(f"{PICTURE_LABELS} labels", lambda: label(page, captions, PICTURE_LABELS))
        page.keyboard.type(captions[page.evaluate("current().path")])
        page.keyboard.press("Home")
        page.screenshot(path=IMAGES / "label.png")
        page.fill("#caption", "")
        timed(f"{LABELS} labels", lambda: label(page, captions, LABELS))
        page.click("#train-start")
        timed("train", lambda: until(page, "run.status.state === 'finished'"))
        timed("compare", lambda: until(page, "run.status.result && !$('switch').hidden"))
        picture_of_training(page)
        page.click("#switch")
        timed("switch", lambda: until(page, "run.status.in_use && !run.status.work"))
        picture_of_phone(browser)
        browser.close()


def picture_of_training(page: Any) -> None:
    """The Train section alone: the window is so high that the header does not cover it."""
    page.set_viewport_size({"width": 1200, "height": 2400})
    page.wait_for_timeout(ANIMATION_MS)
    page.locator("#train").screenshot(path=IMAGES / "label-train.png")


def picture_of_phone(browser: Any) -> None:
    phone = browser.new_page(
        viewport={"width": 390, "height": 844}, has_touch=True, color_scheme="dark"
    )
    phone.goto(f"{SERVER}/label")
    until(phone, "state.photos.length > 0 && !state.loading")
    until(phone, "document.querySelector('#photo').complete")
    phone.wait_for_timeout(ANIMATION_MS)
    phone.screenshot(path=IMAGES / "label-phone.png")


def open_page(page: Any) -> None:
    """Open the page as soon as the server has started."""
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            page.goto(f"{SERVER}/label")
            return
        except Exception:  # Playwright's error for a refused connection
            if time.monotonic() > deadline:
                raise
            time.sleep(0.5)


def label(page: Any, captions: dict[str, str], count: int) -> None:
    """Type captions until so many photos have a label."""
    labelled = page.evaluate("state.progress.labelled")
    page.focus("#caption")
    while labelled < count:
        page.keyboard.type(captions[page.evaluate("current().path")])
        page.keyboard.press("Enter")
        labelled += 1
        until(page, f"state.progress.labelled === {labelled} && !state.busy")


def until(page: Any, condition: str) -> None:
    """Wait until an expression of the page is true."""
    deadline = time.monotonic() + PATIENCE
    while not page.evaluate(f"Boolean({condition})"):
        failure = page.evaluate("document.querySelector('#train-error').textContent")
        if failure or time.monotonic() > deadline:
            raise SystemExit(f"never came true: {condition} ({failure})")
        time.sleep(0.05)


def timed(step: str, work: Any) -> None:
    began = time.monotonic()
    work()
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    print(f"{step:14} {time.monotonic() - began:6.1f} s   load {load:.0f}", flush=True)


if __name__ == "__main__":
    main()
