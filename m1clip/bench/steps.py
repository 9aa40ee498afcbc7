"""Training steps that `compare` measures: configurations, results, and the cost model fitted to
them.
"""

import functools
import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np

from m1clip.config import Config, ModelConfig
from m1clip.data.captions import tokenize_captions
from m1clip.data.synthetic.source import SyntheticSource
from m1clip.hardware.choices import MAX_OTHERS
from m1clip.hardware.device import Kind, Precision
from m1clip.hardware.machine_info import MachineInfo
from m1clip.hardware.timing import Timing
from m1clip.io import parse_json, read_small, user_cache, write_json
from m1clip.model.clip import count_parameters
from m1clip.model.presets import CLIPConfig, clip_config, flops_per_pair, preset, with_fields
from m1clip.optimizers import DEFAULT_OPTIMIZER
from m1clip.text.tokenizers import LETTERS, make_tokenizer
from m1clip.training.parity import TOLERANCE
from m1clip.training.spec import DecidedConfig

SAMPLED_SCENES = 64  # synthetic images, to estimate the caption length
MEASURED_RUN_STEPS = 10_000  # of the run whose steps are measured: its first ones are in the warmup
ASSUMED_GEMM_FRACTION = 0.5  # of the GEMM rate, for a model that was not measured


@dataclass(frozen=True)
class Configuration:
    """A model at a batch size on a device, and how the training step is computed there."""

    model: str
    batch_size: int
    device: Kind
    precision: Precision
    cuda_graph: bool = False
    compile: bool = False
    threads: int = 0  # 0: one per physical core
    grad_checkpointing: bool = False
    optimizer: str = DEFAULT_OPTIMIZER

    @property
    def variant(self) -> str:
        """Everything but model and batch size, as text."""
        options = {
            "compiled": self.compile,
            "CUDA graph": self.cuda_graph,
            f"{self.threads} thread{'s' * (self.threads > 1)}": self.threads,
            "gradient checkpointing": self.grad_checkpointing,
        }
        return " ".join(
            [self.device, self.precision, *(name for name, on in options.items() if on)]
        )

    @property
    def label(self) -> str:
        """A name that is unique within a comparison."""
        return f"{self.model}, batch {self.batch_size}, {self.variant}"

    @property
    def is_default(self) -> bool:
        """Whether this is the default configuration of its model, batch size, device and
        precision.
        """
        return all(
            getattr(self, name) == value
            for name, value in _how(Config(), self.device, self.precision).items()
        )

    @classmethod
    def of(cls, config: DecidedConfig) -> Self:
        """How `train` computes the step of a run."""
        train = config.train
        job = (config.model.name, train.batch_size, train.device, train.precision)
        return cls(
            *job, optimizer=config.optim.optimizer, **_how(config, train.device, train.precision)
        )

    def options(self) -> dict[str, Any]:
        """The options of `train` whose step this is.

        One image is measured with the settings of two.
        """
        return {**asdict(self), "batch_size": max(2, self.batch_size), "steps": MEASURED_RUN_STEPS}


def _how(config: Config, device: str, precision: str) -> dict[str, Any]:
    """The fields of a configuration that say how a step is computed on a device."""
    return {
        # The loss scaler of fp16 cannot be captured.
        "cuda_graph": config.model.cuda_graph and device == "cuda" and precision != "fp16",
        "compile": config.model.compile,
        "threads": config.train.threads,
        "grad_checkpointing": config.model.grad_checkpointing,
    }


@dataclass(frozen=True)
class Result:
    configuration: Configuration
    parameters: int
    flops: float
    seconds: Timing
    gemm_fraction: float
    peak_bytes: int
    joules_per_step: float | None
    other_load: float | None  # fraction of the CPU used by other programs
    gradient_difference: float | None
    stages: dict[str, float] = field(
        default_factory=dict
    )  # seconds by stage of a synchronized step

    @property
    def spread(self) -> float:
        """How much steps differ: the distance of the quartiles, as a fraction of the median."""
        return (self.seconds.high - self.seconds.low) / self.seconds.median

    @property
    def images_per_second(self) -> float:
        """At the median step time."""
        return self.configuration.batch_size / self.seconds.median

    @property
    def gradient_is_right(self) -> bool:
        """Whether the gradient matches the CPU's in fp32 within the precision's tolerance, or was
        not checked.
        """
        return (self.gradient_difference or 0.0) <= TOLERANCE[self.configuration.precision]


