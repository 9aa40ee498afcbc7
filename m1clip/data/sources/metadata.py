"""Captions that photos already carry: XMP, IPTC, EXIF, and JSON of Google Takeout and osxphotos."""

import os
import re
import unicodedata
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args
from xml.etree import ElementTree  # nosec B405

from PIL import Image, IptcImagePlugin
from PIL.ImageFile import ImageFile

from m1clip.data.images import SUFFIXES, BadImage, failure_reason, open_header
from m1clip.data.sources import splits
from m1clip.data.sources.base import (
    IMAGES_CHECKED,
    MAX_CAPTION,
    MAX_TEXT_BYTES,
    DataFormat,
    DataSource,
    Row,
    parse_json,
    user_error,
    walk_images,
)
from m1clip.data.sources.splits import clean_text
from m1clip.data.sources.tables import spreadsheets, text_tables, without_captions
from m1clip.formatting import plural
from m1clip.io import read_small

# Where the captions of a photo come from. The first kind that has some is used.
CaptionKind = Literal["XMP sidecar", "XMP", "IPTC", "EXIF", "Takeout", "osxphotos", "file name"]
CAPTION_KINDS: tuple[CaptionKind, ...] = get_args(CaptionKind)
NO_KIND = "none"  # what the counts call photos without captions
MIN_FRACTION = 0.25  # of the checked photos that must have captions for a folder to be recognized
KINDS_HINT = (
    "metadata: reads captions from XMP (sidecars too), IPTC, EXIF, "
    "and the JSON files of Google Takeout and osxphotos"
)


class BrokenMetadata(Exception):
    """Metadata of a photo that cannot be read: the file, and why."""

    def __init__(self, where: str, reason: str) -> None:
        super().__init__(where, reason)
        self.where = where
        self.reason = reason


class Texts(NamedTuple):
    """What a kind of metadata contains: descriptions and titles, and keywords."""

    descriptions: list[str]
    keywords: list[str]


NO_TEXTS = Texts([], [])


class PhotoCaptions(NamedTuple):
    """The captions of a photo, the file that they are in, and their kind."""

    texts: list[str]
    where: str
    kind: CaptionKind


# Text

# Written by cameras and programs into every file.
_BOILERPLATE = {
    "ascii",
    "charset=ascii",
    "charset=unicode",
    "dcim",
    "default",
    "digital camera",
    "exif_jpeg_picture",
    "image",
    "konica minolta digital camera",
    "kodak digital still camera",
    "minolta digital camera",
    "olympus digital camera",
    "photo",
    "picture",
    "samsung camera pictures",
    "sony dsc",
    "untitled",
}
_CAMERA_PREFIXES = (
    "img|imag|image|dsc|dscn|dscf|dcim|pxl|mvimg|pano|vid|mov|gopr|dji|sam|wp|p|hpim|pict|"
    "photo|picture|scan|burst|fb|received|signal|whatsapp image|snapchat|instagram|untitled"
)
# IMG_1234, _DSC0042-edited, 20230101_120000, WhatsApp Image 2023-01-01 at 10.00.00
_CAMERA_NAME = re.compile(rf"^[\W_]*(?:{_CAMERA_PREFIXES})?(?:[\W_]*e?\d{{2,}}|$)", re.IGNORECASE)
_SCREENSHOT = re.compile(r"^(?:screen[ _-]?shot|bildschirmfoto)(?:$|[\W_\d])", re.IGNORECASE)
_FILE_NAME = re.compile(
    r"^\S+\.(?:jpe?g|png|webp|gif|bmp|tiff?|hei[cf]|avif|dng|mov|mp4)$", re.IGNORECASE
)
MAX_NAME = 255  # characters of a text that may be a file name
_NUMBER_AT_END = re.compile(r"[\s_.-]*\(?\d*\)?$")
# Characters that change the direction of text.
_DIRECTION = dict.fromkeys((0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A)))


def clean_caption(text: str) -> str:
    """Remove control characters and extra spaces; "" for what a camera writes into every file."""
    visible = "".join(" " if unicodedata.category(char) == "Cc" else char for char in text)
    cleaned = clean_text(visible.translate(_DIRECTION).removeprefix("\ufeff"))
    return "" if is_boilerplate(cleaned) else cleaned


