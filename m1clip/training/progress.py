"""Output during training: a live progress bar on a terminal, lines of text otherwise.

Does not import torch: commands on an exported ONNX folder show their progress with it.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from m1clip.formatting import clock, printable, size
from m1clip.hardware.facts import Facts, decode_threads
from m1clip.runlog import MEAN_RECALL, PREPARING, write_preparing

if TYPE_CHECKING:
    from m1clip.data.decoding import DecodeOptions
    from m1clip.evaluation.statistics import Metric, Scores

RECENT = 25  # log lines whose speed predicts the time left
STEP_SECONDS = 15.0  # between two progress lines without a terminal
PREPARING_SECONDS = 8.0  # between two lines about data preparation


class Screen:
    def __init__(self, console: Console | None = None) -> None:
        # Started by torchrun: rank 0 prints for all.
        other_rank = os.environ.get("RANK", "0") != "0"
        self.console = console or Console(
            highlight=False, file=cast(IO[str], _SafeOutput()), quiet=other_rank
        )
        notebook = self.console.is_jupyter and importlib.util.find_spec("ipywidgets") is not None
        self.live = self.console.is_terminal or notebook
        self.warned: list[str] = []  # for the run log
        self._progress: Progress | None = None
        self._task = TaskID(0)
        self._total = 0
        self._score = ""
        self._last_line = time.monotonic()
        self._step_seconds: deque[float] = deque(maxlen=RECENT)

    def say(self, line: str) -> None:
        self.console.print(printable(line), markup=False, soft_wrap=True)

    def warn(self, line: str) -> None:
        self.warned.append(line)
        self.say(f"warning: {line}")

    @contextmanager
    def counter(self, title: str, run: Path | None = None) -> Iterator[Callable[[int, int], None]]:
        """Yield a callback (done, total) that shows progress; first call it when the work starts.

        Shows a bar on a terminal, otherwise a line every few seconds; also written to `run`, for `m1clip runs`.
        """
        work, ended = Work(title), threading.Event()
        bar = self._bar("{task.description}") if self.live else None
        task = bar.add_task(title, total=1) if bar is not None else TaskID(0)

        def show(done: int, total: int) -> None:
            work.show(done, total)
            if bar is not None:
                bar.start()
                bar.update(task, completed=done, total=total, description=str(work))

        def tick() -> None:
            # In a thread: a large image or slow disk can delay the callback for longer than this.
            printed = ""
            if run is not None:
                write_preparing(run, str(work))
            while not ended.wait(PREPARING_SECONDS):
                line = str(work)
                # The file first: when a line appears on the screen, `m1clip runs` shows it too.
                if run is not None:
                    write_preparing(run, line)
                if bar is None and line != printed:  # work without a count has one line
                    printed = line
                    self.say(line)

        ticker = threading.Thread(target=tick, daemon=True)
        ticker.start()
        try:
            yield show
        finally:
            ended.set()
            ticker.join()
            if bar is not None:
                bar.stop()
            if run is not None:
                (run / PREPARING).unlink(missing_ok=True)

    def begin(self, step: int, total: int) -> None:
        self._total = total
        self._step_seconds.clear()
        if self.live:
            self._progress = self._bar("{task.fields[text]}")
            self._task = self._progress.add_task(
                "train", total=total, completed=step, text="first steps ..."
            )
            self._progress.start()

    def change_total(self, total: int) -> None:
        """Show another number of steps: --minutes has corrected it."""
        self._total = total
        if self._progress is not None:
            self._progress.update(self._task, total=total)

    def step(self, values: dict[str, Any]) -> None:
        # The median ignores outliers such as an hour of sleep between two steps.
        self._step_seconds.append(values["step_seconds"])
        left = statistics.median(self._step_seconds) * (self._total - values["step"])
        text = (
            f"step {values['step']:,}/{self._total:,}  loss {values['loss']:.3f}{self._score}  "
            f"{values['images_per_second']:,.0f} images/s  {size(values['memory_bytes'])}  {clock(left)} left"
        )
        if self._progress is not None:
            self._progress.update(self._task, completed=values["step"], text=text)
        elif time.monotonic() - self._last_line > STEP_SECONDS or values["step"] == self._total:
            self._last_line = time.monotonic()
            self.say(text)

    def evaluation(
        self, step: int, scores: Scores, metric: Metric, best: tuple[float, int] | None
    ) -> None:
        """Show the metric that selects the best model, and `best` (value, step) if an earlier one was better."""
        low, high = 100 * metric.interval.low, 100 * metric.interval.high
        self._score = f"  {metric.label} {100 * metric.value:.1f}%"
        earlier = f"best so far {100 * best[0]:.1f}% at step {best[1]:,}" if best else "best so far"
        line = f"validation step {step:,}:{self._score[1:]} [{low:.1f}, {high:.1f}], chance {100 * metric.chance:.3g}%"
        if metric.name == MEAN_RECALL:
            to_image, to_text = (
                100 * scores[f"{name}/recall@1"].value
                for name in ("text_to_image", "image_to_text")
            )
            earlier += f"; recall@1 text to image {to_image:.1f}%, image to text {to_text:.1f}%"
        self.say(f"{line}, {earlier}")

    def end(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def _bar(self, text: str) -> Progress:
        columns = (SpinnerColumn(), BarColumn(bar_width=20), TextColumn(text), TimeElapsedColumn())
        return Progress(*columns, console=self.console, transient=True)


class Work:
    """Progress of data preparation; as text, with an estimate of the time left."""

    def __init__(self, title: str) -> None:
        self.title, self.done, self.total = title, 0, 0
        self._began, self._before = 0.0, 0
        self._lock = threading.Lock()  # one thread works, another one prints

    def show(self, done: int, total: int) -> None:
        """Report the items done; those of the first call were done before."""
        with self._lock:
            if self.total == 0:
                self._began, self._before = time.monotonic(), done
            self.done, self.total = done, total

    def __str__(self) -> str:
        """preparing train images: 640 of 8,000, 98/s, 1:15 left."""
        with self._lock:
            done, total = self.done, self.total
            done_here = done - self._before
            seconds = time.monotonic() - self._began
        text = f"{self.title}: {done:,} of {total:,}" if total else self.title
        if done_here == 0:
            return text
        per_second = done_here / max(seconds, 1e-9)
        speed = f"{per_second:,.{0 if per_second >= 10 else 1}f}/s"
        return f"{text}, {speed}, {clock((total - done) / per_second)} left"


class _SafeOutput:
    """Standard output that survives a closed pipe or terminal, or a full disk.

    The run continues and still writes run.jsonl; the rest of the output goes to /dev/null.
    """

    def write(self, text: str) -> int:
        return self._call("write", text)

    def flush(self) -> None:
        self._call("flush")

    def __getattr__(self, name: str) -> Any:
        return getattr(sys.stdout, name)

    def _call(self, method: str, *args: str) -> Any:
        try:
            return getattr(sys.stdout, method)(*args)
        except OSError:
            with contextlib.suppress(OSError):  # not backed by a file
                null = os.open(os.devnull, os.O_WRONLY)
                os.dup2(null, sys.stdout.fileno())
                os.close(null)


def decode_options(screen: Screen, run: Path | None = None) -> Callable[[Facts], DecodeOptions]:
    """Image decoding settings for this machine, with progress on the screen and in the run folder."""
    from m1clip.data.decoding import DecodeOptions

    counter = functools.partial(screen.counter, run=run)
    return lambda facts: DecodeOptions(decode_threads(), facts.memory_bytes, counter, screen.warn)
