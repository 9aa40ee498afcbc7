"""The encoder in torch."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from m1clip.config import TrainConfig
from m1clip.data.array_view import ArrayView
from m1clip.data.captions import CaptionTable
from m1clip.data.images import Preprocess
from m1clip.data.prepare import Split
from m1clip.data.types import ImageRef
from m1clip.errors import UserError
from m1clip.hardware.choices import matmul_precision
from m1clip.hardware.device import Device, Kind, Precision, choose_device, choose_precision, threads
from m1clip.hardware.machine_info import read_machine_info
from m1clip.inference.batches import Tower, TowerRunner, chunks, in_order, parallel
from m1clip.inference.inputs import LoadingProcess
from m1clip.inference.model import Model
from m1clip.model.clip import CLIP
from m1clip.model.folder import CONFIG, open_device, read_model, write_model
from m1clip.text.base import Tokenizer

HEAD_BATCH = 1024  # features that go through a head at a time


@functools.cache
def fastest_precision(kind: Kind) -> Precision:
    """The precision for `auto`: bf16 where its matmuls are faster."""
    return matmul_precision(kind, read_machine_info())


class TorchEncoder:
    """Runs a torch module; vectors are tensors on the CPU.

    `precision` is "fp32", "bf16" or "auto", the faster one on the device. May be used by many
    threads at the same time, and on the CPU by forked processes, with one thread each.
    """

    def __init__(
        self,
        clip: CLIP,
        tokenizer: Tokenizer,
        preprocess: Preprocess,
        precision: Precision | Literal["auto"] = "auto",
    ) -> None:
        self.clip = clip
        self.tokenizer = tokenizer
        self.preprocess = preprocess
        self.precision = precision
        tokenizer.context_length = clip.config.context_length
        self._process = LoadingProcess()

    @property
    def context_length(self) -> int:
        """Maximum number of tokens of a text, including start and EOT tokens."""
        return self.clip.config.context_length

    @property
    def embed_dim(self) -> int:
        """Length of a vector."""
        return self.clip.config.embed_dim

    @property
    def logit_scale(self) -> float:
        """What cosine similarities are multiplied by to get logits."""
        return float(self.clip.scale().detach())

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return self.clip.logit_scale.device

    @property
    def text_device(self) -> torch.device:
        """The device of the text tower: another one while a model is trained on two devices."""
        return next(self.clip.text_tower.parameters()).device

    def describe(self) -> str:
        """Number of parameters, and the device."""
        parameters = sum(parameter.numel() for parameter in self.clip.parameters())
        return f"{parameters:,} parameters on {self.device}"

    def towers(self, max_batch: int | None = None) -> TowerRunner:
        """What runs both towers; switches the module to evaluation mode."""
        kind = self.device.type
        if kind != "cpu":
            self._process.require_same(f"a model on {kind}")
        elif self._process.is_forked() and torch.get_num_threads() > 1:
            # OpenMP would wait for threads that do not exist in a forked process.
            torch.set_num_threads(1)
        if self.clip.training:
            self.clip.eval()
        return TowerRunner(
            self.clip.encode_image,
            self.clip.encode_text,
            self.preprocess,
            self.device,
            fastest_precision(kind) if self.precision == "auto" else self.precision,
            max_batch,
            self.clip.image_tower.tokens_per_image,
            self.text_device,
        )

    def images(self, images: Iterable[np.ndarray], total: int, max_batch: int | None) -> Tensor:
        """(total, embed_dim) vectors of (size, size, 3) uint8 images."""
        parts = list(self.towers(max_batch).images(images, total))
        return torch.cat(parts) if parts else torch.empty(0, self.embed_dim)

    def tokens(self, tokens: np.ndarray, lengths: np.ndarray, max_batch: int | None) -> Tensor:
        """(n, embed_dim) vectors of (n, context_length) token ids."""
        if len(tokens) == 0:
            return torch.empty(0, self.embed_dim)
        return in_order(self.towers(max_batch).tokens(tokens, lengths))

    def files(
        self, refs: Sequence[ImageRef], failures: dict[int, str]
    ) -> Iterator[tuple[list[int], Tensor]]:
        """(indices into `refs`, their vectors), in chunks.

        Unreadable images are added to `failures`.
        """
        return self.towers().files(refs, failures)

    def split_images(self, split: Split, rows: range) -> Tensor:
        """(rows, embed_dim) vectors of some images of a split.

        Features of a frozen tower are reused.
        """
        with self._evaluating() as towers:
            if split.image_features is not None:
                device = self.device
                return self._project(
                    self.clip.project_image, split.image_features, rows, towers, device
                )
            batches = chunks(rows, towers.batch(len(rows)))
            parts = parallel(
                lambda batch: towers.pixels(split.images.read(np.array(batch))),
                batches,
                towers.workers,
            )
            return torch.cat(list(parts))

    def captions(self, table: CaptionTable, rows: range) -> Tensor:
        """(rows, embed_dim) vectors of some captions; features of a frozen tower are reused."""
        with self._evaluating() as towers:
            if table.features is not None:
                device = self.text_device
                return self._project(self.clip.project_text, table.features, rows, towers, device)
            part = slice(rows.start, rows.stop)
            return in_order(towers.tokens(table.tokens[part], table.lengths[part]))

    @contextmanager
    def _evaluating(self) -> Iterator[TowerRunner]:
        """Yield the runner of the towers, and restore the module's training mode afterwards."""
        training = self.clip.training
        try:
            with torch.inference_mode():
                yield self.towers()
        finally:
            if training:
                self.clip.train()

    def _project(
        self, head: Tower, table: ArrayView, rows: range, towers: TowerRunner, device: torch.device
    ) -> Tensor:
        """(rows, embed_dim) vectors from the cached features of a tower."""
        batches = np.array_split(np.array(rows), -(-len(rows) // HEAD_BATCH))
        with towers.autocast(device):
            features = [torch.from_numpy(table.read(batch)).to(device).float() for batch in batches]
            return torch.cat([head(part).float().cpu() for part in features])

    def use_device(self, requested: str, run: TrainConfig | None = None) -> None:
        """Run on a requested device, with the settings of a run where it is that run's device.

        Then the scores of an evaluation match those printed in training.
        """
        facts = read_machine_info()
        device = Device(choose_device(requested, facts), facts)
        torch.set_num_threads(threads(0 if run is None else run.threads, facts))
        self.clip.to(device.torch)
        if run is None or run.device == "auto" or run.precision == "auto":
            return
        if device.torch == Device(run.device, facts).torch:
            self.precision = choose_precision(run.precision, device.kind, facts)

    def to(self, device: str | torch.device) -> None:
        """Move the weights to a device."""
        self.clip.to(open_device(device))

    def save(self, path: Path) -> None:
        """Write a model folder.

        An older one there is replaced only when the new one is complete.
        """
        if (
            path.exists()
            and not (path / CONFIG).is_file()
            and (path.is_file() or any(path.iterdir()))
        ):
            raise UserError(f"{path}: exists and is not a model folder; choose another folder")
        write_model(path, self.clip, self.tokenizer, self.preprocess)


def load_torch(
    path: Path, device: str, image_size: int | None, precision: Precision | Literal["auto"]
) -> Model:
    """The model in a model folder, in a run, or of open_clip or Hugging Face; see `m1clip.load`."""
    saved = read_model(path).resized(image_size)
    return Model(TorchEncoder(saved.build(device), saved.tokenizer, saved.preprocess, precision))
