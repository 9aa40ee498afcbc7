"""webdataset tar shards: `shard-{000..099}.tar`, a folder of .tar files, or one; read in place, never unpacked."""

from __future__ import annotations

import glob
import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, BinaryIO

from PIL import Image

from m1clip.data.images import MAX_FILE_BYTES, SUFFIXES, BadImage, decode, file_stamp, one_line
from m1clip.data.sources import splits
from m1clip.data.sources.base import DataSource, Row, captions_of, user_error
from m1clip.data.sources.splits import clean_text
from m1clip.data.sources.tables import CAPTION_NAMES
from m1clip.io import open_regular

# In the json of a sample that `m1clip data pack` wrote: its id is that of the original image.
PACKED = "m1clip-pack-1"
MAX_SHARDS = 100_000
MAX_TEXT_BYTES = 2**20
_MAX_EXTENDED = 2**20  # no tar writer makes longer names or extended headers
_BLOCK = 512
_KEY = re.compile(r"((?:.*/)?[^./][^./]*)\.([^/]*)")  # webdataset: everything up to the first dot of the file name


class TruncatedTar(Exception):
    """The file ends, or stops being a tar, before its end marker; what came before is valid."""


@dataclass(frozen=True, slots=True)
class Member:
    """A file in a tar: where its bytes are, or why it is refused."""

    name: str
    offset: int
    size: int
    refused: str | None = None


