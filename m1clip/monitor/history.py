"""The history of a run in bounded memory: curves, evaluations, events, snapshots."""

from __future__ import annotations

import json
import math
import re
import tomllib
from array import array
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from m1clip.analyses import ANALYSES, RECORD, Analysis
from m1clip.epochs import RunTables
from m1clip.io import open_regular, read_small
from m1clip.resource_use import ResourceUse
from m1clip.runlog import FIELDS, LONGEST_LINE, NAME, Record, curve_fields, parse, selection_name
from m1clip.schema import is_well_formed, matches_schema

READ_BYTES = 1 << 20  # bytes read at a time
POINTS, MAX_EVALUATIONS, EVENTS, RECENT_STEPS, FIRST = 2000, 500, 200, 60, 12
# "step": forward, backward and optimizer together, where a step is replayed as a CUDA graph
PHASES = (
    *("data", "copy", "preprocess", "forward", "backward", "exchange", "optimizer", "step"),
    "rest",
)
NEWEST_KINDS = ("start", "end", "memory", "sensors")  # of which only the newest record counts
EVENT_KINDS = ("start", "checkpoint", "event", "warning", "skipped", "parity")
Row = dict[str, Any]
Setting = TypeVar("Setting")


class Downsampled:
    """Rows ordered by `step`; stores at most `max_points`, evenly spread, and always the newest."""

    def __init__(self, max_points: int) -> None:
        self.max_points = max_points
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
        if len(self._rows) > self.max_points:
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


class Highest:
    """The highest value of some rows, and its step; exact also after later rows were cut.

    Has each value that was the highest when it was added.
    """

    def __init__(self) -> None:
        self._values = array("d")
        self._steps = array("q")

    @property
    def value(self) -> float | None:
        return self._values[-1] if self._values else None

    @property
    def step(self) -> int | None:
        return self._steps[-1] if self._steps else None

    def add(self, step: int, value: float) -> bool:
        """Add the value of the next row; returns whether it is the highest."""
        if self._values and value <= self._values[-1]:
            return False
        self._values.append(value)
        self._steps.append(step)
        return True

    def cut(self, step: int) -> None:
        """Remove values after a step."""
        count = bisect_right(self._steps, step)
        del self._values[count:], self._steps[count:]


class LayerExtremes:
    """The lowest and the highest value of each layer in the analyses by layer, and their steps."""

    def __init__(self) -> None:
        self._highest: dict[tuple[str, str], Highest] = {}  # by analysis and layer
        self._lowest: dict[tuple[str, str], Highest] = {}  # with the sign changed

    def add(self, analysis: str, step: int, layers: dict[str, Any]) -> None:
        """Add the values of the next step; those that are not finite numbers do not count."""
        for layer in layers:
            for number in numbers([layers], layer):
                self._highest.setdefault((analysis, layer), Highest()).add(step, number)
                self._lowest.setdefault((analysis, layer), Highest()).add(step, -number)

    def cut(self, step: int) -> None:
        """Remove values after a step."""
        for extreme in (*self._highest.values(), *self._lowest.values()):
            extreme.cut(step)

    def highest(self, analysis: str, layer: str) -> tuple[int, float] | None:
        """(step, value) of the highest value; None without a value."""
        extreme = self._highest.get((analysis, layer), Highest())
        if extreme.step is None or extreme.value is None:
            return None
        return extreme.step, extreme.value

    def lowest(self, analysis: str, layer: str) -> tuple[int, float] | None:
        """(step, value) of the lowest value; None without a value."""
        extreme = self._lowest.get((analysis, layer), Highest())
        if extreme.step is None or extreme.value is None:
            return None
        return extreme.step, -extreme.value


class Evaluations(Downsampled):
    """The evaluations of a run: some of many, but always the first, the best and the newest."""

    def __init__(self) -> None:
        super().__init__(MAX_EVALUATIONS)
        self._highest = Highest()
        self._steps = array("q")  # of all evaluations
        # The best at their time, for a rollback; of more than these, the best has only its score.
        self._best_rows: deque[Row] = deque(maxlen=MAX_EVALUATIONS)

    @property
    def best(self) -> Row:
        """The evaluation with the highest selection metric; {} before the first."""
        if self._highest.step is None or self.last is None:
            return {}
        if self._best_rows:
            return self._best_rows[-1]
        return {"step": self._highest.step, selection_name(self.last): self._highest.value}

    def add(self, row: Row) -> None:
        super().add(row)
        if self.last is not row:  # it is not newer than the last
            return
        self._steps.append(row["step"])
        for value in numbers([row], selection_name(row)):
            if self._highest.add(row["step"], value):
                self._best_rows.append(row)

    def cut(self, step: int) -> None:
        super().cut(step)
        self._highest.cut(step)
        while self._best_rows and self._best_rows[-1]["step"] > step:
            self._best_rows.pop()
        del self._steps[bisect_right(self._steps, step) :]

    def count_after(self, step: int) -> int:
        """Number of evaluations after a step."""
        return len(self._steps) - bisect_right(self._steps, step)

    def __iter__(self) -> Iterator[Row]:
        rows = {row["step"]: row for row in super().__iter__()}
        best = self.best
        if best:
            rows.setdefault(best["step"], best)
        for step in sorted(rows):
            yield rows[step]


