"""Check a dataset before training: broken images, bad captions, duplicates and leakage between
splits.
"""

from __future__ import annotations

import json
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from hashlib import blake2b
from statistics import median
from typing import Literal

import numpy as np

from m1clip import console
from m1clip.data.duplicates import MAX_ALL_PAIRS, appearance, near_duplicates
from m1clip.data.images import BadImage, decode, open_header
from m1clip.data.synthetic.drawing import SYNTHETIC_MARK
from m1clip.data.types import ImageRef, ProblemKind, Sample, Source
from m1clip.formatting import one_line, plural
from m1clip.text.bpe import BpeTokenizer

Severity = Literal["problem", "warning", "info"]
QUICK = 64  # images checked before each run
STREAMED = 2_000  # images checked of streamed shards
EXAMPLES_IN_JSON = 100  # of each finding in the output of --json
EXAMPLES_SHOWN = 3  # of each finding in the text
EXAMPLES_LOGGED = 3  # of each finding in the log of a run
FINDINGS_WARNED = 2  # printed as warnings before a run, each with one example
MAX_UNREADABLE_FRACTION = 0.10  # a run stops above it
# Worst first.
_VERDICT: dict[Severity, str] = {"problem": "problems", "warning": "warnings", "info": "ok"}

FAULTS = {  # kinds of BadImage
    "missing": ("missing images", "restore the missing images, or remove them from the data"),
    "empty": ("empty image files (0 bytes)", "copy the empty files again, or remove them"),
    "truncated": ("truncated images", "copy or download the truncated images again"),
    "not-an-image": ("files that are not images", "convert them to JPEG or PNG, or remove them"),
    "no-decoder": ("HEIC images without a decoder", "pip install pi-heif, or save them as JPEG"),
    "too-large": ("images too large to decode safely", "reduce the size of the oversized images"),
    "broken": ("images that cannot be decoded", "save the broken images again, or remove them"),
}
# Of each kind of Problem. {items} are what the format calls its entries, such as rows.
SKIPPED: dict[ProblemKind, tuple[Severity, str, str]] = {
    "empty-caption": (
        "warning",
        "{items} without a caption, skipped",
        "write the missing captions, or remove the {items}",
    ),
    "no-image": (
        "warning",
        "{items} without a usable image, skipped",
        "fix the {items} without an image",
    ),
    "split-conflict": (
        "problem",
        "{items} that put an image in a second split",
        "give each image one split",
    ),
    "unsafe-member": (
        "warning",
        "files in shards with unsafe names, skipped",
        "write the shards again",
    ),
    "shard": ("problem", "damaged shards", "copy or write the damaged shards again"),
    "unreadable": ("warning", "unreadable {items}, skipped", "fix the unreadable {items}"),
}


@dataclass(frozen=True, slots=True)
class Finding:
    """One kind of finding: what was counted, how many, where the first ones are, and what to do."""

    code: str
    severity: Severity
    count: int
    message: str
    hint: str = ""
    examples: tuple[str, ...] = ()


def finding(
    code: str, severity: Severity, message: str, hint: str, locations: Sequence[str]
) -> list[Finding]:
    """A finding at these locations; none without a location."""
    return (
        [
            Finding(
                code, severity, len(locations), message, hint, tuple(locations[:EXAMPLES_IN_JSON])
            )
        ]
        if locations
        else []
    )


