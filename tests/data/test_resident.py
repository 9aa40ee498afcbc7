"""Images that lie on the device: the same batches, with rows in the place of pixels."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import torch
from small_run import screen, small_config

from m1clip.data.cache import ArrayImages, LiveImages, MappedImages
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
        there = images.to_device(HOST, 4 * wanted.nbytes)
        assert there is not None
        assert np.array_equal(there.numpy(), wanted)
        assert images.to_device(HOST, 4 * wanted.nbytes - 4) is None
    assert LiveImages([], 4).to_device(HOST, 10**9) is None


def test_a_step_is_the_same_from_the_device() -> None:
    job = prepare_scratch(small_config({"data.crop_min": 0.5}), lambda line: None, decode_plan(screen()))
    plain = job.training
    there = copy.copy(plain)
    there.device_images = plain.images.to_device(HOST, 10**9)
    update = TrainStep(job.build_model(), job.config, job.device, job.precision, job.preprocess, job.autocast)
    # Workers cannot see the device's memory, so that none are started for it.
    for step, (one, other) in enumerate(
        zip(batches(plain, 0, 3, 0, "fork", False), batches(there, 0, 3, 2, "fork", False), strict=True)
    ):
        assert other.images is None
        assert torch.equal(other.pixels(), one.images)
        assert torch.equal(other.pixels(slice(2, 5)), one.images[2:5])
        assert torch.equal(update.backward(one, step), update.backward(other, step))