class LogReader:
    """Reads the records that were added to a log since the last time."""

    def __init__(self, run: Path) -> None:
        self._run = run
        self.path = run / NAME
        self.restart()

    def restart(self) -> None:
        """Read from the beginning the next time."""
        self._offset = 0
        self._partial_line = b""
        self._file_id = (0, 0)
        self.problem = ""  # why the log cannot be read
        self.invalid = 0  # lines that were skipped

    def is_replaced(self) -> bool:
        """Whether the file is another one than before, or has become shorter."""
        file_id, size = self._status()
        return self._offset > 0 and (file_id != self._file_id or size < self._offset)

    def new_records(self) -> Iterator[Record]:
        """Yield the new valid records; `problem` says why there are none."""
        self._file_id, _ = self._status()
        if self._file_id == (0, 0):
            return
        try:
            with open_regular(self.path, self._run) as file:
                self.problem = ""
                file.seek(self._offset)
                while block := file.read(READ_BYTES):
                    self._offset += len(block)
                    yield from self._records_in(block)
        except OSError as error:  # not a regular file inside the run folder, or not readable
            self.problem = error.strerror or str(error)

    def _status(self) -> tuple[tuple[int, int], int]:
        """Return which file it is, and its bytes."""
        try:
            status = self.path.stat()
        except OSError:
            return (0, 0), 0
        return (status.st_dev, status.st_ino), status.st_size

    def _records_in(self, block: bytes) -> Iterator[Record]:
        lines = (self._partial_line + block).split(b"\n")
        self._partial_line = lines.pop()
        if len(self._partial_line) > LONGEST_LINE:
            self._partial_line = b""
        for record in map(parse, filter(None, lines)):
            if record is None:
                self.invalid += 1
            else:
                yield record


class LatestRecords:
    """Complete records: the newest of some kinds, of the newest and this session's first steps, and
    the last events.
    """

    def __init__(self) -> None:
        self.events: deque[Record] = deque(maxlen=EVENTS)
        self.steps: deque[Record] = deque(maxlen=RECENT_STEPS)
        self.first_steps: list[Record] = []  # of this session
        self.stages: Record = {}  # the newest step that was synchronized, with its stages
        self._by_kind: dict[str, Record] = {}  # of those in `NEWEST_KINDS`

    def add(self, record: Record) -> None:
        """Add the next record of the log."""
        kind = record["kind"]
        if kind == "start":  # of another session
            self._by_kind.pop("end", None)
            self.steps.clear()
            self.first_steps.clear()
        elif kind == "step":
            self.steps.append(record)
            if record.get("stages"):
                self.stages = record
            if len(self.first_steps) < FIRST:
                self.first_steps.append(record)
        if kind in NEWEST_KINDS:
            self._by_kind[kind] = record
        if kind in EVENT_KINDS:
            self.events.append(record)

    def of_kind(self, kind: str) -> Record:
        """The newest record of a kind in `NEWEST_KINDS`; {} without one."""
        return self._by_kind.get(kind, {})


class RunFiles:
    """What config.toml and environment.json of a run say; empty if they cannot be read."""

    def __init__(self, run: Path) -> None:
        self.config = _read(run / "config.toml")
        self.environment = _read(run / "environment.json")

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


