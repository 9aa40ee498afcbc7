"""webdataset tar shards: `shard-{000..099}.tar`, a folder of .tar files, or a single one.

Read in place.
"""

import glob
import os
import re
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, NamedTuple

from m1clip.data.images import MAX_MEMBER_BYTES, SUFFIXES, BadImage, ImageRef, file_stamp
from m1clip.data.sources import splits
from m1clip.data.sources.base import (
    MAX_TEXT_BYTES,
    Captions,
    DataSource,
    Location,
    Row,
    captions_of,
    parse_json,
    user_error,
)
from m1clip.data.sources.columns import CAPTION_NAMES
from m1clip.data.sources.plain_text import decode_text
from m1clip.data.sources.remote import (
    is_remote,
    matching,
    read_range,
    with_variables,
    without_credentials,
)
from m1clip.data.sources.splits import clean_text
from m1clip.data.types import ProblemKind
from m1clip.formatting import one_line
from m1clip.io import open_regular

# In the json of a sample that `m1clip data pack` wrote: its id is that of the original image.
PACKED = "m1clip-pack-1"
MAX_SHARDS = 100_000
_MAX_PARTS = 256  # files of one sample; more are not read
_MAX_EXTENDED = 2**20  # no tar writer makes longer names or extended headers
# Webdataset: everything up to the first dot of the file name.
_KEY = re.compile(r"((?:.*/)?[^./][^./]*)\.([^/]*)")


Report = Callable[[Location, str, ProblemKind], None]  # location, what is wrong, kind


class TruncatedTar(Exception):
    """The file ends, or stops being a tar, before its end-of-archive marker.

    What came before is valid.
    """


class Member(NamedTuple):
    """A file in a tar: where its bytes are, or why it is rejected."""

    name: str
    offset: int
    size: int
    rejected: str | None


