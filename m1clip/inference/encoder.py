"""Encode images and texts: `Encoder` runs a model in batches, `Model` is the public API."""

from __future__ import annotations

import functools
import itertools
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from m1clip.data.augment import render
from m1clip.data.cache import Progress, RowTable, decode_images
from m1clip.data.captions import CaptionTable
from m1clip.data.images import READ_TIMEOUT, BadImage, Preprocess, map_with_timeout
from m1clip.data.prepare import Split
from m1clip.data.types import ImageRef
from m1clip.errors import UserError
from m1clip.hardware.choices import matmul_precision
from m1clip.hardware.device import DTYPES, Kind, Precision
from m1clip.hardware.facts import decode_threads, read_facts
from m1clip.hardware.memory import keep_freed_memory
from m1clip.inference.inputs import (
    IMAGE,
    IMAGES,
    IN_MEMORY,
    NOT_FINITE,
    TEXTS,
    LoadingProcess,
    count,
    labels_of,
    many,
    model_path,
    sentences,
    square,
)
from m1clip.model.clip import CLIP
from m1clip.model.folder import CONFIG, open_device, read_model, write_model
from m1clip.text.base import Tokenizer, rounded

if TYPE_CHECKING:
    from m1clip.inference.inputs import ImageInput

Tower = Callable[[Tensor], Tensor]

# Images and tokens of a batch. On a CPU each core computes a batch of its own, which should fit into its cache.
CPU_IMAGES, CPU_TOKENS = 4, 2048
CUDA_IMAGES, GPU_IMAGES, GPU_TOKENS = 512, 256, 32768
HEAD_BATCH = 1024  # features
FEW_TOKENS = 64  # a smaller batch takes nearly as long

Item = TypeVar("Item")
Result = TypeVar("Result")


@functools.cache
def _pool(workers: int, process: int) -> ThreadPoolExecutor:
    """Threads with one core each: if all cores computed one batch, each operation would wait for the slowest."""
    ready = threading.Barrier(workers + 1)

    def start() -> None:
        torch.get_num_threads()  # initializes the thread: its first operation would, and undo the next line
        torch.set_num_threads(1)
        ready.wait()

    keep_freed_memory()  # every batch needs the same blocks
    threads = torch.get_num_threads()
    pool = ThreadPoolExecutor(workers, "encode", start)
    for _ in range(workers):
        pool.submit(int)
    ready.wait()
    torch.set_num_threads(threads)  # what a thread sets is also the default of threads to come
    return pool


def _parallel(work: Callable[[Item], Result], items: Iterable[Item], workers: int) -> Iterator[Result]:
    """`work` of each item, in order; a single item is computed by all cores, more by one core each."""
    remaining = iter(items)
    first = list(itertools.islice(remaining, 2))
    if workers == 1 or len(first) < 2:
        yield from map(work, itertools.chain(first, remaining))
        return
    pool, running = _pool(workers, os.getpid()), deque[Future[Result]]()
    try:
        for item in itertools.chain(first, remaining):
            running.append(pool.submit(work, item))
            if len(running) > 2 * workers:
                yield running.popleft().result()
        while running:
            yield running.popleft().result()
    finally:
        for future in running:
            future.cancel()


def _chunks(items: Iterable[Item], size: int) -> Iterator[list[Item]]:
    remaining = iter(items)
    while chunk := list(itertools.islice(remaining, size)):
        yield chunk


