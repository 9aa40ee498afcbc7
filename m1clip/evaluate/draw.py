"""Small drawing tools on PIL alone: wrapped text that never fails, check marks and crosses."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence

from PIL import Image, ImageDraw, ImageFont

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


def draw_lines(
    canvas: Image.Image, corner: tuple[int, int], lines: Sequence[str], font: Font, colour: Colour
) -> int:
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
    # A pale rim sets the disc off from a picture of its own colour.
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
