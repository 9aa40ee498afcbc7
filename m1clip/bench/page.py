"""comparison.html: one file that asks nothing of the network, light and dark, readable on a phone."""

from __future__ import annotations

from html import escape
from importlib import resources
from typing import Any

from m1clip.bench import plots, sections
from m1clip.bench.against import side_by_side

Document = dict[str, Any]


def page(document: Document, other: Document | None = None) -> str:
    """The whole report of a comparison, with another machine's beside it if there is one."""
    facts = document["facts"]
    machine = f"{facts['cuda'] + ', ' if facts['cuda'] else ''}{facts['cpu']}, {facts['cores']} cores"
    style = (resources.files("m1clip") / "bench" / "style.css").read_text(encoding="utf-8")
    body = "\n".join(part for part in (
        f"<h1>Which device, on this machine?</h1><p class='dim'>{escape(machine)}, torch {escape(facts['torch'])}, "
        f"m1clip {escape(document['m1clip'])}, {escape(document['made'])}<br>"
        f"<code>{escape(' '.join(document['command']))}</code></p>",
        sections.verdict(document),
        plots.speed(document),
        plots.growth(document),
        plots.shares(document),
        sections.results(document),
        side_by_side(document, other) if other else "",
        sections.usage(document),
        sections.models(document),
        sections.devices(document),
        sections.micro(document),
        sections.left_out(document),
        sections.method(),
    ) if part)  # fmt: skip
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><title>m1clip compare: '
        f"{escape(machine)}</title><style>{style}</style></head>\n<body>{body}</body></html>\n"
    )
