"""JSON files next to photos: of Google Takeout and osxphotos."""

import re
from collections.abc import Iterator

from m1clip.data.sources.photo_metadata.text import NO_TEXTS, Texts

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