class History:
    """Follows one run: `poll` reads new records, everything else is read-only."""

    def __init__(self, run: Path) -> None:
        self.run = run
        self.log = LogReader(run)
        self.generation = 0  # raised when earlier points are no longer valid
        self._clear()

    def _clear(self) -> None:
        self.records = 0  # that were read
        self.files = RunFiles(self.run)
        self.steps = Downsampled(POINTS)
        self.evaluations = Evaluations()
        self.analyses = Downsampled(
            MAX_EVALUATIONS
        )  # analyses of steps, beside those of evaluations
        self.layer_extremes = LayerExtremes()
        self.latest = LatestRecords()
        self.adaptation: dict[str, Record] = {}  # new and general data -> scores before and after
        self.use = ResourceUse()
        self.total = 0
        self.skipped = 0
        self.last_time = 0.0
        self._reached = 0  # the newest step in any record

    def poll(self) -> History:
        """Read new records from the run folder; if the log was replaced, from its beginning."""
        if self.log.is_replaced():
            self.log.restart()
            self._clear()
            self.generation += 1
        if not self.files.config:
            self.files = RunFiles(self.run)
        for record in self.log.new_records():
            self.add(record)
        return self

    def add(self, record: Record) -> None:
        kind, step = record["kind"], record.get("step") or 0
        self.records += 1
        self.latest.add(record)
        # The time of the newest line, not the maximum: a clock change must not make a run look
        # alive or dead.
        self.last_time = record.get("time") or self.last_time
        if kind == "plan":  # --minutes corrected the number of steps
            self.total = record.get("steps") or self.total
        if kind == "start":
            self._cut(step)
            self.total = record.get("steps") or self.total
        elif kind == "step":
            self._reached = max(self._reached, step)
            self.steps.add({**curve_row(record), "order": self.records})
            self.use.add(record)
        elif kind == "eval":
            self._add_evaluated(self.evaluations, record)
        elif kind == RECORD:
            self._add_evaluated(self.analyses, record)
        elif kind == "adaptation":
            self.adaptation[str(record.get("role"))] = record
        if kind in EVENT_KINDS:
            self.skipped += kind == "skipped"
            self._reached = max(self._reached, step)
            if (back := record.get("back_to")) is not None:
                self._cut(back)

    def _add_evaluated(self, rows: Downsampled, record: Record) -> None:
        """Add a record with scores or analyses, and the extreme values of layers."""
        row = {**record, "order": self.records}
        rows.add(row)
        if rows.last is not row:  # it is not newer than the last
            return
        for analysis in ANALYSES.values():
            value = _value_at(row, analysis.path)
            if analysis.shown_as == "heat map" and isinstance(value, dict):
                self.layer_extremes.add(analysis.name, row["step"], value)

    def _cut(self, step: int) -> None:
        curves = (self.steps, self.evaluations, self.analyses)
        self.layer_extremes.cut(step)
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
    def start(self) -> Record:
        """Return the start of this session; {} before it."""
        return self.latest.of_kind("start")

    @property
    def end(self) -> Record:
        """Return the end of the run; {} before it, or if the run was continued."""
        return self.latest.of_kind("end")

    @property
    def memory(self) -> Record:
        return self.latest.of_kind("memory")

    @property
    def sensors(self) -> Record:
        return self.latest.of_kind("sensors")

    @property
    def newest(self) -> Record:
        return self.latest.steps[-1] if self.latest.steps else {}

    @property
    def metric(self) -> str:
        return selection_name(self.evaluations.last or {})

    def curve(self, name: str, factor: float) -> list[tuple[int, float]]:
        """The points (step, factor x value) of a field of the steps or evaluations."""
        field = FIELDS.get(name)
        rows = self.steps if field and field.curve == "step" else self.evaluations
        figures = ((row["step"], figure_of(row, name)) for row in rows)
        return [(step, factor * value) for step, value in figures if value is not None]

    def best(self) -> Row:
        """The evaluation with the highest selection metric, exactly; {} before the first."""
        return self.evaluations.best

    def tables(self) -> RunTables:
        """The table by epoch and the phases of the loss.

        Of a very long run, some lines stand for all.
        """
        return RunTables(self.steps, self.evaluations)

    def analysis(self, analysis: Analysis) -> list[tuple[int, Any]]:
        """The values (step, value) of an analysis; if there are many, some of them."""
        rows = self.analyses if analysis.record_kind == RECORD else self.evaluations
        values = ((row["step"], _value_at(row, analysis.path)) for row in rows)
        return [(step, value) for step, value in values if value is not None]


def curve_row(record: Record) -> Row:
    """The figures of a step that are kept for curves.

    Those that are not finite numbers are left out.
    """
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
    """A figure of an evaluation by its name, or one inside its analysis; the value of a rate."""
    value: Any = row.get(name)
    if value is None:
        value = _value_at(row, name)
    return _number(value.get("value") if isinstance(value, dict) else value)


def _value_at(row: Row, path: str) -> Any:
    """The value at a/path/in/dicts; None if it is missing."""
    value: Any = row
    for part in path.split("/"):
        value = value.get(part) if isinstance(value, dict) else None
    return value


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
MAX_SNAPSHOT_BYTES = 1 << 22
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
            json.loads(read_small(path, MAX_SNAPSHOT_BYTES, inside=run))
            if path is not None
            else None
        )
    except (OSError, ValueError, RecursionError):
        return None
    if not (is_well_formed(value) and matches_schema(value, SNAPSHOT)):
        return None
    rows, captions = value["matrix"]["values"], value["matrix"]["captions"]
    square = 0 < len(rows) <= MAX_MATRIX and all(len(row) == len(rows) for row in [*rows, captions])
    equal = all(
        len(query["scores"]) == len(query["correct"]) == len(query["found"])
        for query in value["queries"]
    )
    return value if square and equal else None


def read_thumbnail(run: Path, image: int) -> bytes | None:
    try:
        return read_small(
            run / "snapshots" / "thumbnails" / f"{image}.jpg", MAX_SNAPSHOT_BYTES, inside=run
        )
    except OSError:
        return None
