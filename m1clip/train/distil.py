"""`train --teacher MODEL`: its features of the training set are made once and kept, like those of a frozen tower."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np

from m1clip.data.cache_place import cache_folder
from m1clip.data.keep import DecodePlan, data_folders
from m1clip.errors import UserError
from m1clip.evaluate.bundle import load
from m1clip.features.split import Maker, Side, feature_captions, feature_pictures
from m1clip.hardware.facts import Facts
from m1clip.model.pretrained.load import weights_hash
from m1clip.train.setup import Job
from m1clip.train.teacher import Teacher


def with_teacher(job: Job, say: Callable[[str], None], decode: Callable[[Facts], DecodePlan]) -> Job:
    """The job with what the teacher makes of its training pictures and captions."""
    transfer, train = job.config.transfer, job.splits["train"]
    bundle = load(Path(transfer.teacher or ""), job.device.kind, activation=transfer.activation)
    model, width = bundle.model, bundle.model.shape.embed_dim
    roots, beside = data_folders(job.source)
    # The same weights make other vectors with another activation, or fewer heads.
    key = (
        weights_hash(model.state_dict()),
        json.dumps(model.shape.to_dict(), sort_keys=True),
        "unit vectors",
    )
    maker = Maker(
        image=Side(model.encode_image, width, key), text=Side(model.encode_text, width, key),
        tokenizer=bundle.tokenizer, context_length=model.shape.context_length, preprocess=bundle.preprocess, views=1,
        folder=cache_folder(job.config.data.cache_dir, beside), roots=roots, device=job.device.torch,
        precision=job.precision, autocast=job.autocast, plan=decode(job.facts),
    )  # fmt: skip
    pictures, kept, _ = feature_pictures(maker, train.pairs, "train", 0.0)
    if len(kept) != len(train.pairs):
        raise UserError(
            f"{transfer.teacher}: cannot read {len(train.pairs) - len(kept)} of the training pictures"
        )
    captions = feature_captions(maker, train.pairs, "train")
    _, first = np.unique(train.captions.keys, return_index=True)  # keys are 0, 1, 2, ...
    scale = float(model.scale().detach())
    say(
        f"teacher    {transfer.teacher}: {transfer.teacher_weight:g} of the loss, temperature {1 / scale:.3f}"
    )
    teacher = Teacher(
        pictures.table, pictures.at[:, 0], captions.table, captions.at[first], scale, transfer.teacher_weight
    )
    return dataclasses.replace(job, teacher=teacher)
