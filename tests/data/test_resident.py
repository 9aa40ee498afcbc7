"""Images that lie on the device: the same batches, with rows in the place of pixels."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import torch
from small_run import screen, small_config

from m1clip.data.cache import ArrayImages, LiveImages, MappedImages, ResidentImages, resident
from m1clip.data.loader import batches
from m1clip.training.run import decode_plan
from m1clip.training.setup import prepare_scratch
from m1clip.training.step import TrainStep

HOST = torch.device("cpu")
PIXELS = np.random.default_rng(0).integers(0, 256, (7, 4, 4, 3), np.uint8)


def test_decoded_images_go_there_when_they_leave_room(tmp_path: Path) -> None:
    np.save(tmp_path / "kept.npy", PIXELS)
    rows = np.array([5, 0, 3])
    for images, wanted in ((ArrayImages(PIXELS), PIXELS), (MappedImages(tmp_path / "kept.npy", rows), PIXELS[rows])):
        there = resident(images, HOST, 4 * wanted.nbytes)
        assert isinstance(there, ResidentImages)
        assert np.array_equal(there.read(np.arange(len(there))), wanted)
        assert resident(images, HOST, 4 * wanted.nbytes - 4) is images
    live = LiveImages([], 4)
    assert resident(live, HOST, 10**9) is live


def test_a_step_is_the_same_from_the_device() -> None:
    job = prepare_scratch(small_config({"data.crop_min": 0.5}), lambda line: None, decode_plan(screen()))
    plain = job.training
    there = copy.copy(plain)
    there.images = resident(plain.images, HOST, 10**9)
    update = TrainStep(job.build_model(), job.config, job.device, job.precision, job.preprocess, job.autocast)
    # Workers cannot see the device's memory, so that none are started for it.
    for step, (one, other) in enumerate(
        zip(batches(plain, 0, 3, 0, "fork", False), batches(there, 0, 3, 2, "fork", False), strict=True)
    ):
        assert other.pixels.shape == (16,)
        assert torch.equal(other.shown(), one.pixels)
        assert torch.equal(other.shown(slice(2, 5)), one.pixels[2:5])
        assert torch.equal(update.backward(one, step), update.backward(other, step))
