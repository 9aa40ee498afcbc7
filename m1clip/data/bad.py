"""Pictures that cannot be read: when they are too many, and that each is named once."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from m1clip.data.pair import ImageRef
from m1clip.data.store import Failure
from m1clip.errors import UserError

SHOWN = 10  # named on screen; all are in the run log
SAMPLE = 256  # looked at before training where not all are decoded
SURE = 2.0  # standard errors


def too_many(bad: int, looked: int, total: int, limit: float) -> bool:
    """Whether the bad share of the whole set is above the limit: exact where all were looked at, else beyond doubt."""
    if bad == 0:
        return False
    if looked >= total or bad > limit * total:
        return bad > limit * total
    share = bad / looked
    return share - SURE * math.sqrt(share * (1 - share) / looked) > limit and looked >= 32


def evenly(total: int, count: int) -> list[int]:
    """Indices spread over the whole set."""
    return list(range(total)) if total <= count else [i * total // count for i in range(count)]


def judge(
    bad: Mapping[int, str],
    refs: Sequence[ImageRef],
    split: str,
    looked: int,
    limit: float,
    warn: Callable[[str], None],
) -> tuple[Failure, ...]:
    """Name the first of the bad pictures; a UserError when they are too many to train without them."""
    found = tuple(Failure(index, str(refs[index]), bad[index]) for index in sorted(bad))
    for failure in found[:SHOWN]:
        warn(f"skipped {failure.where}: {failure.reason}")
    if too_many(len(found), looked, len(refs), limit):
        raise _refusal(found, f"{looked:,} {split} pictures", looked, limit)
    if len(found) > SHOWN:
        warn(
            f"skipped {len(found):,} of {looked:,} {split} pictures that cannot be read; run.jsonl names them all"
        )
    return found


def _refusal(found: Sequence[Failure], of: str, looked: int, limit: float) -> UserError:
    places: dict[str, list[str]] = {}  # by reason: one that all share is given once
    for failure in found[:SHOWN]:
        places.setdefault(failure.reason, []).append(failure.where)
    listed = "; ".join(f"{', '.join(where)}: {reason}" for reason, where in places.items())
    more = f"; and {len(found) - SHOWN:,} more" if len(found) > SHOWN else ""
    return UserError(
        f"{len(found):,} of {of} cannot be read ({len(found) / looked:.0%}, allowed {limit:.0%}): {listed}{more}. "
        f"m1clip data lint lists them all; mend them, or raise --data.max-bad"
    )


class Ledger:
    """Each picture that fails is written down once; too many that fail while training stop the run."""

    def __init__(
        self,
        total: int,
        limit: float,
        write: Callable[..., Any],
        warn: Callable[[str], None],
        named: Iterable[str] = (),
    ) -> None:
        self.total, self.limit, self.write, self.warn = total, limit, write, warn
        self.named = set(named)  # by an earlier part of the run, before a resume
        self.known: dict[int, Failure] = {}
        self.asked = 0

    def record(self, split: str, failures: Iterable[Failure]) -> None:
        """Write down those that are not yet there."""
        for failure in failures:
            if failure.where not in self.named:
                self.named.add(failure.where)
                self.write("skipped", split=split, where=failure.where, reason=failure.reason)

    def __call__(self, failures: Sequence[Failure], asked: int) -> None:
        """What failed in a training batch of `asked` pictures."""
        self.asked = min(self.total, self.asked + asked + len(failures))
        for failure in failures:
            if failure.index not in self.known:
                self.known[failure.index] = failure
                if len(self.known) <= SHOWN:
                    self.warn(f"skipped {failure.where}: {failure.reason}; another picture takes its place")
        self.record("train", failures)
        looked = max(self.asked, len(self.known))
        if too_many(len(self.known), looked, self.total, self.limit):
            raise _refusal(
                list(self.known.values()), f"{looked:,} train pictures read so far", looked, self.limit
            )
