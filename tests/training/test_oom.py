"""Out of memory: the same batch and gradient in smaller micro-batches, reported in the log."""

import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_run import (
    assert_same_bits,
    finished_run,
    losses_of,
    resume_quietly,
    run_small,
    tensors_of,
)
from test_step import assert_close, make
from torch import Tensor

from m1clip.errors import UserError
from m1clip.hardware.memory import MemoryPressure, memory_limit, own_bytes
from m1clip.model.clip import CLIP
from m1clip.runlog import read_log
from m1clip.training import recovery
from m1clip.training.compose import TrainStep
from m1clip.training.oom import OOMHandler, StepAttempts, is_out_of_memory
from m1clip.training.step import compute_gradients, train_step
from m1clip.training.step_analyses import StepView


def attempt(
    handler: OOMHandler, work: Callable[[], Any], clear: Callable[[], None], step: int
) -> Any:
    """What `work` returns in place of a step with 16 images."""

    def plain(batch: Any, step: int, micro_batch: int | None = None, *rest: Any) -> Any:
        return work()

    attempts = StepAttempts(clear=clear)
    attempts.handler = handler
    return attempts.repeat(plain, range(16), step)  # type: ignore[arg-type]


class Changes(list[tuple[int, bool]]):
    """The changes that a handler reports: micro-batch, and whether it helps."""

    def report(self, step: int, micro_batch: int, reason: str, helps: bool) -> None:
        self.append((micro_batch, helps))


def little_memory(
    monkeypatch: pytest.MonkeyPatch, max_batch: int, error: type[Exception] = torch.OutOfMemoryError
) -> None:
    """An image tower that runs out of memory above a number of images."""
    real = CLIP.encode_view

    def encode(self: CLIP, pixels: Tensor, *rest: Tensor) -> Tensor:
        if self.training and len(pixels) > max_batch:
            raise error("CUDA out of memory. Tried to allocate 20.00 MiB\nand more words")
        return real(self, pixels, *rest)

    monkeypatch.setattr(CLIP, "encode_view", encode)


