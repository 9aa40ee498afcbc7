"""Search for `m1clip serve`: results, thumbnails, uploads and marks of one index.

Files by id, never by path.
"""

import base64
import contextlib
import hashlib
import io
import json
import os
import re
import secrets
import sqlite3
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from m1clip.data.images import BadImage, decode
from m1clip.errors import UserError
from m1clip.formatting import one_line
from m1clip.io import read_beneath, read_small, write_beneath
from m1clip.search.database import READ_SECONDS, IndexBusy
from m1clip.search.location import DATABASE, thumbnail
from m1clip.search.query import Index
from m1clip.search.results import Copy, Filter, Result, Results
from m1clip.web.label import LabelPage
from m1clip.web.server import DEFAULT_RUNS
from m1clip.web.training import TrainPage, run_or_model

THUMBNAIL, LARGE_SIDE, PREVIEW = 320, 1600, 96  # pixels of the longer side
MAX_FILE = 2**28  # bytes of an image that is shown
MAX_UPLOAD = 2**25  # bytes
MAX_RESULTS = 300
MAX_TEXT = 1000  # characters
MAX_ID = 2**63 - 1  # the largest integer of SQLite
MAX_GROUPS = 100  # of duplicates that are listed
UPLOAD = "/api/upload"  # the path of requests that contain an image
REMEMBERED_UPLOADS = 32  # images to search by that are remembered
DECODERS = 2  # images decoded at a time: one may take 192 MiB
NUMBER = re.compile(r"[0-9]{1,12}")
NOT = re.compile(r'(?:^|\s)-(?:"([^"]+)"|(\w\S*))')  # beach -people -"red car"

Answer = tuple[int, str, bytes]  # status, type, body


