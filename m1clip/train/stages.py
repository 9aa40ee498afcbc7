"""A run of one stage or two: `--recipe finetune` trains heads on frozen towers first, then lets the towers go."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from m1clip.config import Config, OptimConfig, TrainConfig
from m1clip.config_transfer import TransferConfig
from m1clip.configfile import read_preset
from m1clip.train.folder import check_free
from m1clip.train.recipe import decided, say_settings, with_settings_of
from m1clip.train.run import Result
from m1clip.train.run import train as train_once
from m1clip.train.screen import Screen

# Settings that hold for both stages: the machine, the batch, and the loss, whose parameters the first stage makes.
BOTH = ("batch", "device", "precision", "threads", "log", "objective", "label_smoothing")
SECOND = ("base", "wise", "lora_rank", "train_image", "train_text")  # for the stage that moves the towers


def train(
    config: Config, run: str | Path | None = None, screen: Screen | None = None, name: str | None = None,
    settled: bool = False,
) -> Result:  # fmt: skip
    """Train from the beginning in a new run folder: `run`, or runs/NAME (default: by model and recipe).

    The frozen stage of a fine-tuning is a run of its own: `run`-frozen, or runs/frozen where `run` is not given.
    `settled`: the config has the recipe's settings already, under what the person gave.
    """
    screen = screen or Screen()
    config = decided(config, screen.say)
    transfer = config.transfer
    if transfer.recipe != "finetune":
        return train_once(config, run, screen, name)
    if run is not None:
        check_free(Path(run))  # before the first stage spends minutes
    if transfer.init is None:
        screen.say("stage 1    heads on frozen towers")
        folder = None if run is None else Path(f"{run}-frozen")
        found = train_once(frozen_stage(config), folder, screen)
        screen.say(f"stage 2    the towers move too, from {found.run}")
        transfer = dataclasses.replace(transfer, init=str(found.run))
    second = unfrozen_stage(config, transfer.init or "", settled)
    say_settings(config, second, screen.say)
    return train_once(second, run, screen, name)


def frozen_stage(config: Config) -> Config:
    """The first stage: the recipe's own settings and duration; data, heads, towers and machine as asked."""
    kept = {name: getattr(config.train, name) for name in BOTH}
    plain = {name: getattr(TransferConfig(), name) for name in SECOND}
    transfer = dataclasses.replace(config.transfer, recipe="frozen", **plain)
    asked = dataclasses.replace(config, transfer=transfer, train=TrainConfig(**kept), optim=OptimConfig())
    return with_settings_of(asked, read_preset("frozen"))


def unfrozen_stage(config: Config, init: str, settled: bool = False) -> Config:
    """The second stage: the duration asked for, and careful settings where none were; `settled` as in `train`."""
    transfer = dataclasses.replace(config.transfer, recipe="scratch", init=init)
    asked = dataclasses.replace(config, transfer=transfer)
    return asked if settled else with_settings_of(asked, read_preset("unfreeze"))
