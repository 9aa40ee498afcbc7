"""What `compare` measures: a model at a batch size on a device, and how the step is computed there."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from m1clip.bench.options import CompareOptions
from m1clip.config import Config, ModelConfig
from m1clip.data.captions import tokenize_captions
from m1clip.data.synthetic.source import SyntheticSource
from m1clip.hardware.device import Kind, Precision, rules
from m1clip.hardware.facts import Facts
from m1clip.hardware.timing import Timing
from m1clip.model.presets import CLIPConfig, clip_config, preset
from m1clip.text.tokenizers import LETTERS, make_tokenizer
from m1clip.training.parity import TOLERANCE

SAMPLED_CAPTIONS = 64  # synthetic images, to estimate the caption length
# The default first; MLX has one kernel, and is always compiled.
ATTENTION: dict[Kind, tuple[str, ...]] = {
    "cpu": ("bmm", "sdpa"),
    "mps": ("sdpa", "bmm"),
    "cuda": ("sdpa", "bmm"),
    "mlx": ("sdpa",),
}


@dataclass(frozen=True)
class Configuration:
    """One configuration of the training step."""

    model: str
    batch_size: int
    device: Kind
    precision: Precision
    attention: str
    cuda_graph: bool = False
    compile: bool = False
    threads: int = 0  # 0: one per physical core
    grad_checkpointing: bool = False
    optimizer: str = "muon"

    @property
    def variant(self) -> str:
        """Everything but model and batch size, as text."""
        words = [self.device, self.precision, self.attention]
        words += ["compiled"] if self.compile else []
        words += ["CUDA graph"] if self.cuda_graph else []
        words += [f"{self.threads} thread{'s' * (self.threads > 1)}"] if self.threads else []
        words += ["gradient checkpointing"] if self.grad_checkpointing else []
        return " ".join(words)

    @property
    def label(self) -> str:
        """A name that is unique within a comparison."""
        return f"{self.model}, batch {self.batch_size}, {self.variant}"

    @property
    def is_default(self) -> bool:
        """Whether these are the defaults of `train` for this device and precision, apart from attention."""
        graph = self.cuda_graph or self.device != "cuda"
        return graph and not (self.compile or self.threads or self.grad_checkpointing)

    def train_config(self) -> Config:
        """The equivalent settings of a run."""
        return Config().changed(**{**asdict(self), "batch_size": max(2, self.batch_size), "steps": 10_000})


@dataclass(frozen=True)
class Result:
    """The measured step of a configuration."""

    configuration: Configuration
    parameters: int
    flops: float
    seconds: Timing
    gemm_fraction: float
    peak_bytes: int | None
    joules_per_step: float | None
    gradient_difference: float | None
    warnings: list[str]

    @property
    def images_per_second(self) -> float:
        """At the median step time."""
        return self.configuration.batch_size / self.seconds.median

    @property
    def gradient_is_right(self) -> bool:
        """Whether the gradient matches the CPU's in fp32 within the precision's tolerance, or was not checked."""
        return (self.gradient_difference or 0.0) <= TOLERANCE[self.configuration.precision]


@functools.cache
def model_shape(model: str) -> tuple[CLIPConfig, int]:
    """The model with the vocabulary of its tokenizer, and the length of the longest synthetic caption in tokens."""
    kind = "bpe-cut" if model == "tiny" else "bpe"
    if preset(model).vocab_size == len(LETTERS) + 4:
        kind = "char"
    samples = SyntheticSource(32, SAMPLED_CAPTIONS, 1, 1, seed=0).samples("train")
    captions = [caption for sample in samples for caption in sample.captions]
    tokenizer = make_tokenizer(kind, captions)
    shape = clip_config(ModelConfig(name=model), tokenizer)
    longest = int(tokenize_captions([tuple(captions)], tokenizer, shape.context_length).lengths.max())
    return shape, min(-(-longest // 8) * 8, shape.context_length)


def default_configuration(model: str, batch_size: int, device: Kind, precision: Any, optimizer: str) -> Configuration:
    """The default configuration of `train`."""
    attention, graph = ATTENTION[device][0], device == "cuda"
    return Configuration(model, batch_size, device, precision, attention, graph, optimizer=optimizer)


def precisions_of(facts: Facts, device: Kind, asked: Sequence[str]) -> list[Precision]:
    """The precisions to measure on a device, the likely fastest first; fp16 only if requested."""
    possible = rules(device, facts).precisions[::-1]
    return [name for name in possible if (name in asked if asked else name != "fp16")]


def groups(facts: Facts, options: CompareOptions, devices: Sequence[Kind]) -> list[list[Configuration]]:
    """Configurations to measure in alternation, grouped by model and batch size from small to large.

    Every device and precision; for a single model also one change at a time from each device's likely fastest.
    """
    found = [
        [
            default_configuration(model, batch_size, device, precision, options.optimizer)
            for device in devices
            for precision in precisions_of(facts, device, options.precision)
        ]
        for model in options.model
        for batch_size in sorted(options.batch_size)
    ]
    if len(options.model) == 1:
        found[0] += list(_one_change_each(facts, found[0]))
    return found


def _one_change_each(facts: Facts, base: list[Configuration]) -> Iterator[Configuration]:
    for c in base:
        for kind in ATTENTION[c.device][1:]:
            yield dataclasses.replace(c, attention=kind)
    for likely in {c.device: c for c in reversed(base)}.values():
        yield dataclasses.replace(likely, grad_checkpointing=True)
        if likely.device == "cpu" and facts.performance_cores > 1:
            yield dataclasses.replace(likely, threads=facts.performance_cores // 2)
        if likely.device == "cuda":
            yield dataclasses.replace(likely, cuda_graph=False)
        if likely.device != "mlx":
            yield dataclasses.replace(likely, compile=True)  # last: compiling takes a minute or two
