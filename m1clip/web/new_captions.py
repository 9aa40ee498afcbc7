"""Captions that are inside photos or beside them: they become labels, also if they are written while
the Label page is open.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from m1clip import console
from m1clip.data.sources.metadata import SIDECAR_SUFFIXES, PhotoFolder
from m1clip.errors import UserError
from m1clip.search.labels import Labels
from m1clip.search.query import Index
from m1clip.search.results import Photo

FIRST_SECONDS = 3.0  # to wait for the captions in all photos before the first are shown
LOOK_SECONDS = 0.5  # to wait for new ones later
REST = 20  # a look takes at most this part of the time
IMPORT_RETRY_SECONDS = 30.0  # before the next look if the captions could not be saved


class NewCaptions:
    """Makes labels of the captions in photos that are new, or that have a new sidecar."""

    def __init__(self, labels: Labels) -> None:
        self._labels = labels
        self._thread: threading.Thread | None = None
        self._next_look = 0.0
        self._version: int | None = None  # of the index at the last look
        self._folders: list[str] = []
        self._read: set[bytes] = set()  # contents of the photos that were read
        self._sidecars: dict[
            str, tuple[int, int]
        ] = {}  # by path: when it was written, and its size

    def look(self, index: Index) -> None:
        """Read what is new, in a thread: a large library takes minutes.

        The thread is waited for, but not for longer than a page can wait for photos.
        """
        is_running = self._thread is not None and self._thread.is_alive()
        if is_running or time.monotonic() < self._next_look:
            return
        patience = FIRST_SECONDS if self._thread is None else LOOK_SECONDS
        self._thread = threading.Thread(target=self._look, args=(index,), daemon=True)
        self._thread.start()
        self._thread.join(patience)

    def _look(self, index: Index) -> None:
        began = time.monotonic()
        pause = 0.0
        try:
            self._import(index)
        except (UserError, OSError) as error:  # the next label that is saved meets the same problem
            console.warn(f"the captions inside the photos were not read: {error}")
            pause = IMPORT_RETRY_SECONDS
        now = time.monotonic()
        self._next_look = now + max(pause, REST * (now - began))

    def _import(self, index: Index) -> None:
        version = index.version
        if version != self._version:
            self._folders = ["", *index.folders()]
        sidecars = dict(_sidecars(index.root, self._folders))
        new = {path for path, written in sidecars.items() if self._sidecars.get(path) != written}
        if version != self._version or new:
            photos = index.photos_at(np.arange(len(index.vectors)))
            unread = {
                photo.path: photo.sha256 for photo in photos if photo.sha256 not in self._read
            }
            unread |= {
                photo.path: photo.sha256 for photo in _photos_beside(index.root, photos, new)
            }
            self._labels.import_metadata(unread)
            self._read.update(unread.values())
        self._version, self._sidecars = version, sidecars


def _sidecars(root: Path, folders: Iterable[str]) -> Iterable[tuple[str, tuple[int, int]]]:
    """The files in some folders that may be sidecars, with when they were written and their size."""
    for folder in folders:
        try:
            entries = os.scandir(root / folder)
        except OSError:  # deleted since it was indexed
            continue
        with entries:
            for entry in entries:
                if entry.name.lower().endswith(SIDECAR_SUFFIXES):
                    stat = entry.stat(follow_symlinks=False)
                    yield os.path.join(folder, entry.name), (stat.st_mtime_ns, stat.st_size)


def _photos_beside(root: Path, photos: Iterable[Photo], sidecars: set[str]) -> Iterable[Photo]:
    """The photos that one of these sidecars belongs to."""
    changed = {os.path.dirname(path) for path in sidecars}
    folders: dict[str, PhotoFolder] = {}
    for photo in photos:
        inside, name = os.path.split(photo.path)
        if inside not in changed:
            continue
        if inside not in folders:
            folders[inside] = PhotoFolder.read(root, f"{inside}/" if inside else "")
        if not sidecars.isdisjoint(folders[inside].sidecars(name)):
            yield photo
