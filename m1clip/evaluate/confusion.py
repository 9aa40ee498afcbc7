"""A confusion matrix as a picture: rows are the truth, columns what the model said."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from m1clip.evaluate.draw import draw_lines, line_height, wrap

CELL, MARGIN, LABEL = 34, 16, 190
SMALLEST_CELL, LARGEST_SIDE = 6, 1600
PAPER, INK, FAINT = (255, 255, 255), (30, 30, 30), (225, 225, 225)
RIGHT, WRONG = (24, 128, 90), (196, 64, 48)


def confusion_picture(counts: Tensor, names: Sequence[str], path: Path, title: str) -> None:
    """Write a PNG; a cell is as dark as its share of the row, green on the diagonal and red beside it."""
    classes = len(names)
    cell = max(SMALLEST_CELL, min(CELL, LARGEST_SIDE // classes))
    font = ImageFont.load_default(13)
    numbers = cell >= line_height(font)
    top = MARGIN + 2 * line_height(font)
    canvas = Image.new("RGB", (LABEL + classes * cell + 2 * MARGIN, top + classes * cell + LABEL), PAPER)
    draw = ImageDraw.Draw(canvas)
    draw_lines(canvas, (MARGIN, MARGIN), wrap(title, font, canvas.width - 2 * MARGIN, 1), font, INK)
    shares = counts / counts.sum(dim=1, keepdim=True).clamp(min=1)
    for row in range(classes):
        y = top + row * cell
        if numbers:
            draw_lines(
                canvas,
                (MARGIN, y + (cell - line_height(font)) // 2),
                wrap(names[row], font, LABEL - 8, 1),
                font,
                INK,
            )
        for column in range(classes):
            share, x = float(shares[row, column]), LABEL + MARGIN + column * cell
            full = RIGHT if row == column else WRONG
            colour = tuple(round(p + (c - p) * share**0.7) for p, c in zip(PAPER, full, strict=True))
            draw.rectangle(
                (x, y, x + cell - 1, y + cell - 1), fill=colour, outline=FAINT if cell > 10 else None
            )
            if numbers and counts[row, column]:
                text = str(int(counts[row, column]))
                left = x + (cell - font.getlength(text)) / 2
                draw.text((left, y + 4), text, fill=INK if share < 0.6 else PAPER, font=font)
    if numbers:
        _column_names(canvas, names, top + classes * cell, cell, font)
    canvas.save(path)


def _column_names(
    canvas: Image.Image,
    names: Sequence[str],
    top: int,
    cell: int,
    font: ImageFont.FreeTypeFont | ImageFont.ImageFont,
) -> None:
    for column, name in enumerate(names):
        strip = Image.new("RGB", (LABEL - 8, line_height(font)), PAPER)
        draw_lines(strip, (0, 0), wrap(name, font, LABEL - 8, 1), font, INK)
        canvas.paste(
            strip.rotate(-90, expand=True),
            (LABEL + MARGIN + column * cell + (cell - strip.height) // 2, top + 4),
        )
