"""The retrieval grid, and the number of snapshots."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from m1clip.evaluation import examples
from m1clip.evaluation.examples import MAX_SNAPSHOTS, draw_grid, safe_text, thin_out

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


def draw(
    path: Path, query: str = "a blue square", marks: tuple[tuple[bool, ...], ...] = ((False, True),)
) -> Image.Image:
    rows = [
        {"caption": query, "correct": correct, "scores": [0.9, 0.8], "rank": 2} for correct in marks
    ]
    draw_grid(rows, [np.full((2, 32, 32, 3), BLUE, np.uint8)] * len(marks), path, query)
    with Image.open(path) as opened:
        return opened.convert("RGB")


def test_retrieval_grid_marks_correct_and_wrong_images(tmp_path: Path) -> None:
    marks = ((False, True), (True, False))
    image = draw(tmp_path / "grid.png", marks=marks)
    side = examples.CELL + 2 * examples.FRAME
    for line, correct in enumerate(marks):
        for column, right in enumerate(correct):
            left = (
                examples.PAGE_MARGIN
                + examples.QUERY_WIDTH
                + examples.CELL_GAP
                + column * (side + examples.CELL_GAP)
            )
            top = (
                examples.PAGE_MARGIN
                + examples.HEADER_HEIGHT
                + line * (side + examples.LABEL_HEIGHT + examples.ROW_GAP)
            )
            for x, y in (
                (0, 0),
                (0, side - 1),
                (side - 1, side - 1),
                (side // 2, examples.FRAME - 1),
            ):
                assert image.getpixel((left + x, top + y)) == (
                    examples.RIGHT if right else examples.WRONG
                )
            assert image.getpixel((left - 1, top + side // 2)) == examples.PAPER
            assert image.getpixel((left + side // 2, top + side // 2)) == BLUE


def test_full_disk_keeps_the_old_grid_and_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "grid.png"
    draw(path)
    before = path.read_bytes()

    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)) as error:
        draw(path, "another")
    assert error.value.filename == str(path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("query", TEXTS)
def test_retrieval_grid_with_unusual_captions(tmp_path: Path, query: str) -> None:
    assert draw(tmp_path / "grid.png", query).size == draw(tmp_path / "plain.png").size


def test_safe_text_is_one_line_without_control_characters() -> None:
    assert safe_text("a\tb\n\x00c “d” \ud800") == 'a b c "d" ?'


def test_snapshots_are_thinned_out(tmp_path: Path) -> None:
    for step in range(1, 200):
        (tmp_path / f"step-{step:08d}.json").touch()
        thin_out(tmp_path, step)
    steps = sorted(int(path.stem[5:]) for path in tmp_path.glob("*.json"))
    assert len(steps) <= MAX_SNAPSHOTS
    assert {1, 199} <= set(steps)  # the first and the last
    thin_out(tmp_path, 100)  # resumed from a checkpoint at 100
    assert max(int(path.stem[5:]) for path in tmp_path.glob("*.json")) <= 100
