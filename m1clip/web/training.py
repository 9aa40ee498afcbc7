"""The Train button of the Label page: a background run on the labels, what it gained, and the
switch to its model.

All that is remembered is in the folder of the run, so that closing the page or the server loses
nothing.
"""

from __future__ import annotations

import itertools
import json
import os
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from m1clip.errors import UserError
from m1clip.formatting import one_line
from m1clip.io import read_small, write_json
from m1clip.monitor.history import History
from m1clip.monitor.status import find_runs, is_run, status_of, stop_run
from m1clip.runlog import ABOUT_LABELS, AGREED
from m1clip.search.compare import compare_models
from m1clip.search.database import is_full
from m1clip.search.labels import LABELS_TO_TRAIN, Label, Labels
from m1clip.search.query import Index
from m1clip.training.process import (
    NO_REASON,
    OUTPUT,
    error_line,
    failure_of,
    remove_folder_of_failed_start,
    start_in_background,
)
from m1clip.web.server import key_of

RUN_NAME = "labels"
# ABOUT_LABELS is in the folder of a run: what it was trained on, and what it gained.
MIN_TRAINED = 10  # labels for training, of those before the first training
STOP_SECONDS = 120.0  # to wait for a step to end
Started = dict[str, Any]  # the content of ABOUT_LABELS


class TrainPage:
    """Answers the requests about training.

    `opened` and `labels` return the index and its labels.
    """

    def __init__(
        self,
        opened: Callable[[], Index],
        labels: Callable[[], Labels],
        runs: Path,
        use_model: Callable[[str], None],
    ) -> None:
        self._opened = opened
        self._labels = labels
        self._runs = runs.absolute()  # as the paths of models in an index are
        self._use_model = use_model  # called when another model is to be searched
        self._lock = threading.Lock()
        self._work = ""  # what a thread does now: starting, comparing, stopping or switching
        self._failure = ""  # of the last thing that was asked for

    def status(self, values: dict[str, str]) -> dict[str, Any]:
        """The newest run on labels of this folder, what it gained, and whether its model is
        searched.
        """
        index = self._opened()
        work = self._work  # read first: a run that is started meanwhile is then found below
        newest = self._newest(index)
        state = {"work": work, "failure": self._failure, "progress": index.progress()}
        if work == "starting":
            return {**state, "state": "starting"}
        if newest is None:
            return {**state, "state": "none"}
        run, about = newest
        status = status_of(History(run).poll())
        if status.state == "finished" and "result" not in about and not about.get("problem"):
            self._start("comparing", lambda: self._compare(index, run, about))
        in_use = Path(index.model_path).is_relative_to(run)
        ended, message = status.state, status.message
        if (
            ended == "crashed"
        ):  # or it was stopped before its first step, which its log does not tell
            stopped = about.get("stopped") is True
            ended, message = ("stopped", "stopped") if stopped else ("crashed", self._reason(run))
        return {
            **state,
            "state": ended,
            "message": message,
            "output": one_line(str(run / OUTPUT)),
            "run": key_of(run),
            "name": run.name,
            "labels": about.get("labels"),
            "before": about.get("before_name"),
            "result": about.get("result"),
            "problem": about.get("problem", ""),
            "in_use": in_use,
            "can_go_back": self._is_trained(index.model_path) and index.model_before is not None,
        }

    def start(self, data: bytes) -> dict[str, Any]:
        """Start a run on the labels, in a process of its own."""
        index = self._opened()
        labels = self._labels()
        count = check_enough(labels.labelled().values())
        newest = self._newest(index)
        if newest is not None and status_of(History(newest[0]).poll()).state in (
            "preparing",
            "running",
        ):
            raise UserError(f"{newest[0].name} is still running; wait for it, or stop it")
        # All labels are trained on again, from the model that the first run on labels started from.
        in_use = newest is not None and Path(index.model_path).is_relative_to(newest[0])
        start = newest[1].get("start") if newest is not None and in_use else None
        start = start if isinstance(start, str) else index.model_path
        about: Started = {
            "root": str(index.root),
            "labels": count,
            "start": start,
            "before_name": run_or_model(index.model_path),
        }
        words = ["train", str(labels.path), *start_options(start)]

        def begin() -> None:
            run = self._new_folder()
            try:
                write_json(run / ABOUT_LABELS, about)  # first: the page finds the run by it
                start_in_background(words, run, RUN_NAME, None)
            except (UserError, OSError) as error:
                (run / ABOUT_LABELS).unlink(missing_ok=True)
                remove_folder_of_failed_start(run)
                full = f"{run.parent}: the disk is full; free some space"
                reason = full if is_full(error) else str(error)
                raise UserError(f"the training did not start: {reason}") from None

        self._start("starting", begin, always=True)
        return {}

    def stop(self, data: bytes) -> dict[str, Any]:
        """Stop the run; it saves a checkpoint first."""
        newest = self._newest(self._opened())
        if newest is None:
            raise UserError("there is no run to stop")
        run, about = newest

        def end() -> None:
            stop_run(run, STOP_SECONDS)
            if run.is_dir():
                write_json(run / ABOUT_LABELS, {**about, "stopped": True})

        self._start("stopping", end, always=True)
        return {}

    def switch(self, data: bytes) -> dict[str, Any]:
        """Index the photos with the new model in another process.

        It is searched once it has all vectors.
        """
        index = self._opened()
        newest = self._newest(index)
        if newest is None or status_of(History(newest[0]).poll()).state != "finished":
            raise UserError("there is no finished run to switch to")
        run = newest[0]

        def use() -> None:
            self._switch(index, str(run))
            _note_agreement(run, True)

        self._start("switching", use, always=True)
        return {}

    def back(self, data: bytes) -> dict[str, Any]:
        """Search with the previous model again, whose vectors are kept, as `switch` does."""
        index = self._opened()
        before = index.model_before
        if before is None:
            raise UserError("there is no previous model")
        in_use = _run_of(index.model_path)

        def return_to_it() -> None:
            self._switch(index, before)
            _note_agreement(in_use, False)

        self._start("switching", return_to_it, always=True)
        return {}

    def _start(self, work: str, function: Callable[[], object], always: bool = False) -> None:
        """Run a function in a thread, one at a time; its error is shown on the page."""
        with self._lock:
            if self._work:
                if always:
                    raise UserError(f"{self._work} now; wait until it is done")
                return
            self._work, self._failure = work, ""

        def target() -> None:
            try:
                function()
            except UserError as error:
                self._failure = one_line(str(error))
            except (OSError, RuntimeError, ValueError, sqlite3.Error) as error:
                self._failure = one_line(f"{work}: {type(error).__name__}: {error}")[:300]
            finally:
                self._work = ""

        threading.Thread(target=target, daemon=True).start()

    def _new_folder(self) -> Path:
        for number in itertools.count(1):
            folder = self._runs / (RUN_NAME if number == 1 else f"{RUN_NAME}-{number}")
            try:
                folder.mkdir(parents=True)
            except FileExistsError:
                continue
            except OSError as error:
                raise UserError(f"{folder}: cannot be created ({error.strerror})") from None
            return folder
        raise AssertionError("numbers end")

    def _newest(self, index: Index) -> tuple[Path, Started] | None:
        """The newest run on the labels of this folder, and what is known about it."""
        for run in reversed(find_runs(self._runs)):
            about = _read_about(run)
            if about is not None and about.get("root") == str(index.root):
                return run, about
        return None

    def _is_trained(self, model: str) -> bool:
        """Whether a model is of a run on labels, the newest or one before it."""
        return (_run_of(model) / ABOUT_LABELS).is_file()

    def _reason(self, run: Path) -> str:
        """Why a run ended, from its output."""
        try:
            reason = failure_of(run)
        except OSError:
            reason = ""
        return reason or NO_REASON

    def _compare(self, index: Index, run: Path, about: Started) -> None:
        """Compare both models on the labels that were held out, once."""
        try:
            comparison = compare_models(index, self._labels().labelled(), run)
            about = {**about, "result": asdict(comparison)}
        except UserError as error:
            about = {**about, "problem": one_line(str(error))}
        write_json(run / ABOUT_LABELS, about)

    def _switch(self, index: Index, model: str) -> None:
        """Index with another model; the index keeps the current one until all photos are done."""
        command = [sys.executable, "-m", "m1clip", "index", str(index.root), "--model", model]
        environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
        process = subprocess.run(
            [*command, "--when-done"],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C on the server must not interrupt it
            check=False,
        )
        if process.returncode:
            raise UserError(
                f"the photos were not indexed: {error_line(process.stdout) or NO_REASON}"
            )
        self._use_model(model)


