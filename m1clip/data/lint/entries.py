"""The pictures of a source in one list, with the words for where each comes from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from m1clip.data.images import one_line
from m1clip.data.pair import Pair, Source
from m1clip.data.sources.mixed import MixedSource


@dataclass(frozen=True, slots=True)
class Entry:
    """A pair with its split."""

    pair: Pair
    split: str


class Places:
    """Names of pictures and captions: the file, and the row where the source knows it."""

    def __init__(self, source: Source) -> None:
        self._origin = getattr(source, "origin", None)

    def picture(self, entry: Entry) -> str:
        """a/b.jpg (captions.csv row 12)."""
        name = str(entry.pair.image)
        row = self._row(entry, 0)
        return name if row is None or row in name else f"{name} ({row})"

    def caption(self, entry: Entry, number: int) -> str:
        """captions.csv row 12: the caption, cut where it is long."""
        text = entry.pair.captions[number]
        text = text if len(text) <= 80 else text[:77] + "..."
        return one_line(f"{self._row(entry, number) or entry.pair.id}: {text}")

    def _row(self, entry: Entry, number: int) -> str | None:
        if self._origin is None:
            return None
        return str(self._origin(entry.pair.id, number))


def entries_of(source: Source) -> tuple[Source, list[Entry]]:
    """All pairs once: a mixture is looked at without its weights, which repeat pictures."""
    whole = (
        MixedSource([(part, 1.0) for part, _ in source.parts]) if isinstance(source, MixedSource) else source
    )
    return whole, [Entry(pair, split) for split in whole.splits() for pair in whole.pairs(split)]


def evenly(entries: Sequence[Entry], count: int) -> list[Entry]:
    """A sample spread over the whole list, so that each split and each corner of the data is met."""
    if len(entries) <= count:
        return list(entries)
    return [entries[i * len(entries) // count] for i in range(count)]
