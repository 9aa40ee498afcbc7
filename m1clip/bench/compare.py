"""m1clip compare: choose the candidates, run them, draw the conclusions, write document and page."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import queue
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

from m1clip import __version__
from m1clip.bench.candidate import Candidate, devices_of, focus, precisions_of, remember, sweep
from m1clip.bench.report import page
from m1clip.bench.verdict import cost_models, crossovers, sentences, summarise, usage_table
from m1clip.bench.workload import compile_obstacle
from m1clip.config import ModelConfig
from m1clip.errors import UserError
from m1clip.hardware.device import environment
from m1clip.hardware.facts import Facts, read_facts
from m1clip.hardware.timing import is_settled
from m1clip.io import read_small, write_json, write_text
from m1clip.model.clip import count_parameters
from m1clip.model.presets import flops_per_pair, preset, shape_of
from m1clip.runlog import json_safe


class Failed(Exception):
    """A candidate that could not be measured; `kind` is memory, user, time, died or other."""

    def __init__(self, kind: str, line: str) -> None:
        super().__init__(line)
        self.kind, self.line = kind, line


class Worker:
    """One measuring process."""

    def __init__(self, log: Path) -> None:
        """`log` receives what the process and its libraries print."""
        variables = {**os.environ, **environment(platform.system(), os.environ)}
        self._log = log.open("ab")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "m1clip.bench.worker"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True, env=variables,
        )  # fmt: skip
        self._answers: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._answers.put(line)
        self._answers.put("")  # the process has ended

    def ask(self, do: str, limit: float = 600.0, **values: Any) -> dict[str, Any]:
        """The answer to one request, or `Failed`; a process that is late or gone is ended."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"do": do, **values}) + "\n")
            self._process.stdin.flush()
            line = self._answers.get(timeout=limit)
        except (OSError, ValueError):  # gone, or closed by us
            line = ""
        except queue.Empty:
            self.close()
            raise Failed("time", f"no answer within {limit:.0f} s") from None
        if not line:
            self.close()
            code = self._process.returncode
            why = "killed, most likely for want of memory" if code == -9 else f"ended with code {code}"
            raise Failed("died", f"the measuring process was {why}")
        answer = json.loads(line)
        if "error" in answer:
            raise Failed(answer["error"], answer["line"])
        return dict(answer["ok"])

    @property
    def alive(self) -> bool:
        """Whether it can still be asked."""
        return self._process.poll() is None

    def close(self) -> None:
        """End the process, by its own hand if it is listening."""
        if self._process.stdin is not None and not self._process.stdin.closed:
            with contextlib.suppress(OSError):
                self._process.stdin.close()
        try:
            self._process.wait(timeout=2)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


FORMAT, VERSION = "m1clip-comparison", 1
KEYS = ("facts", "devices", "absent", "results", "left_out", "verdict", "usage", "cost_models", "crossovers")


def new_document(facts: dict[str, Any], absent: dict[str, str]) -> dict[str, Any]:
    """A comparison in which nothing is measured yet."""
    return {
        "format": FORMAT,
        "version": VERSION,
        "m1clip": __version__,
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": ["m1clip", *sys.argv[1:]],
        "facts": facts,
        "devices": [],
        "absent": absent,
        "results": [],
        "left_out": [],
        "complete": False,
    }


def write_document(document: dict[str, Any], path: Path) -> None:
    """Draw the conclusions from what is measured so far, and write all of it."""
    document["cost_models"] = cost_models(document["results"])
    document["crossovers"] = crossovers(document["results"], document["cost_models"])
    document["usage"] = usage_table(document["results"])
    document["verdict"] = sentences(document)
    write_json(path, json_safe(document))


