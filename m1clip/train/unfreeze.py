"""`train --init RUN` where the run was trained on frozen towers: now the towers, or parts of them, move too."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import cast

from m1clip.config import Config, DataConfig
from m1clip.data.keep import DecodePlan
from m1clip.data.pair import Source
from m1clip.data.prepare import Split
from m1clip.errors import UserError
from m1clip.evaluate.bundle import assemble
from m1clip.evaluate.foreign import Parts
from m1clip.hardware.facts import Facts, read_facts
from m1clip.model.pretrained.clip import TowerClip
from m1clip.train.fit import open_training_data
from m1clip.train.forgetting import with_base
from m1clip.train.frozen import Started, prepare_towers
from m1clip.train.sides import Moving, maker_of, side_split
from m1clip.train.tower_job import TowerJob


def prepare_unfrozen(
    config: Config, say: Callable[[str], None], decode: Callable[[Facts], DecodePlan], parts: Parts
) -> TowerJob:
    """Answer every question of such a run; a tower that still stands still is read from its features."""
    transfer = config.transfer
    if transfer.vocabulary == "cut":
        raise UserError("--transfer.vocabulary cut goes with CLIP's pieces, not with a pretrained text tower")
    if config.model.image_size not in (None, parts.preprocess.image_size):
        raise UserError(
            f"{transfer.init}: a model on towers keeps its image size, {parts.preprocess.image_size}"
        )
    bundle = assemble(parts)
    model = cast(TowerClip, bundle.model)
    if config.train.objective == "sigmoid" and model.logit_bias is None:
        raise UserError(
            f"{transfer.init}: has no bias for --train.objective sigmoid; choose multi, or train it with sigmoid first"
        )
    moving = Moving(transfer.train_image != 0, transfer.train_text != 0)
    source = open_training_data(config, parts.preprocess.image_size, decode(read_facts()))
    started = Started(model, bundle.tokenizer, bundle.preprocess)
    job = prepare_towers(config, say, decode, source, started, moving, fresh=False)

    def load_base(other: Source, split: str, data: DataConfig) -> Split:
        asked = dataclasses.replace(job.config, data=data)
        plan = decode(job.facts)
        maker = maker_of(*started, asked, other, job.device, job.precision, plan)
        return side_split(maker, asked, other, split, moving)

    return with_base(job, load_base)
