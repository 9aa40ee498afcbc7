"""Parts of files on disk, HTTP or an object store (by fsspec), with retries.

Messages never show credentials.
"""

import io
import os
import random
import re
import threading
import time
from functools import lru_cache
from typing import Any, BinaryIO

from m1clip.data.sources.base import user_error
from m1clip.errors import UserError
from m1clip.extras import require
from m1clip.formatting import one_line
from m1clip.io import open_regular

TRIES, TRY_SECONDS, BACKOFF_SECONDS = 3, 15.0, 0.5
# Failed reads of a file in a row; it is then skipped, and tried again once per PAUSE_SECONDS.
BROKEN_AFTER = 3
PAUSE_SECONDS = 300.0
SCAN_BYTES = 2**22  # read ahead while a file is read from start to end
# Of what is read without a range: an index of a shard, the list of a folder, an error.
MAX_WHOLE_BYTES = 2**25
MAX_REMOTE_FILE = 2**40  # a larger one never ends
_REFUSED = (401, 403)  # HTTP: the next try would give the same
_OK, _PARTIAL_CONTENT, _NO_SUCH_RANGE = 200, 206, 416

_lock = threading.Lock()
_failures: dict[
    str, tuple[int, float]
] = {}  # of each file in this process: how many in a row, and when the last was


def is_remote(path: str) -> bool:
    return "://" in path


def without_credentials(text: str) -> str:
    """A name or message without the user names, passwords and queries of the URLs in it, on one
    line.
    """
    text = re.sub(r"://[^/\s]*@", "://", text)
    return one_line(re.sub(r"(://[^\s?#'\"]*)[?#][^\s'\"]*", r"\1", text))


def with_variables(url: str) -> str:
    """The URL with the values of its ${VARIABLES}.

    Other credentials are rejected, as runs record the URL.
    """
    if without_credentials(url) != one_line(url):
        raise UserError(
            f"{without_credentials(url)}: user names, passwords and queries in a URL would be"
            " written to the run folder; put them into a variable, as in"
            " 'https://host/train.tar${QUERY}', or use the store's own configuration"
        )

    def value(match: re.Match[str]) -> str:
        if match[1] not in os.environ:
            raise UserError(
                f"{without_credentials(url)}: the environment has no variable {match[1]}"
            )
        return os.environ[match[1]]

    return re.sub(r"\$\{(\w+)\}", value, url)


def read_range(path: str, offset: int, size: int) -> bytes:
    """Some bytes of a file, fewer at its end.

    OSError after several tries, or at once if the file keeps failing.
    """
    if not is_remote(path):
        with open_regular(path) as file:
            file.seek(offset)
            return file.read(size)
    if is_broken(path):
        raise OSError(f"skipped after {BROKEN_AFTER} failed reads")
    try:
        data = _tried(
            lambda fs: fs.cat_file(path, start=offset, end=offset + size, **_limit(fs)), path
        )
    except OSError:
        with _lock:
            _failures[path] = _failures.get(path, (0, 0.0))[0] + 1, time.monotonic()
        raise
    _failures.pop(path, None)
    if len(data) > size:
        raise _no_ranges(path)
    return bytes(data)


def _no_ranges(path: str) -> UserError:
    return UserError(
        f"{without_credentials(path)}: the server ignores range requests; copy the shards to one"
        " that supports them"
    )


def is_broken(path: str) -> bool:
    """Whether the last reads of a file failed, so that it is skipped for a while."""
    count, last = _failures.get(path, (0, 0.0))
    return count >= BROKEN_AFTER and time.monotonic() < last + PAUSE_SECONDS


def read_file(path: str) -> bytes | None:
    """All bytes of a small remote file; None if there is none, or if it is empty or too large."""
    try:
        data = bytes(
            _tried(
                lambda fs: fs.cat_file(path, start=0, end=MAX_WHOLE_BYTES + 1, **_limit(fs)), path
            )
        )
    except (
        FileNotFoundError,
        PermissionError,
    ):  # S3 answers 403 for a missing key without the right to list
        return None
    except OSError as error:
        if str(error) == f"HTTP {_NO_SUCH_RANGE}":  # the file is empty
            return None
        raise
    return data if len(data) <= MAX_WHOLE_BYTES else None


def open_file(path: str) -> BinaryIO:
    """A file to read from start to end; a remote one is read in blocks."""
    return (
        io.BufferedReader(_RemoteFile(path), SCAN_BYTES) if is_remote(path) else open_regular(path)
    )