def members(file: BinaryIO, file_size: int) -> Iterator[Member]:
    """Every file in the tar, in order; raises TruncatedTar where it breaks off.

    Unlike `tarfile.open`, it reports damage in the middle, always ends, limits extended headers and
    stores no members.
    """
    offset = 0
    extended: dict[str, str] = {}  # from extended headers, for the next member
    while offset < file_size:
        file.seek(offset)
        block = file.read(tarfile.BLOCKSIZE)
        if block and not block.strip(b"\0"):
            return
        try:
            header = tarfile.TarInfo.frombuf(block, "utf-8", "replace")
        except (tarfile.HeaderError, ValueError, OverflowError) as error:
            raise TruncatedTar(
                "cut short, or no tar header follows" if offset else "not a tar file"
            ) from error
        start = offset + tarfile.BLOCKSIZE
        is_extension = header.type in (b"L", b"K", b"x", b"g", b"X")
        size = header.size if is_extension else int(extended.get("size", header.size))
        name = extended.get("path", header.name)
        if size < 0 or (is_extension and size > _MAX_EXTENDED):
            raise TruncatedTar("no tar header follows")
        rejected = _rejection(name, header.type)
        if start + size > file_size and (is_extension or rejected is None):
            raise TruncatedTar(f"cut short in {'an extended header' if is_extension else name}")
        # Rounded up to blocks, so the offset always grows.
        offset = start + -(-size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE
        if header.type == b"L":
            extended["path"] = _text(file.read(size))
        elif header.type in (b"x", b"X"):
            extended |= _pax_fields(file.read(size))
        elif not is_extension:
            extended = {}
            if header.type != tarfile.DIRTYPE:
                yield Member(name, start, size, rejected)


def _rejection(name: str, kind: bytes) -> str | None:
    if kind not in (tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.CONTTYPE):
        return "a link" if kind in (tarfile.LNKTYPE, tarfile.SYMTYPE) else "not a regular file"
    parts = name.replace("\\", "/").split("/")
    if not parts[0] or parts[0].endswith(":"):
        return "an absolute path"
    return "a path with .." if ".." in parts else None


def _text(raw: bytes) -> str:
    return raw.split(b"\0", 1)[0].decode("utf-8", "replace")


def _pax_fields(body: bytes) -> dict[str, str]:
    """Path and size in records of the form `length key=value newline`."""
    fields: dict[str, str] = {}
    at = 0
    while record := re.match(rb"(\d{1,7}) ", body[at : at + 20]):
        end = at + int(record.group(1))
        if end <= at + record.end() or end > len(body):
            break
        key, _, value = body[at + record.end() : end - 1].partition(b"=")
        if key == b"path" or (key == b"size" and re.fullmatch(rb"\d{1,19}", value)):
            fields[key.decode()] = _text(value)
        at = end
    return fields


@dataclass(frozen=True, slots=True)
class TarImage(ImageRef):
    in_processes: ClassVar[bool] = True

    path: str
    member: str
    offset: int
    size: int

    def read(self) -> bytes:
        if self.size > MAX_MEMBER_BYTES:
            raise BadImage(
                str(self), f"{self.size >> 20} MiB is too large for an image", "too-large"
            )
        try:
            data = read_range(self.path, self.offset, self.size)
        except OSError as error:
            raise BadImage(str(self), f"cannot be opened ({error.strerror})") from error
        if len(data) < self.size:
            raise BadImage(
                str(self), "truncated: the shard ends before the end of the image", "truncated"
            )
        return data

    def stamp(self) -> str:
        return f"{self.path}|{file_stamp(self.path)}|{self.offset}|{self.size}"

    def __str__(self) -> str:
        return one_line(f"{self.path}: {self.member}")


def is_shards(path: Path) -> bool:
    """Whether a path is a .tar file, a pattern of them, or a folder with some, also in subfolders
    such as train/.
    """
    if path.is_dir():
        return bool(_in_folder(path))
    return path.suffix.lower() == ".tar" or (".tar" in path.name and "{" in path.name)


def shard_rows(source: DataSource) -> Iterator[Row]:
    """One row per sample, shard by shard; a truncated shard yields the samples before the cut."""
    for path in shard_paths(source.path):
        with open_regular(path) as file:
            for location, image, parts in samples_in(path, file, source.problem):
                texts = read_texts(file, parts)
                split = texts.split or split_of(path)
                # Two shards may have the same keys, so the shard is part of the id.
                id_ = texts.id or f"{os.path.basename(path)}/{image.name}"
                yield Row(
                    location,
                    texts.captions,
                    split,
                    TarImage(path, image.name, image.offset, image.size),
                    id_,
                )


def split_of(path: str) -> str | None:
    """The split in the name of a shard or of its folder."""
    return splits.from_file_name(os.path.basename(path)) or splits.from_folder(
        os.path.basename(os.path.dirname(path))
    )


def samples_in(
    path: str, file: BinaryIO, problem: Report
) -> Iterator[tuple[Location, Member, dict[str, Member]]]:
    """(location, image, all members by suffix) of each sample: consecutive members with the
    same key.
    """
    for key, group in groupby(_named(path, file, problem), key=lambda item: item[0]):
        parts: dict[str, Member] = {}
        for _, suffix, member in group:
            if suffix in parts or len(parts) < _MAX_PARTS:
                parts[suffix] = member
        location = (f"{path}: {key}", 0)
        image = next(
            (parts[name] for name in parts if f".{name.rsplit('.', 1)[-1]}" in SUFFIXES), None
        )
        if image is None:
            problem(location, "no image", "no-image")
        else:
            yield location, image, parts


def _named(path: str, file: BinaryIO, problem: Report) -> Iterator[tuple[str, str, Member]]:
    """(key, suffix, member) of each usable member."""
    try:
        for member in members(file, file.seek(0, os.SEEK_END)):
            name = _KEY.fullmatch(member.name)
            if member.rejected:
                problem(
                    (path, 0), f"{member.name[:200]} is {member.rejected}: skipped", "unsafe-member"
                )
            elif name:
                yield name.group(1), name.group(2).lower(), member
    except TruncatedTar as error:
        file.seek(0)
        if file.read(2) == b"\x1f\x8b":
            raise user_error(
                f"{path}: a compressed tar; decompress it to a .tar file (gunzip)"
            ) from error
        problem((path, 0), str(error), "shard")


class Texts(NamedTuple):
    """Texts of a sample: captions, the member that contains them, and the split and id by `m1clip
    data pack`.
    """

    captions: Captions
    member: Member | None
    is_json: bool
    split: str | None
    id: str | None


def read_texts(file: BinaryIO, parts: dict[str, Member]) -> Texts:
    """The captions of a sample.

    The json may contain several; the txt, which open_clip reads, contains one.
    """

    def read(suffix: str) -> str:
        if suffix not in parts or parts[suffix].size > MAX_TEXT_BYTES:
            return ""
        file.seek(parts[suffix].offset)
        return _text_in(file.read(parts[suffix].size))

    metadata = _metadata(read("json"))
    captions, is_json = _json_captions(metadata), True
    if "txt" in parts and not (
        isinstance(metadata.get("captions"), list) and captions_of(captions)[0]
    ):
        captions, is_json = read("txt"), False
    is_packed = metadata.get("format") == PACKED and isinstance(metadata.get("id"), str)
    id_ = clean_text(metadata["id"]) if is_packed else None
    return Texts(
        captions,
        parts.get("json" if is_json else "txt"),
        is_json,
        splits.from_value(metadata.get("split")),
        id_,
    )


def captions_in(data: bytes, is_json: bool) -> tuple[str, ...]:
    """The captions in the bytes of a txt or json member."""
    text = _text_in(data)
    return tuple(captions_of(_json_captions(_metadata(text)) if is_json else text)[0])


def _text_in(data: bytes) -> str:
    """The text of a member; "" for bytes that are no text, so that its sample has no caption."""
    try:
        return decode_text(data)[0]
    except ValueError:
        return ""


def _metadata(text: str) -> dict[str, Any]:
    try:
        metadata = parse_json(text or "{}")
    except ValueError:
        return {}
    return metadata if isinstance(metadata, dict) else {}


def _json_captions(metadata: dict[str, Any]) -> Captions:
    return next((metadata[name] for name in CAPTION_NAMES if name in metadata), None)


def _in_folder(folder: Path) -> list[str]:
    folders = [
        folder,
        *sorted(below for below in folder.iterdir() if splits.from_folder(below.name)),
    ]
    return [os.fspath(path) for parent in folders for path in sorted(parent.glob("*.tar"))]


def shard_paths(path: Path) -> list[str]:
    """The shards of a path, a folder or a pattern; each must exist."""
    names = (
        _in_folder(path)
        if path.is_dir()
        else [os.fspath(path)]
        if path.exists()
        else expand(os.fspath(path))
    )
    names = [
        name for part in names for name in (sorted(glob.glob(part)) if "*" in part else [part])
    ]
    if not names:
        raise user_error(f"{path}: no .tar file there")
    if missing := [name for name in names if not os.path.isfile(name)]:
        raise user_error(
            f"{missing[0]}: no such shard ({len(missing)} of {len(names)} are missing); check the"
            " pattern"
        )
    return names


def list_shards(spec: str) -> list[str]:
    return remote_paths(spec) if is_remote(spec) else shard_paths(Path(spec))


def remote_paths(url: str) -> list[str]:
    """The shards of a URL, a folder or a pattern."""
    url = with_variables(url)
    folder = f"{url.rstrip('/')}/*.tar"
    parts = expand(url if ".tar" in url.rpartition("/")[2] else folder)
    try:
        names = [name for part in parts for name in (matching(part) if "*" in part else [part])]
    except OSError as error:
        raise user_error(f"{without_credentials(url)}: cannot be listed ({error})") from None
    if not names:
        raise user_error(f"{without_credentials(url)}: no .tar file there")
    return names


def expand(pattern: str) -> list[str]:
    """a-{08..10}.tar -> a-08.tar, a-09.tar, a-10.tar; several ranges are combined."""
    paths = [""]
    for number, part in enumerate(re.split(r"\{(\d{1,12}\.\.\d{1,12})\}", pattern)):
        choices = [part]
        if number % 2:
            first, _, last = part.partition("..")
            # Counted first: {0..999999999999} must not be expanded.
            if (count := (int(last) - int(first) + 1) * len(paths)) > MAX_SHARDS:
                raise user_error(f"{pattern}: {count:,} shards are more than {MAX_SHARDS:,}")
            choices = [str(value).zfill(len(first)) for value in range(int(first), int(last) + 1)]
        paths = [path + choice for path in paths for choice in choices]
    return paths
