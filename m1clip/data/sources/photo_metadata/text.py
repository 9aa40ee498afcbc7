"""Texts in the metadata of photos, and the captions among them."""

import os
import re
import unicodedata
from collections.abc import Iterable
from typing import NamedTuple

from m1clip.data.sources.base import MAX_CAPTION
from m1clip.data.sources.splits import clean_text


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
