"""Check a dataset before training: broken images, bad captions, duplicates and leakage between splits."""

from __future__ import annotations

import time
from collections import Counter

from m1clip.data.lint.captions import caption_facts, check_captions
from m1clip.data.lint.images import (
    Entry,
    Progress,
    check_images,
    check_skipped,
    find_duplicates,
    image_facts,
    inspect_all,
)
from m1clip.data.lint.report import Finding, LintReport, finding
from m1clip.data.sources.mixture import MixedSource
from m1clip.data.types import Source

__all__ = ["QUICK", "Finding", "LintReport", "lint"]

QUICK = 64  # images checked before each run


def lint(
    source: Source,
    sample: int | None = None,
    *,
    image_size: int | None = None,
    context_length: int = 77,
    workers: int = 2,
    progress: Progress | None = None,
) -> LintReport:
    """Decode every image once and check all captions; with `sample`, that many images and their captions."""
    start = time.perf_counter()
    if isinstance(source, MixedSource):  # without the weights, which repeat images
        source = MixedSource([(part, 1.0) for part, _ in source.parts])
    entries = [Entry(item, split, source.origin) for split in source.splits() for item in source.samples(split)]
    checked = entries
    if sample is not None and sample < len(entries):  # spread over all splits and all parts of the data
        checked = [entries[i * len(entries) // sample] for i in range(sample)]
    facts = inspect_all([entry.sample.image for entry in checked], workers, progress)
    found = check_images(checked, facts, image_size)
    if sample is None:
        found += find_duplicates(checked, facts)
    found += check_skipped(source.problems)
    found += check_captions(checked, context_length, source.class_captions)
    images = Counter(entry.split for entry in entries)
    remedy = "name the splits train, val and test, or remove the split column"
    if not images["train"]:
        found += finding("no-train", "problem", "missing splits", remedy, ["train"])
    if not images["val"]:
        found += finding("no-val", "warning", "missing splits", remedy, ["val"])
    return LintReport(
        source=source.name,
        images={split: count for split, count in images.items() if count},
        captions=sum(len(entry.sample.captions) for entry in entries),
        checked=len(checked),
        seconds=time.perf_counter() - start,
        findings=tuple(found),
        facts={} if sample is not None else {**caption_facts(entries), **image_facts(facts)},
        notes=tuple(source.notes),
    )