class Photos:
    """Answers the requests of the search page.

    The index may be made, changed or replaced while it is open.
    """

    def __init__(
        self, folder: Path | None, model: Path | None = None, runs: Path | None = None
    ) -> None:
        self.token = secrets.token_urlsafe(24)
        self.max_upload = MAX_UPLOAD
        self.upload_path = UPLOAD
        self._folder, self._model = folder, model
        self._opening, self._uploading = threading.Lock(), threading.Lock()
        self._decoders = threading.Semaphore(DECODERS)
        self._index: Index | None = None
        self._inode = 0
        self._folders: tuple[int, list[str], int] = (-1, [], 0)
        self._uploads: OrderedDict[str, tuple[str, np.ndarray]] = OrderedDict()
        self._label_page = LabelPage(self._opened)
        self._train_page = TrainPage(
            self._opened, self._label_page.labels, runs or DEFAULT_RUNS, self._use_model
        )

    def _opened(self) -> Index:
        """The index. It is opened by one thread at a time; the others wait for a limited time."""
        index = self._index
        if index is not None and self._is_current(index):
            return index
        if not self._opening.acquire(timeout=READ_SECONDS):
            raise IndexBusy("the index is being opened; try again")
        try:
            index = self._index
            if index is None or not self._is_current(index):
                index = Index(self._folder, self._model)
                self._inode = _inode(index.folder)
                self._folders = (-1, [], 0)  # its versions may be those of the index before it
                self._index = index
            return index
        finally:
            self._opening.release()

    def _is_current(self, index: Index) -> bool:
        return not index.outdated and _inode(index.folder) == self._inode

    def _use_model(self, model: str) -> None:
        """Search with another model from the next request on."""
        if self._model is not None:
            self._model = Path(model)
        self._index = None

    def warm_up(self) -> None:
        """Load the model, so that the first search is fast."""
        with contextlib.suppress(UserError, OSError, sqlite3.Error):
            self._opened().search("a photo", 1)

    def get(self, path: str, values: dict[str, str]) -> Answer | None:
        """The answer to a GET request; None if there is nothing at this path."""
        routes: dict[str, Callable[[dict[str, str]], Any]] = {
            "/api/library": self._library,
            "/api/search": self._search,
            "/api/duplicates": self._duplicates,
            "/api/label": self._label_page.progress,
            "/api/label/queue": self._label_page.queue,
            "/api/label/similar": self._label_page.similar,
            "/api/label/labelled": self._label_page.labelled,
            "/api/train": self._train_page.status,
        }
        if path in routes:
            return _answer(lambda: routes[path](values))
        if path not in ("/photo", "/photo/small") or not NUMBER.fullmatch(values.get("id", "")):
            return None
        try:
            return 200, "image/jpeg", self._photo(int(values["id"]), path == "/photo/small")
        except (UserError, BadImage, OSError, sqlite3.Error):
            return None

    def post(self, path: str, data: bytes) -> Answer | None:
        """The answer to a POST request whose token was valid."""
        routes: dict[str, Callable[[bytes], Any]] = {
            UPLOAD: self._upload,
            "/api/mark": self._mark,
            "/api/label": self._label_page.save,
            "/api/train/start": self._train_page.start,
            "/api/train/stop": self._train_page.stop,
            "/api/train/switch": self._train_page.switch,
            "/api/train/back": self._train_page.back,
        }
        return _answer(lambda: routes[path](data)) if path in routes else None

    def _library(self, values: dict[str, str]) -> dict[str, Any]:
        index = self._opened()
        index.refresh()
        if self._folders[0] != index.version:
            self._folders = index.version, index.folders(), len(index)
        _, folders, images = self._folders
        return {
            "token": self.token,
            "folder": one_line(str(index.root)),
            "model": one_line(run_or_model(index.model_path)),
            "images": images,
            "folders": folders,
            "words": list(index.concepts.names()),
            "progress": index.progress(),
            "max_upload": MAX_UPLOAD,
        }

    def _search(self, values: dict[str, str]) -> dict[str, Any]:
        began = time.perf_counter()
        typed = " ".join(values.get("text", "")[:MAX_TEXT].split())
        exclude = [quoted or word for quoted, word in NOT.findall(typed)]
        text = " ".join(NOT.sub(" ", typed).split())
        names = ("since", "until", "under", "orientation")
        since, until, subfolder, orientation = (values.get(name) or None for name in names)
        if orientation not in (None, "landscape", "portrait"):
            raise UserError(f"orientation {orientation}: give landscape or portrait")
        where = Filter(since, until, subfolder, orientation)  # type: ignore[arg-type]
        count = min(
            int(values["count"]) if NUMBER.fullmatch(values.get("count", "")) else 60, MAX_RESULTS
        )
        like: list[Any] = [int(values["like"])] if NUMBER.fullmatch(values.get("like", "")) else []
        index = self._opened()
        if key := values.get("upload"):
            model, vector = self._uploads.get(key, ("", None))
            if model != index.model_sha256:  # or the index has the vectors of another model now
                raise UserError("the image to search by is no longer there; drop it again")
            like.append(vector)
        has_query = bool(text or like or exclude)
        if has_query:
            results = index.search(
                (text,) if text else (), count, like=like, exclude=exclude, where=where
            )
        else:
            results = index.newest(count, where)
        marks = index.marks(text, [result.id for result in results.nearest]) if text else {}
        negatives = index.negatives(text, where) if text else []
        # Marked as wrong: listed apart, and always, so that a mark can be removed.
        accepted = Results(
            [result for result in results.nearest if marks.get(result.id) is not False],
            results.searched,
        )
        return {
            "results": [{**_fields(result), "mark": marks.get(result.id)} for result in accepted],
            "wrong": [{**_fields(negative), "mark": False} for negative in negatives],
            "asked": has_query,
            "matches": len(accepted.matches),
            "possible": len(accepted.possible),
            "searched": results.searched,
            "text": text,
            "milliseconds": round(1000 * (time.perf_counter() - began), 1),
        }

    def _duplicates(self, values: dict[str, str]) -> dict[str, Any]:
        groups = self._opened().duplicates()
        shown = [[_fields(copy) for copy in group] for group in groups[:MAX_GROUPS]]
        return {"groups": shown, "total": len(groups)}

    def _photo(self, id_: int, small: bool) -> bytes:
        """A JPEG of an indexed file, upright and without EXIF data.

        Small ones are kept on disk, by content.
        """
        index = self._index
        if index is None:
            raise UserError("no index is open")
        path, sha256 = index.file(id_), index.sha256(id_)
        cached = thumbnail(sha256)
        if small:
            with contextlib.suppress(OSError):
                return read_beneath(index.folder, cached)
        with self._decoders:  # reading too: many large files at a time would not fit into memory
            data = read_small(path, MAX_FILE, inside=index.root)
            jpeg = _jpeg(data, THUMBNAIL if small else LARGE_SIDE, one_line(path.name))
        # Else the file has changed and will be indexed again.
        if small and hashlib.sha256(data).digest() == sha256:
            with contextlib.suppress(OSError):  # a full or read-only disk, or a link in the index
                write_beneath(index.folder, cached, jpeg)
        return jpeg

    def _upload(self, data: bytes) -> dict[str, str]:
        with self._decoders:
            image = decode(data, LARGE_SIDE, "the dropped file")
        index = self._opened()
        vector = index.image_vector(image)
        key = secrets.token_urlsafe(9)
        with self._uploading:
            self._uploads[key] = index.model_sha256, vector
            while len(self._uploads) > REMEMBERED_UPLOADS:
                self._uploads.popitem(last=False)
        image.thumbnail((PREVIEW, PREVIEW))
        return {
            "upload": key,
            "preview": "data:image/jpeg;base64," + base64.b64encode(_encode_jpeg(image)).decode(),
        }

    def _mark(self, data: bytes) -> dict[str, Any]:
        try:
            body = json.loads(data)
        except (ValueError, RecursionError):
            body = None
        match body:
            case {"text": str(text), "id": id_, "positive": True | False | None as positive} if (
                0 < len(text) <= MAX_TEXT
                and _encodable(text)
                and type(id_) is int
                and 0 <= id_ <= MAX_ID
            ):
                self._opened().mark(text, id_, positive)
                return {}
        raise UserError(
            "a mark is {text, id, positive}: a text, the number of a photo, and true, false or null"
        )


