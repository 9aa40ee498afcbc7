"""The history of a run in bounded memory: curves, evaluations, events, snapshots."""

from __future__ import annotations

import json
import math
import re
import tomllib
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from m1clip.io import open_regular, read_small
from m1clip.runlog import FIELDS, NAME, Record, curve_fields, parse, selection_metric
from m1clip.schema import is_well_formed, matches_schema

BLOCK = 1 << 20  # bytes read at a time
LONGEST_LINE = 4 << 20  # bytes; anything longer is not a record
POINTS, EVALUATIONS, EVENTS, RECENT, FIRST = 2000, 500, 200, 60, 12
# "step": forward, backward and optimizer together, where a step is replayed as a CUDA graph
PHASES = ("data", "copy", "forward", "backward", "exchange", "optimizer", "step", "rest")
EVENT_KINDS = ("start", "checkpoint", "event", "warning", "skipped", "parity")
Row = dict[str, Any]
Setting = TypeVar("Setting")


class Thinned:
    """Rows ordered by `step`; stores at most `most`, evenly spread, and always the newest."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.last: Row | None = None
        self._rows: list[Row] = []
        self._stride = 1
        self._seen = 0

    def add(self, row: Row) -> None:
        """Add the next row, unless it is not newer than the last."""
        if self.last is not None and row["step"] <= self.last["step"]:
            return
        self.last = row
        if self._seen % self._stride == 0:
            self._rows.append(row)
        self._seen += 1
        if len(self._rows) > self.most:
            self._rows = self._rows[::2]
            self._stride *= 2

    def cut(self, step: int) -> None:
        """Remove rows after a step from which the run was resumed."""
        self._rows = [row for row in self if row["step"] <= step]
        self.last = self._rows[-1] if self._rows else None

    def __iter__(self) -> Iterator[Row]:
        yield from self._rows
        if self.last is not None and (not self._rows or self._rows[-1] is not self.last):
            yield self.last


class History:
    """Follows one run: `poll` reads new records, everything else is read-only."""

    def __init__(self, run: Path) -> None:
        self.run, self.path = run, run / NAME
        self.generation = 0  # raised when earlier points are no longer valid
        self._clear()

    def _clear(self) -> None:
        self._offset, self._partial_line, self._file_id = 0, b"", (0, 0)
        self.problem = ""  # why the log cannot be read
        self.invalid = 0  # lines that were skipped
        self.records = 0  # that were read
        self.config = _read(self.run / "config.toml")
        self.environment = _read(self.run / "environment.json")
        self.steps, self.evaluations = Thinned(POINTS), Thinned(EVALUATIONS)
        self.events: deque[Record] = deque(maxlen=EVENTS)
        self.recent: deque[Record] = deque(maxlen=RECENT)  # complete records of the newest steps
        self.first: list[Record] = []  # and of this session's first ones
        self.start: Record = {}
        self.end: Record = {}
        self.memory: Record = {}
        self.total = 0
        self.skipped = 0
        self.last_time = 0.0
        self._reached = 0  # the newest step in any record

    def poll(self) -> History:
        """Read new records from the run folder; if the log was replaced, from its beginning."""
        try:
            status = self.path.stat()
            file_id, size = (status.st_dev, status.st_ino), status.st_size
        except OSError:
            file_id, size = (0, 0), 0
        if self._offset > 0 and (file_id != self._file_id or size < self._offset):
            self._clear()
            self.generation += 1
        self._file_id = file_id
        if not self.config:
            self.config, self.environment = (
                _read(self.run / "config.toml"),
                _read(self.run / "environment.json"),
            )
        try:
            if file_id != (0, 0):
                self._read_log()
        except OSError as error:  # not a regular file inside the run folder, or not readable
            self.problem = error.strerror or str(error)
        return self

    def _read_log(self) -> None:
        with open_regular(self.path, self.run) as file:
            self.problem = ""
            file.seek(self._offset)
            while block := file.read(BLOCK):
                self._offset += len(block)
                lines = (self._partial_line + block).split(b"\n")
                self._partial_line = lines.pop()
                if len(self._partial_line) > LONGEST_LINE:
                    self._partial_line = b""
                for record in map(parse, filter(None, lines)):
                    if record is None:
                        self.invalid += 1
                    else:
                        self.add(record)

    def add(self, record: Record) -> None:
        kind, step = record["kind"], record.get("step") or 0
        self.records += 1
        # The time of the newest line, not the maximum: a clock change must not make a run look alive or dead.
        self.last_time = record.get("time") or self.last_time
        if kind == "plan":  # --minutes corrected the number of steps
            self.total = record.get("steps") or self.total
        if kind == "start":
            self._cut(step)
            self.start, self.end = record, {}
            self.total = record.get("steps") or self.total
            self.first, self.recent = [], deque(maxlen=RECENT)
        elif kind == "step":
            self._reached = max(self._reached, step)
            self.steps.add({**curve_row(record), "order": self.records})
            self.recent.append(record)
            if len(self.first) < FIRST:
                self.first.append(record)
        elif kind == "eval":
            self.evaluations.add({**record, "order": self.records})
        elif kind == "memory":
            self.memory = record
        elif kind == "end":
            self.end = record
        if kind in EVENT_KINDS:
            self.skipped += kind == "skipped"
            self._reached = max(self._reached, step)
            if (back := record.get("back_to")) is not None:
                self._cut(back)
            self.events.append(record)

    def _cut(self, step: int) -> None:
        curves = (self.steps, self.evaluations)
        if any(curve.last and curve.last["step"] > step for curve in curves):
            self.generation += 1
        for curve in curves:
            curve.cut(step)
        self._reached = step

    @property
    def step(self) -> int:
        return max(self._reached, self.end.get("step") or 0)

    @property
    def name(self) -> str:
        return self.run.name or str(self.run)

    @property
    def newest(self) -> Record:
        return self.recent[-1] if self.recent else {}

    @property
    def metric(self) -> str:
        return selection_metric(self.evaluations.last or {})

    def setting(self, section: str, key: str, kind: type[Setting]) -> Setting | None:
        """A value of config.toml; None if it is missing or of another type."""
        table = self.config.get(section)
        value = table.get(key) if isinstance(table, dict) else None
        return value if matches_schema(value, kind) else None

    @property
    def machine_memory(self) -> float | None:
        """Bytes of the machine's memory, which limits a run on the CPU; None on other devices."""
        facts = self.environment.get("facts")
        if not isinstance(facts, dict) or self.setting("train", "device", str) != "cpu":
            return None
        return _number(facts.get("memory_bytes"))

    def curve(self, name: str, factor: float) -> list[tuple[int, float]]:
        """The points (step, factor x value) of a field of the steps or evaluations."""
        field = FIELDS.get(name)
        rows = self.steps if field and field.curve == "step" else self.evaluations
        found = ((row["step"], figure_of(row, name)) for row in rows)
        return [(step, factor * value) for step, value in found if value is not None]

    def best(self) -> Row:
        rows = [row for row in self.evaluations if numbers([row], self.metric)]
        return max(rows, key=lambda row: row[self.metric], default={})


