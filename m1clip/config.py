"""All settings of a run as frozen dataclasses. The line under a field is its help text.

A setting has one name: `--batch-size` on the command line, `batch_size` in Python and in its
section of a TOML file. Two names are shorter outside of TOML: `model` is [model] name, `data` is
[data] source.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math
import platform
import tomllib
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, Self, get_args, get_origin

from cyclopts import Group, Parameter

from m1clip.errors import UserError
from m1clip.formatting import amount, did_you_mean, save_interval
from m1clip.io import read_small
from m1clip.losses.registry import DEFAULT_LOSS, LOSSES
from m1clip.optimizers import DEFAULT_OPTIMIZER, OPTIMIZERS
from m1clip.schema import LIMITS, convert

if TYPE_CHECKING:  # a type checker cannot evaluate the registries
    LossName = str
    OptimizerName = str
else:
    LossName = Literal[tuple(LOSSES)]
    OptimizerName = Literal[tuple(OPTIMIZERS)]

COMMON = Group("Common", sort_key=0)
# Settings whose choices are a table, for --help.
DESCRIBED = {
    "optimizer": {name: entry.help_text for name, entry in OPTIMIZERS.items()},
    "loss": {name: loss.help for name, loss in LOSSES.items()},
}
RECIPES = ("scratch", "frozen", "finetune")  # files of m1clip/recipes; auto chooses one of them
DURATIONS = ("minutes", "epochs", "steps")  # a run has one of them
# Table of a run's config.toml with who chose each value; not a setting (training/spec.py).
CHOSEN_BY = "chosen_by"


class Range(NamedTuple):
    low: float
    high: float = math.inf
    above: bool = False  # `low` itself is excluded
    below: bool = False  # `high` itself is excluded

    def check(self, option: str, value: float) -> None:
        """Raise UserError for a value outside of the range or not finite."""
        inside = (value > self.low if self.above else value >= self.low) and (
            value < self.high if self.below else value <= self.high
        )
        if inside and math.isfinite(value):
            return
        words = f"{'above' if self.above else 'at least'} {self.low:g}"
        if math.isfinite(self.high):
            words += f" and {'below' if self.below else 'at most'} {self.high:,}"
        raise UserError(f"{option} must be a finite number {words}, not {value}")


Fraction = Annotated[float, Range(0, 1)]
Count = Annotated[int, Range(1, 10**7)]
Positive = Annotated[float, Range(0, above=True)]
NotNegative = Annotated[float, Range(0)]


class Section:
    """Base class of sections: checks each number against its range."""

    def __post_init__(self) -> None:
        # A decided section (training/spec.py) has the ranges of the section that it narrows.
        kind = next(kind for kind in SECTIONS.values() if isinstance(self, kind))
        for name, hint in typing.get_type_hints(kind, include_extras=True).items():
            value = getattr(self, name)
            if isinstance(value, int | float) and not isinstance(value, bool):
                for limits in _ranges(hint):
                    limits.check(option_of(kind, name), value)
                if name in LIMITS:
                    Range(1, LIMITS[name]).check(option_of(kind, name), value)
        self.check()

    def check(self) -> None:
        """Rules that involve several settings."""


def _ranges(hint: Any) -> Iterator[Range]:
    for part in getattr(hint, "__metadata__", ()):
        if isinstance(part, Range):
            yield part
    for inner in get_args(hint) if get_origin(hint) is not Literal else ():
        yield from _ranges(inner)


@dataclass(frozen=True, kw_only=True)
class ModelConfig(Section):
    """A model preset and overrides of its shape."""

    name: Annotated[str, Parameter(group=COMMON)] = "tiny"
    (
        "Model that is trained from random weights: tiny, original, original-documented, "
        "ViT-S-16, ViT-B-32, ViT-B-16, ViT-L-14, 200M, 500M, 1B."
    )
    image_size: int | None = None
    "Image height and width in pixels, a multiple of the patch size."
    patch_size: int | None = None
    "Patch height and width in pixels."
    vision_width: int | None = None
    "Width of the image tower."
    vision_layers: int | None = None
    "Number of transformer blocks in the image tower."
    text_width: int | None = None
    "Width of the text tower."
    text_layers: int | None = None
    "Number of transformer blocks in the text tower."
    context_length: int | None = None
    "Maximum caption length in tokens, including start and EOT tokens."
    embed_dim: int | None = None
    "Dimension of the shared embedding space, of all members."
    members: int | None = None
    (
        "Train so many models side by side, with their embeddings one after the other: a higher "
        "recall than one model trained as long, and a model that takes so many times as long to use."
    )
    mirror: bool | None = None
    (
        "Embed an image as the mean of itself and its mirror image: a higher recall for twice the "
        "work of the image tower. Default: on for tiny and for trained pretrained towers, unless "
        "training has no flips."
    )
    stem: Literal["patch", "conv"] | None = None
    (
        "First layer of the image tower: patch (CLIP's projection) or conv, better on small "
        "datasets; conv squashes images."
    )
    tokenizer: Literal["char", "bpe", "clip-bpe-pruned"] = "clip-bpe-pruned"
    (
        "char: characters; bpe: CLIP's BPE (49,408 tokens); clip-bpe-pruned: only those of the "
        "training captions."
    )
    grad_checkpointing: bool = False
    (
        "Recompute activations in the backward pass: less memory, about a third more compute, the "
        "same result."
    )
    compile: bool = False
    "Run the model through torch.compile: slow to start, often faster afterwards."
    cuda_graph: bool = True
    "Capture the training step as a CUDA graph and replay it: faster for small models."


@dataclass(frozen=True, kw_only=True)
class DataConfig(Section):
    """Images, captions and augmentation."""

    source: Annotated[tuple[str, ...], Parameter(negative="", group=COMMON)] = ("synthetic",)
    (
        "Folder or table of images with captions, or the word synthetic; several are combined. "
        "FORMAT:PATH sets the format (m1clip data formats lists them)."
    )
    synthetic_images: Count = 8000
    (
        "Synthetic data: number of training images; the validation and test splits have a ninth "
        "as many, at most 1,000."
    )
    image_column: str | None = None
    "Tables: column with the image path (default: detected by name)."
    caption_column: Annotated[tuple[str, ...], Parameter(negative="")] = ()
    "Tables: caption columns (default: detected by name)."
    captions: Literal["all", "person"] = "all"
    "Tables: person skips captions that a model wrote (m1clip data caption)."
    cache: Literal["auto", "ram", "disk", "off", "stream"] = "auto"
    (
        "Decode images once and cache them in memory or on disk, or not (off); stream: read "
        "shards during training."
    )
    cache_dir: str | None = None
    "Folder of the disk cache (default: next to the data, or the user's cache folder)."
    max_unreadable: Fraction = 0.10
    "Maximum fraction of unreadable images; with more, the run stops."
    workers: Annotated[int, Parameter(group=COMMON), Range(0, 256)] = 0
    "Number of data loader processes; 0 loads the data in the training process."
    captions_per_step: Annotated[int | None, Range(1, 1000)] = None
    (
        "Captions per image in each step; the image is encoded once. Default: the median of the "
        "dataset, at most 5."
    )
    crop_min: Annotated[float | None, Range(0, 1, above=True)] = None
    "Minimum area fraction of random crops. Default: 0.6; 1 if captions mention left and right."
    flip: Fraction | None = None
    "Probability of a horizontal flip. Default: 0.5; 0 if captions mention left and right."
    color_jitter: Fraction | None = None
    "Strength of random brightness and contrast. Default: 0.2; 0 for synthetic data."
    patch_dropout: Annotated[float | None, Range(0, 1, below=True)] = None
    (
        "Fraction of patches to drop in each step. Default: 0.5; 0 for synthetic data, a conv "
        "stem and --init."
    )
    word_dropout: Fraction | None = None
    (
        "Fraction of caption tokens to drop in each step. Default: 0.3; 0 for synthetic data, "
        "--tokenizer char and --init."
    )
    mild_after: Annotated[int | None, Range(0)] = None
    (
        "From this step on, augment less: complete captions, crops of at least 0.8, no CutMix; 0: "
        "never. Default: after four fifths of the steps from random weights."
    )
    cutmix: Fraction | None = None
    (
        "Probability that a training image gets a box of another one (CutMix), up to half of its area. "
        "Default: 0; up to 0.5 in long runs from random weights."
    )

    def check(self) -> None:
        """Require names that config.toml can store, or the run could not be resumed."""
        if not self.source:
            raise UserError("--data is empty: expected a path or 'synthetic'")
        for name in (*self.source, self.cache_dir or ""):
            if any(0xD800 <= ord(letter) <= 0xDFFF for letter in name):
                raise UserError(f"{name!a}: the name is not valid UTF-8; rename the folder")


@dataclass(frozen=True, kw_only=True)
class OptimConfig(Section):
    """Optimizer and learning rate."""

    optimizer: OptimizerName = DEFAULT_OPTIMIZER
    "How the weights are updated."
    lr: Annotated[float, Parameter(alias="--learning-rate", group=COMMON), Range(0, above=True)] = (
        5e-4
    )
    "Peak learning rate; the matrices that Muon trains use --muon-lr."
    muon_lr: Positive = 0.01
    "Peak learning rate of Muon. Its weight decay is always 0.3."
    wd: Annotated[float, Parameter(alias="--weight-decay"), Range(0)] = 0.1
    (
        "Weight decay; not applied to norms, biases, the temperature, and the matrices "
        "that Muon trains."
    )
    warmup: NotNegative = 0.05
    "Warmup: a fraction of all steps if below 1, else a number of steps."
    layer_decay: Annotated[float, Range(0, 1, above=True)] = 1.0
    (
        "Layer-wise learning rate decay: each block's learning rate as a fraction of that of the "
        "block above it."
    )
    grad_clip: NotNegative = 1.0
    "Scale gradients down to this norm where theirs is larger; 0 = never."

    def check(self) -> None:
        if self.warmup >= 1 and self.warmup != int(self.warmup):
            raise UserError(
                "--warmup must be a fraction below 1 or an integer number of steps, not"
                f" {self.warmup}"
            )


@dataclass(frozen=True, kw_only=True)
class TrainConfig(Section):
    """Duration, batch, loss, hardware, evaluation and checkpoints."""

    minutes: Annotated[float | None, Parameter(group=COMMON), Range(0, above=True)] = None
    (
        "Time for the whole command: reading, caching, training, evaluation. The number of steps "
        "is adapted so that it ends on time."
    )
    epochs: Annotated[float | None, Parameter(group=COMMON), Range(0, above=True)] = None
    "Train for this many passes over the images."
    steps: Annotated[int | None, Parameter(group=COMMON), Range(0, above=True)] = None
    "Train for this many steps."
    max_epochs: Annotated[float | None, Range(0, above=True)] = None
    (
        "With --minutes: at most this many passes over the images, then end early. Default: by "
        "recipe and number of images."
    )
    batch_size: Annotated[
        int | Literal["auto"] | None,
        Parameter(group=COMMON, metavar="INT|auto", show_choices=False),
    ] = None
    (
        "Images per step. The default is lower for small datasets, and higher on CUDA. auto: as "
        "many as fit in memory."
    )
    micro_batch: Annotated[int, Parameter(group=COMMON), Range(0)] = 0
    (
        "Encode this many images at a time (GradCache): the gradient of the full batch in less "
        "memory; 0 = all at once."
    )
    memory: Annotated[str | None, Parameter(group=COMMON)] = None
    (
        "Memory limit, such as 8GB: uses a smaller batch (if auto), gradient checkpointing or "
        "micro-batches to fit."
    )
    loss: LossName = DEFAULT_LOSS
    "How images and captions are compared."
    label_smoothing: Annotated[float | None, Range(0, 1, below=True)] = None
    (
        "Part of each image's and caption's target that is spread over the batch. Default: 0.1 "
        "from random weights where each image is seen often, else 0."
    )
    text_contrast: NotNegative | None = None
    (
        "Weight of a contrastive loss between captions of one image. Default: 0.5 (from scratch, "
        "several captions), else 0."
    )
    device: Annotated[
        Literal["auto", "cpu", "mps", "cuda", "mlx", "cuda+cpu", "mps+cpu", "cpu+cpu"],
        Parameter(group=COMMON),
    ] = "auto"
    (
        "auto: fastest of cpu, mps, cuda; gpu: mps or cuda; mlx: Apple's MLX; cuda+cpu: one tower "
        "on each. A device that is missing is an error."
    )
    precision: Annotated[Literal["auto", "fp32", "bf16", "fp16"], Parameter(group=COMMON)] = "auto"
    "Precision of the towers (autocast); auto: bf16 if it is faster than fp32 on this machine."
    fsdp: Literal["auto", "on", "off"] = "auto"
    (
        "Under torchrun, shard weights and optimizer state across ranks (FSDP2); auto: only if a "
        "GPU's memory requires it."
    )
    threads: Annotated[int, Range(0, 1024)] = 0
    "CPU threads; 0 = one per physical core."
    report_to: Literal["none", "tensorboard"] = "none"
    "Also send the metrics to TensorBoard (pip install 'm1clip[log]'). run.jsonl is always written."
    eval_every: Annotated[int | None, Parameter(group=COMMON), Range(0)] = None
    (
        "Steps between two evaluations on the validation split. Default: 5 evaluations per run; 0 "
        "= only at the end."
    )
    evaluations: Annotated[int | None, Range(1)] = None
    (
        "Number of evaluations, evenly spread over the run, instead of --eval-every. Default: 5, "
        "fewer if time is short."
    )
    patience: Annotated[int, Range(0)] = 0
    (
        "Stop after this many evaluations without improvement of the mean recall (class folders: "
        "top-1); 0 = never."
    )
    save_every: Annotated[int | str | None, Parameter(group=COMMON)] = None
    (
        "Save every N steps, 30s, 10m, 1h, or 2e (epochs). Default: at each evaluation; above "
        "134 MB, once a minute."
    )
    save_total_limit: Annotated[int, Range(1)] = 2
    "Maximum number of checkpoints to keep; the best model is kept in addition, in best/."
    plan: Annotated[tuple[tuple[int, int], ...], Parameter(parse=False)] = ()
    (
        "Written by --minutes into config.toml: [step, total steps] of each correction of the "
        "number of steps."
    )

    def check(self) -> None:
        given_durations = [f"--{name}" for name in DURATIONS if getattr(self, name) is not None]
        rules = {
            f"give one of --minutes, --epochs and --steps, not {' and '.join(given_durations)}": (
                len(given_durations) <= 1
            ),
            (
                "--batch-size must be at least 2 (a contrastive loss needs two samples) or auto,"
                f" not {self.batch_size}"
            ): self.batch_size_or(2) >= 2,
            f"--micro-batch {self.micro_batch} is more than --batch-size {self.batch_size}": (
                self.micro_batch <= self.batch_size_or(self.micro_batch)
            ),
            f"give --eval-every {self.eval_every} or --evaluations {self.evaluations}, not both": (
                self.eval_every is None or self.evaluations is None
            ),
            "plan must begin at step 0, go up, and end with the number of steps": (
                not self.plan or is_plan(self.plan, self.steps)
            ),
            "--patience counts evaluations, but --eval-every 0 runs none before the end": (
                not self.patience or self.eval_every != 0
            ),
        }
        for message, holds in rules.items():
            if not holds:
                raise UserError(message)
        if self.memory is not None:
            amount(self.memory, "B", "--memory")
        if self.save_every is not None:
            save_interval(self.save_every, "--save-every")

    def batch_size_or(self, default: int) -> int:
        """Return the batch size, or `default` if it is not decided yet (None or auto)."""
        return default if self.batch_size in (None, "auto") else int(self.batch_size)


def is_plan(plan: tuple[tuple[int, int], ...], steps: int | None) -> bool:
    """Whether a plan of config.toml is valid: its parts are in order, and none is empty."""
    starts = [start for start, _ in plan]
    ordered = starts[0] == 0 and all(
        earlier < later for earlier, later in itertools.pairwise(starts)
    )
    return ordered and all(total >= max(start, 1) for start, total in plan) and plan[-1][1] == steps


@dataclass(frozen=True, kw_only=True)
class TransferConfig(Section):
    """Pretrained towers, fine-tuning and distillation."""

    recipe: Annotated[Literal["auto", "frozen", "finetune", "scratch"], Parameter(group=COMMON)] = (
        "auto"
    )
    (
        "auto: chosen by the data; frozen: small heads on pretrained towers; finetune: the towers "
        "too; scratch: everything, from random weights."
    )
    image_tower: str = "auto"
    (
        "Pretrained image tower: efficientnet-lite0, -lite2, dinov2-small, some of them joined by "
        "+, or a transformers model (folder or Hub name). auto: what is on this computer."
    )
    text_tower: str = "auto"
    (
        "Pretrained text tower: minilm, gte-small, minilm+gte-small, or a transformers model "
        "(folder or Hub name). auto: what is on this computer."
    )
    init: Annotated[str | None, Parameter(group=COMMON)] = None
    (
        "Fine-tune this model: a run, a model folder, an open_clip or Hugging Face checkpoint, or "
        "a name (m1clip models)."
    )
    unfreeze_image: Annotated[int, Range(-1)] = -1
    "Fine-tuning: train only the last N blocks of the image tower; 0 = freeze it, -1 = train all."
    unfreeze_text: Annotated[int, Range(-1)] = -1
    "Fine-tuning: train only the last N blocks of the text tower; 0 = freeze it, -1 = train all."
    heads: Literal["auto", "cca", "general"] = "auto"
    (
        "--recipe frozen: start of new heads: cca of your images, or the model general. auto: "
        "better on held-out images."
    )
    adapter: Literal["auto", "embeddings", "features"] = "auto"
    (
        "--init with --recipe frozen: adapt the embeddings or the features of both towers. auto: "
        "better on held-out images."
    )
    lora: Annotated[int, Range(0, 4096)] = 0
    (
        "Fine-tuning: train LoRA matrices of this rank (usual: 8) instead of the blocks: less "
        "memory. Merged when saved."
    )
    teacher: str | None = None
    "Distillation: also learn from the similarities of this model (accepts what --init accepts)."
    general_data: Annotated[tuple[str, ...], Parameter(negative="")] = ()
    "--init: evaluate this data too, before and after: what the model forgets. Paths as in --data."
    wise_ft: Annotated[str, Parameter(group=COMMON)] = "off"
    (
        "Fine-tuning: interpolate old and new weights after training (WiSE-FT): 0.5 is the mean, "
        "search tries several."
    )

    def check(self) -> None:
        """Validate the WiSE-FT weight, and reject recipes that exclude each other."""
        if self.wise_ft not in ("off", "search"):
            try:
                Range(0, 1).check("--wise-ft", float(self.wise_ft))
            except (ValueError, UserError):
                raise UserError(
                    f"--wise-ft is off, search, or a number from 0 to 1, not {self.wise_ft}"
                ) from None
        if self.init is not None and self.recipe == "scratch":
            raise UserError("--init cannot be combined with --recipe scratch: remove one of them")


SECTIONS: dict[str, type[Section]] = {
    "model": ModelConfig,
    "data": DataConfig,
    "optim": OptimConfig,
    "train": TrainConfig,
    "transfer": TransferConfig,
}
SHORT = {("model", "name"): "model", ("data", "source"): "data"}


def option_of(kind: type, name: str) -> str:
    names = {section_class: section for section, section_class in SECTIONS.items()}
    section = names.get(kind, "")
    return "--" + SHORT.get((section, name), name).replace("_", "-")


@dataclass(frozen=True, kw_only=True)
class Config:
    """All settings of a run."""

    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    optim: OptimConfig = OptimConfig()
    train: TrainConfig = TrainConfig()
    transfer: TransferConfig = TransferConfig()
    seed: Annotated[int, Parameter(group=COMMON)] = 0
    "Random seed for initialization, data order, crops and captions."

    def __post_init__(self) -> None:
        Range(0, 2**31, below=True).check("--seed", self.seed)

    def with_values(self, **settings: Any) -> Self:
        """Return the config with other values of settings, by flat name."""
        sections: dict[str, dict[str, Any]] = {}
        for name, value in settings.items():
            section, key = NAMES[name]
            sections.setdefault(section, {})[key] = value
        new = {
            section: dataclasses.replace(getattr(self, section), **values)
            for section, values in sections.items()
        }
        return dataclasses.replace(self, **new)


# Flat name -> section and name in it.
NAMES = {
    SHORT.get((section, item.name), item.name): (section, item.name)
    for section, kind in SECTIONS.items()
    for item in dataclasses.fields(kind)  # type: ignore[arg-type]
} | {"seed": ("", "seed")}
ALIASES = {"weight_decay": "wd", "learning_rate": "lr"}
PYTHON_PARAMETERS = ("out", "config", "preset", "on_log")  # of m1clip.train, beside the settings
# Options of the command that are not settings of a run: what to use in Python.
NOT_OPTIONS = {
    "resume": "to continue a run, use m1clip.resume(run)",
    "background": "only the command m1clip train can train in the background",
    "config_file": "did you mean 'config'?",
}
# The parts of recipes are no presets: the options that use them.
RECIPE_OPTIONS = {
    "frozen": "--recipe frozen",
    "finetune": "--init MODEL, or --recipe finetune",
    "scratch": "--recipe scratch",
}
# How a model is computed, not what it is: these survive a change of --model.
NOT_SHAPE = ("tokenizer", "grad_checkpointing", "compile", "cuda_graph")
# Options of other tools -> the option of `m1clip train`.
OTHER_TOOLS = {
    **dict.fromkeys(
        ("batch", "bs", "b", "batchsize", "per_device_train_batch_size"), "--batch-size"
    ),
    **dict.fromkeys(("gpu", "gpus", "cuda", "use_gpu", "accelerator"), "--device gpu"),
    **{kind: f"--device {kind}" for kind in ("cpu", "mps", "mlx")},
    **dict.fromkeys(
        ("run", "o", "output", "output_dir", "out_dir", "save_dir", "logs", "name", "project"),
        "--out",
    ),
    **dict.fromkeys(("num_workers", "dataloader_num_workers", "j", "jobs"), "--workers"),
    **dict.fromkeys(("lrate", "base_lr", "max_lr", "peak_lr", "init_lr"), "--lr"),
    **dict.fromkeys(("epoch", "e", "num_epochs", "num_train_epochs"), "--epochs"),
    **dict.fromkeys(("max_steps", "iterations", "iters"), "--steps"),
    **dict.fromkeys(("time", "duration", "hours"), "--minutes"),
    **dict.fromkeys(
        ("dataset", "train_data", "data_dir", "input", "images", "folder", "path"), "--data"
    ),
    **dict.fromkeys(("pretrained", "checkpoint", "weights", "finetune", "finetune_from"), "--init"),
    **dict.fromkeys(("arch", "backbone", "model_name"), "--model"),
    **dict.fromkeys(("size", "img_size", "imgsz", "resolution"), "--image-size"),
    **{
        "amp": "--precision bf16",
        "bf16": "--precision bf16",
        "fp16": "--precision fp16",
        "fp32": "--precision fp32",
    },
    **dict.fromkeys(("accum_freq", "grad_accum", "gradient_accumulation_steps"), "--micro-batch"),
    **dict.fromkeys(("wandb", "tensorboard"), "--report-to tensorboard"),
    **dict.fromkeys(
        ("lr_scheduler", "scheduler", "lr_scheduler_type"), "--warmup (a cosine follows it)"
    ),
}


def device_name(name: str) -> str:
    """Return torch's name of a device: gpu is mps on a Mac and cuda elsewhere, also in gpu+cpu."""
    image, plus, text = name.partition("+")
    if image != "gpu":
        return name
    gpu = "mps" if platform.system() == "Darwin" else "cuda"
    return f"{gpu}{plus}{text}"


