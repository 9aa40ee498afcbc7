"""A server in a thread, and requests to it."""

import http.client
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from m1clip.web.server import Server


@contextmanager
def running(server: Server) -> Iterator[Server]:
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join(timeout=300)


def ask(
    server: Server, path: str, body: bytes | None = None, **headers: str
) -> tuple[int, bytes, dict[str, str]]:
    """Status, body and headers of the answer to a GET, or with a body to a POST."""
    connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=300)
    headers = {name.replace("_", "-"): value for name, value in headers.items()}
    connection.request("GET" if body is None else "POST", path, body, headers)
    answer = connection.getresponse()
    data = answer.read()
    connection.close()
    return answer.status, data, dict(answer.getheaders())


def connect(server: Server) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.server_address[1]), timeout=300)
