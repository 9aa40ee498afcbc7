"""Findings about captions: duplicates, truncation, labels, and how many an image has."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from statistics import median
from typing import Any

from m1clip.data.lint.images import Entry
from m1clip.data.lint.report import MAX_EXAMPLES, Finding, Severity, finding
from m1clip.text.bpe import BpeTokenizer

LABEL_WORDS = 2  # captions this short are labels, not descriptions
_MANY = 0.5
_FEW_DISTINCT = 0.1
_FILE_NAME = re.compile(r"\S+\.(jpe?g|png|webp|gif|bmp|tiff?|hei[cf])$|^https?://\S+$", re.IGNORECASE)
Cell = tuple[Entry, int, str]  # a caption: its image, its number there, its text


def check_captions(entries: Sequence[Entry], context_length: int, class_captions: bool) -> list[Finding]:
    """Everything that can be found without the images."""
    cells = [(entry, number, text) for entry in entries for number, text in enumerate(entry.sample.captions)]
    file_names = [entry.caption_name(n) for entry, n, text in cells if _FILE_NAME.search(text)]
    remedy = "replace file names and URLs with descriptions"
    found = finding("file-name", "warning", "captions that are file names or URLs", remedy, file_names)
    found += _repeated(entries) + _truncated(cells, context_length)
    if class_captions:
        distinct = len({_normalized(text) for _, _, text in cells})
        message = f"images whose captions are made from {distinct} class names (this is classification)"
        return [*found, Finding("labels", "info", len(entries), message)]
    return found + _labels(entries, cells) + _shared(entries, cells)


def _normalized(text: str) -> str:
    return text.casefold().strip(" .")


def _repeated(entries: Sequence[Entry]) -> list[Finding]:
    places = []
    for entry in entries:
        seen: set[str] = set()
        for number, text in enumerate(map(_normalized, entry.sample.captions)):
            if text in seen:
                places.append(entry.caption_name(number))
            seen.add(text)
    remedy = "remove captions that repeat another one of their image"
    return finding("duplicate-caption", "warning", "captions that repeat another one of their image", remedy, places)


def _truncated(cells: Sequence[Cell], context_length: int) -> list[Finding]:
    tokenizer = BpeTokenizer()
    limit = context_length - 2  # start and end tokens
    places, cut = [], 0
    for entry, number, text in cells:
        # A token has at least one byte.
        tokens = len(tokenizer.encode(text)) if len(text.encode()) > limit else 0
        if tokens > limit:
            cut += tokens - limit
            places.append(f"{entry.caption_name(number)} ({tokens} tokens)")
    message = f"captions over {limit} tokens ({cut:,} tokens are cut off)"
    return finding("overlong", "warning", message, "shorten long captions, or use a larger context length", places)


def _labels(entries: Sequence[Entry], cells: Sequence[Cell]) -> list[Finding]:
    short = [entry.caption_name(number) for entry, number, text in cells if len(text.split()) <= LABEL_WORDS]
    distinct = len({_normalized(text) for _, _, text in cells})
    few_distinct = len(entries) >= 50 and distinct < _FEW_DISTINCT * len(entries)
    if not few_distinct and len(short) <= _MANY * len(cells):
        return finding("short", "info", f"captions of {LABEL_WORDS} words or fewer", "", short)
    message = f"captions that are only labels ({distinct:,} different ones for {len(entries):,} images)"
    remedy = "describe each image instead of naming it; or use class folders, whose names become sentences"
    shown = short or [entry.caption_name(number) for entry, number, _ in cells[:3]]
    return [Finding("labels", "warning", len(short) or len(cells), message, remedy, tuple(shown[:MAX_EXAMPLES]))]


def _shared(entries: Sequence[Entry], cells: Sequence[Cell]) -> list[Finding]:
    images: dict[str, set[str]] = defaultdict(set)
    splits: dict[str, set[str]] = defaultdict(set)
    for entry, _, text in cells:
        images[_normalized(text)].add(entry.sample.id)
        splits[_normalized(text)].add(entry.split)
    shared = sorted((text for text in images if len(images[text]) > 1), key=lambda text: -len(images[text]))
    fraction = len({id_ for text in shared for id_ in images[text]}) / max(len(entries), 1)
    severity: Severity = "warning" if fraction > _MANY else "info"
    shown = [f"{len(images[text])} images: {text[:80]}" for text in shared]
    in_two = [text[:80] for text in shared if "train" in splits[text] and len(splits[text]) > 1]
    remedy = "write captions that distinguish the images"
    return [
        *finding("shared-caption", severity, "captions of more than one image", remedy, shown),
        *finding("shared-between-splits", "info", "captions of train that are also in another split", "", in_two),
    ]


def caption_facts(entries: Sequence[Entry]) -> dict[str, Any]:
    """Captions per image, images per caption, words per caption."""
    captions = [entry.sample.captions for entry in entries]
    per_caption = Counter(key for texts in captions for key in set(map(_normalized, texts)))
    counts = {
        "captions_per_image": [len(texts) for texts in captions],
        "images_per_caption": list(per_caption.values()),
        "words": [len(text.split()) for texts in captions for text in texts],
    }
    return {
        name: {"min": min(values), "median": int(median(values)), "max": max(values)} for name, values in counts.items()
    }