def read_document(path: Path) -> dict[str, Any]:
    """A comparison.json, or a folder that holds one; anything else is one clear line."""
    path = path / "comparison.json" if path.is_dir() else path
    try:
        document = json.loads(read_small(path, 2**26))
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise UserError(f"{path}: not a JSON file; give the comparison.json of m1clip compare") from None
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise UserError(f"{path}: not a comparison of m1clip compare")
    if document.get("version") != VERSION:
        raise UserError(f"{path}: version {document.get('version')} of the format; this m1clip reads {VERSION}")
    missing = [key for key in KEYS if key not in document]
    if missing:
        raise UserError(f"{path}: incomplete, without {', '.join(missing)}")
    return document


Say = Callable[[str], None]
MOST_WARM_STEPS = 4
VISIT_SECONDS = 1.0  # a round stays this long with a candidate: one slow step, or many fast ones
MOST_STEPS = 20  # of one visit


@dataclass
class Open:
    """A candidate with its process, warm and ready."""

    candidate: Candidate
    worker: Worker
    opened: dict[str, Any]
    warm: list[float]
    visits: list[dict[str, Any]] = field(default_factory=list)

    @property
    def step_seconds(self) -> float:
        """The newest time of a step."""
        samples = self.visits[-1]["samples"] if self.visits else None
        return float(samples[-1]["seconds"]) if samples else self.warm[-1]


class Session:
    """What all parts of a comparison share: the document, the clock, the screen."""

    def __init__(self, document: dict[str, Any], folder: Path, seconds: float, show: Say) -> None:
        self.document, self.folder, self.show = document, folder, show
        self.begin, self.seconds = time.monotonic(), seconds
        self.log = folder / "workers.log"
        self.rates: dict[tuple[str, str], float] = {}

    @property
    def used(self) -> float:
        """Share of the time budget that is gone."""
        return (time.monotonic() - self.begin) / self.seconds

    @property
    def left(self) -> float:
        """Seconds of the budget that are left."""
        return self.seconds - (time.monotonic() - self.begin)

    def probe(self, kind: str, precisions: list[str], compile: bool) -> None:
        """Measure a device by itself, in a process of its own."""
        self.show(f"{kind}: arithmetic, memory, overheads")
        try:
            with Worker(self.log) as worker:
                found = worker.ask(
                    "probe",
                    max(60.0, self.left),
                    device=kind,
                    precisions=precisions,
                    compile=compile,
                    budget=0.08 * self.seconds,
                )
        except Failed as error:
            self.document["absent"][kind] = f"it could not be measured ({error.line})"
            return
        self.document["devices"].append(found)
        self.rates.update({(kind, name): rate for name, rate in found["gemm"].items()})
        self.write()

    def open(self, candidate: Candidate, worker: Worker | None = None, images: int = 0) -> Open | None:
        """A candidate in its process, warmed up until two steps agree; None, with the reason noted, if it fails."""
        self.show(f"{candidate.label}: first steps")
        fresh = worker is None
        worker = worker or Worker(self.log)
        try:
            limit = max(60.0, self.left)
            opened = worker.ask("open", limit, candidate=candidate.to_dict(), images=images)
            warm = [opened["first_step_seconds"]]
            # The first step is cold, and says nothing of the second.
            while len(warm) < MOST_WARM_STEPS and not (len(warm) > 2 and is_settled(warm)):
                if len(warm) > 1 and warm[-1] > 0.05 * self.left:
                    break
                warm.append(worker.ask("steps", limit, count=1, seconds=0.0)["samples"][0]["seconds"])
            return Open(candidate, worker, opened, warm)
        except Failed as error:
            self.leave_out(candidate, error.kind, error.line)
            if fresh:
                worker.close()
            return None

    def visit(self, item: Open, seconds: float = VISIT_SECONDS, least: int = 1) -> bool:
        """One round of a candidate; false if it failed."""
        self.show(f"{item.candidate.label}: round {len(item.visits) + 1}")
        count = max(least, min(MOST_STEPS, round(seconds / max(item.step_seconds, 1e-4))))
        limit = max(60.0, 10 * count * item.step_seconds)
        try:
            item.visits.append(item.worker.ask("steps", limit, count=count, seconds=seconds if least == 1 else 1e9))
        except Failed as error:
            self.leave_out(item.candidate, error.kind, error.line)
            return False
        return True

    def finish(self, item: Open, memory: bool = True, parity: bool = True) -> dict[str, Any]:
        """The last questions to a candidate, and its line in the document."""
        answers: dict[str, Any] = {"memory": None, "parity": None}
        for name, wanted in (("memory", memory), ("parity", parity)):
            if wanted and item.worker.alive:
                self.show(f"{item.candidate.label}: {name}")
                try:
                    answers[name] = item.worker.ask(name, max(60.0, 60 * item.step_seconds))
                except Failed as error:
                    answers[name] = None
                    self.document["left_out"].append(_entry(item.candidate, error.kind, f"{name}: {error.line}"))
        c = item.candidate
        rate = self.rates.get((c.device, c.precision))
        result = summarise(c.to_dict(), item.opened, item.visits, answers["memory"], answers["parity"], rate)
        self.document["results"].append(result)
        self.write()
        return result

    def leave_out(self, candidate: Candidate, kind: str, why: str) -> None:
        """Note that something was not measured, and why."""
        self.document["left_out"].append(_entry(candidate, kind, why))
        self.write()

    def write(self) -> None:
        """All that is known so far, on disk."""
        write_document(self.document, self.folder / "comparison.json")


