"""Labels: the captions that a user gives to photos of an index, kept in captions.csv for `m1clip
train`.

The table is beside the photos if that folder is writable and has no other table of captions, else
in the index folder. What a table of captions cannot say (skipped photos, and the content of
labelled ones, by which they are found again when they are renamed) is in a database of the index
folder. Losing it loses no caption.
"""

from __future__ import annotations

import hashlib
import json
import os
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from m1clip.data.caption_table import (
    CAPTIONS_FILE,
    PERSON,
    Caption,
    CaptionFile,
    clean_caption,
    lock_captions,
    normalize_name,
    read_captions,
)
from m1clip.data.sources import splits
from m1clip.data.sources.columns import is_generated
from m1clip.data.sources.folders import has_text_files
from m1clip.data.sources.metadata import PhotoCaptions, find_captions
from m1clip.data.sources.tables import find_tables
from m1clip.errors import UserError
from m1clip.formatting import one_line
from m1clip.search.database import (
    READ_SECONDS,
    IndexBusy,
    is_busy,
    is_full,
    is_unwritable,
    statements,
    stored_statements,
)
from m1clip.search.location import INDEX_FOLDER, check_database

LABELS_DATABASE = "labels.sqlite"
LABELS_SCHEMA = """
CREATE TABLE seen (sha256 BLOB PRIMARY KEY, path BLOB, skipped INTEGER, time REAL);
"""
VALID_SEEN = (
    "typeof(sha256) = 'blob' AND length(sha256) = 32 AND typeof(path) = 'blob' AND skipped IN"
    " (0, 1)"
)
MAX_CAPTIONS = 20  # of one photo
# Held-out labels are never trained on. More than by default, as a user has few labels.
TEST_LABELS, VAL_LABELS = 0.2, 0.1
MAX_DEVIATION = 1  # labels by which a split may have more or fewer than its fraction
LABELS_TO_TRAIN = 30  # photos with a label before the first training: six of them are held out


@dataclass(frozen=True)
class Change:
    """What a page wants: the captions of a photo, if they are still those of `version`."""

    path: str  # relative to the folder of photos
    sha256: bytes
    version: str
    captions: tuple[str, ...]
    skipped: bool = False
    split: str | None = None  # of a near-duplicate that has a label; None: `choose_split`


@dataclass(frozen=True)
class Label:
    """The captions of a photo, with a version by which a later change recognizes them.

    They are those of a person and those that the photo contains, not those of a captioning model.
    """

    captions: tuple[str, ...]
    skipped: bool = False
    split: str = ""
    from_metadata: bool = False  # all of them were in the photo

    @property
    def version(self) -> str:
        content = json.dumps([self.captions, self.skipped]).encode()
        return hashlib.blake2s(content, digest_size=6).hexdigest()


@dataclass(frozen=True)
class Outcome:
    """The label of a photo after a change.

    A conflict means that another page had changed it, and nothing was done.
    """

    label: Label
    conflict: bool


def split_by_content(sha256: bytes) -> str:
    """The split of a photo: the same for every copy of it, however it is named."""
    unit = splits.hash_unit(sha256.hex())
    if unit < TEST_LABELS:
        return "test"
    return "val" if unit < TEST_LABELS + VAL_LABELS else "train"


def choose_split(sha256: bytes, counts: Counter[str]) -> str:
    """The split of a newly labelled photo, where `counts` are the labels of each split.

    By its content, unless a split has too few or too many labels: of 48, chance alone can give a
    split twice what it should have.
    """
    labels = counts.total() + 1
    excess = {
        "test": counts["test"] - TEST_LABELS * labels,
        "val": counts["val"] - VAL_LABELS * labels,
    }
    lacking = min(excess, key=lambda split: excess[split])
    if excess[lacking] < -MAX_DEVIATION:
        return lacking
    split = split_by_content(sha256)
    return "train" if excess.get(split, 0.0) > MAX_DEVIATION - 1 else split


def split_counts(labels: Iterable[Label]) -> Counter[str]:
    """How many labels each split has."""
    return Counter(label.split for label in labels)


def can_be_named(path: str) -> bool:
    """Whether a table can name a file."""
    return path.isprintable() and path == path.strip() and normalize_name(path) == path


class ChosenSplits:
    """Chooses the splits of newly labelled photos, and remembers them: copies share one."""

    def __init__(self, labels: Mapping[str, Label], contents: Mapping[str, bytes]) -> None:
        """`contents`: the content (sha256) of labelled photos by path."""
        self._counts = split_counts(labels.values())
        self._split_of = {
            digest: labels[path].split for path, digest in contents.items() if path in labels
        }

    def choose(self, sha256: bytes) -> str:
        split = self._split_of.get(sha256) or choose_split(sha256, self._counts)
        self._split_of[sha256] = split
        self._counts[split] += 1
        return split


