"""A run on towers of others: those that stand still are read from their features, those that move are trained."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from m1clip.features.tables import FeatureCaptions, FeaturePictures
from m1clip.model.clip import Clip
from m1clip.model.freeze import ALL
from m1clip.model.heads import Head
from m1clip.model.lora import open_tower
from m1clip.model.pretrained.clip import TowerClip
from m1clip.train.forgetting import Base
from m1clip.train.mixing import mix
from m1clip.train.setup import Job
from m1clip.train.sides import Moving

SAMPLE = 50_000  # rows from which mean and deviation are taken


@dataclass(frozen=True)
class TowerJob(Job):
    """A run on features, on data, or on one of each."""

    towers: TowerClip = dataclasses.field(kw_only=True)  # the weights it starts from; never trained in place
    moving: Moving = dataclasses.field(kw_only=True)
    fresh: bool = dataclasses.field(kw_only=True)  # new heads, and all of a tower that moves is trained
    base: Base | None = dataclasses.field(kw_only=True, default=None)

    def build_model(self) -> Clip:
        """The towers with new heads from the seed, or with the heads it starts from; what is to stand still does."""
        torch.manual_seed(self.config.seed)
        model = TowerClip(self.towers.shape, self.tokenizer.pad_id).to(self.device.torch)
        still = (self.towers.image, self.towers.text)
        model.image, model.text = (
            copy.deepcopy(tower) if moves else tower for tower, moves in zip(still, self.moving, strict=True)
        )
        if self.fresh:
            self._standardise(model)
        else:
            model.load_state_dict(self.towers.state_dict())
            for head in (model.image_projection, model.text_projection):
                cast(Head, head).spare_dead_channels()
        self._let_go(model)
        model.set_attention(self.config.model.attention_image, self.config.model.attention_text)  # type: ignore[arg-type]
        model.set_recompute(self.config.model.recompute)
        return model

    def _standardise(self, model: TowerClip) -> None:
        """Tell new heads the mean and deviation of the training features; a tower of ours ends in a norm already."""
        train = self.splits["train"]
        if isinstance(train.pictures, FeaturePictures):
            pictures = train.pictures
            cast(Head, model.image_projection).standardise(*moments(pictures.table, pictures.at[:, 0]))
        if isinstance(train.captions, FeatureCaptions):
            captions = train.captions
            cast(Head, model.text_projection).standardise(*moments(captions.table, captions.at))

    def _let_go(self, model: TowerClip) -> None:
        transfer = self.config.transfer
        rank = 0 if self.fresh else transfer.lora_rank
        counts = (ALL, ALL) if self.fresh else (transfer.train_image, transfer.train_text)
        names = ("--transfer.train-image", "--transfer.train-text")
        towers = (model.image, model.text)
        for tower, moves, count, name in zip(towers, self.moving, counts, names, strict=True):
            if moves:
                open_tower(tower, count, name, rank, transfer.lora_alpha, transfer.lora_targets)

    def polish(self, folder: Path, say: Callable[[str], None], write: Callable[..., Any]) -> None:
        """Mix old and new weights where it was asked for."""
        if not self.fresh:
            mix(self, self.towers.state_dict(), self.base, folder, say, write)

    def also_measured(self, model: Clip, say: Callable[[str], None]) -> dict[str, Any]:
        """The base set, where there is one."""
        return {} if self.base is None else self.base.figures(model, say)

    def describe_model(self) -> str:
        """The towers, what of them stands still, and the heads."""
        shape, model = self.towers.shape, self.build_model()
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        still = sum(p.numel() for p in model.parameters()) - trained
        names = " and ".join(
            f"{name}{'' if moves else ', frozen'}"
            for name, moves in zip((shape.image_tower, shape.text_tower), self.moving, strict=True)
        )
        if not any(self.moving):
            names = f"{shape.image_tower} and {shape.text_tower}, frozen"
        return (
            f"{names} ({still:,} parameters stand still), {shape.head} heads to {shape.embed_dim} "
            f"({trained:,} to train)"
        )


def moments(table: np.ndarray, at: np.ndarray) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of each feature over the rows `at`, or an even sample of many."""
    chosen = at[:: max(1, len(at) // SAMPLE)]
    rows = torch.from_numpy(table[np.sort(chosen)].astype(np.float32))
    return rows.mean(dim=0), rows.std(dim=0, correction=0)
