"""Several sources as one, each with a weight: `a` and `b:0.3`."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Collection, Sequence

from m1clip.data.sources import splits
from m1clip.data.sources.base import Problem
from m1clip.data.types import Sample, Source
from m1clip.errors import UserError

_WEIGHT = re.compile(r"(.+):(-?(?:\d+\.?\d*|\.\d+))")


def parse_weight(spec: str, kinds: Collection[str] = ()) -> tuple[str, float]:
    """`photos:0.3` -> (photos, 0.3). A file of that very name, `hf:name` and `C:\\photos` have weight 1."""
    match = _WEIGHT.fullmatch(spec)
    if match is None or match.group(1) in kinds or os.path.exists(spec):
        return spec, 1.0
    weight = float(match.group(2))
    if not 0 < weight <= 1000:
        raise UserError(f"{spec}: the weight must be above 0 and at most 1000 (0.3 takes 30% of the train images)")
    return match.group(1), weight


class MixedSource:
    """The weight is the share (or the repetition) of a source's train images; val and test stay whole."""

    def __init__(self, parts: Sequence[tuple[Source, float]], seed: int = 0) -> None:
        if not parts:
            raise UserError("no data: name at least one source")
        self.parts = tuple(parts)
        self.seed = seed
        self.by_templates = all(getattr(source, "by_templates", False) for source, _ in parts)
        self.problems: list[Problem] = [p for source, _ in parts for p in getattr(source, "problems", ())]
        self.notes: list[str] = [note for source, _ in parts for note in getattr(source, "notes", ())]

    def splits(self) -> tuple[str, ...]:
        """Every split that some source has."""
        names = {name for source, _ in self.parts for name in source.splits()}
        first = [name for name in splits.ORDER if name in names]
        return (*first, *sorted(names - set(first)))

    def samples(self, split: str) -> Sequence[Sample]:
        """The sources one after the other; ids start with the number of the source."""
        mixed: list[Sample] = []
        for number, (source, weight) in enumerate(self.parts):
            if split in source.splits():
                samples = source.samples(split)
                chosen = weigh(samples, weight, self.seed) if split == "train" else [(sample, 0) for sample in samples]
                mixed.extend(
                    Sample(sample.image, sample.captions, f"{number}/{sample.id}" + (f"#{copy + 1}" if copy else ""))
                    for sample, copy in chosen
                )
        if not mixed:
            raise UserError(f"no split {split!r} in the data; it has {', '.join(self.splits())}")
        return mixed

    def origin(self, id_: str, caption: int = 0) -> str:
        """The file and row a caption came from, where its source knows."""
        number, _, rest = id_.partition("/")
        source = self.parts[int(number)][0]
        if hasattr(source, "origin"):
            for name in (rest, rest.rpartition("#")[0]):
                try:
                    return str(source.origin(name, caption))
                except KeyError:
                    continue
        return id_


def weigh(samples: Sequence[Sample], weight: float, seed: int) -> list[tuple[Sample, int]]:
    """(sample, copy number): whole copies, then the share that is left, chosen by hash and kept in order."""
    whole = math.floor(weight)
    chosen = [(sample, copy) for copy in range(whole) for sample in samples]
    count = round((weight - whole) * len(samples))
    if whole == 0:
        count = max(count, 1)
    by_hash = sorted(range(len(samples)), key=lambda i: (splits.hash_unit(seed, f"mix:{samples[i].id}"), i))
    return chosen + [(samples[i], whole) for i in sorted(by_hash[:count])]
