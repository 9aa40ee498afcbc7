"""Captions that photos already carry: XMP, IPTC, EXIF, and JSON of Google Takeout and osxphotos."""

import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, get_args

from PIL import Image

from m1clip.data.images import SUFFIXES, BadImage, failure_reason, open_header
from m1clip.data.sources import splits
from m1clip.data.sources.base import (
    IMAGES_CHECKED,
    MAX_TEXT_BYTES,
    DataFormat,
    DataSource,
    Row,
    parse_json,
    walk_images,
)
from m1clip.data.sources.no_captions import no_captions
from m1clip.data.sources.photo_metadata.iptc_exif import embedded_exif, embedded_iptc
from m1clip.data.sources.photo_metadata.png import read_late_chunks
from m1clip.data.sources.photo_metadata.sidecars import (
    TAKEOUT_NAME_LENGTH,
    parse_osxphotos,
    parse_takeout,
    takeout_names,
)
from m1clip.data.sources.photo_metadata.text import (
    BrokenMetadata,
    Texts,
    file_name_caption,
    to_captions,
)
from m1clip.data.sources.photo_metadata.xmp import embedded_xmp, parse_xmp
from m1clip.data.sources.plain_text import spreadsheets
from m1clip.data.sources.tables import text_tables, without_captions
from m1clip.formatting import plural
from m1clip.io import read_small

# Where the captions of a photo come from. The first kind that has some is used.
CaptionKind = Literal["XMP sidecar", "XMP", "IPTC", "EXIF", "Takeout", "osxphotos", "file name"]
CAPTION_KINDS: tuple[CaptionKind, ...] = get_args(CaptionKind)
NO_KIND = "none"  # what the counts call photos without captions
SIDECAR_SUFFIXES = (".xmp", ".json")
MIN_FRACTION = 0.25  # of the checked photos that must have captions for a folder to be recognized


class PhotoCaptions(NamedTuple):
    """The captions of a photo, the file that they are in, and their kind."""

    texts: list[str]
    where: str
    kind: CaptionKind


class Found(NamedTuple):
    """The texts that one kind of metadata has, and the file that they are in."""

    texts: Texts
    where: str
    kind: CaptionKind


Parse = Callable[[object], Texts]
# In the order of CAPTION_KINDS.
_EMBEDDED: tuple[tuple[CaptionKind, Callable[[Image.Image], Texts]], ...] = (
    ("XMP", embedded_xmp),
    ("IPTC", embedded_iptc),
    ("EXIF", embedded_exif),
)
_JSON_PARSERS: tuple[tuple[CaptionKind, Parse], ...] = (
    ("Takeout", parse_takeout),
    ("osxphotos", parse_osxphotos),
)


@dataclass
class PhotoFolder:
    """The files of one folder by name, lowercased: cameras and computers differ in case."""

    root: Path
    inside: str  # the folder, relative to root: "" or a path that ends with /
    files: dict[str, str]
    follow_links: bool = True  # out of root

    @classmethod
    def read(cls, root: Path, inside: str, follow_links: bool = True) -> "PhotoFolder":
        names = sorted(os.listdir(os.path.join(root, inside)))
        return cls(root, inside, {name.lower(): name for name in reversed(names)}, follow_links)

    @property
    def boundary(self) -> Path | None:
        """The folder that no link may lead out of; None if links are followed."""
        return None if self.follow_links else self.root

    def find(self, names: Iterable[str]) -> str | None:
        """Return the relative name of the first file that exists."""
        for name in names:
            file = self.files.get(name.lower())
            if file is not None and os.path.isfile(self.root / (self.inside + file)):
                return self.inside + file
        return None

    def has_one_photo(self, beginning: str) -> bool:
        """Whether the names of no two photos begin so: a shortened name would be ambiguous."""
        matches = [
            name
            for name in self.files
            if name.startswith(beginning.lower()) and os.path.splitext(name)[1] in SUFFIXES
        ]
        return len(matches) < 2

    def find_captions(self, photo: str) -> PhotoCaptions | None:
        """Return the descriptions and the keywords, each of the first kind that has some.

        They may be of two kinds: one program writes keywords, another one the description.
        BrokenMetadata if something cannot be read.
        """
        descriptions: Found | None = None
        keywords: Found | None = None
        for metadata in self._find_texts(photo):
            if descriptions is None and to_captions(
                metadata.texts._replace(keywords=[]), metadata.where
            ):
                descriptions = metadata
            if keywords is None and to_captions(
                metadata.texts._replace(descriptions=[]), metadata.where
            ):
                keywords = metadata
            if descriptions and keywords:
                break
        first = descriptions or keywords
        if first is None:
            return None
        texts = Texts(
            descriptions.texts.descriptions if descriptions else [],
            keywords.texts.keywords if keywords else [],
        )
        return PhotoCaptions(to_captions(texts, first.where), first.where, first.kind)

    def _find_texts(self, photo: str) -> Iterator[Found]:
        """Yield the texts of each kind, in the order of CAPTION_KINDS."""
        yield from self._from_xmp_sidecar(photo)
        yield from self._from_image(photo)
        yield from self._from_json(photo)

    def sidecars(self, photo: str) -> list[str]:
        """The files beside a photo that have, or may have, its captions."""
        names = (self._xmp_sidecar(photo), self._json_sidecar(photo))
        return [name for name in names if name is not None]

    def _xmp_sidecar(self, photo: str) -> str | None:
        return self.find((f"{photo}.xmp", f"{os.path.splitext(photo)[0]}.xmp"))

    def _from_xmp_sidecar(self, photo: str) -> Iterator[Found]:
        sidecar = self._xmp_sidecar(photo)
        if sidecar is None:
            return
        try:
            texts = parse_xmp(self._read(sidecar))
        except ValueError as error:
            raise BrokenMetadata(sidecar, f"XMP cannot be read ({error})") from error
        yield Found(texts, sidecar, "XMP sidecar")

    def _from_image(self, photo: str) -> list[Found]:
        name = self.inside + photo
        path = self.root / name
        kind: CaptionKind | None = None
        in_image: list[Found] = []
        try:
            with open_header(path, name, self.boundary) as image:
                if image.format == "PNG":
                    # Pillow would find them only after it has decoded the pixels.
                    read_late_chunks(path, image, self.boundary)
                for kind, read in _EMBEDDED:
                    in_image.append(Found(read(image), name, kind))
        except BadImage as error:
            raise BrokenMetadata(name, error.reason) from error
        # As for pixels: Pillow raises errors of many kinds for damaged files.
        except Exception as error:
            message = f"{kind or 'metadata'} cannot be read ({failure_reason(error)})"
            raise BrokenMetadata(name, message) from error
        return in_image

    def _from_json(self, photo: str) -> Iterator[Found]:
        sidecar = self._json_sidecar(photo)
        if sidecar is None:
            return
        try:
            document = parse_json(self._read(sidecar))
        except ValueError as error:
            raise BrokenMetadata(sidecar, f"not valid JSON ({error})") from error
        for kind, parse in _JSON_PARSERS:
            yield Found(parse(document), sidecar, kind)

    def _json_sidecar(self, photo: str) -> str | None:
        for name in takeout_names(photo):
            sidecar = self.find([name])
            is_short = not name.startswith(photo) and len(name) > TAKEOUT_NAME_LENGTH
            if sidecar and (not is_short or self.has_one_photo(name[:TAKEOUT_NAME_LENGTH])):
                return sidecar
        return self.find([f"{os.path.splitext(photo)[0]}.json"])

    def _read(self, name: str) -> bytes:
        try:
            return read_small(self.root / name, MAX_TEXT_BYTES, self.boundary)
        except OSError as error:
            raise BrokenMetadata(name, f"cannot be read ({error.strerror or error})") from error