@dataclass(frozen=True)
class LintReport:
    """Findings, the worst first, and statistics of the dataset."""

    source: str
    images: dict[str, int]  # of each split
    captions: int
    checked: int  # images that were decoded
    seconds: float
    findings: tuple[Finding, ...]
    facts: dict[str, dict[str, int]]
    notes: tuple[str, ...]

    @property
    def verdict(self) -> str:
        """ok, warnings or problems."""
        return _VERDICT[self.findings[0].severity] if self.findings else "ok"

    def advice(self) -> list[str]:
        """What to do, each hint once, the most urgent first."""
        return list(dict.fromkeys(f.hint for f in self.findings if f.hint and f.severity != "info"))

    def to_json(self) -> str:
        report = {"verdict": self.verdict, "advice": self.advice(), **asdict(self)}
        return json.dumps(report, indent=2)

    def to_text(self) -> str:
        """Lines for a terminal, with a few examples of each finding."""
        total = sum(self.images.values())
        splits = ", ".join(f"{name} {count:,}" for name, count in self.images.items())
        checked = "all" if self.checked == total else f"{self.checked:,}"
        head = (
            f"{self.source}: {plural(total, 'image')} ({splits}),"
            f" {plural(self.captions, 'caption')}"
        )
        lines = [f"{head}; {checked} checked in {self.seconds:.1f} s"]
        for name, values in self.facts.items():
            lines.append(
                f"  {name.replace('_', ' ')}: "
                + ", ".join(f"{key} {value:,}" for key, value in values.items())
            )
        lines += [f"  note: {note}" for note in self.notes]
        for item in self.findings:
            lines.append(f"{item.severity:>7}  {item.message}: {item.count:,}")
            shown = item.examples[:EXAMPLES_SHOWN]
            lines += [f"           {example}" for example in shown]
            if shown and item.count > len(shown):
                more = f"... and {item.count - len(shown):,} more"
                lines.append(f"           {more}; --json lists up to {EXAMPLES_IN_JSON}")
        return "\n".join(
            [*lines, f"verdict: {self.verdict}", *(f"  - {hint}" for hint in self.advice())]
        )


@dataclass(frozen=True, slots=True)
class Entry:
    """A sample with its split; `origin` gives the file and row of a caption."""

    sample: Sample
    split: str
    origin: Callable[[str, int], str]

    def image_name(self) -> str:
        """a/b.jpg (captions.csv row 12)."""
        name = str(self.sample.image)
        row = self.origin(self.sample.id, 0)
        return name if row in name else f"{name} ({row})"

    def caption_name(self, number: int) -> str:
        """captions.csv row 12: the caption, shortened."""
        text = self.sample.captions[number]
        where = self.origin(self.sample.id, number)
        return one_line(f"{where}: {text if len(text) <= 80 else text[:77] + '...'}")


def lint(
    source: Source, sample: int | None = None, *, context_length: int = 77, workers: int = 2
) -> LintReport:
    """Decode every image once and check all captions.

    With `sample`, or of streamed shards, only some of them.
    """
    start = time.perf_counter()
    counts = {split: len(source.samples(split)) for split in source.splits()}
    total = sum(counts.values())
    everything = sample is None and not source.streamed
    checked = _entries(source, counts, total if everything else min(sample or STREAMED, total))
    facts = inspect_all([entry.sample.image for entry in checked], max(workers, source.threads))
    findings = check_images(checked, facts)
    if everything:
        findings += find_duplicates(checked, facts)
    items = f"{source.item}s"
    for kind, (severity, message, hint) in SKIPPED.items():
        locations = [str(problem) for problem in source.problems if problem.kind == kind]
        words = (message.format(items=items), hint.format(items=items))
        findings += finding(f"skipped-{kind}", severity, *words, locations)
    findings += check_captions(checked, context_length, source.class_captions)
    hint = (
        "splits come from a column split, or from the names of files or folders: name them train,"
        " val and test, or do not name any"
    )
    if "train" not in counts:
        findings += finding("no-train", "problem", "missing splits", hint, ["train"])
    if "val" not in counts and "train" in counts:
        # Of ten or more training images, some would have become val.
        few = "fewer than ten training images hold out none: add images, or name some val"
        findings += finding("no-val", "warning", "no validation images", few, ["val"])
    elif "val" not in counts:
        findings += finding("no-val", "warning", "missing splits", hint, ["val"])
    return LintReport(
        source=source.name,
        images=counts,
        captions=source.caption_count(),
        checked=len(checked),
        seconds=time.perf_counter() - start,
        findings=tuple(sorted(findings, key=lambda item: list(_VERDICT).index(item.severity))),
        facts=(
            ({"caption_kinds": source.caption_kinds} if source.caption_kinds else {})
            | ({} if sample is not None else _statistics(checked, facts))
        ),
        notes=(
            *source.notes,
            *([TOO_MANY_FOR_PAIRS] if everything and total > MAX_ALL_PAIRS else []),
        ),
    )


