"""The runs that a page may see. Paths never come from the page: it knows a run by a key that is made here."""

from __future__ import annotations

import hashlib
import math
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from m1clip.runlog import SELECTION
from m1clip.watch import eta
from m1clip.watch.history import History
from m1clip.watch.panels import told
from m1clip.watch.snapshots import read_snapshot, read_thumbnail, snapshot_steps
from m1clip.watch.state import find_runs, is_run, need_run, status_of
from m1clip.watch.verdicts import verdicts

LOOK_FOR_NEW = 2.0  # seconds
DEFAULT = Path("runs")  # may not be there yet: the first run makes it


class Store:
    """Follows all runs under some folders, for any number of pages at a time."""

    def __init__(self, places: Sequence[Path]) -> None:
        for place in places:
            if not place.is_dir() and place != DEFAULT:
                need_run(place)
        self._places = list(places)
        self._lock = threading.RLock()
        self._runs: dict[str, History] = {}
        self._looked = 0.0
        self.refresh()

    def refresh(self) -> None:
        """Take in new runs, and what is new in those known."""
        with self._lock:
            if time.monotonic() - self._looked > LOOK_FOR_NEW or not self._runs:
                self._looked = time.monotonic()
                for place in self._places:
                    for run in find_runs(place):
                        if key_of(run) not in self._runs:
                            self._runs[key_of(run)] = History(run)
            for history in self._runs.values():
                history.poll()

    def ids(self) -> list[str]:
        """Every run that has something to show, the newest last."""
        with self._lock:
            return [key for key, history in self._runs.items() if is_run(history.run)]

    def history(self, key: str) -> History | None:
        """A run by its key."""
        return self._runs.get(key)

    def summary(self, key: str) -> dict[str, Any]:
        """What stands in the list and at the head of the page."""
        with self._lock:
            history = self._runs[key]
            status, now = status_of(history), time.time()
            best = history.best() or {}
            left = eta.seconds_left(history)
            last = history.recent[-1] if history.recent else (history.steps.last or {})
            return {
                "id": key,
                "name": history.name,
                "path": str(history.run),
                "state": status.state,
                "words": status.words,
                "step": history.step,
                "steps": history.total,
                "seconds_left": left if status.state == "running" else None,
                "elapsed": eta.elapsed(history),
                "last": last,
                "metric": [history.metric, SELECTION[history.metric]],
                "best": {"step": best.get("step"), "value": best.get(history.metric)},
                "verdicts": [[v.level, v.words] for v in verdicts(history, now, status.state)],
                "events": [[r.get("time"), r["kind"], told(r)] for r in list(history.events)[-12:]][::-1],
                "memory": {k: v for k, v in history.memory.items() if k not in ("v", "kind", "time")},
                "facts": history.environment.get("facts"),
                "batch": history.setting("train", "batch", int),
                "snapshots": len(self.snapshots(key)),
            }

    def curves(self, key: str) -> dict[str, Any]:
        """Everything drawn so far, and the number of the newest arrival in it."""
        with self._lock:
            history = self._runs[key]
            return {
                "id": key,
                "generation": history.generation,
                "number": history.number,
                "steps": columns(list(history.steps)),
                "evals": list(history.evaluations),
                "layers": [{"step": row["step"], "layers": row.get("layers")} for row in history.layers],
            }

    def arrivals(self, key: str, generation: int, number: int) -> tuple[bool, int, list[Any]]:
        """(all must be sent anew, the newest number, what came after `number`)."""
        with self._lock:
            history = self._runs[key]
            oldest = history.arrived[0][0] if history.arrived else history.number + 1
            if history.generation != generation or number + 1 < oldest:
                return True, history.number, []
            kinds = ("step", "eval", "layers")
            rows = [[kind, row] for at, kind, row in history.arrived if at > number and kind in kinds]
            return False, history.number, rows

    def snapshots(self, key: str) -> list[int]:
        """Steps at which the evaluation left examples."""
        return list(snapshot_steps(self._runs[key].run))

    def snapshot(self, key: str, step: int) -> dict[str, Any] | None:
        """The examples of one evaluation."""
        return read_snapshot(self._runs[key].run, step)

    def thumb(self, key: str, picture: int) -> bytes | None:
        """A small picture by its number; its name is made here, of a number."""
        return read_thumbnail(self._runs[key].run, picture)


def key_of(run: Path) -> str:
    """The same for the same folder, so that an open page finds its run again after the server was restarted."""
    return hashlib.blake2s(str(run.resolve()).encode("utf-8", "surrogateescape"), digest_size=6).hexdigest()


def columns(rows: list[dict[str, Any]]) -> dict[str, list[float | None]]:
    """Rows as one list a figure, the form that plots take; a gap is None."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    return {name: [_finite(row.get(name)) for row in rows] for name in names}


def _finite(value: Any) -> float | None:
    return value if isinstance(value, int | float) and math.isfinite(value) else None
