"""webdataset tar shards: `shard-{000..099}.tar`, a folder of .tar, or one; jpg/png/webp + txt/json."""

from __future__ import annotations

import glob
import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from PIL import Image

from m1clip.data.images import MAX_FILE_BYTES, SUFFIXES, BadImage, decode, file_stamp, one_line
from m1clip.data.sources import splits
from m1clip.data.sources.base import BaseSource, Row, clean_text, need
from m1clip.data.sources.tables import CAPTION_NAMES, captions_of
from m1clip.errors import UserError
from m1clip.io import open_regular

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


# In the json of a sample that `m1clip data pack` wrote: then the id in it is that of the image it came from.
PACKED = "m1clip-pack-1"
MAX_SHARDS = 100_000
MAX_TEXT_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class TarImage:
    """The bytes of an image in a shard, read where they lie."""

    path: str
    member: str
    offset: int
    size: int

    def open(self, want: int | None = None) -> Image.Image:
        """Decode to RGB; BadImage when it cannot be."""
        return decode(self.read(), want, str(self))

    def read(self) -> bytes:
        """The bytes of the member; BadImage when the shard has lost them."""
        if self.size > MAX_FILE_BYTES:
            raise BadImage(str(self), f"{self.size >> 20} MiB is more than an image needs", "too-large")
        try:
            with open_regular(self.path) as file:
                file.seek(self.offset)
                data = file.read(self.size)
        except OSError as error:
            raise BadImage(str(self), f"cannot be opened ({error.strerror})") from error
        if len(data) < self.size:
            raise BadImage(str(self), "truncated: the shard ends before the image does", "truncated")
        return data

    def stamp(self) -> str:
        """Name, size and time of the shard, and the place in it."""
        return f"{self.path}|{file_stamp(self.path)}|{self.offset}|{self.size}"

    def __str__(self) -> str:
        return one_line(f"{self.path}: {self.member}")


class ShardSource(BaseSource):
    """Members of one key are a sample. The split is that of the json, the shard's name or its folder."""

    kind = "webdataset"

    @classmethod
    def looks_like(cls, path: Path) -> bool:
        """A .tar file, a pattern of them, or a folder that holds some, perhaps in train/ and val/."""
        if path.is_dir():
            return bool(_in_folder(path))
        return path.suffix.lower() == ".tar" or (".tar" in path.name and "{" in path.name)

    def rows(self) -> Iterator[Row]:
        """A row a sample, shard by shard; a shard cut in half gives what lies before the cut."""
        tars = need("webdataset.tariterators", "Reading tar shards")
        for path in shard_paths(self.path):
            with open_regular(path) as file:
                flat = self._files(path, file)
                for sample in tars.group_by_keys(flat, handler=partial(self._odd, path)):
                    row = self._row(path, file, sample)
                    if row is not None:
                        yield row

    def _odd(self, path: str, error: Exception) -> bool:
        self.problem((path, 0), str(error.args[0] if error.args else error)[:300], "shard")
        return True

    def _files(self, path: str, file: BinaryIO) -> Iterator[dict[str, Any]]:
        """Members in the form webdataset groups; the data is where it lies, not the bytes."""
        size = os.fstat(file.fileno()).st_size
        try:
            for member in members(file, size):
                if member.refused:
                    self.problem((path, 0), f"{member.name[:200]} is {member.refused}: left out", "unsafe-member")
                else:
                    yield {"fname": member.name, "data": member, "__url__": path}
        except CutShort as cut:
            if size >= 2 and _is_gzip(file):
                raise UserError(one_line(f"{path}: a compressed tar; unpack it to plain .tar (gunzip)")) from cut
            self.problem((path, 0), str(cut), "shard")

    def _row(self, path: str, file: BinaryIO, sample: dict[str, Any]) -> Row | None:
        key = sample["__key__"]
        parts = {suffix: part for suffix, part in sample.items() if isinstance(part, Member)}
        image = next((p for suffix, p in parts.items() if "." + suffix.rsplit(".", 1)[-1] in SUFFIXES), None)
        if image is None:
            self.problem((f"{path}: {key}", 0), "no image", "no-image")
            return None
        about = _json(file, parts["json"]) if "json" in parts else {}
        captions: list[str] = []
        # A json may hold several captions where the txt, which open_clip reads, has room for one.
        if isinstance(about.get("captions"), list) or "txt" not in parts:
            value = next((about[name] for name in CAPTION_NAMES if name in about), None)
            captions, _ = captions_of(value)
        if not captions and "txt" in parts:
            captions, _ = captions_of(_read(file, parts["txt"]))
        if not captions:
            self.problem((f"{path}: {key}", 0), "no caption", "empty-caption")
            return None
        named = about.get("split")
        split = splits.normalise(clean_text(named)) if isinstance(named, str) and named.strip() else None
        split = split or splits.from_file_name(os.path.basename(path)) or splits.known(Path(path).parent.name)
        ref = TarImage(path, image.name, image.offset, image.size)
        # Keys start again in each shard, so the shard is part of the id.
        packed = about.get("format") == PACKED and isinstance(about.get("id"), str)
        id_ = clean_text(about["id"]) if packed else f"{os.path.basename(path)}/{image.name}"
        return Row(ref, tuple(captions), id_, split, (f"{path}: {key}", 0))


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


def _is_gzip(file: BinaryIO) -> bool:
    file.seek(0)
    return file.read(2) == b"\x1f\x8b"


def _in_folder(folder: Path) -> list[str]:
    inside = sorted(folder.glob("*.tar"))
    below = [path for sub in sorted(folder.iterdir()) if splits.known(sub.name) for path in sorted(sub.glob("*.tar"))]
    return [os.fspath(path) for path in (*inside, *below)]


def shard_paths(path: Path) -> list[str]:
    """The shards a path, a folder or a brace pattern means; each must exist."""
    if path.is_dir():
        found = _in_folder(path)
    elif path.exists():
        found = [os.fspath(path)]
    else:
        found = _expand(os.fspath(path))
    if not found:
        raise UserError(one_line(f"{path}: no .tar file there"))
    if gone := [name for name in found if not os.path.isfile(name)]:
        raise UserError(
            one_line(f"{gone[0]}: no such shard ({len(gone)} of {len(found)} are missing); check the pattern")
        )
    return found


def _expand(pattern: str) -> list[str]:
    # Counted first: a pattern such as {0..999999999999} must not be written out.
    if re.search(r"\{[^{}]*\{", pattern) or "${" in pattern:
        raise UserError(
            one_line(f"{pattern}: braces inside braces and ${{...}} are not read; write shard-{{000..099}}.tar")
        )
    count = 1
    for inside in re.findall(r"\{([^{}]*)\}", pattern):
        ends = re.fullmatch(r"(-?\d{1,12})\.\.(-?\d{1,12})", inside)
        if not ends and ".." in inside:
            raise UserError(one_line(f"{pattern}: {{{inside}}} is not a range such as {{000..099}}"))
        count *= abs(int(ends[2]) - int(ends[1])) + 1 if ends else inside.count(",") + 1
    if count > MAX_SHARDS:
        raise UserError(one_line(f"{pattern}: {count:,} shards are more than {MAX_SHARDS:,}"))
    expand = need("webdataset.shardlists", "A pattern of shards").expand_urls
    try:
        return [name for part in expand(pattern) for name in (sorted(glob.glob(part)) if "*" in part else [part])]
    except (AssertionError, ValueError, IndexError) as error:
        raise UserError(one_line(f"{pattern}: not a pattern of shards ({error})")) from error
