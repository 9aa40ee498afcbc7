"""Check a set before hours are lost on it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence

from m1clip.data.lint.captions import Lengths, bpe_lengths, caption_facts, check_captions
from m1clip.data.lint.images import (
    Entry,
    Places,
    Progress,
    check_images,
    check_skipped,
    entries_of,
    evenly,
    exists,
    find_duplicates,
    image_facts,
    scan,
)
from m1clip.data.lint.report import Finding, LintReport, Severity
from m1clip.data.types import Source

__all__ = ["Finding", "LintReport", "bpe_lengths", "lint", "quick_lint"]


def lint(
    source: Source,
    deep: bool = True,
    image_size: int | None = None,
    tokenizer_lengths: Lengths | None = None,
    context_length: int = 77,
    workers: int = 2,
    progress: Progress | None = None,
) -> LintReport:
    """Read everything once. Not `deep`: captions, and whether the files are there, without decoding."""
    start = time.perf_counter()
    whole, entries = entries_of(source)
    places = Places(whole)
    if deep:
        facts = scan([entry.sample.image for entry in entries], workers, progress)
        found = check_images(entries, facts, places, image_size) + find_duplicates(entries, facts, places)
    else:
        facts = [exists(entry.sample.image) for entry in entries]
        found = [f for f in check_images(entries, facts, places, None) if f.severity == "problem"]
    found += _of_captions(whole, entries, places, tokenizer_lengths, context_length) + _of_splits(entries)
    summary = {**caption_facts(entries), **(image_facts(facts) if deep else {})}
    return _report(whole, entries, found, summary, start, len(entries) if deep else 0)


def quick_lint(
    source: Source,
    sample: int = 64,
    image_size: int | None = None,
    tokenizer_lengths: Lengths | None = None,
    context_length: int = 77,
) -> LintReport:
    """What a glance shows before each run: a sample of the images decoded, with their captions."""
    start = time.perf_counter()
    whole, entries = entries_of(source)
    places = Places(whole)
    chosen = evenly(entries, sample)
    facts = scan([entry.sample.image for entry in chosen])
    found = check_images(chosen, facts, places, image_size)
    found += _of_captions(whole, chosen, places, tokenizer_lengths, context_length) + _of_splits(entries)
    return _report(whole, entries, found, {}, start, len(chosen))


def _of_captions(
    source: Source, entries: Sequence[Entry], places: Places, lengths: Lengths | None, context_length: int
) -> list[Finding]:
    by_templates = bool(getattr(source, "class_captions", False))
    skipped = check_skipped(getattr(source, "problems", ()))
    return skipped + check_captions(entries, places, lengths, context_length, by_templates)


def _of_splits(entries: Sequence[Entry]) -> list[Finding]:
    counts = Counter(entry.split for entry in entries)
    remedy = "name the splits train, val and test in the data, or leave the column out"
    severities: dict[str, Severity] = {"train": "problem", "val": "warning"}
    return [
        Finding(f"no-{split}", severity, 1, f"split is not there: {split}", remedy)
        for split, severity in severities.items()
        if not counts[split]
    ]


def _report(
    source: Source,
    entries: Sequence[Entry],
    found: Sequence[Finding],
    summary: dict[str, object],
    start: float,
    looked: int,
) -> LintReport:
    return LintReport(
        source=str(getattr(source, "path", type(source).__name__)),
        images=dict(Counter(entry.split for entry in entries)),
        captions=sum(len(entry.sample.captions) for entry in entries),
        findings=tuple(found),
        facts=summary,
        notes=tuple(getattr(source, "notes", ())),
        seconds=time.perf_counter() - start,
        looked_at=looked,
    )
