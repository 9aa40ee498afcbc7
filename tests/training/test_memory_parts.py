"""Memory by component: saved tensors counted once, components that add up to the peak, and a probe that may fail."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from small_run import assert_same_bits, finished_run, run_small, tensors_of

from m1clip.hardware.memory import MallocUse, malloc_use
from m1clip.runlog import read_log
from m1clip.training import memory_parts
from m1clip.training.memory import PeakMemory
from m1clip.training.memory_parts import SavedTensors, cpu_parts, cuda_parts

COMPONENTS = {
    *("weights", "gradients", "optimizer", "activations", "temporary", "data"),
    *("libraries", "caches", "allocator", "rest"),
}


def memory_of(run: Path) -> list[dict[str, Any]]:
    return [record for record in read_log(run) if record["kind"] == "memory"]


def hooks(saved: SavedTensors) -> Any:
    return torch.autograd.graph.saved_tensors_hooks(saved.pack, saved.unpack)


def test_each_saved_storage_is_counted_once_and_weights_are_not() -> None:
    weight = torch.randn(64, 64, requires_grad=True)
    x = torch.randn(8, 64)
    saved = SavedTensors([weight])
    with hooks(saved):
        hidden = (x @ weight).exp()  # saves x, and the output of exp
        loss = (hidden * hidden.view(64, 8).view(8, 64)).sum()  # saves the same storage twice more
    rows = 8 * 64 * 4
    assert saved.peak == saved.now == 2 * rows
    loss.backward()
    del hidden, loss
    assert saved.now == 0
    assert saved.peak == 2 * rows


def test_peak_of_saved_tensors_is_what_is_alive_at_a_time() -> None:
    saved = SavedTensors([])
    x = torch.randn(1000, requires_grad=True)
    with hooks(saved):
        for _ in range(3):
            x.exp().sum().backward()
    assert saved.peak == 4000, "three passes, one after the other"


def test_hooks_do_not_change_gradients_or_keep_tensors() -> None:
    torch.manual_seed(0)
    layer = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Linear(8, 1))
    x = torch.randn(4, 8)
    layer(x).sum().backward()
    plain = [p.grad.clone() for p in layer.parameters() if p.grad is not None]
    layer.zero_grad()
    saved = SavedTensors(layer.parameters())
    with hooks(saved):
        output = layer(x)
        output.sum().backward()
    for p, expected in zip(layer.parameters(), plain, strict=True):
        assert p.grad is not None
        assert torch.equal(p.grad, expected)
    gone = weakref.ref(output)
    del output
    assert gone() is None


def test_run_reports_components_that_explain_its_peak() -> None:
    records = memory_of(finished_run({"train.eval_every": 5}))
    assert len(records) == 2, "after the first steps and at the end"
    last = records[-1]
    assert set(last) >= COMPONENTS
    assert last["activations"] > 0
    assert last["libraries"] > last["weights"]
    parts = sum(last[name] for name in COMPONENTS)
    assert parts - last["overlap"] >= last["peak"] - 1
    assert "not_measured" not in last


def test_activations_are_measured_not_typed_in() -> None:
    one = memory_of(finished_run({"train.eval_every": 5}))[-1]
    chunks = memory_of(finished_run({"train.eval_every": 5, "train.micro_batch": 4}))[-1]
    assert chunks["weights"] == one["weights"]
    assert 0 < chunks["activations"] < 0.6 * one["activations"]


@pytest.mark.parametrize("name", ["SavedTensors._add", "PeakMemory.__init__"])
def test_probe_that_runs_out_of_memory_is_reported_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def no_memory(*arguments: Any) -> None:
        raise MemoryError("out of memory while counting")

    owner, _, method = name.partition(".")
    with monkeypatch.context() as patch:
        patch.setattr(getattr(memory_parts, owner), method, no_memory)
        run_small(tmp_path / "run", {"train.eval_every": 5})
    last = memory_of(tmp_path / "run")[-1]
    assert last["not_measured"] == {"activations": "out of memory while counting"}
    assert "activations" not in last
    expected = tensors_of(finished_run({"train.eval_every": 5}), 10)
    assert_same_bits(tensors_of(tmp_path / "run", 10), expected)


def test_components_of_the_process() -> None:
    sizes = {"weights": 100, "gradients": 100, "optimizer": 200, "activations": 300, "data": 50}
    parts = cpu_parts(
        sizes,
        resident_before=1000,
        malloc_before=MallocUse(used=500, free=20),
        malloc_now=MallocUse(used=890, free=450),
        tensor_peak=750,
        persistent=400,
    )
    # 1000 - 100 of weights - 50 of data - 20 free; 750 - 700 listed; 390 more in use, 300 of them
    # tensors; 450 free, of which 350 were tensors at the peak.
    assert parts == {"libraries": 830, "temporary": 50, "caches": 90, "allocator": 100}


def test_without_malloc_figures_only_libraries_are_known() -> None:
    sizes = {"weights": 100, "data": 50}
    values: dict[str, Any] = {"malloc_before": None, "malloc_now": None, "tensor_peak": None}
    assert cpu_parts(sizes, resident_before=1000, persistent=0, **values) == {"libraries": 850}


class Graph:
    """A captured graph with its own memory pool."""

    pool_id = (7, 1)
    input_bytes = 5


def test_components_of_the_allocator_of_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    stats = {"allocated_bytes.all.peak": 1000, "requested_bytes.all.peak": 960}
    segments = [
        {"segment_pool_id": (0, 0), "allocated_size": 700},
        {"segment_pool_id": (7, 1), "allocated_size": 60},
        {"segment_pool_id": (7, 1), "allocated_size": 3},
    ]
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda: stats)
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: segments)
    sizes = {"weights": 100, "gradients": 100, "optimizer": 200, "activations": 300}
    graph: Any = Graph()
    parts = cuda_parts(sizes, tensor_peak=750, workspaces=64, allocated_before=90, graph=graph)
    assert parts.pop("before") == 26, "what was in use before the run, without workspaces"
    assert parts == {"temporary": 50, "workspaces": 64, "graph": 68, "allocator": 40}
    without = cuda_parts(sizes, tensor_peak=None, workspaces=None, allocated_before=0, graph=None)
    assert without == {"allocator": 40}, "what was not measured has no component"


def test_peak_of_a_device_leaves_out_tensors_of_others() -> None:
    on_host = torch.ones(1000)
    with PeakMemory([on_host], "meta") as memory:
        on_device = torch.empty(10, device="meta")  # 40 bytes
        both = [on_device + 1, on_host + 1]
    assert memory.peak == 80
    assert len(both) == 2


def test_malloc_reports_what_is_in_use() -> None:
    before = malloc_use()
    if before is None:
        pytest.skip("this C library has no mallinfo2")
    block = torch.ones(10_000_000)
    after = malloc_use()
    assert after is not None
    assert after.used + after.free >= before.used + block.nbytes