class Labels:
    """The labels of a folder of photos.

    Safe to use from threads and from several processes at once.
    """

    def __init__(self, root: Path, index_folder: Path) -> None:
        self.root = root
        self.path = labels_path(root, index_folder)
        self._database = index_folder / LABELS_DATABASE
        self._lock = threading.RLock()
        self._known: tuple[tuple[int, ...], CaptionFile] | None = None  # with what its file was
        self._version = 0  # changes with the labels

    def labelled(self) -> dict[str, Label]:
        """The photos with a label, by path relative to the folder of photos."""
        with self._lock:
            return self._labels(self._read())

    def skipped(self) -> set[bytes]:
        """The contents (sha256) of skipped photos."""
        return {digest for digest, (_, skipped) in self._seen().items() if skipped}

    def change(self, changes: Sequence[Change]) -> list[Outcome]:
        """Make changes, all with one write of the table; the outcome of each.

        A change whose result is there already (a repeated request) is no conflict.
        """
        cleaned = [tuple(_clean(change.captions)) for change in changes]
        for change in changes:
            if not can_be_named(change.path):
                name = one_line(change.path)
                raise UserError(f"{name}: its name cannot be written into a table; rename the file")
        with self._lock, lock_captions(self.path):
            table = self._read()
            skipped = self.skipped()
            outcomes = []
            remembered: list[tuple[bytes, bytes, int, float]] = []
            is_changed = False
            chosen = ChosenSplits(self._labels(table), self.contents())
            for change, captions in zip(changes, cleaned, strict=True):
                before = self._label(table, change.path, change.sha256 in skipped)
                after = Label(captions, change.skipped, before.split)
                if before.version == after.version:
                    outcomes.append(Outcome(before, conflict=False))
                    continue
                if before.version != change.version:
                    outcomes.append(Outcome(before, conflict=True))
                    continue
                if captions != before.captions:
                    split = change.split or before.split or chosen.choose(change.sha256)
                    _replace(table, self._name(change.path), captions, split)
                    is_changed = True
                remembered.append(
                    (change.sha256, os.fsencode(change.path), int(change.skipped), time.time())
                )
                outcomes.append(
                    Outcome(self._label(table, change.path, change.skipped), conflict=False)
                )
            self._known = None  # if writing fails, the table in memory is ahead of the file
            if is_changed:
                table.write()
            self._known = self.stamp[:3], table
            self._remember(remembered)
            return outcomes

    def import_metadata(self, contents: Mapping[str, bytes]) -> int:
        """Copy the captions inside photos to the table, which hides them otherwise; returns how many photos.

        contents: {path: sha256}. A photo that has captions in the table keeps those.
        """
        with self._lock:
            table = self._read()
        names = [path for path in contents if can_be_named(path) and not table.of(self._name(path))]
        captioned = [
            (path, captions)
            for path, captions in find_captions(self.root, names, follow_links=False)
            if isinstance(captions, PhotoCaptions)
        ]
        if not captioned:
            return 0
        with self._lock, lock_captions(self.path):
            table = self._read()
            new = [
                (path, captions) for path, captions in captioned if not table.of(self._name(path))
            ]
            # `contents` has copies that no page has labelled, too.
            chosen = ChosenSplits(self._labels(table), {**self.contents(), **contents})
            for path, captions in new:
                split = chosen.choose(contents[path])
                table.replace(self._name(path), captions.texts, captions.kind, split)
            self._known = None
            table.write()
        return len(new)

    def follow(self, names: Mapping[str, str]) -> None:
        """Give the rows of renamed photos (old path -> new path) their new names."""
        if not names:
            return
        with self._lock, lock_captions(self.path):
            table = self._read()
            for old, new in names.items():
                if not table.of(self._name(new)) and can_be_named(new):
                    table.rename(self._name(old), self._name(new))
            self._known = None
            table.write()

    def contents(self) -> dict[str, bytes]:
        """The content (sha256) of each labelled photo, by the path that it had then."""
        return {path: digest for digest, (path, skipped) in self._seen().items() if not skipped}

    @property
    def stamp(self) -> tuple[int, ...]:
        """Changes with the labels."""
        files = []
        for path in (self.path, self._database):
            try:
                stat = os.stat(path)
                files += [stat.st_ino, stat.st_size, stat.st_mtime_ns]
            except OSError:
                files += [0, 0, 0]
        return tuple(files)

    def _name(self, path: str) -> str:
        """How the table names a photo: relative to its folder, or absolute if it is in the index
        folder.
        """
        return path if self.path.parent == self.root else str(self.root / path)

    def _path(self, name: str) -> str:
        """The path of a photo in the folder of photos, from its name in the table."""
        if self.path.parent != self.root:
            return os.path.relpath(name, self.root)
        return name

    def _label(self, table: CaptionFile, path: str, skipped: bool) -> Label:
        return _label_of(table.of(self._name(path)), skipped)

    def _labels(self, table: CaptionFile) -> dict[str, Label]:
        labels = {self._path(name): _label_of(table.of(name), False) for name in table.images()}
        return {path: label for path, label in labels.items() if label.captions}

    def _read(self) -> CaptionFile:
        """The table, read again only if its file has changed."""
        stamp = self.stamp[:3]
        if self._known is None or self._known[0] != stamp:
            self._known = stamp, read_captions(self.path)
        return self._known[1]

    @contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        path = self._database
        check_database(path)
        try:
            with closing(sqlite3.connect(path, timeout=READ_SECONDS)) as db, db:
                db.execute("PRAGMA trusted_schema = OFF")
                stored = stored_statements(db)
                if not stored:
                    db.executescript(
                        LABELS_SCHEMA.replace("CREATE TABLE", "CREATE TABLE IF NOT EXISTS")
                    )
                elif stored != statements(LABELS_SCHEMA):
                    raise sqlite3.DatabaseError("other tables than m1clip's")
                yield db
        except sqlite3.DatabaseError as error:
            if is_busy(error):
                raise IndexBusy(f"{path}: another program has locked it; try again later") from None
            if is_full(error):
                raise UserError(
                    f"{path}: the disk is full; free some space, then try again"
                ) from None
            reason = one_line(str(error))
            if is_unwritable(error):
                raise UserError(
                    f"{path}: cannot be written to ({reason}); check who may write to its folder"
                ) from None
            raise UserError(
                f"{path}: cannot be used ({reason}); delete it: captions stay"
            ) from None

    def _seen(self) -> dict[bytes, tuple[str, bool]]:
        """{sha256: (path, whether it was skipped)} of the photos that the user has dealt with."""
        if not self._database.is_file():
            return {}
        with self._open() as db:
            rows = db.execute(
                f"SELECT sha256, path, skipped FROM seen WHERE {VALID_SEEN}"
            ).fetchall()
        return {bytes(digest): (os.fsdecode(path), skipped == 1) for digest, path, skipped in rows}

    def _remember(self, rows: Sequence[tuple[bytes, bytes, int, float]]) -> None:
        if rows:
            with self._open() as db:
                db.executemany("INSERT OR REPLACE INTO seen VALUES (?, ?, ?, ?)", rows)


