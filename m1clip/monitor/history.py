"""What a run has told so far, in bounded memory: curves, evaluations, layers, events."""

from __future__ import annotations

import json
import math
import re
import statistics
import tomllib
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

from m1clip.io import is_well_formed, matches_schema, open_regular, read_small
from m1clip.runlog import NAME as RunlogNAME
from m1clip.runlog import Record, parse, selection_metric

HEAD, TAIL = 1 << 20, 4 << 20  # bytes of a long log that are read whole
SAMPLES, SAMPLE = 512, 8 << 10  # places in between that are looked at first, and bytes at each
AT_ONCE = 16 << 20  # bytes of the rest that one call looks through
NOT_STEP = re.compile(rb'"kind":"(?!step"|layers")')
LONGEST_LINE = 4 << 20  # more without an end is no line of ours


class Follower:
    """Gives the records of a run as they arrive. A long log is sampled first and looked through bit by bit."""

    def __init__(self, run: Path) -> None:
        self.path = run / RunlogNAME
        self._forget()

    def _forget(self) -> None:
        self._offset = 0
        self._rest = b""
        self._file_id = (0, 0)
        self.problem = ""  # why the log cannot be opened
        self.invalid = 0  # lines that were read and skipped
        self._gap: tuple[int, int] | None = None  # bytes of a long log not yet looked through

    @property
    def complete(self) -> bool:
        """Nothing of the log is left to be looked through."""
        return self._gap is None

    def read(self) -> tuple[bool, list[Record]]:
        """(the log was replaced, new records); never more than a bounded number of bytes at a time."""
        try:
            status = self.path.stat()
        except OSError:
            replaced = self._offset > 0
            self._forget()
            return replaced, []
        file_id = (status.st_dev, status.st_ino)
        replaced = self._offset > 0 and (file_id != self._file_id or status.st_size < self._offset)
        if replaced:
            self._forget()
        read = self._sample if self._is_long(status.st_size) else self._read_on
        try:
            records, self.problem = read(status.st_size), ""
        except OSError as error:  # no regular file inside the run folder, or not ours to read
            self.problem, records = error.strerror or str(error), []
        self._file_id = file_id
        return replaced, records

    def _is_long(self, size: int) -> bool:
        return self._offset == 0 and size > HEAD + TAIL + SAMPLES * SAMPLE

    def look_back(self) -> list[Record]:
        """The next part of a long log's middle: every record but those of steps, which were sampled."""
        if self._gap is None:
            return []
        start, stop = self._gap
        end = min(start + AT_ONCE, stop)
        records = []
        with open_regular(self.path, self.path.parent) as file:
            file.seek(start)
            block = file.read(end - start) + file.readline(LONGEST_LINE)
            for match in NOT_STEP.finditer(block):
                first = block.rfind(b"\n", 0, match.start()) + 1
                last = block.find(b"\n", match.start())
                if first or start == 0:
                    records += self._records([block[first : last if last >= 0 else None]])
            # From the last line's start, so that the line across the edge is found whole next time.
            end = start + block.rfind(b"\n") + 1 if b"\n" in block else end
        self._gap = (max(end - 1, start + 1), stop) if end < stop else None
        return records

    def _read_on(self, size: int) -> list[Record]:
        want = min(size - self._offset, HEAD + TAIL + SAMPLES * SAMPLE)
        if want <= 0:
            return []
        with open_regular(self.path, self.path.parent) as file:
            file.seek(self._offset)
            block = file.read(want)
        self._offset += len(block)
        lines = (self._rest + block).split(b"\n")
        self._rest = lines.pop()
        if len(self._rest) > LONGEST_LINE:
            self._rest = b""
        return self._records(lines)

    def _sample(self, size: int) -> list[Record]:
        records: list[Record] = []
        with open_regular(self.path, self.path.parent) as file:
            head = file.read(HEAD)
            records += self._records(head.split(b"\n")[:-1])
            gap = (head.rfind(b"\n"), size - TAIL)
            for index in range(SAMPLES):
                file.seek(gap[0] + (gap[1] - gap[0]) * index // SAMPLES)
                records += self._records(file.read(SAMPLE).split(b"\n")[1:-1][:1])
            file.seek(gap[1])
            lines = file.read(size - gap[1]).split(b"\n")
        self._rest = lines.pop()
        self._offset = size
        self._gap = gap
        records += self._records(lines[1:])
        return records

    def _records(self, lines: Iterable[bytes]) -> list[Record]:
        parsed = [parse(line) for line in lines if line]
        records = [record for record in parsed if record is not None]
        self.invalid += len(parsed) - len(records)
        return records


Row = dict[str, Any]


class Thinned:
    """Rows in the order of their `step`; at most `most` are kept, evenly spread, the newest always among them."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.clear()

    def clear(self) -> None:
        """Begin anew."""
        self._rows: list[Row] = []
        self._last: Row | None = None
        self._stride = 1
        self._seen = 0

    def add(self, row: Row) -> None:
        """The next row; one that is not newer than the last is left out."""
        if self._last is not None and row["step"] <= self._last["step"]:
            return
        self._last = row
        if self._seen % self._stride == 0:
            self._rows.append(row)
        self._seen += 1
        if len(self._rows) > self.most:
            self._rows = self._rows[::2]
            self._stride *= 2

    def insert(self, row: Row) -> None:
        """A row of earlier that was found late."""
        rows = list(self)
        if any(other["step"] == row["step"] for other in rows):
            return
        self._rows = sorted([*rows, row], key=lambda each: each["step"])
        self._last = self._rows[-1]
        self._seen += 1
        if len(self._rows) > self.most:
            self._rows = self._rows[::2]
            self._stride *= 2

    def cut(self, step: int) -> None:
        """Forget what came after a step: the run was continued from there."""
        kept = [row for row in self if row["step"] <= step]
        self._rows, self._last = kept, kept[-1] if kept else None

    @property
    def last(self) -> Row | None:
        """The newest row."""
        return self._last

    def __iter__(self) -> Iterator[Row]:
        yield from self._rows
        if self._last is not None and (not self._rows or self._rows[-1] is not self._last):
            yield self._last

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __bool__(self) -> bool:
        return self._last is not None


POINTS, EVALUATIONS, LAYERS, EVENTS, RECENT, FIRST = 2000, 500, 200, 200, 60, 12
# "step": forward, backward and optimizer in one, where a step is replayed as a CUDA graph
PHASES = ("data", "copy", "forward", "backward", "optimizer", "step", "rest")
CURVES = ("loss", "grad_norm", "lr", "temperature", "images_per_second", "step_seconds", "data_fraction",
          "memory_bytes", "watts", "celsius", "elapsed")  # fmt: skip
Setting = TypeVar("Setting")
TOLD = ("checkpoint", "event", "warning", "skipped", "parity", "memory")


class History:
    """Follows one run. `poll` takes in what is new; everything else only looks."""

    def __init__(self, run: Path) -> None:
        self.run = run
        self.follower = Follower(run)
        self.config = _read(run / "config.toml")
        self.environment = _read(run / "environment.json")
        self.arrived: deque[tuple[int, str, Row]] = deque(maxlen=2000)  # (number, kind, row), for live pages
        self.number = 0
        self.generation = 0  # raised when earlier points are no longer true
        self._begin()

    def _begin(self) -> None:
        self.steps, self.evaluations, self.layers = Thinned(POINTS), Thinned(EVALUATIONS), Thinned(LAYERS)
        self.events: deque[Record] = deque(maxlen=EVENTS)
        self.recent: deque[Record] = deque(maxlen=RECENT)  # whole records of the newest steps
        self.first: list[Record] = []  # and of this session's first ones
        self.start: Record = {}
        self.end: Record = {}
        self.memory: Record = {}
        self.total = 0
        self.sessions = 0
        self.skipped = 0
        self.last_time = 0.0
        self._reached = 0  # the newest step that anything tells of

    def poll(self) -> bool:
        """Take in what has arrived; whether there was anything."""
        if not self.config:
            self.config = _read(self.run / "config.toml")
            self.environment = _read(self.run / "environment.json")
        replaced, records = self.follower.read()
        if replaced:
            self._begin()
            self.generation += 1
        for record in records:
            self.add(record)
        late = self.follower.look_back()
        for record in late:
            self._add_late(record)
        if late:
            self.generation += 1
        return bool(records or late or replaced)

    def poll_all(self) -> History:
        """Take in all that is there now."""
        while self.poll() or not self.follower.complete:
            pass
        return self

    def add(self, record: Record) -> None:
        """One record, in the order of the log."""
        kind = record["kind"]
        # That of the newest line, not the largest: a clock that was set back must not make a run look alive or dead.
        self.last_time = _number(record.get("time")) or self.last_time
        if kind == "start":
            self._add_start(record)
        elif kind == "step" and _number(record.get("step")) is not None:
            self._add_step(record)
        elif kind == "eval" and _number(record.get("step")) is not None:
            self.evaluations.add(record)
            self._arrive("eval", record)
        elif kind == "layers" and _number(record.get("step")) is not None:
            self.layers.add(record)
            self._arrive("layers", record)
        elif kind == "end":
            self.end = record
            self._arrive("end", record)
        elif kind in TOLD:
            self._add_event(record)

    def _add_start(self, record: Record) -> None:
        step = int(_number(record.get("step")) or 0)
        if any(curve.last and curve.last["step"] > step for curve in (self.steps, self.evaluations)):
            self.generation += 1  # killed after its last checkpoint: what came after it is trained again
        for curve in (self.steps, self.evaluations, self.layers):
            curve.cut(step)
        self.start, self.end = record, {}
        self._reached = step
        self.total = int(_number(record.get("steps")) or self.total)
        self.sessions += 1
        self.first, self.recent = [], deque(maxlen=RECENT)
        self.events.append(record)
        self._arrive("event", record)

    def _add_step(self, record: Record) -> None:
        self._reached = max(self._reached, int(record["step"]))
        row = compact(record)
        self.steps.add(row)
        self.recent.append(record)
        if len(self.first) < FIRST:
            self.first.append(record)
        self._arrive("step", row)

    def _add_event(self, record: Record) -> None:
        if record["kind"] == "skipped":
            self.skipped += 1
        if record["kind"] == "memory":
            self.memory = record
            return
        self._reached = max(self._reached, int(_number(record.get("step")) or 0))
        back = _number(record.get("back_to"))
        if back is not None:  # the run went back to a checkpoint: what came after it is trained again
            self._reached = int(back)
            self.generation += 1
            for curve in (self.steps, self.evaluations, self.layers):
                curve.cut(int(back))
        self.events.append(record)
        self._arrive("event", record)

    def _add_late(self, record: Record) -> None:
        """From the middle of a long log, after newer ones are known already."""
        if record["kind"] == "eval" and _number(record.get("step")) is not None:
            self.evaluations.insert(record)
        elif record["kind"] == "memory" and not self.memory:
            self.memory = record
        elif record["kind"] == "skipped":
            self.skipped += 1
        elif record["kind"] == "start":
            self.sessions += 1

    def _arrive(self, kind: str, row: Row) -> None:
        self.number += 1
        self.arrived.append((self.number, kind, row))

    @property
    def step(self) -> int:
        """Steps done so far."""
        return max(self._reached, int(_number(self.end.get("step")) or 0))

    @property
    def name(self) -> str:
        """The run's folder, as short as it can be said."""
        return self.run.name or str(self.run)

    def setting(self, section: str, key: str, kind: type[Setting]) -> Setting | None:
        """A value of config.toml; None if it is missing or of another type."""
        table = self.config.get(section)
        value = table.get(key) if isinstance(table, dict) else None
        return value if matches_schema(value, kind) else None

    @property
    def metric(self) -> str:
        """The figure that chooses the best model."""
        return selection_metric(self.evaluations.last or {})

    def best(self) -> Row | None:
        """The evaluation that training takes for the best."""
        name = self.metric
        rows = [row for row in self.evaluations if _number(row.get(name)) is not None]
        return max(rows, key=lambda row: row[name]) if rows else None


def compact(record: Record) -> Row:
    """The numbers of a step that become curves."""
    row: Row = {"step": int(record["step"]), "time": record.get("time", 0.0)}
    for name in CURVES:
        value = _number(record.get(name))
        if value is not None:
            row[name] = value
    seconds = record.get("seconds")
    if isinstance(seconds, dict):
        for name in PHASES:
            value = _number(seconds.get(name))
            if value is not None:
                row[f"seconds/{name}"] = value
    return row


def _number(value: Any) -> float | None:
    """A finite number, or None: the log spells NaN as a word."""
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


NAMES = ("first third", "middle third", "last third")


@dataclass(frozen=True)
class Phase:
    """A stretch of steps with the loss at its two ends, and its share of the whole decline."""

    name: str
    first: int
    last: int
    before: float
    after: float
    share: float


def decline(points: Sequence[tuple[int, float]], warmup: int) -> list[Phase]:
    """Warm-up, then thirds of the rest. Ends are means of a few points, so that one batch decides nothing."""
    if len(points) < 8:
        return []
    last = points[-1][0]
    edges = [points[0][0], *([warmup] if points[0][0] < warmup < last else [])]
    begin = edges[-1]
    edges += [begin + (last - begin) * third // 3 for third in (1, 2, 3)]
    names = (["warm-up"] if len(edges) == 5 else []) + list(NAMES)
    levels = [_level(points, edge) for edge in edges]
    whole = levels[0] - levels[-1]
    shares = [(before - after) / whole if whole else 0.0 for before, after in pairwise(levels)]
    return [Phase(name, edges[i], edges[i + 1], levels[i], levels[i + 1], shares[i]) for i, name in enumerate(names)]


def _level(points: Sequence[tuple[int, float]], step: int) -> float:
    """The mean loss of the points nearest to a step: one in forty of all, at least one."""
    count = max(1, len(points) // 40)
    near = sorted(points, key=lambda point: abs(point[0] - step))[:count]
    return statistics.mean(value for _, value in near)


NAME = re.compile(r"step-(\d{1,12})\.json")
MAX_BYTES = 2**22
MAX_MATRIX = 256  # rows
SHAPE: dict[str, Any] = {
    "step": int,
    "queries": [{"caption": str, "right": int, "rank": int, "found": [int], "correct": [bool], "scores": [float]}],
    "matrix": {"captions": [str], "values": [[float]]},
    "confusions": [{"caption": str, "found": int, "right": int, "margin": float, "truth": str}],
}


def snapshot_steps(run: Path) -> dict[int, Path]:
    """The step of each snapshot file, in order."""
    matches = [(NAME.fullmatch(path.name), path) for path in (run / "watch").glob("step-*.json")]
    return dict(sorted((int(match[1]), path) for match, path in matches if match))


def read_snapshot(run: Path, step: int) -> dict[str, Any] | None:
    """The snapshot of one step; None where there is no valid one."""
    path = snapshot_steps(run).get(step)
    if path is None:
        return None
    try:
        value = json.loads(read_small(path, MAX_BYTES, inside=run))
    except (OSError, ValueError, RecursionError):
        return None
    return value if is_well_formed(value) and matches_schema(value, SHAPE) and _consistent(value) else None


def _consistent(value: dict[str, Any]) -> bool:
    rows, captions = value["matrix"]["values"], value["matrix"]["captions"]
    square = 0 < len(rows) <= MAX_MATRIX and all(len(row) == len(rows) for row in [*rows, captions])
    return square and all(
        len(each["scores"]) == len(each["correct"]) == len(each["found"]) for each in value["queries"]
    )


def read_thumbnail(run: Path, image: int) -> bytes | None:
    """A thumbnail by the number of its image; None where there is none inside the run folder."""
    try:
        return read_small(run / "watch" / "thumbs" / f"{image}.jpg", MAX_BYTES, inside=run)
    except OSError:
        return None
