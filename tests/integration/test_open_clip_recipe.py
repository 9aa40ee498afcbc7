"""The command of docs/open-clip-options.md that trains with the recipe of open_clip's trainer.

open_clip's formulae are written out here, so that the test needs no open_clip; they are those of
4.2.0.dev0, and their results were compared once with its own (docs/open-clip-options.md).
"""

import argparse
import copy
import math
import re
import shlex
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from machines import H200
from small_run import prepared
from torch import Tensor

from m1clip.cli.main import app
from m1clip.config import NAMES
from m1clip.data.augment import Augmentation, draw_views, render
from m1clip.data.images import Preprocess
from m1clip.hardware.machine_info import MachineInfo
from m1clip.losses.registry import LOSSES, Ids
from m1clip.losses.run_loss import RunLoss
from m1clip.model.clip import CLIP, Features, build_clip
from m1clip.model.presets import clip_config
from m1clip.optimizers import OPTIMIZERS
from m1clip.text.tokenizers import make_tokenizer
from m1clip.training.decision import Dataset, InitialModel, Machine, Measurements, MemoryFacts
from m1clip.training.device_choice import Choice
from m1clip.training.duration import step_plan
from m1clip.training.inputs import RunInputs
from m1clip.training.memory import MemoryEstimate
from m1clip.training.optim import Optimizer
from m1clip.training.resolve import resolve
from m1clip.training.schedule import scheduled_lr_fraction
from m1clip.training.spec import RunSpec, Settings
from m1clip.training.step import StepParts, make_parts, train_step
from m1clip.training.torch_optimizers import BuildOptions

PAGE = Path(__file__).parents[2] / "docs" / "open-clip-options.md"
IMAGES = 100_000
MEAN = (0.48145466, 0.4578275, 0.40821073)  # of open_clip's preprocessing
STD = (0.26862954, 0.26130258, 0.27577711)
BETAS = (0.9, 0.98)  # open_clip's defaults for a ViT
EPS = 1e-6
CROP_SCALE = (0.9, 1.0)
CROP_RATIO = (3 / 4, 4 / 3)
CROPS = 100_000


def section() -> str:
    _, _, text = PAGE.read_text(encoding="utf-8").partition("## The same recipe\n")
    return text.partition("\n## ")[0]


def command(start: str) -> list[str]:
    """The words of the only command of the section that begins with `start`, without it."""
    blocks = re.findall(r"```bash\n(.*?)```", section(), re.DOTALL)
    (block,) = [block for block in blocks if block.startswith(start)]
    return shlex.split(block.removeprefix(start).replace("\\\n", " "))


@pytest.fixture(scope="module")
def theirs() -> argparse.Namespace:
    """The settings of open_clip's command."""
    parser = argparse.ArgumentParser()
    for name in ("model", "train-data", "csv-separator", "csv-img-key", "csv-caption-key"):
        parser.add_argument(f"--{name}", required=True)
    for name in ("batch-size", "warmup", "epochs"):
        parser.add_argument(f"--{name}", type=int, required=True)
    for name in ("lr", "wd"):
        parser.add_argument(f"--{name}", type=float, required=True)
    parser.add_argument("--precision", required=True)
    return parser.parse_args(command("python -m open_clip_train.main"))


def page_options() -> dict[str, Any]:
    """The options of m1clip's command by flat name."""
    words = command("m1clip train")
    _, bound, _ = app.parse_args(["train", *words], exit_on_error=False, print_error=False)
    arguments = dict(bound.arguments)
    options = {**arguments.pop("settings", {}), **arguments}
    options["data"] = tuple(options["data"])
    assert options.keys() <= NAMES.keys()
    return options


class SmallSteps:
    """A model of memory in which every step fits."""

    largest: Any = MemoryEstimate.largest

    def peak(self, batch: int, checkpointing: bool) -> float:
        return batch


def resolve_options(options: dict[str, Any], facts: MachineInfo = H200) -> RunSpec:
    """The run that a command makes of a table with five captions per image."""
    settings = Settings(options)

    def unused(*_: Any) -> Any:
        raise AssertionError("the command leaves nothing to measure")

    def fastest(config: Any) -> Choice:
        assert config.train.precision != "auto"
        return Choice("cuda", config.train.precision)

    measurements = Measurements(
        initial_model=lambda config: InitialModel(clip_config(config.model)),
        fastest=fastest,
        memory=lambda config: MemoryFacts(1e12, SmallSteps()),
        fits_one_gpu=unused,
        readable_images=lambda config: IMAGES,
        steps_in_time=unused,
    )
    return resolve(settings, Dataset(IMAGES, median_captions=5), Machine(facts, measurements))


