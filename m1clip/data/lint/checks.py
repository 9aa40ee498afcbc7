"""Findings about single pictures, and about what the source had to skip."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from m1clip.data.lint.entries import Entry, Places
from m1clip.data.lint.pictures import PictureFacts
from m1clip.data.lint.report import Finding, Severity, finding
from m1clip.data.sources.base import Problem

FAULTS = {
    "missing": (
        "pictures are missing",
        "put the missing pictures where the data says they are, or remove their rows",
    ),
    "empty": ("picture files are empty (0 bytes)", "copy the empty files again, or remove their rows"),
    "truncated": ("pictures are cut short", "copy or download the truncated pictures again"),
    "not-a-picture": ("files are not pictures", "convert them to JPEG or PNG, or remove their rows"),
    "no-decoder": ("HEIC images need a library to be read", "pip install pi-heif, or save them as JPEG"),
    "too-large": ("pictures are too large to decode safely", "make the pictures with absurd sizes smaller"),
    "broken": ("pictures cannot be decoded", "save the broken pictures again, or remove their rows"),
}
SKIPPED: dict[str, tuple[Severity, str, str]] = {
    "empty-caption": (
        "warning",
        "rows have no caption and are left out",
        "write the missing captions, or remove the rows",
    ),
    "no-image": (
        "warning",
        "rows name no usable picture and are left out",
        "mend the rows that name no picture",
    ),
    "split-conflict": ("problem", "rows put a picture in two splits", "give each picture one split"),
    "unsafe-member": (
        "warning",
        "members of shards have unsafe names and are left out",
        "write the shards again",
    ),
    "shard": ("problem", "faults in shards", "copy or write the damaged shards again"),
    "row": ("warning", "rows could not be read and are left out", "mend the rows that could not be read"),
}
TRAITS = ("CMYK", "16-bit", "palette", "alpha", "animated", "grey")
FLAT_CONTRAST = 2.0
MIN_SIDE = 16
MAX_ASPECT = 8.0
# A run stops above this share of bad pictures.
BAD_SHARE = 0.10


def check_skipped(problems: Sequence[Problem]) -> list[Finding]:
    """What the source could not use."""
    found = []
    for kind, (severity, message, remedy) in SKIPPED.items():
        places = [str(p) for p in problems if p.kind == kind or (kind == "row" and p.kind not in SKIPPED)]
        found += finding(f"skipped-{kind}", severity, message, remedy, places)
    return found


def check_pictures(
    entries: Sequence[Entry], facts: Sequence[PictureFacts], places: Places, image_size: int | None
) -> list[Finding]:
    """Faults, wrong endings, absurd sizes, flat pictures, and what will be converted."""
    both = list(zip(entries, facts, strict=True))
    found: list[Finding] = []
    bad = [(entry, fact) for entry, fact in both if fact.fault]
    if len(bad) > BAD_SHARE * len(both):
        what = f"of {len(both):,} pictures cannot be used: training stops above {BAD_SHARE:.0%}"
        found += [Finding("too-many-bad", "problem", len(bad), what, "")]
    for fault, (message, remedy) in FAULTS.items():
        named = [f"{places.picture(entry)}: {fact.reason}" for entry, fact in bad if fact.fault == fault]
        found += finding(fault, "problem", f"{message} and will be skipped", remedy, named)
    good = [(entry, fact) for entry, fact in both if not fact.fault]

    def pick(
        code: str, severity: Severity, message: str, remedy: str, chosen: Sequence[tuple[Entry, str]]
    ) -> None:
        found.extend(
            finding(code, severity, message, remedy, [f"{places.picture(e)}{text}" for e, text in chosen])
        )

    pick(
        *(
            "wrong-extension",
            "warning",
            "pictures are of another format than their name says (read all the same)",
        ),
        "rename them: other tools may refuse them",
        [(entry, f": is {fact.format}") for entry, fact in good if fact.wrong_suffix],
    )
    pick(
        *(
            "absurd-size",
            "warning",
            f"pictures are under {MIN_SIDE} px or longer than {MAX_ASPECT:.0f} times their width",
        ),
        "look at the pictures of absurd size: icons and strips teach little",
        [(entry, f": {fact.width} x {fact.height}") for entry, fact in good if _absurd(fact)],
    )
    pick(
        *("near-empty", "warning", "pictures are nearly one colour"),
        "remove the pictures that show nothing",
        [(entry, "") for entry, fact in good if fact.contrast < FLAT_CONTRAST],
    )
    if image_size:
        small = [(e, f": {f.width} x {f.height}") for e, f in good if min(f.width, f.height) < image_size]
        pick("small", "info", f"pictures have a side under {image_size} px and will be enlarged", "", small)
    for trait in TRAITS:
        converted = [(entry, "") for entry, fact in good if trait in fact.traits]
        what = "first frame taken" if trait == "animated" else "converted to RGB"
        pick(trait.lower(), "info", f"pictures are {trait}: {what}", "", converted)
    return found


def _absurd(fact: PictureFacts) -> bool:
    short, long = sorted((fact.width, fact.height))
    return short < MIN_SIDE or long > MAX_ASPECT * short


def picture_facts(facts: Sequence[PictureFacts]) -> dict[str, Any]:
    """Formats and sizes, for the head of the report."""
    good = [fact for fact in facts if not fact.fault]
    if not good:
        return {}
    sides = sorted(min(fact.width, fact.height) for fact in good)
    formats = Counter(fact.format or "drawn" for fact in good)
    return {
        "formats": dict(formats.most_common()),
        "short_side": {"min": sides[0], "median": sides[len(sides) // 2], "max": sides[-1]},
    }
