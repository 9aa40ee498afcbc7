"""The whole of a run as frozen, checked dataclasses. The line under a field is its --help."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import Annotated, Literal

from cyclopts import Group, Parameter

from m1clip.config_guard import GuardConfig
from m1clip.config_transfer import TransferConfig
from m1clip.errors import UserError
from m1clip.plain import check_limits
from m1clip.units import amount, number_or_auto, steps_or_seconds, steps_or_time

Choice = Literal["auto", "bmm", "sdpa"]
MAX_WORKERS, MAX_THREADS = 256, 1024
MAX_CAPTIONS, MAX_SYNTHETIC = 1000, 10**7
DURATIONS = ("minutes", "epochs", "steps")  # of which a run has one
COMMON = Group("Common", sort_key=0)  # what most people need stands first in --help


def _check(ok: bool, message: str) -> None:
    if not ok:
        raise UserError(message)


def _check_finite(section: str, config: DataConfig | OptimConfig | TrainConfig) -> None:
    """Any number but infinity and NaN, which TOML and the command line can both say."""
    for item in fields(config):
        value = getattr(config, item.name)
        finite = not isinstance(value, float) or math.isfinite(value)
        _check(finite, f"{section}.{item.name} must be a finite number, not {value}")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A preset from the table, and what to change in it."""

    preset: Annotated[str, Parameter(alias="--model", group=COMMON)] = "tiny"
    "Size from the table: tiny, small, documented, ViT-S-16, ViT-B-32, ViT-B-16, ViT-L-14, 200M, 500M, 1B."
    image_size: int | None = None
    "Side of the square picture in pixels; must be a multiple of the patch size."
    patch_size: int | None = None
    "Side of one patch in pixels."
    vision_width: int | None = None
    "Width of the image tower."
    vision_layers: int | None = None
    "Blocks of the image tower."
    vision_heads: int | None = None
    "Attention heads of the image tower."
    text_width: int | None = None
    "Width of the text tower."
    text_layers: int | None = None
    "Blocks of the text tower."
    text_heads: int | None = None
    "Attention heads of the text tower."
    context_length: int | None = None
    "Longest caption in tokens, start and end marks included."
    embed_dim: int | None = None
    "Length of the vectors that pictures and captions share."
    mlp_ratio: float | None = None
    "Hidden width of the MLP as a multiple of the tower's width."
    pooling: Literal["cls", "mean"] | None = None
    "Image feature: a class token, or the mean over patches."
    positions: Literal["learned", "sincos"] | None = None
    "Patch positions: learned, or fixed 2-D sine and cosine."
    activation: Literal["gelu", "quick_gelu"] | None = None
    "GELU, or OpenAI's quick GELU for their original weights."
    vision_pre_norm: bool | None = None
    "A layer norm before the first block of the image tower."
    stem: Literal["patch", "conv"] | None = None
    "How pixels become patches: one product a patch, as in CLIP; or convolutions, which learn more from few pictures."
    patch_bias: bool | None = None
    "A bias on the patch layer."
    projection_bias: bool | None = None
    "A bias on the two projections."
    dropout: float | None = None
    "Dropout on each residual branch while training."
    init: Literal["clip", "zero"] | None = None
    "Start values: CLIP's, or the same with residual branches at zero."
    attention_image: Choice = "auto"
    "Attention of the image tower; auto measures both for this device, precision and shape."
    attention_text: Choice = "auto"
    "Attention of the text tower; auto measures both."
    recompute: bool = False
    "Gradient checkpointing: less memory, about a third more work, the same result."
    compile: bool = False
    "torch.compile the model: slow to start, often faster afterwards."
    graph: bool = True
    "CUDA: record a small model's step once and replay it; the host then no longer limits the speed."

    def __post_init__(self) -> None:
        check_limits(self, "model.")