def make_config(
    options: Mapping[str, Any], file: str | Path | None = None, preset: str | None = None
) -> Config:
    """Merge the settings of a run: the recipe's, those of a TOML file or a preset, flat `options`.

    With --recipe auto and without --init, the recipe depends on the data: training chooses it.
    """
    return merge_config(options, read_tables(file, preset))


def read_tables(file: str | Path | None, preset: str | None) -> dict[str, Any]:
    """Read and check the tables of a TOML file or of a preset; {} for neither."""
    if file is not None and preset is not None:
        raise UserError("use either --config or --preset, not both")
    values: dict[str, Any] = {}
    if file is not None:
        values = read_toml(Path(file))
    elif preset is not None:
        values = read_preset(preset)
    from_dict(values, str(file or preset))
    return values


def merge_config(options: Mapping[str, Any], tables: dict[str, Any]) -> Config:
    """Merge flat `options` over `tables` of a file or preset, over the values of the recipe."""
    user_tables = _merge(tables, nest_options(options))
    transfer = from_dict(user_tables, "options").transfer
    if transfer.recipe == "auto":
        return from_dict(user_tables, "options")
    clip = transfer.init is not None and is_clip(Path(transfer.init))
    recipe = read_recipe(transfer.recipe, clip, transfer.lora > 0)
    values = _merge(recipe.settings, user_tables)
    train = values.get("train", {})
    if train.get("eval_every") == 0 and "patience" not in user_tables.get("train", {}):
        # The recipe's patience counts evaluations, and the user wants none before the end.
        values["train"] = {name: value for name, value in train.items() if name != "patience"}
    return from_dict(values, "options")


