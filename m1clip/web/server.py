"""`m1clip monitor --web`: a local page with live updates by server-sent events, using the standard library."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import json
import os
import re
import selectors
import socket
import sys
import threading
import time
import webbrowser
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib import resources
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from m1clip.errors import UserError
from m1clip.monitor.diagnostics import describe, diagnose
from m1clip.monitor.history import History, Row, read_snapshot, read_thumbnail, snapshot_steps
from m1clip.monitor.status import elapsed, find_runs, is_run, require_run, seconds_left, status_of
from m1clip.runlog import SELECTION, json_safe

SCAN_SECONDS = 2.0  # between two searches for new runs
DEFAULT = Path("runs")  # may not exist yet: the first run creates it


class Store:
    """Follows all runs in some folders, for any number of pages at a time."""

    def __init__(self, folders: Sequence[Path]) -> None:
        for folder in folders:
            if not folder.is_dir() and folder != DEFAULT:
                require_run(folder)
        self._folders = list(folders)
        self._lock = threading.RLock()
        self._runs: dict[str, History] = {}
        self._scanned = 0.0
        self.refresh()

    def refresh(self) -> None:
        """Find new runs and read new records of all runs."""
        with self._lock:
            if time.monotonic() - self._scanned > SCAN_SECONDS or not self._runs:
                self._scanned = time.monotonic()
                for run in (run for folder in self._folders for run in find_runs(folder)):
                    self._runs.setdefault(key_of(run), History(run))
            for history in self._runs.values():
                history.poll()

    def ids(self) -> list[str]:
        """Every run, the newest last."""
        with self._lock:
            return [key for key, history in self._runs.items() if is_run(history.run)]

    def folder(self, key: str) -> Path | None:
        """The folder of a run."""
        history = self._runs.get(key)
        return history.run if history else None

    def summary(self, key: str) -> dict[str, Any]:
        """Data for the run list and the page header."""
        with self._lock:
            history = self._runs[key]
            status, metric, best = status_of(history), history.metric, history.best() or {}
            return {
                "id": key,
                "name": history.name,
                "path": str(history.run),
                "state": status.state,
                "message": status.message,
                "step": history.step,
                "steps": history.total,
                "seconds_left": seconds_left(history) if status.state == "running" else None,
                "elapsed": elapsed(history),
                "last": history.newest or history.steps.last or {},
                "metric": [metric, SELECTION[metric]],
                "best": {"step": best.get("step"), "value": best.get(metric)},
                "diagnostics": [[each.level, each.message] for each in diagnose(history, time.time(), status.state)],
                "events": [[each.get("time"), describe(each)] for each in reversed(list(history.events)[-12:])],
                "memory": {name: value for name, value in history.memory.items() if name not in ("v", "kind", "time")},
                "snapshots": list(snapshot_steps(history.run)),
            }

    def rows(self, key: str, generation: int, after: dict[str, int]) -> dict[str, Any] | None:
        """Rows of each kind after a step, everything if the generation has changed; None if nothing is new.

        `after` (kind -> step) is updated in place.
        """
        with self._lock:
            history = self._runs[key]
            if history.generation != generation:
                after.clear()
            curves = {"steps": history.steps, "evaluations": history.evaluations, "layers": history.layers}
            new: dict[str, list[Row]] = {kind: curve.after(after.get(kind, -1)) for kind, curve in curves.items()}
            after |= {kind: rows[-1]["step"] for kind, rows in new.items() if rows}
            if history.generation == generation and not any(new.values()):
                return None
            return {"id": key, "generation": history.generation, "reset": history.generation != generation, **new}


def key_of(run: Path) -> str:
    """A stable key of a folder, so that an open page finds its run again after a server restart."""
    return hashlib.blake2s(str(run.resolve()).encode("utf-8", "surrogateescape"), digest_size=6).hexdigest()


HOST = "127.0.0.1"
HOSTS = ("127.0.0.1", "localhost", "[::1]")
PORT = re.compile(r":\d+$")
NUMBER = re.compile(r"[0-9]{1,12}")
INDEX = "index.html"
TYPES = {"js": "text/javascript; charset=utf-8", "css": "text/css; charset=utf-8"}
FILES = ("app.js", "plots.js", "views.js", "uplot.js", "style.css", "uplot.css")
PAGE = {"/": "text/html; charset=utf-8", **{f"/{name}": TYPES[name.rpartition(".")[2]] for name in FILES}}
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
REFRESH = 0.5  # seconds between two reads of the logs
HEARTBEAT = 5.0  # seconds after which a page is sent its runs even if nothing changed
BIG = 4096  # bytes from which a response is compressed
POLL = 0.05  # seconds between two checks of the waiting connections
IDLE = 10.0  # seconds that a connection may wait for a thread, or keep one waiting
WAITING = 128  # connections without a thread; macOS allows 256 open files
THREADS, STREAMS = 32, 24  # concurrent requests, and how many of them may be streams
BUSY = b"too many connections; try again\n"


class Server(HTTPServer):
    """Serves one store. A connection gets a thread once it has sent something, and the number of both is bounded."""

    request_queue_size = WAITING

    def __init__(self, store: Store, port: int) -> None:
        self.store = store
        self.stopped = threading.Event()
        self.threads, self.streams = threading.Semaphore(THREADS), threading.Semaphore(STREAMS)
        self._waiting = selectors.DefaultSelector()  # in the order of arrival
        super().__init__((HOST, port), Handler)

    @property
    def url(self) -> str:
        """The URL of the page."""
        return f"http://{HOST}:{self.server_address[1]}/"

    def serve_forever(self, poll_interval: float = POLL) -> None:
        """Accept connections until `shutdown`."""
        super().serve_forever(poll_interval)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Queue a new connection; if the queue is full, reject the oldest one."""
        waiting = self._waiting.get_map()
        if len(waiting) >= WAITING:
            self._refuse(next(iter(waiting.values())))
        self._waiting.register(request, selectors.EVENT_READ, (time.monotonic() + IDLE, request, client_address))

    def service_actions(self) -> None:
        """Assign threads to connections that have sent data, and reject those that waited too long."""
        if not self._waiting.get_map():
            return
        for key, _ in sorted(self._waiting.select(0), key=lambda ready: ready[0].data[0]):
            if not self.threads.acquire(blocking=False):
                break
            self._waiting.unregister(key.fileobj)
            threading.Thread(target=self._work, args=key.data[1:], daemon=True).start()
        now = time.monotonic()
        for key in [key for key in self._waiting.get_map().values() if key.data[0] < now]:
            self._refuse(key)

    def _work(self, request: Any, client_address: Any) -> None:
        try:
            with contextlib.suppress(OSError, ValueError):  # the page was closed, or the address is invalid
                self.finish_request(request, client_address)
        finally:
            self.shutdown_request(request)
            self.threads.release()

    def _refuse(self, key: selectors.SelectorKey) -> None:
        self._waiting.unregister(key.fileobj)
        request: socket.socket = key.data[1]
        request.setblocking(False)
        with contextlib.suppress(OSError):
            request.recv(1 << 16)  # closing a socket with unread bytes would reset it before the answer is read
        head = f"HTTP/1.1 503 Service Unavailable\r\nContent-Length: {len(BUSY)}\r\nConnection: close\r\n\r\n"
        with contextlib.suppress(OSError):
            request.send(head.encode() + BUSY)
        self.shutdown_request(request)

    def shutdown(self) -> None:
        """Also end open streams."""
        self.stopped.set()
        super().shutdown()

    def server_close(self) -> None:
        """Close waiting connections."""
        for key in list(self._waiting.get_map().values()):
            self._refuse(key)
        self._waiting.close()
        super().server_close()