def _entries(source: Source, counts: dict[str, int], max_count: int) -> list[Entry]:
    """Samples that are spread over all splits and all parts of the data."""
    entries, before, total = list[Entry](), 0, sum(counts.values())
    for split, count in counts.items():
        # The k-th of them is sample k * total // wanted of all splits in a row.
        numbers = range(-(-before * max_count // total), -(-(before + count) * max_count // total))
        picked = source.pick(split, [number * total // max_count - before for number in numbers])
        entries += [Entry(item, split, source.origin) for item in picked]
        before += count
    return entries


def _statistics(entries: Sequence[Entry], facts: Sequence[ImageFacts]) -> dict[str, dict[str, int]]:
    captions = [entry.sample.captions for entry in entries]
    counts = {
        "captions_per_image": [len(texts) for texts in captions],
        "words_per_caption": [len(text.split()) for texts in captions for text in texts],
        "short_side": [min(fact.size) for fact in facts if not fact.fault],
    }
    return {
        name: {"min": min(v), "median": int(median(v)), "max": max(v)}
        for name, v in counts.items()
        if v
    }


# Images

MIN_SIDE, USUAL_ASPECT = 16, 8
NEAR_EMPTY_CONTRAST = 2.0
_DECODED_SIDE = 36  # enough for the hash and the thumbnail; JPEG decodes at a fraction of its size
_CHECKED_CHUNK = 32  # images per task of a thread
TOO_MANY_FOR_PAIRS = (
    "only identical images were searched for: near-duplicates take too long above"
    f" {MAX_ALL_PAIRS:,}"
)


@dataclass(frozen=True, slots=True)
class ImageFacts:
    """`fault` is a kind of BadImage; the other fields are set only where it is None."""

    fault: str | None = None
    reason: str = ""
    size: tuple[int, int] = (0, 0)
    digest: bytes = b""
    perceptual_hash: bytes = b""  # hash of how it looks
    thumb: bytes = b""
    contrast: float = 0.0
    is_synthetic: bool = False  # drawn by m1clip: similar to others, but of another scene


def inspect(ref: ImageRef) -> ImageFacts:
    where = str(ref)
    try:
        data = ref.read()
        with open_header(data, where) as header:
            size = header.size
            is_synthetic = header.info.get(SYNTHETIC_MARK[0]) == SYNTHETIC_MARK[1]
        image = decode(data, _DECODED_SIDE, where)
    except BadImage as error:
        return ImageFacts(error.kind, error.reason)
    perceptual_hash, thumb = appearance(image)
    contrast = float(np.frombuffer(thumb, np.uint8).std())
    digest = blake2b(data, digest_size=16).digest()
    return ImageFacts(None, "", size, digest, perceptual_hash, thumb, contrast, is_synthetic)


def inspect_all(refs: Sequence[ImageRef], workers: int) -> list[ImageFacts]:
    """Facts of each image, in order.

    Threads: decoding releases the GIL, and processes were slower.
    """
    refresh = console.current_progress()
    facts: list[ImageFacts] = []
    chunks = [refs[start : start + _CHECKED_CHUNK] for start in range(0, len(refs), _CHECKED_CHUNK)]
    with ThreadPoolExecutor(workers) as pool:
        for part in pool.map(lambda chunk: [inspect(ref) for ref in chunk], chunks):
            facts += part
            refresh(len(facts), len(refs))
    return facts


def check_images(entries: Sequence[Entry], facts: Sequence[ImageFacts]) -> list[Finding]:
    """Broken images, extreme sizes and blank images."""
    findings: list[Finding] = []
    bad = sum(fact.fault is not None for fact in facts)
    if bad > MAX_UNREADABLE_FRACTION * len(facts):
        message = (
            f"unusable images among {len(facts):,} (training stops above"
            f" {MAX_UNREADABLE_FRACTION:.0%})"
        )
        findings.append(Finding("too-many-bad", "problem", bad, message))
    both = list(zip(entries, facts, strict=True))
    for fault, (message, hint) in FAULTS.items():
        locations = [
            f"{entry.image_name()}: {fact.reason}" for entry, fact in both if fact.fault == fault
        ]
        findings += finding(fault, "problem", f"{message}, skipped", hint, locations)
    named = [
        (f"{entry.image_name()}: {fact.size[0]} x {fact.size[1]}", fact)
        for entry, fact in both
        if not fact.fault
    ]
    odd = [
        name
        for name, fact in named
        if min(fact.size) < max(MIN_SIDE, max(fact.size) / USUAL_ASPECT)
    ]
    message = f"images under {MIN_SIDE} px or more than {USUAL_ASPECT} times as long as wide"
    hint = "check images of extreme size: icons and strips contribute little"
    findings += finding("extreme-size", "warning", message, hint, odd)
    blank = [name for name, fact in named if fact.contrast < NEAR_EMPTY_CONTRAST]
    return findings + finding(
        "near-empty", "warning", "images of nearly a single color", "remove blank images", blank
    )


def find_duplicates(entries: Sequence[Entry], facts: Sequence[ImageFacts]) -> list[Finding]:
    """Identical files and near-duplicates, within a split and between splits."""
    first: dict[bytes, int] = {}
    same = [(first.setdefault(fact.digest, i), i) for i, fact in enumerate(facts) if fact.digest]
    same = [(i, j) for i, j in same if i != j]
    near = [
        (i, j)
        for i, j in near_duplicates([(fact.perceptual_hash, fact.thumb) for fact in facts])
        if facts[i].digest != facts[j].digest
        and not (facts[i].is_synthetic and facts[j].is_synthetic)
    ]

    def pair_names(pairs: Sequence[tuple[int, int]], between: bool) -> list[str]:
        return [
            " = ".join(f"{entry.split} {entry.image_name()}" for entry in (entries[i], entries[j]))
            for i, j in pairs
            if (entries[i].split != entries[j].split) == between
        ]

    leak, saved_again = (
        "identical images in two splits (scores would be too high)",
        "(saved again, or the same scene)",
    )
    leak_remedy = "remove the images that are in two splits from one of them"
    near_remedy = (
        "check the near-duplicates in two splits, and remove those of the same image from train"
    )
    join = "join the captions of copies under one image: two copies in a batch are false negatives"
    return [
        *finding("leak-identical", "problem", leak, leak_remedy, pair_names(same, True)),
        *finding(
            "leak-near",
            "warning",
            f"near-duplicates in two splits {saved_again}",
            near_remedy,
            pair_names(near, True),
        ),
        *finding(
            "duplicate-identical",
            "warning",
            "identical images within a split",
            join,
            pair_names(same, False),
        ),
        *finding(
            "duplicate-near",
            "info",
            f"near-duplicates within a split {saved_again}",
            "",
            pair_names(near, False),
        ),
    ]


# Captions

LABEL_WORDS = 2  # captions this short are labels, not descriptions
_MANY = 0.5
_FEW_DISTINCT = 0.1
_IS_FILE_NAME = re.compile(
    r"\S+\.(jpe?g|png|webp|gif|bmp|tiff?|hei[cf])$|^https?://\S+$", re.IGNORECASE
)


Location = tuple[Entry, int]  # a sample, and the number of one of its captions


def check_captions(
    entries: Sequence[Entry], context_length: int, class_captions: bool
) -> list[Finding]:
    """File names and labels as captions, repeated, shared and truncated captions."""
    images_of: dict[str, set[str]] = defaultdict(set)  # ids of the images with a caption
    for entry in entries:
        for text in entry.sample.captions:
            images_of[_normalized(text)].add(entry.sample.id)
    findings = [
        *_file_name_captions(entries),
        *_repeated_captions(entries),
        *_overlong_captions(entries, context_length),
    ]
    if class_captions:
        classes = plural(len(images_of), "class name")
        message = f"images whose captions are made from {classes} (this is classification)"
        return [*findings, Finding("labels", "info", len(entries), message)]
    return [
        *findings,
        *_label_captions(entries, len(images_of)),
        *_shared_captions(entries, images_of),
    ]


def _normalized(caption: str) -> str:
    """Equal for captions that say the same."""
    return caption.casefold().strip(" .")


def _locations(entries: Sequence[Entry]) -> Iterator[tuple[Location, str]]:
    """All captions, with where they are."""
    for entry in entries:
        for number, text in enumerate(entry.sample.captions):
            yield (entry, number), text


def _names(locations: Sequence[Location]) -> list[str]:
    return [entry.caption_name(number) for entry, number in locations]


def _file_name_captions(entries: Sequence[Entry]) -> list[Finding]:
    file_names = [where for where, text in _locations(entries) if _IS_FILE_NAME.search(text)]
    message = "captions that are file names or URLs"
    hint = "replace file names and URLs with descriptions"
    return finding("file-name", "warning", message, hint, _names(file_names))


def _repeated_captions(entries: Sequence[Entry]) -> list[Finding]:
    repeated: list[Location] = []
    for entry in entries:
        earlier: set[str] = set()
        for number, text in enumerate(entry.sample.captions):
            if _normalized(text) in earlier:
                repeated.append((entry, number))
            earlier.add(_normalized(text))
    message = "captions that repeat another one of their image"
    return finding("duplicate-caption", "warning", message, f"remove {message}", _names(repeated))


def _overlong_captions(entries: Sequence[Entry], context_length: int) -> list[Finding]:
    """Captions of which training sees the beginning only."""
    tokenizer = BpeTokenizer()
    limit = context_length - 2  # start and end tokens
    overlong: list[Location] = []
    cut = 0
    for where, text in _locations(entries):
        if len(text.encode()) <= limit:  # a token has at least one byte
            continue
        tokens = len(tokenizer.encode(text))
        if tokens > limit:
            cut += tokens - limit
            overlong.append(where)
    message = f"captions over {limit} tokens ({plural(cut, 'token')} cut off)"
    hint = "shorten long captions, or use a larger context length"
    return finding("overlong", "warning", message, hint, _names(overlong))


def _label_captions(entries: Sequence[Entry], different: int) -> list[Finding]:
    """One finding if most captions are labels; `different` is the number of distinct captions."""
    captions = sum(len(entry.sample.captions) for entry in entries)
    short = [where for where, text in _locations(entries) if len(text.split()) <= LABEL_WORDS]
    are_short = len(short) > _MANY * captions
    are_few = len(entries) >= 50 and different < _FEW_DISTINCT * len(entries)
    if not (are_short or are_few):
        return []
    images = plural(len(entries), "image")
    message = f"captions that are only labels ({different:,} different ones for {images})"
    hint = (
        "describe each image instead of naming it; or use class folders, whose names become"
        " sentences"
    )
    examples = tuple(_names(short[:EXAMPLES_IN_JSON] or [(entries[0], 0)]))
    return [Finding("labels", "warning", len(short) or captions, message, hint, examples)]


def _shared_captions(entries: Sequence[Entry], images_of: Mapping[str, set[str]]) -> list[Finding]:
    """Captions of more than one image, the most frequent first."""
    shared = sorted(
        (text for text, images in images_of.items() if len(images) > 1),
        key=lambda text: -len(images_of[text]),
    )
    images = {id_ for text in shared for id_ in images_of[text]}
    fraction = len(images) / max(len(entries), 1)
    shown = [f"{plural(len(images_of[text]), 'image')}: {text[:80]}" for text in shared]
    severity: Severity = "warning" if fraction > _MANY else "info"
    message = "captions of more than one image"
    hint = "write captions that distinguish the images"
    return finding("shared-caption", severity, message, hint, shown)