def is_boilerplate(text: str) -> bool:
    """Whether a text is from a camera or a program: a fixed text, a file name, or no letters."""
    if not any(char.isalpha() for char in text) or text.casefold() in _BOILERPLATE:
        return True
    if _SCREENSHOT.match(text) or _FILE_NAME.match(text):
        return True
    if len(text) > MAX_NAME:
        return False
    # "100 people on a bridge" begins with a number, but has words.
    return bool(_CAMERA_NAME.match(text)) and len(_words(text)) < 2


def _words(text: str) -> list[str]:
    return [word for word in text.split() if word.isalpha() and len(word) > 1]


def file_name_caption(name: str) -> str:
    """birthday_cake with candles (2).jpg -> birthday cake with candles; "" for names of cameras."""
    stem = os.path.splitext(name.rpartition("/")[2])[0]
    if _CAMERA_NAME.match(stem) or _SCREENSHOT.match(stem):
        return ""
    words = clean_caption(re.sub(r"[_-]", " ", _NUMBER_AT_END.sub("", stem)))
    return words if len(_words(words)) > 1 else ""


def to_captions(texts: Texts, where: str) -> list[str]:
    """Return each description, then the keywords as one caption: "dog, beach, sunset"."""
    keywords = _distinct(map(clean_caption, texts.keywords))
    captions = _distinct([*map(clean_caption, texts.descriptions), ", ".join(keywords)])
    if any(len(caption) > MAX_CAPTION for caption in captions):
        raise BrokenMetadata(where, f"the caption is too long (at most {MAX_CAPTION:,} characters)")
    return captions


def _distinct(texts: Iterable[str]) -> list[str]:
    """Return the texts that are not empty, each once regardless of case."""
    by_key: dict[str, str] = {}
    for text in texts:
        if text:
            by_key.setdefault(text.casefold(), text)
    return list(by_key.values())


