"""Print the table of models in docs/models.md, from m1clip/model/catalog.py.

python tools/models_table.py
"""

from __future__ import annotations

from textwrap import fill

from m1clip.formatting import size
from m1clip.model.catalog import CATALOG, FLOAT32, FROM_SIZES, TOWER_CATALOG

HEAD = ("name", "repository", "pixels", "parameters", "weights", "ImageNet", "languages", "license")
SOURCES = {FLOAT32: "~", FROM_SIZES: "~"}  # computed, not listed


def markdown() -> str:
    """The table, and the sources of its figures."""
    rows = [HEAD, ("---",) * len(HEAD)]
    for model in CATALOG.values():
        accuracy = "not published" if model.imagenet is None else f"{model.imagenet:.1f}%"
        rows.append(
            (
                f"`{model.name}`{'' if model.loader == 'm1clip' else ' *'}",
                model.repository,
                str(model.image_size),
                f"{SOURCES.get(model.parameters_source, '')}{model.parameters:.0f} M",
                f"{SOURCES.get(model.megabytes_source, '')}{size(model.megabytes * 1e6)}",
                accuracy,
                model.languages.partition(" (")[0],
                model.license,
            )
        )
    lines = [f"| {' | '.join(row)} |" for row in rows]
    used = sorted({model.imagenet_source for model in CATALOG.values()})
    sources = fill(f"ImageNet: {'; '.join(used)}.", 120, break_on_hyphens=False)
    return "\n".join([*lines, "", sources])


TOWERS_HEAD = ("tower", "repository", "of", "parameters", "weights", "license", "what it is")


def towers_markdown() -> str:
    """The table of towers."""
    rows = [TOWERS_HEAD, ("---",) * len(TOWERS_HEAD)]
    for tower in TOWER_CATALOG.values():
        rows.append(
            (
                f"`{tower.name}`",
                tower.repository,
                f"{tower.side}s",
                f"{SOURCES.get(tower.parameters_source, '')}{tower.parameters:.0f} M",
                f"{SOURCES.get(tower.megabytes_source, '')}{size(tower.megabytes * 1e6)}",
                tower.license,
                tower.note,
            )
        )
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


if __name__ == "__main__":
    print(markdown())
    print(f"\n{towers_markdown()}")
