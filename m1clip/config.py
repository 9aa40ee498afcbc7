"""The whole of a run as frozen, checked dataclasses. The line under a field is its --help."""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import tomllib
import types
import typing
from dataclasses import dataclass, field, fields
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from cyclopts import Group, Parameter

from m1clip.errors import UserError
from m1clip.formatting import amount, number_or_auto, steps_or_seconds, steps_or_time
from m1clip.io import check_limits, read_small

COMMON = Group("Common", sort_key=0)
MOST_VIEWS = 6


@dataclass(frozen=True, kw_only=True)
class TransferConfig:
    """Where a model starts: from random weights, or on pretrained towers that stand still."""

    recipe: Annotated[Literal["scratch", "frozen", "finetune", "auto"], Parameter(alias="--recipe", group=COMMON)] = (
        "scratch"
    )
    "scratch; frozen: pretrained towers, features once, heads trained; finetune: then the towers too; auto: decides."
    image_tower: Annotated[str, Parameter(alias="--image-tower")] = "efficientnet-lite0"
    "frozen: efficientnet-lite0; a vision model of transformers (folder or hub name); timm:NAME; vit: ours, trained."
    text_tower: Annotated[str, Parameter(alias="--text-tower")] = "minilm"
    "frozen: minilm (all-MiniLM-L6-v2); a text model of transformers (folder or hub name); text: ours, trained."
    download: bool = False
    "Fetch a tower that is named and not on this machine from the hub; nothing is ever fetched without this."
    head: Literal["linear", "mlp", "adapter"] = "adapter"
    "frozen: what is trained on each tower: a projection, an MLP, or a projection and a residual MLP beside it."
    hidden: int = 512
    "frozen: hidden width of the head."
    embed_dim: int = 256
    "frozen: length of the vectors that images and captions share."
    dropout: float = 0.3
    "frozen: dropout of the head's hidden layer; a third of it on the features."
    image_size: int = 224
    "frozen: images are scaled to this square for the tower; a multiple of 32."
    context_length: int = 64
    "frozen: longest caption in tokens."
    views: int = 1
    "frozen: looks at each training image, mirrored and cropped ones after the first; each takes as long as that."

    init: Annotated[str | None, Parameter(alias="--init", group=COMMON)] = None
    "Fine-tune this model: a run, a model folder, or one of open_clip or Hugging Face."
    activation: Literal["gelu", "quick_gelu"] | None = None
    "init: the activation of open_clip weights that come without a config."
    vocabulary: Literal["keep", "cut"] = "keep"
    "init: keep the model's vocabulary, or cut it to the pieces that the training captions use."
    train_image: int = -1
    "init: blocks of the image tower to train, counted from the last; -1 = all, 0 = none."
    train_text: int = -1
    "init: the same for the text tower. Of a model on frozen towers, a tower with 0 is read from its kept features."
    lora_rank: int = 0
    "init: train only a product of this rank beside each linear layer of the towers; 0 = off."
    lora_alpha: float = 16.0
    "init: weight of that product, over the rank."
    lora_targets: Annotated[tuple[str, ...], Parameter(negative="")] = ()
    "init: only on layers whose name ends so, such as attn.qkv; default: all."
    teacher: Annotated[str | None, Parameter(alias="--teacher")] = None
    "Learn from this model too (any that --init takes): what it thinks of the samples of a step is a second target."
    teacher_weight: float = 0.5
    "Share of that second target in the loss."

    wise: Annotated[str, Parameter(alias="--wise", group=COMMON)] = "off"
    "init: mix old and new weights at the end: 0.5 takes half of each, search tries a few on validation."
    base: Annotated[tuple[str, ...], Parameter(alias="--base", negative="", group=COMMON)] = ()
    "init: a set that must not be forgotten: its recall (zero-shot top-1 of class folders) at each evaluation."

    def __post_init__(self) -> None:
        check_limits(self, "transfer.")
        if self.wise not in ("off", "search"):
            try:
                fine = 0 <= float(self.wise) <= 1
            except ValueError:
                fine = False
            if not fine:
                raise UserError(f"--wise is off, search, or a number from 0 to 1, not {self.wise}")
        if not 0 < self.teacher_weight <= 1:
            raise UserError(f"transfer.teacher_weight must be above 0 and at most 1, not {self.teacher_weight}")
        if self.lora_rank < 0 or min(self.train_image, self.train_text) < -1:
            raise UserError("transfer.lora_rank must be 0 or more, train_image and train_text -1 or more")
        if self.init is not None and self.recipe == "frozen":
            raise UserError(f"--init goes without --recipe {self.recipe}: it is a recipe of its own")
        for name in ("hidden", "embed_dim", "image_size", "context_length"):
            if getattr(self, name) < 1:
                raise UserError(f"transfer.{name} must be at least 1, not {getattr(self, name)}")
        if not 1 <= self.views <= MOST_VIEWS:
            raise UserError(f"transfer.views must lie between 1 and {MOST_VIEWS}, not {self.views}")
        if not 0 <= self.dropout < 1:
            raise UserError(f"transfer.dropout must lie in [0, 1), not {self.dropout}")


