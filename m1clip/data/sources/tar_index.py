"""Where each member of a tar file lies. Only headers are read; nothing is written, followed or unpickled.

Our own reader and not `tarfile`, because a hostile header must not make it loop (CVE-2025-8194), match
for minutes (CVE-2024-6232) or fill the memory, on every Python we run on.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

BLOCK = 512
# A name or an extended header longer than this was not written by any tar.
MAX_EXTENDED = 2**20


class CutShort(Exception):
    """The file ends, or stops being a tar, before its end mark; what came before is good."""


@dataclass(frozen=True, slots=True)
class Member:
    """A member's name, the offset and size of its bytes, and whether it is a plain file with a safe name."""

    name: str
    offset: int
    size: int
    refused: str | None = None


def members(file: BinaryIO, file_size: int) -> Iterator[Member]:
    """Every file in the tar, in order; CutShort where it breaks off."""
    offset = 0
    long_name: str | None = None
    long_size: int | None = None
    while offset < file_size:
        file.seek(offset)
        header = file.read(BLOCK)
        if len(header) < BLOCK:
            raise CutShort("cut short in a header")
        if not header.strip(b"\0"):
            return
        if not _checksum_holds(header):
            raise CutShort("what follows is not a tar header" if offset else "not a tar file")
        kind = header[156:157]
        size = _number(header[124:136])
        if size is None:
            raise CutShort("a header with no size")
        start = offset + BLOCK
        # Rounded up: each member fills whole blocks, so the offset always grows.
        offset = start + -(-size // BLOCK) * BLOCK
        if kind in b"LKxgX" and kind:
            if size > MAX_EXTENDED or start + size > file_size:
                raise CutShort("cut short in an extended header")
            body = file.read(size)
            if kind == b"L":
                long_name = _text(body)
            elif kind in b"xX":
                name, pax_size = _pax(body)
                long_name, long_size = name or long_name, pax_size
            continue
        if long_size is not None:
            size = long_size
            offset = start + -(-size // BLOCK) * BLOCK
        name = long_name if long_name is not None else _short_name(header)
        long_name = long_size = None
        if kind == b"5":
            continue
        refused = _refusal(name, kind)
        if refused is None and start + size > file_size:
            raise CutShort(f"cut short in {name}")
        yield Member(name, start, size, refused)


def _refusal(name: str, kind: bytes) -> str | None:
    if kind in b"12" and kind:
        return "a link"
    if kind not in (b"0", b"\0", b"7"):
        return "not a plain file"
    parts = name.replace("\\", "/").split("/")
    if name.startswith(("/", "\\")) or parts[0].endswith(":"):
        return "an absolute name"
    return "a name with .." if ".." in parts else None


def _text(raw: bytes) -> str:
    return raw.split(b"\0", 1)[0].decode("utf-8", "replace")


def _short_name(header: bytes) -> str:
    name, prefix = _text(header[:100]), _text(header[345:500])
    return f"{prefix}/{name}" if prefix and header[257:263] == b"ustar\0" else name


def _number(field: bytes) -> int | None:
    if field[:1] == b"\x80":
        return int.from_bytes(field[1:], "big")
    digits = field.split(b"\0", 1)[0].strip()
    if not digits:
        return 0
    return int(digits, 8) if digits.isdigit() and not set(digits) & set(b"89") else None


def _checksum_holds(header: bytes) -> bool:
    return _number(header[148:156]) == sum(header[:148]) + sum(b" " * 8) + sum(header[156:])


def _pax(body: bytes) -> tuple[str | None, int | None]:
    """path and size from records of the form `length key=value newline`."""
    name: str | None = None
    size: int | None = None
    at = 0
    while at < len(body):
        digits = body[at : at + 20].split(b" ", 1)[0]
        length = int(digits) if digits.isdigit() else 0
        if length <= len(digits) or at + length > len(body):
            break
        key, _, value = body[at + len(digits) + 1 : at + length - 1].partition(b"=")
        if key == b"path":
            name = _text(value)
        elif key == b"size" and value.isdigit() and len(value) < 20:
            size = int(value)
        at += length
    return name, size