def check_enough(labels: Collection[Label]) -> int:
    """The number of labels; UserError if there are too few of them, or too few in a split."""
    count = len(labels)
    if count < LABELS_TO_TRAIN:
        raise UserError(
            f"{LABELS_TO_TRAIN - count} more labels are needed before the first training"
        )
    held_out = sum(label.split == "test" for label in labels)
    validation = sum(label.split == "val" for label in labels)
    trained = count - held_out - validation
    if not held_out or trained < MIN_TRAINED:
        raise UserError(
            f"of {count} labels, {trained} are for training, {validation} for validation and "
            f"{held_out} held out; photos that were labelled together, and near-duplicates, are all "
            "in one of these parts: label some other photos one by one"
        )
    return count


def start_options(model: str) -> Sequence[str]:
    """Options of `m1clip train` to adapt the heads of a model to labels."""
    return ("--init", model, "--recipe", "frozen")


def run_or_model(model: str) -> str:
    """The name of a model.

    For the best or last model of a run, which are named alike, that of the run.
    """
    return _run_of(model).name


def _run_of(model: str) -> Path:
    """The run of a model, or the model itself if it is of no run."""
    path = Path(model)
    return path.parent if is_run(path.parent) else path


def _read_about(run: Path) -> Started | None:
    """What is known about a run on labels; None for another run."""
    try:
        about = json.loads(read_small(run / ABOUT_LABELS))
    except (OSError, ValueError, RecursionError):
        return None
    return about if isinstance(about, dict) else None


def _note_agreement(run: Path, agreed: bool) -> None:
    """Remember whether the user wants the model of a run on labels: only then is it a default."""
    about = _read_about(run)
    if about is not None:
        write_json(run / ABOUT_LABELS, {**about, AGREED: agreed})
