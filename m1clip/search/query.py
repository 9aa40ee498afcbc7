"""Search an index: `Index` finds the images nearest to texts and images, exactly.

`reader` opens an index, `query_vectors` makes a vector of a query, `ranking` finds the nearest
images, and `indexed_files` reads the facts of their files.
"""

import hashlib
import os
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from m1clip.data.images import BadImage, FileImage
from m1clip.errors import UserError
from m1clip.search.concepts import Concepts
from m1clip.search.index import Report, update_index
from m1clip.search.indexed_files import export_parquet, filtered_rows, read_duplicates, read_results
from m1clip.search.match import LibraryStats, has_probabilities
from m1clip.search.query_vectors import QueryEncoder, parse_weight
from m1clip.search.ranking import negatives, rank
from m1clip.search.reader import VALID, IndexReader
from m1clip.search.results import TAKEN, Copy, Filter, Photo, Result, Results
from m1clip.search.short_queries import is_short, reference_vectors


class Index:
    """The index of a folder of photos, opened read-only.

    `Index("~/Pictures").search("two dogs on a beach")`; `m1clip.Index()` opens that of the current
    folder, or else the newest; `Index.build` creates or updates one. Safe to use from threads; a
    search sees what another process has indexed meanwhile with the same model.
    """

    def __init__(self, folder: str | Path | None = None, model: str | Path | None = None) -> None:
        self._reader = IndexReader(None if folder is None else Path(folder), model)
        self.folder = self._reader.folder
        self.root = self._reader.root  # the folder of photos
        self.dim = self._reader.dim
        self.model_path = self._reader.model.path
        self.model_sha256 = self._reader.model.sha256
        self.concepts = Concepts(
            self.folder, self.model_sha256, self.dim, self._reader.vectors_with
        )
        self._encoder = QueryEncoder(self._reader, self.concepts)

    @classmethod
    def build(cls, folder: str | Path, model: str | Path | None = None) -> "Index":
        """Index a folder of photos, like the command `m1clip index`, and open the index.

        Only new and changed files are read. `model` is by default the one used last, the newest run
        in runs/, or general. `console.on_progress` calls a function with the number of files done
        and their total.
        """
        update_index(folder, model)
        return cls(folder, model)

    def update(self) -> Report:
        """Bring the index up to date with its folder, for the model of this index.

        Returns what was done.
        """
        report = update_index(self.root, self.model_path)
        self.refresh()
        return report

    def refresh(self) -> None:
        """Reload the index if it has changed; every search does this."""
        self._reader.refresh()

    @property
    def vectors(self) -> np.ndarray:
        """(rows, dim) float16: those of the images, and of some that were deleted."""
        return self._reader.vectors

    @property
    def version(self) -> int:
        """A number that changes with the index."""
        return self._reader.version

    @property
    def outdated(self) -> bool:
        """Whether another model was indexed since; a new `Index` has its vectors."""
        return self._reader.outdated

    @property
    def model(self) -> Any:
        """The model of the vectors; UserError if it has changed since."""
        return self._encoder.model

    @cached_property
    def has_probabilities(self) -> bool:
        """Whether searches know how likely images match: with general and what descends from it."""
        return has_probabilities(self.model_path)

    @property
    def model_before(self) -> str | None:
        """The model that was searched before this one, whose vectors are kept; None: there is none."""
        return self._reader.previous_model()

    @property
    def library_stats(self) -> LibraryStats:
        """((dim,) mean, (dim, dim) covariance) of the vectors, from a sample."""
        return self._reader.sample().stats

    @property
    def sample(self) -> np.ndarray:
        """(n, dim) float32: every vector of a small library, some of a large one."""
        return self._reader.sample().vectors

    def progress(self) -> tuple[int, int] | None:
        """(done, total) images of an indexer that is running now."""
        return self._reader.progress()

    def folders(self) -> list[str]:
        """Folders that contain indexed images, relative to the folder of photos."""
        return self._reader.folders()

    def __len__(self) -> int:
        with self._reader.reading() as db:
            return self._reader.file_count(db)

    def search(
        self,
        text: str | Sequence[str] | Mapping[str, float] = (),
        k: int = 20,
        *,
        like: Iterable[Any] = (),
        exclude: Sequence[str] = (),
        where: Filter | None = None,
        collapse: bool = True,
    ) -> Results:
        """The k images nearest to a text, to several with weights, to images (`like`), and far from
        `exclude`.

        An image is a path, a PIL image, its vector, or the id of a result. Near-duplicates of a
        result are listed with it, unless `collapse` is False.
        """
        self.refresh()
        like = list(like)
        texts = [text] if isinstance(text, str) else list(text)
        single = texts[0] if len(texts) == 1 and not like and not exclude else None
        parts, taught = self._encoder.parts(text, like, exclude)
        query = self._encoder.combine(parts)
        reference = None
        # Probabilities are only fitted for single texts.
        if single is not None and not taught and self.has_probabilities:
            reference = reference_vectors(self._encoder.everyday, is_short(single))
        marks = {} if single is None else self._marks_of(single)
        return rank(self._reader, query, reference, marks, where or Filter(), k, collapse)

    def negatives(self, text: str, where: Filter | None = None) -> list[Result]:
        """The images that are marked as wrong for a text, however far down a search would list
        them.
        """
        return negatives(self._reader, self._marks_of(text), where or Filter())

    def _marks_of(self, text: str) -> dict[bytes, bool]:
        """{sha256: whether it is right} of the images that are marked for a text."""
        name, _ = parse_weight(text)
        return self.concepts.marks(name)

    def newest(self, k: int = 20, where: Filter | None = None) -> Results:
        """The k images taken last."""
        filtered = (where or Filter()).sql()
        last = f"GROUP BY row ORDER BY max({TAKEN}) DESC, row LIMIT ?"
        reader = self._reader
        with reader.reading() as db:
            rows, files = filtered_rows(reader, db, filtered, last, k)
            none = np.zeros(len(rows))
            return Results(read_results(reader, db, rows, none, None, filtered, True), files)

    def export(self, path: Path) -> int:
        """Write a Parquet file for a vector database (path, sha256, taken, width, height, vector).

        Returns its rows.
        """
        return export_parquet(self._reader, path)

    def duplicates(self) -> list[list[Copy]]:
        """Groups of equal and near-equal images: the best of each first, the group with the most
        bytes to save first.

        The best has the most pixels, then the most bytes, then the shortest path.
        """
        return read_duplicates(self._reader)

    def photos_at(self, rows: Iterable[int]) -> list[Photo]:
        """One file of each of some rows of vectors, the one with the first path.

        Rows of deleted files have none.
        """
        requested_rows = [int(row) for row in rows]
        photo_of = {
            photo.row: photo for photo in self._reader.photos("row", requested_rows, "DESC")
        }
        return [photo_of[row] for row in requested_rows if row in photo_of]

    def photos_named(self, paths: Iterable[str]) -> dict[str, Photo]:
        """The files of some paths, relative to the folder of photos.

        Those that are not indexed are missing.
        """
        names = [os.fsencode(path) for path in paths]
        return {photo.path: photo for photo in self._reader.photos("path", names)}

    def photos_with(self, digests: Iterable[bytes]) -> dict[bytes, Photo]:
        """One file with each of some contents (sha256), the one with the first path."""
        return {
            photo.sha256: photo for photo in self._reader.photos("sha256", list(digests), "DESC")
        }

    def photo(self, id_: int) -> Photo:
        """An indexed file by its number.

        UserError if it is not in the index, or has no vector yet.
        """
        for photo in self._reader.photos("files.id", [id_]):
            return photo
        raise UserError(f"image {id_}: no longer in the index")

    def file(self, id_: int) -> Path:
        """The path of a result; UserError if it is not in the index."""
        return self.root / self._reader.entry(id_)[0]

    def encode_texts(self, texts: list[str]) -> np.ndarray:
        """(n, dim) unit vectors of texts, by the model of the index."""
        return self._encoder.encode_texts(texts)

    def image_vector(self, image: Any) -> np.ndarray:
        """(dim,) unit vector of an image: a path, a PIL image, its vector, or the id of a
        result.
        """
        return self._encoder.image_vector(image)

    def teach(self, name: str, images: Sequence[str | Path | int], positive: bool = True) -> None:
        """Add images (paths or ids) as examples of a word, or as negative ones.

        A search finds the word by them.
        """
        examples = []
        for image in images:
            if isinstance(image, int):
                digest = self.sha256(image)
            else:
                try:
                    digest = hashlib.sha256(FileImage(str(image)).read()).digest()
                except BadImage as error:
                    raise UserError(str(error)) from None
            examples.append((digest, self.image_vector(image)))
        self.concepts.add(name, examples, positive)

    def uses_examples(self, name: str) -> bool:
        """Whether a search for a taught word ranks by its examples.

        If they rank held-out ones no better than the text does, the text stays the query.
        """
        vectors, _ = self._encoder.taught(" ".join(name.split()), self.concepts.examples())
        return bool(vectors)

    def mark(self, text: str, id_: int, positive: bool | None) -> None:
        """Mark an image as right or wrong for a text: an example as in `teach`.

        None removes the mark.
        """
        name, _ = parse_weight(text)
        if positive is None:
            self.concepts.remove(name, self.sha256(id_))
        else:
            self.teach(name, [id_], positive)

    def marks(self, text: str, ids: Sequence[int]) -> dict[int, bool]:
        """Which of some images are marked as right or wrong for a text."""
        marked = self._marks_of(text)
        return (
            {id_: marked[digest] for id_ in ids if (digest := self.sha256(id_)) in marked}
            if marked
            else {}
        )

    def captions(self) -> list[tuple[str, str]]:
        """(path, word) of the right examples and marks of all words, for `m1clip train`.

        Of indexed images only.
        """
        with self._reader.reading() as db:
            columns = "SELECT sha256, min(path) FROM files JOIN images ON images.id = image"
            paths = dict(db.execute(f"{columns} WHERE {VALID} GROUP BY 1"))
        rows = (
            (paths.get(mark.sha256), mark.name) for mark in self.concepts.rows() if mark.positive
        )
        return [
            (str(self.root / os.fsdecode(path)), name) for path, name in rows if path is not None
        ]

    def sha256(self, id_: int) -> bytes:
        """The hash of a result's content; UserError if it is not in the index."""
        return self._reader.entry(id_)[1]
