"""The retrieval image: right and wrong where they belong, and no text that breaks it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from m1clip.evaluation import figures as grid
from m1clip.evaluation.figures import GridRow, as_image, retrieval_grid, safe_text, wrap

BLUE = (20, 40, 200)


def row(query: str = "a blue square", correct: tuple[bool, ...] = (False, True)) -> GridRow:
    images = [np.full((32, 32, 3), BLUE, dtype=np.uint8) for _ in correct]
    return GridRow(query, images, correct, [0.9 - 0.1 * n for n in range(len(correct))], right_rank=2)


def corner(column: int, line: int, cell: int = 112) -> tuple[int, int]:
    """The left top pixel of a frame."""
    side = cell + 2 * grid.FRAME
    left = grid.MARGIN + grid.QUERY_WIDTH + grid.GAP + column * (side + grid.GAP)
    top = grid.MARGIN + grid.TITLE_HEIGHT + line * (side + grid.LABEL_HEIGHT + grid.ROW_GAP)
    return left, top


@pytest.mark.parametrize("cell", [64, 112])
def test_frames_and_marks(tmp_path: Path, cell: int) -> None:
    marks = [(False, True), (True, False)]
    path = retrieval_grid([row(correct=m) for m in marks], tmp_path / "grid.png", cell=cell)
    with Image.open(path) as opened:
        assert opened.format == "PNG"
        image = opened.convert("RGB")
    side = cell + 2 * grid.FRAME
    for line, correct in enumerate(marks):
        for column, right in enumerate(correct):
            left, top = corner(column, line, cell)
            colour = grid.RIGHT if right else grid.WRONG
            for x, y in ((0, 0), (0, side - 1), (side - 1, side - 1), (side // 2, grid.FRAME - 1)):
                assert image.getpixel((left + x, top + y)) == colour
            assert image.getpixel((left - 1, top + side // 2)) == grid.PAPER
            assert image.getpixel((left + side // 2, top + side // 2)) == BLUE
    # Not by colour alone: a cross is white at its centre, and a check mark is not.
    centres = [(corner(c, 0, cell)[0] + side - 13, corner(c, 0, cell)[1] + 13) for c in (0, 1)]
    assert min(image.getpixel(centres[0])) > 200
    assert min(image.getpixel(centres[1])) < 100


@pytest.mark.parametrize(
    "query", ["", " ", "東京の夜", "🙂👩‍👩‍👧", "שלום", "\ud800 lone", "tab\tnew\nline\x00", "w" * 5000, "a cat " * 3000]
)
def test_no_text_breaks_it(tmp_path: Path, query: str) -> None:
    path = retrieval_grid([row(query)], tmp_path / "grid.png", title=query)
    with Image.open(path) as opened:
        width, height = opened.size
    with Image.open(retrieval_grid([row()], tmp_path / "plain.png")) as plain:
        assert (width, height) == plain.size


def test_long_text_is_wrapped_inside_its_column() -> None:
    font = grid._font(14, None)
    lines = wrap("a large dog to the left of two small trees and " + "x" * 90, font, 120, 4)
    assert len(lines) == 4
    assert lines[-1].endswith("...")
    assert all(font.getlength(line) <= 120 for line in lines)
    assert " ".join(wrap("one two three four five", font, 60, 9)) == "one two three four five"


def test_safe_text() -> None:
    assert safe_text("a\tb\n\x00c “d”") == 'a b c "d"'
    assert safe_text("\ud800") == "?"


def test_images_of_every_kind(tmp_path: Path) -> None:
    images = [
        Image.new("L", (200, 80), 90),
        Image.new("RGBA", (60, 160), (255, 0, 0, 0)),
        Image.new("P", (1, 300)),
        np.zeros((8, 8), dtype=np.uint8),
        np.zeros((8, 8, 1), dtype=np.uint8),
    ]
    retrieval_grid([GridRow("all", images, [False] * 5, [float("nan")] * 5)], tmp_path / "grid.png")
    assert as_image(images[1]).getpixel((0, 0)) == (255, 255, 255)


def test_what_cannot_be_drawn_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="uint8"):
        as_image(np.zeros((4, 4, 3)))
    with pytest.raises(ValueError, match="height, width"):
        as_image(np.zeros((3, 4, 4), dtype=np.uint8)[..., :2])
    with pytest.raises(ValueError, match="at least one row"):
        retrieval_grid([], tmp_path / "grid.png")
    with pytest.raises(ValueError, match="as many marks"):
        GridRow("a", [], [True], [])


def test_a_row_without_images(tmp_path: Path) -> None:
    assert retrieval_grid([GridRow("none", [], [], [])], tmp_path / "grid.png").exists()
