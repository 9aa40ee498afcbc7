"""How long from a key to results in the page of `m1clip serve`, in Chromium over random vectors?

    python benchmarks/search_page.py runs/frozen --images 100000

The text tower is the model's own; the photos are one small image. Needs Playwright and Chromium.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import threading
from pathlib import Path

import numpy as np
from PIL import Image

from m1clip.search.database import connect
from m1clip.search.index import update_index
from m1clip.search.vectors import file_name
from m1clip.web.photos import Photos
from m1clip.web.server import Server, Store

QUERIES = ("two dogs on a beach", "a man on a bicycle", "children in the snow")
WATCH = """() => { window.times = []; let at = 0;
  document.addEventListener('keydown', () => { at = performance.now(); }, true);
  new MutationObserver(() => times.push(performance.now() - at)).observe(
    document.documentElement, { attributes: true, attributeFilter: ['data-shown'] }); }"""


def make_library(folder: Path, model: str, images: int) -> Path:
    """An index with one real image and random vectors for the others."""
    photos = folder / "photos"
    photos.mkdir()
    Image.new("RGB", (64, 64), "teal").save(photos / "0.png")
    index_folder = update_index(photos, model).folder
    db, rng = connect(index_folder, write=True), np.random.default_rng(0)
    generation, dim = db.execute("SELECT generation, dim FROM models").fetchone()
    vectors = rng.normal(size=(images - 1, dim)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    with open(index_folder / file_name(1, generation), "ab") as file:
        file.write(vectors.astype(np.float16).tobytes())
    look_size, thumb_size = (
        len(value) for value in db.execute("SELECT perceptual_hash, thumb FROM images").fetchone()
    )
    for number in range(2, images + 1):
        look, thumb = rng.bytes(look_size), rng.bytes(thumb_size)
        facts = (number, number.to_bytes(32), 64, 64, None, 1, look, thumb)
        db.execute("INSERT INTO images VALUES (?, ?, ?, ?, ?, ?, ?, ?)", facts)
        path = f"{number % 100}/{number}.png".encode()
        db.execute(
            "INSERT INTO files VALUES (?, ?, 1000, ?, ?, NULL)",
            (number, path, number * 10**12, number),
        )
        db.execute("INSERT INTO vectors VALUES (1, ?, ?)", (number, number - 1))
    db.commit()
    db.close()
    return photos


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--images", type=int, default=100_000)
    options = parser.parse_args()
    from playwright.sync_api import sync_playwright

    folder = Path(tempfile.mkdtemp())
    os.environ["XDG_DATA_HOME"] = str(folder / "data")
    photos = Photos(make_library(folder, options.model, options.images))
    photos.warm_up()
    server = Server(Store([]), 0, photos)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    with sync_playwright() as playwright:
        path = shutil.which("chromium") or shutil.which("google-chrome")
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        page = browser.new_page()
        page.route("**/photo/small*", lambda route: route.abort())  # these photos have no files
        page.goto(server.url)
        page.wait_for_timeout(5000)
        page.evaluate(WATCH)
        for query in QUERIES:
            page.fill("#text", "")
            page.wait_for_timeout(1000)
            page.evaluate("times.pop()")
            for letter in query:  # each after the results of the one before
                done = page.evaluate("times.length")
                page.type("#text", letter)
                while page.evaluate("times.length") == done:
                    page.wait_for_timeout(20)
        times = sorted(page.evaluate("times"))
        browser.close()
    server.shutdown()
    shutil.rmtree(folder)
    quartiles = statistics.quantiles(times, n=4)
    print(f"{options.images:,} images, {len(times)} keys: median {quartiles[1]:.0f} ms, ", end="")
    print(f"quartiles {quartiles[0]:.0f} and {quartiles[2]:.0f} ms, load {os.getloadavg()[0]:.0f}")


if __name__ == "__main__":
    main()
