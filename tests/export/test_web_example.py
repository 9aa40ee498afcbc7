"""examples/web: a page that searches precomputed vectors, in Chromium.

`make test-export` installs what it needs.
"""

import functools
import os
import runpy
import shutil
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
from photos import make_photos, save_model

import m1clip
from m1clip import console
from m1clip.model.pretrained.packages import installed

EXAMPLE = Path(__file__).parents[2] / "examples" / "web"
NODE = Path(os.environ.get("NODE_FOLDER", Path(__file__).parents[2] / ".venv" / "node"))
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
QUERY = "A red dog, on a beach"


@pytest.fixture
def libraries(tmp_path: Path) -> Path:
    """Packages of npm: the real ones if they are installed, else empty files."""
    if (NODE / "node_modules" / "onnxruntime-web").is_dir():
        return NODE
    for source in runpy.run_path(str(EXAMPLE / "prepare.py"))["LIBRARIES"].values():
        path = tmp_path / "node" / "node_modules" / source
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    return tmp_path / "node"


@pytest.fixture
def model_name(tmp_path: Path) -> str:
    """A small model with CLIP's tokenizer; tests name another one by `parametrize`."""
    return str(save_model(tmp_path / "model"))


@pytest.fixture
def site(tmp_path: Path, libraries: Path, model_name: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    photos = make_photos(tmp_path / "photos", 6)
    (photos / "broken.jpg").write_bytes(b"not an image")
    main = runpy.run_path(str(EXAMPLE / "prepare.py"))["main"]
    words = [photos, "--model", model_name, "--libraries", libraries, "--out", tmp_path / "site"]
    assert main(list(map(str, words))) == 0
    return tmp_path / "site"


def expected(site: Path, model_name: str) -> tuple[np.ndarray, dict[str, float]]:
    """The vector of the query, and the cosine of each image, in Python."""
    model = m1clip.load(model_name, precision="fp32")
    query = np.asarray(model.encode_text(QUERY))[0]
    root = site.parent / "photos"
    paths = (path for path in root.rglob("*.jpg") if path.name != "broken.jpg")
    names = sorted(path.relative_to(root).as_posix() for path in paths)
    vectors = np.asarray(model.encode_image([root / name for name in names]))
    return query, dict(zip(names, vectors @ query, strict=True))


def test_prepared_page_has_vectors_thumbnails_and_no_image_tower(
    site: Path, model_name: str
) -> None:
    import json

    library = json.loads((site / "images.json").read_text())
    vectors = np.fromfile(site / "vectors.f16", "<f2").reshape(-1, library["dim"])
    query, cosines = expected(site, model_name)
    result = dict(zip([image["name"] for image in library["images"]], vectors @ query, strict=True))
    assert result == pytest.approx(cosines, abs=2e-3)  # float16
    assert all((site / image["thumbnail"]).is_file() for image in library["images"])
    assert (site / "model" / "text.onnx").is_file()
    assert not list(site.rglob("image.onnx"))
    assert not list(site.parent.glob("site-export"))


def test_missing_libraries_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main = runpy.run_path(str(EXAMPLE / "prepare.py"))["main"]
    words = ["photos", "--model", "x", "--libraries", "nothing", "--out", str(tmp_path / "site")]
    assert main(words) == 1
    assert "npm install --prefix nothing" in capsys.readouterr().err


@pytest.mark.parametrize("missing", ["photos", "model", "readable images"])
def test_nothing_is_written_where_something_is_missing(
    missing: str,
    tmp_path: Path,
    libraries: Path,
    model_name: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    photos = tmp_path / "photos"
    if missing != "photos":
        photos.mkdir()
        (photos / "broken.jpg").write_bytes(b"not an image")
    model = str(tmp_path / "no-model") if missing == "model" else model_name
    site = tmp_path / "site"
    main = runpy.run_path(str(EXAMPLE / "prepare.py"))["main"]
    words = [photos, "--model", model, "--libraries", libraries, "--out", site]
    assert main(list(map(str, words))) == 1
    shown = capsys.readouterr()
    expected = "no-model" if missing == "model" else "photos"
    assert expected in shown.err
    assert ("skipped broken.jpg: " in shown.out) == (missing == "readable images")
    assert not site.exists()


def test_images_are_counted_while_they_are_encoded(
    tmp_path: Path, model_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    photos = make_photos(tmp_path / "photos", 6)
    read_images = runpy.run_path(str(EXAMPLE / "prepare.py"))["read_images"]
    counts: list[tuple[int, int]] = []
    with console.on_progress(lambda *count: counts.append(count)):
        read_images(photos, model_name)
    assert counts[-1] == (6, 6)


@pytest.fixture
def address(site: Path) -> Iterator[str]:
    handler = functools.partial(SimpleHTTPRequestHandler, directory=str(site))
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
@pytest.mark.skipif(not NODE.is_dir(), reason="`make test-export` installs the npm packages")
def test_page_in_chromium_finds_what_python_finds(
    site: Path, address: str, model_name: str
) -> None:
    check_page(site, address, model_name)


class TestGeneral:
    """The same with the model in the box, which has another tokenizer and pretrained towers."""

    @pytest.fixture
    def model_name(self) -> str:
        if not installed("efficientnet-lite0+lite2") or not installed("minilm"):
            pytest.skip("the pretrained towers are not installed")
        return "general"

    @pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
    @pytest.mark.skipif(not NODE.is_dir(), reason="`make test-export` installs the npm packages")
    def test_page_in_chromium_finds_what_python_finds(
        self, site: Path, address: str, model_name: str
    ) -> None:
        check_page(site, address, model_name)


def check_page(site: Path, address: str, model_name: str) -> None:
    """Token ids, the vector of the query and all cosines of the page are those of Python."""
    playwright = pytest.importorskip("playwright.sync_api", reason="pip install playwright")
    foreign = []
    with playwright.sync_playwright() as running:
        browser = running.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox"], timeout=120_000
        )
        page = browser.new_page(viewport={"width": 900, "height": 520})
        page.on(
            "request",
            lambda request: (
                foreign.append(request.url)
                if not request.url.startswith((address, "blob:", "data:"))
                else None
            ),
        )
        page.goto(f"{address}/index.html", timeout=120_000)
        page.wait_for_function("window.ready || window.failure", timeout=300_000)
        assert page.evaluate("window.failure") is None
        page.fill("#query", QUERY)
        page.press("#query", "Enter")
        page.wait_for_function("window.result", timeout=120_000)
        result = page.evaluate("window.result")
        shown = page.locator("#results img").count()
        if os.environ.get("SCREENSHOT"):
            page.screenshot(path=os.environ["SCREENSHOT"])
        browser.close()
    query, cosines = expected(site, model_name)
    model = m1clip.load(model_name)
    ids = model.tokenizer.tokenize([QUERY], 16)[0]
    assert result["ids"] == ids[: len(result["ids"])].tolist()
    assert np.abs(np.array(result["vector"]) - query).max() < 1e-5
    assert {image["name"]: image["cosine"] for image in result["results"]} == pytest.approx(
        cosines, abs=2e-3
    )
    assert shown == len(cosines)
    assert foreign == []
