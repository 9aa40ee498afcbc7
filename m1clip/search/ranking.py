"""Rank the images of an index by a query: nearest vectors, marks of the user, near-duplicates."""

import sqlite3
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from m1clip.search.indexed_files import filtered_rows, read_results
from m1clip.search.match import probabilities, zscore
from m1clip.search.nearest import nearest
from m1clip.search.reader import LIVE, IndexReader
from m1clip.search.results import Condition, Filter, Result, Results

NO_ROWS = np.zeros(0, np.int64)


@dataclass(frozen=True)
class Ranked:
    """Rows of the index, the best first."""

    rows: np.ndarray  # (n,)
    scores: np.ndarray  # (n,) cosine similarities
    chance: np.ndarray | None  # (n,) probabilities of a match


@dataclass(frozen=True)
class Marked:
    """Rows of the images that the user has marked as right or wrong for a text."""

    positive: np.ndarray
    negative: np.ndarray


def rank(
    reader: IndexReader,
    query: np.ndarray,
    reference: np.ndarray | None,
    marks: Mapping[bytes, bool],
    where: Filter,
    k: int,
    collapse: bool,
) -> Results:
    """The k images nearest to a query, those that are marked for it first or last.

    They have a probability if there are `reference` vectors to compare their scores with. With
    `collapse`, near-duplicates of a result are listed with it.
    """
    filtered = where.sql()
    has_filter = filtered[0] != ""
    with reader.reading() as db:
        marked = _marked_rows(reader, db, marks, filtered)
        if has_filter:
            rows, searched = filtered_rows(reader, db, filtered)
        else:
            rows, searched = None, reader.file_count(db)
        total = len(reader.vectors) if rows is None else len(rows)
        # Some are near-duplicates, or of files that are gone.
        count = min(total, k + k // 4 + 8 + len(marked.negative))
        while True:
            ranked = _nearest(reader, query, reference, count, rows)
            if len(marked.positive) or len(marked.negative):
                ranked = _with_marks(reader, query, ranked, marked)
            files = read_results(
                reader, db, ranked.rows, ranked.scores, ranked.chance, filtered, collapse
            )
            if len(files) >= k or count == total:
                return Results(files[:k], searched)
            count = min(total, 4 * count)


def negatives(reader: IndexReader, marks: Mapping[bytes, bool], where: Filter) -> list[Result]:
    """The images that are marked as wrong, however far down a search would list them."""
    filtered = where.sql()
    with reader.reading() as db:
        rows = _marked_rows(reader, db, marks, filtered).negative
        return read_results(reader, db, rows, np.zeros(len(rows)), None, filtered, False)


def _nearest(
    reader: IndexReader,
    query: np.ndarray,
    reference: np.ndarray | None,
    count: int,
    rows: np.ndarray | None,
) -> Ranked:
    """The rows nearest to a query; UserError if the file of vectors has been damaged."""
    try:
        chosen, scores = nearest(reader.vectors, query, count, rows)
    except FloatingPointError:
        raise reader.damaged() from None
    chance = None
    if reference is not None:
        chance = probabilities(zscore(scores, reference, reader.sample().stats))
    return Ranked(chosen, scores, chance)


def _marked_rows(
    reader: IndexReader, db: sqlite3.Connection, marks: Mapping[bytes, bool], filtered: Condition
) -> Marked:
    """The marked images that are in the index and pass a filter."""
    if not marks:
        return Marked(NO_ROWS, NO_ROWS)
    condition, filter_values = filtered
    digests = ",".join(f"x'{digest.hex()}'" for digest in marks)
    columns = f"SELECT DISTINCT row, sha256 {LIVE} AND sha256 IN ({digests})"
    query = f"{columns}{condition} ORDER BY row"
    positive: list[int] = []
    negative: list[int] = []
    for row, digest in db.execute(query, (reader.model.set_id, *filter_values)):
        if 0 <= row < len(reader.vectors):
            (positive if marks[bytes(digest)] else negative).append(row)
    return Marked(np.array(positive, np.int64), np.array(negative, np.int64))


def _with_marks(reader: IndexReader, query: np.ndarray, ranked: Ranked, marked: Marked) -> Ranked:
    """The rows marked as positive first, and those marked as negative last.

    What the user has marked needs no estimate; the other images keep the order of their scores.
    """
    missing = np.setdiff1d(marked.positive, ranked.rows)
    missing_scores = reader.vectors[missing].astype(np.float64) @ query.astype(np.float64)
    rows = np.concatenate([ranked.rows, missing])
    scores = np.concatenate([ranked.scores, missing_scores])
    is_positive = np.isin(rows, marked.positive).astype(int)
    mark = is_positive - np.isin(rows, marked.negative).astype(int)
    order = np.lexsort((rows, -scores, -mark))
    chance = None
    if ranked.chance is not None:
        estimated = np.concatenate([ranked.chance, np.ones(len(missing))])
        chance = np.where(mark == 0, estimated, mark > 0)[order]
    return Ranked(rows[order], scores[order], chance)