def decode_text(data: bytes) -> str:
    """Decode UTF-8, or else Latin-1, which has a character for every byte."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return data.decode("latin-1")


# XMP

_MAX_XML_DEPTH = 64
_RDF = "{http://www.w3.org/1999/02/22-rdf-syntax-ns#}"
_DC = "{http://purl.org/dc/elements/1.1/}"
_HIERARCHICAL_SUBJECT = "{http://ns.adobe.com/lightroom/1.0/}hierarchicalSubject"
_TAGS_LIST = "{http://www.digikam.org/ns/1.0/}TagsList"
_LANGUAGE = "{http://www.w3.org/XML/1998/namespace}lang"


class _BoundedTree(ElementTree.TreeBuilder):
    """Reject XML that is nested too deeply, and any declaration of a document type."""

    depth = 0

    def start(self, tag: Any, attrs: dict[Any, Any], /) -> ElementTree.Element:
        self.depth += 1
        if self.depth > _MAX_XML_DEPTH:
            raise ValueError("nested too deeply")
        return super().start(tag, attrs)

    def end(self, tag: str, /) -> ElementTree.Element:
        self.depth -= 1
        return super().end(tag)

    def doctype(self, *_: object) -> None:
        raise ValueError("declares a document type")


def parse_xmp(data: bytes) -> Texts:
    """Read descriptions and keywords from XMP; ValueError if it is not valid or unsafe."""
    if len(data) > MAX_TEXT_BYTES:
        raise ValueError(f"larger than {MAX_TEXT_BYTES:,} bytes")
    text = _decode_xml(data).strip("\0 \t\r\n\ufeff")
    # Entities may expand without limit or name other files; XMP never has any.
    if re.search(r"<!\s*(?:doctype|entity)", text, re.IGNORECASE):
        raise ValueError("declares a document type or entities")
    parser = ElementTree.XMLParser(target=_BoundedTree())  # nosec B314
    try:
        parser.feed(text)
        root = parser.close()
    except ElementTree.ParseError as error:
        raise ValueError(f"not valid XML: {error}") from error
    descriptions: list[str] = []
    keywords: list[str] = []
    for tag in ("description", "title"):
        descriptions += [_default_text(values) for values in _property(root, _DC + tag)]
    for tag, separator in (
        (_DC + "subject", None),
        (_HIERARCHICAL_SUBJECT, "|"),
        (_TAGS_LIST, "/"),
    ):
        for values in _property(root, tag):
            for _, value in values:
                # Animals|Dog: only the last name is a keyword.
                keywords.append(value.rpartition(separator)[2] if separator else value)
    return Texts(descriptions, keywords)


def _decode_xml(data: bytes) -> str:
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        return data.decode("utf-16", "replace")
    if data.startswith(b"<\0"):
        return data.decode("utf-16-le", "replace")
    if data.startswith(b"\0<"):
        return data.decode("utf-16-be", "replace")
    return decode_text(data.removeprefix(b"\xef\xbb\xbf"))


def _property(root: ElementTree.Element, tag: str) -> Iterator[list[tuple[str, str]]]:
    """Yield the values of each property with this name, each with its language or ""."""
    for element in root.iter():
        if element.tag == _RDF + "Description" and tag in element.attrib:
            yield [("", element.attrib[tag])]
        if element.tag != tag:
            continue
        items = list(element.iter(_RDF + "li"))
        if items:
            yield [(item.get(_LANGUAGE, ""), "".join(item.itertext())) for item in items]
        else:
            yield [("", "".join(element.itertext()))]


def _default_text(values: Sequence[tuple[str, str]]) -> str:
    """Return the text in the default language, or the first."""
    default = [text for language, text in values if language == "x-default"]
    return default[0] if default else values[0][1]


# IPTC and EXIF

_IPTC_CHARSET = (1, 90)
_IPTC_UTF8 = b"\x1b%G"
_IPTC_DESCRIPTIONS = ((2, 120), (2, 105))  # Caption/Abstract, Headline
_IPTC_KEYWORDS = (2, 25)
_IMAGE_DESCRIPTION = 0x010E
_XP_TITLE = 0x9C9B
_XP_COMMENT = 0x9C9C
_XP_KEYWORDS = 0x9C9E
_EXIF_IFD = 0x8769
_USER_COMMENT = 0x9286
_CHARSET_BYTES = 8  # the name of the encoding, in front of a user comment
_XMP_IN_TIFF = 700


def embedded_xmp(image: Image.Image) -> Texts:
    """Read the XMP that is in an image file."""
    data: object = image.info.get("xmp")
    if data is None:
        data = getattr(image, "tag_v2", {}).get(_XMP_IN_TIFF)
    if isinstance(data, str):
        data = data.encode("utf-8", "replace")
    if not isinstance(data, bytes) or not data.strip(b"\0 \r\n\t"):
        return NO_TEXTS
    return parse_xmp(data)


def embedded_iptc(image: Image.Image) -> Texts:
    """Read caption, headline and keywords of IPTC."""
    info = IptcImagePlugin.getiptcinfo(image) if isinstance(image, ImageFile) else None
    if not info:
        return NO_TEXTS

    def values(key: tuple[int, int]) -> list[bytes]:
        value = info.get(key, [])
        return value if isinstance(value, list) else [value]

    is_utf8 = _IPTC_UTF8 in values(_IPTC_CHARSET)

    def texts(key: tuple[int, int]) -> list[str]:
        return [
            value.decode("utf-8", "replace") if is_utf8 else decode_text(value)
            for value in values(key)
        ]

    descriptions = [text for key in _IPTC_DESCRIPTIONS for text in texts(key)]
    return Texts(descriptions, texts(_IPTC_KEYWORDS))


def embedded_exif(image: Image.Image) -> Texts:
    """Read the description, the fields that Windows writes, and the user comment of EXIF."""
    exif = image.getexif()
    description = exif.get(_IMAGE_DESCRIPTION)
    texts = [
        _exif_text(description),
        _windows_text(exif.get(_XP_TITLE)),
        _windows_text(exif.get(_XP_COMMENT)),
        _user_comment(exif.get_ifd(_EXIF_IFD).get(_USER_COMMENT), exif.endian or "<"),
    ]
    keywords = _windows_text(exif.get(_XP_KEYWORDS)).split(";")
    return Texts(texts, keywords)


def _exif_text(value: object) -> str:
    if isinstance(value, bytes):
        return decode_text(value)
    # Pillow decodes as Latin-1, but most programs write UTF-8.
    return decode_text(value.encode("latin-1", "replace")) if isinstance(value, str) else ""


def _windows_text(value: object) -> str:
    if isinstance(value, tuple) and all(isinstance(part, int) for part in value):
        value = bytes(part & 0xFF for part in value)
    return value.decode("utf-16-le", "replace").rstrip("\0") if isinstance(value, bytes) else ""


def _user_comment(value: object, byte_order: str) -> str:
    if isinstance(value, str):
        value = value.encode("latin-1", "replace")
    if not isinstance(value, bytes):
        return ""
    charset = value[:_CHARSET_BYTES].rstrip(b"\0 ").upper()
    text = value[_CHARSET_BYTES:]
    if charset == b"UNICODE":
        return _utf16_text(text, byte_order)
    if charset == b"JIS":
        return text.decode("iso2022_jp", "replace")
    # Some programs write no encoding at all.
    return decode_text(text if charset in (b"", b"ASCII") else value)


def _utf16_text(data: bytes, byte_order: str) -> str:
    """Decode UTF-16 by its BOM, or in the byte order that gives more ASCII; else as EXIF."""
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        return data.decode("utf-16", "replace")
    little = data.decode("utf-16-le", "replace")
    big = data.decode("utf-16-be", "replace")
    more_ascii = _ascii_count(little) - _ascii_count(big)
    if more_ascii:
        return little if more_ascii > 0 else big
    return little if byte_order == "<" else big


def _ascii_count(text: str) -> int:
    return sum(" " <= char <= "~" for char in text)


# JSON files next to photos

_OSXPHOTOS_DESCRIPTIONS = (
    "Caption-Abstract",
    "Description",
    "ImageDescription",
    "Title",
    "Headline",
    "ObjectName",
)
_OSXPHOTOS_KEYWORDS = ("Keywords", "Subject", "TagsList")
# Takeout shortens the name of a JSON file to this many characters, without .json.
TAKEOUT_NAME_LENGTH = 46
_TAKEOUT_ENDING = ".supplemental-metadata"
_COPY_NUMBER = re.compile(r"^(.+)(\(\d+\))(\.[^.]+)$")  # photo(1).jpg
_EDITED = re.compile(r"^(.+)-edited(\(\d+\))?(\.[^.]+)$")


def parse_takeout(document: object) -> Texts:
    """Read the description and the people of Google Takeout."""
    if not isinstance(document, dict):
        return NO_TEXTS
    people = document.get("people")
    names = [
        person.get("name")
        for person in (people if isinstance(people, list) else [])
        if isinstance(person, dict)
    ]
    return Texts(_strings(document.get("description")), _strings(names))


def parse_osxphotos(document: object) -> Texts:
    """Read descriptions and keywords of osxphotos, whose keys are those of exiftool."""
    if not (isinstance(document, list) and document and isinstance(document[0], dict)):
        return NO_TEXTS
    by_tag: dict[str, list[str]] = {}
    for key, value in document[0].items():
        by_tag.setdefault(key.rpartition(":")[2], []).extend(_strings(value))
    return Texts(
        [text for tag in _OSXPHOTOS_DESCRIPTIONS for text in by_tag.get(tag, [])],
        [text.rpartition("/")[2] for tag in _OSXPHOTOS_KEYWORDS for text in by_tag.get(tag, [])],
    )


def _strings(value: object) -> list[str]:
    values = value if isinstance(value, list) else [value]
    return [item for item in values if isinstance(item, str)]


def takeout_names(photo: str) -> Iterator[str]:
    """Yield the names that Takeout may give the JSON file of a photo, the most likely first."""
    yield f"{photo}.json"
    originals = [(photo, "")]
    if match := _COPY_NUMBER.match(photo):
        stem, number, suffix = match.groups()
        originals.append((stem + suffix, number))
    if match := _EDITED.match(photo):
        stem, edited_number, suffix = match.groups()
        originals.append((stem + suffix, edited_number or ""))
    for original, number in originals:
        if number:
            yield f"{original}{number}.json"
        complete = original + _TAKEOUT_ENDING
        for length in range(len(complete), len(original), -1):
            yield f"{complete[:length]}{number}.json"
        if len(original) > TAKEOUT_NAME_LENGTH:
            yield f"{original[:TAKEOUT_NAME_LENGTH]}{number}.json"
        if number == "" and original != photo:
            yield f"{original}.json"


# Photos

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

    @classmethod
    def read(cls, root: Path, inside: str) -> "PhotoFolder":
        names = sorted(os.listdir(os.path.join(root, inside)))
        return cls(root, inside, {name.lower(): name for name in reversed(names)})

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
        """Return the captions of the first kind that has some; BrokenMetadata if unreadable."""
        for find in (self._from_xmp_sidecar, self._from_image, self._from_json):
            if captions := find(photo):
                return captions
        return None

    def _from_xmp_sidecar(self, photo: str) -> PhotoCaptions | None:
        sidecar = self.find((f"{photo}.xmp", f"{os.path.splitext(photo)[0]}.xmp"))
        if sidecar is None:
            return None
        try:
            texts = parse_xmp(self._read(sidecar))
        except ValueError as error:
            raise BrokenMetadata(sidecar, f"XMP cannot be read ({error})") from error
        captions = to_captions(texts, sidecar)
        return PhotoCaptions(captions, sidecar, "XMP sidecar") if captions else None

    def _from_image(self, photo: str) -> PhotoCaptions | None:
        name = self.inside + photo
        kind: CaptionKind | None = None
        try:
            with open_header(self.root / name, name) as image:
                for kind, read in _EMBEDDED:
                    if captions := to_captions(read(image), name):
                        return PhotoCaptions(captions, name, kind)
        except BrokenMetadata:
            raise
        except BadImage as error:
            raise BrokenMetadata(name, error.reason) from error
        # As for pixels: Pillow raises errors of many kinds for damaged files.
        except Exception as error:
            what = f"{kind or 'metadata'} cannot be read ({failure_reason(error)})"
            raise BrokenMetadata(name, what) from error
        return None

    def _from_json(self, photo: str) -> PhotoCaptions | None:
        sidecar = self._json_sidecar(photo)
        if sidecar is None:
            return None
        try:
            document = parse_json(self._read(sidecar))
        except ValueError as error:
            raise BrokenMetadata(sidecar, f"not valid JSON ({error})") from error
        for kind, parse in _JSON_PARSERS:
            if captions := to_captions(parse(document), sidecar):
                return PhotoCaptions(captions, sidecar, kind)
        return None

    def _json_sidecar(self, photo: str) -> str | None:
        for name in takeout_names(photo):
            sidecar = self.find([name])
            is_short = not name.startswith(photo) and len(name) > TAKEOUT_NAME_LENGTH
            if sidecar and (not is_short or self.has_one_photo(name[:TAKEOUT_NAME_LENGTH])):
                return sidecar
        return self.find([f"{os.path.splitext(photo)[0]}.json"])

    def _read(self, name: str) -> bytes:
        try:
            return read_small(self.root / name, MAX_TEXT_BYTES)
        except OSError as error:
            raise BrokenMetadata(name, f"cannot be read ({error.strerror or error})") from error


def find_captions(
    root: Path, names: Iterable[str]
) -> Iterator[tuple[str, PhotoCaptions | BrokenMetadata | None]]:
    """Yield the captions of each photo, or why they are unreadable; None where there are none."""
    folder: PhotoFolder | None = None
    for name in names:
        inside, slash, photo = name.rpartition("/")
        if folder is None or folder.inside != inside + slash:
            folder = PhotoFolder.read(root, inside + slash)
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
        place = (captions.where, 0)
        split = splits.from_path(name)
        yield Row(place, captions.texts, split, source.image_file(name), name)
    total = sum(counts.values())
    if total and counts[NO_KIND] == total and not _is_unreadable(source):
        raise user_error(f"{source.path}: images but no captions; {KINDS_HINT}")
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
)