@pytest.fixture(scope="module")
def spec() -> RunSpec:
    return resolve_options(page_options())


def meta_model(spec: RunSpec) -> CLIP:
    with torch.device("meta"):
        return build_clip(clip_config(spec.config.model))


def open_clip_lr(step: int, peak: float, warmup: int, steps: int) -> float:
    """`cosine_lr` of open_clip_train.scheduler."""
    if step < warmup:
        return peak * (step + 1) / warmup
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / (steps - warmup))) * peak


def open_clip_loss(images: Tensor, texts: Tensor, scale: Tensor) -> Tensor:
    """`ClipLoss` of one process; row i of both is one pair."""
    logits = scale * images @ texts.T
    labels = torch.arange(len(images))
    return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2


def open_clip_groups(model: CLIP, wd: float) -> list[dict[str, Any]]:
    """The parameter groups of open_clip 3.3.0: gains, biases and logit_scale have no decay."""
    named = [*model.named_parameters()]
    return [
        {"params": [p for _, p in named if p.ndim < 2], "weight_decay": 0.0},
        {"params": [p for _, p in named if p.ndim >= 2], "weight_decay": wd},
    ]


def open_clip_crop_area(generator: np.random.Generator) -> float:
    """The area of a crop of a square image by torchvision's RandomResizedCrop."""
    for _ in range(10):
        area = generator.uniform(*CROP_SCALE)
        ratio = math.exp(generator.uniform(*np.log(CROP_RATIO)))
        if max(area * ratio, area / ratio) <= 1:
            return area
    return 1.0


def test_model_and_tokenizer(spec: RunSpec, theirs: argparse.Namespace) -> None:
    model = spec.config.model
    assert model.name == theirs.model == "ViT-B-32"
    assert (model.image_size, model.patch_size, model.context_length) == (224, 32, 77)
    assert (model.vision_width, model.vision_layers) == (768, 12)
    assert (model.text_width, model.text_layers, model.embed_dim) == (512, 12, 512)
    assert (model.stem, model.members, model.mirror) == ("patch", 1, False)
    built = meta_model(spec)
    assert sum(p.numel() for p in built.parameters()) == 151_277_313  # as open_clip counts
    for tower in built.config.own_towers:
        assert (tower.activation, tower.norm_eps) == ("gelu", 1e-5)
    tokenizer = make_tokenizer(model.tokenizer, ["unused"])
    assert (tokenizer.vocab_size, tokenizer.eot_id) == (49_408, 49_407)


def test_data_batch_and_length(spec: RunSpec, theirs: argparse.Namespace) -> None:
    data = spec.config.data
    assert data.source == (theirs.train_data,)
    assert data.image_column == theirs.csv_img_key
    assert data.caption_column == (theirs.csv_caption_key,)
    assert data.captions_per_step == 1
    train = spec.config.train
    assert train.batch_size == theirs.batch_size
    assert train.micro_batch == 0
    assert train.steps == IMAGES // theirs.batch_size * theirs.epochs
    assert train.patience == 0
    assert {"bf16": "amp_bf16"}[train.precision] == theirs.precision
    assert spec.config.transfer.recipe == "scratch"


def test_nothing_but_the_crop_is_random(spec: RunSpec) -> None:
    data = spec.config.data
    assert data.crop_min == CROP_SCALE[0]
    assert data.flip == data.color_jitter == data.cutmix == 0
    assert data.patch_dropout == data.word_dropout == data.mild_after == 0
    # None of these is left to a rule: each follows from the command.
    for name in ("crop_min", "flip", "color_jitter", "patch_dropout", "word_dropout", "cutmix"):
        assert spec.chosen_by[name] == "user", name


