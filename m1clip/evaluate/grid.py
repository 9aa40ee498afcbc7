"""One picture of retrieval: captions at the left, what they found at the right, right and wrong marked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from m1clip.evaluate.draw import Font, draw_badge, draw_lines, line_height, wrap

Picture = Image.Image | np.ndarray

RIGHT = (0, 138, 92)
WRONG = (206, 44, 58)
INK = (28, 32, 38)
FAINT = (104, 112, 122)
PAPER = (255, 255, 255)
MAT = (240, 242, 245)
RULE = (226, 229, 233)

MARGIN = 24
GAP = 14
FRAME = 5
QUERY_WIDTH = 232
TITLE_HEIGHT = 66
LABEL_HEIGHT = 24
ROW_GAP = 18


@dataclass(frozen=True, slots=True)
class GridRow:
    """A query and its pictures, best first. `right_rank` is where the right one stands among all."""

    query: str
    pictures: Sequence[Picture]
    correct: Sequence[bool]
    scores: Sequence[float]
    right_rank: int | None = None

    def __post_init__(self) -> None:
        if not len(self.pictures) == len(self.correct) == len(self.scores):
            raise ValueError(
                f"a row needs as many marks and scores as pictures, got {len(self.pictures)} pictures, "
                f"{len(self.correct)} marks, {len(self.scores)} scores"
            )


def retrieval_grid(
    rows: Sequence[GridRow],
    path: str | Path,
    title: str = "Captions and the pictures they found",
    cell: int = 112,
    font_file: str | Path | None = None,
) -> Path:
    """Write the rows as a PNG and return its path.

    `font_file` replaces PIL's built-in font, which shows boxes for scripts other than Latin.
    """
    if not rows:
        raise ValueError("a retrieval grid needs at least one row")
    columns = max(1, *(len(row.pictures) for row in rows))
    fonts = {size: _font(size, font_file) for size in (12, 14, 20)}
    pitch = cell + 2 * FRAME + GAP
    row_height = cell + 2 * FRAME + LABEL_HEIGHT
    # The title and the legend need this much even when there is one column.
    width = max(MARGIN + QUERY_WIDTH + GAP + columns * pitch - GAP + MARGIN, 560)
    height = MARGIN + TITLE_HEIGHT + len(rows) * (row_height + ROW_GAP) - ROW_GAP + MARGIN
    canvas = Image.new("RGB", (width, height), PAPER)
    _draw_header(canvas, title, fonts)
    for number, row in enumerate(rows):
        top = MARGIN + TITLE_HEIGHT + number * (row_height + ROW_GAP)
        if number:
            line = top - ROW_GAP // 2
            ImageDraw.Draw(canvas).line((MARGIN, line, width - MARGIN, line), fill=RULE)
        _draw_query(canvas, row, top, cell, fonts)
        for column in range(len(row.pictures)):
            left = MARGIN + QUERY_WIDTH + GAP + column * pitch
            _draw_cell(canvas, row, column, (left, top), cell, fonts)
    path = Path(path)
    canvas.save(path, format="PNG", optimize=True)
    return path


def as_image(picture: Picture) -> Image.Image:
    """An RGB image from a PIL image or a uint8 array (height, width[, 1, 3 or 4])."""
    if not isinstance(picture, Image.Image):
        array = np.asarray(picture)
        if array.dtype != np.uint8:
            raise ValueError(f"a picture array must be uint8, got {array.dtype}")
        if array.ndim == 3 and array.shape[2] == 1:
            array = array[..., 0]
        if array.ndim != 2 and not (array.ndim == 3 and array.shape[2] in (3, 4)):
            raise ValueError(f"a picture array must be (height, width[, channels]), got {array.shape}")
        picture = Image.fromarray(array)
    if picture.has_transparency_data:
        seen = picture.convert("RGBA")
        flat = Image.new("RGBA", seen.size, (*PAPER, 255))
        picture = Image.alpha_composite(flat, seen)
    return picture.convert("RGB")


def _draw_header(canvas: Image.Image, title: str, fonts: dict[int, Font]) -> None:
    draw = ImageDraw.Draw(canvas)
    room = canvas.width - 2 * MARGIN
    draw.text((MARGIN, MARGIN - 6), wrap(title, fonts[20], room, 1)[0], fill=INK, font=fonts[20])
    left, middle = MARGIN, MARGIN + 36
    for correct, words in ((True, "the caption's own picture"), (False, "another picture")):
        draw_badge(canvas, (left + 9, middle), 9, RIGHT if correct else WRONG, correct, PAPER)
        left += 25
        draw.text((left, middle), words, fill=FAINT, font=fonts[14], anchor="lm")
        left += int(draw.textlength(words, font=fonts[14])) + 22
    words = "below: rank and cosine similarity"
    draw.text((left, middle), words, fill=FAINT, font=fonts[14], anchor="lm")


def _draw_query(canvas: Image.Image, row: GridRow, top: int, cell: int, fonts: dict[int, Font]) -> None:
    note = f"right picture: rank {row.right_rank:,}" if row.right_rank is not None else ""
    high = line_height(fonts[14])
    room = cell + 2 * FRAME - (high if note else 0)
    lines = wrap(row.query, fonts[14], QUERY_WIDTH - GAP, max(1, room // high))
    bottom = draw_lines(canvas, (MARGIN, top), lines, fonts[14], INK)
    if note:
        ImageDraw.Draw(canvas).text((MARGIN, bottom + 4), note, fill=FAINT, font=fonts[12])


def _draw_cell(
    canvas: Image.Image,
    row: GridRow,
    column: int,
    corner: tuple[int, int],
    cell: int,
    fonts: dict[int, Font],
) -> None:
    left, top = corner
    side = cell + 2 * FRAME
    correct = bool(row.correct[column])
    colour = RIGHT if correct else WRONG
    draw = ImageDraw.Draw(canvas)
    draw.rectangle((left, top, left + side - 1, top + side - 1), fill=colour)
    inside = (left + FRAME, top + FRAME)
    draw.rectangle((*inside, inside[0] + cell - 1, inside[1] + cell - 1), fill=MAT)
    picture = as_image(row.pictures[column])
    scale = cell / max(picture.size)
    size = (max(1, round(picture.width * scale)), max(1, round(picture.height * scale)))
    resample = Image.Resampling.LANCZOS if scale < 1 else Image.Resampling.BICUBIC
    picture = picture.resize(size, resample)
    canvas.paste(picture, (inside[0] + (cell - size[0]) // 2, inside[1] + (cell - size[1]) // 2))
    # The mark says what the colour says, for those who cannot tell green from red.
    draw_badge(canvas, (left + side - 13, top + 13), 11, colour, correct, PAPER)
    words = f"{column + 1}.  {float(row.scores[column]):.2f}"
    draw.text((left + side / 2, top + side + 5), words, fill=FAINT, font=fonts[12], anchor="ma")


def _font(size: int, font_file: str | Path | None) -> Font:
    return ImageFont.truetype(str(font_file), size) if font_file else ImageFont.load_default(size=size)
