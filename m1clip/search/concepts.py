"""Teach a new word from a few images: a direction in the space of the vectors, fitted in milliseconds.

Examples are user data, so they are in a database of their own beside the index, by the content of the images.
"""

import re
import sqlite3
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

import numpy as np

from m1clip.errors import UserError
from m1clip.search.index import CONCEPTS, READ_SECONDS, IndexBusy, is_busy

SCHEMA = """
CREATE TABLE IF NOT EXISTS examples (name TEXT, sha256 BLOB, model TEXT, vector BLOB, good INTEGER, time REAL,
  PRIMARY KEY (name, sha256, model));
"""
# Strength of the covariance in the linear head, as a multiple of its mean variance; the prototype is the last.
SHRINKAGE = (0.03, 0.1, 0.3, 1.0, 3.0, 1e6)
TEXT_WEIGHTS = (0.0, 0.5, 1.0)
MIN_EXAMPLES = 2  # to choose by leave-one-out

Examples = tuple[np.ndarray, np.ndarray]  # (n, dim) vectors of right examples, (m, dim) of wrong ones


class Concepts:
    """The taught words of an index, for one model (its hash)."""

    def __init__(self, place: Path, model: str) -> None:
        self.path, self.model = place / CONCEPTS, model

    @contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        try:
            with closing(sqlite3.connect(self.path, timeout=READ_SECONDS)) as db, db:
                db.executescript(SCHEMA)
                yield db
        except sqlite3.DatabaseError as error:
            if is_busy(error):
                raise IndexBusy(f"{self.path}: another program has locked it; try again later") from None
            raise UserError(f"{self.path}: cannot be used ({error}); restore it from a backup, or delete it") from None

    def add(self, name: str, examples: Sequence[tuple[bytes, np.ndarray]], good: bool = True) -> None:
        """Add (sha256 of the file, vector) as right or wrong examples of a word."""
        name = " ".join(name.split())
        if not name:
            raise UserError("the name of a concept is empty")
        name = next((each for each in self.examples() if each.lower() == name.lower()), name)
        rows = [
            (name, digest, self.model, np.asarray(vector, np.float16).tobytes(), int(good), time.time())
            for digest, vector in examples
        ]
        with self._open() as db:
            db.executemany("INSERT OR REPLACE INTO examples VALUES (?, ?, ?, ?, ?, ?)", rows)

    def remove(self, name: str, sha256: bytes | None = None) -> int:
        """Remove one example of a word, or all of them; returns how many."""
        with self._open() as db:
            query = "DELETE FROM examples WHERE name = ?1 COLLATE NOCASE AND (?2 IS NULL OR sha256 = ?2)"
            return db.execute(query, (name, sha256)).rowcount

    def rows(self) -> list[tuple[str, bytes, bytes, int]]:
        """(word, sha256, vector, 1 if it is a right example or else 0) of all examples, the oldest first."""
        if not self.path.is_file():
            return []
        with self._open() as db:
            columns = "SELECT name, sha256, vector, good FROM examples WHERE model = ? ORDER BY time, sha256"
            return db.execute(columns, (self.model,)).fetchall()

    def marks(self, name: str) -> dict[bytes, bool]:
        """{sha256: whether it is a right example} of a word."""
        return {digest: good == 1 for word, digest, _, good in self.rows() if word.lower() == name.lower()}

    def names(self) -> dict[str, tuple[int, int]]:
        """{word: (right, wrong) examples}."""
        return {name: (len(good), len(bad)) for name, (good, bad) in self.examples().items()}

    def examples(self) -> dict[str, Examples]:
        found: dict[str, tuple[list[np.ndarray], list[np.ndarray]]] = {}
        for name, _, vector, good in self.rows():
            found.setdefault(name, ([], []))[1 - good].append(np.frombuffer(vector, np.float16).astype(np.float32))
        return {name: (_stacked(good), _stacked(bad)) for name, (good, bad) in found.items()}


def _stacked(vectors: list[np.ndarray]) -> np.ndarray:
    return np.stack(vectors) if vectors else np.zeros((0, 1), np.float32)


def fit_concept(
    good: np.ndarray, bad: np.ndarray, moments: tuple[np.ndarray, np.ndarray], text: np.ndarray
) -> tuple[np.ndarray, dict[str, float]]:
    """((dim,) unit vector, the choice): a linear head on examples, or their prototype, with or without the text.

    The head is linear discriminant analysis with the mean and covariance of the library (`moments`), more or less
    shrunk; with a shrinkage of 1e6 it is the difference of means. Chosen by leave-one-out: the example left out should
    be far above the library, in standard deviations.
    """
    mean, covariance = moments
    values, axes = np.linalg.eigh(covariance)
    values = np.maximum(values, 0)
    away = mean if len(bad) == 0 else (mean + bad.mean(axis=0)) / 2

    def unit(direction: np.ndarray) -> np.ndarray:
        """With scores that have a standard deviation of 1 over the library."""
        return direction / max(float(np.sqrt(direction @ covariance @ direction)), 1e-12)

    def head(examples: np.ndarray, shrinkage: float, text_weight: float) -> np.ndarray:
        scale = 1 / (values / max(float(values.mean()), 1e-12) + shrinkage)
        return unit(unit(axes @ (scale * (axes.T @ (examples.mean(axis=0) - away)))) + text_weight * unit(text))

    def left_out(choice: tuple[float, float]) -> float:
        found = [(one - mean) @ head(np.delete(good, at, axis=0), *choice) for at, one in enumerate(good)]
        return float(np.mean(found))

    if len(good) == 0:  # only wrong ones: the text, turned away from them
        direction = unit(text) - 0.5 * unit(bad.mean(axis=0) - mean)
        return direction / np.linalg.norm(direction), {"shrinkage": 0.0, "text": 1.0}
    choices = [(shrinkage, weight) for shrinkage in SHRINKAGE for weight in TEXT_WEIGHTS]
    chosen = max(choices, key=left_out) if len(good) >= MIN_EXAMPLES else (1.0, 0.5)
    direction = head(good, *chosen)
    return direction / np.linalg.norm(direction), {"shrinkage": chosen[0], "text": chosen[1]}


def split_text(text: str, names: Sequence[str]) -> tuple[list[str], str]:
    """(taught words in a text, the rest): "Rex on a beach" -> (["Rex"], "on a beach")."""
    found = []
    for name in sorted(names, key=len, reverse=True):
        rest, count = re.subn(rf"(?<!\w){re.escape(name)}(?!\w)", " ", text, flags=re.IGNORECASE)
        if count:
            found.append(name)
            text = " ".join(rest.split())
    return found, text if re.search(r"\w", text) else ""