def _entry(candidate: Candidate, kind: str, why: str) -> dict[str, Any]:
    return {"candidate": candidate.to_dict(), "label": candidate.label, "kind": kind, "why": why}


LEAST_ROUNDS, MOST_ROUNDS = 3, 15
# Memory and parity of one candidate: steps of its own, and a fixed part.
FINISH_STEPS, FINISH_SECONDS = 2.0, 2.0
OPEN_STEPS, OPEN_SECONDS = 3.0, 8.0  # of one more process, before any was opened: a guess
COMPILE_SHARE = 0.3  # of all the time: a compiler may take this much, and is not begun with less left
LEAST_FREE = 0.35  # share of the machine's memory that must be free before one more process is opened beside others


def run_focus(session: Session, candidates: list[Candidate]) -> None:
    """Measure the candidates, the first ones first if time is short."""
    waiting = list(candidates)
    while waiting:
        group, waiting = _open_group(session, waiting)
        _rounds(session, group)
        for item in group:
            if item.visits:
                # Late after all: the seconds of the steps are what was promised; these two can be had again.
                in_time = session.left > 0
                session.finish(item, memory=in_time, parity=in_time)
            item.worker.close()


def _open_group(session: Session, waiting: list[Candidate]) -> tuple[list[Open], list[Candidate]]:
    """Open as many as time and memory allow side by side; gives them, and who waits for the next group."""
    group: list[Open] = []
    took: dict[str, float] = {}
    late: list[Candidate] = []
    for index, candidate in enumerate(waiting):
        enough = len(group) + len(session.document["results"]) >= 2  # a comparison needs two
        if enough and session.left < needed(session, group, took, candidate):
            late.append(candidate)  # a quicker one may still fit
            continue
        memory = psutil.virtual_memory()
        if group and memory.available < LEAST_FREE * memory.total:
            return group, [*waiting[index:]]
        begin = time.monotonic()
        opened = session.open(candidate)
        if opened is not None:
            group.append(opened)
            if not candidate.compile:
                took[candidate.precision] = time.monotonic() - begin
    for candidate in late:
        session.leave_out(candidate, "time", "no time left for it; give more --minutes")
    return group, []


