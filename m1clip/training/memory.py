"""Predict the memory of a training step by running it on fake tensors, which allocate and compute
nothing, and say how much a run may use.
"""

import dataclasses
import functools
import inspect
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import psutil
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from m1clip.config import Config
from m1clip.data.image_cache import RAM_FRACTION
from m1clip.data.images import Preprocess
from m1clip.data.loader import Batch
from m1clip.formatting import amount
from m1clip.hardware.device import Device, Precision, choose_precision
from m1clip.hardware.machine_info import MachineInfo
from m1clip.hardware.memory import map_large_blocks
from m1clip.model.clip import build_clip
from m1clip.model.presets import CLIPConfig, preset, with_fields
from m1clip.training.step import make_parts, train_step
from m1clip.training.transfer import ModelInit

# RSS relative to live tensors on the CPU: glibc's cached blocks and oneDNN's workspace
# (docs/lab-compare.md).
HEAP_BASE, HEAP_SLACK = 170_000_000, 1.10
TRACED = 1024  # the largest batch that is traced
BYTES_PER_PIXEL = 3  # of a decoded image: RGB
MAX_UNSHARDED = 0.9  # of a GPU's memory; a step that needs more is sharded
SAFE = 0.8  # fraction of free memory to use without --memory; the rest is for other programs


class PeakMemory(TorchDispatchMode):
    """Tracks the bytes of live tensors on a device: `now`, and their maximum `peak`."""

    def __init__(self, tensors: Iterable[Tensor], device_type: str = "cpu") -> None:
        super().__init__()
        self._device_type = device_type
        self._live: set[int] = set()
        self.now = self.peak = 0
        for tensor in tensors:
            self._add(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._add(leaf)
        return result

    def _add(self, tensor: Tensor) -> None:
        if tensor.device.type != self._device_type:
            return
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key not in self._live:
            self._live.add(key)
            self.now += size
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._remove, key, size)

    def _remove(self, key: int, size: int) -> None:
        self._live.discard(key)
        self.now -= size


# torch wraps the method so that its compiler is loaded at the first call: a second and 40 MB.
PeakMemory.__torch_dispatch__ = inspect.unwrap(PeakMemory.__torch_dispatch__)  # type: ignore[method-assign]


def random_batch(
    shape: CLIPConfig,
    batch: int,
    text_tokens: int,
    captions_per_image: int = 1,
    frozen: tuple[int, int] = (0, 0),
) -> Batch:
    """A random batch with realistic shapes; `frozen` are the feature widths of frozen towers."""
    rows, captions = torch.arange(batch), batch * captions_per_image
    fields: dict[str, Any] = {}
    if frozen[0]:
        fields["image_features"] = torch.randn(batch, frozen[0])
    else:
        size = (batch, shape.image_size, shape.image_size, 3)
        fields["images"] = torch.randint(0, 256, size, dtype=torch.uint8)
    if frozen[1]:
        fields["text_features"] = torch.randn(captions, frozen[1])
    else:
        tokens = torch.randint(1, shape.vocab_size, (captions, text_tokens))
        eot_id = shape.text_tower.eot_id
        tokens[:, -1] = 1 if eot_id is None else eot_id
        fields["tokens"] = tokens
    image_index = rows.repeat_interleave(captions_per_image)
    return Batch(
        sample_ids=rows, caption_ids=torch.arange(captions), image_index=image_index, **fields
    )


