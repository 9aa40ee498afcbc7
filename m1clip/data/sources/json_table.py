"""JSON lines, and a JSON file that is one list: an object a row."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from m1clip.data.images import one_line
from m1clip.data.sources.reading import MAX_LINE, read_json
from m1clip.data.sources.table import Columns, TableSource
from m1clip.errors import UserError
from m1clip.files import open_regular

_ROWS_LOOKED_AT = 100


class JsonlSource(TableSource):
    """One JSON object a line."""

    kind = "jsonl"

    @classmethod
    def looks_like(cls, path: Path) -> bool:
        """A file that ends in .jsonl or .ndjson."""
        return path.is_file() and path.suffix.lower() in {".jsonl", ".ndjson"}

    def header(self) -> list[str]:
        """Every key of the first rows."""
        rows = islice((row for _, row in self._objects() if isinstance(row, dict)), _ROWS_LOOKED_AT)
        names = list(dict.fromkeys(key for row in rows for key in row))
        if not names:
            raise UserError(one_line(f"{self.path}: no line of it is a JSON object such as {_EXAMPLE}"))
        return names

    def records(self, columns: Columns) -> Iterator[tuple[tuple[str, int], Mapping[str, Any]]]:
        """Objects with their line number."""
        for number, row in self._objects():
            if isinstance(row, dict):
                yield (self.path.name, number), row
            else:
                self.problem((self.path.name, number), row if isinstance(row, str) else "not a JSON object")

    def _objects(self) -> Iterator[tuple[int, Any]]:
        """(line number, object), or (line number, what is wrong with the line)."""
        with open_regular(self.path) as file:
            number = 0
            while line := file.readline(MAX_LINE):
                number += 1
                if len(line) >= MAX_LINE:
                    what = f"{self.path} line {number}: over {MAX_LINE >> 20} MiB; write one object a line"
                    raise UserError(one_line(what))
                text = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
                if not text.strip():
                    continue
                try:
                    row = json.loads(text.decode("utf-8"))
                    yield number, row if isinstance(row, dict) else None
                except (ValueError, RecursionError) as error:
                    yield number, f"not valid JSON ({error})"


class JsonSource(TableSource):
    """A JSON file that holds a list of objects."""

    kind = "json"

    @classmethod
    def looks_like(cls, path: Path) -> bool:
        """A .json file that is a list."""
        return path.is_file() and path.suffix.lower() == ".json" and isinstance(read_json(path), list)

    def header(self) -> list[str]:
        """Every key of the first rows."""
        rows = [row for row in self._document()[:_ROWS_LOOKED_AT] if isinstance(row, dict)]
        return list(dict.fromkeys(key for row in rows for key in row))

    def records(self, columns: Columns) -> Iterator[tuple[tuple[str, int], Mapping[str, Any]]]:
        """Objects with their place in the list, counted from 1."""
        for number, row in enumerate(self._document(), start=1):
            if isinstance(row, dict):
                yield (self.path.name, number), row
            else:
                self.problem((self.path.name, number), "not a JSON object")

    def _document(self) -> list[Any]:
        document = read_json(self.path)
        if not isinstance(document, list):
            raise UserError(one_line(f"{self.path}: not a list of objects such as {_EXAMPLE}"))
        return document


_EXAMPLE = '{"image": "a.jpg", "captions": ["a dog"]}'