def needed(session: Session, group: list[Open], took: dict[str, float], candidate: Candidate) -> float:
    """Seconds for opening one more and then measuring and finishing all of them, from what the others took."""
    steps = [item.step_seconds for item in group]
    # Precision changes a step by far more than attention or recomputation do.
    alike = [item.step_seconds for item in group if item.candidate.precision == candidate.precision]
    typical = max(alike or steps, default=1.0)
    opening = took.get(candidate.precision, OPEN_SECONDS + OPEN_STEPS * typical)
    if candidate.compile:
        opening = max(opening, COMPILE_SHARE * session.seconds)
    return opening + sum(_measuring(step) for step in [*steps, typical])


def _measuring(step: float) -> float:
    """Seconds that a candidate takes once it is open: the least number of rounds, memory, parity."""
    return (LEAST_ROUNDS + FINISH_STEPS) * step + FINISH_SECONDS


def _rounds(session: Session, group: list[Open]) -> None:
    """Everyone in turn, in alternating order, until there are enough rounds or only the finish has time left."""
    for turn in range(MOST_ROUNDS):
        finish = sum(FINISH_STEPS * item.step_seconds + FINISH_SECONDS for item in group)
        one_more = sum(max(1.0, item.step_seconds) for item in group)
        if turn >= 1 and session.left < finish + one_more:
            break
        for item in list(group)[:: 1 if turn % 2 == 0 else -1]:
            if not session.visit(item):
                item.worker.close()
                group.remove(item)


STEPS = 7  # timed steps of a candidate, where they are fast
LEAST_STEPS = 3
ASSUMED_SHARE = 0.3  # of the matrix product rate, before a size was measured
BYTES_PER_PARAMETER = 20  # weights, gradient, two moments, and a half-precision copy: before anything was measured
MEMORY_SHARE = 0.85
FAIR_SHARE = 2.0  # a candidate may take this many times what each gets of the time of its size
ALWAYS = 2.0  # seconds that any candidate gets as long as there is time at all
MEMORY_BELOW = 3.0  # seconds: one more, watched step is worth it only where steps are short

Seen = tuple[Candidate, float, float]  # what was measured: seconds of a step, bytes at the peak
Known = dict[tuple[str, str], list[Seen]]  # by size and way, from small batches to large


def run_sweep(session: Session, groups: list[list[Candidate]]) -> None:
    """Measure groups of the same size and batch; within each the devices take turns."""
    workers: dict[str, Worker] = {}
    known: Known = {}
    clock = SizeClock(session, groups)
    try:
        for group in groups:
            opened: list[Open] = []
            for candidate in group:
                why = obstacle(session, candidate, known, clock.share(candidate))
                if why:
                    session.leave_out(candidate, *why)
                    continue
                # Two precisions on one device share a process, so one is finished before the other is opened.
                if any(item.candidate.device == candidate.device for item in opened):
                    _finish(session, opened, known)
                    opened = []
                worker = _worker(session.log, workers, candidate.device)
                item = session.open(candidate, worker, images=min(1024, max(c[0].batch for c in groups)))
                if item is not None:
                    opened.append(item)
                else:
                    known.setdefault((candidate.model, candidate.way), []).append(
                        (candidate, float("inf"), float("inf"))
                    )
            _finish(session, opened, known)
    finally:
        for worker in workers.values():
            worker.close()


class SizeClock:
    """Each size gets the same part of the time, so that the last ones are not starved by the first."""

    def __init__(self, session: Session, groups: list[list[Candidate]]) -> None:
        self._session = session
        names = [candidate.model for group in groups for candidate in group]
        self._waiting = {name: names.count(name) for name in names}
        self._end: dict[str, float] = {}  # seconds of the session that must be left when a size is done

    def share(self, candidate: Candidate) -> float:
        """Seconds that this candidate may take; counts it as handled."""
        name, left = candidate.model, self._session.left
        if name not in self._end:
            sizes = sum(count > 0 for count in self._waiting.values())
            self._end[name] = left - left / max(1, sizes)
        fair = FAIR_SHARE * (left - self._end[name]) / max(1, self._waiting[name])
        self._waiting[name] -= 1
        return max(fair, min(ALWAYS, left))