def is_clip(model: Path) -> bool:
    """Whether a model has the projections of CLIP.

    False for the adapter heads of --recipe frozen.
    """
    boxed = Path(__file__).parent / "models" / model.name  # a model with a name, such as general
    for folder in (model, model / "best", model / "model", *([] if model.exists() else [boxed])):
        try:
            kind = json.loads(read_small(folder / "config.json"))["model"]["image_head"]["kind"]
        except (OSError, ValueError, RecursionError):
            continue
        except (KeyError, TypeError, IndexError):
            return True
        return bool(kind != "adapter")
    return True


def nest_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Group flat options by section.

    The error for an unknown name suggests one that is spelled like it.
    """
    nested: dict[str, Any] = {}
    for name, value in options.items():
        canonical_name = ALIASES.get(name, name)
        if canonical_name not in NAMES:
            if name in NOT_OPTIONS:
                raise UserError(f"unknown option '{name}': {NOT_OPTIONS[name]}")
            other_tool = OTHER_TOOLS.get(name, "").partition(" ")[0]
            similar = did_you_mean(
                name, (*NAMES, *PYTHON_PARAMETERS), other_tool.removeprefix("--").replace("-", "_")
            )
            hint = similar or ": m1clip train --help lists all options"
            raise UserError(f"unknown option '{name}'{hint}")
        section, key = NAMES[canonical_name]
        (nested.setdefault(section, {}) if section else nested)[key] = value
    return nested


def _merge(lower: dict[str, Any], upper: dict[str, Any]) -> dict[str, Any]:
    """Merge two layers of settings.

    A duration replaces one of another kind; a new model resets shape overrides.
    """
    merged = {
        section: dict(values) if isinstance(values, dict) else values
        for section, values in lower.items()
    }
    if any(name in upper.get("train", {}) for name in DURATIONS):
        replaced = (*DURATIONS, "plan")  # a plan belongs to the duration it was made for
        merged["train"] = {
            key: value for key, value in merged.get("train", {}).items() if key not in replaced
        }
    for name, other in (("eval_every", "evaluations"), ("evaluations", "eval_every")):
        if name in upper.get("train", {}) and "train" in merged:
            merged["train"].pop(other, None)
    if "name" in upper.get("model", {}):
        merged["model"] = {
            key: value for key, value in merged.get("model", {}).items() if key in NOT_SHAPE
        }
    merged.pop(CHOSEN_BY, None)
    for section, values in upper.items():
        merged[section] = merged.get(section, {}) | values if isinstance(values, dict) else values
    return merged


def load_config(path: Path) -> Config:
    """Read a TOML file; missing settings have their defaults."""
    return from_dict(read_toml(path), str(path))


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of a TOML file, or of the config.toml of a run folder."""
    if path.is_dir():
        path = path / "config.toml"
    try:
        text = read_small(path).decode("utf-8")
        if not text.strip():  # as after a crash of the system; it would mean all defaults
            raise UserError(f"{path}: is empty; remove it, or write settings into it")
        return tomllib.loads(text)
    except FileNotFoundError:
        raise UserError(f"{path}: no such config file") from None
    except RecursionError:
        raise UserError(f"{path}: not a TOML file: nested too deeply") from None
    # ValueError also for bytes that are not UTF-8, and for a number with thousands of digits.
    except ValueError as error:
        raise UserError(f"{path}: not a TOML file: {error}") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None


