"""IPTC and EXIF inside images."""

from PIL import Image, IptcImagePlugin
from PIL.ImageFile import ImageFile

from m1clip.data.sources.photo_metadata.text import NO_TEXTS, Texts, decode_text

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
