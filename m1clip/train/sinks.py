"""Where a run's records go beside run.jsonl."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

from m1clip.errors import UserError
from m1clip.runlog import Record, Sink

NOT_CURVES = {"v", "step", "time"}


def check_sink(name: str) -> None:
    """A sink that is not installed is an error before anything is trained."""
    if name == "tensorboard" and importlib.util.find_spec("tensorboard") is None:
        raise UserError(
            "--log tensorboard: it is not installed; pip install 'm1clip[log]', or leave out --log"
        )


def open_sink(name: str, run: Path) -> tuple[Sink, Callable[[], None]] | None:
    """What takes each record, and what ends it; None for the file alone."""
    if name != "tensorboard":
        return None
    from torch.utils.tensorboard import SummaryWriter

    writer: Any = SummaryWriter(str(run / "tensorboard"))

    def write(record: Record) -> None:
        step = record.get("step")
        if record["kind"] in ("step", "eval", "end", "layers") and isinstance(step, int):
            for key, value in scalars(record):
                writer.add_scalar(key, value, step, walltime=record["time"])

    return write, writer.close


def scalars(record: Record) -> list[tuple[str, float]]:
    """Every number of a record under kind/name, nested ones under kind/name/name."""
    found: list[tuple[str, float]] = []

    def walk(prefix: str, value: Any) -> None:
        if isinstance(value, dict):
            for key, item in value.items():
                walk(f"{prefix}/{key}", item)
        elif isinstance(value, list):
            if prefix.count("/") > 1 and value:  # [share, n] of a group, [gradient, update] of a layer
                walk(prefix, value[0])
            else:
                for place, item in enumerate(value):
                    walk(f"{prefix}/{place}", item)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            found.append((prefix, float(value)))

    for key, value in record.items():
        if key not in NOT_CURVES:
            walk(f"{record['kind']}/{key}", value)
    return found