def preset_names() -> list[str]:
    """The names that --preset accepts: settings of a complete run."""
    folder = resources.files("m1clip") / "presets"
    return sorted(
        item.name.removesuffix(".toml") for item in folder.iterdir() if item.name.endswith(".toml")
    )


def read_preset(name: str) -> dict[str, Any]:
    """The settings of a preset, such as `demo` or `original`."""
    names = preset_names()
    if name not in names:
        hint = did_you_mean(name, names)
        if name in RECIPE_OPTIONS:
            hint = f": use {RECIPE_OPTIONS[name]}"
        raise UserError(f"--preset {name}: no such preset{hint} (all: {', '.join(names)})")
    return _read_packaged("presets", name)


class Recipe(NamedTuple):
    """What a recipe sets where the user does not; not a complete run, so not a preset."""

    settings: dict[str, Any]  # by section, as in a TOML file
    batch_size: int  # lower for small datasets, so not among the settings


def read_recipe(name: str, clip: bool = False, lora: bool = False) -> Recipe:
    """Read one of RECIPES.

    `clip` is for a CLIP model, not for towers with adapter heads; `lora` for LoRA on it.
    """
    settings = _read_packaged("recipes", name)
    batch_size = settings.pop("batch_size")
    for variant, applies in (("clip", clip), ("lora", lora)):
        changes = settings.pop(variant, {})
        if applies:
            batch_size = changes.pop("batch_size", batch_size)
            settings = _merge(settings, changes)
    return Recipe(settings, batch_size)


