"""The Label page: which photos to label next, suggestions, and saving, for any number of pages at
once.

A photo that one page shows is not given to another page until that page is silent for some minutes.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from m1clip.errors import UserError
from m1clip.formatting import one_line
from m1clip.search.labels import (
    LABELS_TO_TRAIN,
    Change,
    Label,
    Labels,
    can_be_named,
    choose_split,
    split_counts,
)
from m1clip.search.order import NEAR_DUPLICATE, ORDER_SAMPLE, LabelOrder, around_mean, uncertainty
from m1clip.search.query import Index
from m1clip.search.results import Photo
from m1clip.search.suggest import Suggester, own_words
from m1clip.training.learning_curve import MIN_LABELS, learning_curve
from m1clip.web.new_captions import NewCaptions

QUEUE_LENGTH = 24  # photos that a page gets at a time
MAX_QUEUE = 60
SUGGESTIONS = 9  # one for each digit key
RESERVED_SECONDS = 180.0  # a page that is silent for longer has been closed
MAX_PAGES = 64
MAX_CHANGED = 100  # photos that are labelled together
SIMILAR = 24  # photos that are shown as similar to one
ORDER_SEED = 0
REORDER_SECONDS = 30.0  # between two orders while photos are being indexed
LABELS_SHOWN = 24  # labelled photos that can be corrected
UNSURE_WEIGHT = 1.0  # additional weight of the photo that the model is most unsure of
CURVE_STEP = 20  # labels after which the learning curve is computed again
MORE_LABELS = (100, 200)  # for which the gain is predicted
MAX_EQUAL = 0.8  # fraction of labels with the same caption, above which the page warns
MIN_FOR_WARNING = 10  # labels
NEW_WORDS = 16  # own words that are encoded with one request, as a request should be fast


class Queue:
    """The order of an index, for one state of it: a sample of the photos, and what it covers
    already.
    """

    def __init__(self, index: Index, suggester: Suggester) -> None:
        index.refresh()
        self.version = index.version
        self._made = time.monotonic()
        vectors = index.vectors
        chosen = np.arange(len(vectors))
        if len(vectors) > ORDER_SAMPLE:
            rng = np.random.default_rng(ORDER_SEED)
            chosen = np.sort(rng.choice(len(vectors), ORDER_SAMPLE, replace=False))
        photos = [photo for photo in index.photos_at(chosen) if can_be_named(photo.path)]
        self.photos = photos
        self.vectors = _rows(index, photos)
        weights = 1 + UNSURE_WEIGHT * uncertainty(self.vectors, suggester.vectors)
        self.order = LabelOrder(self.vectors, weights) if photos else None

    def is_outdated(self, index: Index) -> bool:
        """Whether photos were added or removed since.

        While an indexer runs, not with every photo.
        """
        old = time.monotonic() - self._made > REORDER_SECONDS
        return self.version != index.version and (old or index.progress() is None)

    def cover(self, vectors: np.ndarray) -> None:
        """Choose no photo that is like one of these."""
        if self.order is not None and len(vectors):
            self.order.add(vectors)

    def next(self) -> tuple[Photo, np.ndarray] | None:
        """The next photo, and its vector."""
        index = None if self.order is None else self.order.next()
        return None if index is None else (self.photos[index], self.vectors[index])


class LabelPage:
    """Answers the requests of the Label page; `opened` returns the index."""

    def __init__(self, opened: Callable[[], Index]) -> None:
        self._opened = opened
        self._lock = threading.RLock()  # the order of photos is one for all pages
        self._index: Index | None = None
        self._labels: Labels | None = None
        self._suggester: Suggester | None = None
        self._queue: Queue | None = None
        self._ahead: list[tuple[Photo, np.ndarray]] = []  # chosen, but not shown by any page now
        self._reserved: dict[str, tuple[float, dict[int, tuple[Photo, np.ndarray]]]] = {}
        self._known: tuple[tuple[int, ...], dict[str, Label], set[bytes]] | None = None
        self._curve: tuple[int, list[str]] = 0, []  # what more labels add, with so many labels
        self._new_captions: NewCaptions | None = None
        self._ordered: set[str] = set()  # labelled photos that the order has counted as covered

    def labels(self) -> Labels:
        """The labels of the index that is open."""
        self._refresh()
        assert self._labels is not None
        return self._labels

    def _refresh(self) -> Index:
        """The index; what was computed for another index or an older state of it is forgotten."""
        index = self._opened()
        with self._lock:
            if index is not self._index:
                if self._labels is None or self._labels.root != index.root:
                    self._labels = Labels(index.root, index.folder)
                    self._new_captions = NewCaptions(self._labels)
                self._index, self._suggester, self._queue = index, None, None
                self._ahead, self._reserved, self._known = [], {}, None
                self._curve = 0, []
        return index

    def _state(self, index: Index) -> tuple[dict[str, Label], set[bytes]]:
        """(labels by path, contents of skipped photos), read again if a file has changed."""
        assert self._labels is not None
        stamp = self._labels.stamp
        if self._known is None or self._known[0] != stamp:
            self._known = stamp, self._labels.labelled(), self._labels.skipped()
        return self._known[1], self._known[2]

    def _ready(self, index: Index) -> tuple[Queue, Suggester]:
        """The order and the words, made at the first request and when the index has
        changed much.
        """
        if self._suggester is None:
            self._suggester = Suggester(index.encode_texts)
        index.refresh()
        is_outdated = self._queue is None or self._queue.is_outdated(index)
        if is_outdated:
            self._follow_renamed(index)
        assert self._new_captions is not None
        self._new_captions.look(index)
        labels, skipped = self._state(index)
        if self._queue is None or is_outdated:
            self._queue = Queue(index, self._suggester)
            self._ahead, self._reserved, self._ordered = [], {}, set()
            self._queue.cover(_rows(index, list(index.photos_with(skipped).values())))
        added = index.photos_named(labels.keys() - self._ordered)
        self._queue.cover(_rows(index, list(added.values())))
        self._ordered.update(added)
        return self._queue, self._suggester

    def _follow_renamed(self, index: Index) -> None:
        """Move the labels of photos that have another name now."""
        assert self._labels is not None
        labels, _ = self._state(index)
        missing = set(labels) - set(index.photos_named(labels))
        if missing:
            contents = {
                path: digest for path, digest in self._labels.contents().items() if path in missing
            }
            there = index.photos_with(contents.values())
            names = {
                path: there[digest].path for path, digest in contents.items() if digest in there
            }
            self._labels.follow(names)

    def queue(self, values: dict[str, str]) -> dict[str, Any]:
        """The photos that a page should label next, with suggestions; they are reserved for it."""
        page = values.get("page", "")[:64]
        count = _number(values.get("count", ""), QUEUE_LENGTH, MAX_QUEUE)
        index = self._refresh()
        with self._lock:
            queue, suggester = self._ready(index)
            labels, skipped = self._state(index)
            suggester.add(self._new_words(labels))
            held = self._held_by(page)
            done = {
                id_
                for id_, (photo, _) in held.items()
                if photo.path in labels or photo.sha256 in skipped
            }
            for id_ in done:
                del held[id_]
            while len(held) < count:
                candidate = self._ahead.pop(0) if self._ahead else queue.next()
                if candidate is None:
                    break
                if candidate[0].path not in labels and candidate[0].sha256 not in skipped:
                    held[candidate[0].id] = candidate
            shown = list(held.values())[:count]
            return {
                "photos": [
                    _card(photo, Label(()), suggester.suggest(vector, SUGGESTIONS))
                    for photo, vector in shown
                ],
                **self._progress(index, labels),
            }

    def similar(self, values: dict[str, str]) -> dict[str, Any]:
        """Photos without a label that are similar to one, to label them together."""
        index = self._refresh()
        photo = index.photo(_number(values.get("id", ""), -1, 2**62))
        with self._lock:
            _, suggester = self._ready(index)
            labels, skipped = self._state(index)
        results = index.search(like=[photo.id], k=2 * SIMILAR, collapse=False)
        named = index.photos_named([result.path for result in results])
        near = [
            named[result.path]
            for result in results
            if result.path in named and result.id != photo.id
        ]
        new = [
            similar
            for similar in near
            if similar.path not in labels
            and similar.sha256 not in skipped
            and can_be_named(similar.path)
        ][:SIMILAR]
        vectors = _rows(index, new)
        return {
            "photos": [
                _card(new_photo, Label(()), suggester.suggest(vector, SUGGESTIONS))
                for new_photo, vector in zip(new, vectors, strict=True)
            ]
        }

    def labelled(self, values: dict[str, str]) -> dict[str, Any]:
        """The labelled photos, the newest in the table first, to look at or correct them."""
        index = self._refresh()
        with self._lock:
            _, suggester = self._ready(index)
            labels, _ = self._state(index)
        newest = list(labels)[: -LABELS_SHOWN - 1 : -1]
        named = index.photos_named(newest)
        photos = [named[path] for path in newest if path in named]
        return {
            "photos": [
                _card(photo, labels[photo.path], suggester.suggest(vector, SUGGESTIONS))
                for photo, vector in zip(photos, _rows(index, photos), strict=True)
            ]
        }

    def progress(self, values: dict[str, str]) -> dict[str, Any]:
        """How many photos have a label, and what for."""
        index = self._refresh()
        with self._lock:
            return self._progress(index, self._state(index)[0])

    def save(self, data: bytes) -> dict[str, Any]:
        """Save the captions of some photos, or that they were skipped."""
        versions, captions, skip, page = _parse_request(data)
        index = self._refresh()
        with self._lock:
            assert self._labels is not None
            photos = [index.photo(id_) for id_, _ in versions]
            group = self._split_of_group(index, photos)
            changes = [
                Change(photo.path, photo.sha256, version, captions, skip, group)
                for photo, (_, version) in zip(photos, versions, strict=True)
            ]
            outcomes = self._labels.change(changes)
            saved = [
                photo
                for photo, outcome in zip(photos, outcomes, strict=True)
                if not outcome.conflict
            ]
            if self._queue is not None and (captions or skip):
                self._queue.cover(_rows(index, saved))
            self._held_by(page)
            labels, _ = self._state(index)
            notes = [self._missing(photo) for photo in photos]
            return {
                "photos": [
                    {"id": photo.id, **_fields(outcome.label), "conflict": outcome.conflict}
                    for photo, outcome in zip(photos, outcomes, strict=True)
                ],
                "note": next(filter(None, notes), ""),
                **self._progress(index, labels),
            }

    def _missing(self, photo: Photo) -> str:
        """What to tell about a photo that was deleted or renamed while it was labelled."""
        assert self._labels is not None
        if (self._labels.root / photo.path).is_file():
            return ""
        return (
            f"{one_line(photo.path)} is no longer there. Its label is saved, and follows the photo"
            " to its new name when the folder is indexed again."
        )

    def _split_of_group(self, index: Index, photos: Sequence[Photo]) -> str | None:
        """One split for photos that are labelled together, and for near-duplicates of labelled
        photos.

        Otherwise the model would be tested on photos that it was trained on in all but name.
        """
        labels, _ = self._state(index)
        mean = index.library_stats[0]
        vectors = around_mean(_rows(index, photos), mean)
        done = list(index.photos_named(labels).values())
        if done and len(photos):
            labelled = around_mean(_rows(index, done), mean)
            similarity = (labelled @ vectors.T).max(axis=1)
            nearest = int(similarity.argmax())
            if similarity[nearest] >= NEAR_DUPLICATE:
                return labels[done[nearest].path].split or None
        if len(photos) > 1:
            return choose_split(photos[0].sha256, split_counts(labels.values()))
        return None

    def _new_words(self, labels: dict[str, Label]) -> list[str]:
        words = own_words(text for label in labels.values() for text in label.captions)
        return words[:NEW_WORDS]

    def _held_by(self, page: str) -> dict[int, tuple[Photo, np.ndarray]]:
        """The photos reserved for a page.

        Those of pages that were closed go to the next page that asks.
        """
        now = time.monotonic()
        for key, (last_seen, held) in list(self._reserved.items()):
            if key != page and (
                now - last_seen > RESERVED_SECONDS or len(self._reserved) > MAX_PAGES
            ):
                self._ahead = [*held.values(), *self._ahead]
                del self._reserved[key]
        _, held = self._reserved.get(page, (now, {}))
        self._reserved[page] = now, held
        return held

    def _progress(self, index: Index, labels: dict[str, Label]) -> dict[str, Any]:
        held_out = sum(label.split == "test" for label in labels.values())
        return {
            "labelled": len(labels),
            "from_metadata": sum(label.from_metadata for label in labels.values()),
            "held_out": held_out,
            "needed": max(0, LABELS_TO_TRAIN - len(labels)),
            "least": LABELS_TO_TRAIN,
            "images": len(index),
            "table": one_line(str(self.labels().path)),
            "more": self._more_labels(index, labels),
            "equal": _most_common_caption(labels),
        }

    def _more_labels(self, index: Index, labels: dict[str, Label]) -> list[str]:
        """What more labels are predicted to add to the model in use.

        Computed in a thread, now and then.
        """
        count = len(labels)
        if count < MIN_LABELS or abs(count - self._curve[0]) < CURVE_STEP:
            return self._curve[1] if count >= MIN_LABELS else []
        self._curve = count, self._curve[1]

        def compute() -> None:
            with contextlib.suppress(UserError):  # too few of the labelled photos are indexed
                photos = list(index.photos_named(labels).values())
                texts = [
                    (text, at)
                    for at, photo in enumerate(photos)
                    for text in labels[photo.path].captions
                ]
                vectors = index.encode_texts([text for text, _ in texts])
                rows = np.array([at for _, at in texts])
                curve = learning_curve(
                    _rows(index, photos), vectors, rows, aligned=True, more=MORE_LABELS
                )
                self._curve = count, [str(gain) for gain in curve.gains]

        threading.Thread(target=compute, daemon=True).start()
        return self._curve[1]


def _most_common_caption(labels: dict[str, Label]) -> dict[str, Any] | None:
    """The caption that nearly all labels have, and how many; None if there is none."""
    counts = Counter(
        caption
        for label in labels.values()
        for caption in {text.lower() for text in label.captions}
    )
    for caption, count in counts.most_common(1):
        if len(labels) >= MIN_FOR_WARNING and count > MAX_EQUAL * len(labels):
            return {"caption": one_line(caption[:80]), "photos": count}
    return None


def _rows(index: Index, photos: Sequence[Photo]) -> np.ndarray:
    """(n, dim) float32 vectors of photos."""
    return index.vectors[[photo.row for photo in photos]].astype(np.float32).reshape(-1, index.dim)


def _fields(label: Label) -> dict[str, Any]:
    return {"captions": list(label.captions), "skipped": label.skipped, "version": label.version}


def _card(photo: Photo, label: Label, suggestions: list[str]) -> dict[str, Any]:
    """What the page shows of a photo."""
    return {
        "id": photo.id,
        "path": one_line(photo.path),
        "content": photo.sha256[:6].hex(),  # in the address of the image, which a browser keeps
        "suggestions": suggestions,
        **_fields(label),
    }


def _number(text: str, default: int, high: int) -> int:
    return min(int(text), high) if text.isascii() and text.isdigit() and len(text) < 19 else default


def _parse_request(data: bytes) -> tuple[list[tuple[int, str]], tuple[str, ...], bool, str]:
    """(photos with the version of their label, captions, whether to skip, key of the page) of a
    request.
    """
    try:
        body = json.loads(data)
    except (ValueError, RecursionError):
        body = None
    match body:
        case {"photos": [_, *_] as photos, "captions": list(captions), "page": str(page)} if (
            len(photos) <= MAX_CHANGED
            and all(isinstance(text, str) for text in captions)
            and all(_is_photo(photo) for photo in photos)
        ):
            versions = {photo["id"]: photo["version"] for photo in photos}
            return list(versions.items()), tuple(captions), body.get("skip") is True, page[:64]
    raise UserError(
        "a label is {photos: [{id, version}], captions, page}: at most "
        f"{MAX_CHANGED} photos, and a list of texts"
    )


def _is_photo(value: Any) -> bool:
    match value:
        case {"id": id_, "version": str()}:
            return type(id_) is int and 0 <= id_ < 2**63
    return False
