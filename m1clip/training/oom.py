"""Out-of-memory handling: a step that does not fit is repeated with half the micro-batch.

The batch and its gradient stay the same (training/encode.py) but need less memory. `StepAttempts`
repeats a step, `OOMHandler` decides what to try next.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

import torch

from m1clip.errors import UserError, first_line
from m1clip.formatting import amount
from m1clip.hardware.memory import (
    NEAR_LIMIT,
    MemoryPressure,
    keep_freed_memory,
    memory_limit,
    own_bytes,
)

if TYPE_CHECKING:
    from m1clip.data.loader import Batch
    from m1clip.training.inputs import RunInputs
    from m1clip.training.step import StepResult
    from m1clip.training.step_analyses import Probe

# Number of the step (from 1), new micro-batch, reason, whether it helps.
Report = Callable[[int, int, str, bool], None]
OOM_MESSAGES = (
    "can't allocate memory",
    "not enough memory",
    "out of memory",
    "status_alloc_failed",  # cuBLAS and cuDNN
    "could not create a primitive",  # oneDNN's error when memory is short
    "unable to allocate",  # MLX
    "attempting to allocate",  # MLX, beyond the largest buffer of a GPU
)
RETRY_STEPS = 50  # at least this many steps between two retries with an unchanged micro-batch
# A smaller micro-batch that still uses more than this fraction of the memory does not help.
USELESS = 0.98


class Shortage(NamedTuple):
    """Why a step did not fit in memory."""

    reason: str
    failed: bool  # an allocation failed; else memory in use came close to the limit
    used: int = 0  # bytes, if no allocation failed


class OOMHandler:
    """Halves the micro-batch of a run when memory runs out, and reports each change."""

    def __init__(
        self,
        micro_batch: int,
        used_bytes: Callable[[], int],
        limit: float | None = None,
        report: Report = lambda step, micro_batch, reason, helps: None,
    ) -> None:
        """A `micro_batch` of 0 is the full batch.

        Without a `limit` only failed allocations count.
        """
        self.micro_batch = micro_batch
        self.used_bytes = used_bytes
        self.limit = limit
        self.report = report
        self._checks_limit = limit is not None
        self._previous_micro_batch = micro_batch
        self._retried_step = -RETRY_STEPS
        # Bytes, when the limit was last reached and before that.
        self._used, self._used_before = (0, float("inf"))

    def check(self) -> None:
        """Raise MemoryPressure near the limit.

        Call between forward and backward, where memory peaks.
        """
        if not self._checks_limit or self.limit is None:
            return
        used = self.used_bytes()
        if used > NEAR_LIMIT * self.limit:
            reason = f"{used / 1e9:.2f} GB in use, close to the limit of {self.limit / 1e9:.2f} GB"
            raise MemoryPressure(reason, used)

    def succeeded(self) -> None:
        """Note that a step fitted in memory."""
        self._used_before = float("inf")

    def shrink(self, shortage: Shortage, rows: int, step: int) -> None:
        """Prepare another attempt of a step with `rows` images, after its memory was freed: halve
        the micro-batch.

        Near the limit, freeing memory may be enough, so the first retry is unchanged.
        """
        if not shortage.failed:
            self._used = shortage.used
            if step - self._retried_step >= RETRY_STEPS:
                self._retried_step = step
                return
        self._halve(rows, step + 1, shortage.reason, shortage.failed)

    def _halve(self, rows: int, step_number: int, reason: str, failed: bool) -> None:
        current = self.micro_batch if 0 < self.micro_batch < rows else rows
        if failed and current <= 1:
            raise UserError(
                f"out of memory at step {step_number:,} even with one sample at a time ({reason}):"
                " use a smaller --model, --grad-checkpointing, or a machine with more memory"
            )
        useless = self._used > USELESS * self._used_before
        helps = failed or (current > 1 and not useless)
        if helps:
            half = (current + 1) // 2
            self._used_before = self._used_before if failed else self._used
            # Never return to a size that failed.
            self._previous_micro_batch = half if failed else self.micro_batch
            self.micro_batch = half
        else:
            self._checks_limit = False  # something else uses the memory: continue as before
            self.micro_batch = self._previous_micro_batch if useless else self.micro_batch
        self.report(step_number, self.micro_batch, reason, helps)


class StepAttempts:
    """The attempts at a step: the first, and while memory runs out, more with a smaller
    micro-batch.

    The caller makes the step, so that nothing lies between the training loop and the step:

        for attempt in attempts.at(step, rows):
            with attempt as micro_batch:
                result = train_step(parts, batch, step, micro_batch, attempts.mark)
    """

    def __init__(
        self,
        micro_batch: int = 0,
        clear: Callable[[], None] = lambda: None,
        mark: Callable[[str], None] = lambda phase: None,
        reuse_memory: bool = False,
    ) -> None:
        """`clear` forgets everything of a step that failed; `reuse_memory` after the first step.

        `mark` is called when a phase of the step begins.
        """
        self.clear = clear
        self._mark = mark
        self.handler: OOMHandler | None = None  # None: out-of-memory errors are raised
        self.checks_limit = True  # see `mark`
        self._micro_batch = micro_batch
        self._reuse_memory = reuse_memory
        self._updating = False

    @property
    def micro_batch(self) -> int:
        """Images encoded at a time; 0: the full batch."""
        return self._micro_batch if self.handler is None else self.handler.micro_batch

    def mark(self, phase: str) -> None:
        """Follow the phases of the step: memory peaks before the backward pass.

        An update is not repeated.
        """
        self._updating = phase == "optimizer"
        if phase == "backward" and self.handler is not None and self.checks_limit:
            self.handler.check()
        self._mark(phase)

    def at(self, step: int, rows: int) -> Iterator[Attempt]:
        """The attempts at a step with `rows` images; there is no other after one that succeeds."""
        while True:
            self._updating = False
            attempt = Attempt(self)
            yield attempt
            if attempt.shortage is None:
                break
            # Outside the `with` block: the error's frames keep the tensors alive.
            self.clear()
            assert self.handler is not None
            self.handler.shrink(attempt.shortage, rows, step)
        if self.handler is not None:
            self.handler.succeeded()
        if self._reuse_memory:
            self._reuse_memory = False
            keep_freed_memory()  # all block sizes have been allocated once

    def repeat(
        self, train: Callable[..., StepResult], batch: Batch, step: int, probe: Probe | None = None
    ) -> StepResult:
        """Call `train` with a batch until it succeeds: the loop writes this out."""
        for attempt in self.at(step, len(batch)):
            with attempt as micro_batch:
                result = train(batch, step, micro_batch, self.mark, probe)
        return result

    def shortage(self, error: BaseException) -> Shortage | None:
        """Why the step should be repeated after an error; None if it should not."""
        if self.handler is None or self._updating:
            return None
        return memory_shortage(error)


class Attempt:
    """One attempt at a step: a block that may run out of memory, and the micro-batch to
    use in it.
    """

    def __init__(self, attempts: StepAttempts) -> None:
        self._attempts = attempts
        self.shortage: Shortage | None = None  # why the block failed

    def __enter__(self) -> int:
        return self._attempts.micro_batch

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> bool:
        if error is not None:
            self.shortage = self._attempts.shortage(error)
        return self.shortage is not None


def memory_shortage(error: BaseException) -> Shortage | None:
    """Why memory was short, if that is what an error means."""
    if isinstance(error, MemoryPressure):
        return Shortage(str(error), failed=False, used=error.used)
    if is_out_of_memory(error):  # torch.OutOfMemoryError is a RuntimeError
        return Shortage(first_line(error), failed=True)
    return None


def make_oom_handler(inputs: RunInputs, micro_batch: int, report: Report) -> OOMHandler:
    """The handler of a run: the limit is --memory or the machine's memory.

    CUDA raises its own errors.
    """
    train, device = inputs.config.train, inputs.device
    limit = amount(train.memory, "B", "--memory") if train.memory else None
    if device.kind == "cpu":

        def used_bytes() -> int:
            return own_bytes() + inputs.ranks.shared_bytes

        return OOMHandler(micro_batch, used_bytes, limit or memory_limit(), report)
    total = float(device.total_bytes()) if device.kind in ("mps", "mlx") else None
    return OOMHandler(micro_batch, device.memory_bytes, limit or total, report)


@contextlib.contextmanager
def oom_as_user_error() -> Iterator[None]:
    """Turn out-of-memory errors into a UserError where a smaller micro-batch cannot help
    (optimizer, evaluation).
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise UserError(
            f"out of memory ({first_line(error)}): close other programs and continue with --resume,"
            " or start over with a smaller --model or --batch-size"
        ) from None


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that an allocation failed, on any device."""
    has_known_type = isinstance(error, torch.OutOfMemoryError | MemoryError)
    return has_known_type or any(message in str(error).lower() for message in OOM_MESSAGES)
