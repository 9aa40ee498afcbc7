"""Memory of a training step by component: measured while it runs, or predicted with fake tensors."""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import psutil
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from m1clip.config import Config
from m1clip.data.images import Preprocess
from m1clip.data.loader import Batch
from m1clip.hardware.device import Device, Kind, Precision
from m1clip.hardware.facts import Facts
from m1clip.model.clip import build_clip
from m1clip.model.presets import CLIPConfig, with_fields
from m1clip.training.step import TrainStep
from m1clip.training.transfer import Start

COMPONENTS = ("weights", "gradients", "optimizer", "activations", "batch", "temporaries")


class Ledger(TorchDispatchMode):
    """Tracks storages from the operation that creates them until their last tensor is freed."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._live: dict[int, tuple[str, int, int]] = {}  # storage -> component, bytes, creation index
        self._now = dict.fromkeys(COMPONENTS, 0)
        self._total = self._most = self._born = self._peak_at = 0
        self.peak: dict[str, int] = dict(self._now)
        self._kind = next(model.parameters()).device.type  # only tensors on this device count
        self.phase = "activations"  # component of new tensors, unless claimed by another
        self.claim("weights", (*model.parameters(), *model.buffers()))
        trained = (p for p in model.parameters() if p.requires_grad)
        self._handles = [p.register_post_accumulate_grad_hook(self._take_gradient) for p in trained]

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Sequence[Any], args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run the operation and track its outputs."""
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.device.type == self._kind:
                self._enter(leaf, self.phase)
        return result

    def claim(self, component: str, tensors: Iterable[Tensor]) -> None:
        """Assign these tensors to a component."""
        for tensor in (tensor for tensor in tensors if tensor.device.type == self._kind):
            key = self._enter(tensor, component)
            known, size, born = self._live[key]
            if known == component:
                continue
            self._live[key] = (component, size, born)
            # Reassign in the recorded peak too, if the tensor existed then and still does.
            for counts in (self._now, self.peak) if born <= self._peak_at else (self._now,):
                counts[known] -= size
                counts[component] += size

    def close(self) -> None:
        """Remove all hooks."""
        for handle in self._handles:
            handle.remove()

    def _take_gradient(self, parameter: Tensor) -> None:
        if parameter.grad is not None:
            self.phase = "temporaries"  # the backward pass has started: no new tensor is saved for it
            self.claim("gradients", [parameter.grad])

    def _enter(self, tensor: Tensor, component: str) -> int:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._live:
            size = storage.nbytes()
            self._born += 1
            self._live[key] = (component, size, self._born)
            self._now[component] += size
            self._total += size
            weakref.finalize(storage, self._leave, key)
            if self._total > self._most:
                self._most, self._peak_at, self.peak = self._total, self._born, dict(self._now)
        return key

    def _leave(self, key: int) -> None:
        component, size, _ = self._live.pop(key)
        self._now[component] -= size
        self._total -= size


Parts = dict[str, int]
# RSS relative to live tensors on the CPU: glibc's cached blocks and oneDNN's workspace (docs/compare.md).
HEAP_BASE, HEAP_SLACK = 170_000_000, 1.10


def watched(update: TrainStep, batch: Batch, step: Callable[[Batch], object]) -> Parts:
    """Bytes of one step by component, at its peak. The optimizer state must already exist."""
    ledger = Ledger(update.model)
    try:
        ledger.claim("optimizer", update.optimizer.tensors().values())
        if update.ema is not None:
            ledger.claim("optimizer", update.ema.weights.values())
        ledger.claim("batch", batch.tensors().values())
        with ledger:
            step(batch)
        return dict(ledger.peak)
    finally:
        ledger.close()


