"""Several sources as one, each with a weight: `a` and `b:0.3`."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Collection, Sequence

from m1clip.data.sources import splits
from m1clip.data.sources.base import DataSource
from m1clip.data.types import Sample, Source
from m1clip.errors import UserError

_WEIGHT = re.compile(r"(.+):(-?(?:\d+\.?\d*|\.\d+))")


def parse_weight(spec: str, formats: Collection[str] = ()) -> tuple[str, float]:
    """`photos:0.3` -> (photos, 0.3). A file of exactly that name, `hf:name` and `C:\\photos` have weight 1."""
    match = _WEIGHT.fullmatch(spec)
    if match is None or match.group(1) in formats or os.path.exists(spec):
        return spec, 1.0
    weight = float(match.group(2))
    if not 0 < weight <= 1000:
        raise UserError(f"{spec}: the weight must be above 0 and at most 1000 (0.3 takes 30% of the train images)")
    return match.group(1), weight


class MixedSource(Source):
    """The weight is the fraction (or the repetition) of a source's train images; val and test stay complete.

    The sources come one after the other; ids start with the number of the source.
    """

    def __init__(self, parts: Sequence[tuple[DataSource, float]]) -> None:
        if not parts:
            raise UserError("no data: give at least one source")
        super().__init__(", ".join(source.name for source, _ in parts), [source.path for source, _ in parts])
        self.parts = tuple(parts)
        self.class_captions = all(source.class_captions for source, _ in parts)
        for number, (source, weight) in enumerate(parts):
            self.problems += source.problems
            self.notes += source.notes
            for split in source.splits():
                for sample, copy in _weighted(source.samples(split), weight if split == "train" else 1.0):
                    id_ = f"{number}/{sample.id}" + (f"#{copy + 1}" if copy else "")
                    self.by_split.setdefault(split, []).append(Sample(sample.image, sample.captions, id_))

    def origin(self, id_: str, caption: int = 0) -> str:
        number, _, rest = id_.partition("/")
        source = self.parts[int(number)][0]
        try:
            return source.origin(rest, caption)
        except KeyError:  # a copy: a.jpg#2
            return source.origin(rest.rpartition("#")[0], caption)


def _weighted(samples: Sequence[Sample], weight: float) -> list[tuple[Sample, int]]:
    """(sample, copy number): complete copies, then the remaining fraction, chosen by hash and kept in order."""
    copies = math.floor(weight)
    chosen = [(sample, copy) for copy in range(copies) for sample in samples]
    count = round((weight - copies) * len(samples))
    if copies == 0:
        count = max(count, 1)
    by_hash = sorted(range(len(samples)), key=lambda i: (splits.hash_unit(f"mix:{samples[i].id}"), i)) if count else []
    return chosen + [(samples[i], copies) for i in sorted(by_hash[:count])]
