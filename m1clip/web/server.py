"""`m1clip monitor --web`: a page on loopback, live by server-sent events. The standard library is enough."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import json
import math
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
from m1clip.monitor import status as eta
from m1clip.monitor.diagnostics import verdicts
from m1clip.monitor.history import History, read_snapshot, read_thumbnail, snapshot_steps
from m1clip.monitor.status import find_runs, is_run, need_run, status_of
from m1clip.monitor.terminal import told
from m1clip.runlog import SELECTION, json_safe

LOOK_FOR_NEW = 2.0  # seconds
DEFAULT = Path("runs")  # may not be there yet: the first run makes it


class Store:
    """Follows all runs under some folders, for any number of pages at a time."""

    def __init__(self, places: Sequence[Path]) -> None:
        for place in places:
            if not place.is_dir() and place != DEFAULT:
                need_run(place)
        self._places = list(places)
        self._lock = threading.RLock()
        self._runs: dict[str, History] = {}
        self._looked = 0.0
        self.refresh()

    def refresh(self) -> None:
        """Take in new runs, and what is new in those known."""
        with self._lock:
            if time.monotonic() - self._looked > LOOK_FOR_NEW or not self._runs:
                self._looked = time.monotonic()
                for place in self._places:
                    for run in find_runs(place):
                        if key_of(run) not in self._runs:
                            self._runs[key_of(run)] = History(run)
            for history in self._runs.values():
                history.poll()

    def ids(self) -> list[str]:
        """Every run that has something to show, the newest last."""
        with self._lock:
            return [key for key, history in self._runs.items() if is_run(history.run)]

    def history(self, key: str) -> History | None:
        """A run by its key."""
        return self._runs.get(key)

    def summary(self, key: str) -> dict[str, Any]:
        """What stands in the list and at the head of the page."""
        with self._lock:
            history = self._runs[key]
            status, now = status_of(history), time.time()
            best = history.best() or {}
            left = eta.seconds_left(history)
            last = history.recent[-1] if history.recent else (history.steps.last or {})
            return {
                "id": key,
                "name": history.name,
                "path": str(history.run),
                "state": status.state,
                "words": status.words,
                "step": history.step,
                "steps": history.total,
                "seconds_left": left if status.state == "running" else None,
                "elapsed": eta.elapsed(history),
                "last": last,
                "metric": [history.metric, SELECTION[history.metric]],
                "best": {"step": best.get("step"), "value": best.get(history.metric)},
                "verdicts": [[v.level, v.words] for v in verdicts(history, now, status.state)],
                "events": [[r.get("time"), r["kind"], told(r)] for r in list(history.events)[-12:]][::-1],
                "memory": {k: v for k, v in history.memory.items() if k not in ("v", "kind", "time")},
                "facts": history.environment.get("facts"),
                "batch": history.setting("train", "batch", int),
                "snapshots": len(self.snapshots(key)),
            }

    def curves(self, key: str) -> dict[str, Any]:
        """Everything drawn so far, and the number of the newest arrival in it."""
        with self._lock:
            history = self._runs[key]
            return {
                "id": key,
                "generation": history.generation,
                "number": history.number,
                "steps": columns(list(history.steps)),
                "evals": list(history.evaluations),
                "layers": [{"step": row["step"], "layers": row.get("layers")} for row in history.layers],
            }

    def arrivals(self, key: str, generation: int, number: int) -> tuple[bool, int, list[Any]]:
        """(all must be sent anew, the newest number, what came after `number`)."""
        with self._lock:
            history = self._runs[key]
            oldest = history.arrived[0][0] if history.arrived else history.number + 1
            if history.generation != generation or number + 1 < oldest:
                return True, history.number, []
            kinds = ("step", "eval", "layers")
            rows = [[kind, row] for at, kind, row in history.arrived if at > number and kind in kinds]
            return False, history.number, rows

    def snapshots(self, key: str) -> list[int]:
        """Steps at which the evaluation left examples."""
        return list(snapshot_steps(self._runs[key].run))

    def snapshot(self, key: str, step: int) -> dict[str, Any] | None:
        """The examples of one evaluation."""
        return read_snapshot(self._runs[key].run, step)

    def thumb(self, key: str, image: int) -> bytes | None:
        """A small image by its number; its name is made here, of a number."""
        return read_thumbnail(self._runs[key].run, image)


def key_of(run: Path) -> str:
    """The same for the same folder, so that an open page finds its run again after the server was restarted."""
    return hashlib.blake2s(str(run.resolve()).encode("utf-8", "surrogateescape"), digest_size=6).hexdigest()


def columns(rows: list[dict[str, Any]]) -> dict[str, list[float | None]]:
    """Rows as one list a figure, the form that plots take; a gap is None."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    return {name: [_finite(row.get(name)) for row in rows] for name in names}


