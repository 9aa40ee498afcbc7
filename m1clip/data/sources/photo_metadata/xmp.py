"""XMP: of sidecars, and inside images."""

import re
from collections.abc import Iterator, Sequence
from typing import Any
from xml.etree import ElementTree  # nosec B405

from PIL import Image

from m1clip.data.sources.base import MAX_TEXT_BYTES
from m1clip.data.sources.photo_metadata.text import NO_TEXTS, Texts, decode_text

_MAX_XML_DEPTH = 64
_XMP_IN_TIFF = 700
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