def test_crops(spec: RunSpec) -> None:
    """Their sides are in the range that the page states, and differ from torchvision's as it says."""
    settings = {item.name: getattr(spec.config.data, item.name) for item in fields(Augmentation)}
    augmentation = Augmentation(**settings)
    views = draw_views(augmentation, 0, 0, np.arange(CROPS))
    assert views is not None
    left, top, width, height, flipped, brightness, contrast = views.double().T
    shortest = math.sqrt(CROP_SCALE[0] * CROP_RATIO[0])
    for side, start in ((width, left), (height, top)):
        assert float(side.min()) == pytest.approx(shortest, abs=2e-3)
        assert float(side.min()) > shortest - 1e-6
        assert float(side.max()) == 1
        assert float((start + side).max()) <= 1 + 1e-6
    assert not flipped.any()
    assert (brightness == 1).all()
    assert (contrast == 1).all()
    inside = (width < 1) & (height < 1)
    area = width * height
    assert float(area[inside].min()) >= CROP_SCALE[0] - 1e-6
    generator = np.random.default_rng(0)
    mean = np.mean([open_clip_crop_area(generator) for _ in range(CROPS)])
    shown = f"{100 * float(area.mean()):.0f}% instead of {100 * mean:.0f}% of the square"
    assert shown in " ".join(section().split())


def test_normalization() -> None:
    pixels = torch.randint(256, (2, 8, 8, 3), dtype=torch.uint8)
    expected = (pixels.permute(0, 3, 1, 2) / 255 - Tensor(MEAN).view(3, 1, 1)) / Tensor(STD).view(
        3, 1, 1
    )
    torch.testing.assert_close(render(pixels, None, Preprocess(image_size=8)), expected)


def test_learning_rate(spec: RunSpec, theirs: argparse.Namespace) -> None:
    """Equal from the end of warmup on; before that, lower by one part in (warmup + 1)."""
    optim = spec.config.optim
    assert (optim.lr, optim.warmup, optim.layer_decay) == (theirs.lr, theirs.warmup, 1)
    steps = spec.config.train.steps
    plan = step_plan(spec.config.train)
    for step in (0, 1, theirs.warmup - 1):
        expected = open_clip_lr(step, theirs.lr, theirs.warmup, steps)
        actual = optim.lr * scheduled_lr_fraction(optim, plan, step)
        assert actual == pytest.approx(expected * theirs.warmup / (theirs.warmup + 1), rel=1e-12)
    middle = (theirs.warmup + steps) // 2
    for step in (theirs.warmup, theirs.warmup + 1, middle, steps - 1):
        expected = open_clip_lr(step, theirs.lr, theirs.warmup, steps)
        actual = optim.lr * scheduled_lr_fraction(optim, plan, step)
        assert actual == pytest.approx(expected, rel=1e-12)
    assert open_clip_lr(theirs.warmup, theirs.lr, theirs.warmup, steps) == theirs.lr


def test_optimizer(spec: RunSpec, theirs: argparse.Namespace) -> None:
    assert [part.name for part in OPTIMIZERS[spec.config.optim.optimizer].parts] == ["adamw"]
    model = meta_model(spec)
    (adamw,) = Optimizer(model, spec.config.optim, BuildOptions()).parts.values()
    decay_of = {}
    for group in adamw.param_groups:
        assert group["lr"] == theirs.lr
        assert group["betas"] == BETAS
        assert group["eps"] == EPS
        assert not group["amsgrad"]
        decay_of |= dict.fromkeys(group["param_names"], group["weight_decay"])
    expected = {
        id(p): group["weight_decay"]
        for group in open_clip_groups(model, theirs.wd)
        for p in group["params"]
    }
    assert decay_of == {name: expected[id(p)] for name, p in model.named_parameters()}
    # open_clip 4 decays all of these but the positional embeddings, as the page says.
    positions = [name for name in decay_of if "position" in name]
    assert positions == ["image_tower.positions", "text_tower.positions"]
    assert all(decay_of[name] == theirs.wd for name in positions)
    assert decay_of["logit_scale"] == 0


def test_gradients_are_not_clipped(spec: RunSpec) -> None:
    assert spec.config.optim.grad_clip == 0  # open_clip's command has no --grad-clip-norm


