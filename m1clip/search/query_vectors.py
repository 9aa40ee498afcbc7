"""Make the vector to search with: from texts with weights, images, and taught words."""

import re
import threading
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

import m1clip
from m1clip.data.images import BadImage, FileImage
from m1clip.errors import UserError
from m1clip.formatting import one_line
from m1clip.search.concepts import TEXT_ONLY, Concepts, Examples, fit_concept, split_text
from m1clip.search.database import hint
from m1clip.search.indexed_model import model_hash, model_stamp
from m1clip.search.location import DATABASE
from m1clip.search.reader import IndexReader
from m1clip.search.short_queries import everyday_vectors, is_short, short_vectors

NOT_WEIGHT = -0.5
WEIGHTED = re.compile(r"([0-9]+(?:\.[0-9]+)?)\*(.+)", re.DOTALL)
MAX_WEIGHT = 1000.0  # of a part of a query


class QueryEncoder:
    """Encodes queries of an index by its model, and by the words that were taught."""

    def __init__(self, reader: IndexReader, concepts: Concepts) -> None:
        self._reader = reader
        self._concepts = concepts
        self._lock = threading.RLock()  # two encoders at once would only slow each other

    @cached_property
    def model(self) -> Any:
        """The model of the vectors; UserError if it has changed since."""
        stored = self._reader.model
        unchanged = model_stamp(stored.path) == stored.stamp
        if not unchanged and model_hash(stored.path) != stored.sha256:
            raise UserError(
                f"{stored.path}: the model has changed since; run m1clip index {self._reader.root}"
            )
        return m1clip.load(stored.path)

    @cached_property
    def everyday(self) -> np.ndarray:
        """(words, dim) unit vectors of everyday words."""
        return everyday_vectors(self.encode_texts)

    def parts(
        self, text: Any, like: Iterable[Any], exclude: Sequence[str]
    ) -> tuple[list[tuple[float, np.ndarray]], bool]:
        """(weight, unit vector) of each part of a query, and whether examples of taught words are
        among them.
        """
        examples = self._concepts.examples()
        parts = [(1.0, self.image_vector(image)) for image in like]
        taught = False
        for phrase, weight in {**_weights(text), **dict.fromkeys(exclude, NOT_WEIGHT)}.items():
            vectors, rest = self.taught(phrase, examples)
            taught = taught or bool(vectors)
            if rest or not vectors:
                vectors = [*vectors, *self.query_vectors([rest])]
            parts += [(weight, vector) for vector in vectors]
        if not parts:
            raise UserError("an empty query: give a text, or an image with --like")
        return parts, taught

    def taught(self, phrase: str, examples: Mapping[str, Examples]) -> tuple[list[np.ndarray], str]:
        """(the vectors of taught words in a text, the rest of it).

        Words that the text finds as well are no such.
        """
        names, _ = split_text(phrase, list(examples))
        if not names:
            return [], phrase
        vectors = {}
        library, stats = self._reader.sample()
        for name, vector in zip(names, self.query_vectors(names), strict=True):
            fitted, choice = fit_concept(*examples[name], stats, vector, library)
            if choice is not TEXT_ONLY:
                vectors[name] = fitted
        if not vectors:
            return [], phrase
        names, rest = split_text(phrase, list(vectors))
        return [vectors[name] for name in names], rest

    def encode_texts(self, texts: list[str]) -> np.ndarray:
        """(n, dim) unit vectors of texts, by the model of the index."""
        with self._lock:
            return self._of_index(self.model.encode_text(texts))

    def query_vectors(self, texts: list[str]) -> np.ndarray:
        """(n, dim) unit vectors to search with.

        See `short_queries` for those of one or two words.
        """
        vectors = self.encode_texts(texts).copy()
        short = [index for index, text in enumerate(texts) if is_short(text)]
        if short:
            chosen = [texts[index] for index in short]
            vectors[short] = short_vectors(self.encode_texts, chosen, self.everyday)
        return vectors

    def _of_index(self, encoded: Any) -> np.ndarray:
        """(n, dim) float32 vectors of the model.

        UserError if those of the index have another length.
        """
        vectors = np.asarray(encoded, np.float32)
        dim = self._reader.dim
        if vectors.shape[1] != dim:
            path = self._reader.folder / DATABASE
            raise UserError(
                f"{path}: has vectors of {dim} values, the model {vectors.shape[1]}; {hint(path)}"
            )
        return vectors

    def image_vector(self, image: Any) -> np.ndarray:
        """(dim,) unit vector of an image: a path, a PIL image, its vector, or the id of a
        result.
        """
        if isinstance(image, np.ndarray) and image.ndim == 1:
            dim = self._reader.dim
            if len(image) != dim:
                raise UserError(f"a vector of {len(image)} values; those of the index have {dim}")
            return image
        try:
            if isinstance(image, int):
                path, _, vector = self._reader.entry(image)
                if vector is not None:
                    return vector
                root = self._reader.root
                image = FileImage(str(root / path), inside=str(root)).open()
            if isinstance(image, str | Path):
                FileImage(str(image)).open(1)  # or loading the model would delay the error
            with self._lock:
                return self._of_index(self.model.encode_image(image))[0]
        except BadImage as error:
            raise UserError(str(error)) from None

    def combine(self, parts: Sequence[tuple[float, np.ndarray]]) -> np.ndarray:
        """(dim,) unit vector. In a sum, each part is divided by the spread of its scores over the
        library.

        Otherwise an image would outweigh a text: cosines between images vary more than those with
        texts.
        """
        vectors = np.stack([vector for _, vector in parts])
        weights = np.array([weight for weight, _ in parts], np.float32)
        if len(parts) > 1:
            _, covariance = self._reader.sample().stats
            spread = np.sqrt(np.einsum("pd,de,pe->p", vectors, covariance, vectors))
            weights /= np.maximum(spread, 1e-6)
        query = weights @ vectors
        return query / max(float(np.linalg.norm(query)), 1e-12)


def _weights(text: str | Sequence[str] | Mapping[str, float]) -> dict[str, float]:
    """Texts with their weights; UserError for a weight that has no meaning."""
    if isinstance(text, str):
        return {text: 1.0}
    weights = dict(text if isinstance(text, Mapping) else map(parse_weight, text))
    for phrase, weight in weights.items():
        if not 0 < abs(weight) <= MAX_WEIGHT:
            name = one_line(phrase[:40])
            raise UserError(
                f"{name}: its weight must be above 0 and at most {MAX_WEIGHT:,.0f}, not {weight:g}"
            )
    return weights


def parse_weight(text: str) -> tuple[str, float]:
    """A text with its weight: 2*dog counts twice as much as beach."""
    match = WEIGHTED.fullmatch(text)
    return (match[2], float(match[1])) if match else (text, 1.0)