def stand_in(
    shape: CLIPConfig, batch: int, text_tokens: int, captions_per_image: int = 1, frozen: tuple[int, int] = (0, 0)
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
        tokens[:, -1] = getattr(shape.text_tower, "eot_id", 1)
        fields["tokens"] = tokens
    image_index = rows.repeat_interleave(captions_per_image)
    return Batch(sample_ids=rows, caption_ids=torch.arange(captions), image_index=image_index, **fields)


def predict_memory(
    config: Config, start: Start, kind: Kind, precision: Precision, facts: Facts, batch: int, text_tokens: int
) -> Parts:
    """Memory of the training step by component, predicted with fake tensors, which allocate and compute nothing."""
    several = config.data.captions_per_step or 1
    model = dataclasses.replace(config.model, compile=False)  # the compiler does not support fake tensors
    contrast = config.train.text_contrast
    train = dataclasses.replace(
        config.train,
        batch_size=max(batch, 2),
        micro_batch=min(config.train.micro_batch, batch),
        text_contrast=float(several > 1) if contrast is None else contrast,  # memory does not depend on the weight
    )
    plain = dataclasses.replace(config, model=model, train=train)
    host = Device("cpu", facts)  # fake tensors cannot be on a missing device, and the shapes are the same
    warm_process(facts)  # private operations are probed at first use, which must not be with fake tensors
    with FakeTensorMode(), _WithoutShapes():
        clip = start.build(load_weights=False)
        clip.set_attention("bmm" if config.model.attention == "bmm" else "sdpa")
        clip.set_activation_checkpointing(config.model.grad_checkpointing)
        half: Precision = "bf16" if precision == "fp16" else precision  # the same size; no fp16 on the CPU
        update = TrainStep(clip, plain, host, half, Preprocess(image_size=start.config.image_size))

        update.skip = "never"  # fake tensors have no values to check
        update.blockwise_loss = kind == "cpu"

        def step(samples: Batch) -> None:
            update(samples, 1)

        widths = (clip.image_tower.width, clip.text_tower.width)
        image, text = (0 if trained else width for trained, width in zip(start.trainable, widths, strict=True))
        samples = stand_in(start.config, batch, text_tokens, several, (image, text))
        step(samples)  # creates the optimizer state
        parts = watched(update, samples, step)
    if kind != "cpu" and not config.model.grad_checkpointing:
        chunk = config.train.micro_batch if 0 < config.train.micro_batch < batch else batch
        parts["activations"] += kept_by_mlp(start, chunk, several * text_tokens, 4 if precision == "fp32" else 2)
    return parts


def predicted_peak(parts: Parts, kind: Kind, process: int, data: int) -> Parts:
    """The peak that the user sees: on the CPU it includes the process, its data and allocator overhead."""
    if kind != "cpu":
        return parts
    tensors = sum(parts.values())
    return {"process": process, "data": data, **parts, "rest": int(HEAP_BASE + (HEAP_SLACK - 1) * tensors)}


def tensor_limit(limit: float, kind: Kind, process: int, data: int) -> float:
    """Bytes left for the tensors of a step within a limit: the inverse of `predicted_peak`."""
    return limit if kind != "cpu" else (limit - process - data - HEAP_BASE) / HEAP_SLACK


class _WithoutShapes(TorchDispatchMode):
    """Provides the output shape of oneDNN's fused linear layer, a private operation without a shape rule in torch."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.name().startswith("mkldnn::_linear_pointwise"):
            weight = args[2] if func.name().endswith(".binary") else args[1]
            return args[0].new_empty(*args[0].shape[:-1], weight.shape[0])
        return func(*args, **(kwargs or {}))


@functools.cache
def warm_process(facts: Facts) -> int:
    """Bytes of this process after a toy training step, which loads the libraries' code pages."""
    host, state = Device("cpu", facts), torch.get_rng_state()
    toy = with_fields(
        CLIPConfig(),
        image_size=32,
        vision_width=32,
        vision_layers=1,
        vision_heads=2,
        text_width=32,
        text_layers=1,
        text_heads=2,
        vocab_size=64,
        embed_dim=32,
    )
    kinds: tuple[Precision, ...] = ("fp32", "bf16")
    for kind in kinds:
        update = TrainStep(build_clip(toy), Config(), host, kind, Preprocess(image_size=32))
        update(stand_in(toy, 4, 16), 1)
    torch.set_rng_state(state)
    return int(psutil.Process().memory_info().rss)


def kept_by_mlp(start: Start, batch: int, text_tokens: int, size: int) -> int:
    """Bytes of the MLP activations of our towers, which accelerators store and the CPU recomputes."""
    towers: Any = zip((start.config.image_tower, start.config.text_tower), start.trainable, strict=True)
    numbers = 0.0
    for tower, trained in towers:
        if trained and tower.kind in ("vit", "transformer"):
            tokens = tower.tokens if tower.kind == "vit" else text_tokens
            numbers += tower.layers * tokens * tower.width * tower.mlp_ratio
    return int(batch * numbers * size)


@dataclass(frozen=True)
class Forecast:
    """Bytes as a function of batch size: linear for activations, quadratic for logits, at least that of a batch of two.

    Below some batch size the peak is in the optimizer and stays constant.
    """

    least: float
    fixed: float
    per_pair: float
    square: float = 0.0

    def total(self, batch: int) -> float:
        """Bytes of the step's tensors for a batch size."""
        return max(self.least, self.fixed + self.per_pair * batch + self.square * batch * batch)

    def largest(self, limit: float, most: int) -> int:
        """The largest batch size, up to `most`, whose step stays within a limit; 0 if none does."""
        if self.total(most) <= limit:
            return most
        low, high = 0, most
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.total(middle) <= limit else (low, middle)
        return low


def forecast(trace: Callable[[int], Parts], like: Forecast | None = None) -> Forecast:
    """Fit a forecast to predicted steps; `like` is a forecast with the same logits and optimizer."""
    low, middle, high = 128, 256, 512
    second, third = (float(sum(trace(batch).values())) for batch in (middle, high))
    if like is None:
        first, least = (float(sum(trace(batch).values())) for batch in (low, 2))
        bend = (third - second) / (high - middle) - (second - first) / (middle - low)
        square = max(0.0, bend / (high - low))
    else:
        least, square = like.least, like.square
    slope = max(0.0, (third - second) / (high - middle) - square * (high + middle))
    return Forecast(least, third - slope * high - square * high**2, slope, square)


def tracer(config: Config, start: Start, kind: Kind, precision: Precision, facts: Facts, text_tokens: int) -> Any:
    """`predict_memory` as a cached function of the batch size."""
    return functools.cache(lambda batch: predict_memory(config, start, kind, precision, facts, batch, text_tokens))
