"""A server that speaks the protocol of the Hugging Face Hub, for folders of this machine.

    python tests/fake_hub.py FOLDER [PORT]

serves FOLDER/owner/name as the repository owner/name; HF_ENDPOINT=http://127.0.0.1:PORT makes
m1clip and huggingface_hub use it. Large files are redirected to another address, as the Hub does
with files of LFS.
"""

from __future__ import annotations

import functools
import hashlib
import json
import sys
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

LARGE_BYTES = 20_000  # from which a file is one of LFS
TOKEN = "hf_of_a_test"


@functools.cache
def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@functools.cache
def git_hash(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


@dataclass
class Repository:
    """The files of a repository, and how the server misbehaves."""

    files: dict[str, bytes] = field(default_factory=dict)
    license: str = "mit"
    gated: bool = False  # its files need the token
    private: bool = False  # as if it did not exist, without the token

    @property
    def commit(self) -> str:
        names = "\n".join(f"{name} {git_hash(body)}" for name, body in sorted(self.files.items()))
        return hashlib.sha1(names.encode()).hexdigest()

    def entry(self, name: str) -> dict[str, object]:
        body = self.files[name]
        entry: dict[str, object] = {"rfilename": name, "size": len(body), "blobId": git_hash(body)}
        if len(body) >= LARGE_BYTES:
            entry["lfs"] = {"sha256": sha256(body), "size": len(body), "pointerSize": 134}
        return entry


class FakeHub(ThreadingHTTPServer):
    """The server. `repositories` may be changed while it runs."""

    daemon_threads = True

    def __init__(self, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.repositories: dict[str, Repository] = {}
        self.requests: list[tuple[str, str, str]] = []  # method, path, range
        self.tokens: list[tuple[str, str]] = []  # path, authorization
        self.cut_after: int | None = None  # bytes of a large file before the connection is closed
        self.cuts = 0  # how many more answers are cut
        self.busy = 0  # how many more answers have status 503
        self.tampered: bytes | None = None  # sent instead of the content of large files
        self.ranges = True  # whether parts of a file can be requested

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def add_folder(self, repository: str, folder: Path, **how: bool) -> Repository:
        """Serve the files of a folder as a repository."""
        files = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
        self.repositories[repository] = Repository(files, **how)
        return self.repositories[repository]

    def large_requests(self) -> list[str]:
        """The ranges of the requests for large files; "" for one from the start."""
        return [
            part
            for method, path, part in self.requests
            if method == "GET" and path.startswith("/cdn/")
        ]

    def start(self) -> None:
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    def handle_error(self, *args: object) -> None:
        """Print nothing when a client closes the connection."""

    def stop(self) -> None:
        self.shutdown()
        self.server_close()


class Handler(BaseHTTPRequestHandler):
    server: FakeHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.answer_request()

    def do_GET(self) -> None:
        self.answer_request()

    def answer_request(self) -> None:
        hub = self.server
        path = unquote(urlsplit(self.path).path)
        hub.requests.append((self.command, path, self.headers.get("Range", "")))
        hub.tokens.append((path, self.headers.get("Authorization", "")))
        if hub.busy > 0:
            hub.busy -= 1
            self.send(503, b"busy")
        elif path.startswith("/cdn/"):
            self.send_large(path.removeprefix("/cdn/"))
        elif path.startswith("/api/models/"):
            parts = path.removeprefix("/api/models/").split("/")
            self.send_listing("/".join(parts[:2]))
        else:
            name, _, rest = path.lstrip("/").partition("/resolve/")
            self.send_file(name, *rest.partition("/")[::2])

    def find(self, name: str) -> Repository | None:
        """The repository; None after an error was sent."""
        repository = self.server.repositories.get(name)
        has_token = self.headers.get("Authorization") == f"Bearer {TOKEN}"
        if repository is None or (repository.private and not has_token):
            # The Hub does not tell strangers which names exist.
            status = 404 if has_token else 401
            self.send(status, b"", {"X-Error-Code": "RepoNotFound"})
            return None
        return repository

    def send_listing(self, name: str) -> None:
        repository = self.find(name)
        if repository is None:
            return
        listing = {
            "id": name,
            "sha": repository.commit,
            "gated": "auto" if repository.gated else False,
            "tags": [f"license:{repository.license}"],
            "siblings": [repository.entry(file) for file in repository.files],
        }
        self.send(200, json.dumps(listing).encode(), {"Content-Type": "application/json"})

    def send_file(self, name: str, revision: str, file: str) -> None:
        repository = self.find(name)
        if repository is None:
            return
        if repository.gated and self.headers.get("Authorization") != f"Bearer {TOKEN}":
            status = 403 if "Authorization" in self.headers else 401
            self.send(status, b"", {"X-Error-Code": "GatedRepo"})
            return
        if revision not in ("main", repository.commit):
            self.send(404, b"", {"X-Error-Code": "RevisionNotFound"})
            return
        if file not in repository.files:
            self.send(404, b"", {"X-Error-Code": "EntryNotFound"})
            return
        entry = repository.entry(file)
        headers = {"X-Repo-Commit": repository.commit, "ETag": f'"{entry["blobId"]}"'}
        if "lfs" not in entry:
            self.send(200, repository.files[file], headers)
            return
        digest = sha256(repository.files[file])
        headers |= {"X-Linked-Etag": f'"{digest}"', "X-Linked-Size": str(entry["size"])}
        # Another host name than the Hub's: a token must not be sent there.
        cdn = f"http://localhost:{self.server.server_port}/cdn/{digest}"
        self.send(302, b"", headers | {"Location": cdn})

    def send_large(self, digest: str) -> None:
        hub = self.server
        bodies = [
            body
            for repository in hub.repositories.values()
            for body in repository.files.values()
            if sha256(body) == digest
        ]
        if not bodies:
            self.send(404, b"")
            return
        body = bodies[0] if hub.tampered is None else hub.tampered
        byte_range = self.headers.get("Range")
        start = (
            int(byte_range.removeprefix("bytes=").rstrip("-")) if byte_range and hub.ranges else 0
        )
        headers = {"ETag": f'"{digest}"'}
        status = 200
        if byte_range and hub.ranges:
            status = 206
            headers["Content-Range"] = f"bytes {start}-{len(body) - 1}/{len(body)}"
        self.send(status, body[start:], headers, is_cut=True)

    def send(
        self, status: int, body: bytes, headers: dict[str, str] | None = None, is_cut: bool = False
    ) -> None:
        hub = self.server
        self.send_response(status)
        for key, value in (headers or {}).items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "HEAD":
            return
        if is_cut and hub.cuts > 0 and hub.cut_after is not None:
            hub.cuts -= 1
            self.close_connection = True
            body = body[: hub.cut_after]
        self.wfile.write(body)


def main() -> None:
    """Serve a folder until the process is ended."""
    folder = Path(sys.argv[1])
    hub = FakeHub(int(sys.argv[2]) if len(sys.argv) > 2 else 0)
    for path in sorted(folder.glob("*/*")):
        hub.add_folder(str(path.relative_to(folder)), path)
    print(f"HF_ENDPOINT={hub.url} serves {', '.join(hub.repositories)}", flush=True)
    hub.serve_forever()


if __name__ == "__main__":
    main()
