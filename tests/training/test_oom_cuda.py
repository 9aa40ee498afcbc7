"""Out of memory and synchronization on a real GPU.

test_oom.py and test_recovery.py run on the CPU.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from small_run import losses_of, run_small, tensors_of
from test_step import make

from m1clip.data.loader import batches
from m1clip.runlog import read_log
from m1clip.training.oom import make_oom_handler

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="fills the memory of a CUDA device; none here"
)
BATCH, STEPS = 512, 6
ON_CUDA: dict[str, Any] = {"train.device": "cuda", "optim.optimizer": "adamw"}
# The activations of a batch, some hundred MB, are nearly all of this run's memory: half a batch
# takes half of it.
LARGE = {**ON_CUDA, "model.patch_size": 4, "model.vision_width": 128, "data.synthetic_images": 1100,
         "train.batch_size": BATCH, "train.steps": STEPS,
         "optim.lr": 1e-4}  # fmt: skip
TOLERANCE = 1e-3  # relative, after six steps: micro-batches sum in another order, and some CUDA kernels in any order


def forget() -> None:
    """Free cached memory and reset the peak."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


@contextmanager
def at_most(size: int) -> Iterator[None]:
    """Limit the device memory of this process; above it, torch raises OutOfMemoryError."""
    torch.cuda.set_per_process_memory_fraction(
        size / torch.cuda.get_device_properties(0).total_memory
    )
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def wanted_by(run: Path, changes: dict[str, Any]) -> int:
    """Train without a limit; returns the bytes that it needed at its peak."""
    forget()
    before = torch.cuda.memory_allocated()
    run_small(run, {**LARGE, **changes})
    return torch.cuda.max_memory_allocated() - before


def reserved() -> int:
    """Bytes that the allocator cannot give back: a limit is one of reserved memory.

    Earlier tests of this process have left some.
    """
    forget()
    return torch.cuda.memory_reserved()


def short_of_memory(run: Path) -> list[dict[str, Any]]:
    return [line for line in read_log(run) if line.get("event") == "low memory"]


def largest_difference(one: Path, other: Path) -> float:
    """Largest relative difference between the weights of two runs."""
    actual, expected = tensors_of(one, STEPS), tensors_of(other, STEPS)
    names = [
        name
        for name in expected
        if name.startswith("weights:") and expected[name].is_floating_point()
    ]
    return max(
        float((actual[name] - expected[name]).norm() / expected[name].norm().clamp_min(1e-6))
        for name in names
    )


@pytest.mark.long("Out of memory")
@pytest.mark.parametrize("graph", [False, True], ids=["plain", "with graphs"])
def test_gpu_out_of_memory_halves_micro_batch(
    tmp_path: Path, graph: bool, counts: dict[str, float]
) -> None:
    changes = {"model.cuda_graph": graph}
    expected = wanted_by(tmp_path / "reference", {"model.cuda_graph": False})
    assert expected > 200 * 2**20, "otherwise the allocator's rounding hides the limit"
    with at_most(reserved() + int(0.7 * expected)):
        run_small(tmp_path / "short", {**LARGE, **changes})
    reported = short_of_memory(tmp_path / "short")
    assert reported, "memory did not run out"
    assert [line["micro_batch"] for line in reported] == [
        BATCH // 2 ** (n + 1) for n in range(len(reported))
    ]
    assert all(line["batch"] == BATCH and line["helps"] for line in reported)
    assert reported[0]["step"] == 1
    assert "CUDA out of memory" in reported[0]["reason"]
    assert short_of_memory(tmp_path / "reference") == []
    assert len(losses_of(tmp_path / "short")) == STEPS
    assert losses_of(tmp_path / "short") == pytest.approx(
        losses_of(tmp_path / "reference"), rel=TOLERANCE
    )
    difference = largest_difference(tmp_path / "short", tmp_path / "reference")
    assert difference < TOLERANCE
    counts |= {"runs out of memory": 1, "halvings of the micro-batch": len(reported)}
    counts["largest relative difference of weights"] = difference


def test_too_little_memory_for_cuda_graph_changes_no_loss(tmp_path: Path) -> None:
    """An eager step fits, but a CUDA graph, which needs its activations a second time, may not."""
    expected = wanted_by(tmp_path / "reference", {"model.cuda_graph": False})
    with at_most(reserved() + int(1.3 * expected)):
        run_small(tmp_path / "short", {**LARGE, "model.cuda_graph": True})
    assert losses_of(tmp_path / "short") == pytest.approx(
        losses_of(tmp_path / "reference"), rel=TOLERANCE
    )


@contextmanager
def waits_are_errors() -> Iterator[None]:
    """Raise an error for operations that synchronize with the device."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("graph", [False, True], ids=["plain", "replayed"])
def test_step_never_synchronizes_on_cuda(graph: bool, precision: str) -> None:
    changes = {**ON_CUDA, "model.cuda_graph": graph, "train.precision": precision,
               "data.captions_per_step": 2, "data.synthetic_images": 136, "train.batch_size": 64}  # fmt: skip
    inputs, update = make(changes)
    update.attempts.handler = make_oom_handler(inputs, 0, lambda *change: None)
    rules = inputs.device.capabilities
    feed = list(batches(inputs.training, 0, 8, 0, rules.worker_start, rules.pin_memory))
    # The graph is captured only after all batch shapes have occurred.
    warm = 2 * len(feed) if graph else 3
    for step in range(warm):
        update.run(feed[step % len(feed)], step)
    assert (update.cuda_graph is not None and update.cuda_graph._graph is not None) == graph
    figures = []
    with waits_are_errors():
        for step in range(5):
            figures.append(update.run(feed[3 + step], warm + step))
        with pytest.raises(RuntimeError, match="synchroniz"):  # a synchronization is detected
            figures[0][0].item()
    assert all(bool(figure.isfinite().all()) for result in figures for figure in result)