def curve_row(record: Record) -> Row:
    """The figures of a step that are kept for curves; those that are not finite numbers are left out."""
    row: Row = {"step": record["step"]}
    values = {field.name: record.get(field.name) for field in curve_fields("step")}
    seconds = record.get("seconds") or {}
    phases = {f"seconds/{name}": value for name, value in seconds.items() if name in PHASES}
    for name, value in (values | phases).items():
        if (figure := _number(value)) is not None:
            row[name] = figure
    return row


def numbers(rows: Iterable[Row], name: str) -> list[float]:
    """The finite values of a column."""
    return [value for row in rows if (value := _number(row.get(name))) is not None]


def figure_of(row: Row, name: str) -> float | None:
    """A figure of an evaluation by its name, or one inside its analysis; the fraction of [fraction, n]."""
    value: Any = row.get(name)
    if value is None:
        value = row
        for part in name.split("/"):
            value = value.get(part) if isinstance(value, dict) else None
    return _number(value[0] if isinstance(value, list) and value else value)


def _number(value: Any) -> float | None:
    """A finite number, or None: the log writes NaN as text."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return value


def _read(path: Path) -> dict[str, Any]:
    try:
        text = read_small(path, inside=path.parent).decode("utf-8")
        value = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) and is_well_formed(value) else {}


SNAPSHOT_NAME = re.compile(r"step-(\d{1,12})\.json")
MAX_BYTES = 1 << 22
MAX_MATRIX = 256  # rows
SNAPSHOT: dict[str, Any] = {
    "step": int,
    "queries": [
        {
            "caption": str,
            "right": int,
            "rank": int,
            "found": [int],
            "correct": [bool],
            "scores": [float],
        }
    ],
    "matrix": {"captions": [str], "values": [[float]]},
    "confusions": [{"caption": str, "found": int, "right": int, "margin": float, "truth": str}],
}


def snapshot_steps(run: Path) -> dict[int, Path]:
    matches = [
        (SNAPSHOT_NAME.fullmatch(path.name), path)
        for path in (run / "snapshots").glob("step-*.json")
    ]
    return dict(sorted((int(match[1]), path) for match, path in matches if match))


def read_snapshot(run: Path, step: int) -> dict[str, Any] | None:
    path = snapshot_steps(run).get(step)
    try:
        value: Any = (
            json.loads(read_small(path, MAX_BYTES, inside=run)) if path is not None else None
        )
    except (OSError, ValueError, RecursionError):
        return None
    if not (is_well_formed(value) and matches_schema(value, SNAPSHOT)):
        return None
    rows, captions = value["matrix"]["values"], value["matrix"]["captions"]
    square = 0 < len(rows) <= MAX_MATRIX and all(len(row) == len(rows) for row in [*rows, captions])
    equal = all(
        len(each["scores"]) == len(each["correct"]) == len(each["found"])
        for each in value["queries"]
    )
    return value if square and equal else None


def read_thumbnail(run: Path, image: int) -> bytes | None:
    try:
        return read_small(run / "snapshots" / "thumbnails" / f"{image}.jpg", MAX_BYTES, inside=run)
    except OSError:
        return None
