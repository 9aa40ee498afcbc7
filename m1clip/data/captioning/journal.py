"""The answers of a captioning run, one JSON line each: a killed run continues without
asking twice.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path

from m1clip.data.captioning.answers import ANSWER_FAULTS, MAX_CHARACTERS, AnswerFault
from m1clip.errors import UserError
from m1clip.io import open_for_write, open_regular, write_text

JOURNAL = ".m1clip-captions.journal"  # not .jsonl, which would be read as a table
MAX_ENTRY_BYTES = 2**16  # bytes; longer lines are not ours
ANSWER_KEPT = 500  # characters of an answer that was not used
MAX_PART_BYTES = 255  # of the name of a file or folder


@dataclass(frozen=True)
class Entry:
    """The answer of a model about a photo: a caption, or why there is none."""

    photo: str
    model: str
    prompt: str  # see `prompt_key`
    caption: str
    fault: AnswerFault | None = None
    answer: str = ""  # the beginning of what the model wrote, if it is not used


def prompt_key(prompt: str) -> str:
    """A short name for a prompt: a changed prompt asks again."""
    return blake2b(prompt.encode("utf-8", "replace"), digest_size=6).hexdigest()


class Journal:
    """The answers so far, in a file beside the photos."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / JOURNAL
        self.entries: dict[str, Entry] = {}
        for entry in _read(self.path):
            self.entries[entry.photo] = entry

    def add(self, entry: Entry) -> None:
        """Write an answer; it is on the disk when this returns."""
        self.entries[entry.photo] = entry
        line = json.dumps(asdict(entry), ensure_ascii=True) + "\n"
        # On a line of its own, also after a line that a killed process did not finish.
        try:
            handle = open_for_write(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
            with os.fdopen(handle, "r+b") as file:
                end = file.seek(0, os.SEEK_END)
                if end:
                    file.seek(end - 1)
                    line = line if file.read(1) == b"\n" else "\n" + line
                file.write(line.encode("ascii"))
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            reason = "the disk is full; free some space" if full else f"{error.strerror}"
            raise UserError(
                f"{self.path}: not saved: {reason}; the same command continues"
            ) from None

    def keep(self, entries: Iterable[Entry]) -> None:
        """Forget all answers but these; without any, the file is deleted."""
        self.entries = {entry.photo: entry for entry in entries}
        if not self.entries:
            self.path.unlink(missing_ok=True)
            return
        lines = (json.dumps(asdict(entry), ensure_ascii=True) for entry in self.entries.values())
        write_text(self.path, "".join(f"{line}\n" for line in lines))


def _read(path: Path) -> Iterator[Entry]:
    """Yield the entries of a journal; lines that are not complete or not ours are skipped."""
    if not os.path.lexists(path):
        return
    try:
        with open_regular(path, inside=path.parent) as file:
            while line := file.readline(MAX_ENTRY_BYTES):
                if (entry := _parse(line)) is not None:
                    yield entry
    except OSError as error:
        raise UserError(
            f"{path}: cannot be read ({error.strerror}); delete it to start again"
        ) from None


def _parse(line: bytes) -> Entry | None:
    try:
        values = json.loads(line)
        entry = Entry(**values)
    except (ValueError, TypeError, RecursionError):
        return None
    return entry if _is_ours(entry) else None


def _is_ours(entry: Entry) -> bool:
    """Whether a run can have written an entry: the folder may be that of a stranger."""
    shown = (entry.photo, entry.model, entry.prompt, entry.caption)
    is_printable = all(isinstance(text, str) and text.isprintable() for text in shown)
    return (
        is_printable
        and isinstance(entry.answer, str)
        and entry.fault in (None, *ANSWER_FAULTS)
        and len(entry.caption) <= MAX_CHARACTERS
        and _is_inside(entry.photo)
    )


def _is_inside(name: str) -> bool:
    """Whether the name of a photo is a path in the folder of photos."""
    parts = name.split("/")
    has_valid_parts = all(0 < len(os.fsencode(part)) <= MAX_PART_BYTES for part in parts)
    return has_valid_parts and not {os.curdir, os.pardir}.intersection(parts)
