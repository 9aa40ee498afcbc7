"""`m1clip monitor --web`: a page on loopback, live by server-sent events. The standard library is enough."""

from __future__ import annotations

import contextlib
import gzip
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
from m1clip.runlog import finite
from m1clip.watch.store import Store

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
        self._waiting.register(
            request, selectors.EVENT_READ, (time.monotonic() + IDLE, request, client_address)
        )

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
            request.recv(
                1 << 16
            )  # closing a socket with unread bytes would reset it before the answer is read
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
            self._send(200, kind, (resources.files("m1clip.watch") / "page" / name).read_bytes())
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
                self._live(
                    [key for key in asked.get("runs", "").split(",") if store.history(key) is not None]
                )
            finally:
                self.server.streams.release()
            return
        key = asked.get("run", "")
        if store.history(key) is not None and path == "/api/snapshots":
            self._json(store.snapshots(key))
        elif store.history(key) is not None and path == "/api/snapshot" and _is_number(asked.get("step")):
            found = store.snapshot(key, int(asked["step"]))
            self._json(found) if found is not None else self._missing()
        elif store.history(key) is not None and path == "/thumb" and _is_number(asked.get("picture")):
            picture = store.thumb(key, int(asked["picture"]))
            self._send(200, "image/jpeg", picture) if picture is not None else self._missing()
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
            now = json.dumps(finite([store.summary(key) for key in store.ids()]))
            if now != summaries or time.monotonic() - spoke > HEARTBEAT:
                summaries, spoke = now, time.monotonic()
                self._write(f"event: runs\ndata: {now}\n\n")
            self.server.stopped.wait(REFRESH)

    def _event(self, kind: str, value: Any) -> None:
        self._write(f"event: {kind}\ndata: {json.dumps(finite(value), separators=(',', ':'))}\n\n")

    def _write(self, text: str) -> None:
        self.wfile.write(text.encode())
        self.wfile.flush()

    def _json(self, value: Any) -> None:
        self._send(200, "application/json", json.dumps(finite(value), separators=(",", ":")).encode())

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
        raise UserError(
            f"--port {port}: {reason}; is another monitor open there? --port 0 takes a free one"
        ) from None
    print(f"watching   {server.url}   (this machine alone; Ctrl-C ends the page, never the run)", flush=True)
    # Over ssh a browser would open on the wrong machine, or as text in this very terminal.
    if browser and (
        sys.platform == "darwin" or os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
    ):
        with contextlib.suppress(webbrowser.Error):
            webbrowser.open(server.url)
    with contextlib.suppress(KeyboardInterrupt):
        server.serve_forever()
    server.stopped.set()
    server.server_close()