@dataclass(frozen=True, kw_only=True)
class GuardConfig:
    """What a run does when something goes wrong."""

    skip_limit: int = 8
    "Updates that are not finite are skipped; after so many in a row the run goes back to its last checkpoint."
    rollbacks: int = 3
    "How often a run may go back so; then it stops and says why. 0 = it stops at once."
    rollback_rate: float = 0.5
    "The learning rate is multiplied by this each time the run goes back."
    spike: float = 8.0
    "Warn of a loss that stays so many of its usual deviations above its recent median; 0 = never."
    on_save_error: Literal["stop", "go-on"] = "stop"
    "A checkpoint, best model or log line that cannot be written (disk full): stop, or warn, train on and try again."
    save_aside: Literal["auto", "never"] = "auto"
    "Write checkpoints beside the training where a copy takes little of the free memory (a fiftieth), or never."

    def __post_init__(self) -> None:
        for name, least in (("skip_limit", 1), ("rollbacks", 0)):
            value = getattr(self, name)
            if value < least:
                raise UserError(f"guard.{name} must be at least {least}, not {value}")
        if not 0 < self.rollback_rate <= 1:
            raise UserError(f"guard.rollback_rate must be above 0 and at most 1, not {self.rollback_rate}")
        if not math.isfinite(self.spike) or self.spike < 0:
            raise UserError(f"guard.spike must be 0 or more, not {self.spike}")


