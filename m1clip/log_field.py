"""What a field of run.jsonl is: how a reader checks it, and where it is shown."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from m1clip.schema import matches_schema


def figure(value: Any) -> bool:
    """Accept a number, or the text that stands for one that is not finite.

    JSON has no NaN: the log writes it as "nan". Use this schema for everything computed from
    losses, weights or gradients, which may be NaN in a run that diverges; `float` would make such a
    line invalid, and a reader would skip it. `float` is for what is always finite, such as times,
    bytes and fractions of counts.
    """
    return matches_schema(value, float) or value in ("nan", "inf", "-inf")


@dataclass(frozen=True, kw_only=True)
class LogField:
    """A field that readers of the log use: how it is checked, and where it is shown."""

    name: str  # path/in/a/dict for one inside another field, which then has the schema
    schema: Any = figure  # in each record, for `matches_schema`; None: not checked
    # Where a kind of record differs.
    schema_by_kind: Mapping[str, Any] = field(default_factory=dict)
    required_in: tuple[str, ...] = ()  # kinds of record that are invalid without it
    # Kind of record that gives the points of its curve.
    curve: Literal["step", "eval"] | None = None
    title: str = ""  # of its plot in the report and, for steps, on the page; empty: no plot
    factor: float = 1.0  # from the log to the unit of the plot
    unit: str = ""  # after a value on the page
    chance: str = ""  # the field with its chance level, drawn beside it
    log_scale: bool = False  # in the report
    about_machine: bool = False  # whether the page shows it below "Machine"

    def schema_in(self, kind: str) -> Any:
        """Return the schema of the field in records of a kind."""
        return self.schema_by_kind.get(kind, self.schema)
