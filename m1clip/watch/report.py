"""`m1clip report`: one HTML file that holds everything, opens without a network and prints well."""

from __future__ import annotations

import base64
import contextlib
import io
import json
import shlex
import time
import warnings
from collections.abc import Sequence
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

from PIL import Image

from m1clip.errors import UserError
from m1clip.files import read_small, write_bytes
from m1clip.watch.history import History
from m1clip.watch.report_plots import curves, layers, learned, machine
from m1clip.watch.report_tables import against_prior_art, costs, summary
from m1clip.watch.snapshots import read_snapshot, read_thumbnail, snapshot_steps
from m1clip.watch.svg import ramp
from m1clip.watch.verdicts import verdicts

PICTURE_BYTES = 900_000  # of a retrieval grid; a larger one is made smaller
LARGEST = 5_000_000
GRIDS = 6  # runs whose pictures fit


def write_report(runs: Sequence[Path], out: Path) -> Path:
    """Read the runs and write the page."""
    histories = [History(run).poll_all() for run in runs]
    for history in histories:
        if not history.start:
            raise UserError(f"{history.run}: has not begun yet: its log is empty")
    page = _page(histories)
    if len(page) > LARGEST:
        page = _page(histories, pictures=False)
    write_bytes(out, page)
    return out


def _page(histories: Sequence[History], pictures: bool = True) -> bytes:
    style = (resources.files("m1clip.watch") / "page" / "report.css").read_text(encoding="utf-8")
    names = ", ".join(history.name for history in histories)
    one = len(histories) == 1
    parts = [
        f"<header><h1>{escape(names)}</h1><p class='note'>m1clip {escape(str(histories[0].start.get('version', '')))}, "
        f"{time.strftime('%d %B %Y, %H:%M')}</p></header>",
        _section("Summary", _said(histories) + summary(histories) + "<h3>Cost</h3>" + costs(histories)),
    ]
    prior = "".join(against_prior_art(history) for history in histories)
    if prior:
        parts.append(_section("Against the published figures", prior))
    parts.append(_section("Curves", f"<div class='grid'>{curves(histories)}</div>"))
    for history in histories:
        mark = "" if one else f": {history.name}"
        parts.append(_section(f"What it learned{mark}", f"<div class='grid'>{learned(history)}</div>"))
        parts.append(_section(f"Gradient flow{mark}", f"<div class='grid'>{layers(history)}</div>"))
        if pictures and history in list(histories)[:GRIDS]:
            parts.append(_section(f"What it finds{mark}", _grid(history) + _snapshot(history)))
    parts.append(_section("Time, memory, energy", f"<div class='grid'>{machine(histories)}</div>"))
    parts += [_section("Settings" + ("" if one else f": {h.name}"), _settings(h)) for h in histories]
    return (
        "<!doctype html>\n<html lang='en'><head><meta charset='utf-8'><meta name='viewport' "
        "content='width=device-width, initial-scale=1'><meta http-equiv='Content-Security-Policy' "
        "content=\"default-src 'none'; style-src 'unsafe-inline'; img-src data:\">"
        f"<title>m1clip: {escape(names)}</title><style>{style}</style></head><body>{''.join(parts)}</body></html>\n"
    ).encode("utf-8", "replace")  # the name of a folder may be no valid text


