"""What a run has told so far, in bounded memory: curves, evaluations, layers, events."""

from __future__ import annotations

import json
import math
import tomllib
from collections import deque
from pathlib import Path
from typing import Any, TypeVar

from m1clip.files import read_small
from m1clip.plain import fits, sane
from m1clip.runlog import Record, selection_name
from m1clip.watch.follow import Follower
from m1clip.watch.thinned import Row, Thinned

POINTS, EVALUATIONS, LAYERS, EVENTS, RECENT, FIRST = 2000, 500, 200, 200, 60, 12
# "step": forward, backward and optimizer in one, where a step is replayed as a CUDA graph
PHASES = ("data", "copy", "forward", "backward", "optimizer", "step", "rest")
CURVES = ("loss", "grad_norm", "lr", "temperature", "pairs_per_second", "step_seconds", "data_share",
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
        return value if fits(value, kind) else None

    @property
    def metric(self) -> str:
        """The figure that chooses the best model."""
        return selection_name(self.evaluations.last or {})

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
    return value if isinstance(value, dict) and sane(value) else {}
