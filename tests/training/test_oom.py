"""Too little memory: the same batch and gradient in smaller chunks, and everybody is told."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_run import assert_same_bits, resume_quietly, run_small, tensors_of
from test_step import assert_close, make
from torch import Tensor

from m1clip.errors import UserError
from m1clip.hardware.memory import is_near, memory_limit, own_bytes, smallest_limit
from m1clip.model.clip import CLIP
from m1clip.runlog import read_log
from m1clip.training import recovery as rescue
from m1clip.training.oom import MemoryPressure, OOMHandler, is_out_of_memory
from m1clip.training.step import TrainStep

GIB = 2**30


def little_memory(monkeypatch: pytest.MonkeyPatch, most: int, error: type[Exception] = torch.OutOfMemoryError) -> None:
    """An image tower that has memory for so many images at once, and no more."""
    real = CLIP.encode_image

    def encode(self: CLIP, pixels: Tensor, *rest: Tensor) -> Tensor:
        if self.training and len(pixels) > most:
            raise error("CUDA out of memory. Tried to allocate 20.00 MiB\nand more words")
        return real(self, pixels, *rest)

    monkeypatch.setattr(CLIP, "encode_image", encode)


def gradients_of(update: TrainStep, step: Callable[[], Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    update.optimizer.zero_grad()
    loss = step()
    return loss, {n: p.grad.clone() for n, p in update.model.named_parameters() if p.grad is not None}


def test_the_gradient_of_the_whole_batch_stays_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    job, plain = make()
    batch = job.training[0]
    loss, wanted = gradients_of(plain, lambda: plain.compute_gradients(batch, 0))
    _, update = make()
    little_memory(monkeypatch, most=5)
    update.encode_image = update.model.encode_image
    update.oom = OOMHandler(0, lambda: 0)
    again, found = gradients_of(
        update, lambda: update.oom.run(lambda: update.compute_gradients(batch, 0), update.clear, 16, 0)
    )
    assert update.oom.micro_batch == 4, "16, 8, 4"
    assert [shrunk.micro_batch for shrunk in update.oom.take_changes()] == [8, 4]
    torch.testing.assert_close(again, loss, rtol=1e-5, atol=0)
    assert_close(found, wanted, 1e-5)


def test_without_a_watch_the_error_is_the_callers(monkeypatch: pytest.MonkeyPatch) -> None:
    """compare and --batch-size auto look for the largest batch: for them the error is the answer."""
    job, update = make()
    little_memory(monkeypatch, most=5)
    update.encode_image = update.model.encode_image
    with pytest.raises(torch.OutOfMemoryError):
        update(job.training[0], 0)


def test_a_run_goes_on_in_chunks_says_so_and_resumes_with_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = tmp_path / "whole"
    run_small(whole, {"optim.optimizer": "adamw", "train.save_every": 5})
    little_memory(monkeypatch, most=8)
    run = tmp_path / "short"
    run_small(run, {"optim.optimizer": "adamw", "train.save_every": 5, "train.save_total_limit": 9})
    told = [line for line in read_log(run) if line.get("event") == "memory short"]
    assert [(line["step"], line["micro_batch"], line["batch"]) for line in told] == [(1, 8, 16)]
    assert "CUDA out of memory" in told[0]["why"]
    losses = {name: [r["loss"] for r in read_log(path) if r["kind"] == "step"]
              for name, path in (("whole", whole), ("short", run))}  # fmt: skip
    assert losses["short"] == pytest.approx(losses["whole"], rel=1e-4)

    last = tensors_of(run, 10)
    monkeypatch.undo()  # memory is there again, but the chunk of the run stays what it was
    for folder in ("checkpoints/step-000010",):
        for file in (run / folder).iterdir():
            file.unlink()
        (run / folder).rmdir()
    resume_quietly(run)
    assert_same_bits(tensors_of(run, 10), last)


def test_one_pair_at_a_time_is_the_least(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    little_memory(monkeypatch, most=0)
    with pytest.raises(UserError, match="out of memory at step 1 even with one sample at a time"):
        run_small(tmp_path / "run")


def test_a_limit_that_comes_near_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory use that grows with the micro-batch: close to the limit with more than 4 samples."""
    real = rescue.make_oom_handler

    def watched(job: Any, state: Any) -> OOMHandler:
        room = real(job, state)
        room.limit = 1000.0
        room.used_bytes = lambda: 100 + 200 * (room.micro_batch or 16)
        return room

    monkeypatch.setattr("m1clip.training.run.make_oom_handler", watched)
    run = tmp_path / "run"
    run_small(run, {"train.steps": 3})
    told = [line for line in read_log(run) if line.get("event") == "memory short"]
    assert [(line["step"], line["micro_batch"], line["helps"]) for line in told] == [(1, 8, True), (1, 4, True)]
    assert "close to the limit" in told[0]["why"]


