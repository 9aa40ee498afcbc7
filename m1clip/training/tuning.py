"""How to adapt a trained model: heads only, LoRA or all blocks, by images, time and memory.

`choose_tuning` is a pure rule. Its numbers come from the study of docs/lab-finetune.md, on a small
model.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from m1clip.formatting import plural
from m1clip.hardware.device import Kind
from m1clip.model.presets import CLIPConfig, TextTowerConfig, VisionTowerConfig, flops_per_pair

ENOUGH_FOR_TOWERS = 1_000  # images; with fewer, trained towers gain no more than heads
# Images, from which all of a convolutional tower is trained, not its last stages (not measured).
ENOUGH_FOR_CONVOLUTIONS = 4_000
LAST_STAGES_FRACTION = 4  # a fourth of the weights
LORA_RANK = 8
DEFAULT_MINUTES = 30.0  # that fine-tuning may take if the user gives no duration
LEAST_EPOCHS = 3  # a shorter fine-tuning changes little
TEXT_TOKENS = 32  # of a usual caption
PRETRAINED_FLOPS = (
    8e9  # of training EfficientNet-Lite0, -Lite2 and MiniLM on an image and its caption
)
CPU_CORE_FLOPS = 3e10  # per second, of a usual CPU core
GPU_FLOPS: dict[str, float] = {"cuda": 2e13, "mps": 2e12, "mlx": 2e12}
WEIGHT_BYTES = 4  # of a float32
PROCESS_BYTES = 1.5e9  # of Python, torch, data and the activations of a micro-batch
COPIES = 2  # of the weights: those of the model, and the initial ones


class ModelSize(NamedTuple):
    """What the rule needs to know of a trained model."""

    parameters: int
    flops_per_image: float  # of training on an image and its caption
    has_linear_layers: bool  # in both towers, for LoRA


class Tuning(NamedTuple):
    """How to adapt a model, and why."""

    recipe: Literal["frozen", "finetune"]
    trained_part: str
    reason: str
    settings: dict[str, int]  # by flat name


def model_size(shape: CLIPConfig, parameters: int) -> ModelSize:
    """The size of a model of this shape."""
    image, text = shape.image_tower, shape.text_tower
    if isinstance(image, VisionTowerConfig) and isinstance(text, TextTowerConfig):
        flops = flops_per_pair(shape, min(TEXT_TOKENS, text.context_length))
        return ModelSize(parameters, flops, True)
    return ModelSize(parameters, PRETRAINED_FLOPS, False)


def flops_per_second(device: Kind | str, cores: int) -> float:
    """A rough speed of a device; the time of a run is measured later."""
    return GPU_FLOPS.get(device.partition("+")[0], CPU_CORE_FLOPS * cores)


def choose_tuning(
    images: int,
    minutes: float | None,
    memory: float,
    speed: float,
    size: ModelSize,
    trained_bytes: int,
) -> Tuning:
    """What to train of a model on `images`, in `minutes` (None: not limited), `memory` bytes, at
    `speed` FLOPs/s, with an optimizer that needs `trained_bytes` per trained weight.
    """
    allowed = DEFAULT_MINUTES if minutes is None else minutes
    needed = LEAST_EPOCHS * images * size.flops_per_image / speed / 60
    heads = "heads on the cached features of both towers"
    if images < ENOUGH_FOR_TOWERS:
        few = f"{plural(images, 'image')} are too few to train the towers"
        return Tuning("frozen", heads, few, {})
    if needed > allowed:
        limit = f"--minutes {minutes:g}" if minutes is not None else f"{allowed:g} minutes"
        slow = (
            f"{LEAST_EPOCHS} epochs of the towers would take about {needed:,.0f} minutes, more than"
            f" {limit}"
        )
        return Tuning("frozen", heads, slow, {})
    base = PROCESS_BYTES + COPIES * WEIGHT_BYTES * size.parameters
    full = base + trained_bytes * size.parameters
    last_needs = base + trained_bytes * size.parameters / LAST_STAGES_FRACTION
    shown = f"{memory / 1e9:.1f} GB"
    enough = f"{plural(images, 'image')} and {shown} of memory are enough"
    if full <= memory and (size.has_linear_layers or images >= ENOUGH_FOR_CONVOLUTIONS):
        return Tuning("finetune", "all blocks of both towers", enough, {})
    if size.has_linear_layers and base <= memory:
        why = f"all blocks need about {full / 1e9:.1f} GB, more than {shown}"
        return Tuning("finetune", f"LoRA of rank {LORA_RANK}", why, {"lora": LORA_RANK})
    if not size.has_linear_layers and last_needs <= memory:
        trained_part = "the text tower and the last stages of the image tower"
        return Tuning("finetune", trained_part, enough, {})
    return Tuning("frozen", heads, f"training the towers needs more than {shown} of memory", {})
