"""`m1clip serve` and `m1clip monitor --web`: a local page for search and runs, served by the
standard library.

The page asks for new values of runs every second. This module reads runs only; requests about
photos go to `photos`.
"""

import contextlib
import hashlib
import hmac
import json
import os
import re
import socket
import sys
import threading
import time
import webbrowser
from collections import OrderedDict
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import parse_qsl

from m1clip.analyses import ANALYSES
from m1clip.epochs import PHASE_HEAD
from m1clip.errors import UserError
from m1clip.formatting import one_line
from m1clip.monitor.diagnostics import describe, diagnose
from m1clip.monitor.history import History, read_snapshot, read_thumbnail, snapshot_steps
from m1clip.monitor.resources import page_values
from m1clip.monitor.status import find_runs, is_run, require_run, summary
from m1clip.runlog import json_safe, plotted_fields

SCAN_SECONDS = 2.0  # between two searches for new runs
DEFAULT_RUNS = Path("runs")  # may not exist yet: the first run creates it


class Store:
    """Follows all runs in some folders, for any number of pages at a time."""

    def __init__(self, folders: Sequence[Path]) -> None:
        for folder in folders:
            if not folder.is_dir() and folder != DEFAULT_RUNS:
                require_run(folder)
        self._folders = list(folders)
        self._lock = threading.Lock()
        self._runs: dict[str, History] = {}
        self._scanned = 0.0
        self.update({})

    def folder(self, key: str) -> Path | None:
        history = self._runs.get(key)
        return history.run if history else None

    def update(self, cursors: dict[str, str]) -> dict[str, Any]:
        """All runs, the newest last, and the rows after a cursor of the runs (key -> cursor) that a
        page shows.
        """
        with self._lock:
            if time.monotonic() - self._scanned > SCAN_SECONDS or not self._runs:
                self._scanned = time.monotonic()
                for run in (run for folder in self._folders for run in find_runs(folder)):
                    self._runs.setdefault(key_of(run), History(run))
            runs = {
                key: history.poll() for key, history in self._runs.items() if is_run(history.run)
            }
            return {
                "runs": [{"id": key, **details(history)} for key, history in runs.items()],
                "rows": [
                    {"id": key, **rows(runs[key], cursor)}
                    for key, cursor in cursors.items()
                    if key in runs
                ],
            }


def details(history: History) -> dict[str, Any]:
    """What the page shows of a run besides its curves."""
    values = summary(history)
    return {
        **values,
        "name": history.name,
        "metric_name": history.metric,
        "last": history.newest or history.steps.last or {},
        "diagnostics": diagnose(history, time.time(), values["state"]),
        "events": [
            [event.get("time"), describe(event)]
            for event in reversed(list(history.latest.events)[-12:])
        ],
        "memory": {
            name: value
            for name, value in history.memory.items()
            if name not in ("v", "kind", "time")
        },
        "resources": page_values(history),
        "snapshots": list(snapshot_steps(history.run)),
    }


def rows(history: History, cursor: str) -> dict[str, Any]:
    """The rows after a cursor ("generation.order").

    All of them if earlier ones have changed since.
    """
    generation, _, order = cursor.partition(".")
    reset = generation != str(history.generation) or not NUMBER.fullmatch(order)
    after = -1 if reset else int(order)
    curves = {
        "steps": history.steps,
        "evaluations": history.evaluations,
        "analyses": history.analyses,
    }
    new = {kind: [row for row in curve if row["order"] > after] for kind, curve in curves.items()}
    changed = reset or after < history.records
    return {
        "cursor": f"{history.generation}.{history.records}",
        "reset": reset,
        **new,
        **({"tables": tables(history)} if changed else {}),
    }


def tables(history: History) -> dict[str, Any]:
    """The tables of a run: head and rows as text."""
    run_tables = history.tables()
    return {
        "epochs": {"head": run_tables.epoch_head, "rows": run_tables.epoch_cells},
        "phases": {"head": PHASE_HEAD, "rows": run_tables.phase_cells},
    }


# What the page needs of the entries of the tables.
STEP_FIELD_NAMES = ("name", "title", "factor", "unit", "chance", "about_machine")
ANALYSIS_NAMES = (
    "name",
    "record_kind",
    "path",
    "title",
    "label",
    "meaning",
    "shown_as",
    "has_rates",
    "factor",
    "unit",
)


def fields_script() -> bytes:
    """The script that gives the page the fields of the steps and the analyses, in the order of
    their plots.
    """
    fields = [_values(field, STEP_FIELD_NAMES) for field in plotted_fields("step")]
    analyses = [_values(analysis, ANALYSIS_NAMES) for analysis in ANALYSES.values()]
    lines = (
        '"use strict";',
        f"const STEP_FIELDS = {json.dumps(fields)};",
        f"const ANALYSES = {json.dumps(analyses)};",
    )
    return "".join(f"{line}\n" for line in lines).encode()