@dataclass(frozen=True, eq=False)
class MemoryEstimate:
    """Predicted memory of the training step, as a function of the batch size and of activation
    checkpointing.
    """

    config: Config
    model_init: ModelInit
    facts: MachineInfo
    device: Device
    precision: Precision
    text_tokens: int
    data_bytes: int = 0  # of images cached in main memory

    @functools.cache  # noqa: B019  an estimate lives as long as its cache is useful
    def peak(self, batch: int, checkpointing: bool) -> int:
        """Bytes; on the CPU also those of the process, its data and the allocator."""
        step = self.step_bytes(batch, checkpointing)
        if self.device.kind != "cpu":
            return step
        return process_bytes(self.facts) + self.data_bytes + int(HEAP_BASE + HEAP_SLACK * step)

    def largest(self, limit: float, max_batch: int, checkpointing: bool) -> int:
        """The largest power of two from 2 to `max_batch` that fits in `limit`; 0 if none does.

        Beyond `TRACED`, memory is extrapolated: tracing the loss of a very large batch takes
        minutes.
        """
        batch = power_of_two(min(max_batch, TRACED))
        while batch >= 2 and (peak := self.peak(batch, checkpointing)) > limit:
            # Memory is a constant plus at least a linear term, so every batch above this bound is
            # too large as well.
            batch = power_of_two(min(batch - 1, int(batch * limit / peak)))
        if batch == TRACED:
            per_image = (peak - self.peak(batch // 2, checkpointing)) / (batch // 2)
            batch = power_of_two(min(max_batch, batch + int((limit - peak) / per_image)))
        return batch if batch >= 2 else 0

    def step_bytes(self, batch: int, checkpointing: bool) -> int:
        """Peak bytes of weights, gradients, optimizer state and activations."""
        captions, contrast = (
            self.config.data.captions_per_step or 1,
            self.config.train.text_contrast,
        )
        contrast = float(captions > 1) if contrast is None else contrast  # any weight above 0
        # The compiler does not support fake tensors.
        eager = self.config.with_values(
            compile=False, batch_size=max(batch, 2), micro_batch=0, text_contrast=contrast
        )
        # Fake tensors cannot be on a missing device, and the shapes are the same.
        host = Device("cpu", self.facts)
        # Private operations are probed at first use, which must not be with fake tensors.
        process_bytes(self.facts)
        with FakeTensorMode(), _WithoutShapes():
            model = self.model_init.build(load_weights=False)
            model.set_attention("auto" if self.device.kind == "cpu" else "sdpa")
            model.set_activation_checkpointing(checkpointing)
            # bf16 has the same size and needs no loss scaler, which reads values.
            half: Precision = "bf16" if self.precision == "fp16" else self.precision
            parts = make_parts(
                model, eager, host, half, Preprocess(image_size=self.model_init.config.image_size)
            )
            parts.update.skip = "never"  # fake tensors have no values to check
            # The fake tensors are on the CPU, but an accelerator does not use fused losses.
            loss = dataclasses.replace(parts.loss, fused=self.device.kind == "cpu")
            parts = dataclasses.replace(parts, loss=loss)
            widths = zip(
                (model.image_tower.width, model.text_tower.width),
                self.model_init.trainable,
                strict=True,
            )
            image, text = (0 if trained else width for width, trained in widths)
            samples = random_batch(
                self.model_init.config, batch, self.text_tokens, captions, (image, text)
            )
            train_step(parts, samples, 1)  # creates the optimizer state
            persistent = [
                *model.parameters(),
                *model.buffers(),
                *parts.update.optimizer.tensors().values(),
            ]
            with PeakMemory([*persistent, *samples.tensors().values()]) as memory:
                train_step(parts, samples, 1)
        if self.device.kind == "cpu" or checkpointing:
            return memory.peak
        return memory.peak + self._mlp_bytes(batch, captions * self.text_tokens)

    def _mlp_bytes(self, batch: int, text_tokens: int) -> int:
        """The MLP activations of our towers, which accelerators store and the CPU recomputes."""
        shape: Any = self.model_init.config
        numbers = 0.0
        for tower, trained in zip(
            (shape.image_tower, shape.text_tower), self.model_init.trainable, strict=True
        ):
            if trained and tower.kind in ("vit", "transformer"):
                tokens = tower.tokens if tower.kind == "vit" else text_tokens
                numbers += tower.layers * tokens * tower.width * tower.mlp_ratio
        return int(batch * numbers * (4 if self.precision == "fp32" else 2))


class _WithoutShapes(TorchDispatchMode):
    """Provides the output shape of oneDNN's fused linear layer, a private operation without a shape
    rule in torch.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.name().startswith("mkldnn::_linear_pointwise"):
            weight = args[2] if func.name().endswith(".binary") else args[1]
            return args[0].new_empty(*args[0].shape[:-1], weight.shape[0])
        return func(*args, **(kwargs or {}))


@functools.cache
def process_bytes(facts: MachineInfo) -> int:
    """Bytes of this process after a toy training step, which loads the libraries' code pages."""
    host, state = Device("cpu", facts), torch.get_rng_state()
    toy = with_fields(preset("tiny"), image_size=32, vision_layers=1, text_layers=1, vocab_size=64)
    kinds: tuple[Precision, ...] = ("fp32", "bf16")
    for kind in kinds:
        map_large_blocks()
        parts = make_parts(build_clip(toy), Config(), host, kind, Preprocess(image_size=32))
        train_step(parts, random_batch(toy, 4, 16), 1)
    torch.set_rng_state(state)
    return int(psutil.Process().memory_info().rss)


def power_of_two(number: int) -> int:
    """The largest power of two that is at most `number`; 0 for 0."""
    return 1 << (number.bit_length() - 1) if number > 0 else 0


def estimate_memory(
    config: Config,
    model_init: ModelInit,
    facts: MachineInfo,
    device: Device,
    text_tokens: int,
    images: int = 0,
) -> MemoryEstimate:
    """The memory of a run's step, and of `images` if they are cached in main memory."""
    precision = choose_precision(config.train.precision, device.name, facts)
    data_bytes = images * model_init.config.image_size**2 * BYTES_PER_PIXEL
    in_memory = device.kind == "cpu" and model_init.trainable.image
    if not in_memory or data_bytes > RAM_FRACTION * facts.memory_bytes:
        data_bytes = 0  # on the device or on disk
    return MemoryEstimate(config, model_init, facts, device, precision, text_tokens, data_bytes)


def fits_one_gpu(
    config: Config, model_init: ModelInit, facts: MachineInfo, device: Device, rows: int
) -> bool:
    """Whether a step of so many images fits in the memory of a device without FSDP."""
    tokens = model_init.config.context_length
    estimate = estimate_memory(config, model_init, facts, device, tokens)
    peak = estimate.peak(rows, config.model.grad_checkpointing)
    return peak <= MAX_UNSHARDED * device.total_bytes()


def memory_limit(config: Config, device: Device, facts: MachineInfo) -> float:
    """Bytes that a run may use: --memory, or most of the free memory."""
    if config.train.memory:
        return amount(config.train.memory, "B", "--memory")
    used = process_bytes(facts) if device.kind == "cpu" else 0
    return SAFE * device.free_bytes() + used
