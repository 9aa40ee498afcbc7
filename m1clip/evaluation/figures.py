"""One image of retrieval: captions at the left, what they found at the right, right and wrong marked."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

Font = ImageFont.FreeTypeFont | ImageFont.ImageFont
Colour = tuple[int, int, int]

# No caption that can be read in a cell is longer; it bounds the time spent on measuring.
LONGEST_TEXT = 1000
# The built-in font has no glyph for these, and each has a plain twin.
PLAIN = str.maketrans({"–": "-", "—": "-", "’": "'", "‘": "'", "“": '"', "”": '"', "…": "...", "→": "->"})
# Marks are drawn larger and shrunk, because PIL's lines are not smoothed.
SMOOTH = 4


def safe_text(text: str) -> str:
    """Text that PIL can draw: one line, no control characters, no lone surrogates, of bounded length."""
    text = text[:LONGEST_TEXT].encode("utf-8", "replace").decode("utf-8").translate(PLAIN)
    # Other kinds (formats, private use) are left alone: they can be drawn, if only as a box.
    kept = (" " if unicodedata.category(letter) == "Cc" else letter for letter in text)
    return " ".join("".join(kept).split())


def wrap(text: str, font: Font, width: float, most_lines: int) -> list[str]:
    """Lines that fit the width; too long a word is cut, too long a text ends in dots."""
    lines: list[str] = [""]
    for word in safe_text(text).split(" "):
        longer = f"{lines[-1]} {word}".strip()
        if font.getlength(longer) <= width:
            lines[-1] = longer
            continue
        if lines[-1]:
            lines.append("")
        for letter in word:
            if lines[-1] and font.getlength(lines[-1] + letter) > width:
                lines.append("")
            lines[-1] += letter
    if len(lines) <= most_lines:
        return lines
    last = lines[most_lines - 1]
    while last and font.getlength(f"{last}...") > width:
        last = last[:-1]
    return [*lines[: most_lines - 1], f"{last.rstrip()}..."]


def line_height(font: Font) -> int:
    """Distance from one line of text to the next."""
    top, bottom = font.getbbox("Ãgj")[1::2]
    return round(1.25 * (bottom - top))


def draw_lines(canvas: Image.Image, corner: tuple[int, int], lines: Sequence[str], font: Font, colour: Colour) -> int:
    """Draw lines below each other and return the y below the last one."""
    draw = ImageDraw.Draw(canvas)
    left, top = corner
    for line in lines:
        draw.text((left, top), line, fill=colour, font=font)
        top += line_height(font)
    return top


def draw_badge(
    canvas: Image.Image, centre: tuple[int, int], radius: int, colour: Colour, correct: bool, paper: Colour
) -> None:
    """A disc with a check mark or a cross, smooth at the edges."""
    size = (2 * radius + 1) * SMOOTH
    badge = Image.new("RGBA", (size, size), (*paper, 0))
    draw = ImageDraw.Draw(badge)
    # A pale rim sets the disc off from an image of its own colour.
    draw.ellipse((0, 0, size - 1, size - 1), fill=paper)
    rim = SMOOTH
    draw.ellipse((rim, rim, size - 1 - rim, size - 1 - rim), fill=colour)
    check = ((0.27, 0.53), (0.44, 0.70), (0.74, 0.34))
    cross = ((0.32, 0.32), (0.68, 0.68)), ((0.32, 0.68), (0.68, 0.32))
    for stroke in (check,) if correct else cross:
        points = [(x * size, y * size) for x, y in stroke]
        draw.line(points, fill=paper, width=max(1, size // 9), joint="curve")
    badge = badge.resize((2 * radius + 1, 2 * radius + 1), Image.Resampling.LANCZOS)
    canvas.paste(badge, (centre[0] - radius, centre[1] - radius), badge)


ImageInput = Image.Image | np.ndarray

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
    """A query and its images, best first. `right_rank` is where the right one stands among all."""

    query: str
    images: Sequence[ImageInput]
    correct: Sequence[bool]
    scores: Sequence[float]
    right_rank: int | None = None

    def __post_init__(self) -> None:
        if not len(self.images) == len(self.correct) == len(self.scores):
            raise ValueError(
                f"a row needs as many marks and scores as images, got {len(self.images)} images, "
                f"{len(self.correct)} marks, {len(self.scores)} scores"
            )


def retrieval_grid(
    rows: Sequence[GridRow],
    path: str | Path,
    title: str = "Captions and the images they found",
    cell: int = 112,
    font_file: str | Path | None = None,
) -> Path:
    """Write the rows as a PNG and return its path.

    `font_file` replaces PIL's built-in font, which shows boxes for scripts other than Latin.
    """
    if not rows:
        raise ValueError("a retrieval grid needs at least one row")
    columns = max(1, *(len(row.images) for row in rows))
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
        for column in range(len(row.images)):
            left = MARGIN + QUERY_WIDTH + GAP + column * pitch
            _draw_cell(canvas, row, column, (left, top), cell, fonts)
    path = Path(path)
    canvas.save(path, format="PNG", optimize=True)
    return path


def as_image(image: ImageInput) -> Image.Image:
    """An RGB image from a PIL image or a uint8 array (height, width[, 1, 3 or 4])."""
    if not isinstance(image, Image.Image):
        array = np.asarray(image)
        if array.dtype != np.uint8:
            raise ValueError(f"an image array must be uint8, got {array.dtype}")
        if array.ndim == 3 and array.shape[2] == 1:
            array = array[..., 0]
        if array.ndim != 2 and not (array.ndim == 3 and array.shape[2] in (3, 4)):
            raise ValueError(f"an image array must be (height, width[, channels]), got {array.shape}")
        image = Image.fromarray(array)
    if image.has_transparency_data:
        seen = image.convert("RGBA")
        flat = Image.new("RGBA", seen.size, (*PAPER, 255))
        image = Image.alpha_composite(flat, seen)
    return image.convert("RGB")


def _draw_header(canvas: Image.Image, title: str, fonts: dict[int, Font]) -> None:
    draw = ImageDraw.Draw(canvas)
    room = canvas.width - 2 * MARGIN
    draw.text((MARGIN, MARGIN - 6), wrap(title, fonts[20], room, 1)[0], fill=INK, font=fonts[20])
    left, middle = MARGIN, MARGIN + 36
    for correct, words in ((True, "the caption's own image"), (False, "another image")):
        draw_badge(canvas, (left + 9, middle), 9, RIGHT if correct else WRONG, correct, PAPER)
        left += 25
        draw.text((left, middle), words, fill=FAINT, font=fonts[14], anchor="lm")
        left += int(draw.textlength(words, font=fonts[14])) + 22
    words = "below: rank and cosine similarity"
    draw.text((left, middle), words, fill=FAINT, font=fonts[14], anchor="lm")


def _draw_query(canvas: Image.Image, row: GridRow, top: int, cell: int, fonts: dict[int, Font]) -> None:
    note = f"right image: rank {row.right_rank:,}" if row.right_rank is not None else ""
    high = line_height(fonts[14])
    room = cell + 2 * FRAME - (high if note else 0)
    lines = wrap(row.query, fonts[14], QUERY_WIDTH - GAP, max(1, room // high))
    bottom = draw_lines(canvas, (MARGIN, top), lines, fonts[14], INK)
    if note:
        ImageDraw.Draw(canvas).text((MARGIN, bottom + 4), note, fill=FAINT, font=fonts[12])


def _draw_cell(
    canvas: Image.Image, row: GridRow, column: int, corner: tuple[int, int], cell: int, fonts: dict[int, Font]
) -> None:
    left, top = corner
    side = cell + 2 * FRAME
    correct = bool(row.correct[column])
    colour = RIGHT if correct else WRONG
    draw = ImageDraw.Draw(canvas)
    draw.rectangle((left, top, left + side - 1, top + side - 1), fill=colour)
    inside = (left + FRAME, top + FRAME)
    draw.rectangle((*inside, inside[0] + cell - 1, inside[1] + cell - 1), fill=MAT)
    image = as_image(row.images[column])
    scale = cell / max(image.size)
    size = (max(1, round(image.width * scale)), max(1, round(image.height * scale)))
    resample = Image.Resampling.LANCZOS if scale < 1 else Image.Resampling.BICUBIC
    image = image.resize(size, resample)
    canvas.paste(image, (inside[0] + (cell - size[0]) // 2, inside[1] + (cell - size[1]) // 2))
    # The mark says what the colour says, for those who cannot tell green from red.
    draw_badge(canvas, (left + side - 13, top + 13), 11, colour, correct, PAPER)
    words = f"{column + 1}.  {float(row.scores[column]):.2f}"
    draw.text((left + side / 2, top + side + 5), words, fill=FAINT, font=fonts[12], anchor="ma")


def _font(size: int, font_file: str | Path | None) -> Font:
    return ImageFont.truetype(str(font_file), size) if font_file else ImageFont.load_default(size=size)


CELL, CONFUSION_MARGIN, LABEL = 34, 16, 190
SMALLEST_CELL, LARGEST_SIDE = 6, 1600
CONFUSION_PAPER, CONFUSION_INK, CONFUSION_FAINT = (255, 255, 255), (30, 30, 30), (225, 225, 225)
CONFUSION_RIGHT, CONFUSION_WRONG = (24, 128, 90), (196, 64, 48)


def confusion_image(counts: Tensor, names: Sequence[str], path: Path, title: str) -> None:
    """Write a PNG; a cell is as dark as its share of the row, green on the diagonal and red beside it."""
    classes = len(names)
    cell = max(SMALLEST_CELL, min(CELL, LARGEST_SIDE // classes))
    font = ImageFont.load_default(13)
    numbers = cell >= line_height(font)
    top = CONFUSION_MARGIN + 2 * line_height(font)
    canvas = Image.new(
        "RGB", (LABEL + classes * cell + 2 * CONFUSION_MARGIN, top + classes * cell + LABEL), CONFUSION_PAPER
    )
    draw = ImageDraw.Draw(canvas)
    draw_lines(
        canvas,
        (CONFUSION_MARGIN, CONFUSION_MARGIN),
        wrap(title, font, canvas.width - 2 * CONFUSION_MARGIN, 1),
        font,
        CONFUSION_INK,
    )
    shares = counts / counts.sum(dim=1, keepdim=True).clamp(min=1)
    for row in range(classes):
        y = top + row * cell
        if numbers:
            draw_lines(
                canvas,
                (CONFUSION_MARGIN, y + (cell - line_height(font)) // 2),
                wrap(names[row], font, LABEL - 8, 1),
                font,
                CONFUSION_INK,
            )
        for column in range(classes):
            share, x = float(shares[row, column]), LABEL + CONFUSION_MARGIN + column * cell
            full = CONFUSION_RIGHT if row == column else CONFUSION_WRONG
            colour = tuple(round(p + (c - p) * share**0.7) for p, c in zip(CONFUSION_PAPER, full, strict=True))
            draw.rectangle(
                (x, y, x + cell - 1, y + cell - 1), fill=colour, outline=CONFUSION_FAINT if cell > 10 else None
            )
            if numbers and counts[row, column]:
                text = str(int(counts[row, column]))
                left = x + (cell - font.getlength(text)) / 2
                draw.text((left, y + 4), text, fill=CONFUSION_INK if share < 0.6 else CONFUSION_PAPER, font=font)
    if numbers:
        _column_names(canvas, names, top + classes * cell, cell, font)
    canvas.save(path)


def _column_names(
    canvas: Image.Image, names: Sequence[str], top: int, cell: int, font: ImageFont.FreeTypeFont | ImageFont.ImageFont
) -> None:
    for column, name in enumerate(names):
        strip = Image.new("RGB", (LABEL - 8, line_height(font)), CONFUSION_PAPER)
        draw_lines(strip, (0, 0), wrap(name, font, LABEL - 8, 1), font, CONFUSION_INK)
        canvas.paste(
            strip.rotate(-90, expand=True),
            (LABEL + CONFUSION_MARGIN + column * cell + (cell - strip.height) // 2, top + 4),
        )
