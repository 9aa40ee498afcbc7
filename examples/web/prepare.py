"""Write a static page that searches a folder of images: no server that computes, no request to others.

    npm install --prefix web-libraries onnxruntime-web @huggingface/tokenizers
    python examples/web/prepare.py photos --model runs/photos --libraries web-libraries --out site
    python -m http.server --directory site

Image vectors and thumbnails are computed here; the browser encodes only the texts that are typed.
Run it again when there are new images: only these are encoded.
"""

from __future__ import annotations

import argparse
import gzip
import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

import m1clip
from m1clip import console
from m1clip.errors import UserError
from m1clip.formatting import printable
from m1clip.search.index import update_index
from m1clip.search.query import Index

HERE = Path(__file__).resolve().parent
THUMBNAIL = 256  # pixels of the longer side
LIBRARIES = {  # name on the page: file of the npm packages
    "ort.mjs": "onnxruntime-web/dist/ort.wasm.min.mjs",
    "ort-wasm-simd-threaded.mjs": "onnxruntime-web/dist/ort-wasm-simd-threaded.mjs",
    "ort-wasm-simd-threaded.wasm": "onnxruntime-web/dist/ort-wasm-simd-threaded.wasm",
    "tokenizers.mjs": "@huggingface/tokenizers/dist/tokenizers.min.mjs",
}
MODEL_FILES = ("text.onnx", "tokenizer.json", "token_parts.json", "preprocess.json")
COMPRESSED = (".html", ".js", ".mjs", ".json", ".wasm", ".onnx", ".f16")


def write_images(index: Index, site: Path) -> int:
    """vectors.f16, one row per image in the order of images.json, and thumbnails.

    Returns their number.
    """
    photos = index.photos_at(range(len(index.vectors)))  # one file of each content
    np.stack([index.vectors[photo.row] for photo in photos]).astype("<f2").tofile(
        site / "vectors.f16"
    )
    (site / "thumbnails").mkdir(exist_ok=True)
    entries = []
    for photo in photos:
        name = f"thumbnails/{photo.sha256.hex()[:32]}.jpg"
        if not (site / name).exists():
            with Image.open(index.root / photo.path) as image:
                small = ImageOps.exif_transpose(image).convert("RGB")
                small.thumbnail((THUMBNAIL, THUMBNAIL))
                small.save(site / name, quality=80)
        entries.append({"name": photo.path, "thumbnail": name})
    text = json.dumps({"dim": index.dim, "images": entries})
    (site / "images.json").write_text(text, encoding="utf-8")
    return len(entries)


def write_model(model: str, site: Path, int8: bool) -> None:
    """The text tower as ONNX, and its tokenizer; the image tower stays here."""
    exported = site.with_name(f"{site.name}-export")
    shutil.rmtree(exported, ignore_errors=True)
    try:
        m1clip.export(model, to="onnx", out=exported, precision="int8" if int8 else "fp32")
        (site / "model").mkdir(exist_ok=True)
        for name in MODEL_FILES:
            (site / "model" / name).unlink(missing_ok=True)
            if (exported / name).exists():
                shutil.copy(exported / name, site / "model" / name)
    finally:
        shutil.rmtree(exported, ignore_errors=True)


def check_libraries(libraries: Path) -> None:
    """UserError for a missing file of npm."""
    for source in LIBRARIES.values():
        path = libraries / "node_modules" / source
        if not path.exists():
            raise UserError(
                f"{path}: not found; run: npm install --prefix {libraries} "
                "onnxruntime-web @huggingface/tokenizers"
            )


def read_images(photos: Path, model: str) -> Index:
    """Encode the new images of the folder, and name those that cannot be used."""
    with console.progress("encoding"):
        report = update_index(photos, model)
    for path, reason in report.problems:
        print(f"skipped {printable(path)}: {printable(reason)}")
    if not report.indexed:
        raise UserError(f"{photos}: no images that can be read")
    return Index(photos, model)


def write_page(libraries: Path, site: Path) -> None:
    """index.html, search.js, and the libraries of npm."""
    (site / "lib").mkdir(exist_ok=True)
    for name, source in LIBRARIES.items():
        shutil.copy(libraries / "node_modules" / source, site / "lib" / name)
    for name in ("index.html", "search.js"):
        shutil.copy(HERE / name, site / name)


def print_sizes(site: Path) -> None:
    """What a visitor downloads, and with gzip, which hosts of static files use."""
    files = [path for path in site.rglob("*") if path.is_file()]
    print("     size   gzipped  file")
    for path in sorted(files):
        if path.parent.name == "thumbnails":
            continue
        data = path.read_bytes()
        packed = len(gzip.compress(data)) if path.suffix in COMPRESSED else len(data)
        name = path.relative_to(site).as_posix()
        print(f"{len(data) / 1e6:6.2f} MB {packed / 1e6:6.2f} MB  {name}")
    small = sum(path.stat().st_size for path in files if path.parent.name == "thumbnails")
    print(f"{small / 1e6:6.2f} MB {small / 1e6:6.2f} MB  thumbnails/: only those that are shown")


def main(words: Sequence[str] | None = None) -> int:
    """Write the page for the options of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("photos", type=Path, help="a folder of images")
    parser.add_argument("--model", required=True, help="a run, or a model folder")
    parser.add_argument("--libraries", type=Path, required=True, help="folder of npm install")
    parser.add_argument("--out", type=Path, default=Path("site"), help="folder of the page")
    parser.add_argument("--int8", action="store_true", help="a text tower of a quarter of the size")
    options = parser.parse_args(words)
    try:
        # Whatever is missing is found before anything is written.
        check_libraries(options.libraries)
        index = read_images(options.photos, options.model)
        options.out.mkdir(parents=True, exist_ok=True)
        write_page(options.libraries, options.out)
        count = write_images(index, options.out)
        write_model(options.model, options.out, options.int8)
    except UserError as error:
        print(f"prepare.py: {error}", file=sys.stderr)
        return 1
    print(f"{options.out}: a page that searches {count:,} images")
    print_sizes(options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