Choice = Literal["auto", "bmm", "sdpa"]
MAX_WORKERS, MAX_THREADS = 256, 1024
MAX_CAPTIONS, MAX_SYNTHETIC = 1000, 10**7
DURATIONS = ("minutes", "epochs", "steps")  # of which a run has one


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
    "Side of the square image in pixels; must be a multiple of the patch size."
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
    "Length of the vectors that images and captions share."
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
    "How pixels become patches: one product a patch, as in CLIP; or convolutions, which learn more from few images."
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
    """Where images and captions come from, and how they reach the model."""

    source: Annotated[tuple[str, ...], Parameter(alias="--data", negative="", group=COMMON)] = ("synthetic",)
    "synthetic, or a path to your own images and captions; give it again to mix: b:0.3 takes 30% of b."
    train_count: int = 8000
    "Synthetic only: images to train on."
    val_count: int = 600
    "Synthetic only: held-out images for validation, all of combinations never trained on."
    test_count: int = 600
    "Synthetic only: held-out images for the final figure."
    captions_per_image: int = 5
    "Synthetic only: paraphrases of each image."
    image_column: str | None = None
    "Table only: name of the column with the image's path (else found by its name)."
    caption_column: Annotated[tuple[str, ...], Parameter(negative="")] = ()
    "Table only: names of the caption columns (else found by name)."
    cache: Literal["auto", "ram", "disk", "off"] = "auto"
    "Decode once and keep images in memory, on disk, or not at all; auto decides by size."
    cache_dir: str | None = None
    "Folder for the disk cache; else beside the data, or in the user's cache folder."
    max_bad: float = 0.10
    "Stop before training when a larger share of the images than this cannot be read."
    read_timeout: float = 60.0
    "Seconds to wait for one image, which a lost network disk never gives; then it is unreadable. 0 = for ever."
    workers: int = 0
    "Processes that prepare batches; 0 prepares them in the training process."
    captions_per_step: int | None = None
    "Captions of each image in a step; the image is computed once. Default: all that most images have, at most 5."
    crop_min: float | None = None
    "Random crops keep at least this share of the area; 1 = none. Default: 0.6; 1 where captions tell left from right."
    flip: float | None = None
    "Probability of a mirrored image. Default: 0.5; 0 where captions tell left from right."
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
        _check(self.patch_dropout != 1, "data.patch_dropout must be below 1: an image without patches shows nothing")


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
    "Train for this many passes over the images."
    steps: Annotated[int | None, Parameter(alias="--steps", group=COMMON)] = None
    "Train for this many steps."
    batch: Annotated[int | None, Parameter(alias="--batch", group=COMMON, converter=number_or_auto)] = None
    "Pairs in a step, each other's negatives. Default: the recipe's, fewer for few images. auto (0): all that fit."
    memory: Annotated[str | None, Parameter(alias="--memory", group=COMMON)] = None
    "Stay within this much, such as 8GB: by a smaller batch (with --batch auto), recomputation, or chunks."
    chunk: Annotated[int, Parameter(alias="--chunk", group=COMMON)] = 0
    "Pairs encoded at a time: the same step as with the whole --batch at once, in less memory; 0 = all at once."
    objective: Literal["infonce", "sigmoid", "multi"] = "multi"
    "infonce; sigmoid (SigLIP); or multi: infonce where captions of one image, or equal ones, are no negatives."
    text_contrast: float | None = None
    "Weight of a second loss: captions of one image shall be near each other. Default: 0.2 where a step has several."
    label_smoothing: float = 0.0
    "Share of the target spread over the whole batch (infonce, multi)."
    device: Annotated[Literal["auto", "cpu", "mps", "cuda"], Parameter(alias="--device", group=COMMON)] = "auto"
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
    save_every: Annotated[int | str | None, Parameter(alias="--save-every", group=COMMON, converter=steps_or_time)] = (
        None
    )
    "A checkpoint after so many steps, or so much time: 500, 30s, 10m, 1h. Default: with each evaluation."
    keep: int = 2
    "Checkpoints to keep, the newest; the best model is always kept too, in best/."

    def __post_init__(self) -> None:
        _check_finite("train", self)
        given = [name for name in DURATIONS if getattr(self, name) is not None]
        _check(
            len(given) <= 1, f"give one of --minutes, --epochs and --steps, not {' and '.join('--' + g for g in given)}"
        )
        for name in given:
            _check(getattr(self, name) > 0, f"train.{name} must be above 0, not {getattr(self, name)}")
        _check(
            not self.batch or self.batch >= 2,
            f"train.batch must be at least 2 (a contrast needs two samples), or auto, not {self.batch}",
        )
        for name in ("threads", "patience", "chunk"):
            _check(getattr(self, name) >= 0, f"train.{name} must be 0 or more, not {getattr(self, name)}")
        _check(self.threads <= MAX_THREADS, f"train.threads must be at most {MAX_THREADS}, not {self.threads}")
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
        _check(0 <= self.label_smoothing < 1, f"train.label_smoothing must lie in [0, 1), not {self.label_smoothing}")
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


# How a model is computed, not what it is: another size keeps these.
HOW = ("attention_image", "attention_text", "recompute", "compile", "graph")
SHAPE_OF_0_1 = {item.name for item in dataclasses.fields(ModelConfig)} - {"preset", "stem", *HOW}