def obstacle(session: Session, candidate: Candidate, known: Known, allowed: float) -> tuple[str, str] | None:
    """Why a candidate is not even tried: (kind, words), from what smaller batches of its size have taken."""
    before = known.get((candidate.model, candidate.way), [])
    if before and before[-1][1] == float("inf"):
        return "memory", f"batch {before[-1][0].batch} already failed"
    seconds, size = foretold(session, candidate, before)
    limit = MEMORY_SHARE * _memory(session, candidate.device)
    if size > limit:
        return "memory", f"would need about {size / 1e9:.0f} GB of {limit / MEMORY_SHARE / 1e9:.0f} GB"
    if seconds * (LEAST_STEPS + 2) > allowed:
        return "time", f"about {seconds:.1f} s a step: too long within --minutes"
    return None


def foretold(session: Session, candidate: Candidate, before: list[Seen]) -> tuple[float, float]:
    """Seconds and bytes of a step, scaled up from the last batch, or from first principles for the first one."""
    if before:
        last, seconds, size = before[-1]
        grow = candidate.batch / last.batch
        fixed = min(size, BYTES_PER_PARAMETER * _parameters(candidate))
        if (
            len(before) > 1 and before[-2][0].batch < last.batch
        ):  # two points: a line, for much of a small step is fixed
            slope = max(0.0, seconds - before[-2][1]) / (last.batch - before[-2][0].batch)
            return seconds + slope * (candidate.batch - last.batch), fixed + (size - fixed) * grow
        # One point: what one more sample takes is a guess; a step of a GPU at batch 1 is nearly all fixed cost.
        more = (candidate.batch - last.batch) * _pair_seconds(session, candidate)
        return min(seconds * grow, seconds + more), fixed + (size - fixed) * grow
    return _pair_seconds(session, candidate) * candidate.batch, BYTES_PER_PARAMETER * _parameters(candidate)


def _pair_seconds(session: Session, candidate: Candidate) -> float:
    """Seconds of one sample by its operations alone, at a usual share of the measured matrix product rate."""
    shape = shape_of(_model_config(candidate))
    rate = session.rates.get((candidate.device, candidate.precision), 1e11) * ASSUMED_SHARE
    return flops_per_pair(shape, shape.context_length) / rate


def _finish(session: Session, opened: list[Open], known: Known) -> None:
    """The devices of a group in turn: several short rounds each."""
    for turn in range(LEAST_STEPS):
        for item in list(opened)[:: 1 if turn % 2 == 0 else -1]:
            fast = item.step_seconds < 0.5
            if not session.visit(item, 0.3 if fast else 0.0):
                opened.remove(item)
    for item in opened:
        first = (item.candidate.model, item.candidate.way) not in known
        cheap = item.step_seconds < MEMORY_BELOW or first
        result = session.finish(item, memory=cheap, parity=_parity_is_due(item, known))
        peak = float(result["memory"]["total"]) if result["memory"] else 0.0
        key = (item.candidate.model, item.candidate.way)
        seconds = statistics.median(result["samples"])
        known.setdefault(key, []).append((item.candidate, seconds, peak or _last_bytes(known, key, item.candidate)))


def _parity_is_due(item: Open, known: Known) -> bool:
    """Once for each size and way, at its first batch of two or more."""
    done = [c for c, seconds, _ in known.get((item.candidate.model, item.candidate.way), []) if c.batch > 1]
    return item.candidate.batch > 1 and not done


def _last_bytes(known: Known, key: tuple[str, str],
                candidate: Candidate) -> float:  # fmt: skip
    before = known.get(key, [])
    return before[-1][2] * candidate.batch / before[-1][0].batch if before else 0.0


def _memory(session: Session, device: str) -> float:
    for probe in session.document["devices"]:
        if probe["device"] == device:
            return float(min(probe["memory_bytes"], psutil.virtual_memory().available if device == "cpu" else 1e18))
    return float(psutil.virtual_memory().available)