def test_loss(spec: RunSpec) -> None:
    train = spec.config.train
    assert (train.label_smoothing, train.text_contrast) == (0, 0)
    assert spec.config.transfer.teacher is None
    images, texts = (F.normalize(torch.randn(8, 4), dim=1) for _ in range(2))
    scale = torch.tensor(14.3)
    # Two copies of an image and two equal captions are negatives of each other, as in open_clip.
    sample_ids = torch.tensor([0, 1, 2, 3, 4, 5, 6, 6])
    caption_ids = torch.tensor([0, 0, 2, 3, 4, 5, 6, 7])
    ids = Ids(sample_ids, caption_ids, torch.arange(8), None)
    loss, _ = RunLoss(LOSSES[train.loss], train.text_contrast).loss_and_grads(
        Features(images.requires_grad_(), texts.requires_grad_(), scale, None), ids
    )
    torch.testing.assert_close(loss, open_clip_loss(images, texts, scale).detach())


SMALL = {
    "data": ("synthetic",),
    "image_size": 32,
    "patch_size": 8,
    "vision_width": 64,
    "vision_layers": 2,
    "text_width": 64,
    "text_layers": 2,
    "embed_dim": 32,
    "synthetic_images": 72,
    "batch_size": 16,
    "warmup": 0.0,
    "device": "cpu",
    "precision": "fp32",
    "threads": 1,
    "epochs": 2.0,
}


def small_run() -> tuple[RunInputs, StepParts]:
    """The command of the page with a small model of the same kind, on synthetic images."""
    options = {
        name: value
        for name, value in page_options().items()
        if name not in ("image_column", "caption_column")
    }
    inputs = prepared(Settings({**options, **SMALL}).config)
    model = inputs.build_model()
    preprocess = inputs.model.preprocess
    return inputs, make_parts(model, inputs.config, inputs.device, inputs.precision, preprocess)


def test_steps_of_a_small_model_are_those_of_plain_adamw(theirs: argparse.Namespace) -> None:
    inputs, parts = small_run()
    config = inputs.config
    plain = copy.deepcopy(parts.model)
    optimizer = torch.optim.AdamW(open_clip_groups(plain, theirs.wd), betas=BETAS, eps=EPS)
    plan = step_plan(config.train)
    assert plan is not None
    steps = config.train.steps
    assert steps == 8
    for step in range(steps):
        batch = inputs.training[step]
        assert batch.tokens is not None
        assert batch.kept_patches is batch.boxes is None
        parts.update.optimizer.set_lr(scheduled_lr_fraction(config.optim, plan, step))
        actual = train_step(parts, batch, step)

        for group in optimizer.param_groups:
            group["lr"] = open_clip_lr(step, theirs.lr, 0, steps)
        pixels = render(batch.pixels(), batch.views, inputs.model.preprocess)
        texts = plain.encode_text(batch.tokens)[batch.image_index.argsort()]
        loss = open_clip_loss(plain.encode_image(pixels), texts, plain.logit_scale.exp())
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.get_total_norm([p.grad for p in plain.parameters()])
        assert norm > 1, "gradients are too small to notice if they were clipped"
        optimizer.step()
        with torch.no_grad():
            plain.logit_scale.clamp_(0, math.log(100))

        torch.testing.assert_close(actual.loss, loss.detach(), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(actual.grad_norm, norm, rtol=1e-3, atol=0)
    expected = dict(plain.named_parameters())
    for name, parameter in parts.model.named_parameters():
        difference = (parameter - expected[name]).detach()
        if name.endswith("qkv.bias"):
            # Softmax does not depend on a bias of the keys: its gradient is rounding noise, which
            # Adam scales up.
            queries, _, values = difference.chunk(3)
            difference = torch.cat([queries, values])
        assert difference.abs().max().item() < 2e-5, name


@pytest.mark.parametrize(("limit", "direction"), [(math.log(100), 1), (0.0, -1)])
def test_temperature_starts_and_is_clamped_as_in_open_clip(limit: float, direction: int) -> None:
    _, parts = small_run()
    logit_scale = parts.model.logit_scale
    assert logit_scale.item() == pytest.approx(math.log(1 / 0.07))
    with torch.no_grad():
        logit_scale.fill_(limit - direction * 1e-4)  # less than a step of 5e-4 away
    for p in parts.model.parameters():
        p.grad = torch.zeros_like(p)
    logit_scale.grad = torch.tensor(-1.0 * direction)
    parts.update(torch.tensor(1.0))
    assert logit_scale.item() == pytest.approx(limit, abs=1e-6)
