"""Builds the initial model on a GPU while images are decoded, which leaves the GPU mostly idle."""

from __future__ import annotations

import dataclasses
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from m1clip.config import Config
from m1clip.hardware.device import Device, Precision, autocast
from m1clip.model.clip import CLIP
from m1clip.model.members import MemberTowers
from m1clip.model.towers import VisionTower
from m1clip.training.inputs import seeded_build
from m1clip.training.oom import is_out_of_memory
from m1clip.training.step import uses_kernels
from m1clip.training.transfer import ModelInit

LOADING_IMAGES = 256  # for a small batch, the libraries choose other kernels than for a large one


class ModelAhead:
    """The initial model of a run, which a thread builds, and runs once on the GPU.

    The first step of a process takes more than a second longer: it loads the kernels.
    """

    def __init__(
        self,
        model_init: ModelInit,
        config: Config,
        device: Device,
        precision: Precision,
        text_tokens: int,
        is_captured: bool,
    ) -> None:
        """`text_tokens` of the longest caption; `is_captured`: the steps can be CUDA graphs."""
        self.config = config
        self.text_tokens = text_tokens
        self.is_captured = is_captured
        self.model_init = model_init
        self.device = device
        self.precision = precision
        thread = ThreadPoolExecutor(1, "model")
        self._built: Future[CLIP] = thread.submit(self._build, config.seed)
        self._has_run: Future[None] = thread.submit(self._run_once)
        thread.shutdown(wait=False)

    def wait_until_built(self) -> None:
        """Wait until no random numbers are drawn any more: they come from torch's only generator."""
        self._built.result()

    def model_for(self, model_init: ModelInit) -> CLIP | None:
        """The model, once: with the filters that were fitted to the images since.

        None if another one is asked for.
        """
        fitted = model_init.stem_filters
        model = self._built.result()
        self._has_run.result()
        if dataclasses.replace(model_init, stem_filters=None) != self.model_init:
            return None
        if fitted is not None and isinstance(model.image_tower, VisionTower | MemberTowers):
            with torch.no_grad():
                model.image_tower.set_stem_filters(fitted)
        return model

    def _build(self, seed: int) -> CLIP:
        model = seeded_build(self.model_init, seed)
        model.to_devices(self.device.torch, self.device.text_torch)
        return model

    def _run_once(self) -> None:
        """A forward and backward pass, as the steps will compute them; not if memory is short."""
        model = self._built.result()
        shape = self.model_init.config
        device = self.device.torch
        side, end = shape.image_size, shape.text_tower.eot_id
        model.use_triton(uses_kernels(self.config, self.device, self.precision, self.is_captured))
        try:
            images = torch.zeros((LOADING_IMAGES, 3, side, side), device=device)
            length = self.text_tokens
            tokens = torch.full((LOADING_IMAGES, length), 1 if end is None else end, device=device)
            with autocast(self.device, self.precision)():
                vectors = torch.cat([model.encode_view(images), model.encode_text(tokens)])
            vectors.sum().backward()
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
        model.zero_grad(set_to_none=True)
        self.device.release()
