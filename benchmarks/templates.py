"""Which sentences should a class name be put into? Zero-shot accuracy of `general` with several sets of them.

    python benchmarks/templates.py data --json docs/results/templates.json
    python benchmarks/templates.py data --test six-scenes --json docs/results/templates.json

DATA is what tools/general_data.py writes. The images are not among those that `general` was trained
on: 20 classes of Caltech-101 that it never saw, and further images of the 15 scenes, the kitchenware
and the fruit and vegetables whose first twelve images it saw. Differences are from the first row,
with the standard error of paired images. With --test, the ten classes of Caltech-101 of
docs/lab-general.md and the class folders given, with the first row and the default only.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from general import CLASSES, Towers
from sides import machine

import m1clip
from m1clip.data.images import FileImage
from m1clip.formatting import table
from m1clip.inference.inputs import TEMPLATES
from m1clip.io import write_json

sys.path.insert(0, str(Path(__file__).parent.parent / "tools"))
from train_general import VALIDATION_CLASSES, class_folders

# Names of all class folders of the data if None, and the first and last image of each class.
FOLDERS = {
    "caltech101": (VALIDATION_CLASSES.split(), 0, 70),
    "scenes": (None, 12, 60),
    "kitchenware": (None, 12, 60),
    "produce": (None, 12, 28),
}
BEFORE = (
    "a photo of a {}.",
    "an image of a {}.",
    "a close-up photo of a {}.",
    "there is a {} here.",
    "{}",
)
SETS = {
    "five, mostly about photos": BEFORE,
    "name": ("{}",),
    "a name": ("a {}",),
    "a photo of a name.": ("a photo of a {}.",),
    "name, a name": ("{}", "a {}"),
    "name, a name, the name, a photo of a name.": TEMPLATES,
    "the same and a close-up photo of a name.": (*TEMPLATES, "a close-up photo of a {}."),
    "eight of CLIP's": (
        "a photo of a {}.",
        "a bad photo of a {}.",
        "a photo of many {}.",
        "a photo of the large {}.",
        "a photo of the small {}.",
        "a good photo of the {}.",
        "art of the {}.",
        "itap of a {}.",
    ),
}
DEFAULT = "name, a name, the name, a photo of a name."


def class_images(data: Path, name: str) -> list[tuple[str, list[Path]]]:
    """(class name, images) of a folder of the data, for validation."""
    names, first, last = FOLDERS[name]
    folder = data / name
    chosen = names or [path.name for path in folder.iterdir()]
    classes = class_folders(folder, chosen, first, last)
    return [(label, [folder / file for file in files]) for label, files in classes]


def test_images(folder: Path, names: tuple[str, ...] | None) -> list[tuple[str, list[Path]]]:
    """(class name, images) of class folders."""
    paths = [folder / name for name in names] if names else sorted(folder.iterdir())
    return [(path.name, sorted(path.iterdir())) for path in paths]


def correct(
    model: m1clip.Model, towers: Towers, name: str, classes: list[tuple[str, list[Path]]]
) -> dict[str, np.ndarray]:
    """{set of templates: whether each image is classified correctly}."""
    refs = [FileImage(str(path)) for _, paths in classes for path in paths]
    labels = np.repeat(np.arange(len(classes)), [len(paths) for _, paths in classes])
    features = towers.images(name, refs).float()
    images = model.clip.project_image(features).detach().numpy()
    results = {}
    for templates_name, templates in SETS.items():
        vectors = np.asarray(model.class_vectors([label for label, _ in classes], templates))
        results[templates_name] = (images @ vectors.T).argmax(axis=1) == labels
    return results


def figures(hits: dict[str, np.ndarray]) -> dict[str, dict[str, float]]:
    """Accuracy, and difference from the first set with its standard error, in percent."""
    first = next(iter(hits.values())).astype(float)
    result = {}
    for name, right in hits.items():
        gain = right - first
        error = 100 * gain.std() / len(gain) ** 0.5
        result[name] = {"accuracy": 100 * right.mean(), "gain": 100 * gain.mean(), "error": error}
    return result


def show(result: dict[str, Any]) -> str:
    """A row per set of templates."""
    parts = result["parts"]
    head = ("templates", *(f"{name} (n={part['images']:,})" for name, part in parts.items()), "all")
    rows = []
    for name in result["all"]["figures"]:
        cells = [f"{part['figures'][name]['accuracy']:.1f}" for part in parts.values()]
        total = result["all"]["figures"][name]
        rows.append((name, *cells, f"{total['gain']:+.1f} ± {total['error']:.1f}"))
    return table(head, rows)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", type=Path, help="the folder that tools/general_data.py writes")
    parser.add_argument("--test", type=Path, help="class folders, scored with the ten test classes")
    parser.add_argument("--cache", type=Path, help="where features of the towers are stored")
    parser.add_argument("--json", type=Path, help="completed if it exists")
    options = parser.parse_args()
    model = m1clip.load("general")
    towers = Towers(model, options.cache)
    if options.test:
        groups = {
            "ten classes": test_images(options.data / "caltech101", CLASSES),
            options.test.name: test_images(options.test, None),
        }
        for name in SETS.keys() - {next(iter(SETS)), DEFAULT}:
            del SETS[name]
    else:
        groups = {name: class_images(options.data, name) for name in FOLDERS}
    hits = {name: correct(model, towers, name, classes) for name, classes in groups.items()}
    joined = {name: np.concatenate([part[name] for part in hits.values()]) for name in SETS}
    result = {
        "parts": {
            name: {"images": len(next(iter(part.values()))), "figures": figures(part)}
            for name, part in hits.items()
        },
        "all": {"images": len(next(iter(joined.values()))), "figures": figures(joined)},
    }
    print(show(result))
    if options.json:
        record = json.loads(options.json.read_text()) if options.json.exists() else {}
        record["machine"] = machine()
        record["test" if options.test else "validation"] = result
        write_json(options.json, record)


if __name__ == "__main__":
    main()
