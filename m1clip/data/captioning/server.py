"""A client of vision servers with OpenAI's interface: Ollama, LM Studio, llama.cpp, vLLM.

Every request is bounded in time and size, goes to the address that the user gave and to no other,
and ignores proxies and redirects. Without permission, that address must be on this computer.
"""

from __future__ import annotations

import base64
import contextlib
import http.client
import ipaddress
import json
import os
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from m1clip.errors import UserError
from m1clip.formatting import one_line

DEFAULT_SERVER = "http://127.0.0.1:11434/v1"  # Ollama's
KEY_VARIABLE = "M1CLIP_SERVER_KEY"  # environment variable with a key, for servers that ask for one
MAX_RESPONSE_BYTES = 2**20
MAX_RETRY_AFTER = 30.0  # seconds that a server may ask us to wait
CONNECT_SECONDS = 10.0  # to accept a connection
MODELS_SECONDS = 10.0  # for the list of models
MODELS_LISTED = 20  # in messages
DETAIL_LENGTH = 200  # characters of a server's own error message that are shown
# 408: timeout; 425: too early; 429: too many requests; 5xx: the server is starting or overloaded.
_RETRIED = {408, 425, 429, 500, 502, 503, 504}
# With these, every photo would get the same answer.
_FATAL = {401, 403, 404, 405}

START_HINT = (
    "start one: Ollama (ollama pull gemma3, then --server http://127.0.0.1:11434/v1), "
    "LM Studio (load a vision model, Developer, Start Server: http://127.0.0.1:1234/v1), "
    "or llama.cpp (llama-server -hf ggml-org/gemma-3-4b-it-GGUF: http://127.0.0.1:8080/v1)"
)


class ServerError(Exception):
    """A request that failed, for a photo alone; `retry_after` is set if the server asked for it."""

    def __init__(self, reason: str, is_temporary: bool, retry_after: float | None = None) -> None:
        super().__init__(reason)
        self.is_temporary = is_temporary
        self.retry_after = retry_after


class NoServer(ServerError):
    """Nothing accepts connections at the address."""


class ServerUnavailable(UserError):
    """Nothing answers at the address, or it rejects every request; the message has a hint."""


class Reply(NamedTuple):
    """The text that a model wrote, and whether it was cut off at the limit of its length."""

    text: str
    is_cut_off: bool


@dataclass(frozen=True)
class Address:
    """Where a server is: the parts of its URL, and the IP addresses of its host."""

    url: str
    is_tls: bool
    host: str
    port: int
    path: str
    ip_addresses: tuple[str, ...]

    @property
    def is_loopback(self) -> bool:
        """Whether all its IP addresses are on this computer."""
        return all(_is_loopback(address) for address in self.ip_addresses)


