"""The retrieval grid and the confusion matrix."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from m1clip.evaluation import figures
from m1clip.evaluation.figures import GridRow, confusion_figure, retrieval_grid, safe_text

BLUE = (20, 40, 200)
TEXTS = [
    "",
    " ",
    "東京の夜",
    "🙂👩‍👩‍👧",
    "שלום",
    "\ud800 lone",
    "tab\tnew\nline\x00",
    "w" * 5000,
    "a cat " * 3000,
    "$\\x{$",
]


def row(query: str = "a blue square", correct: tuple[bool, ...] = (False, True)) -> GridRow:
    images = np.full((len(correct), 32, 32, 3), BLUE, dtype=np.uint8)
    return GridRow(query, images, correct, [0.9 - 0.1 * n for n in range(len(correct))], rank=2)


def test_retrieval_grid_marks_correct_and_wrong_images(tmp_path: Path) -> None:
    marks = [(False, True), (True, False)]
    retrieval_grid([row(correct=m) for m in marks], tmp_path / "grid.png", "title")
    with Image.open(tmp_path / "grid.png") as opened:
        image = opened.convert("RGB")
    side = figures.CELL + 2 * figures.FRAME
    for line, correct in enumerate(marks):
        for column, right in enumerate(correct):
            left = figures.MARGIN + figures.QUERY_WIDTH + figures.GAP + column * (side + figures.GAP)
            top = figures.MARGIN + figures.HEADER_HEIGHT + line * (side + figures.LABEL_HEIGHT + figures.ROW_GAP)
            for x, y in ((0, 0), (0, side - 1), (side - 1, side - 1), (side // 2, figures.FRAME - 1)):
                assert image.getpixel((left + x, top + y)) == (figures.RIGHT if right else figures.WRONG)
            assert image.getpixel((left - 1, top + side // 2)) == figures.PAPER
            assert image.getpixel((left + side // 2, top + side // 2)) == BLUE


@pytest.mark.parametrize("query", TEXTS)
def test_retrieval_grid_with_unusual_captions(tmp_path: Path, query: str) -> None:
    retrieval_grid([row(query)], tmp_path / "grid.png", query)
    retrieval_grid([row()], tmp_path / "plain.png", "title")
    with Image.open(tmp_path / "grid.png") as opened, Image.open(tmp_path / "plain.png") as plain:
        assert opened.size == plain.size


def test_safe_text_is_one_line_without_control_characters() -> None:
    assert safe_text("a\tb\n\x00c “d” \ud800") == 'a b c "d" ?'


@pytest.mark.filterwarnings("ignore:Glyph")
def test_confusion_figure_of_any_size_and_name(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for names in (TEXTS, [f"class {number}" for number in range(300)]):
        confusion_figure(torch.eye(len(names)).long(), names, tmp_path / "confusion.png", "classes")
        with Image.open(tmp_path / "confusion.png") as image:
            assert 300 < max(image.size) < 2200