def labels_path(root: Path, index_folder: Path) -> Path:
    """Where the labels of a folder of photos are: beside them if possible, else in the index
    folder.
    """
    beside = root / CAPTIONS_FILE
    if (
        index_folder.parent == root
        and index_folder.name == INDEX_FOLDER
        and os.access(root, os.W_OK)
    ):
        others = [path for path in find_tables(root, nested=False) if path != beside]
        if beside.exists() or not (others or has_text_files(root)):
            return beside
    return index_folder / CAPTIONS_FILE


def _label_of(captions: Sequence[Caption], skipped: bool) -> Label:
    own = [caption for caption in captions if not is_generated(caption.source)]
    split = next((caption.split for caption in captions if caption.split), "")
    from_metadata = bool(own) and all(caption.source != PERSON for caption in own)
    return Label(tuple(caption.text for caption in own), skipped and not own, split, from_metadata)


def _replace(table: CaptionFile, name: str, captions: Sequence[str], split: str) -> None:
    """Give a photo these captions: those that it contained keep their source, others are a person's."""
    before = [caption for caption in table.of(name) if not is_generated(caption.source)]
    remaining = list(captions)
    for source in {caption.source for caption in before} - {PERSON}:
        unchanged = [
            caption.text
            for caption in before
            if caption.source == source and caption.text in remaining
        ]
        remaining = [text for text in remaining if text not in unchanged]
        table.replace(name, unchanged, source)
    table.replace(name, remaining, PERSON, split)


def _clean(captions: Sequence[str]) -> list[str]:
    """Captions without duplicates and empty ones; UserError for one that cannot be saved."""
    cleaned = list(dict.fromkeys(filter(None, map(clean_caption, captions))))
    if len(cleaned) > MAX_CAPTIONS:
        raise UserError(f"at most {MAX_CAPTIONS} captions for one photo, not {len(cleaned)}")
    return cleaned