@dataclass(frozen=True, kw_only=True)
class TextConfig:
    """How captions become tokens."""

    tokenizer: Literal["char", "bpe", "bpe-cut"] = "bpe-cut"
    "char; bpe (CLIP's 49,408 pieces); or bpe-cut (the pieces that the training captions use)."
    alphabet: str | None = None
    "Fixed alphabet for the char tokenizer; else the characters of the training captions."


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Where pictures and captions come from, and how they reach the model."""

    source: Annotated[tuple[str, ...], Parameter(alias="--data", negative="", group=COMMON)] = ("synthetic",)
    "synthetic, or a path to your own pictures and captions; give it again to mix: b:0.3 takes 30% of b."
    train_count: int = 8000
    "Synthetic only: pictures to train on."
    val_count: int = 600
    "Synthetic only: held-out pictures for validation, all of combinations never trained on."
    test_count: int = 600
    "Synthetic only: held-out pictures for the final figure."
    captions_per_image: int = 5
    "Synthetic only: paraphrases of each picture."
    image_column: str | None = None
    "Table only: name of the column with the picture's path (else found by its name)."
    caption_column: Annotated[tuple[str, ...], Parameter(negative="")] = ()
    "Table only: names of the caption columns (else found by name)."
    cache: Literal["auto", "ram", "disk", "off"] = "auto"
    "Decode once and keep pictures in memory, on disk, or not at all; auto decides by size."
    cache_dir: str | None = None
    "Folder for the disk cache; else beside the data, or in the user's cache folder."
    max_bad: float = 0.10
    "Stop before training when a larger share of the pictures than this cannot be read."
    read_timeout: float = 60.0
    "Seconds to wait for one picture, which a lost network disk never gives; then it is unreadable. 0 = for ever."
    workers: int = 0
    "Processes that prepare batches; 0 prepares them in the training process."
    captions_per_step: int | None = None
    "Captions of each picture in a step; the picture is computed once. Default: all that most pictures have, at most 5."
    crop_min: float | None = None
    "Random crops keep at least this share of the area; 1 = none. Default: 0.6; 1 where captions tell left from right."
    flip: float | None = None
    "Probability of a mirrored picture. Default: 0.5; 0 where captions tell left from right."
    colour: float | None = None
    "Strength of random brightness and contrast. Default: 0.2, synthetic 0 (colours are words there)."

    patch_dropout: float | None = None
    "Share of the patches that a step leaves out: less to learn by heart. Default: 0.5; synthetic, conv, --init 0."
    word_dropout: float | None = None
    "Share of a caption's tokens that a step leaves out. Default: 0.3; synthetic, char, --init, text tower of others 0."

    def __post_init__(self) -> None:
        _check_finite("data", self)
        _check(len(self.source) > 0, "data.source is empty: give a path or 'synthetic'")
        for name in (*self.source, self.cache_dir or ""):
            # It could not be written into the run's config.toml, and so the run could not be continued.
            readable = not any(0xD800 <= ord(letter) <= 0xDFFF for letter in name)
            _check(readable, f"{name!a}: the name is not valid UTF-8; rename the folder")
        several = self.captions_per_step
        fine = several is None or 1 <= several <= MAX_CAPTIONS
        _check(fine, f"data.captions_per_step must lie between 1 and {MAX_CAPTIONS:,}, not {several}")
        _check(self.read_timeout >= 0, f"data.read_timeout must be 0 or more, not {self.read_timeout}")
        in_range = 0 <= self.workers <= MAX_WORKERS
        _check(in_range, f"data.workers must lie between 0 and {MAX_WORKERS}, not {self.workers}")
        for name in ("train_count", "val_count", "test_count", "captions_per_image"):
            value, most = getattr(self, name), MAX_CAPTIONS if name == "captions_per_image" else MAX_SYNTHETIC
            _check(1 <= value <= most, f"data.{name} must lie between 1 and {most:,}, not {value}")
        for name in ("max_bad", "crop_min", "flip", "colour", "patch_dropout", "word_dropout"):
            value = getattr(self, name)
            _check(value is None or 0 <= value <= 1, f"data.{name} must lie between 0 and 1, not {value}")
        _check(self.crop_min is None or self.crop_min > 0, "data.crop_min must be above 0")
        _check(
            self.patch_dropout != 1,
            "data.patch_dropout must be below 1: a picture without patches shows nothing",
        )


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """How weights move."""

    name: Literal["muon", "adamw"] = "muon"
    "muon (hidden matrices by Muon, the rest by AdamW), or adamw for all."
    lr: float = 5e-4
    "Peak learning rate of AdamW."
    muon_lr: float = 0.01
    "Peak learning rate of Muon."
    weight_decay: float = 0.1
    "AdamW's decay of matrices; norms, biases and the temperature never decay."
    muon_weight_decay: float = 0.3
    "Muon's decay."
    muon_split_qkv: bool = False
    "Muon makes queries, keys and values orthogonal each for itself, not as one matrix."
    muon_quick: bool = True
    "Muon with four cheaper iterations, equally near to orthogonal, instead of the five of torch.optim.Muon."
    beta1: float = 0.9
    "AdamW's first moment."
    beta2: float = 0.98
    "AdamW's second moment."
    eps: float = 1e-6
    "AdamW's epsilon."
    warmup: float = 0.05
    "Warm-up: below 1 a share of all steps, else a number of steps."
    lr_end: float = 0.0
    "Where the cosine ends, as a share of the peak."
    layer_decay: float = 1.0
    "Each block of a tower moves at this share of the rate of the block above it; 1 = all alike."
    grad_clip: float = 1.0
    "Largest gradient norm; 0 = no clipping."
    ema: float = 0.0
    "Decay of an averaged copy of the weights that is evaluated and saved instead; 0 = off."

    def __post_init__(self) -> None:
        _check_finite("optim", self)
        for name in ("lr", "muon_lr", "eps"):
            _check(getattr(self, name) > 0, f"optim.{name} must be above 0, not {getattr(self, name)}")
        for name in ("weight_decay", "muon_weight_decay", "warmup", "grad_clip"):
            _check(getattr(self, name) >= 0, f"optim.{name} must be 0 or more, not {getattr(self, name)}")
        for name in ("beta1", "beta2", "ema"):
            value = getattr(self, name)
            _check(0 <= value < 1, f"optim.{name} must lie in [0, 1), not {value}")
        _check(0 <= self.lr_end <= 1, f"optim.lr_end must lie between 0 and 1, not {self.lr_end}")
        decay = self.layer_decay
        _check(0 < decay <= 1, f"optim.layer_decay must be above 0 and at most 1, not {decay}")
        whole = self.warmup < 1 or self.warmup == int(self.warmup)
        _check(whole, f"optim.warmup is a share below 1 or a whole number of steps, not {self.warmup}")


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How long, on what, with which objective."""

    minutes: Annotated[float | None, Parameter(alias="--minutes", group=COMMON)] = None
    "Train for about this long: turned into steps once, after a short calibration."
    epochs: Annotated[float | None, Parameter(alias="--epochs", group=COMMON)] = None
    "Train for this many passes over the pictures."
    steps: Annotated[int | None, Parameter(alias="--steps", group=COMMON)] = None
    "Train for this many steps."
    batch: Annotated[int | None, Parameter(alias="--batch", group=COMMON, converter=number_or_auto)] = None
    "Pairs in a step, each other's negatives. Default: the recipe's, fewer for few images. auto (0): all that fit."
    memory: Annotated[str | None, Parameter(alias="--memory", group=COMMON)] = None
    "Stay within this much, such as 8GB: by a smaller batch (with --batch auto), recomputation, or chunks."
    chunk: Annotated[int, Parameter(alias="--chunk", group=COMMON)] = 0
    "Pairs encoded at a time: the same step as with the whole --batch at once, in less memory; 0 = all at once."
    objective: Literal["infonce", "sigmoid", "multi"] = "multi"
    "infonce; sigmoid (SigLIP); or multi: infonce where captions of one picture, or equal ones, are no negatives."
    text_contrast: float | None = None
    "Weight of a second loss: captions of one picture shall be near each other. Default: 0.2 where a step has several."
    label_smoothing: float = 0.0
    "Share of the target spread over the whole batch (infonce, multi)."
    device: Annotated[Literal["auto", "cpu", "mps", "cuda"], Parameter(alias="--device", group=COMMON)] = (
        "auto"
    )
    "auto chooses; a named device that is missing is an error."
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    "Arithmetic of the towers; auto takes bf16 where it is measured faster."
    threads: int = 0
    "CPU threads; 0 = one for each physical core."
    log_every: int | None = None
    "Steps between two lines of the run log. Default: at least 50 lines a run, at most every 10 steps."
    log: Annotated[Literal["file", "tensorboard"], Parameter(alias="--log", group=COMMON)] = "file"
    "Where the figures go: the run's own run.jsonl, or TensorBoard too (pip install 'm1clip[log]')."
    analysis_every: int | None = None
    "Steps between two looks at each layer's gradients; default: forty times a run. 0 = no analysis at all."
    eval_every: int | None = None
    "Steps between two evaluations on the validation split; default: five times a run. 0 = at the end only."
    patience: int = 0
    "Stop after this many evaluations without a better mean recall (class folders: top-1 accuracy); 0 = never."
    save_every: Annotated[
        int | str | None, Parameter(alias="--save-every", group=COMMON, converter=steps_or_time)
    ] = None
    "A checkpoint after so many steps, or so much time: 500, 30s, 10m, 1h. Default: with each evaluation."
    keep: int = 2
    "Checkpoints to keep, the newest; the best model is always kept too, in best/."

    def __post_init__(self) -> None:
        _check_finite("train", self)
        given = [name for name in DURATIONS if getattr(self, name) is not None]
        _check(
            len(given) <= 1,
            f"give one of --minutes, --epochs and --steps, not {' and '.join('--' + g for g in given)}",
        )
        for name in given:
            _check(getattr(self, name) > 0, f"train.{name} must be above 0, not {getattr(self, name)}")
        _check(
            not self.batch or self.batch >= 2,
            f"train.batch must be at least 2 (a contrast needs two pairs), or auto, not {self.batch}",
        )
        for name in ("threads", "patience", "chunk"):
            _check(getattr(self, name) >= 0, f"train.{name} must be 0 or more, not {getattr(self, name)}")
        _check(
            self.threads <= MAX_THREADS, f"train.threads must be at most {MAX_THREADS}, not {self.threads}"
        )
        if self.memory is not None:
            amount(self.memory, "B", "--memory")
        if self.save_every is not None:
            steps_or_seconds(self.save_every, "train.save_every")
        part = not self.batch or self.chunk <= self.batch
        _check(part, f"--chunk {self.chunk} is more than --batch {self.batch}: it is a part of it")
        for name in ("log_every", "keep"):
            value = getattr(self, name)
            _check(value is None or value >= 1, f"train.{name} must be at least 1, not {value}")
        for name in ("eval_every", "analysis_every"):
            value = getattr(self, name)
            _check(value is None or value >= 0, f"train.{name} must be 0 or more, not {value}")
        _check(
            0 <= self.label_smoothing < 1,
            f"train.label_smoothing must lie in [0, 1), not {self.label_smoothing}",
        )
        contrast = self.text_contrast
        _check(contrast is None or contrast >= 0, f"train.text_contrast must be 0 or more, not {contrast}")
        smooth_sigmoid = self.objective == "sigmoid" and self.label_smoothing > 0
        _check(not smooth_sigmoid, "train.label_smoothing goes with infonce and multi, not with sigmoid")
        half_cpu = self.device == "cpu" and self.precision == "fp16"
        blind = self.patience > 0 and self.eval_every == 0
        _check(not blind, "train.patience counts evaluations, and train.eval_every 0 makes none on the way")
        _check(not half_cpu, "train.precision fp16 has no fast path on the CPU: use bf16, fp32 or auto")


@dataclass(frozen=True, kw_only=True)
class Config:
    """All settings of a run."""

    model: ModelConfig = field(default_factory=ModelConfig)
    text: TextConfig = field(default_factory=TextConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    transfer: TransferConfig = field(default_factory=TransferConfig)
    guard: GuardConfig = field(default_factory=GuardConfig)
    seed: Annotated[int, Parameter(alias="--seed", group=COMMON)] = 0
    "The one number behind order, crops, captions and start values."

    def __post_init__(self) -> None:
        _check(0 <= self.seed < 2**31, f"seed must lie in [0, 2^31), not {self.seed}")
