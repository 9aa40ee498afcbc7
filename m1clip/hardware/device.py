"""Device differences: rules as pure functions of machine facts, and the device itself."""

import importlib
import importlib.util
import os
import re
import shutil
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import psutil
import torch

from m1clip.config import device_name
from m1clip.errors import UserError
from m1clip.hardware.machine_info import MachineInfo
from m1clip.hardware.memory import return_freed_memory
from m1clip.system import peak_resident_bytes

SingleKind = Literal["cpu", "mps", "cuda", "mlx"]
# A pair has the image tower on the first device and the text tower on the second.
Kind = Literal["cpu", "mps", "cuda", "mlx", "cuda+cpu", "mps+cpu", "cpu+cpu"]
HYBRIDS: tuple[Kind, ...] = ("cuda+cpu", "mps+cpu", "cpu+cpu")  # the last one is for tests
Precision = Literal["fp32", "bf16", "fp16"]
DTYPES: dict[Precision, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


@dataclass(frozen=True, kw_only=True)
class DeviceCapabilities:
    """How to use a device. The defaults are for a CPU on Linux."""

    precisions: tuple[Precision, ...] = ("fp32", "bf16", "fp16")  # supported
    bf16: Literal["yes", "no", "measure"] = "measure"  # whether bf16 is faster
    non_blocking: bool = False  # copies overlap with computation
    pin_memory: bool = False
    fixed_shapes: bool = False  # every batch has the same shape
    fused_optimizer: bool = True
    worker_start: Literal["fork", "spawn", "forkserver"] = "fork"
    graphs: bool = False  # CUDA graphs
    on_device: bool = False  # images fit into the device's own memory
    max_reduction: int | None = None  # longest sum in a matmul
    max_sequences: int | None = None  # in one call of a linear layer

    def max_batch_rows(self, tokens: int) -> int | None:
        """Return how many sequences of this length may be encoded in one call; None: any number.

        The gradient of a weight is a sum over all tokens of the call.
        """
        limits = [
            self.max_sequences,
            None if self.max_reduction is None else max(1, self.max_reduction // tokens),
        ]
        return min((limit for limit in limits if limit is not None), default=None)


def device_parts(kind: Kind) -> tuple[SingleKind, SingleKind]:
    """The device of the image tower and of the loss, and the device of the text tower."""
    image, _, text = kind.partition("+")
    return image, text or image  # type: ignore[return-value]


def available(facts: MachineInfo) -> tuple[SingleKind, ...]:
    """List the devices of this machine, usually the fastest first.

    MLX is last, since only the user chooses it.
    """
    kinds: dict[SingleKind, bool] = {
        "cuda": facts.cuda is not None,
        "mps": facts.mps,
        "cpu": True,
        "mlx": bool(facts.mlx),
    }
    return tuple(kind for kind, is_available in kinds.items() if is_available)


def hybrids_of(kinds: Sequence[SingleKind]) -> tuple[Kind, ...]:
    """The pairs that some devices form."""
    return tuple(kind for kind in HYBRIDS if all(part in kinds for part in device_parts(kind)))


def choose_device(requested: str, facts: MachineInfo) -> Kind:
    kinds = available(facts)
    requested = device_name(requested)
    if requested == "auto":
        return kinds[0]
    for kind in (*kinds, *hybrids_of(kinds)):
        if kind == requested:
            return kind
    fix = "run pip install 'm1clip[mlx]', or use" if requested == "mlx" else "use"
    raise UserError(
        f"--device {requested}: not available on this machine (found: {', '.join(kinds)}); {fix}"
        " --device auto"
    )


# From this length on, a matmul of MPS on M1 and M2 silently adds memory behind its operands
# (pytorch#193487, #195163). torch 2.14 has fixed 2-D matmuls with more than 32,768, and no batched
# ones.
WRONG_REDUCTION = 32_767


def apple_chip(facts: MachineInfo) -> int:
    """1 for M1, 2 for M2 ...; a name without a number counts as 1, for which every rule applies."""
    match = re.search(r"\bM(\d+)\b", facts.cpu)
    return int(match.group(1)) if match else 1


def causal_sdpa_is_wrong(kind: str, dtype: torch.dtype) -> bool:
    """Whether causal SDPA lets positions see later tokens (pytorch#195910).

    This happens on MPS in fp16 and bf16, without a gradient. The issue is closed, but names no
    release with the fix, so the answer is the same for every version.
    """
    return kind == "mps" and dtype in (torch.float16, torch.bfloat16)


def rules(kind: Kind, facts: MachineInfo) -> DeviceCapabilities:
    if kind in HYBRIDS:
        return _rules_of_pair(*(rules(part, facts) for part in device_parts(kind)))
    if kind == "cuda":
        modern = facts.cuda_capability >= (8, 0)  # bf16 tensor cores came with Ampere
        return DeviceCapabilities(
            precisions=("fp32", "bf16", "fp16") if modern else ("fp32", "fp16"),
            bf16="yes" if modern else "no",
            non_blocking=True,
            pin_memory=True,
            worker_start="forkserver",  # a forked child must not inherit a CUDA context
            graphs=True,
            on_device=True,
        )
    if kind == "mps":
        # Non-blocking copies from pageable memory have corrupted data, and changing shapes leak
        # memory.
        return DeviceCapabilities(
            precisions=("fp32", "bf16", "fp16"),
            bf16="no" if apple_chip(facts) <= 2 else "measure",
            fixed_shapes=True,
            # With every version of torch: the split takes no time, and 2.14 has fixed only a part.
            max_reduction=WRONG_REDUCTION - 1 if apple_chip(facts) <= 2 else None,
            # With more, linear layers with a bias gave wrong rows (pytorch#189495).
            max_sequences=65_536,
            worker_start="spawn",
        )
    if kind == "mlx":
        # Evaluations, and towers that are not part of the step, run in torch on MPS.
        host = rules("mps" if facts.mps else "cpu", facts)
        return replace(host, precisions=("fp32", "bf16"), bf16="no", fixed_shapes=True)
    return DeviceCapabilities(worker_start="fork" if facts.system == "Linux" else "spawn")


def _rules_of_pair(image: DeviceCapabilities, text: DeviceCapabilities) -> DeviceCapabilities:
    """Combine the capabilities of two devices; batches are copied as the image tower needs them."""
    bf16: Literal["yes", "no", "measure"] = "measure"
    if image.bf16 == text.bf16 or "no" in (image.bf16, text.bf16):
        bf16 = "no" if text.bf16 == "no" else image.bf16
    return replace(
        image,
        precisions=tuple(name for name in image.precisions if name in text.precisions),
        bf16=bf16,
        fused_optimizer=image.fused_optimizer and text.fused_optimizer,
        graphs=False,  # a graph cannot contain the work of the CPU
    )


def default_precision(kind: Kind, facts: MachineInfo) -> Precision:
    """Return the precision to use unless another one is clearly faster (docs/plan.md)."""
    if kind in HYBRIDS:
        image, text = (default_precision(part, facts) for part in device_parts(kind))
        return image if image == text else "fp32"
    rule = rules(kind, facts)
    if rule.bf16 == "measure":
        return "bf16" if kind == "cpu" and facts.cpu_bf16 else "fp32"
    return "bf16" if rule.bf16 == "yes" else "fp32"


def choose_precision(requested: str, kind: Kind, facts: MachineInfo) -> Precision:
    """Return the requested precision, or the default of the device for `auto`."""
    rule = rules(kind, facts)
    if requested == "auto":
        return default_precision(kind, facts)
    for precision in rule.precisions:
        if precision == requested:
            return precision
    raise UserError(
        f"--precision {requested}: not supported on {kind} (choose from"
        f" {', '.join(rule.precisions)}, auto)"
    )


def threads(requested: int, facts: MachineInfo) -> int:
    """Return the requested number of threads; 0: one per physical (performance) core."""
    return requested or facts.performance_cores


def peak_of_status(text: str) -> int:
    """Parse the peak memory in bytes from Linux's /proc/PID/status."""
    line = next(line for line in text.splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


class Device:
    """A device, or a pair of them, whose second one has only the text tower."""

    def __init__(self, name: Kind, facts: MachineInfo) -> None:
        self.name: Kind = name
        self.is_hybrid = name in HYBRIDS
        self.kind, text_kind = device_parts(name)
        kind = self.kind
        self.capabilities = rules(name, facts)
        self.torch = torch.device(kind if kind != "mlx" else "mps" if facts.mps else "cpu")
        self.text_torch = torch.device(text_kind) if self.is_hybrid else self.torch
        self._backend: Any = (
            _mlx() if kind == "mlx" else {"cuda": torch.cuda, "mps": torch.mps}.get(kind)
        )
        self._max_seen = 0  # MPS tracks no peak: the maximum returned by memory_bytes()
        self._peak_file: Path | None = None  # Linux, after reset_peak: rusage cannot be reset

    @property
    def has_gpu(self) -> bool:
        """Whether steps run on a GPU; MLX's build for Linux has none."""
        return (
            bool(self._backend.default_device() == self._backend.gpu)
            if self.kind == "mlx"
            else self.kind != "cpu"
        )

    def synchronize(self) -> None:
        if self._backend is not None:
            self._backend.synchronize()

    def memory_bytes(self) -> int:
        """Memory in use now: the allocator's on an accelerator, the process's on the CPU."""
        match self.kind:
            case "cuda":
                return int(self._backend.memory_allocated())
            case "mps":
                allocated_bytes = int(self._backend.driver_allocated_memory())
                self._max_seen = max(self._max_seen, allocated_bytes)
                return allocated_bytes
            case "mlx":
                return int(self._backend.get_active_memory() + self._backend.get_cache_memory())
        return int(psutil.Process().memory_info().rss)

    def peak_bytes(self) -> int:
        """Peak memory of this process so far, or since `reset_peak`."""
        match self.kind:
            case "cuda":
                return int(self._backend.max_memory_allocated())
            case "mps":
                return max(self.memory_bytes(), self._max_seen)
            case "mlx":
                return int(self._backend.get_peak_memory())
        if self._peak_file is not None:
            return peak_of_status(self._peak_file.read_text())
        peak = peak_resident_bytes()
        return self.memory_bytes() if peak is None else peak

    def reset_peak(self) -> bool:
        """Free cached memory and reset the peak.

        False where this is not possible (CPU, except on Linux).
        """
        self.release()
        self._max_seen = 0
        if self.kind in ("cuda", "mlx"):
            (
                self._backend.reset_peak_memory_stats
                if self.kind == "cuda"
                else self._backend.reset_peak_memory
            )()
        if self.kind != "cpu":
            return True
        try:
            Path("/proc/self/clear_refs").write_text("5")
            status = Path("/proc/self/status")
            peak_of_status(status.read_text())
        except (OSError, StopIteration):
            return False
        self._peak_file = status
        return True

    def release(self) -> None:
        if self._backend is None:
            return_freed_memory()
        else:
            (self._backend.clear_cache if self.kind == "mlx" else self._backend.empty_cache)()

    def total_bytes(self) -> int:
        """Total memory of the device; of the machine for CPU and unified memory."""
        if self.kind == "cuda":
            return int(self._backend.get_device_properties(self.torch).total_memory)
        return int(psutil.virtual_memory().total)

    def free_bytes(self) -> int:
        if self.kind == "cuda":
            return int(self._backend.mem_get_info()[0])
        return int(psutil.virtual_memory().available)


def _mlx() -> Any:
    try:
        return importlib.import_module("mlx.core")
    except ImportError as error:
        raise UserError(
            f"--device mlx: mlx cannot be loaded ({error}); run pip install 'm1clip[mlx]'"
        ) from None


Autocast = Callable[[], AbstractContextManager[object]]  # opens the context of one forward pass


def autocast(
    device: Device,
    precision: Precision,
    enabled: bool = True,
    torch_device: torch.device | None = None,
) -> Autocast:
    """Return a function that opens the autocast context of a forward pass; fp32 needs none.

    With `enabled=False`, the context disables autocast for a backward pass within a forward pass,
    but keeps its cast weights. `torch_device` is the device of the tower, if it is not that of the
    image tower.
    """
    if precision == "fp32":
        return nullcontext
    kind = (torch_device or device.torch).type
    return lambda: torch.autocast(kind, dtype=DTYPES[precision], enabled=enabled)


def compile_obstacle(kind: str, torch_folder: str, compiler: str | None, triton: bool) -> str:
    """Why torch.compile cannot work for a device; "" if no reason is known."""
    if kind == "cuda" and not triton:
        return (
            "it needs triton, which comes with torch on Linux (Windows: pip install triton-windows)"
        )
    if kind != "cpu":
        return ""  # Metal brings its own compiler
    if compiler is None:
        return (
            "it needs a C++ compiler, and none is installed (Linux: g++; macOS: xcode-select"
            " --install)"
        )
    if any(letter.isspace() for letter in torch_folder):
        return f"torch passes its own path to the linker, and {torch_folder} contains a space"
    return ""


def check_compile(kind: str) -> None:
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    triton = importlib.util.find_spec("triton") is not None
    obstacle = compile_obstacle(kind, os.path.dirname(torch.__file__), compiler, triton)
    if obstacle:
        raise UserError(f"--compile does not work here: {obstacle}; fix that, or remove --compile")
