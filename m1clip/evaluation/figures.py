"""Figures of an evaluation: a grid of retrieved images, and a confusion matrix."""

from __future__ import annotations

import textwrap
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from m1clip.errors import UserError

RIGHT, WRONG = (0, 138, 92), (206, 44, 58)
INK, GRAY, PAPER = (28, 32, 38), (104, 112, 122), (255, 255, 255)
MARGIN, GAP, FRAME, CELL = 24, 14, 5, 112
QUERY_WIDTH, HEADER_HEIGHT, LABEL_HEIGHT, ROW_GAP = 232, 66, 24, 18
QUERY_LETTERS = 32  # per line; images are drawn over what is too wide
MAX_TEXT = 1000  # longer captions do not fit a cell; bounds the time for text layout
# The built-in font has no glyph for these.
ASCII = str.maketrans({"–": "-", "—": "-", "’": "'", "‘": "'", "“": '"', "”": '"', "…": "...", "→": "->"})


@dataclass(frozen=True, slots=True)
class GridRow:
    """A query and the images it retrieved; `rank` is that of the right image."""

    query: str
    images: np.ndarray  # (n, side, side, 3) uint8, best first
    correct: Sequence[bool]
    scores: Sequence[float]
    rank: int


def retrieval_grid(rows: Sequence[GridRow], path: Path, title: str) -> None:
    """Write a PNG with queries on the left and their images on the right, framed as correct or wrong."""
    side = CELL + 2 * FRAME
    columns = max(len(row.images) for row in rows)
    row_height = side + LABEL_HEIGHT + ROW_GAP
    width = max(2 * MARGIN + QUERY_WIDTH + columns * (side + GAP), 560)
    canvas = Image.new("RGB", (width, 2 * MARGIN + HEADER_HEIGHT + len(rows) * row_height - ROW_GAP), PAPER)
    draw = ImageDraw.Draw(canvas)
    small, normal, large = (ImageFont.load_default(size) for size in (12, 14, 20))
    draw.text((MARGIN, MARGIN - 6), safe_text(title), fill=INK, font=large)
    legend = "Below each image: rank, cosine similarity, and whether it is an image of the caption."
    draw.text((MARGIN, MARGIN + 28), legend, fill=GRAY, font=normal)
    for number, row in enumerate(rows):
        top = MARGIN + HEADER_HEIGHT + number * row_height
        lines = textwrap.wrap(safe_text(row.query), QUERY_LETTERS, max_lines=5, placeholder="...")
        query = "\n".join([*lines, f"(right image: rank {row.rank:,})"])
        draw.multiline_text((MARGIN, top), query, fill=INK, font=normal)
        for column, pixels in enumerate(row.images):
            left = MARGIN + QUERY_WIDTH + GAP + column * (side + GAP)
            color = RIGHT if row.correct[column] else WRONG
            draw.rectangle((left, top, left + side - 1, top + side - 1), fill=color)
            image = Image.fromarray(pixels).resize((CELL, CELL), Image.Resampling.BICUBIC)
            canvas.paste(image, (left + FRAME, top + FRAME))
            # Words as well as color, for readers who cannot tell green from red.
            label = f"{column + 1}.  {row.scores[column]:.2f}  {'right' if row.correct[column] else 'wrong'}"
            draw.text((left + side / 2, top + side + 5), label, fill=color, font=small, anchor="ma")
    canvas.save(path, format="PNG", optimize=True)


def safe_text(text: str) -> str:
    """Text that Pillow can draw: one line, no control characters, no lone surrogates, of bounded length."""
    text = text[:MAX_TEXT].encode("utf-8", "replace").decode("utf-8").translate(ASCII)
    return " ".join("".join(" " if unicodedata.category(letter) == "Cc" else letter for letter in text).split())


def confusion_figure(counts: Tensor, names: Sequence[str], path: Path, title: str) -> None:
    """Write a PNG of counts (classes, classes), rows the truth; a cell is as dark as its fraction of the row."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError("drawing the confusion matrix needs matplotlib: pip install 'm1clip[plot]'") from None
    classes = len(names)
    side = min(16.0, 3 + 0.4 * classes)
    figure = Figure(figsize=(side, side), layout="constrained")
    axes = figure.subplots()
    fractions = counts / counts.sum(dim=1, keepdim=True).clamp(min=1)
    axes.imshow(fractions.numpy(), cmap="Greens", vmin=0, vmax=1)
    axes.set(title=safe_text(title), xlabel="predicted class", ylabel="true class")
    if classes <= 40:  # more labels would be unreadable
        labels = [safe_text(name)[:30].replace("$", r"\$") for name in names]
        axes.set_xticks(range(classes), labels, rotation=90)
        axes.set_yticks(range(classes), labels)
        for row, column in counts.nonzero().tolist():
            color = "white" if fractions[row, column] > 0.6 else "black"
            axes.text(column, row, str(int(counts[row, column])), ha="center", va="center", color=color)
    figure.savefig(path, dpi=100)