def gradients_of(update: TrainStep, step: Callable[[], Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    update.optimizer.zero_grad()
    loss = step()
    return loss, {
        n: p.grad.clone() for n, p in update.model.named_parameters() if p.grad is not None
    }


def test_gradient_of_the_batch_stays_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, plain = make()
    batch = inputs.training[0]
    loss, expected = gradients_of(plain, lambda: compute_gradients(plain.parts, batch, 0))
    _, update = make()
    little_memory(monkeypatch, max_batch=5)
    update.parts.encoder.encode_image = update.model.encode_view
    changes = Changes()
    without_update = replace(update.parts, update=update.parts.update.without_update())
    attempts = StepAttempts(clear=update.clear)
    attempts.handler = OOMHandler(0, lambda: 0, report=changes.report)
    plain_step = partial(train_step, without_update)
    again, actual = gradients_of(update, lambda: attempts.repeat(plain_step, batch, 0).loss)
    assert attempts.micro_batch == 4, "16, 8, 4"
    assert changes == [(8, True), (4, True)]
    torch.testing.assert_close(again, loss, rtol=1e-5, atol=0)
    assert_close(actual, expected, 1e-5)


def test_without_a_handler_the_error_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """compare needs the error to find the largest batch."""
    inputs, update = make()
    little_memory(monkeypatch, max_batch=5)
    update.parts.encoder.encode_image = update.model.encode_view
    with pytest.raises(torch.OutOfMemoryError):
        update.run(inputs.training[0], 0)


def test_run_continues_and_resumes_with_a_smaller_micro_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = finished_run({"optim.optimizer": "adamw", "train.save_every": 5})
    little_memory(monkeypatch, max_batch=8)
    run = tmp_path / "short"
    run_small(run, {"optim.optimizer": "adamw", "train.save_every": 5, "train.save_total_limit": 9})
    reported = [line for line in read_log(run) if line.get("event") == "low memory"]
    assert [(line["step"], line["micro_batch"], line["batch"]) for line in reported] == [(1, 8, 16)]
    assert "CUDA out of memory" in reported[0]["reason"]
    assert losses_of(run) == pytest.approx(losses_of(reference), rel=1e-4)

    last = tensors_of(run, 10)
    monkeypatch.undo()  # memory is free again, but the micro-batch of the run stays the same
    shutil.rmtree(run / "checkpoints/step-000010")
    resume_quietly(run)
    assert_same_bits(tensors_of(run, 10), last)


def test_micro_batch_of_one_that_does_not_fit_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    little_memory(monkeypatch, max_batch=0)
    with pytest.raises(UserError, match="out of memory at step 1 even with one sample at a time"):
        run_small(tmp_path / "run")


def test_micro_batch_is_halved_near_the_memory_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory use that grows with the micro-batch: close to the limit with more than 4 samples."""
    real = recovery.make_oom_handler

    def limited(*args: Any) -> OOMHandler:
        handler = real(*args)
        handler.limit = 1000.0
        handler.used_bytes = lambda: 100 + 200 * (handler.micro_batch or 16)
        return handler

    monkeypatch.setattr(recovery, "make_oom_handler", limited)
    run_small(tmp_path / "run", {"train.steps": 3})
    logged = [line for line in read_log(tmp_path / "run") if line.get("event") == "low memory"]
    assert [(line["step"], line["micro_batch"], line["helps"]) for line in logged] == [
        (1, 8, True),
        (1, 4, True),
    ]
    assert "close to the limit" in logged[0]["reason"]


def test_micro_batch_is_unchanged_if_halving_frees_no_memory() -> None:
    changes = Changes()
    handler = OOMHandler(0, lambda: 990, 1000.0, changes.report)

    def work() -> int:
        handler.check()
        return handler.micro_batch

    assert attempt(handler, work, lambda: None, step=4) == 0
    assert changes == [(8, True), (0, False)]
    handler.check()  # no longer checked


def test_near_the_limit_memory_is_cleared_before_the_micro_batch_is_halved() -> None:
    used, tried, changes = [990], [], Changes()
    handler = OOMHandler(0, lambda: used[0], 1000.0, changes.report)

    def work() -> None:
        tried.append(handler.micro_batch)
        handler.check()

    for step in (4, 5):  # clearing is not enough in each step
        used[0] = 990
        attempt(handler, work, lambda: used.__setitem__(0, 500), step=step)
    assert (tried, changes) == ([0, 0, 0, 8], [(8, True)])


def test_micro_batch_that_failed_is_not_used_again() -> None:
    changes, failures = Changes(), iter([MemoryError()])
    handler = OOMHandler(16, lambda: 990, 1000.0, changes.report)

    def work() -> int:
        for error in failures:
            raise error
        handler.check()
        return handler.micro_batch

    assert attempt(handler, work, lambda: None, step=4) == 8
    assert changes == [(8, True), (4, True), (8, False)]


def test_update_that_runs_out_of_memory_is_not_repeated() -> None:
    """It may have changed some of the weights."""
    steps: list[int] = []

    def plain(batch: Any, step: int, micro_batch: int | None = None, *rest: Any) -> Any:
        steps.append(step)
        attempts.mark("backward")
        attempts.mark("optimizer")
        raise MemoryError

    attempts = StepAttempts()
    attempts.handler = OOMHandler(16, lambda: 0)
    with pytest.raises(MemoryError):
        attempts.repeat(plain, range(16), 3)  # type: ignore[arg-type]
    assert (steps, attempts.micro_batch) == ([3], 16)


def test_probe_that_runs_out_of_memory_is_not_repeated() -> None:
    """The gradients may have lost their loss scale, and with FSDP the other ranks wait for this one."""
    inputs, update = make()
    update.attempts.handler = OOMHandler(0, lambda: 0)
    steps: list[int] = []

    def probe(view: StepView) -> None:
        steps.append(view.step)
        raise MemoryError

    with pytest.raises(MemoryError):
        update.run(inputs.training[0], 3, probe)
    assert (steps, update.attempts.micro_batch) == ([3], 0)


def test_mapped_files_do_not_count_as_own_memory(tmp_path: Path) -> None:
    file = tmp_path / "images"
    file.write_bytes(bytes(64 << 20))
    before = own_bytes()
    mapped = np.memmap(file, mode="r")
    assert int(mapped.sum()) == 0
    if sys.platform == "linux":
        assert own_bytes() - before < 32 << 20


def test_out_of_memory_in_an_evaluation_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 20.00 MiB\nand more words"
        )

    monkeypatch.setattr("m1clip.training.validation.retrieval", full)
    with pytest.raises(UserError, match=r"out of memory \(CUDA.*MiB\): .*--resume") as caught:
        run_small(tmp_path / "run", {"train.steps": 1})
    assert "\n" not in str(caught.value)


def test_other_errors_are_not_out_of_memory() -> None:
    handler = OOMHandler(0, lambda: 0)

    def broken() -> None:
        raise RuntimeError("shapes do not match")

    with pytest.raises(RuntimeError, match="shapes"):
        attempt(handler, broken, lambda: None, step=0)
    assert is_out_of_memory(
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")
    )
    assert is_out_of_memory(
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried")
    )
    assert is_out_of_memory(RuntimeError("MPS backend out of memory (MPS allocated: 8 GB)"))
    assert is_out_of_memory(MemoryError())
    assert not is_out_of_memory(ValueError("no"))
    with pytest.raises(MemoryPressure, match="close to the limit"):
        OOMHandler(0, lambda: 96, limit=100.0).check()


def test_memory_limit_is_that_of_the_container_if_it_is_smaller(tmp_path: Path) -> None:
    file, total = tmp_path / "memory.max", memory_limit(())
    for text, expected in (
        ("1000000\n", 1_000_000),
        ("max\n", total),
        (str(2**62), total),
        ("0", total),
        ("x", total),
    ):
        file.write_text(text)
        assert memory_limit((str(file), str(tmp_path / "missing"))) == expected
