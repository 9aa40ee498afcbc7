"""A vision server whose answers a test decides; nothing in it waits for a time."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Response:
    """What the server sends; `length` may announce more than it sends."""

    body: bytes
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    length: int | None = None
    hang: bool = False  # until the test ends, after the headers and the body


def completion(text: str, finish_reason: str = "stop") -> Response:
    choice = {"message": {"role": "assistant", "content": text}, "finish_reason": finish_reason}
    return Response(json.dumps({"choices": [choice]}).encode())


Answer = Callable[[dict[str, Any], int], Response]  # of the request and its number, from 0


class FakeServer:
    """Requests are kept in `requests`; `answer` may be replaced at any time."""

    def __init__(self, answer: Answer, models: list[str]) -> None:
        self.answer = answer
        self.models: Any = models
        self.requests: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.headers: list[dict[str, str]] = []
        self.ended = threading.Event()
        self.lock = threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer.paths.append(self.path)
                models = outer.models
                if isinstance(models, list):
                    data = json.dumps({"data": [{"id": name} for name in models]}).encode()
                    models = Response(data)
                self.send(models)

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with outer.lock:
                    number = len(outer.requests)
                    outer.requests.append(body)
                    outer.headers.append(dict(self.headers))
                self.send(outer.answer(body, number))

            def send(self, response: Response) -> None:
                length = len(response.body) if response.length is None else response.length
                self.send_response(response.status)
                self.send_header("Content-Length", str(length))
                for name, value in response.headers.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(response.body)
                self.wfile.flush()
                if response.hang:
                    outer.ended.wait()

            def log_message(self, *_: object) -> None:
                """Print nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/v1"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()

    def close(self) -> None:
        self.ended.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@contextmanager
def serve(answer: Answer, models: list[str] | None = None) -> Iterator[FakeServer]:
    server = FakeServer(answer, ["vision"] if models is None else models)
    try:
        yield server
    finally:
        server.close()