def test_memory_that_chunks_do_not_free_is_left_alone() -> None:
    """Something else fills it: the run is not made slow for nothing, nor stopped."""
    room, done = OOMHandler(0, lambda: 990, limit=1000.0), []

    def work() -> str:
        room.check()
        done.append(room.micro_batch)
        return "done"

    assert room.run(work, lambda: None, rows=16, step=4) == "done"
    assert done == [0], "the chunk is what it was"
    assert [(shrunk.micro_batch, shrunk.helps) for shrunk in room.take_changes()] == [(8, True), (0, False)]
    room.check()  # and is not asked again
    assert room.limit == 1000.0, "a copy for a checkpoint still asks for it"


def test_near_the_limit_memory_is_cleared_before_chunks_get_smaller() -> None:
    """Memory that was only kept for later is given back, and the step done again as it was; but not each step."""
    used, tried = [990], []
    room = OOMHandler(0, lambda: used[0], limit=1000.0)

    def work() -> None:
        tried.append(room.micro_batch)
        room.check()

    room.run(work, lambda: used.__setitem__(0, 500), rows=16, step=4)
    assert (tried, room.take_changes()) == ([0, 0], [])
    used[0] = 990
    room.run(work, lambda: used.__setitem__(0, 500), rows=16, step=5)
    assert tried == [0, 0, 0, 8]


def test_a_chunk_that_failed_does_not_come_back() -> None:
    room, failures = OOMHandler(16, lambda: 990, limit=1000.0), iter([MemoryError()])

    def work() -> int:
        for error in failures:
            raise error
        room.check()
        return room.micro_batch

    assert room.run(work, lambda: None, rows=16, step=4) == 8
    assert [(shrunk.micro_batch, shrunk.helps) for shrunk in room.take_changes()] == [(8, True), (4, True), (8, False)]


def test_a_copy_for_a_checkpoint_stays_within_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rescue, "own_bytes", lambda: 300)
    monkeypatch.setattr(rescue, "memory_limit", lambda: 10_000)
    room = OOMHandler(0, lambda: 400, limit=1000.0)
    assert rescue.free_host_bytes("cpu", room) == 950 - 400
    assert rescue.free_host_bytes("cuda", room) == 9500 - 300, "a GPU's limit is not of main memory"
    assert rescue.free_host_bytes("cpu", None) == 9500 - 300


def test_what_is_only_mapped_does_not_count(tmp_path: Path) -> None:
    file = tmp_path / "images"
    file.write_bytes(bytes(64 << 20))
    before = own_bytes()
    mapped = np.memmap(file, mode="r")
    assert int(mapped.sum()) == 0
    if sys.platform == "linux":
        assert own_bytes() - before < 32 << 20


def test_out_of_memory_in_an_evaluation_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB\nand more words")

    monkeypatch.setattr("m1clip.training.validation.retrieval", full)
    with pytest.raises(UserError, match=r"out of memory \(CUDA.*MiB\): .*--resume") as caught:
        run_small(tmp_path / "run", {"train.steps": 1})
    assert "\n" not in str(caught.value)


def test_another_error_is_not_taken_for_this_one() -> None:
    room = OOMHandler(0, lambda: 0)

    def broken() -> None:
        raise RuntimeError("shapes do not match")

    with pytest.raises(RuntimeError, match="shapes"):
        room.run(broken, lambda: None, 16, 0)
    assert is_out_of_memory(RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"))
    assert is_out_of_memory(RuntimeError("MPS backend out of memory (MPS allocated: 8 GB)"))
    assert is_out_of_memory(MemoryError())
    assert not is_out_of_memory(ValueError("no"))
    with pytest.raises(MemoryPressure, match="close to the limit"):
        OOMHandler(0, lambda: 96, limit=100.0).check()


def test_the_limit_is_the_smallest_that_anything_says(tmp_path: Path) -> None:
    assert smallest_limit(16 * GIB, []) == 16 * GIB
    assert smallest_limit(16 * GIB, ["max\n"]) == 16 * GIB
    assert smallest_limit(16 * GIB, [f"{4 * GIB}\n"]) == 4 * GIB
    assert smallest_limit(16 * GIB, ["9223372036854771712", "0", "rubbish"]) == 16 * GIB
    container = tmp_path / "memory.max"
    container.write_text("1000000\n")
    assert memory_limit((str(container), str(tmp_path / "missing"))) == 1_000_000
    assert is_near(96, 100)
    assert not is_near(90, 100)