def parse_address(url: str) -> Address:
    """Check the URL of a server and look up its host; UserError if it is not usable."""
    shown = one_line(url)
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise UserError(f"--server {shown}: not a URL ({error})") from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UserError(f"--server {shown}: expected a URL such as {DEFAULT_SERVER}")
    if parts.username is not None or parts.query or parts.fragment:
        raise UserError(
            f"--server: a URL without user name, query and fragment is expected; "
            f"put a key into the environment variable {KEY_VARIABLE}"
        )
    is_tls = parts.scheme == "https"
    port = port or (443 if is_tls else 80)
    try:
        infos = socket.getaddrinfo(parts.hostname, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise ServerUnavailable(f"--server {shown}: unknown host {parts.hostname}") from error
    addresses = tuple(dict.fromkeys(str(entry[4][0]) for entry in infos))
    return Address(url, is_tls, parts.hostname, port, parts.path.rstrip("/"), addresses)


def _is_loopback(address: str) -> bool:
    ip = ipaddress.ip_address(address.partition("%")[0])
    mapped = getattr(ip, "ipv4_mapped", None)  # ::ffff:127.0.0.1
    return bool((mapped or ip).is_loopback)


class VisionServer:
    """Asks a server for its models, and for texts about images; used by several threads."""

    def __init__(self, url: str, *, allow_remote: bool = False, timeout: float = 120.0) -> None:
        self.address = parse_address(url)
        if not allow_remote and not self.address.is_loopback:
            raise UserError(
                f"--server {one_line(url)}: {self.address.host} is not this computer, so your"
                " photos would leave it; if you want that, add --allow-remote"
            )
        self.timeout = timeout
        self._key = os.environ.get(KEY_VARIABLE, "")
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._is_closed = False

    def models(self) -> list[str]:
        """Return the names of the server's models.

        Names that a table or a terminal cannot show are left out.
        """
        try:
            answer = self._request("GET", "/models", None, MODELS_SECONDS)
        except NoServer as error:
            raise self.no_server(error) from error
        except ServerError as error:
            raise ServerUnavailable(
                f"{self._name}: cannot list its models ({error}); "
                f"is it a server with OpenAI's interface, and does its URL end in /v1?"
            ) from error
        entries = answer.get("data") if isinstance(answer, dict) else None
        if not isinstance(entries, list):
            raise ServerUnavailable(
                f"{self._name}: not a server with OpenAI's interface; does its URL end in /v1?"
            )
        names = [entry.get("id") for entry in entries if isinstance(entry, dict)]
        return [name for name in names if isinstance(name, str) and name and name.isprintable()]

    def choose_model(self, requested: str | None) -> str:
        """Return the requested model, or the only one; UserError that lists the names otherwise."""
        names = self.models()
        if requested in names:
            return str(requested)
        # Ollama lists gemma3:latest, and accepts gemma3.
        if requested is not None and f"{requested}:latest" in names:
            return requested
        if requested is None and len(names) == 1:
            return names[0]
        listed = ", ".join(map(one_line, names[:MODELS_LISTED]))
        if len(names) > MODELS_LISTED:
            listed += ", ..."
        if not names:
            raise UserError(f"{self._name}: has no model; load a vision model into it first")
        if requested is None:
            raise UserError(f"choose a vision model with --model; {self._name} has: {listed}")
        raise UserError(f"--model {one_line(requested)}: {self._name} has only: {listed}")

    def describe_image(self, jpeg: bytes, model: str, prompt: str, max_tokens: int) -> Reply:
        """Ask a model about an image; ServerError if this photo failed, UserError if all would."""
        encoded = base64.b64encode(jpeg).decode("ascii")
        image = {"type": "image_url", "image_url": {"url": f"data:image/jpeg;base64,{encoded}"}}
        body = {
            "model": model,
            "messages": [{"role": "user", "content": [{"type": "text", "text": prompt}, image]}],
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": False,
        }
        return _reply_of(self._request("POST", "/chat/completions", body, self.timeout))

    def close(self) -> None:
        """Interrupt all requests, such as after Ctrl-C; later ones fail at once."""
        with self._lock:
            self._is_closed = True
            sockets = list(self._open)
        for connection in sockets:
            _shut_down(connection)

    def no_server(self, error: NoServer) -> ServerUnavailable:
        """The error for a server that is not running, with how to start one."""
        return ServerUnavailable(f"{self._name}: no vision server answers ({error}); {START_HINT}")

    @property
    def _name(self) -> str:
        return one_line(self.address.url)

    def _request(self, method: str, path: str, body: object, seconds: float) -> Any:
        """Send a request and return the JSON of its answer."""
        headers = {"Accept": "application/json", "Host": _host_header(self.address)}
        data = None
        if body is not None:
            data = json.dumps(body).encode("ascii")
            headers["Content-Type"] = "application/json"
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        began = time.monotonic()
        with self._connect(seconds) as connection:
            try:
                connection.request(method, self.address.path + path, data, headers)
                response = connection.getresponse()
                content = response.read(MAX_RESPONSE_BYTES + 1)
            except (OSError, http.client.HTTPException, ValueError) as error:
                raise _network_error(error, seconds) from error
        if time.monotonic() - began >= seconds:  # its connection was closed, whatever had come
            raise ServerError(f"no complete answer within {seconds:g} s", True)
        if response.length:  # bytes that were announced and did not come
            raise ServerError("the answer ended early", True)
        if len(content) > MAX_RESPONSE_BYTES:
            raise ServerError(f"the answer is larger than {MAX_RESPONSE_BYTES:,} bytes", False)
        self._check_status(response, content)
        try:
            return json.loads(content.decode("utf-8"))
        except (ValueError, RecursionError):
            # An interrupted answer; or a web page, which will not change.
            raise ServerError(f"the answer is not JSON: {_start_of(content)}", True) from None

    def _check_status(self, response: http.client.HTTPResponse, content: bytes) -> None:
        status = response.status
        if status == 200:
            return
        reason = f"HTTP {status}: {_error_message(content) or response.reason}"
        if 300 <= status < 400:
            raise ServerUnavailable(
                f"{self._name}: redirects to another address, and redirects are not followed; "
                f"give the server's own URL"
            )
        if status in _FATAL:
            hint = f"; if it needs a key, set {KEY_VARIABLE}" if status in (401, 403) else ""
            raise ServerUnavailable(f"{self._name}: {one_line(reason)}{hint}")
        raise ServerError(reason, status in _RETRIED, _retry_after(response.headers))

    @contextmanager
    def _connect(self, seconds: float) -> Iterator[http.client.HTTPConnection]:
        """Yield a connection that is interrupted when the time is over, however slow the answer."""
        connected = self._secured(self._open_socket(seconds))
        with self._lock:
            is_closed = self._is_closed
            if not is_closed:
                self._open.add(connected)
        if is_closed:  # while it connected: nothing would interrupt the request
            connected.close()
            raise ServerError("interrupted", False)
        # A timeout of the socket holds for each part of an answer, this one for all of it.
        timer = threading.Timer(seconds, _shut_down, (connected,))
        timer.daemon = True
        timer.start()
        connection = http.client.HTTPConnection(self.address.host, self.address.port)
        connection.sock = connected
        try:
            yield connection
        finally:
            timer.cancel()
            with self._lock:
                self._open.discard(connected)
            connection.close()
            connected.close()

    def _open_socket(self, seconds: float) -> socket.socket:
        """Connect to one of the addresses that were checked: the name is not looked up again."""
        reason = "no address"
        for ip in self.address.ip_addresses:
            if self._is_closed:
                raise ServerError("interrupted", False)
            try:
                port = self.address.port
                connection = socket.create_connection((ip, port), min(seconds, CONNECT_SECONDS))
            except OSError as error:
                reason = (error.strerror or str(error)).lower()
                continue
            connection.settimeout(seconds)
            return connection
        raise NoServer(reason, True)

    def _secured(self, raw: socket.socket) -> socket.socket:
        if not self.address.is_tls:
            return raw
        try:
            context = ssl.create_default_context()
            return context.wrap_socket(raw, server_hostname=self.address.host)
        except OSError as error:
            raw.close()
            reason = one_line(str(error))
            raise ServerUnavailable(f"{self._name}: no secure connection ({reason})") from error


def _shut_down(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        # From another thread, close() alone would not wake up the thread that reads.
        connection.shutdown(socket.SHUT_RDWR)


def _host_header(address: Address) -> str:
    host = f"[{address.host}]" if ":" in address.host else address.host
    return f"{host}:{address.port}"


def _network_error(error: Exception, seconds: float) -> ServerError:
    if isinstance(error, TimeoutError):
        return ServerError(f"no answer within {seconds:g} s", True)
    if isinstance(error, http.client.IncompleteRead):
        return ServerError("the answer ended early", True)
    reason = one_line(str(error)) or type(error).__name__
    return ServerError(f"the connection broke, or took more than {seconds:g} s ({reason})", True)


def _retry_after(headers: http.client.HTTPMessage) -> float | None:
    """Return the seconds in the header Retry-After; None for a date or anything else."""
    try:
        seconds = float(headers.get("Retry-After", ""))
    except ValueError:
        return None
    return min(seconds, MAX_RETRY_AFTER) if seconds >= 0 else None


def _start_of(content: bytes) -> str:
    text = one_line(content[: 4 * DETAIL_LENGTH].decode("utf-8", "replace"))
    return text[:80] or "it is empty"


def _error_message(content: bytes) -> str:
    """Return the message in {"error": {"message": ...}}, which most servers send, or ""."""
    try:
        error = json.loads(content.decode("utf-8"))["error"]
        message = error["message"] if isinstance(error, dict) else error
    except (ValueError, RecursionError, KeyError, TypeError):
        return ""
    return one_line(str(message))[:DETAIL_LENGTH]


def _reply_of(answer: Any) -> Reply:
    """Return the text in {"choices": [{"message": {"content": ...}}]}."""
    try:
        choice = answer["choices"][0]
        content = choice["message"]["content"]
        if isinstance(content, list):  # [{"type": "text", "text": ...}]
            content = "".join(part.get("text", "") for part in content)
    except (KeyError, IndexError, TypeError, AttributeError):
        message = _error_message(json.dumps(answer).encode("utf-8"))
        reason = f"error: {message}" if message else "the answer has no choices with a message"
        raise ServerError(reason, False) from None
    if not isinstance(content, str):
        raise ServerError("the answer has no text", False)
    return Reply(content, choice.get("finish_reason") == "length")
