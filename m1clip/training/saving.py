"""Checkpoints and models of a run on CUDA: written by a thread, from copies in main memory, while training goes on."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import psutil

from m1clip.errors import UserError
from m1clip.model.folder import copy_model, write_weights
from m1clip.model.lora import merged_state
from m1clip.training.checkpoint import TensorGroups, disk_errors

if TYPE_CHECKING:
    from m1clip.model.clip import CLIP
    from m1clip.training.context import RunContext

COPIED_FRACTION = (
    0.25  # of the free main memory that copies may take; what is larger is written at once
)
BEST_MODEL, LAST_MODEL = "best", "model"  # folders of a run with its models
Result = TypeVar("Result")


@dataclass
class _Job:
    """A folder that is being written."""

    folder: Path
    nbytes: int
    result: Future[Any]
    report: Callable[[Any], None]


class Saver:
    """Writes folders one after the other: at once, or in a thread."""

    def __init__(self, in_background: bool = False) -> None:
        """`in_background`: the tensors are on a device of its own, and are copied before they change."""
        self._thread = ThreadPoolExecutor(1, "saving") if in_background else None
        self._jobs: deque[_Job] = deque()

    def submit(
        self,
        folder: Path,
        groups: TensorGroups,
        write: Callable[[TensorGroups], Result],
        report: Callable[[Result], None] = lambda _: None,
    ) -> None:
        """Write tensors to a folder; what `write` returns is reported once that is complete.

        Raises what an earlier write raised.
        """
        self.poll()
        nbytes = sum(t.nbytes for tensors in groups.values() for t in tensors.values())
        copied = nbytes + sum(job.nbytes for job in self._jobs)
        if self._thread is None or copied > COPIED_FRACTION * psutil.virtual_memory().available:
            self.wait()
            report(write(groups))
            return
        copies = {
            group: {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}
            for group, tensors in groups.items()
        }
        result = self._thread.submit(write, copies)
        self._jobs.append(_Job(folder, nbytes, result, report))

    def poll(self) -> None:
        """Report the writes that are complete; raises what the first failed one raised."""
        while self._jobs and self._jobs[0].result.done():
            self._finish_first()

    def wait(self, folder: Path | None = None) -> None:
        """Wait until all writes are complete, or those to a folder."""
        while any(folder in (None, job.folder) for job in self._jobs):
            self._finish_first()

    def close(self) -> None:
        """Complete all writes; their errors are dropped, as the run ends with an earlier one."""
        if self._thread is not None:
            self._thread.shutdown(wait=True)
        for job in self._jobs:
            with contextlib.suppress(OSError, UserError):
                job.report(job.result.result())
        self._jobs.clear()

    def _finish_first(self) -> None:
        job = self._jobs[0]
        job.result.exception()  # waits, and may be interrupted: then the job is still in the queue
        self._jobs.popleft()
        job.report(job.result.result())


def save_best(run: RunContext, model: CLIP) -> None:
    """Save the model that scores best so far."""
    _save(run, model, run.folder / BEST_MODEL)


def save_last(run: RunContext, model: CLIP) -> None:
    """Save the model of the last step: as the files of the best one, if that is the same model."""
    folder = run.folder / LAST_MODEL
    step = run.state.step
    best = run.folder / BEST_MODEL
    if run.state.best_step == step:
        run.saver.wait(best)
        if best.is_dir():  # else someone has deleted it before the run was resumed
            with disk_errors(run.log, folder, step):
                copy_model(best, folder)
            return
    _save(run, model, folder)


def _save(run: RunContext, model: CLIP, folder: Path) -> None:
    step = run.state.step
    parts = run.inputs.model

    def write(groups: TensorGroups) -> None:
        with disk_errors(run.log, folder, step):
            write_weights(folder, model.config, groups["model"], parts.tokenizer, parts.preprocess)

    run.saver.submit(folder, {"model": merged_state(model)}, write)