def find_captions(
    root: Path, names: Iterable[str], follow_links: bool = True
) -> Iterator[tuple[str, PhotoCaptions | BrokenMetadata | None]]:
    """Yield the captions of each photo, or why they are unreadable; None where there are none.

    Without `follow_links`, nothing outside of `root` is read: where captions are copied into a
    table, a link in the folder of a stranger would copy the text of another file.
    """
    folder: PhotoFolder | None = None
    for name in names:
        inside, slash, photo = name.rpartition("/")
        if folder is None or folder.inside != inside + slash:
            folder = PhotoFolder.read(root, inside + slash, follow_links)
        try:
            yield name, folder.find_captions(photo)
        except BrokenMetadata as error:
            yield name, error


def metadata_rows(source: DataSource) -> Iterator[Row]:
    """Photos with the captions in their metadata; a descriptive file name is the last resort."""
    counts: dict[str, int] = dict.fromkeys((*CAPTION_KINDS, NO_KIND), 0)
    for name, result in find_captions(source.path, walk_images(source.path)):
        if isinstance(result, BrokenMetadata):
            counts[NO_KIND] += 1
            where = "" if result.where == name else f"{result.where}: "
            source.problem((name, 0), where + result.reason)
            continue
        captions = result or _from_file_name(name)
        if captions is None:
            counts[NO_KIND] += 1
            source.problem((name, 0), "no caption in its metadata", "empty-caption")
            continue
        counts[captions.kind] += 1
        location = (captions.where, 0)
        split = splits.from_path(name)
        yield Row(location, captions.texts, split, source.image_file(name), name)
    total = sum(counts.values())
    if total and counts[NO_KIND] == total and not _is_unreadable(source):
        raise no_captions(source.path, metadata=False, file_names=False)
    source.caption_kinds = counts
    if total:
        source.note(_describe(counts))


def _from_file_name(name: str) -> PhotoCaptions | None:
    words = file_name_caption(name)
    return PhotoCaptions([words], name, "file name") if words else None


def _is_unreadable(source: DataSource) -> bool:
    """Whether something could not be read: the error then names it."""
    return any(problem.kind == "unreadable" for problem in source.problems)


def _describe(counts: Mapping[str, int]) -> str:
    """captions in the metadata of 3 of 4 photos: XMP 2 (50%), EXIF 1 (25%), none 1 (25%)."""
    total = sum(counts.values())
    kinds = [f"{kind} {count:,} ({count / total:.0%})" for kind, count in counts.items() if count]
    photos = f"{total - counts[NO_KIND]:,} of {plural(total, 'photo')}"
    return f"captions in the metadata of {photos}: {', '.join(kinds)}"


def has_captioned_photos(path: Path) -> bool:
    """Whether a good part of the photos has captions, and there is no table of captions."""
    if not path.is_dir() or text_tables(path) or without_captions(path) or spreadsheets(path):
        return False
    names = list(walk_images(path))
    # In an order like a random one: the first photos, or every third, may differ from the rest.
    shuffled = sorted(names, key=lambda name: zlib.crc32(os.fsencode(name)))
    checked = sorted(shuffled[:IMAGES_CHECKED])  # each folder is listed once
    captioned = sum(
        isinstance(captions, PhotoCaptions) for _, captions in find_captions(path, checked)
    )
    return captioned > 0 and captioned >= MIN_FRACTION * len(checked)


METADATA = DataFormat(
    name="metadata",
    help="photos with captions in XMP, IPTC, EXIF, or JSON of Google Takeout or osxphotos",
    read=metadata_rows,
    item="image",
    matches=lambda data: has_captioned_photos(data.path),
    after_classes=True,
    hidden_by_table=False,
)
