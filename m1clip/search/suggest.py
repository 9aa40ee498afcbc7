"""Words for a photo: those of the vocabulary and of the user's own captions that a model finds
nearest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from importlib import resources

import numpy as np

WORD_TEMPLATE = "a photo of {}"
TEXTS = 64  # encoded at a time
MAX_OWN_WORDS = 200  # captions and tags of the user that are suggested again
MAX_OWN_CHARACTERS = 80  # a longer caption is about one photo only

Encode = Callable[[list[str]], np.ndarray]  # texts -> (n, dim) unit vectors


@cache
def vocabulary() -> tuple[str, ...]:
    """Words and short phrases for what photographs show."""
    text = (resources.files("m1clip.search") / "vocabulary.txt").read_text(encoding="utf-8")
    return tuple(line for line in text.splitlines() if line and not line.startswith("#"))


def own_words(captions: Iterable[str]) -> list[str]:
    """The user's short captions and tags, the most frequent first."""
    counts: dict[str, int] = {}
    for caption in captions:
        if len(caption) <= MAX_OWN_CHARACTERS:
            for word in (caption, *map(str.strip, caption.split(","))):
                counts[word] = counts.get(word, 0) + 1
    ranked = sorted(filter(None, counts), key=lambda word: -counts[word])
    return ranked[:MAX_OWN_WORDS]


class Suggester:
    """Suggests words of a vocabulary to which the user's own words can be added."""

    def __init__(self, encode: Encode) -> None:
        self._encode = encode
        self._words: list[str] = []
        self._parts: list[np.ndarray] = []
        self.add(vocabulary())

    @property
    def vectors(self) -> np.ndarray:
        """(words, dim) unit vectors of the words."""
        if len(self._parts) > 1:
            self._parts = [np.concatenate(self._parts)]
        return self._parts[0]

    def add(self, words: Sequence[str]) -> None:
        """Add words that are not among those of the vocabulary yet."""
        existing = set(self._words)
        new = [word for word in dict.fromkeys(words) if word not in existing]
        if not new:
            return
        texts = [WORD_TEMPLATE.format(word) for word in new]
        # In small batches: a search meanwhile waits for one of them at most.
        self._parts += [self._encode(texts[at : at + TEXTS]) for at in range(0, len(texts), TEXTS)]
        self._words += new

    def suggest(self, photo: np.ndarray, count: int) -> list[str]:
        """The words nearest to a photo (dim,)."""
        best = np.argsort(-(self.vectors @ photo), kind="stable")[:count]
        return [self._words[index] for index in best]