def _values(entry: object, names: Sequence[str]) -> dict[str, Any]:
    return {name: getattr(entry, name) for name in names}


def key_of(run: Path) -> str:
    """A stable key of a folder, so that an open page finds its run again after a server restart."""
    return hashlib.blake2s(
        str(run.resolve()).encode("utf-8", "surrogateescape"), digest_size=6
    ).hexdigest()


HOST = "127.0.0.1"
HOSTS = ("127.0.0.1", "localhost", "[::1]")
PORT = re.compile(r":\d+$")
NUMBER = re.compile(r"[0-9]{1,12}")
INDEX_PAGE, SEARCH_PAGE, LABEL_PAGE = "index.html", "search.html", "label.html"
CONTENT_TYPES = {"html": "text/html", "js": "text/javascript", "css": "text/css"}
SCRIPTS = (
    "common.js",
    "app.js",
    "plots.js",
    "views.js",
    "search.js",
    "label.js",
    "train.js",
    "uplot.js",
)
FIELDS_SCRIPT = "fields.js"  # written from the table of logged fields
FILES = (
    INDEX_PAGE,
    SEARCH_PAGE,
    LABEL_PAGE,
    *SCRIPTS,
    "style.css",
    "search.css",
    "label.css",
    "uplot.css",
)
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
    "Connection": "close",
}
IDLE_SECONDS = 10.0  # a connection that sends or takes nothing for longer is closed
CONNECTIONS = 128  # each with a thread; macOS allows 256 open files
UPLOAD_SECONDS = 60.0  # for the body of a request
PARALLEL_UPLOADS = 4  # images received at a time
MAX_BODY = 2**18  # bytes of a request that contains no image, such as a mark or a label
FREE_SECONDS = 0.01  # to wait for a free thread before the oldest connection is closed


class Requests(Protocol):
    """What answers requests about photos: (status, type, body), or None for not found."""

    token: str  # of requests that change something
    max_upload: int  # bytes of an image
    upload_path: str  # of requests that contain an image

    def get(self, path: str, values: dict[str, str]) -> tuple[int, str, bytes] | None: ...

    def post(self, path: str, data: bytes) -> tuple[int, str, bytes] | None: ...


class Server(ThreadingHTTPServer):
    """Serves runs and photos, with a bounded number of connections: above it, a new one replaces
    the oldest.
    """

    daemon_threads = True
    request_queue_size = CONNECTIONS

    def __init__(self, store: Store, port: int, photos: Requests | None = None) -> None:
        self.store, self.photos = store, photos
        self.uploads = threading.Semaphore(PARALLEL_UPLOADS)
        self._free = threading.Semaphore(CONNECTIONS)
        self._open: OrderedDict[socket.socket, None] = OrderedDict()
        super().__init__((HOST, port), Handler)

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.server_address[1]}/"

    def process_request(self, request: Any, client_address: Any) -> None:
        while not self._free.acquire(timeout=FREE_SECONDS):
            with contextlib.suppress(KeyError, OSError):  # none is open, or it was closed just now
                self._open.popitem(last=False)[0].shutdown(socket.SHUT_RDWR)
        self._open[request] = None
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._open.pop(request, None)
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print unexpected errors only; that a page was closed is not one."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