@functools.cache
def model_shape(model: str) -> tuple[CLIPConfig, int]:
    """The model with the vocabulary of its tokenizer, and the length of the longest synthetic
    caption in tokens.
    """
    kind = "clip-bpe-pruned" if model == "tiny" else "bpe"
    if preset(model).vocab_size == len(LETTERS) + 4:
        kind = "char"
    samples = SyntheticSource(32, SAMPLED_SCENES, 1, 1, seed=0).samples("train")
    captions = [caption for sample in samples for caption in sample.captions]
    tokenizer = make_tokenizer(kind, captions)
    shape = clip_config(ModelConfig(name=model), tokenizer)
    longest = int(
        tokenize_captions([tuple(captions)], tokenizer, shape.context_length).lengths.max()
    )
    return shape, min(-(-longest // 8) * 8, shape.context_length)


REDUCED_MODEL = "reduced"  # the name of `reduced_shape`


def reduced_shape() -> CLIPConfig:
    """A very small model of one layer per tower, for 50 steps where a real one takes too long."""
    return with_fields(
        preset("tiny"),
        **{"vision_width": 64, "vision_layers": 1, "vision_heads": 2, "image_size": 32},
        **{"text_width": 64, "text_layers": 1, "text_heads": 2, "context_length": 8},
        **{"vocab_size": 64, "embed_dim": 64},
    )


@functools.cache
def size_of(c: Configuration) -> tuple[int, float]:
    shape, tokens = model_shape(c.model)
    return count_parameters(shape), c.batch_size * flops_per_pair(shape, tokens)


@dataclass(frozen=True)
class CostModel:
    """seconds = fixed + per_parameter * parameters + per_flop * operations."""

    fixed: float
    per_parameter: float
    per_flop: float

    def seconds(self, parameters: float, flops: float) -> float:
        return self.fixed + self.per_parameter * parameters + self.per_flop * flops


def fit(results: Sequence[Result]) -> CostModel | None:
    """Non-negative coefficients with a small relative error.

    None for fewer than three measured steps.
    """
    if len(results) < 3:
        return None
    columns = np.array([[1.0, r.parameters, r.flops] for r in results])
    # Relative error: 10 ms count as much as 10 s.
    columns /= np.array([[r.seconds.median] for r in results])
    size = columns.max(axis=0)  # the columns differ by 12 orders of magnitude
    used = [0, 1, 2]
    while True:
        values = np.linalg.lstsq(columns[:, used] / size[used], np.ones(len(results)), rcond=None)[
            0
        ]
        if (values >= 0).all():
            break
        used.pop(int(values.argmin()))  # a negative cost makes no sense: fit without it
    costs = np.zeros(3)
    costs[used] = values / size[used]
    return CostModel(*costs.tolist())


def crossing(
    first: CostModel, second: CostModel, parameters: float, flops_per_image: float
) -> float | None:
    """The batch size at which two devices take the same time.

    None if one is faster at every batch size.
    """
    start = first.seconds(parameters, 0) - second.seconds(parameters, 0)
    slope = (second.per_flop - first.per_flop) * flops_per_image
    return start / slope if slope and start / slope > 0 else None


def predict(c: Configuration, measured: Sequence[Result]) -> tuple[float, str] | None:
    """Seconds of a step and where they come from.

    None without measured steps of the same variant.
    """
    alike = [
        r
        for r in measured
        if r.configuration.variant == c.variant and r.configuration.optimizer == c.optimizer
    ]
    parameters, flops = size_of(c)
    if same_model := [r for r in alike if r.configuration.model == c.model]:
        near = min(same_model, key=lambda r: abs(r.configuration.batch_size - c.batch_size))
        return (
            near.seconds.median * flops / near.flops,
            f"measured at batch {near.configuration.batch_size}",
        )
    if model := fit(alike):
        return model.seconds(parameters, flops), f"cost model of {len(alike)} measured steps"
    return None


def save_measured(
    facts: MachineInfo, results: Sequence[Result], folder: Path | None = None
) -> None:
    """Save steps measured on this machine.

    A newer measurement of the same configuration replaces the older one.

    What was measured while other programs were busy is not saved.
    """
    quiet = [result for result in results if (result.other_load or 0.0) <= MAX_OTHERS]
    stored = {r.configuration: r for r in [*load_measured(facts, folder), *quiet]}
    try:
        write_json(_path(facts, folder), [asdict(r) for r in stored.values()])
    except OSError:
        return  # the cache folder is not writable; comparison.json has the results


def load_measured(facts: MachineInfo, folder: Path | None = None) -> list[Result]:
    """The steps measured on this machine with this torch version."""
    try:
        values = parse_json(read_small(_path(facts, folder), 2**26))
        return [_result(**value) for value in values]
    except (OSError, ValueError, TypeError):
        return []


def _result(configuration: dict[str, Any], seconds: dict[str, Any], **rest: Any) -> Result:
    return Result(Configuration(**configuration), seconds=Timing(**seconds), **rest)


def _path(facts: MachineInfo, folder: Path | None) -> Path:
    values = json.dumps({**asdict(facts), "python": ""}, sort_keys=True)
    return (
        (folder or user_cache())
        / "compare"
        / f"{hashlib.sha256(values.encode()).hexdigest()[:16]}.json"
    )