def _worker(log: Path, workers: dict[str, Worker], device: str) -> Worker:
    if device not in workers or not workers[device].alive:
        workers[device] = Worker(log)
    return workers[device]


def _parameters(candidate: Candidate) -> float:
    return float(count_parameters(shape_of(_model_config(candidate))))


def _model_config(candidate: Candidate) -> ModelConfig:
    return ModelConfig(preset=candidate.model)


ABSENT = {"cuda": "no CUDA card that torch can use", "mps": "no Apple GPU (MPS) that torch can use"}


@dataclass(frozen=True, kw_only=True)
class Ask:
    """What a person wants compared."""

    model: str = "tiny"
    batches: tuple[int, ...] = (64,)
    sizes: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()
    precisions: tuple[str, ...] = ()
    optimizer: str = "muon"
    minutes: float = 4.7
    full: bool = False
    against: Path | None = None

    def __post_init__(self) -> None:
        for name in (self.model, *self.sizes):
            preset(name)  # an unknown one is an error that offers the nearest
        if not self.batches or min(self.batches) < 1:
            raise UserError("--batch: give whole numbers of 1 or more, such as --batch 1,8,64")
        if not self.minutes > 0:
            raise UserError(f"--minutes must be above 0, not {self.minutes:g}")


def compare(ask: Ask, folder: Path, show: Callable[[str, float], None]) -> dict[str, Any]:
    """Run a comparison; `show` is told what is being measured and which share of the time is used."""
    facts = read_facts()
    devices = devices_of(facts, ask.devices)
    other = read_document(ask.against) if ask.against else None  # before minutes are spent
    folder.mkdir(parents=True, exist_ok=True)
    document = new_document(facts.to_dict(), absent(facts, ask.devices))
    document["asked"] = {"model": ask.model, "batches": list(ask.batches), "sizes": list(ask.sizes),
                         "optimizer": ask.optimizer, "minutes": ask.minutes}  # fmt: skip
    session = Session(document, folder, ask.minutes * 60, lambda text: show(text, session.used))
    (folder / "workers.log").write_bytes(b"")
    for kind in devices:
        session.probe(kind, list(precisions_of(facts, kind, ask.precisions)), compile=not ask.sizes)
    measured = [kind for kind in devices if any(probe["device"] == kind for probe in document["devices"])]
    if not measured:
        raise UserError(f"no device could be measured; {folder / 'workers.log'} says why")
    if ask.sizes:
        run_sweep(session, sweep(facts, ask.sizes, ask.batches, measured, ask.precisions, ask.optimizer))
    else:
        run_focus(session, _without_obstacles(session, focus(
            facts, ask.model, ask.batches, measured, ask.precisions, ask.optimizer, ask.full
        )))  # fmt: skip
    if not document["results"]:
        raise UserError(f"nothing could be measured within {ask.minutes:g} minutes: {_reasons(document)}")
    document["complete"] = True
    session.write()
    remember(facts, document["results"])
    write_text(folder / "comparison.html", page(document, other))
    return document


def absent(facts: Facts, asked: Sequence[str]) -> dict[str, str]:
    """Devices that are not there, with the reason; those that were not asked for are no reason."""
    missing = {"cuda": facts.cuda is None, "mps": not facts.mps}
    return {kind: why for kind, why in ABSENT.items() if missing[kind] and not asked}


def _without_obstacles(session: Session, candidates: list[Any]) -> list[Any]:
    """Leave out, with the reason, what is known not to work before it is tried."""
    kept = []
    for candidate in candidates:
        kind = candidate.device if candidate.device != "hybrid" else "cpu"
        why = compile_obstacle(kind) if candidate.compile else ""
        if why:
            session.leave_out(candidate, "user", why)
        else:
            kept.append(candidate)
    return kept


def _reasons(document: dict[str, Any]) -> str:
    return "; ".join(dict.fromkeys(item["why"] for item in document["left_out"])) or "no candidate"
