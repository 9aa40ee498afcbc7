"""Vectors for queries of one or two words, which models that were trained on sentences know less
well.

The vector of "dog" is replaced by the mean of those of "dog" and "a dog", less half of what
everyday words have in common: an image that is similar to every word is not a better result for
this one. docs/lab-search.md has the measurement.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from m1clip.inference.inputs import ARTICLES

SHORT_WORDS = 2  # the most words of a short query; longer ones are sentences
COMMON_SHARE = 0.5  # of the mean vector of everyday words, which is subtracted
# Nouns of things and places that are in many photos; only their mean is used.
EVERYDAY_WORDS = """
dog cat horse bird cow flower tree grass beach mountain river snow street kitchen bedroom bicycle car bus train boat
airplane cake fruit baby girl man crowd football swing phone table clock house window sky night
""".split()  # noqa: SIM905

Encode = Callable[[list[str]], np.ndarray]  # texts -> (n, dim) unit vectors


def is_short(text: str) -> bool:
    """Whether a query is one or two words, after an article if there is one."""
    return 0 < len(_without_article(text).split()) <= SHORT_WORDS


def _without_article(text: str) -> str:
    words = text.split()
    return " ".join(words[1:] if words[:1] and words[0].lower() in ARTICLES else words)


def everyday_vectors(encode: Encode) -> np.ndarray:
    """(words, dim) unit vectors of everyday words."""
    return _with_article(encode, EVERYDAY_WORDS)


def short_vectors(encode: Encode, texts: Sequence[str], everyday: np.ndarray) -> np.ndarray:
    """(n, dim) unit vectors of short queries; `everyday` has the `everyday_vectors` of the model."""
    return _less_common(_with_article(encode, texts), everyday)


def reference_vectors(everyday: np.ndarray, short: bool) -> np.ndarray:
    """(words, dim) everyday words as queries of the same kind, with which a score is compared."""
    return _less_common(everyday, everyday) if short else everyday


def _less_common(vectors: np.ndarray, everyday: np.ndarray) -> np.ndarray:
    return _unit(vectors - COMMON_SHARE * everyday.mean(axis=0))


def _with_article(encode: Encode, texts: Sequence[str]) -> np.ndarray:
    words = [_without_article(text) for text in texts]
    vectors = encode([*words, *(f"a {word}" for word in words)])
    return _unit(vectors[: len(words)] + vectors[len(words) :])


def _unit(vectors: np.ndarray) -> np.ndarray:
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    return np.asarray(vectors / np.maximum(lengths, 1e-12), np.float32)
