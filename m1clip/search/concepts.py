"""Teach a new word from a few images: a direction in the space of the vectors, fitted in
milliseconds.

Examples are user data, so they are in a database of their own beside the index, by the content of
the images. They hold for every model: with another one, the vectors of its index take the place of
those that were stored.
"""

import re
import sqlite3
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np

from m1clip.errors import UserError
from m1clip.formatting import one_line
from m1clip.search import vectors
from m1clip.search.database import (
    READ_SECONDS,
    IndexBusy,
    is_busy,
    is_full,
    is_unwritable,
    statements,
    stored_statements,
)
from m1clip.search.location import CONCEPTS, check_database

CONCEPTS_SCHEMA = """
CREATE TABLE examples (name TEXT, sha256 BLOB, model TEXT, vector BLOB, positive INTEGER, time REAL,
  PRIMARY KEY (name, sha256, model));
"""
# The rows that m1clip writes; a file from a stranger may contain others, which do not count.
VALID_EXAMPLE = (
    "typeof(name) = 'text' AND typeof(sha256) = 'blob' AND length(sha256) = 32 AND typeof(positive)"
    " = 'integer' AND positive IN (0, 1)"
)
OWN_VECTOR = "model = ? AND typeof(vector) = 'blob' AND length(vector) = ?"
# Strength of the covariance in the linear head, as a multiple of its mean variance; the prototype
# is the last.
SHRINKAGE = (0.03, 0.1, 0.3, 1.0, 3.0, 1e6)
TEXT_WEIGHTS = (0.0, 0.5, 1.0)
MIN_EXAMPLES = 2  # to choose by leave-one-out
# A text finds examples that it ranks, on average, within this fraction of the library.
KNOWN_FRACTION = 0.1
SAME = 0.9995  # cosine of two vectors of the same image

# (n, dim) vectors of positive examples, (m, dim) of negative ones.
Examples = tuple[np.ndarray, np.ndarray]


# The vectors of images, of those contents (sha256) that have one.
FindVectors = Callable[[Collection[bytes]], Mapping[bytes, np.ndarray]]


class Mark(NamedTuple):
    """An example of a word, with its vector of the model, if there is one."""

    name: str
    sha256: bytes
    positive: bool
    vector: np.ndarray | None  # (dim,) float16


class Choice(NamedTuple):
    """How the vector of a word is made."""

    shrinkage: float
    text: float  # weight of the text; that of the examples is 1


TEXT_ONLY = Choice(0.0, 1.0)


