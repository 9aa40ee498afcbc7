"""Folders of photos and a small model with random weights, for the tests of search."""

from pathlib import Path

import numpy as np
from image_sets import image
from tiny_model import tiny_model

from m1clip.search.database import connect
from m1clip.search.vectors import file_name


def save_model(folder: Path, embed_dim: int = 16) -> Path:
    """A model folder; another `embed_dim` is another model."""
    captions = ["a red dog on a beach at night"]
    one_block = {"vision_layers": 1, "text_layers": 1}
    tiny_model("clip-bpe-pruned", captions, embed_dim=embed_dim, **one_block).save(folder)
    return folder


def make_photos(folder: Path, count: int) -> Path:
    """Random images in two folders."""
    for number in range(count):
        path = folder / ("a", "b")[number % 2] / f"{number:04d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        image(number).save(path)
    return folder


def content(index_folder: Path) -> dict[bytes, tuple[object, ...]]:
    """What an index says about each file: its facts, and its vectors by model."""
    db = connect(index_folder)
    vectors: dict[int, dict[str, tuple[float, ...]]] = {}
    models = "SELECT id, hash, dim, generation FROM models WHERE generation IS NOT NULL"
    for number, key, dim, generation in db.execute(models):
        data = (index_folder / file_name(number, generation)).read_bytes()
        array = np.frombuffer(data[: len(data) // (2 * dim) * (2 * dim)], np.float16).reshape(
            -1, dim
        )
        for image_id, row in db.execute(
            "SELECT image, row FROM vectors WHERE model = ?", (number,)
        ):
            vectors.setdefault(image_id, {})[key] = tuple(array[row].tolist())
    files = "SELECT path, bytes, mtime_ns, problem, image, sha256, width, height, taken, "
    files += "orientation, perceptual_hash FROM files "
    rows = db.execute(files + "LEFT JOIN images ON images.id = image").fetchall()
    db.close()
    return {
        path: (*facts, vectors.get(number))
        for path, *rest in rows
        for facts, number in [(rest[:3] + rest[4:], rest[3])]
    }