def _section(title: str, body: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{body}</section>" if body else ""


def _said(histories: Sequence[History]) -> str:
    lines = []
    for history in histories:
        mark = f"{history.name}: " if len(histories) > 1 else ""
        lines += [
            f"<li class='{v.level}'>{escape(mark + v.words)}</li>" for v in verdicts(history, 0.0, "finished")
        ]
    return f"<ul class='verdicts'>{''.join(lines)}</ul>" if lines else ""


def _grid(history: History) -> str:
    try:
        picture = _embedded(read_small(history.run / "retrieval.png", inside=history.run))
    except FileNotFoundError:
        return ""
    except (OSError, ValueError) as error:
        return f"<p class='note'>retrieval.png left out: {escape(getattr(error, 'strerror', None) or str(error))}</p>"
    words = "Captions and the pictures they retrieve, right and wrong marked"
    return f"<img class='wide' alt='{words}' src='{picture}'>"


def _embedded(data: bytes) -> str:
    """A picture as a data address; a large one as JPEG, smaller until it fits."""
    picture = _decoded(data)
    if len(data) <= PICTURE_BYTES and data.startswith((b"\x89PNG", b"\xff\xd8")):
        kind = "png" if data.startswith(b"\x89PNG") else "jpeg"
        return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"
    for width in (1200, 900, 700, 500):
        small = picture.copy()
        small.thumbnail((width, 4 * width))
        buffer = io.BytesIO()
        small.save(buffer, format="JPEG", quality=80)
        if buffer.tell() <= PICTURE_BYTES:
            break
    return f"data:image/jpeg;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def _decoded(data: bytes) -> Image.Image:
    """RGB; a ValueError for what is damaged, or so large that it would take a browser's memory."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(io.BytesIO(data), formats=("PNG", "JPEG")) as opened:
                return opened.convert("RGB")
    except Exception as error:  # the decoders raise many kinds
        raise ValueError(f"cannot be decoded: {error}") from error


def _snapshot(history: History) -> str:
    """Confusions and similarity matrix of the last evaluation."""
    last = read_snapshot(history.run, max(snapshot_steps(history.run), default=0))
    if last is None:
        return ""
    matrix = _matrix(last["matrix"]["values"], last["matrix"]["captions"])
    rows = [_confusion(history.run, each) for each in last["confusions"]]
    step = f"validation, step {last['step']:,}"
    confused = "".join(rows) or "<p class='note'>none: every caption finds its own picture first</p>"
    return (
        f"<div class='grid'><figure class='plot'><figcaption>Similarity of pictures (rows) and captions (columns), "
        f"{step}</figcaption>{matrix}</figure><figure class='plot'><figcaption>Nearest confusions, {step}</figcaption>"
        f"{confused}</figure></div>"
    )


def _matrix(values: list[list[float]], captions: list[str]) -> str:
    low, high = min(map(min, values)), max(map(max, values))
    span = high - low or 1.0
    cells = "".join(
        f"<rect x='{j}' y='{i}' width='1.02' height='1.02' fill='{ramp((v - low) / span)}'/>"
        for i, row in enumerate(values)
        for j, v in enumerate(row)
    )
    n = len(values)
    right = sum(captions[row.index(max(row))] == captions[i] for i, row in enumerate(values))
    words = f"{right} of {n} pictures are closest to their own caption; {low:.2f} dark, {high:.2f} bright"
    drawn = f"<svg class='matrix' viewBox='0 0 {n} {n}' role='img' aria-label='{words}'>{cells}</svg>"
    return f"{drawn}<p class='note'>{words}</p>"


def _confusion(run: Path, each: dict[str, Any]) -> str:
    pictures = ""
    for kind, picture in (("right", each["right"]), ("found", each["found"])):
        data = read_thumbnail(run, picture)
        with contextlib.suppress(ValueError):
            image = f"<img alt='{kind}' src='{_embedded(data or b'')}'>"
            pictures += f"<figure class='thumb {kind}'>{image}<figcaption>{kind}</figcaption></figure>"
    words = f"“{escape(str(each['caption']))}” <span class='note'>found instead: “{escape(str(each['truth']))}”</span>"
    return f"<div class='confusion'>{pictures}<p>{words}</p></div>"


def _settings(history: History) -> str:
    try:
        config = read_small(history.run / "config.toml", inside=history.run).decode("utf-8", "replace")
    except OSError as error:
        config = f"no config.toml: {error.strerror}"
    environment = json.dumps(history.environment, indent=2, ensure_ascii=False)
    again = f"m1clip train --config {shlex.quote(str(history.run / 'config.toml'))} --run runs/again"
    words = history.environment.get("command")
    first = shlex.join(["m1clip", *map(str, words[1:])]) if isinstance(words, list) and words else "unknown"
    return (
        f"<p>Repeat it: <code>{escape(again)}</code><br>It was started by: <code>{escape(first)}</code></p>"
        f"<div class='grid'><div><h3>config.toml</h3><pre>{escape(config)}</pre></div>"
        f"<div><h3>environment.json</h3><pre>{escape(environment)}</pre></div></div>"
    )