def _encodable(text: str) -> bool:
    """Whether a text is valid UTF-8: JSON may contain half of a surrogate pair."""
    return not any("\ud800" <= char <= "\udfff" for char in text)


def _answer(work: Callable[[], Any]) -> Answer:
    try:
        code, value = 200, work()
    except IndexBusy as error:
        code, value = 503, {"error": one_line(str(error))}
    except (UserError, BadImage) as error:
        code, value = 400, {"error": one_line(str(error))}
    except (OSError, OverflowError, UnicodeError, sqlite3.Error) as error:
        code, value = 500, {"error": one_line(f"the index cannot be read: {error}")}
    return code, "application/json", json.dumps(value, separators=(",", ":")).encode()


def _fields(photo: Result | Copy) -> dict[str, Any]:
    """What the page shows of a photo: not where it is on the disk, and how many copies it has."""
    fields = {name: value for name, value in vars(photo).items() if name != "file"}
    fields["path"] = one_line(photo.path)
    if isinstance(photo, Result):
        fields["copies"] = len(photo.copies)
    return fields


def _inode(index_folder: Path) -> int:
    try:
        return os.stat(index_folder / DATABASE).st_ino
    except OSError:
        return -1


def _jpeg(data: bytes, side: int, where: str) -> bytes:
    image = decode(data, side, where)
    image.thumbnail((side, side), Image.Resampling.LANCZOS)
    return _encode_jpeg(image)


def _encode_jpeg(image: Image.Image) -> bytes:
    stream = io.BytesIO()
    image.save(stream, "JPEG", quality=82)
    return stream.getvalue()