def recipe_defaults(name: str) -> dict[str, Any]:
    """The default of a setting in each recipe, and of `--init` with a CLIP model."""
    section, key = NAMES[name]
    default = getattr(SECTIONS.get(section, Config), key)
    values = {}
    for label, recipe in _all_recipes().items():
        values[label] = recipe.settings.get(section, {}).get(key, default)
        if name == "batch_size":
            values[label] = recipe.batch_size
    return values


@functools.cache
def _all_recipes() -> dict[str, Recipe]:
    recipes = {name: read_recipe(name) for name in RECIPES}
    recipes["--init"] = read_recipe("finetune", clip=True)
    return recipes


def _read_packaged(folder: str, name: str) -> dict[str, Any]:
    return tomllib.loads(
        (resources.files("m1clip") / folder / f"{name}.toml").read_text(encoding="utf-8")
    )


def from_dict(values: dict[str, Any], where: str) -> Config:
    """Build and check a Config from nested dicts of JSON values."""
    try:
        settings = {key: value for key, value in values.items() if key != CHOSEN_BY}
        return _build(Config, settings, where, "")
    except UserError as error:
        text = str(error)
        raise UserError(
            text if where == "options" or text.startswith(where) else f"{where}: {text}"
        ) from None


def to_dict(config: Config) -> dict[str, Any]:
    """Convert to nested dicts of JSON values, without None, which TOML cannot represent."""

    def drop_none(items: list[tuple[str, Any]]) -> dict[str, Any]:
        return {
            key: list(value) if isinstance(value, tuple) else value
            for key, value in items
            if value is not None
        }

    return dataclasses.asdict(config, dict_factory=drop_none)