class Concepts:
    """The taught words of an index, for one model (its hash) with vectors of `dim` values.

    `find_vectors` gives this model's vectors of images that were marked with another model.
    """

    def __init__(
        self, index_folder: Path, model: str, dim: int, find_vectors: FindVectors = lambda _: {}
    ) -> None:
        self.path, self.model = index_folder / CONCEPTS, model
        self.vector_bytes = dim * vectors.BYTES
        self._find_vectors = find_vectors

    @contextmanager
    def _open(self, write: bool = False) -> Iterator[sqlite3.Connection]:
        if write:
            check_database(self.path)
        try:
            with closing(sqlite3.connect(self.path, timeout=READ_SECONDS)) as db, db:
                db.execute("PRAGMA trusted_schema = OFF")
                stored = stored_statements(db)
                if not stored:
                    db.executescript(
                        CONCEPTS_SCHEMA.replace("CREATE TABLE", "CREATE TABLE IF NOT EXISTS")
                    )
                elif stored != statements(CONCEPTS_SCHEMA):
                    raise sqlite3.DatabaseError("other tables than m1clip's")
                yield db
        except sqlite3.DatabaseError as error:
            if is_busy(error):
                raise IndexBusy(
                    f"{self.path}: another program has locked it; try again later"
                ) from None
            if is_full(error):
                raise UserError(
                    f"{self.path}: the disk is full; free some space, then try again"
                ) from None
            reason = one_line(str(error))
            if is_unwritable(error):
                raise UserError(
                    f"{self.path}: cannot be written to ({reason}); check who may write to its"
                    " folder"
                ) from None
            raise UserError(
                f"{self.path}: cannot be used ({reason}); restore it from a backup, or delete it"
            ) from None

    def add(
        self, name: str, examples: Sequence[tuple[bytes, np.ndarray]], positive: bool = True
    ) -> None:
        """Add (sha256 of the file, vector) as positive or negative examples of a word."""
        name = " ".join(name.split())
        if not name:
            raise UserError("the name of a concept is empty")
        name = next((example for example in self.examples() if _key(example) == _key(name)), name)
        rows = [
            (
                name,
                digest,
                self.model,
                np.asarray(vector, np.float16).tobytes(),
                int(positive),
                time.time(),
            )
            for digest, vector in examples
        ]
        with self._open(write=True) as db:
            db.executemany("INSERT OR REPLACE INTO examples VALUES (?, ?, ?, ?, ?, ?)", rows)

    def remove(self, name: str, sha256: bytes | None = None) -> int:
        """Remove one example of a word, or all of them; returns how many."""
        with self._open(write=True) as db:
            stored = db.execute(
                "SELECT DISTINCT name FROM examples WHERE typeof(name) = 'text'"
            ).fetchall()
            # Not COLLATE NOCASE, which knows ASCII only.
            same = [(word, sha256) for (word,) in stored if _key(word) == _key(name)]
            query = "DELETE FROM examples WHERE name = ?1 AND (?2 IS NULL OR sha256 = ?2)"
            return sum(db.execute(query, values).rowcount for values in same)

    def all_marks(self) -> list[Mark]:
        """The marks of all models, the oldest first; of an image marked twice, the newest holds."""
        if not self.path.is_file():
            return []
        columns = f"name, sha256, positive, CASE WHEN {OWN_VECTOR} THEN vector END"
        query = f"SELECT {columns} FROM examples WHERE {VALID_EXAMPLE} ORDER BY time, sha256"
        with self._open() as db:
            rows = db.execute(query, (self.model, self.vector_bytes)).fetchall()
        newest: dict[tuple[str, bytes], Mark] = {}
        for name, digest, positive, stored in rows:
            key = (_key(name), bytes(digest))
            before = newest.get(key)
            vector = None if stored is None else np.frombuffer(stored, np.float16)
            if vector is None or not np.isfinite(vector).all():
                vector = None if before is None else before.vector
            first_name = name if before is None else before.name
            newest[key] = Mark(first_name, key[1], positive == 1, vector)
        return list(newest.values())

    def rows(self) -> list[Mark]:
        """The marks that have a vector of this model, the oldest first."""
        marks = self.all_marks()
        missing = {mark.sha256 for mark in marks if mark.vector is None}
        derived = self._find_vectors(missing) if missing else {}
        marks = [
            mark._replace(vector=derived.get(mark.sha256)) if mark.vector is None else mark
            for mark in marks
        ]
        return [mark for mark in marks if mark.vector is not None]

    def marks(self, name: str) -> dict[bytes, bool]:
        """{sha256: whether it is a positive example} of a word."""
        return {mark.sha256: mark.positive for mark in self.rows() if _key(mark.name) == _key(name)}

    def names(self) -> dict[str, tuple[int, int]]:
        """{word: (positive, negative) examples}."""
        return {
            name: (len(positive), len(negative))
            for name, (positive, negative) in self.examples().items()
        }

    def examples(self) -> dict[str, Examples]:
        examples: dict[str, tuple[list[np.ndarray], list[np.ndarray]]] = {}
        names: dict[str, str] = {}  # a word may have been taught in several spellings
        for mark in self.rows():
            assert mark.vector is not None
            name = names.setdefault(_key(mark.name), mark.name)
            side = 0 if mark.positive else 1
            examples.setdefault(name, ([], []))[side].append(mark.vector.astype(np.float32))
        return {
            name: (_stack(positive), _stack(negative))
            for name, (positive, negative) in examples.items()
        }


def _key(name: str) -> str:
    """Equal for two spellings of a word, which differ in case or in white space."""
    return " ".join(name.split()).lower()


def _stack(vectors: list[np.ndarray]) -> np.ndarray:
    return np.stack(vectors) if vectors else np.zeros((0, 1), np.float32)


def fit_concept(
    positive: np.ndarray,
    negative: np.ndarray,
    library_stats: tuple[np.ndarray, np.ndarray],
    text: np.ndarray,
    library: np.ndarray,
) -> tuple[np.ndarray, Choice]:
    """((dim,) unit vector, the choice): a linear head on examples, or their prototype, with or
    without the text.

    The head is linear discriminant analysis with the mean and covariance of the library
    (`library_stats`), more or less shrunk; with a shrinkage of 1e6 it is the difference of means.
    Chosen by leave-one-out: the example left out should be far above the library, in standard
    deviations. The head is only used if it ranks the examples that are left out better than the
    text does, among the vectors of `library` (n, dim); else the vector is that of the text.
    """
    fit = _ConceptFit(positive, negative, library_stats, text, library)
    text_finds_them = fit.text_finds_examples()
    if len(positive) >= MIN_EXAMPLES:
        choices = [Choice(shrinkage, weight) for shrinkage in SHRINKAGE for weight in TEXT_WEIGHTS]
        chosen = max(choices, key=fit.mean_height)
        use_examples = fit.is_better_than_text(chosen, clearly=text_finds_them)
    else:  # nothing can be left out
        chosen = Choice(1.0, 0.5)
        use_examples = not text_finds_them
    direction = fit.head(positive, negative, chosen) if use_examples else text
    return direction / np.linalg.norm(direction), chosen if use_examples else TEXT_ONLY