class _RemoteFile(io.RawIOBase):
    def __init__(self, path: str) -> None:
        self.path, self.at = path, 0
        read_range(path, 0, 1)  # which has clearer errors than `size`
        self.size: int = _tried(lambda fs: fs.size(path), path) or 0
        if not 0 < self.size <= MAX_REMOTE_FILE:
            raise OSError(
                f"{self.size >> 30:,} GiB is too large"
                if self.size
                else "the server reports no size"
            )

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        self.at = offset + (0, self.at, self.size)[whence]
        return self.at

    def readinto(self, buffer: Any, /) -> int:
        data = read_range(self.path, self.at, max(0, min(len(buffer), self.size - self.at)))
        buffer[: len(data)] = data
        self.at += len(data)
        return len(data)


def matching(pattern: str) -> list[str]:
    """The URLs that match a pattern with *, sorted."""
    return sorted(
        _tried(lambda fs: [fs.unstrip_protocol(name) for name in fs.glob(pattern)], pattern)
    )


def _tried(work: Any, path: str) -> Any:
    """What `work` returns for the file system of a path.

    An OSError without URLs after several tries.
    """
    for attempt in range(TRIES):
        try:
            return work(
                _file_system(
                    path.partition("://")[0], re.split(r"(?<=[^:/])/", path)[0], os.getpid()
                )
            )
        except FileNotFoundError:
            raise FileNotFoundError("no such file") from None
        except UserError:
            raise
        except Exception as error:  # noqa: BLE001  each store's library has errors of its own
            status = getattr(error, "status", None)
            if isinstance(error, PermissionError) or status in _REFUSED:
                raise PermissionError("no access; check the credentials") from None
            if attempt == TRIES - 1:
                name = type(error).__name__
                raise OSError(
                    f"HTTP {status}" if status else without_credentials(f"{name} {error}".strip())
                ) from None
        time.sleep(BACKOFF_SECONDS * 2**attempt * random.SystemRandom().uniform(0.5, 1.5))
    raise AssertionError


def _limit(fs: Any) -> dict[str, float]:
    return {"timeout": TRY_SECONDS} if fs.async_impl else {}


@lru_cache(maxsize=16)
def _file_system(protocol: str, root: str, process: int) -> Any:
    """One per process, as connections do not survive a fork.

    Shared by its threads, to use connections again.
    """
    core = require("fsspec.core", "data at a URL", extra="remote")
    options = (
        {"client_kwargs": {"response_class": _limited_response()}}
        if protocol in ("http", "https")
        else {}
    )
    try:
        return core.url_to_fs(f"{root}/", **options)[0]
    except (ImportError, ValueError) as error:
        raise user_error(
            f"{protocol}://: {error}; pip install 'm1clip[remote]' (and s3fs for s3, gcsfs for gs)"
        ) from None


@lru_cache(maxsize=1)
def _limited_response() -> type:
    """A response of aiohttp that is never longer than what was asked for, whatever the server
    sends.
    """
    aiohttp = require("aiohttp", "data at a URL", extra="remote")

    class LimitedResponse(aiohttp.ClientResponse):  # type: ignore[name-defined]
        _body: Any

        async def read(self) -> bytes:
            if self._body is None:
                try:
                    self._body = await self._read_limited()
                except BaseException:
                    self.close()
                    raise
            return bytes(self._body if self.closed else await super().read())

        async def _read_limited(self) -> bytes:
            """All bytes, counted while they arrive."""
            byte_range = re.fullmatch(
                r"bytes=(\d+)-(\d+)", self.request_info.headers.get("Range", "")
            )
            first, last = map(int, byte_range.groups()) if byte_range else (0, MAX_WHOLE_BYTES - 1)
            if self.status == _OK and first > 0:
                raise _no_ranges(str(self.url))
            limit = last - first + 1
            body = bytearray()
            async for block in self.content.iter_any():
                body += block
                if len(body) <= limit:
                    continue
                if self.status not in (_OK, _PARTIAL_CONTENT):
                    self.close()  # the page of an error, of which nobody needs the rest
                    break
                if byte_range:
                    raise _no_ranges(str(self.url))
                raise UserError(
                    f"{without_credentials(str(self.url))}: longer than {limit >> 20} MiB; is it"
                    " the right address?"
                )
            return bytes(body)

    return LimitedResponse