@dataclass(frozen=True)
class Encoder:
    """Runs a model, or only its towers, over images and texts."""

    image: Tower  # (n, 3, size, size) normalized pixels -> (n, width)
    text: Tower  # (n, length) token ids -> (n, width)
    preprocess: Preprocess
    device: torch.device
    precision: Precision = "fp32"
    max_batch: int | None = None  # images or texts
    tokens_per_image: int = 1  # 1: the image tower has no tokens

    @torch.inference_mode()
    def pixels(self, pixels: np.ndarray) -> Tensor:
        """(n, side, side, 3) uint8 -> (n, width) float32 on the CPU, as one batch."""
        with self.autocast():
            sent = torch.from_numpy(pixels).to(self.device, non_blocking=self.device.type == "cuda")
            return self.image(render(sent, None, self.preprocess)).float().cpu()

    def images(self, images: Iterable[np.ndarray], count: int) -> Iterator[Tensor]:
        """Vectors of `count` images of (side, side, 3), batch by batch."""
        return _parallel(
            lambda batch: self.pixels(self._stack(batch)), _chunks(images, self.batch(count)), self.workers
        )

    def _stack(self, images: Sequence[np.ndarray]) -> np.ndarray:
        """(n, side, side, 3); for CUDA in pinned memory, which is copied twice as fast."""
        if self.device.type != "cuda":
            return np.stack(images)
        pinned = torch.empty((len(images), *images[0].shape), dtype=torch.uint8, pin_memory=True)
        return np.stack(images, out=pinned.numpy())

    def files(
        self, refs: Sequence[ImageRef], failures: dict[int, str], progress: Progress
    ) -> Iterator[tuple[list[int], Tensor]]:
        """(indices into `refs`, their vectors), in chunks; unreadable images are added to `failures`."""
        size = self.batch(len(refs))
        blocks = decode_images(
            refs, self.preprocess.image_size, self.preprocess.resize, failures, progress, decode_threads()
        )
        batches = (
            (items[at : at + size], block[at : at + size])
            for items, block in blocks
            for at in range(0, len(items), size)
        )
        return _parallel(lambda batch: (batch[0], self.pixels(batch[1])), batches, self.workers)

    def tokens(self, tokens: np.ndarray, lengths: np.ndarray) -> Iterator[tuple[np.ndarray, Tensor]]:
        """(rows of `tokens`, their vectors), batch by batch, from short to long; equal rows are encoded once."""
        equal = dict[bytes, list[int]]()  # the rows of each text
        for number, row in enumerate(tokens):
            equal.setdefault(row.tobytes(), []).append(number)
        rows = {same[0]: same for same in equal.values()}

        @torch.inference_mode()
        def encode(texts: np.ndarray) -> tuple[np.ndarray, Tensor]:
            cut = tokens[texts, : rounded(int(lengths[texts].max()), tokens.shape[1])]
            with self.autocast():
                vectors = self.text(torch.from_numpy(cut.astype(np.int64)).to(self.device)).float().cpu()
            members = [rows[text] for text in texts.tolist()]
            repeats = torch.tensor([len(each) for each in members])
            return np.concatenate(members), vectors.repeat_interleave(repeats, dim=0)

        texts = np.array([*rows])
        order = texts[np.argsort(lengths[texts], kind="stable")]
        return _parallel(encode, self._text_batches(order, lengths[order]), self.workers)

    def _text_batches(self, order: np.ndarray, lengths: np.ndarray) -> Iterator[np.ndarray]:
        """Texts, sorted by length, with about the same number of tokens in each batch."""
        limit = CPU_TOKENS if self.device.type == "cpu" else GPU_TOKENS
        limit = max(FEW_TOKENS, self._even(int(lengths.sum()), limit))
        ends, start = np.cumsum(lengths), 0
        while start < len(order):
            end = int(np.searchsorted(ends, (ends[start - 1] if start else 0) + limit, side="right"))
            end = min(max(end, start + 1), start + (self.max_batch or len(order)))
            yield order[start:end]
            start = end

    def batch(self, count: int) -> int:
        """How many of `count` images to encode at a time."""
        per_core = CPU_IMAGES if self.tokens_per_image == 1 else max(CPU_IMAGES, CPU_TOKENS // self.tokens_per_image)
        limit = {"cpu": per_core, "cuda": CUDA_IMAGES}.get(self.device.type, GPU_IMAGES)
        return self._even(count, min(limit, self.max_batch or limit))

    def _even(self, total: int, limit: int) -> int:
        """The size of a batch, at most `limit`, with which each worker gets as many."""
        batches = self.workers * max(1, -(-total // (self.workers * limit)))
        return max(1, -(-total // batches))

    @property
    def workers(self) -> int:
        """Batches at the same time; with CUDA, one is assembled and copied while the GPU computes the other."""
        return torch.get_num_threads() if self.device.type == "cpu" else 1 + (self.device.type == "cuda")

    def autocast(self) -> AbstractContextManager[object]:
        """The context of the precision."""
        return torch.autocast(self.device.type, DTYPES[self.precision]) if self.precision != "fp32" else nullcontext()


def in_order(parts: Iterable[tuple[np.ndarray, Tensor]]) -> Tensor:
    """All vectors of `Encoder.tokens` in the order of the texts."""
    rows, vectors = zip(*parts, strict=True)
    found = torch.cat(vectors)
    ordered = torch.empty_like(found)
    ordered[torch.from_numpy(np.concatenate(rows))] = found
    return ordered


class SplitFeatures(NamedTuple):
    """Vectors of a split on the CPU."""

    image: Tensor  # (images, d)
    text: Tensor  # (captions, d)
    image_index: Tensor  # (captions,) the image that each caption describes
    caption_ids: Tensor  # (captions,) equal captions have equal ids
    labels: Tensor | None  # (images,) the class, for class folders


@torch.inference_mode()
def encode_split(
    model: Model,
    split: Split,
    image_rows: int | None = None,
    part: tuple[int, int] = (0, 1),
    gather: Callable[[Tensor], Tensor] = lambda rows: rows,
) -> SplitFeatures:
    """Every image and every caption of a split, or of its first `image_rows`; features of frozen towers are reused.

    With part (r, n), encodes the r-th of n parts; `gather` then concatenates those of all.
    """
    clip, images, captions = model.clip, split.images, split.captions
    image_rows = len(images) if image_rows is None else image_rows
    image_part, text_part = (
        range(count * part[0] // part[1], count * (part[0] + 1) // part[1])
        for count in (image_rows, int(captions.first[image_rows]))
    )
    training = clip.training
    encoder = model.encoder()

    def project(head: Tower, table: RowTable, rows: range) -> Tensor:
        batches = np.array_split(np.array(rows), -(-len(rows) // HEAD_BATCH))
        with encoder.autocast():
            parts = [torch.from_numpy(table.read(rows)).to(model.device).float() for rows in batches]
            return torch.cat([head(part).cpu() for part in parts])

    if split.image_features is None:
        batches = _chunks(image_part, encoder.batch(len(image_part)))
        found = _parallel(lambda rows: encoder.pixels(images.read(np.array(rows))), batches, encoder.workers)
        image = torch.cat(list(found))
    else:
        image = project(clip.project_image, split.image_features, image_part)
    if captions.features is None:
        texts = slice(text_part.start, text_part.stop)
        text = in_order(encoder.tokens(captions.tokens[texts], captions.lengths[texts]))
    else:
        text = project(clip.project_text, captions.features, text_part)
    if training:
        clip.train()
    return split_features(gather(image), gather(text), captions)


def split_features(image: Tensor, text: Tensor, captions: CaptionTable) -> SplitFeatures:
    """Features with their captions."""
    index, ids = (torch.from_numpy(each[: len(text)]) for each in (captions.image_index, captions.caption_ids))
    labels = None if captions.labels is None else torch.from_numpy(captions.labels[: len(image)])
    return SplitFeatures(image, text, index, ids, labels)


@functools.cache
def fastest_precision(kind: Kind) -> Precision:
    """The precision for `auto`: bf16 where its matmuls are faster."""
    return matmul_precision(kind, read_facts())


class Model:
    """A trained model: images and texts in, unit vectors out.

    `preprocess(image)` converts a PIL image to the model's input tensor, `tokenizer(texts)` texts to token ids;
    `clip` is the torch module. `precision` is "fp32", "bf16" or "auto", the faster one on the device.
    May be used by several threads at the same time, and on the CPU by forked processes, with one thread each.
    """

    def __init__(
        self, clip: CLIP, tokenizer: Tokenizer, preprocess: Preprocess, precision: Precision | Literal["auto"] = "auto"
    ) -> None:
        self.clip, self.tokenizer, self.preprocess, self.precision = clip, tokenizer, preprocess, precision
        tokenizer.context_length = clip.config.context_length
        self._process = LoadingProcess()

    def __repr__(self) -> str:
        """What the model takes and gives: Model(64 px images, ... on cpu)."""
        parameters = sum(parameter.numel() for parameter in self.clip.parameters())
        return (
            f"Model({self.preprocess.image_size} px images, texts of {self.context_length} tokens -> "
            f"{self.clip.config.embed_dim} dimensions; {parameters:,} parameters on {self.device})"
        )

    @property
    def context_length(self) -> int:
        """Maximum number of tokens of a text, including start and EOT tokens."""
        return self.clip.config.context_length

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return self.clip.logit_scale.device

    def encoder(self, max_batch: int | None = None) -> Encoder:
        """What runs the model; switches it to evaluation mode."""
        clip, kind = self.clip, self.device.type
        if kind != "cpu":
            self._process.require_same(f"a model on {kind}")
        elif self._process.is_forked() and torch.get_num_threads() > 1:
            torch.set_num_threads(1)  # OpenMP would wait for threads that do not exist in a forked process
        if clip.training:
            clip.eval()
        precision = fastest_precision(kind) if self.precision == "auto" else self.precision
        encode, tokens = (clip.encode_image, clip.encode_text), clip.image_tower.tokens_per_image
        return Encoder(*encode, self.preprocess, self.device, precision, max_batch, tokens)

    def encode_image(self, images: ImageInput | Iterable[ImageInput], batch_size: int | None = None) -> Tensor:
        """(n, embed_dim) float32 unit vectors of one image (n = 1) or many.

        An image is a path, the bytes of an image file, a PIL image, a (height, width, 3) uint8 array, or a uint8 tensor
        of that shape or of (3, height, width). Many are a list or other iterable of these, or an array or tensor with
        one more dimension.
        `batch_size` limits how many are computed at a time.
        """
        found, encoder = many(images, IMAGE, IMAGES), self.encoder(count(batch_size))
        if len(found) == 1:
            return _finite(encoder.pixels(np.stack([self.square(found[0])])))
        parts = list(encoder.images(self._squares(found), len(found)))
        return _finite(torch.cat(parts)) if parts else torch.empty(0, self.clip.config.embed_dim)

    def _squares(self, images: Sequence[ImageInput]) -> Iterator[np.ndarray]:
        """Decoded ahead by threads."""
        if not any(isinstance(image, str | Path | bytes | bytearray | Image.Image) for image in images):
            yield from map(self.square, images)  # arrays have nothing to decode
            return
        for image, found in zip(images, map_with_timeout(images, self.square, threads=decode_threads()), strict=True):
            if found is None:
                where = IN_MEMORY if isinstance(image, bytes | bytearray) else str(image)
                raise BadImage(where, f"the read did not finish within {READ_TIMEOUT:g} s")
            yield found

    def encode_text(self, texts: str | Iterable[str], batch_size: int | None = None) -> Tensor:
        """(n, embed_dim) float32 unit vectors of one text (n = 1) or many."""
        found = many(texts, str, TEXTS)
        if not found:
            return torch.empty(0, self.clip.config.embed_dim)
        encoder = self.encoder(count(batch_size))
        tokens = self.tokenizer.tokenize(found, self.context_length)
        return _finite(in_order(encoder.tokens(tokens, self.tokenizer.lengths(tokens))))

    def similarity(self, images: ImageInput | Iterable[ImageInput], texts: str | Iterable[str]) -> Tensor:
        """(images, texts) cosine similarities."""
        return self.encode_image(images) @ self.encode_text(texts).T

    def classify(
        self, images: ImageInput | Iterable[ImageInput], labels: Sequence[str], templates: Sequence[str] = ("{}",)
    ) -> list[list[tuple[str, float]]]:
        """For each image, (label, probability) from the most to the least probable.

        A template is a sentence with {} for the label; multiple templates are averaged.
        """
        labels = labels_of(labels)
        logits = self.clip.scale().detach().cpu() * self.encode_image(images) @ self.class_vectors(labels, templates).T
        return [
            [(labels[place], float(row[place])) for place in row.argsort(descending=True).tolist()]
            for row in logits.softmax(dim=1)
        ]

    def class_vectors(self, names: Sequence[str], templates: Sequence[str]) -> Tensor:
        """(classes, embed_dim) unit vectors: the mean over the templates, each of which must contain {}."""
        groups = sentences(names, templates)
        vectors = self.encode_text([text for group in groups for text in group]).view(len(groups), len(groups[0]), -1)
        return F.normalize(vectors.mean(dim=1), dim=-1)

    def to(self, device: str | torch.device) -> Model:
        """Move the weights to a device."""
        self.clip.to(open_device(device))
        return self

    def save(self, folder: str | Path) -> None:
        """Write a model folder; an older one there is replaced only when the new one is complete."""
        path = model_path(folder)
        if path.exists() and not (path / CONFIG).is_file() and (path.is_file() or any(path.iterdir())):
            raise UserError(f"{path}: exists and is not a model folder; choose another folder")
        write_model(path, self.clip, self.tokenizer, self.preprocess)

    def square(self, image: ImageInput) -> np.ndarray:
        """(size, size, 3) uint8, as in training."""
        return square(image, self.preprocess)


def load(
    path: str | Path,
    device: str = "cpu",
    image_size: int | None = None,
    precision: Precision | Literal["auto"] = "auto",
) -> Model:
    """Load a model folder, the best model of a run, or a model of open_clip or Hugging Face.

    `image_size` is for images of another size; `precision` is that of `Model`.
    """
    saved = read_model(model_path(path)).resized(image_size)
    return Model(saved.build(device), saved.tokenizer, saved.preprocess, precision)


def _finite(vectors: Tensor) -> Tensor:
    if not vectors.isfinite().all():
        raise UserError(NOT_FINITE)
    return vectors