class _ConceptFit:
    """Heads on the examples of a word, and how they rank examples that are left out."""

    def __init__(
        self,
        positive: np.ndarray,
        negative: np.ndarray,
        library_stats: tuple[np.ndarray, np.ndarray],
        text: np.ndarray,
        library: np.ndarray,
    ) -> None:
        self.positive = positive
        self.negative = negative
        self.text = text
        self.mean, self.covariance = library_stats
        values, self.axes = np.linalg.eigh(self.covariance)
        self.variances = np.maximum(values, 0)  # along the axes
        self.unmarked = library[~(_contained(library, positive) | _contained(library, negative))]

    def head(self, positive: np.ndarray, negative: np.ndarray, choice: Choice) -> np.ndarray:
        """The direction that separates examples from the library, or from negative ones."""
        away = self.mean if len(negative) == 0 else (self.mean + negative.mean(axis=0)) / 2
        scale = 1 / (self.variances / max(float(self.variances.mean()), 1e-12) + choice.shrinkage)
        difference = positive.mean(axis=0) - away
        direction = self._unit(self.axes @ (scale * (self.axes.T @ difference)))
        return self._unit(direction + choice.text * self._unit(self.text))

    def _unit(self, direction: np.ndarray) -> np.ndarray:
        """With scores that have a standard deviation of 1 over the library."""
        spread = float(np.sqrt(direction @ self.covariance @ direction))
        return direction / max(spread, 1e-12)

    def _heads_without_each_positive(self, choice: Choice) -> list[np.ndarray]:
        return [
            self.head(np.delete(self.positive, left_out, axis=0), self.negative, choice)
            for left_out in range(len(self.positive))
        ]

    def _heads_without_each_negative(self, choice: Choice) -> list[np.ndarray]:
        return [
            self.head(self.positive, np.delete(self.negative, left_out, axis=0), choice)
            for left_out in range(len(self.negative))
        ]

    def mean_height(self, choice: Choice) -> float:
        """How far above the library the positive examples are that are left out."""
        pairs = zip(self.positive, self._heads_without_each_positive(choice), strict=True)
        return float(np.mean([(vector - self.mean) @ direction for vector, direction in pairs]))

    def text_finds_examples(self) -> bool:
        """Whether the text ranks the positive examples high in the library."""
        if len(self.positive) == 0:
            return True
        images_above = np.exp(self._ranks_by_text(self.positive)) - 1
        return bool(images_above.mean() <= KNOWN_FRACTION * len(self.unmarked))

    def is_better_than_text(self, choice: Choice, clearly: bool) -> bool:
        """Whether examples left out are ranked better, positive ones higher and negative ones lower.

        Where the text works, a few marks easily seem to improve it: then the gain must be clear.
        """
        positive_ranks = _log_ranks(
            self.positive, self._heads_without_each_positive(choice), self.unmarked
        )
        negative_ranks = _log_ranks(
            self.negative, self._heads_without_each_negative(choice), self.unmarked
        )
        positive_gains = self._ranks_by_text(self.positive) - positive_ranks
        negative_gains = negative_ranks - self._ranks_by_text(self.negative)
        gains = np.concatenate([positive_gains, negative_gains])
        needed = 2 * gains.std(ddof=1) / np.sqrt(len(gains)) if clearly else 0.0
        return bool(positive_gains.mean() >= 0 and gains.mean() > needed)

    def _ranks_by_text(self, examples: np.ndarray) -> np.ndarray:
        return _log_ranks(examples, [self.text] * len(examples), self.unmarked)


def _contained(rows: np.ndarray, examples: np.ndarray) -> np.ndarray:
    """(n,) whether each row is the vector of an example, up to the rounding to float16."""
    if len(examples) == 0 or len(rows) == 0:
        return np.zeros(len(rows), bool)
    lengths = np.linalg.norm(rows, axis=1)[:, None] * np.linalg.norm(examples, axis=1)
    return np.asarray((rows @ examples.T >= SAME * lengths).any(axis=1))


def _log_ranks(
    examples: np.ndarray, directions: Sequence[np.ndarray], library: np.ndarray
) -> np.ndarray:
    """(n,) the logarithms of the ranks of examples in a library, each by a direction of its own.

    0 is the top.

    The logarithm: rank 20 instead of 1 matters to a search, rank 1020 instead of 1001 does not.
    """
    pairs = zip(examples, directions, strict=True)
    return np.log(
        [
            1.0 + float((library @ direction > vector @ direction).sum())
            for vector, direction in pairs
        ]
    )


def split_text(text: str, names: Sequence[str]) -> tuple[list[str], str]:
    """(taught words in a text, the rest): "Rex on a beach" -> (["Rex"], "on a beach")."""
    taught = []
    for name in sorted(names, key=len, reverse=True):
        rest, count = re.subn(rf"(?<!\w){re.escape(name)}(?!\w)", " ", text, flags=re.IGNORECASE)
        if count:
            taught.append(name)
            text = " ".join(rest.split())
    return taught, text if re.search(r"\w", text) else ""
