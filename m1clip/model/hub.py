"""Downloads models from the Hugging Face Hub into its cache; the only module that does.

An interrupted file is continued, also by a later call, and a file gets its name in the cache only
when its content has the hash that the Hub lists. huggingface_hub provides the connection (proxies,
offline mode) and the token; the layout of the cache is the one that it documents.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from filelock import FileLock, Timeout

from m1clip.console import progress
from m1clip.errors import UserError, first_line
from m1clip.extras import require
from m1clip.formatting import did_you_mean, one_line, size
from m1clip.io import write_text
from m1clip.model.catalog import CATALOG, TOWER_CATALOG
from m1clip.model.hub_files import (
    COMMIT,
    HUB_NAME,
    HUB_PREFIX,
    MAIN,
    cache_folder,
    cached_snapshot,
    model_files,
    repository_folder,
)
from m1clip.model.named import catalog_name

DEFAULT_ENDPOINT = "https://huggingface.co"
OFFLINE_VARIABLES = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
TRUE = ("1", "on", "yes", "true")
TIMEOUT_SECONDS = 30.0  # without any data
ATTEMPTS = 5  # without any new data, before a download is given up
RECONNECT_SECONDS = 1.0  # doubled with every attempt
CHUNK_BYTES = 2**20
MAX_LISTING_BYTES = 2**26  # the list of files of a repository
SPARE_BYTES = 50 * 10**6  # left free on the disk
MAX_FILES = 100_000
MAX_LISTED_SIZE = 2**50
PARTIAL_CONTENT = 206
RANGE_NOT_SATISFIABLE = 416
# Answers of a server that is busy, which another attempt may change.
TEMPORARY_STATUS = (408, 429, 500, 502, 503, 504)
GIT_HASH = re.compile(r"[0-9a-f]{40}")
SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class HubFile:
    """A file of a repository, and the hash that its content must have."""

    name: str
    bytes: int
    digest: str  # its name in the cache: the sha256 of a large file (LFS), else the hash of git

    def hasher(self) -> Any:
        """An object whose hexdigest() is `digest` once it has seen the content."""
        if SHA256.fullmatch(self.digest):
            return hashlib.sha256()
        # git puts a header before the content. SHA-1 detects damage here; it does not prove origin.
        hasher = hashlib.sha1(usedforsecurity=False)
        hasher.update(b"blob %d\0" % self.bytes)
        return hasher


@dataclass(frozen=True)
class DownloadPlan:
    """What `fetch` would download: the files of one commit of a repository that make a model."""

    repository: str
    commit: str
    endpoint: str
    license: str  # as the Hub lists it
    files: tuple[HubFile, ...]

    @property
    def folder(self) -> Path:
        """Where the model will be."""
        return repository_folder(self.repository) / "snapshots" / self.commit

    @property
    def total_bytes(self) -> int:
        return sum(file.bytes for file in self.files)

    @property
    def present_bytes(self) -> int:
        """What is in the cache already, or was left there by an interrupted download."""
        return sum(self._present(file) for file in self.files)

    def _present(self, file: HubFile) -> int:
        if self.blob(file).is_file():
            return file.bytes
        with contextlib.suppress(OSError):
            return min(self.partial(file).stat().st_size, file.bytes)
        return 0

    def blob(self, file: HubFile) -> Path:
        """The file with the content; those in `folder` are links to it."""
        return repository_folder(self.repository) / "blobs" / file.digest

    def partial(self, file: HubFile) -> Path:
        """Where the content is until it is complete and checked."""
        return self.blob(file).with_name(f"{file.digest}.incomplete")

    def url(self, file: HubFile) -> str:
        return f"{self.endpoint}/{self.repository}/resolve/{self.commit}/{file.name}"


def download(name: str, update: bool = False) -> Path:
    """Download a model of the Hub, by name or as owner/name, and return its folder.

    It goes to the cache of Hugging Face, and a model that is complete there is used without a
    download; `update` looks for a newer version. Only the files of the model are fetched,
    safetensors where there are any, and each is checked against the hash that the Hub lists. What
    was interrupted is continued.
    """
    repository = repository_of(name)
    cached = None if update else find_checked(repository)
    return cached or fetch(plan_download(repository))


def repository_of(name: str) -> str:
    """owner/name for a name of the catalog or of the Hub; UserError for anything else."""
    text = name.removeprefix(HUB_PREFIX)
    entry = CATALOG.get(text) or TOWER_CATALOG.get(text)
    if entry is not None:
        return entry.repository
    if HUB_NAME.fullmatch(text):
        return text
    hint = (
        did_you_mean(text, [*CATALOG, *TOWER_CATALOG])
        or ": give one of m1clip models, or owner/name of the Hub"
    )
    raise UserError(f"{one_line(text[:100])}: not a model that can be downloaded{hint}")


def find_checked(repository: str) -> Path | None:
    """The folder of a model in the cache whose files have the right content, or None.

    A file of the cache has its hash as name. Damaged files are deleted, so that they are downloaded
    again.
    """
    folder = cached_snapshot(repository)
    if folder is None:
        return None
    is_good = True
    for name in model_files({path.name for path in folder.iterdir()}):
        path = folder / name
        if not path.is_file():  # a link to a file that is gone
            is_good = False
            continue
        blob = path.resolve()
        file = HubFile(name, blob.stat().st_size, blob.name)
        # On systems without links the files have no hash to compare with.
        is_named = SHA256.fullmatch(blob.name) or GIT_HASH.fullmatch(blob.name)
        if is_named and _hash_file(blob, file) != file.digest:
            blob.unlink()
            path.unlink()
            is_good = False
    return folder if is_good else None


def plan_download(repository: str) -> DownloadPlan:
    """Ask the Hub for the files of a repository.

    UserError if it has no model that m1clip could read.
    """
    endpoint = _endpoint()
    with _connection_errors(repository, endpoint):
        listing = _read_listing(repository, endpoint)
    commit = listing.get("sha")
    if not isinstance(commit, str) or not COMMIT.fullmatch(commit):
        raise UserError(f"{endpoint}: does not answer like the Hugging Face Hub (no commit)")
    siblings = listing.get("siblings")
    entries = {
        entry["rfilename"]: entry
        for entry in (siblings if isinstance(siblings, list) else [])[:MAX_FILES]
        if isinstance(entry, dict) and isinstance(entry.get("rfilename"), str)
    }
    names = model_files(entries)
    if not names:
        raise UserError(
            f"{repository}: has no model that m1clip reads (looked for open_clip_config.json or"
            " config.json, with weights in safetensors or .bin next to it)"
        )
    tags = listing.get("tags")
    licenses = [
        tag.removeprefix("license:")
        for tag in (tags if isinstance(tags, list) else [])
        if isinstance(tag, str) and tag.startswith("license:")
    ]
    files = tuple(_hub_file(entries[name], repository) for name in names)
    return DownloadPlan(
        repository,
        commit,
        endpoint,
        one_line(licenses[0][:60]) if licenses else "not stated",
        files,
    )


def fetch(plan: DownloadPlan) -> Path:
    """Download what is missing of a plan, and return the folder of the model."""
    locks = cache_folder() / ".locks" / repository_folder(plan.repository).name
    name = catalog_name(plan.repository)
    try:
        _check_space(plan)
        plan.folder.mkdir(parents=True, exist_ok=True)
        repository_folder(plan.repository).joinpath("blobs").mkdir(exist_ok=True)
        locks.mkdir(parents=True, exist_ok=True)
        with (
            FileLock(locks / "m1clip.lock", fallback_to_soft=False).acquire(blocking=False),
            _connection_errors(plan.repository, plan.endpoint),
            progress(f"downloading {name}", size) as refresh,
        ):
            before = 0
            for file in plan.files:
                done = before  # bound for the function below

                def show(count: int, done: int = done) -> None:
                    refresh(done + count, plan.total_bytes)

                _fetch_file(plan, file, show)
                _link(plan.folder / file.name, plan.blob(file))
                before += file.bytes
        write_text(repository_folder(plan.repository) / "refs" / MAIN, plan.commit)
    except Timeout:
        raise UserError(f"{name}: another process is downloading it now") from None
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise UserError(
            f"{cache_folder()}: the disk is full; free some space and run again to continue, or set"
            " HF_HOME to a folder on another disk"
        ) from None
    return plan.folder


def _endpoint() -> str:
    """The address of the Hub or of a mirror; UserError where downloads are switched off."""
    for variable in OFFLINE_VARIABLES:
        if os.environ.get(variable, "").lower() in TRUE:
            raise UserError(f"{variable} is set, so nothing is downloaded: unset it")
    endpoint = (os.environ.get("HF_ENDPOINT") or DEFAULT_ENDPOINT).rstrip("/")
    if not endpoint.startswith(("https://", "http://")):
        raise UserError(f"HF_ENDPOINT={endpoint}: expected an address that begins with https://")
    return endpoint


def _headers() -> dict[str, str]:
    """Sent with every request: who asks and, if there is one, the token of the user."""
    token = require("huggingface_hub", "m1clip download", "hub").get_token()
    headers = {"user-agent": "m1clip", "accept-encoding": "identity"}
    # httpx removes it where a server redirects to another host.
    return headers | ({"authorization": f"Bearer {token}"} if token else {})


@contextlib.contextmanager
def _open(url: str, headers: dict[str, str]) -> Iterator[Any]:
    """Yield the answer of a server, before its body is read."""
    try:
        session = require("huggingface_hub.utils", "m1clip download", "hub").get_session()
    except ValueError as error:  # of httpx, when the connection is set up
        raise UserError(f"HTTPS_PROXY or HTTP_PROXY: {one_line(first_line(error))}") from None
    with session.stream(
        "GET", url, headers=headers, timeout=TIMEOUT_SECONDS, follow_redirects=True
    ) as response:
        yield response


class _TemporaryError(Exception):
    """The server is busy; another attempt may succeed."""


def _check_status(response: Any, repository: str, endpoint: str) -> None:
    """Raise UserError, in words, for an answer that is not the requested content."""
    status = response.status_code
    if status < 400:
        return
    code = response.headers.get("x-error-code", "")
    if status in TEMPORARY_STATUS:
        raise _TemporaryError(f"{endpoint} answers {status}")
    has_token = "authorization" in response.request.headers
    login = "set HF_TOKEN, or run hf auth login"
    if code == "GatedRepo":
        step = "with the account of your token" if has_token else f"then {login}"
        raise UserError(
            f"{repository}: gated: accept its conditions at {endpoint}/{repository}, {step}"
        )
    if status == 401 and has_token and code not in ("RepoNotFound", "RevisionNotFound"):
        raise UserError(f"{endpoint}: rejects your token: {login} again")
    # The Hub also answers 401 for a name that does not exist.
    if status in (401, 404) and code in ("", "RepoNotFound", "RevisionNotFound"):
        private = "" if has_token else f"; if it is private: {login}"
        raise UserError(f"{repository}: no such repository at {endpoint}{private}")
    message = response.headers.get("x-error-message", "") or response.reason_phrase
    raise UserError(
        f"{repository}: {endpoint} answers {status}"
        f" ({one_line(message[:100]) or 'no reason given'})"
    )


@contextlib.contextmanager
def _connection_errors(repository: str, endpoint: str) -> Iterator[None]:
    """Turn errors of the network into one line each."""
    errors = require("huggingface_hub.errors", "m1clip download", "hub")
    try:
        yield
    except errors.OfflineModeIsEnabled:
        raise UserError("HF_HUB_OFFLINE is set, so nothing is downloaded: unset it") from None
    except _TemporaryError as error:
        raise UserError(f"{repository}: {error}; run again later to continue") from None
    except (errors.HTTPError, _address_error(), UnicodeError) as error:
        # The last for a host name or a token with characters that cannot be sent.
        reason = one_line(first_line(error))
        raise UserError(
            f"{repository}: cannot reach {endpoint} ({reason}); check the connection (HTTPS_PROXY"
            " for a proxy, HF_ENDPOINT for a mirror) and run again to continue"
        ) from None


def _read_listing(repository: str, endpoint: str) -> dict[str, Any]:
    """What the Hub reports about a repository, with the sizes and hashes of its files."""
    body = bytearray()
    with _open(f"{endpoint}/api/models/{repository}?blobs=true", _headers()) as response:
        _check_status(response, repository, endpoint)
        # Raw: no compression was asked for, and a small answer may unpack to any size.
        for chunk in response.iter_raw():
            body += chunk
            if len(body) > MAX_LISTING_BYTES:
                raise UserError(f"{repository}: its list of files is too long")
    try:
        listing = json.loads(body)
    except (ValueError, RecursionError):
        listing = None
    if not isinstance(listing, dict):
        raise UserError(f"{endpoint}: does not answer like the Hugging Face Hub (no JSON)")
    return listing


def _hub_file(entry: dict[str, Any], repository: str) -> HubFile:
    lfs = entry.get("lfs")
    count = entry.get("size")
    digest = lfs.get("sha256") if isinstance(lfs, dict) else entry.get("blobId")
    pattern = SHA256 if isinstance(lfs, dict) else GIT_HASH
    is_valid = isinstance(digest, str) and pattern.fullmatch(digest)
    if not is_valid or not isinstance(count, int) or not 0 <= count <= MAX_LISTED_SIZE:
        raise UserError(
            f"{repository}: the Hub lists no size and hash of {one_line(entry['rfilename'][:80])},"
            " so it cannot be checked"
        )
    return HubFile(entry["rfilename"], count, str(digest))


def _check_space(plan: DownloadPlan) -> None:
    """Raise UserError, before anything is written, if the disk is too small."""
    folder = cache_folder()
    while not folder.exists():
        folder = folder.parent
    missing = plan.total_bytes - plan.present_bytes
    free = shutil.disk_usage(folder).free
    if missing and free < missing + SPARE_BYTES:
        raise UserError(
            f"{cache_folder()}: {size(missing)} to download, but only {size(free)} free; free some"
            " space, or set HF_HOME to a folder on another disk"
        )


def _hash_file(path: Path, file: HubFile) -> str:
    hasher = file.hasher()
    with path.open("rb") as stream:
        while chunk := stream.read(CHUNK_BYTES):
            hasher.update(chunk)
    return str(hasher.hexdigest())


class _Transfer:
    """A file on its way: the bytes that are there, and their hash."""

    def __init__(self, stream: BinaryIO, file: HubFile, show: Callable[[int], None]) -> None:
        """Begin with what an earlier attempt has left."""
        self.stream = stream
        self.file = file
        self.show = show
        self.hasher = file.hasher()
        if stream.seek(0, os.SEEK_END) > file.bytes:  # not the start of this file
            stream.truncate(0)
        stream.seek(0)
        while chunk := stream.read(CHUNK_BYTES):
            self.hasher.update(chunk)
        self.done = stream.tell()
        show(self.done)

    def restart(self) -> None:
        self.stream.truncate(0)
        self.stream.seek(0)
        self.hasher = self.file.hasher()
        self.done = 0

    def append(self, chunk: bytes) -> None:
        self.stream.write(chunk)
        self.hasher.update(chunk)
        self.done += len(chunk)
        self.show(self.done)

    @property
    def is_right(self) -> bool:
        return self.done == self.file.bytes and self.hasher.hexdigest() == self.file.digest


def _fetch_file(plan: DownloadPlan, file: HubFile, show: Callable[[int], None]) -> None:
    """Download a file, from where an earlier attempt ended.

    It gets its name once its hash is right.
    """
    blob = plan.blob(file)
    partial = plan.partial(file)
    if blob.is_file() and blob.stat().st_size == file.bytes:
        show(file.bytes)
        return
    with partial.open("ab+") as stream:
        transfer = _Transfer(stream, file, show)
        failures = 0
        while transfer.done < file.bytes:
            before = transfer.done
            error: Exception = _TemporaryError(f"{plan.endpoint} ends {file.name} too early")
            try:
                _receive(plan, transfer)
            except (_TemporaryError, _transport_error()) as caught:
                error = caught
            if transfer.done == file.bytes:
                break
            failures = 0 if transfer.done > before else failures + 1
            if failures == ATTEMPTS:
                raise error
            time.sleep(RECONNECT_SECONDS * 2**failures)
        stream.flush()
        os.fsync(stream.fileno())
    if not transfer.is_right:
        partial.unlink()
        actual = transfer.hasher.hexdigest()
        raise UserError(
            f"{file.name} of {plan.repository}: not the file that the Hub lists (hash"
            f" {actual[:12]}..., expected {file.digest[:12]}...); it was deleted. Run again; if"
            " this repeats, do not use it"
        )
    partial.replace(blob)


def _receive(plan: DownloadPlan, transfer: _Transfer) -> None:
    """Append the rest of a file, as far as the connection lasts."""
    file = transfer.file
    headers = _headers()
    if transfer.done:
        headers["range"] = f"bytes={transfer.done}-"
    with _open(plan.url(file), headers) as response:
        if response.status_code == RANGE_NOT_SATISFIABLE:
            transfer.restart()
            raise _TemporaryError(f"{plan.endpoint} does not continue {file.name}")
        _check_status(response, plan.repository, plan.endpoint)
        if response.status_code != PARTIAL_CONTENT:  # the server does not continue files
            transfer.restart()
        for chunk in response.iter_raw(CHUNK_BYTES):
            # A longer file is not the right one; what is there then has the wrong hash.
            transfer.append(chunk[: file.bytes - transfer.done])
            if transfer.done == file.bytes:
                return


def _transport_error() -> type[Exception]:
    error: type[Exception] = require("huggingface_hub.errors", "m1clip download", "hub").HTTPError
    return error


def _address_error() -> type[Exception]:
    """What the library below huggingface_hub (httpx, or httpx2) raises for a malformed address."""
    library = _transport_error().__module__.partition(".")[0]
    error: type[Exception] = require(library, "m1clip download", "hub").InvalidURL
    return error


def _link(path: Path, blob: Path) -> None:
    """Name a file of the cache in a snapshot: a relative link, or a copy if links fail."""
    if path.is_file():
        return
    path.unlink(missing_ok=True)  # a link to a file that is gone
    try:
        path.symlink_to(os.path.relpath(blob, path.parent))
    except (OSError, NotImplementedError):
        shutil.copyfile(blob, path)
