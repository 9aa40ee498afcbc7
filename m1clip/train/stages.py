"""A run of one stage or two: `--recipe finetune` trains heads on frozen towers first, then lets the towers go."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from m1clip.config import Config, OptimConfig, TrainConfig
from m1clip.configfile import read_preset
from m1clip.train.recipe import decided, with_settings_of
from m1clip.train.run import Result
from m1clip.train.run import train as train_once
from m1clip.train.screen import Screen

MACHINE = ("device", "precision", "threads", "log")  # settings that hold for both stages


def train(
    config: Config, run: str | Path | None = None, screen: Screen | None = None, name: str | None = None
) -> Result:
    """Train from the beginning in a new run folder: `run`, or runs/NAME (default: by model and recipe).

    The frozen stage of a fine-tuning is a run of its own beside it, whose name ends in -frozen.
    """
    screen = screen or Screen()
    config = decided(config, screen.say)
    transfer = config.transfer
    if transfer.recipe != "finetune":
        return train_once(config, run, screen, name)
    if transfer.init is None:
        screen.say("stage 1    heads on frozen towers")
        folder = None if run is None else Path(f"{run}-frozen")
        found = train_once(frozen_stage(config), folder, screen)
        screen.say(f"stage 2    the towers move too, from {found.run}")
        transfer = dataclasses.replace(transfer, init=str(found.run))
    return train_once(unfrozen_stage(config, transfer.init or ""), run, screen, name)


def frozen_stage(config: Config) -> Config:
    """The first stage: the recipe's own settings and duration; data, heads, towers and machine as asked."""
    kept = {name: getattr(config.train, name) for name in MACHINE}
    transfer = dataclasses.replace(config.transfer, recipe="frozen", base=(), wise="off")
    plain = dataclasses.replace(config, transfer=transfer, train=TrainConfig(**kept), optim=OptimConfig())
    return with_settings_of(plain, read_preset("frozen"))


def unfrozen_stage(config: Config, init: str) -> Config:
    """The second stage: the duration asked for, and careful settings where none were."""
    transfer = dataclasses.replace(config.transfer, recipe="scratch", init=init)
    return with_settings_of(dataclasses.replace(config, transfer=transfer), read_preset("unfreeze"))