def _finite(value: Any) -> float | None:
    return value if isinstance(value, int | float) and math.isfinite(value) else None


HOST = "127.0.0.1"
NAMES = ("127.0.0.1", "localhost", "[::1]")
PORT = re.compile(r":\d+$")
PAGE = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/app.js": ("app.js", "text/javascript; charset=utf-8"),
    "/plots.js": ("plots.js", "text/javascript; charset=utf-8"),
    "/views.js": ("views.js", "text/javascript; charset=utf-8"),
    "/uplot.js": ("uplot.js", "text/javascript; charset=utf-8"),
    "/style.css": ("style.css", "text/css; charset=utf-8"),
    "/uplot.css": ("uplot.css", "text/css; charset=utf-8"),
}
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
REFRESH = 0.5  # seconds between two looks at the logs
HEARTBEAT = 5.0  # and between two signs of life to a page
BIG = 4096  # bytes from which an answer is compressed
POLL = 0.05  # seconds between two looks at the waiting connections
IDLE = 10.0  # seconds that a connection may wait for a thread, or keep one waiting
WAITING = 128  # connections without a thread; macOS allows 256 open files
THREADS, STREAMS = 32, 24  # requests answered at a time, and how many of them may be streams
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
        """Where the page is."""
        return f"http://{HOST}:{self.server_address[1]}/"

    def serve_forever(self, poll_interval: float = POLL) -> None:
        """Accept connections until `shutdown`."""
        super().serve_forever(poll_interval)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Queue a new connection; a full queue turns away the oldest, which has had time to send its request."""
        waiting = self._waiting.get_map()
        if len(waiting) >= WAITING:
            self._refuse(next(iter(waiting.values())))
        self._waiting.register(request, selectors.EVENT_READ, (time.monotonic() + IDLE, request, client_address))

    def service_actions(self) -> None:
        """Give threads to connections that have sent something, and turn away those that waited too long."""
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
            with contextlib.suppress(OSError):  # a page that was closed is no error to tell of
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
        """End the open streams too."""
        self.stopped.set()
        super().shutdown()

    def server_close(self) -> None:
        """Close the connections that still wait."""
        for key in list(self._waiting.get_map().values()):
            self._refuse(key)
        self._waiting.close()
        super().server_close()


class Handler(BaseHTTPRequestHandler):
    """GET alone; every answer carries the same strict headers."""

    server: Server
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "m1clip", ""
    timeout = IDLE  # of each read and write

    def do_GET(self) -> None:
        """One request of the page."""
        if not self._allowed():
            self._send(403, "text/plain", b"this page answers only to 127.0.0.1 and localhost\n")
            return
        url = urlsplit(self.path)
        asked = {name: values[-1] for name, values in parse_qs(url.query).items()}
        self._answer(url.path, asked)

    def _allowed(self) -> bool:
        """A foreign name that points here (DNS rebinding) and other sites' scripts are turned away."""
        host = PORT.sub("", self.headers.get("Host", ""))
        origin = self.headers.get("Origin")
        own = origin is None or PORT.sub("", origin.removeprefix("http://")) in NAMES
        site, mode = self.headers.get("Sec-Fetch-Site", "none"), self.headers.get("Sec-Fetch-Mode", "")
        return host in NAMES and own and (site in ("none", "same-origin") or mode == "navigate")

    def _answer(self, path: str, asked: dict[str, str]) -> None:
        store = self.server.store
        if path in PAGE:
            name, kind = PAGE[path]
            self._send(200, kind, (resources.files("m1clip.web") / "page" / name).read_bytes())
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
                self._live([key for key in asked.get("runs", "").split(",") if store.history(key) is not None])
            finally:
                self.server.streams.release()
            return
        key = asked.get("run", "")
        if store.history(key) is not None and path == "/api/snapshots":
            self._json(store.snapshots(key))
        elif store.history(key) is not None and path == "/api/snapshot" and _is_number(asked.get("step")):
            found = store.snapshot(key, int(asked["step"]))
            self._json(found) if found is not None else self._missing()
        elif store.history(key) is not None and path == "/thumb" and _is_number(asked.get("image")):
            image = store.thumb(key, int(asked["image"]))
            self._send(200, "image/jpeg", image) if image is not None else self._missing()
        else:
            self._missing()

    def _live(self, keys: list[str]) -> None:
        """A stream: first everything of the runs asked for, then what arrives, until the page is closed."""
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        for name, value in HEADERS.items():
            self.send_header(name, value)
        self.send_header("Connection", "close")
        self.end_headers()
        store = self.server.store
        sent: dict[str, tuple[int, int]] = {}
        spoke, summaries = 0.0, ""
        while not self.server.stopped.is_set():
            store.refresh()
            for key in keys:
                generation, number = sent.get(key, (-1, -1))
                anew, newest, rows = store.arrivals(key, generation, number)
                if anew:
                    curves = store.curves(key)
                    self._event("curves", curves)
                    sent[key] = (curves["generation"], curves["number"])
                elif rows:
                    self._event("rows", {"id": key, "rows": rows})
                    sent[key] = (generation, newest)
            now = json.dumps(json_safe([store.summary(key) for key in store.ids()]))
            if now != summaries or time.monotonic() - spoke > HEARTBEAT:
                summaries, spoke = now, time.monotonic()
                self._write(f"event: runs\ndata: {now}\n\n")
            self.server.stopped.wait(REFRESH)

    def _event(self, kind: str, value: Any) -> None:
        self._write(f"event: {kind}\ndata: {json.dumps(json_safe(value), separators=(',', ':'))}\n\n")

    def _write(self, text: str) -> None:
        self.wfile.write(text.encode())
        self.wfile.flush()

    def _json(self, value: Any) -> None:
        self._send(200, "application/json", json.dumps(json_safe(value), separators=(",", ":")).encode())

    def _missing(self) -> None:
        self._send(404, "text/plain", b"nothing here\n")

    def _send(self, code: int, kind: str, body: bytes) -> None:
        packed = len(body) > BIG and "gzip" in self.headers.get("Accept-Encoding", "") and "image" not in kind
        body = gzip.compress(body, 1) if packed else body
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Connection", "close")
        if packed:
            self.send_header("Content-Encoding", "gzip")
        for name, value in HEADERS.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """The terminal stays quiet."""


def _is_number(text: str | None) -> bool:
    return text is not None and text.isascii() and text.isdigit() and len(text) <= 12


def serve(places: Sequence[Path], port: int, browser: bool) -> None:
    """Serve until Ctrl-C."""
    store = Store(places)
    if not store.ids():
        print(f"{', '.join(map(str, places))}: no runs yet; they appear on the page when they begin")
    try:
        server = Server(store, port)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"--port {port}: {reason}; is another monitor open there? --port 0 takes a free one") from None
    print(f"watching   {server.url}   (this machine alone; Ctrl-C ends the page, never the run)", flush=True)
    # Over ssh a browser would open on the wrong machine, or as text in this very terminal.
    if browser and (sys.platform == "darwin" or os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")):
        with contextlib.suppress(webbrowser.Error):
            webbrowser.open(server.url)
    with contextlib.suppress(KeyboardInterrupt):
        server.serve_forever()
    server.stopped.set()
    server.server_close()
