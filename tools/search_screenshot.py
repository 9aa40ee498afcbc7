"""Write docs/images/search-photos.png: the search page in Chromium, with photos of open licenses.

    python tools/search_screenshot.py FOLDER       # a folder of photos; needs Playwright and Chromium

docs/images/CREDITS.md names the photos of the present picture and where they come from.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

PICTURE = Path(__file__).resolve().parent.parent / "docs" / "images" / "search-photos.png"
PORT = 8768
SIZE = {"width": 1100, "height": 660}
PATIENCE_MS = 300_000  # the server imports torch before it answers
THUMBNAILS_MS = 3000  # until those that can be seen are drawn


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="photos; the index is written into it")
    parser.add_argument("--query", default="mountains")
    options = parser.parse_args()
    subprocess.run(m1clip("index", str(options.folder)), check=True)
    server = subprocess.Popen(m1clip("serve", str(options.folder), "--port", str(PORT)))
    try:
        take_picture(options.query)
    finally:
        server.terminate()
        server.wait()


def m1clip(*words: str) -> list[str]:
    return [sys.executable, "-m", "m1clip", *words]


def take_picture(query: str) -> None:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"], timeout=PATIENCE_MS
        )
        page = browser.new_page(viewport=SIZE)
        page.set_default_timeout(PATIENCE_MS)
        open_page(page)
        search(page, query)  # the first one loads the model
        page.get_by_text("Clear", exact=True).click()
        search(page, query)
        page.wait_for_timeout(THUMBNAILS_MS)
        page.screenshot(path=str(PICTURE))
        browser.close()


def search(page: Any, query: str) -> None:
    page.fill("input[type=search]", query)
    page.get_by_text(re.compile(r"\d+ photos? of \d+ in")).wait_for()


def open_page(page: Any) -> None:
    """Wait for the server: a refused connection is tried again until it listens."""
    from playwright.sync_api import Error

    for _ in range(PATIENCE_MS // 1000):
        try:
            page.goto(f"http://127.0.0.1:{PORT}/")
            return
        except Error:
            page.wait_for_timeout(1000)
    raise SystemExit("the server does not answer")


if __name__ == "__main__":
    main()