def to_toml(config: Config) -> str:
    """The config as TOML text: top-level values first, then one table per section."""
    values = to_dict(config)
    lines = [
        f"{key} = {_literal(value)}" for key, value in values.items() if not isinstance(value, dict)
    ]
    for section, table in values.items():
        if isinstance(table, dict):
            lines += [
                "",
                f"[{section}]",
                *(f"{key} = {_literal(value)}" for key, value in table.items()),
            ]
    return "\n".join(lines) + "\n"


def _literal(value: Any) -> str:
    # Text, numbers and lists are the same in TOML as in JSON, except for DEL.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


# Removed settings, with the value that had no effect: the config.toml of older runs has them.
REMOVED = {"transfer.lora_rank": 0}


def _build(kind: type, values: Any, where: str, prefix: str) -> Any:
    convert(dict, values, f"{where}: {prefix.rstrip('.') or 'the file'}")
    hints = typing.get_type_hints(kind)
    built = {}
    for key, value in values.items():
        if f"{prefix}{key}" in REMOVED and REMOVED[f"{prefix}{key}"] == value:
            continue
        if key not in hints:
            canonical_name = ALIASES.get(key, "")
            similar = did_you_mean(
                key, hints, canonical_name if canonical_name in hints else "", prefix
            )
            hint = similar or f" (known: {', '.join(hints)})"
            raise UserError(f"{where}: unknown key '{prefix}{key}'{hint}")
        if dataclasses.is_dataclass(hints[key]):
            built[key] = _build(typing.cast("type", hints[key]), value, where, f"{prefix}{key}.")
        elif key == "device" and value in ("gpu", "gpu+cpu"):
            built[key] = device_name(value)
        else:
            label = option_of(kind, key) if where == "options" else f"{where}: {prefix}{key}"
            built[key] = convert(hints[key], value, label)
    return kind(**built)
