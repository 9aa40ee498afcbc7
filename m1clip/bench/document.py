"""comparison.json: one versioned document, written whole after each candidate, and read again with checks."""

from __future__ import annotations

import json
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from m1clip import __version__
from m1clip.bench.crossover import cost_models, crossovers
from m1clip.bench.usage import usage_table
from m1clip.bench.verdict import sentences
from m1clip.errors import UserError
from m1clip.files import read_small, write_json
from m1clip.runlog import finite

FORMAT, VERSION = "m1clip-comparison", 1
KEYS = ("facts", "devices", "absent", "results", "left_out", "verdict", "usage", "cost_models", "crossovers")


def new_document(facts: dict[str, Any], absent: dict[str, str]) -> dict[str, Any]:
    """A comparison in which nothing is measured yet."""
    return {
        "format": FORMAT,
        "version": VERSION,
        "m1clip": __version__,
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": ["m1clip", *sys.argv[1:]],
        "facts": facts,
        "devices": [],
        "absent": absent,
        "results": [],
        "left_out": [],
        "complete": False,
    }


def write_document(document: dict[str, Any], path: Path) -> None:
    """Draw the conclusions from what is measured so far, and write all of it."""
    document["cost_models"] = cost_models(document["results"])
    document["crossovers"] = crossovers(document["results"], document["cost_models"])
    document["usage"] = usage_table(document["results"])
    document["verdict"] = sentences(document)
    write_json(path, finite(document))


def read_document(path: Path) -> dict[str, Any]:
    """A comparison.json, or a folder that holds one; anything else is one clear line."""
    path = path / "comparison.json" if path.is_dir() else path
    try:
        document = json.loads(read_small(path, 2**26))
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise UserError(f"{path}: not a JSON file; give the comparison.json of m1clip compare") from None
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise UserError(f"{path}: not a comparison of m1clip compare")
    if document.get("version") != VERSION:
        raise UserError(
            f"{path}: version {document.get('version')} of the format; this m1clip reads {VERSION}"
        )
    missing = [key for key in KEYS if key not in document]
    if missing:
        raise UserError(f"{path}: incomplete, without {', '.join(missing)}")
    return document
