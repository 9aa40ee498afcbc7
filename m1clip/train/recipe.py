"""Which way a run goes: from random weights, or on towers that others have trained."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from m1clip.config import DURATIONS, Config
from m1clip.config_transfer import TransferConfig
from m1clip.configfile import read_preset
from m1clip.data.keep import DecodePlan
from m1clip.data.prepare import is_synthetic, open_data
from m1clip.errors import UserError
from m1clip.hardware.facts import Facts
from m1clip.model.pretrained.load import installed, remedy
from m1clip.train.distil import with_teacher
from m1clip.train.finetune import prepare_init
from m1clip.train.frozen import prepare_frozen
from m1clip.train.setup import Job
from m1clip.train.setup import prepare as prepare_scratch

# These three are judgement: the recipes were measured on one set, of 6,000 pictures (docs/finetune.md).
LONG_MINUTES = 10  # enough for letting the towers go
ENOUGH_TO_MOVE = 2_000  # pictures; with fewer, towers that move may learn them by heart
FEW_PICTURES = 100_000  # below this pretrained towers are taken, where they are installed
# Options of TransferConfig that have a meaning only where trained towers move.
MOVING = {
    "wise": "--wise",
    "base": "--base",
    "lora_rank": "--transfer.lora-rank",
    "train_image": "--transfer.train-image",
    "train_text": "--transfer.train-text",
}


def prepare(
    config: Config, say: Callable[[str], None], decode: Callable[[Facts], DecodePlan], saved: Any = None
) -> Job:
    """Answer every question of a run, whichever recipe it follows; `saved` as in setup.prepare."""
    job: Job
    if config.transfer.recipe == "finetune":
        raise UserError("--recipe finetune is two runs: m1clip.train.stages makes them")
    if config.transfer.recipe == "frozen":
        job = prepare_frozen(config, say, decode)
    elif config.transfer.init is not None:
        job = prepare_init(config, say, decode, saved)
    else:
        job = prepare_scratch(config, say, decode, saved)
    return with_teacher(job, say, decode) if config.transfer.teacher else job


def run_name(config: Config) -> str:
    """What the folder of a run is called, if the person does not say."""
    if config.transfer.init is not None:
        return "finetune"
    return config.model.preset if config.transfer.recipe == "scratch" else config.transfer.recipe


def decided(config: Config, say: Callable[[str], None]) -> Config:
    """The config with `--recipe auto` answered, and the reason said; an option without a meaning is refused."""
    if config.transfer.recipe != "auto":
        _check_meant(config.transfer)
        return config
    recipe, why = choose(config)
    say(f"recipe     {recipe}: {why}")
    config = dataclasses.replace(config, transfer=dataclasses.replace(config.transfer, recipe=recipe))
    _check_meant(config.transfer)
    if recipe != "frozen":
        return config
    settled = with_settings_of(config, read_preset(recipe))
    say_settings(config, settled, say)
    return settled


def _check_meant(transfer: TransferConfig) -> None:
    if transfer.init is not None or transfer.recipe == "finetune":
        return
    plain = TransferConfig()
    for name, option in MOVING.items():
        if getattr(transfer, name) != getattr(plain, name):
            raise UserError(
                f"{option} goes with --init or --recipe finetune, not with --recipe {transfer.recipe}"
            )


def say_settings(before: Config, after: Config, say: Callable[[str], None]) -> None:
    """Name what a recipe has put in the place of defaults: one of them may have been meant."""
    changed = [
        f"{section}.{item.name} {getattr(getattr(after, section), item.name)}"
        for section in ("train", "optim")
        for item in dataclasses.fields(getattr(after, section))
        if getattr(getattr(before, section), item.name) != getattr(getattr(after, section), item.name)
    ]
    if changed:
        say(f"settings   of the recipe, in the place of defaults: {', '.join(changed)}")


def with_settings_of(config: Config, settings: dict[str, Any]) -> Config:
    """The settings of a recipe, wherever the config still stands at its default."""
    plain, changes = Config(), {}
    given = any(getattr(config.train, name) is not None for name in DURATIONS)
    for section, values in ((name, v) for name, v in settings.items() if isinstance(v, dict)):
        now, default = getattr(config, section), getattr(plain, section)
        open_ = {
            key: value
            for key, value in values.items()
            if getattr(now, key) == getattr(default, key) and not (given and key in DURATIONS)
        }
        changes[section] = dataclasses.replace(now, **open_)
    return dataclasses.replace(config, **changes)


def choose(config: Config) -> tuple[Any, str]:
    """(recipe, reason): by the kind and size of the data, by what is installed, and by the time that was given."""
    if config.transfer.init is not None:
        return "scratch", f"starts from {config.transfer.init}, so it is a fine-tuning"
    if is_synthetic(config.data):
        return "scratch", "drawn pictures are unlike what the pretrained towers have seen"
    pictures = len(open_data(config.data, config.transfer.image_size, config.seed).pairs("train"))
    if pictures >= FEW_PICTURES:
        return "scratch", f"{pictures:,} pictures are enough to learn from random weights"
    missing = [t for t in (config.transfer.image_tower, config.transfer.text_tower) if not installed(t)]
    if missing:
        return (
            "scratch",
            f"{pictures:,} pictures are few, but {missing[0]} is not installed: {remedy(missing[0])}",
        )
    why = f"{pictures:,} pictures are too few for random weights, and the pretrained towers are installed"
    minutes = config.train.minutes or 0
    if minutes >= LONG_MINUTES and pictures >= ENOUGH_TO_MOVE:
        return "finetune", f"{why}; {minutes:g} minutes are enough to let them move after the heads"
    return "frozen", why
