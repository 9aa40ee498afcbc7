"""What comparisons on this machine have found, kept for plan in the user's cache folder."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from m1clip.data.cache_place import user_cache
from m1clip.files import read_small, write_json
from m1clip.hardware.facts import Facts

KEPT = ("parameters", "flops", "joules_per_step", "gemm_share")


def machine_key(facts: Facts) -> str:
    """A machine with its torch: figures of another one say nothing here."""
    values = facts.to_dict()
    values.pop("python")
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]


def remember(facts: Facts, results: list[dict[str, Any]], folder: Path | None = None) -> None:
    """Keep the results; newer ones of the same candidate take the place of older ones."""
    path = _path(facts, folder)
    kept = {json.dumps(item["candidate"], sort_keys=True): item for item in recall(facts, folder)}
    for r in results:
        line = {
            "candidate": r["candidate"],
            "seconds": r["seconds"]["median"],
            **{key: r[key] for key in KEPT},
        }
        kept[json.dumps(r["candidate"], sort_keys=True)] = line
    try:
        write_json(path, {"results": list(kept.values())})
    except OSError:
        return  # a home that cannot be written: the comparison itself stands in its own folder


def recall(facts: Facts, folder: Path | None = None) -> list[dict[str, Any]]:
    """What is known of this machine; empty where nothing is."""
    try:
        return list(json.loads(read_small(_path(facts, folder), 2**26))["results"])
    except (OSError, ValueError, KeyError, TypeError):
        return []


def _path(facts: Facts, folder: Path | None) -> Path:
    return (folder or user_cache()) / "compare" / f"{machine_key(facts)}.json"
