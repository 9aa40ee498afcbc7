"""Memory of a run by component, from one step whose tensors are counted.

On the CPU every component is measured: tensors by their storages, malloc's blocks by glibc, and the
libraries by the memory of the process before training. On CUDA, the peak is that of torch's
allocator: tensors are counted in the same way, workspaces of cuBLAS by freeing them once, and a
captured graph by its memory pool. `rest` is what remains of the peak.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from m1clip.errors import first_line
from m1clip.hardware.memory import MallocUse, malloc_use, resident_bytes
from m1clip.training.memory import PeakMemory
from m1clip.training.oom import is_out_of_memory

if TYPE_CHECKING:
    from m1clip.cuda.graph import CapturedStep
    from m1clip.training.compose import TrainStep
    from m1clip.training.inputs import RunInputs


class _Saved:
    """A tensor that autograd has saved for the backward pass."""

    __slots__ = ("__weakref__", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class SavedTensors:
    """Counts the bytes that autograd saves for the backward pass, each storage once: `now`, and
    their maximum `peak`.

    `persistent` tensors, such as weights and the batch, are not counted.
    """

    def __init__(self, persistent: Iterable[Tensor]) -> None:
        self.now = 0
        self.peak = 0
        self.problem = ""  # why it has stopped counting
        self._known = {tensor.untyped_storage().data_ptr() for tensor in persistent}
        self._users: dict[int, int] = {}  # address of a storage -> how many saved tensors use it

    def pack(self, tensor: Tensor) -> _Saved:
        """Count a tensor that is saved. Nothing that goes wrong here may end the step."""
        saved = _Saved(tensor)
        if self.problem:
            return saved
        try:
            self._add(saved, tensor.untyped_storage())
        except (RuntimeError, MemoryError, NotImplementedError) as error:
            self.problem = first_line(error) or type(error).__name__
        return saved

    @staticmethod
    def unpack(saved: _Saved) -> Tensor:
        """Give the tensor back, unchanged."""
        return saved.tensor

    def _add(self, saved: _Saved, storage: torch.UntypedStorage) -> None:
        address = storage.data_ptr()
        if address in self._known:
            return
        users = self._users.get(address, 0)
        self._users[address] = users + 1
        if not users:
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)
        weakref.finalize(saved, self._remove, address, storage.nbytes())

    def _remove(self, address: int, size: int) -> None:
        self._users[address] -= 1
        if not self._users[address]:
            del self._users[address]
            self.now -= size


@dataclass
class MemoryProbe:
    """Counts the tensors of one step, and remembers the process before training."""

    inputs: RunInputs
    train_step: TrainStep
    resident_before: int = 0  # of the process, before the first step
    malloc_before: MallocUse | None = None
    allocated_before: int = 0  # CUDA: by others in this process, such as a model of a notebook
    activations: int | None = None
    tensor_peak: int | None = None  # of all tensors that were alive at a time; CPU and CUDA
    workspaces: int | None = None  # CUDA: what cuBLAS holds for its matmuls
    problems: dict[str, str] = field(default_factory=dict)  # component -> why it is not measured
    done: bool = False

    def __post_init__(self) -> None:
        self.resident_before = resident_bytes()
        self.malloc_before = malloc_use()
        if self.inputs.device.kind == "cuda":
            own = tensor_parts(self.inputs, self.train_step)["weights"]
            self.allocated_before = max(0, self.inputs.device.memory_bytes() - own)

    @contextlib.contextmanager
    def watch(self, batch: Iterable[Tensor]) -> Iterator[None]:
        """Count the tensors of the step in the block; the step itself is not changed."""
        self.done = True
        obstacle = self._obstacle()
        if obstacle:
            self.problems["activations"] = obstacle
            yield
            return
        with contextlib.ExitStack() as stack:
            saved, tensors = self._start(stack, list(batch))
            yield
        if saved is not None and saved.problem:
            self.problems["activations"] = saved.problem
        elif saved is not None:
            self.activations = saved.peak
        self.tensor_peak = None if tensors is None else tensors.peak
        if self.inputs.device.kind == "cuda" and not self._captured():
            self.workspaces = free_workspaces()

    def _captured(self) -> bool:
        """Whether a graph exists, which refers to its workspaces."""
        graph = self.train_step.cuda_graph
        return graph is not None and graph.pool_id is not None

    def _obstacle(self) -> str:
        if self.inputs.device.kind == "mlx":
            return "MLX does not show what it saves for the backward pass"
        if self.inputs.config.model.compile:
            return "a compiled step does not show what it saves for the backward pass"
        return ""

    def _start(
        self, stack: contextlib.ExitStack, batch: list[Tensor]
    ) -> tuple[SavedTensors | None, PeakMemory | None]:
        """Begin to count; a probe for which memory is short is skipped."""
        try:
            persistent = [*self._persistent(), *batch]
            saved = SavedTensors(persistent)
            tensors = None
            sharded = self.train_step.parts.world.shards is not None
            if self.inputs.device.kind == "cpu" or (
                self.inputs.device.kind == "cuda" and not sharded
            ):
                tensors = PeakMemory(persistent, self.inputs.device.torch.type)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            self.problems["activations"] = first_line(error) or "out of memory"
            return None, None
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(saved.pack, saved.unpack))
        if tensors is not None:
            stack.enter_context(tensors)
        return saved, tensors

    def _persistent(self) -> list[Tensor]:
        step = self.train_step
        gradients = [p.grad for p in step.parts.world.parameters if p.grad is not None]
        return [
            *step.parts.world.parameters,
            *step.model.buffers(),
            *gradients,
            *step.parts.update.optimizer.tensors().values(),
        ]

    def record(self) -> dict[str, Any]:
        """The bytes of each component, `peak`, and `not_measured` with the reasons of what is
        missing.

        Each component is at its own maximum. Gradients grow while activations are freed: `overlap`
        bytes of them are never in memory at the same time, so the components are that much more
        than the peak.
        """
        sizes = tensor_parts(self.inputs, self.train_step)
        device = self.inputs.device
        peak = device.peak_bytes()
        if self.activations is not None:
            sizes["activations"] = self.activations
        if device.kind == "cpu":
            alive = sum(_nbytes([tensor]) for tensor in self._persistent())
            sizes |= cpu_parts(
                sizes,
                resident_before=self.resident_before,
                malloc_before=self.malloc_before,
                malloc_now=malloc_use(),
                tensor_peak=self.tensor_peak,
                persistent=alive,
            )
        elif device.kind == "cuda":
            sizes |= cuda_parts(
                sizes,
                tensor_peak=self.tensor_peak,
                workspaces=self.workspaces,
                allocated_before=self.allocated_before,
                graph=self.train_step.cuda_graph,
            )
        reasons = {"not_measured": self.problems} if self.problems else {}
        explained = sum(sizes.values())
        overlap = 0
        if self.tensor_peak is not None:
            overlap = max(0, _listed(sizes) - self.tensor_peak)
        rest = max(0, peak - explained + overlap)
        return {**sizes, "rest": rest, "overlap": overlap, "peak": peak, **reasons}


def tensor_parts(inputs: RunInputs, train_step: TrainStep) -> dict[str, int]:
    """Bytes of the tensors that stay from step to step."""
    parameters = train_step.parts.world.parameters
    device_type = inputs.device.torch.type  # the other tower of a pair is elsewhere
    counted = {
        "weights": [*parameters, *train_step.model.buffers()],
        "gradients": [p for p in parameters if p.requires_grad],
        "optimizer": train_step.parts.update.optimizer.tensors().values(),
    }
    parts = {
        name: _nbytes(tensor for tensor in tensors if tensor.device.type == device_type)
        for name, tensors in counted.items()
    }
    if inputs.device.kind == "cpu":
        parts["data"] = sum(split.images.ram_bytes for split in inputs.splits.values())
    return parts


def cpu_parts(
    sizes: dict[str, int],
    *,
    resident_before: int,
    malloc_before: MallocUse | None,
    malloc_now: MallocUse | None,
    tensor_peak: int | None,
    persistent: int,
) -> dict[str, int]:
    """The components that only the CPU has, where tensors and everything else share the memory of
    the process.

    `sizes` are those of tensors; `persistent` bytes of tensors are alive between two steps.

    - libraries: Python, torch and others: the process before training without the model and the data
    - temporary: tensors that are alive at the peak and not listed elsewhere
    - caches: what libraries have allocated in the steps and still use, such as oneDNN's kernels
    - allocator: blocks that malloc keeps for the next step, beyond the tensors that were alive at the peak
    """
    in_model = sizes["weights"] + sizes["data"]
    parts = {"libraries": max(0, resident_before - in_model)}
    if malloc_before is not None:
        # Free blocks of then are in use now, or counted as the allocator's.
        parts["libraries"] = max(0, parts["libraries"] - malloc_before.free)
    if tensor_peak is None:
        return parts
    listed = _listed(sizes)
    parts["temporary"] = max(0, tensor_peak - listed)
    if malloc_before is None or malloc_now is None:
        return parts
    grown = malloc_now.used - malloc_before.used - (persistent - sizes["weights"])
    parts["caches"] = max(0, grown)
    transient = max(0, tensor_peak - persistent)
    parts["allocator"] = max(0, malloc_now.free - transient)
    return parts


def cuda_parts(
    sizes: dict[str, int],
    *,
    tensor_peak: int | None,
    workspaces: int | None,
    allocated_before: int,
    graph: CapturedStep | None,
) -> dict[str, int]:
    """The components that only CUDA has.

    - before: what this process had in use before the run, such as other models of a notebook

    - temporary: tensors that are alive at the peak and not listed elsewhere
    - workspaces: scratch memory of cuBLAS, one for each thread and stream that multiplies matrices
    - graph: what a captured graph holds between its replays: inputs, results and own workspaces
    - allocator: blocks are larger than the tensors in them
    """
    parts = {}
    if tensor_peak is not None:
        parts["temporary"] = max(0, tensor_peak - _listed(sizes))
    if workspaces is not None:
        parts["workspaces"] = workspaces
    if allocated_before:
        parts["before"] = max(0, allocated_before - (workspaces or 0))
    if graph is not None and graph.pool_id is not None:
        parts["graph"] = graph.input_bytes + pool_bytes(graph.pool_id)
    figures = torch.cuda.memory_stats()
    allocated = int(figures.get("allocated_bytes.all.peak", 0))
    requested = int(figures.get("requested_bytes.all.peak", allocated))
    parts["allocator"] = max(0, allocated - requested)
    return parts


def free_workspaces() -> int | None:
    """Free the workspaces of cuBLAS, and return their bytes; the next matmul allocates them again.

    None where torch has no function for it. A captured graph would refer to freed memory.
    """
    clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
    if clear is None:
        return None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    clear()
    return max(0, int(before - torch.cuda.memory_allocated()))


def pool_bytes(pool_id: tuple[int, int]) -> int:
    """Bytes in use in the memory pool of a captured graph."""
    segments = torch.cuda.memory_snapshot()
    return sum(
        int(segment["allocated_size"])
        for segment in segments
        if tuple(segment.get("segment_pool_id", (0, 0))) == tuple(pool_id)
    )


def _listed(sizes: dict[str, int]) -> int:
    """Bytes of the tensors that have a component of their own."""
    names = ("weights", "gradients", "optimizer", "activations")
    return sum(sizes.get(name, 0) for name in names)


def _nbytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