class Handler(BaseHTTPRequestHandler):
    """GET only; every response has the same strict headers."""

    server: Server
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "m1clip", ""
    timeout = IDLE  # of each read and write

    def do_GET(self) -> None:
        """Handle one request."""
        if not self._allowed():
            self._send(403, "text/plain", b"this page is only available at 127.0.0.1 and localhost\n")
            return
        url = urlsplit(self.path)
        self._answer(url.path, {name: values[-1] for name, values in parse_qs(url.query).items()})

    def _allowed(self) -> bool:
        """Reject foreign host names (DNS rebinding) and scripts of other sites."""
        host = PORT.sub("", self.headers.get("Host", ""))
        origin = self.headers.get("Origin")
        own = origin is None or PORT.sub("", origin.removeprefix("http://")) in HOSTS
        site, mode = self.headers.get("Sec-Fetch-Site", "none"), self.headers.get("Sec-Fetch-Mode", "")
        return host in HOSTS and own and (site in ("none", "same-origin") or mode == "navigate")

    def _answer(self, path: str, query: dict[str, str]) -> None:
        store = self.server.store
        if path in PAGE:
            self._send(200, PAGE[path], (resources.files("m1clip.web") / "page" / (path[1:] or INDEX)).read_bytes())
            return
        if path == "/api/runs":
            store.refresh()
            self._json([store.summary(key) for key in store.ids()])
            return
        if path == "/api/live":
            if not self.server.streams.acquire(blocking=False):
                self._send(503, "text/plain", BUSY)
                return
            try:
                self._stream([key for key in query.get("runs", "").split(",") if store.folder(key) is not None])
            finally:
                self.server.streams.release()
            return
        run, index = store.folder(query.get("run", "")), query.get("index", "")
        if run is not None and NUMBER.fullmatch(index):
            if path == "/api/snapshot" and (snapshot := read_snapshot(run, int(index))) is not None:
                self._json(snapshot)
                return
            if path == "/thumbnail" and (image := read_thumbnail(run, int(index))) is not None:
                self._send(200, "image/jpeg", image)
                return
        self._send(404, "text/plain", b"not found\n")

    def _stream(self, keys: list[str]) -> None:
        """Send everything about the requested runs, then updates until the page is closed."""
        self._head(200, "text/event-stream")
        store = self.server.store
        generations, after = dict.fromkeys(keys, -1), {key: dict[str, int]() for key in keys}
        sent_at, sent = 0.0, ""
        while not self.server.stopped.is_set():
            store.refresh()
            for key in keys:
                if (rows := store.rows(key, generations[key], after[key])) is not None:
                    generations[key] = rows["generation"]
                    self._event("rows", _dump(rows))
            summaries = _dump([store.summary(key) for key in store.ids()])
            if summaries != sent or time.monotonic() - sent_at > HEARTBEAT:
                sent, sent_at = summaries, time.monotonic()
                self._event("runs", sent)
            self.server.stopped.wait(REFRESH)

    def _event(self, kind: str, data: str) -> None:
        self.wfile.write(f"event: {kind}\ndata: {data}\n\n".encode())
        self.wfile.flush()

    def _json(self, value: Any) -> None:
        self._send(200, "application/json", _dump(value).encode())

    def _send(self, code: int, kind: str, body: bytes) -> None:
        compress = len(body) > BIG and "gzip" in self.headers.get("Accept-Encoding", "") and "image" not in kind
        body = gzip.compress(body, 1) if compress else body
        encoding = {"Content-Encoding": "gzip"} if compress else {}
        self._head(code, kind, {"Content-Length": str(len(body)), **encoding})
        self.wfile.write(body)

    def _head(self, code: int, kind: str, more: dict[str, str] | None = None) -> None:
        self.send_response(code)
        for name, value in {"Content-Type": kind, "Connection": "close", **HEADERS, **(more or {})}.items():
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Do not log requests."""


def _dump(value: Any) -> str:
    return json.dumps(json_safe(value), separators=(",", ":"))


def serve(folders: Sequence[Path], port: int, browser: bool) -> None:
    """Serve until Ctrl-C."""
    store = Store(folders)
    if not store.ids():
        print(f"{', '.join(map(str, folders))}: no runs yet; they appear on the page when they start")
    try:
        server = Server(store, port)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"--port {port}: {reason}; is another monitor running? --port 0 picks a free port") from None
    print(f"monitor    {server.url}   (on this machine only; Ctrl-C closes the page, the run continues)", flush=True)
    # Over ssh a browser would open on the wrong machine, or as text in this terminal.
    if browser and (sys.platform == "darwin" or os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")):
        with contextlib.suppress(webbrowser.Error):
            webbrowser.open(server.url)
    with contextlib.suppress(KeyboardInterrupt):
        server.serve_forever()
    server.stopped.set()
    server.server_close()
