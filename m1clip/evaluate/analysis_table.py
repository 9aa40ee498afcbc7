"""An analysis as tables for the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table

GEOMETRY = {
    "alignment": "0 = caption and picture in one place, 2 = unrelated",
    "uniformity_image": "0 = all pictures in one place; lower is more spread out",
    "uniformity_text": "the same for captions",
    "modality_gap": "distance of the mean picture and the mean caption",
}


def analysis_tables(analysis: dict[str, Any]) -> list[tuple[str, Table]]:
    """Titles and tables: geometry first, then each way of dividing the captions, the weakest of a group first."""
    from rich import box
    from rich.table import Table

    tables: list[tuple[str, Table]] = []

    def table(title: str, *columns: str) -> Table:
        made = Table(box=box.SIMPLE_HEAD)
        tables.append((title, made))
        for place, column in enumerate(columns):
            made.add_column(column, justify="left" if place == 0 else "right", no_wrap=place < 2)
        return made

    geometry = table("the space of vectors", "what", "value", "how to read it")
    for name, words in GEOMETRY.items():
        if name in analysis:
            geometry.add_row(name.replace("_", " "), f"{analysis[name]:.3f}", words)
    titles = {
        "difficulty": "accuracy against other captions, by similarity (easy: lower half, hard: top tenth)",
        "negatives": "accuracy against made-up negatives of known difficulty",
        "length": "recall@1 by length of the caption (thirds)",
    }
    for key, title in titles.items():
        if analysis.get(key):
            made = table(title, key, "share", "n")
            for name, (value, n) in analysis[key].items():
                made.add_row(name, f"{100 * value:.1f}%", f"{n:,}")
    if analysis.get("groups"):
        made = table(
            "recall@1 text to image, by what the picture shows; the weakest first", "group", "recall@1", "n"
        )
        for attribute, rows in by_attribute(analysis["groups"]).items():
            for name, (value, n) in rows:
                made.add_row(f"{attribute}: {name}", f"{100 * value:.1f}%", f"{n:,}")
            made.add_section()
    return tables


def by_attribute(groups: dict[str, list[float]]) -> dict[str, list[tuple[str, list[float]]]]:
    """{"colour/red": [0.9, 20]} as {"colour": [("red", [0.9, 20])]}, each sorted from the lowest."""
    found: dict[str, list[tuple[str, list[float]]]] = {}
    for name, share in groups.items():
        attribute, _, word = name.partition("/")
        found.setdefault(attribute, []).append((word, share))
    return {attribute: sorted(rows, key=lambda row: row[1][0]) for attribute, rows in found.items()}
