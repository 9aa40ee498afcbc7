"""Choose the recipe of a run: new heads on pretrained towers, fine-tuning, or random weights."""

from __future__ import annotations

from collections.abc import Callable

from m1clip import console
from m1clip.config import Config, TransferConfig
from m1clip.data.prepare import is_synthetic
from m1clip.errors import UserError
from m1clip.model.pretrained.packages import install_hint, tower_parts
from m1clip.optimizers import OPTIMIZERS
from m1clip.training.decision import Dataset, TuningFacts
from m1clip.training.spec import Settings
from m1clip.training.tower_choice import BASE_TEXT, base_of
from m1clip.training.tuning import Tuning, choose_tuning

# These three are rules of thumb: the recipes were measured on one dataset of 6,000 images
# (docs/finetune.md).
LONG_MINUTES = 10  # enough to fine-tune the towers after the heads
ENOUGH_TO_FINETUNE = 2_000  # images; with fewer, trainable towers may overfit
PRETRAINED_BELOW_IMAGES = 1_000_000  # below this, pretrained towers are used if they are installed
# Options of fine-tuning, and of pretrained towers with new heads.
TOWER_FINETUNING = ("unfreeze_image", "unfreeze_text", "lora")
FINETUNE_OPTIONS = ("wise_ft", *TOWER_FINETUNING)
INIT_OPTIONS = ("wise_ft", "general_data")  # of a trained model, also where its towers are frozen
TOWER_OPTIONS = ("image_tower", "text_tower")
# Options of a model trained from random weights; the other ones of a model apply to pretrained
# towers too.
SCRATCH_OPTIONS = (
    *("model", "patch_size", "vision_width", "vision_layers", "text_width", "text_layers", "stem"),
    *("members", "tokenizer"),
)


def with_recipe(
    settings: Settings,
    dataset: Callable[[], Dataset],
    is_installed: Callable[[str], bool],
    tuning: Callable[[Config], TuningFacts] | None = None,
) -> Settings:
    """The settings with a recipe in place of `auto`; its values are below those of the user.

    Without `tuning`, what is trained of a model to start from stays undecided.
    """
    transfer = settings.config.transfer
    if transfer.recipe != "auto":
        return settings
    if transfer.init is not None:
        return settings if tuning is None else _with_tuning(settings, dataset, tuning)
    recipe, reason = choose_recipe(settings, dataset, is_installed)
    others = " or ".join(name for name in ("frozen", "finetune", "scratch") if name != recipe)
    console.print(f"recipe     {recipe}: {reason} (to choose otherwise: --recipe {others})")
    decided = settings.with_values(recipe=recipe)
    decided.chosen_by["recipe"] = "rule"
    return decided


def _with_tuning(
    settings: Settings, dataset: Callable[[], Dataset], tuning: Callable[[Config], TuningFacts]
) -> Settings:
    """The settings with what is trained of a model to start from, by its options or by the rule."""
    option = next((name for name in FINETUNE_OPTIONS if name in settings.specified), None)
    if option is not None:
        chosen = settings.with_values(recipe="finetune")
        chosen.chosen_by["recipe"] = "rule"
        return chosen
    data = dataset()
    config = settings.config
    if data.streamed:  # features of all images cannot be cached
        choice = Tuning("finetune", "all blocks of both towers", "the shards are streamed", {})
    else:
        # Without its patience, which the user's --eval-every 0 would contradict.
        finetuned = settings.with_values(recipe="finetune", patience=0).config
        optimizer = OPTIMIZERS[finetuned.optim.optimizer]
        choice = choose_tuning(
            data.images, config.train.minutes, *tuning(config), optimizer.trained_bytes
        )
    other = "--recipe finetune" if choice.recipe == "frozen" else "--recipe frozen"
    console.print(
        f"recipe     {choice.recipe}, {choice.trained_part}: {choice.reason} (to choose otherwise:"
        f" {other}, --lora or --unfreeze-image and --unfreeze-text)"
    )
    decided = settings.with_values(recipe=choice.recipe, **choice.settings)
    decided.chosen_by.update(dict.fromkeys(("recipe", *choice.settings), "rule"))
    return decided


def choose_recipe(
    settings: Settings, dataset: Callable[[], Dataset], is_installed: Callable[[str], bool]
) -> tuple[str, str]:
    """(recipe, reason): by the options that the user gave, else by the data, the installed towers
    and the time.
    """
    config = settings.config
    for recipe, names, reason in (
        ("finetune", FINETUNE_OPTIONS, "is for towers that are trained"),
        ("frozen", TOWER_OPTIONS, "is for pretrained towers"),
        ("scratch", SCRATCH_OPTIONS, "is for a model trained from random weights"),
    ):
        if option := next((name for name in names if name in settings.specified), None):
            return recipe, f"--{option.replace('_', '-')} {reason}"
    if is_synthetic(config.data):
        return "scratch", "random weights, because pretrained towers were trained on photographs"
    data = dataset()
    if data.streamed:
        return "scratch", "random weights, because the shards are streamed"
    if data.images >= PRETRAINED_BELOW_IMAGES:
        return "scratch", f"random weights, because {data.images:,} images are enough"
    towers = (base_of(config.transfer.image_tower), base_of(config.transfer.text_tower, BASE_TEXT))
    if not all(map(is_installed, towers)):
        fix = install_hint(towers[0])
        return "scratch", f"random weights; {fix} would give about twice the recall on photographs"
    minutes = config.train.minutes or 0
    if minutes >= LONG_MINUTES and data.images >= ENOUGH_TO_FINETUNE:
        enough = f"{minutes:g} minutes and {data.images:,} images are enough"
        return "finetune", f"pretrained towers, also trained: {enough}"
    return (
        "frozen",
        (
            f"pretrained towers, because {data.images:,} images are too few to train from random"
            " weights"
        ),
    )


def check_transfer(transfer: TransferConfig) -> None:
    """Reject options that do not apply to the recipe."""
    default = TransferConfig()
    tuned = transfer.init is not None
    recipe = "--init" if tuned else f"--recipe {transfer.recipe}"
    if transfer.recipe == "frozen":
        recipe = "--recipe frozen"
    trains_towers = transfer.recipe == "finetune" or (tuned and transfer.recipe == "auto")
    applicable = [
        (TOWER_FINETUNING, trains_towers, "--init or --recipe finetune"),
        (INIT_OPTIONS, trains_towers or tuned, "--init or --recipe finetune"),
        (TOWER_OPTIONS, not tuned and transfer.recipe != "scratch", "--recipe frozen or finetune"),
    ]
    for names, allowed, where in applicable:
        for name in names:
            if not allowed and getattr(transfer, name) != getattr(default, name):
                raise UserError(f"--{name.replace('_', '-')} works with {where}, not with {recipe}")
    image_parts = tower_parts(base_of(transfer.image_tower))
    has_no_matrices = not tuned and all(part.startswith("efficientnet") for part in image_parts)
    # Said before the first stage, which takes minutes.
    if transfer.lora and has_no_matrices and transfer.unfreeze_image != 0:
        raise UserError(
            f"--lora {transfer.lora}: {base_of(transfer.image_tower)} has no linear layers, which"
            " LoRA needs; freeze it with --unfreeze-image 0"
        )