def load_config(path: Path) -> Config:
    """Read a TOML file; what it does not say stays at its default."""
    return from_dict(read_toml(path), str(path))


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of a TOML file as a dict, or one clear error."""
    if path.is_dir():
        path = path / "config.toml"  # a run folder is meant
    try:
        return _as_it_was(tomllib.loads(read_small(path).decode("utf-8")))
    except FileNotFoundError:
        raise UserError(f"{path}: no such config file") from None
    except RecursionError:
        raise UserError(f"{path}: not a TOML file: nested too deeply") from None
    except ValueError as error:  # also of bytes that are no UTF-8, and of a number with thousands of digits
        raise UserError(f"{path}: not a TOML file: {error}") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None


def _as_it_was(values: dict[str, Any]) -> dict[str, Any]:
    """A run of version 0.1 spelled out its shape without a stem; settings that came later stay off in it."""
    model = values.get("model")
    if not isinstance(model, dict) or "stem" in model or not model.keys() >= SHAPE_OF_0_1:
        return values
    later = {"model": {"stem": "patch"}, "data": {"word_dropout": 0.0}, "train": {"text_contrast": 0.0}}
    return values | {
        section: settings | values.get(section, {})
        for section, settings in later.items()
        if isinstance(values.get(section, {}), dict)
    }


def preset_names() -> list[str]:
    """Names of the shipped whole-run settings."""
    folder = resources.files("m1clip") / "presets"
    return sorted(item.name.removesuffix(".toml") for item in folder.iterdir() if item.name.endswith(".toml"))


def read_preset(name: str) -> dict[str, Any]:
    """A shipped whole-run setting, such as `demo` or `prior-art`."""
    names = preset_names()
    if name not in names:
        near = difflib.get_close_matches(name, names, n=1, cutoff=0.0)[0]
        raise UserError(f"--preset {name}: no such preset: did you mean '{near}'? (all: {', '.join(names)})")
    return tomllib.loads((resources.files("m1clip") / "presets" / f"{name}.toml").read_text(encoding="utf-8"))


def from_dict(values: dict[str, Any], where: str) -> Config:
    """Build and check a Config from nested plain values."""
    try:
        return _build(Config, values, where, "")
    except UserError as error:
        text = str(error)
        raise UserError(text if text.startswith(where) else f"{where}: {text}") from None


def to_dict(config: Config) -> dict[str, Any]:
    """Nested plain values; a None (not given) is left out, so that TOML can hold the result."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: plain(item) for key, item in value.items() if item is not None}
        return list(value) if isinstance(value, tuple) else value

    return typing.cast("dict[str, Any]", plain(dataclasses.asdict(config)))


def to_toml(config: Config) -> str:
    """The config as TOML text: top-level values first, then a table a section."""
    values = to_dict(config)
    lines = [f"{key} = {_literal(value)}" for key, value in values.items() if not isinstance(value, dict)]
    for section, table in values.items():
        if isinstance(table, dict):
            lines += ["", f"[{section}]", *(f"{key} = {_literal(value)}" for key, value in table.items())]
    return "\n".join(lines) + "\n"


def _literal(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        # JSON's escapes are TOML's, but for DEL, which TOML wants escaped too.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, list):
        return "[" + ", ".join(_literal(item) for item in value) + "]"
    return repr(value)


def _build(kind: type, values: Any, where: str, prefix: str) -> Any:
    if not isinstance(values, dict):
        raise UserError(f"{where}: {prefix.rstrip('.') or 'the file'} must be a table, not {_name(values)}")
    hints = typing.get_type_hints(kind)
    known = [item.name for item in dataclasses.fields(kind)]
    built = {}
    for key, value in values.items():
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1, cutoff=0.0)[0]
            raise UserError(f"{where}: unknown key '{prefix}{key}': did you mean '{prefix}{near}'?")
        hint = hints[key]
        nested = dataclasses.is_dataclass(hint)
        built[key] = (
            _build(hint, value, where, f"{prefix}{key}.") if nested else _convert(hint, value, where, prefix + key)
        )
    return kind(**built)


def _convert(hint: Any, value: Any, where: str, key: str) -> Any:
    origin, args = get_origin(hint), get_args(hint)
    if origin is Literal:
        if value not in args:
            raise UserError(f"{where}: {key} = {value!r}: choose from {', '.join(map(str, args))}")
        return value
    if origin in (Union, types.UnionType):
        kinds = [arg for arg in args if arg is not type(None)]
        return _convert(next((kind for kind in kinds if type(value) is kind), kinds[0]), value, where, key)
    if origin is tuple:
        items = [value] if isinstance(value, str) else value
        if not isinstance(items, list):
            raise UserError(f"{where}: {key} must be a list, not {_name(value)}")
        return tuple(_convert(args[0], item, where, key) for item in items)
    if type(value) is int and abs(value) >= 2**63:
        raise UserError(f"{where}: {key} is larger than TOML's numbers may be")
    if hint is float and type(value) is int:
        return float(value)
    if type(value) is not hint:
        raise UserError(f"{where}: {key} must be {_PLAIN[hint]}, not {_name(value)}")
    return value


_PLAIN = {int: "a whole number", float: "a number", bool: "true or false", str: "text in quotes"}


def _name(value: Any) -> str:
    if isinstance(value, dict):
        return "a table"
    return "a list" if isinstance(value, list) else repr(value)
