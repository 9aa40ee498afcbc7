"""A line of the screen: pieces of text with a style, cut and padded to a width."""

from __future__ import annotations

from collections.abc import Iterable

from rich.cells import cell_len, set_cell_size

Piece = tuple[str, str]  # text, style
Line = list[Piece]

COLOURS = {
    "": "", "bold": "1", "dim": "2", "good": "32", "bad": "1;31", "note": "33", "accent": "36", "title": "1;36",
    "data": "33", "copy": "35", "forward": "36", "backward": "34", "optimizer": "32", "step": "36",
    "rest": "2", "invert": "7",
}  # fmt: skip
PLAIN = {
    "bold": "1",
    "title": "1",
    "bad": "1",
    "dim": "2",
    "invert": "7",
}  # NO_COLOR forbids colours, not weight


def fit(line: Line, width: int) -> Line:
    """Exactly `width` cells; what is too long ends in dots. Letters that would move the cursor are taken out."""
    out: Line = []
    room = width
    for raw, style in line:
        text = "".join(letter if letter.isprintable() else " " for letter in raw)
        cells = cell_len(text)
        if cells > room:
            cut = set_cell_size(text, room)
            out.append((cut[:-1] + "…" if room > 1 and cell_len(cut[-1:]) == 1 else cut, style))
            return out
        out.append((text, style))
        room -= cells
    return [*out, (" " * room, "")] if room else out


def side_by_side(left: list[Line], right: list[Line], width: int, gap: int = 2) -> list[Line]:
    """Two blocks of equal height, the left one `width` cells wide."""
    return [[*fit(a, width), (" " * gap, ""), *b] for a, b in zip(left, right, strict=True)]


def ansi(line: Line, colour: bool) -> str:
    """The line with its escape codes."""
    codes = COLOURS if colour else PLAIN
    return "".join(f"\x1b[{codes[style]}m{text}\x1b[0m" if codes.get(style) else text for text, style in line)


def plain(lines: Iterable[Line]) -> str:
    """The text alone."""
    return "\n".join("".join(text for text, _ in line).rstrip() for line in lines)
