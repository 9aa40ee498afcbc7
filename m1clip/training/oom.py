"""Out-of-memory handling: a step that does not fit is repeated with half the micro-batch.

The batch and its gradient stay the same (training/encode.py) but need less memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, TypeVar

import torch

from m1clip.errors import UserError, first_line
from m1clip.formatting import amount
from m1clip.hardware.memory import NEAR, memory_limit, own_bytes

if TYPE_CHECKING:
    from m1clip.training.setup import Setup

Result = TypeVar("Result")
# Step from 1, new micro-batch, reason, whether it helps.
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
USELESS = 0.98  # a smaller micro-batch that still uses more than this fraction of the memory does not help


class MemoryPressure(Exception):
    """Memory in use came close to the limit, but no allocation has failed yet."""

    def __init__(self, reason: str, used: int) -> None:
        super().__init__(reason)
        self.used = used  # bytes


class OOMHandler:
    """Halves the micro-batch of a run when memory runs out, and reports each change."""

    def __init__(
        self,
        micro_batch: int,
        used_bytes: Callable[[], int],
        limit: float | None = None,
        report: Report = lambda step, micro_batch, reason, helps: None,
    ) -> None:
        """A `micro_batch` of 0 is the full batch; without a `limit` only failed allocations count."""
        self.micro_batch, self.used_bytes, self.limit, self.report = (
            micro_batch,
            used_bytes,
            limit,
            report,
        )
        self._checks_limit = limit is not None
        self._previous_micro_batch = micro_batch
        self._retried_step = -RETRY_STEPS
        # Bytes, when the limit was last reached and before that.
        self._used, self._used_before = (0, float("inf"))

    def check(self) -> None:
        """Raise MemoryPressure near the limit. Call between forward and backward, where memory peaks."""
        if not self._checks_limit or self.limit is None:
            return
        used = self.used_bytes()
        if used > NEAR * self.limit:
            reason = f"{used / 1e9:.2f} GB in use, close to the limit of {self.limit / 1e9:.2f} GB"
            raise MemoryPressure(reason, used)

    def run(
        self, work: Callable[[], Result], clear: Callable[[], None], rows: int, step: int
    ) -> Result:
        """Run `work`; if memory runs out, `clear` and retry with half the micro-batch.

        Near the limit, clearing may be enough, so the first retry is unchanged.
        """
        while True:
            try:
                result = work()
                self._used_before = float("inf")
                return result
            except MemoryPressure as error:
                reason, failed, self._used = str(error), False, error.used
            except (RuntimeError, MemoryError) as error:  # torch.OutOfMemoryError is a RuntimeError
                if not is_out_of_memory(error):
                    raise
                reason, failed = first_line(error), True
            clear()  # outside the except block: the error's frames keep the tensors alive
            if not failed and step - self._retried_step >= RETRY_STEPS:
                self._retried_step = step
            else:
                self._halve(rows, step + 1, reason, failed)

    def _halve(self, rows: int, step: int, reason: str, failed: bool) -> None:
        current = self.micro_batch if 0 < self.micro_batch < rows else rows
        if failed and current <= 1:
            raise UserError(
                f"out of memory at step {step:,} even with one sample at a time ({reason}): use a smaller --model, "
                f"--grad-checkpointing, or a machine with more memory"
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
        self.report(step, self.micro_batch, reason, helps)


def make_oom_handler(setup: Setup, micro_batch: int, report: Report) -> OOMHandler:
    """The handler of a run: the limit is --memory or the machine's memory; CUDA raises its own errors."""
    train, device = setup.config.train, setup.device
    limit = amount(train.memory, "B", "--memory") if train.memory else None
    if device.kind == "cpu":
        return OOMHandler(micro_batch, own_bytes, limit or memory_limit(), report)
    total = float(device.total_bytes()) if device.kind in ("mps", "mlx") else None
    return OOMHandler(micro_batch, device.memory_bytes, limit or total, report)


@contextlib.contextmanager
def oom_as_user_error() -> Iterator[None]:
    """Turn out-of-memory errors into a UserError where a smaller micro-batch cannot help (optimizer, evaluation)."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise UserError(
            f"out of memory ({first_line(error)}): close other programs and continue with --resume, or start over "
            f"with a smaller --model or --batch-size"
        ) from None


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that an allocation failed, on any device."""
    known = isinstance(error, torch.OutOfMemoryError | MemoryError)
    return known or any(message in str(error).lower() for message in OOM_MESSAGES)
