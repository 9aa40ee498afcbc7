"""run.jsonl: one JSON object per line, appended, readable while it is written."""

import contextlib
import errno
import json
import math
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

from m1clip.analyses import ANALYSES, RECORD, analyses_of_evaluations
from m1clip.errors import UserError
from m1clip.io import PARTIAL, open_for_write, open_regular, read_small
from m1clip.log_field import LogField
from m1clip.schema import is_well_formed, matches_schema

VERSION = 1  # incremented when the meaning of a field changes, not for a new field
NAME = "run.jsonl"
ABOUT_LABELS = "labels.json"  # of the Label page, which writes it before the run has begun
AGREED = "agreed"  # its entry: whether the user has chosen to search with the model of the run
PREPARING = "preparing.txt"  # exists only while the data of a run is being prepared
PREPARING_PARTIAL = PREPARING + PARTIAL
LONGEST_LINE = 2**24  # bytes; no run writes a longer line

LATEST = 1e11  # seconds since 1970; the C library has no date for much later times
# All kinds of record, and what each contains.
RECORD_KINDS = {
    "start": "the run, or a resumed part of it, begins",
    "step": "means over the steps since the last such line",
    "sensors": "kinds of cores, idle power, and what this machine does not measure and why, once",
    "memory": "bytes by component, after the first steps and at the end",
    "eval": "scores and analysis of the validation split",
    RECORD: "analyses of the step before an evaluation",
    "plan": "--minutes has corrected the number of steps",
    "checkpoint": "a checkpoint was saved",
    "event": "something that changes the run, such as a stop, a skipped update or a rollback",
    "warning": "a warning that was also printed",
    "skipped": "an image that could not be read",
    "parity": "the gradients of the device were compared with the CPU's",
    "wise_ft": "--wise-ft has tried a mean of the initial and the trained weights",
    "adaptation": (
        "the score of the initial and of the best model on the new data, or on --general-data"
    ),
    "end": "the run is finished; scores of the best model",
}
# The metric that selects the best model, and its label: the first of these that an evaluation has.
TOP1 = "top1_accuracy"
MEAN_RECALL = "mean_recall"
SELECTION = {TOP1: "top-1 accuracy", MEAN_RECALL: "mean recall"}

Record = dict[str, Any]
Sink = Callable[[Record], None]


def label(metric: str) -> str:
    """The name of a metric for users: `text_to_image/recall@1` is "text to image, recall@1"."""
    return SELECTION.get(metric, metric.replace("_", " ").replace("/", ", "))


def selection_name(record: Record) -> str:
    """The name of the metric that selects the best model, in an evaluation or end record."""
    return next((name for name in SELECTION if name in record), MEAN_RECALL)


def _last_byte(handle: int) -> bytes:
    """The last byte of an open file that is not empty; Windows has no os.pread."""
    os.lseek(handle, -1, os.SEEK_END)
    return os.read(handle, 1)


