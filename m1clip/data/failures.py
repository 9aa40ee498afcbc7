"""Images that cannot be read: reports each once, and stops the run if there are too many."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from m1clip import console
from m1clip.data.types import ImageRef
from m1clip.errors import UserError
from m1clip.formatting import plural

FAILURES_SHOWN = 10  # failures named on screen; the run log has all
EXAMPLES = 3  # failures named in an error


@dataclass(frozen=True, slots=True)
class Failure:
    """An image that could not be read: its index, where it is, and why."""

    index: int
    where: str
    reason: str


def check_failures(
    bad: Mapping[int, str], refs: Sequence[ImageRef], split: str, tried: int, limit: float
) -> tuple[Failure, ...]:
    """Report the first bad images; UserError if there are too many."""
    failures = tuple(Failure(index, str(refs[index]), bad[index]) for index in sorted(bad))
    for failure in failures[:FAILURES_SHOWN]:
        console.warn(f"skipped {failure.where}: {failure.reason}")
    if len(failures) > limit * tried:
        raise _too_many_failures(failures, plural(tried, f"{split} image"), tried, limit)
    if len(failures) > FAILURES_SHOWN:
        console.warn(
            f"skipped {len(failures):,} of {tried:,} {split} images that cannot be read; run.jsonl"
            " lists all of them"
        )
    return failures


def _too_many_failures(failures: Sequence[Failure], of: str, tried: int, limit: float) -> UserError:
    examples = "; ".join(f"{failure.where}: {failure.reason}" for failure in failures[:EXAMPLES])
    return UserError(
        f"{len(failures):,} of {of} cannot be read ({len(failures) / tried:.0%}, allowed {limit:.0%}),"
        f" such as {examples}. m1clip data lint lists all of them; repair them, or raise"
        " --max-unreadable"
    )


class FailureLog:
    """Logs each failed image once; stops the run if too many fail during training."""

    def __init__(
        self, total: int, limit: float, write: Callable[..., Any], named: Iterable[str] = ()
    ) -> None:
        self.total, self.limit, self.write = total, limit, write
        self.named = set(named)  # before a resume
        self.failures: dict[int, Failure] = {}
        self.shown: set[str] = set()

    def record(self, split: str, failures: Iterable[Failure]) -> None:
        """Log those that are new."""
        for failure in failures:
            if failure.where not in self.named:
                self.named.add(failure.where)
                self.write("skipped", split=split, where=failure.where, reason=failure.reason)

    def __call__(self, failures: Sequence[Failure]) -> None:
        """What failed in a training batch."""
        for failure in failures:
            if failure.index not in self.failures:
                self.failures[failure.index] = failure
                if (
                    failure.where not in self.shown and len(self.shown) < FAILURES_SHOWN
                ):  # once for a shard
                    self.shown.add(failure.where)
                    console.warn(
                        f"skipped {failure.where}: {failure.reason}; replaced by another image"
                    )
        self.record("train", failures)
        if len(self.failures) > self.limit * self.total:
            raise _too_many_failures(
                list(self.failures.values()),
                plural(self.total, "train image"),
                self.total,
                self.limit,
            )
