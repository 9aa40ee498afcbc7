"""Findings about captions: duplicates, what will be cut, labels, and how many an image has."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

from m1clip.data.lint.images import Entry, Places
from m1clip.data.lint.report import Finding, Severity, finding
from m1clip.text.bpe import BpeTokenizer

Lengths = Callable[[Sequence[str]], Sequence[int]]
# A caption of one or two words names a thing and says nothing of it.
LABEL_WORDS = 2
_LABELS_SHARE = 0.5
_FEW_DISTINCT = 0.1
_FILE_NAME = re.compile(r"\S+\.(jpe?g|png|webp|gif|bmp|tiff?|hei[cf])$|^https?://\S+$", re.IGNORECASE)


def check_captions(
    entries: Sequence[Entry], places: Places, lengths: Lengths | None, context_length: int, by_templates: bool
) -> list[Finding]:
    """Everything that can be said of the captions without looking at the images."""
    cells = [(entry, n, text) for entry in entries for n, text in enumerate(entry.sample.captions)]
    empty = [entry.sample.id for entry in entries if not any(text.strip() for text in entry.sample.captions)]
    names = [places.caption(entry, n) for entry, n, text in cells if _FILE_NAME.search(text)]
    return [
        *finding("no-caption", "problem", "images have no caption", "write captions for them", empty),
        *finding("file-name", "warning", "captions are file names or addresses", "replace them by what is seen", names),
        *_twice(entries, places),
        *_overlong(cells, places, lengths, context_length),
        *_labels(entries, cells, places, by_templates),
        *_shared(entries, cells, by_templates),
    ]


def _key(text: str) -> str:
    return text.casefold().strip(" .")


def _twice(entries: Sequence[Entry], places: Places) -> list[Finding]:
    found = []
    for entry in entries:
        seen: set[str] = set()
        for number, text in enumerate(entry.sample.captions):
            if _key(text) in seen:
                found.append(places.caption(entry, number))
            seen.add(_key(text))
    message = "captions repeat another of the same image"
    return finding("duplicate-caption", "warning", message, "remove captions that repeat another of their image", found)


def _overlong(
    cells: Sequence[tuple[Entry, int, str]], places: Places, lengths: Lengths | None, context_length: int
) -> list[Finding]:
    """Captions that lose their end. Without a tokenizer a word counts as one token, the least it can be."""
    texts = [text for _, _, text in cells]
    sizes = lengths(texts) if lengths else [len(text.split()) for text in texts]
    # The start and end marks take two places.
    room = context_length - 2
    long = [(cell, size) for cell, size in zip(cells, sizes, strict=True) if size > room]
    cut = sum(size - room for _, size in long)
    least = "" if lengths else "at least "
    message = f"captions are longer than {room} tokens: {least}{cut:,} tokens are cut off"
    shown = [f"{places.caption(entry, n)} ({least}{size} tokens)" for (entry, n, _), size in long]
    return finding(
        "overlong", "warning", message, "shorten long captions, or train with a larger context length", shown
    )


def _labels(
    entries: Sequence[Entry], cells: Sequence[tuple[Entry, int, str]], places: Places, by_templates: bool
) -> list[Finding]:
    short = [places.caption(entry, n) for entry, n, text in cells if len(text.split()) <= LABEL_WORDS]
    distinct = len({_key(text) for _, _, text in cells})
    if by_templates:
        message = f"images share {distinct} captions made from class names: this is classification"
        return [Finding("labels", "info", len(entries), message)]
    few = len(entries) >= 50 and distinct < _FEW_DISTINCT * len(entries)
    if few or len(short) > _LABELS_SHARE * len(cells):
        message = f"captions are really labels ({distinct:,} different ones for {len(entries):,} images)"
        remedy = "write what is seen, not only its name; or use class folders, which say it in a sentence"
        shown = short or [places.caption(entry, n) for entry, n, _ in cells[:3]]
        return [Finding("labels", "warning", len(short) or len(cells), message, remedy, tuple(shown[:100]))]
    return finding("short", "info", f"captions have {LABEL_WORDS} words or fewer", "", short)


def _shared(entries: Sequence[Entry], cells: Sequence[tuple[Entry, int, str]], by_templates: bool) -> list[Finding]:
    if by_templates:
        return []
    images: dict[str, set[str]] = defaultdict(set)
    splits: dict[str, set[str]] = defaultdict(set)
    for entry, _, text in cells:
        images[_key(text)].add(entry.sample.id)
        splits[_key(text)].add(entry.split)
    ordered = sorted(images, key=lambda text: -len(images[text]))
    shared = [f"{len(images[text])} images: {text[:80]}" for text in ordered if len(images[text]) > 1]
    leaked = [text[:80] for text in ordered if "train" in splits[text] and len(splits[text]) > 1]
    share = len({id_ for text in images if len(images[text]) > 1 for id_ in images[text]}) / max(len(entries), 1)
    severe: Severity = "warning" if share > _LABELS_SHARE else "info"
    remedy = "write captions that tell one image from another"
    return [
        *finding("shared-caption", severe, "captions describe several images", remedy, shared),
        *finding("shared-between-splits", "info", "captions of train also stand in another split", "", leaked),
    ]


def bpe_lengths(texts: Sequence[str]) -> list[int]:
    """Tokens of each text by CLIP's tokenizer, without start and end."""
    tokenizer = BpeTokenizer()
    return [len(tokenizer.encode(text)) for text in texts]


def caption_facts(entries: Sequence[Entry]) -> dict[str, Any]:
    """Captions an image, images a caption, words a caption."""
    per_image = [len(entry.sample.captions) for entry in entries]
    per_caption = Counter(key for e in entries for key in {_key(text) for text in e.sample.captions})
    words = [len(text.split()) for entry in entries for text in entry.sample.captions]
    counts = (("captions_per_image", per_image), ("images_per_caption", list(per_caption.values())), ("words", words))
    return {
        name: {"min": min(values), "median": int(median(values)), "max": max(values)}
        for name, values in counts
        if values
    }