def members(file: BinaryIO, file_size: int) -> Iterator[Member]:
    """Every file in the tar, in order; TruncatedTar where it breaks off.

    Unlike `tarfile` it reports damage in the middle, bounds extended headers and keeps nothing in memory.
    """
    offset = 0
    name: str | None = None  # from an extended header, for the next member
    size: int | None = None
    while offset < file_size:
        file.seek(offset)
        header = file.read(_BLOCK)
        if len(header) < _BLOCK:
            raise TruncatedTar("cut short in a header")
        if not header.strip(b"\0"):
            return
        header_size = _number(header[124:136])
        checksum = sum(header[:148]) + sum(b" " * 8) + sum(header[156:])
        if header_size is None or _number(header[148:156]) != checksum:
            raise TruncatedTar("what follows is not a tar header" if offset else "not a tar file")
        kind, start = header[156:157], offset + _BLOCK
        extended = kind in (b"L", b"K", b"x", b"g", b"X")
        member_size = header_size if extended or size is None else size
        # Rounded up to blocks, so the offset always grows.
        offset = start + -(-member_size // _BLOCK) * _BLOCK
        if extended:
            if member_size > _MAX_EXTENDED or start + member_size > file_size:
                raise TruncatedTar("cut short in an extended header")
            body = file.read(member_size)
            if kind == b"L":
                name = _text(body)
            elif kind in (b"x", b"X"):
                fields = _pax_fields(body)
                name = _text(fields["path"]) if "path" in fields else name
                size = int(fields["size"]) if re.fullmatch(rb"\d{1,19}", fields.get("size", b"")) else None
            continue
        member_name = name if name is not None else _short_name(header)
        name = size = None
        if kind == b"5":  # a folder
            continue
        refused = _refusal(member_name, kind)
        if refused is None and start + member_size > file_size:
            raise TruncatedTar(f"cut short in {member_name}")
        yield Member(member_name, start, member_size, refused)


def _refusal(name: str, kind: bytes) -> str | None:
    if kind not in (b"0", b"\0", b"7"):
        return "a link" if kind in (b"1", b"2") else "not a regular file"
    parts = name.replace("\\", "/").split("/")
    if not parts[0] or parts[0].endswith(":"):
        return "an absolute path"
    return "a path with .." if ".." in parts else None


def _text(raw: bytes) -> str:
    return raw.split(b"\0", 1)[0].decode("utf-8", "replace")


def _short_name(header: bytes) -> str:
    name, prefix = _text(header[:100]), _text(header[345:500])
    return f"{prefix}/{name}" if prefix and header[257:263] == b"ustar\0" else name


def _number(field: bytes) -> int | None:
    if field[:1] == b"\x80":
        return int.from_bytes(field[1:], "big")
    digits = field.split(b"\0", 1)[0].strip()
    return int(digits or b"0", 8) if re.fullmatch(rb"[0-7]*", digits) else None


def _pax_fields(body: bytes) -> dict[str, bytes]:
    """Records of the form `length key=value newline`."""
    fields: dict[str, bytes] = {}
    at = 0
    while found := re.match(rb"(\d{1,7}) ", body[at : at + 20]):
        end = at + int(found.group(1))
        if end <= at + found.end() or end > len(body):
            break
        key, _, fields_value = body[at + found.end() : end - 1].partition(b"=")
        fields[key.decode("utf-8", "replace")] = fields_value
        at = end
    return fields


@dataclass(frozen=True, slots=True)
class TarImage:
    """An image in a shard."""

    path: str
    member: str
    offset: int
    size: int

    def open(self, want: int | None = None) -> Image.Image:
        return decode(self.read(), want, str(self))

    def read(self) -> bytes:
        if self.size > MAX_FILE_BYTES:
            raise BadImage(str(self), f"{self.size >> 20} MiB is too large for an image", "too-large")
        try:
            with open_regular(self.path) as file:
                file.seek(self.offset)
                data = file.read(self.size)
        except OSError as error:
            raise BadImage(str(self), f"cannot be opened ({error.strerror})") from error
        if len(data) < self.size:
            raise BadImage(str(self), "truncated: the shard ends before the end of the image", "truncated")
        return data

    def stamp(self) -> str:
        return f"{self.path}|{file_stamp(self.path)}|{self.offset}|{self.size}"

    def __str__(self) -> str:
        return one_line(f"{self.path}: {self.member}")


def is_shards(path: Path) -> bool:
    """A .tar file, a pattern of them, or a folder with some, also in its train/ and val/."""
    if path.is_dir():
        return bool(_in_folder(path))
    return path.suffix.lower() == ".tar" or (".tar" in path.name and "{" in path.name)


def shard_rows(source: DataSource) -> Iterator[Row]:
    """One row per sample, shard by shard; a truncated shard gives what is before the cut."""
    for path in shard_paths(source.path):
        with open_regular(path) as file:
            for key, group in groupby(_named(path, file, source), key=lambda item: item[0]):
                parts = {suffix: member for _, suffix, member in group}
                yield from _sample(path, file, key, parts, source)


def _named(path: str, file: BinaryIO, source: DataSource) -> Iterator[tuple[str, str, Member]]:
    """(key, suffix, member) of each usable member; consecutive ones with the same key are a sample."""
    size = os.fstat(file.fileno()).st_size
    try:
        for member in members(file, size):
            name = _KEY.fullmatch(member.name)
            if member.refused:
                source.problem((path, 0), f"{member.name[:200]} is {member.refused}: skipped", "unsafe-member")
            elif name:
                yield name.group(1), name.group(2).lower(), member
    except TruncatedTar as error:
        file.seek(0)
        if file.read(2) == b"\x1f\x8b":
            raise user_error(f"{path}: a compressed tar; unpack it to a plain .tar (gunzip)") from error
        source.problem((path, 0), str(error), "shard")


def _sample(path: str, file: BinaryIO, key: str, parts: dict[str, Member], source: DataSource) -> Iterator[Row]:
    place = (f"{path}: {key}", 0)
    image = next((part for suffix, part in parts.items() if "." + suffix.rsplit(".", 1)[-1] in SUFFIXES), None)
    if image is None:
        source.problem(place, "no image", "no-image")
        return
    metadata = _json(file, parts["json"]) if "json" in parts else {}
    captions = next((metadata[name] for name in CAPTION_NAMES if name in metadata), None)
    # The json may have several captions; the txt, which open_clip reads, has one.
    if "txt" in parts and not (isinstance(metadata.get("captions"), list) and captions_of(captions)[0]):
        captions = _read(file, parts["txt"])
    split = (
        splits.from_value(metadata.get("split"))
        or splits.from_file_name(os.path.basename(path))
        or splits.from_folder(Path(path).parent.name)
    )
    # Keys start again in each shard, so the shard is part of the id.
    id_ = f"{os.path.basename(path)}/{image.name}"
    if metadata.get("format") == PACKED and isinstance(metadata.get("id"), str):
        id_ = clean_text(metadata["id"]) or id_
    yield Row(place, captions, split, image=TarImage(path, image.name, image.offset, image.size), id=id_)


def _read(file: BinaryIO, member: Member) -> str | None:
    if member.size > MAX_TEXT_BYTES:
        return None
    file.seek(member.offset)
    return file.read(member.size).decode("utf-8-sig", "replace")


def _json(file: BinaryIO, member: Member) -> dict[str, Any]:
    try:
        value = json.loads(_read(file, member) or "{}")
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _in_folder(folder: Path) -> list[str]:
    below = [
        path for sub in sorted(folder.iterdir()) if splits.from_folder(sub.name) for path in sorted(sub.glob("*.tar"))
    ]
    return [os.fspath(path) for path in (*sorted(folder.glob("*.tar")), *below)]


def shard_paths(path: Path) -> list[str]:
    """The shards of a path, a folder or a brace pattern; each must exist."""
    if path.is_dir():
        found = _in_folder(path)
    elif path.exists():
        found = [os.fspath(path)]
    else:
        patterns = _expand(os.fspath(path))
        found = [name for part in patterns for name in (sorted(glob.glob(part)) if "*" in part else [part])]
    if not found:
        raise user_error(f"{path}: no .tar file there")
    if missing := [name for name in found if not os.path.isfile(name)]:
        raise user_error(f"{missing[0]}: no such shard ({len(missing)} of {len(found)} are missing); check the pattern")
    return found


def _expand(pattern: str) -> list[str]:
    """a-{0..2}.tar -> a-0.tar, a-1.tar, a-2.tar; {x,y} is a choice."""
    if re.search(r"\{[^{}]*\{", pattern) or "${" in pattern:
        raise user_error(f"{pattern}: nested braces and ${{...}} are not supported; write shard-{{000..099}}.tar")
    paths = [""]
    for number, part in enumerate(re.split(r"\{([^{}]*)\}", pattern)):
        ends = re.fullmatch(r"(\d{1,12})\.\.(\d{1,12})", part) if number % 2 else None
        if number % 2 and not ends and ".." in part:
            raise user_error(f"{pattern}: {{{part}}} is not a range such as {{000..099}}")
        # Counted first: {0..999999999999} must not be written out.
        count = abs(int(ends[2]) - int(ends[1])) + 1 if ends else part.count(",") + 1
        if count * len(paths) > MAX_SHARDS:
            raise user_error(f"{pattern}: {count * len(paths):,} shards are more than {MAX_SHARDS:,}")
        if ends:
            first, last = int(ends[1]), int(ends[2])
            numbers = range(first, last + 1) if first <= last else range(first, last - 1, -1)
            choices = [str(value).zfill(len(ends[1])) for value in numbers]
        else:
            choices = part.split(",") if number % 2 else [part]
        paths = [path + choice for path in paths for choice in choices]
    return paths
