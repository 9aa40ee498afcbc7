"""One way of doing the same training step: what is compared."""

from __future__ import annotations

import dataclasses
from dataclasses import asdict, dataclass
from typing import Any

from m1clip.config import Config, DataConfig, ModelConfig, OptimConfig, TextConfig, TrainConfig
from m1clip.model.presets import preset

PRIOR_ART_ALPHABET = "abcdefghijklmnopqrstuvwxyz ,."  # with the four marks: its vocabulary of 33
PROBE_PAIRS = 64  # pictures drawn for a measurement, at least


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A model and a batch on a device, and how its arithmetic is done there."""

    model: str
    batch: int
    device: str  # cpu, mps, cuda, or hybrid: image tower on the accelerator, text tower on the CPU
    precision: str
    attention: str = "sdpa"
    compile: bool = False
    graph: bool = False  # CUDA: the step is recorded and replayed, as `train` does with a small model
    threads: int = 0  # 0 = one a physical core
    recompute: bool = False
    optimizer: str = "muon"

    @property
    def label(self) -> str:
        """A short name, unique within a comparison: only what differs from the usual is said."""
        words = [self.model, f"batch {self.batch}", self.device, self.precision, self.attention]
        words += ["compiled"] if self.compile else []
        words += ["replayed"] if self.graph else []
        words += [f"{self.threads} thread{'s' * (self.threads > 1)}"] if self.threads else []
        words += ["recompute"] if self.recompute else []
        return " ".join(words)

    @property
    def way(self) -> str:
        """The label without model and batch."""
        return self.label.removeprefix(f"{self.model} batch {self.batch} ")

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)


def text_config(model: str) -> TextConfig:
    """The tokenizer that gives a preset the vocabulary of its table; `tiny` has no fixed one and takes train's."""
    if preset(model).vocab_size == len(PRIOR_ART_ALPHABET) + 4:
        return TextConfig(tokenizer="char", alphabet=PRIOR_ART_ALPHABET)
    return TextConfig(tokenizer="bpe-cut" if model == "tiny" else "bpe")


def config_of(candidate: Candidate, pictures: int) -> Config:
    """The run's config for a candidate, on synthetic pictures."""
    batch = max(candidate.batch, 2)  # batch 1 has no contrast: the worker cuts a batch of 2
    device: Any = candidate.device
    attention: Any = candidate.attention
    return Config(
        model=ModelConfig(
            preset=candidate.model,
            attention_image=attention,
            attention_text=attention,
            recompute=candidate.recompute,
            compile=candidate.compile,
            graph=candidate.graph,
        ),
        text=text_config(candidate.model),
        data=DataConfig(
            train_count=max(pictures, batch), val_count=1, test_count=1, cache="ram", captions_per_step=1
        ),
        optim=OptimConfig(name=candidate.optimizer),  # type: ignore[arg-type]
        train=TrainConfig(
            batch=batch,
            device=device if device != "hybrid" else "cpu",
            precision=candidate.precision,  # type: ignore[arg-type]
            threads=candidate.threads,
            steps=10_000,
        ),
    )


def with_batch(config: Config, batch: int) -> Config:
    """The same run with another batch."""
    return dataclasses.replace(config, train=dataclasses.replace(config.train, batch=max(batch, 2)))
