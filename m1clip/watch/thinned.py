"""A curve of bounded length: when it is full, every second point goes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

Row = dict[str, Any]


class Thinned:
    """Rows in the order of their `step`; at most `most` are kept, evenly spread, the newest always among them."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.clear()

    def clear(self) -> None:
        """Begin anew."""
        self._rows: list[Row] = []
        self._last: Row | None = None
        self._stride = 1
        self._seen = 0

    def add(self, row: Row) -> None:
        """The next row; one that is not newer than the last is left out."""
        if self._last is not None and row["step"] <= self._last["step"]:
            return
        self._last = row
        if self._seen % self._stride == 0:
            self._rows.append(row)
        self._seen += 1
        if len(self._rows) > self.most:
            self._rows = self._rows[::2]
            self._stride *= 2

    def insert(self, row: Row) -> None:
        """A row of earlier that was found late."""
        rows = list(self)
        if any(other["step"] == row["step"] for other in rows):
            return
        self._rows = sorted([*rows, row], key=lambda each: each["step"])
        self._last = self._rows[-1]
        self._seen += 1
        if len(self._rows) > self.most:
            self._rows = self._rows[::2]
            self._stride *= 2

    def cut(self, step: int) -> None:
        """Forget what came after a step: the run was continued from there."""
        kept = [row for row in self if row["step"] <= step]
        self._rows, self._last = kept, kept[-1] if kept else None

    @property
    def last(self) -> Row | None:
        """The newest row."""
        return self._last

    def __iter__(self) -> Iterator[Row]:
        yield from self._rows
        if self._last is not None and (not self._rows or self._rows[-1] is not self._last):
            yield self._last

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __bool__(self) -> bool:
        return self._last is not None