class RunLog:
    """Appends to a run's log. Each line is one write, so readers see complete lines."""

    def __init__(self, run: Path) -> None:
        self.path = run / NAME
        handle = open_for_write(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        self._file = os.fdopen(handle, "ab", buffering=0)
        size = os.fstat(handle).st_size
        if size and _last_byte(handle) != b"\n":
            os.write(handle, b"\n")  # ends a partial line left by a killed process
        self.sinks: list[Sink] = []  # also called with each record, such as TensorBoard's

    def write(self, kind: str, **values: Any) -> None:
        """Append one record of a kind in RECORD_KINDS."""
        self.check_folder()
        record = json_safe({"v": VERSION, "kind": kind, "time": round(time.time(), 3), **values})
        text = json.dumps(record, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
        self._append(text.encode("utf-8", "replace") + b"\n")
        for sink in self.sinks:
            sink(record)

    def check_folder(self) -> None:
        """Raise UserError if the run folder was moved or removed; call before writing to it."""
        try:
            same_file = os.path.samestat(os.stat(self.path), os.fstat(self._file.fileno()))
        except FileNotFoundError:
            same_file = False
        if not same_file:
            raise UserError(
                f"{self.path.parent}: the run folder (or its {NAME}) was removed or renamed during"
                " training, so the run stopped; if it was renamed, continue it with m1clip train"
                " --resume NEW_NAME"
            )

    def _append(self, line: bytes) -> None:
        """Append the complete line, or nothing and raise OSError.

        A partial line would corrupt the next one.
        """
        handle = self._file.fileno()
        before = os.fstat(handle).st_size
        try:
            if os.write(handle, line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))
        except OSError as error:
            os.ftruncate(handle, before)
            raise OSError(error.errno, error.strerror, str(self.path)) from None

    def close(self) -> None:
        self._file.close()


class NoLog(RunLog):
    """The log of a rank that writes none."""

    def __init__(self, run: Path) -> None:
        self.path = run / NAME
        self.sinks = []

    def write(self, kind: str, **values: Any) -> None:
        """Nothing: rank 0 writes the log."""

    def check_folder(self) -> None:
        """Nothing: the run folder may be on another machine."""

    def close(self) -> None:
        """Nothing."""


def read_log(run: Path) -> Iterator[Record]:
    """Yield the records of all valid lines of a run's log."""
    with open_regular(run / NAME) as file:
        # An oversized line, which no run writes, is read in chunks, each of them an invalid line.
        while line := file.readline(LONGEST_LINE):
            record = parse(line)
            if record is not None:
                yield record


def has_finished(run: Path) -> bool:
    """Whether a run came to its end and was not continued since."""
    finished = False
    with contextlib.suppress(OSError), open_regular(run / NAME) as file:
        while line := file.readline(LONGEST_LINE):
            # Most lines are of steps: they are not parsed.
            if b'"start"' in line or b'"end"' in line:
                record = parse(line)
                if record is not None and record["kind"] in ("start", "end"):
                    finished = record["kind"] == "end"
    return finished


def is_agreed(run: Path) -> bool:
    """Whether m1clip may use the model of a run without being asked for it.

    A run of the Label page is a proposal until the user has chosen to search with its model.
    """
    try:
        about = json.loads(read_small(run / ABOUT_LABELS))
    except FileNotFoundError:
        return True  # of another kind
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(about, dict) and about.get(AGREED) is True


def parse(line: bytes) -> Record | None:
    """Parse a line; None if it is truncated, of a newer version, or has a field of a wrong type."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if (
        not isinstance(record, dict)
        or not isinstance(record.get("kind"), str)
        or not is_well_formed(record)
    ):
        return None
    version = record.get("v", VERSION)
    return (
        record if matches_schema(version, int) and version <= VERSION and _valid(record) else None
    )


def _analysis(value: Any) -> bool:
    """The values of the analyses in an evaluation; each may be missing."""
    schemas = {analysis.name: analysis.schema for analysis in analyses_of_evaluations()}
    return isinstance(value, dict) and all(
        matches_schema(value[name], schema) for name, schema in schemas.items() if name in value
    )


def _time(value: Any) -> bool:
    return matches_schema(value, float) and 0 <= value < LATEST


def _by_name(*fields: LogField) -> dict[str, LogField]:
    return {field.name: field for field in fields}


# A phase of the loss (m1clip/epochs.py), in the record of the end.
LOSS_PHASE = {"first_step": int, "last_step": int, "slope": float, "trend": str}

# All fields that readers use. Plots are shown in this order. The default schema, `figure`, also
# accepts NaN; `float` is for what is always finite. A field of an analysis belongs into its entry
# in analyses.py.
FIELDS = _by_name(
    # curves of the steps
    LogField(name="loss", curve="step", title="Loss", log_scale=True),
    LogField(name="grad_norm", curve="step", title="Gradient norm", log_scale=True),
    LogField(name="temperature", curve="step", title="Temperature"),
    LogField(
        name="batch_accuracy",
        curve="step",
        title="Training accuracy within a batch, % (not comparable between batch sizes)",
        factor=100.0,
        unit="%",
        chance="batch_chance",
    ),
    LogField(name="batch_chance", curve="step"),
    LogField(name="lr", curve="step", title="Learning rate"),
    LogField(name="images_per_second", curve="step", title="Images per second"),
    LogField(
        name="data_fraction",
        curve="step",
        title="Loading data, % of a step",
        factor=100.0,
        unit="%",
    ),
    LogField(
        name="memory_bytes",
        curve="step",
        title="Memory, GB",
        factor=1e-9,
        unit=" GB",
        about_machine=True,
    ),
    LogField(name="watts", curve="step", title="Power, W", unit=" W", about_machine=True),
    LogField(
        name="celsius",
        curve="step",
        title="Temperature of the machine, °C",
        unit=" °C",
        about_machine=True,
    ),
    LogField(name="fan_rpm", curve="step", title="Fan, rpm", unit=" rpm", about_machine=True),
    LogField(
        name="battery_percent", curve="step", title="Battery, %", unit="%", about_machine=True
    ),
    LogField(name="step_seconds", curve="step"),
    LogField(name="muon_lr"),
    LogField(name="elapsed", curve="step"),
    LogField(name="epoch", curve="step"),
    # curves of the evaluations; _valid checks metrics
    LogField(
        name="text_to_image/recall@1",
        schema=None,
        curve="eval",
        title="Recall@1 text to image, %",
        factor=100.0,
    ),
    LogField(
        name="image_to_text/recall@1",
        schema=None,
        curve="eval",
        title="Recall@1 image to text, %",
        factor=100.0,
    ),
    *(field for analysis in ANALYSES.values() for field in analysis.log_fields()),
    # other fields
    LogField(name="step", schema=int, required_in=("step", "eval")),
    LogField(name="steps", schema=int),
    LogField(name="best_step", schema=int),
    LogField(name="back_to", schema=int),
    LogField(name="loss_phases", schema=[LOSS_PHASE]),
    LogField(name="time", schema=_time),
    LogField(name="seconds", schema=None, schema_by_kind={"step": {str: float}, "eval": float}),
    LogField(name="rank_seconds", schema=[float]),
    LogField(name="cores", schema=[float]),
    LogField(name="joules"),
    LogField(name="joules_per_epoch"),
    LogField(name="mean_watts"),
    LogField(name="peak_watts"),
    LogField(name="idle_watts"),
    LogField(name="recall_per_watt_hour"),
    LogField(name="overlap", schema=float),
    LogField(name="throttled"),
    LogField(name="fan_percent"),
    LogField(name="stages", schema={str: float}),
    LogField(name="stages_cost", schema=float),
    LogField(name="core_kinds", schema=[str]),
    LogField(name="meter", schema=str),
    LogField(name="not_measured", schema={str: str}),
    LogField(name="peak", schema=float),
    LogField(name="peak_bytes", schema=float),
    LogField(name="time_use", schema={str: float}),
    LogField(name="gradient_difference"),
    LogField(name=TOP1, schema=float),
    LogField(name=MEAN_RECALL, schema=float),
    LogField(name="analysis", schema=_analysis),
    LogField(name="split", schema=str),
    LogField(name="event", schema=str),
    LogField(name="text", schema=str),
    LogField(name="where", schema=str),
    LogField(name="role", schema=str),
    LogField(name="data", schema=None, schema_by_kind={"adaptation": str, "memory": float}),
    LogField(name="metric", schema=str),
    LogField(name="images", schema=int),
    LogField(name="score_before", schema=float, required_in=("adaptation",)),
    LogField(name="score_after", schema=float, required_in=("adaptation",)),
    LogField(name="version", schema=str),
)


def curve_fields(kind: Literal["step", "eval"]) -> list[LogField]:
    """Return the fields with a curve over the records of a kind, in the order of their plots."""
    return [field for field in FIELDS.values() if field.curve == kind]


def plotted_fields(kind: Literal["step", "eval"]) -> list[LogField]:
    """Return the fields whose curve is shown in a plot."""
    return [field for field in curve_fields(kind) if field.title]


def _valid(record: Record) -> bool:
    """Whether the fields that readers use have the types that they expect."""
    kind = record["kind"]
    for field in FIELDS.values():
        value = record.get(field.name)
        if value is None:
            if kind in field.required_in:
                return False
            continue
        schema = field.schema_in(kind)
        if schema is not None and not matches_schema(value, schema):
            return False
    parts = {"": float, "/low": float, "/high": float, "/chance": float, "/n": int}
    metrics = {name.rpartition("/")[0] for name in record if name.endswith(tuple(parts)[1:])}
    return all(
        matches_schema(record.get(name + part), schema)
        for name in metrics
        for part, schema in parts.items()
    )


def json_safe(value: Any) -> Any:
    """Convert non-finite numbers to text, since JSON has no NaN."""
    if isinstance(value, dict):
        return {key: json_safe(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_safe(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def read_preparing(run: Path) -> str | None:
    try:
        text = read_small(run / PREPARING, 4096, run).decode()
    except (OSError, ValueError):
        return None
    return text if text.isprintable() else None