class Handler(BaseHTTPRequestHandler):
    """Every response has the same strict headers; POST needs the token of the page."""

    server: Server
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "m1clip", ""
    timeout = IDLE_SECONDS

    def do_GET(self) -> None:
        """Answer a request that changes nothing."""
        self._answer(self._get)

    def do_POST(self) -> None:
        """Answer a request that changes something or contains an image."""
        self._answer(self._post)

    def _answer(self, work: Callable[[], None]) -> None:
        """Answer an unexpected error too; `handle_error` prints it."""
        try:
            work()
        except OSError:  # the page was closed
            raise
        except Exception as error:
            message = one_line(f"{type(error).__name__}: {error}")
            self._send_json({"error": f"internal error ({message[:200]}); please report it"}, 500)
            raise

    def _get(self) -> None:
        if not self._allowed():
            self._send(
                403, "text/plain", b"this page is only available at 127.0.0.1 and localhost\n"
            )
            return
        path, _, query = self.path.partition("?")  # unlike urlsplit, accepts anything
        values, store, photos = dict(parse_qsl(query)), self.server.store, self.server.photos
        home = INDEX_PAGE if photos is None else SEARCH_PAGE
        pages = {"/": home, "/runs": INDEX_PAGE, "/label": LABEL_PAGE}
        name = pages.get(path, path.removeprefix("/"))
        if name in FILES:
            parts = ("head.html", name) if name.endswith(".html") else (name,)
            data = b"".join(
                (resources.files("m1clip.web") / "page" / part).read_bytes() for part in parts
            )
            self._send(200, f"{CONTENT_TYPES[name.rpartition('.')[2]]}; charset=utf-8", data)
            return
        if name == FIELDS_SCRIPT:
            self._send(200, f"{CONTENT_TYPES['js']}; charset=utf-8", fields_script())
            return
        if path == "/api/update":
            self._send_json({"search": photos is not None, **store.update(values)})
            return
        if photos is not None and (answer := photos.get(path, values)) is not None:
            self._send(*answer)
            return
        run, index = store.folder(values.get("run", "")), values.get("index", "")
        if run is not None and NUMBER.fullmatch(index):
            if path == "/api/snapshot" and (snapshot := read_snapshot(run, int(index))) is not None:
                self._send_json(snapshot)
                return
            if path == "/thumbnail" and (image := read_thumbnail(run, int(index))) is not None:
                self._send(200, "image/jpeg", image)
                return
        self._send(404, "text/plain", b"not found\n")

    def _post(self) -> None:
        photos, token = (
            self.server.photos,
            self.headers.get("X-M1clip-Token", "").encode("utf-8", "replace"),
        )
        if (
            photos is None
            or not self._allowed()
            or not hmac.compare_digest(token, photos.token.encode())
        ):
            self._send(403, "text/plain", b"reload the page\n")
            return
        length = self.headers.get("Content-Length", "")
        is_upload = self.path == photos.upload_path
        limit = photos.max_upload if is_upload else MAX_BODY
        if not NUMBER.fullmatch(length) or int(length) > limit:
            self._send_json({"error": f"at most {limit:,} bytes"}, 413)
            return
        # Only images wait for each other: slow uploads must not prevent marks.
        if is_upload and not self.server.uploads.acquire(blocking=False):
            self._send_json({"error": "too many uploads at a time; try again"}, 503)
            return
        try:
            data = self._body(int(length))
            answer = None if data is None else photos.post(self.path, data)
        finally:
            if is_upload:
                self.server.uploads.release()
        self._send(*(answer or (404, "text/plain", b"not found\n")))

    def _body(self, length: int) -> bytes | None:
        """The body of a request, or None if it is slow or ends too early."""
        data, deadline = bytearray(), time.monotonic() + UPLOAD_SECONDS
        while len(data) < length:
            part = self.rfile.read1(min(length - len(data), 2**16))
            if not part or time.monotonic() > deadline:
                return None
            data += part
        return bytes(data)

    def _allowed(self) -> bool:
        """Reject foreign host names (DNS rebinding) and scripts of other sites, also of this
        machine.

        The port of `Host` may be another than ours, as in a tunnel over ssh, but `Origin` must be
        the same address.
        """
        host = self.headers.get("Host", "")
        own_host = PORT.sub("", host) in HOSTS
        own_origin = self.headers.get("Origin", f"http://{host}") == f"http://{host}"
        site, mode = (
            self.headers.get("Sec-Fetch-Site", "none"),
            self.headers.get("Sec-Fetch-Mode", ""),
        )
        return own_host and own_origin and (site in ("none", "same-origin") or mode == "navigate")

    def _send_json(self, value: Any, code: int = 200) -> None:
        self._send(
            code, "application/json", json.dumps(json_safe(value), separators=(",", ":")).encode()
        )

    def _send(self, code: int, kind: str, body: bytes) -> None:
        self.send_response(code)
        # A photo of an id may be another after indexing: the page adds a version to the address.
        keep = (
            {"Cache-Control": "private, max-age=86400"}
            if code == 200 and self.path.startswith("/photo")
            else {}
        )
        for name, value in {
            "Content-Type": kind,
            "Content-Length": str(len(body)),
            **HEADERS,
            **keep,
        }.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Do not log requests."""


def serve(
    folders: Sequence[Path], port: int, browser: bool, photos: Requests | None = None
) -> None:
    """Serve until Ctrl-C."""
    store = Store(folders)
    if photos is None and not store.update({})["runs"]:
        print(
            f"{one_line(', '.join(map(str, folders)))}: no runs yet; they appear on the page when"
            " they start"
        )
    try:
        server = Server(store, port, photos)
    except OSError as error:
        raise UserError(
            f"--port {port}: {error.strerror}; is it served already? --port 0 picks a free port"
        ) from None
    command, note = (
        ("monitor", "the page, the run continues") if photos is None else ("serve", "it")
    )
    print(f"{command:10} {server.url}   (on this machine only; Ctrl-C closes {note})", flush=True)
    # Over ssh a browser would open on the wrong machine, or as text in this terminal.
    if browser and (
        sys.platform == "darwin" or os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
    ):
        with contextlib.suppress(webbrowser.Error):
            webbrowser.open(server.url)
    with contextlib.suppress(KeyboardInterrupt):
        server.serve_forever()
    server.server_close()
