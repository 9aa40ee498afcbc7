"""Batches by step number: the same for any number of workers, from any step."""

from __future__ import annotations

import atexit
import itertools
import signal
import sys
import threading
from collections.abc import Callable, Generator
from dataclasses import dataclass, fields, replace
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from m1clip.data import randomness as rnd
from m1clip.data.augment import Augmentation, DeviceViews, Views, draw_patches, draw_views
from m1clip.data.cache import Failure, FeatureTable, Images, follow_parent, read_or_replace
from m1clip.data.captions import CaptionTable, drop_tokens, rounded
from m1clip.errors import UserError

TEXT_GROUPS = 4  # of similar length; more would save little padding and make matrix products small
SMALLEST_GROUP = 32  # captions
RESTARTS = 3  # of the workers for one batch


@dataclass(frozen=True, kw_only=True)
class Batch:
    """The batch of one step: n images (or features), m captions (or features), and which belong together."""

    sample_ids: Tensor  # (n,) int64; copies of one image have the same id
    caption_ids: Tensor  # (m,) int64; equal captions have the same id
    image_index: Tensor  # (m,) row of the image that each caption describes
    images: Tensor | None = None  # (n, side, side, 3) uint8
    image_features: Tensor | None = None  # (n, width) float32, from a frozen image tower
    tokens: Tensor | None = None  # (m, length) int64, sorted by length
    text_features: Tensor | None = None  # (m, width) float32, from a frozen text tower
    views: Views | DeviceViews | None = None  # crop, flip and color of each image; None with features
    kept_patches: Tensor | None = None  # (n, kept) patches that the image tower sees; None: all
    lengths: tuple[int, ...] = ()  # of each caption, on the host; empty: every caption has the full length
    failed: tuple[Failure, ...] = ()  # images that could not be read; others replace them
    cached_images: Tensor | None = None  # (all images, side, side, 3) uint8 on the device, instead of `images`
    rows: Tensor | None = None  # (n,) this batch's rows of `cached_images`

    def __len__(self) -> int:
        return len(self.sample_ids)

    def pixels(self, rows: slice | Tensor = slice(None)) -> Tensor:
        """(n, side, side, 3) uint8 of some rows, wherever the images are stored."""
        if self.images is not None:
            return self.images[rows]
        assert self.cached_images is not None, "this batch has features, not images"
        assert self.rows is not None
        return self.cached_images[self.rows[rows]]

    def texts(self, rows: slice) -> Tensor:
        """Tokens of some captions, truncated to the longest of them."""
        assert self.tokens is not None, "this batch has text features, not tokens"
        tokens = self.tokens[rows]
        longest = max(self.lengths[rows], default=self.tokens.shape[1])
        return tokens[:, : rounded(longest, self.tokens.shape[1])]

    def text_rows(self) -> list[slice]:
        """The captions in a few groups of similar length, to save padding."""
        m = len(self.caption_ids)
        groups = min(TEXT_GROUPS, max(1, m // SMALLEST_GROUP)) if self.lengths else 1
        bounds = np.linspace(0, m, groups + 1).astype(int).tolist()
        return [slice(a, b) for a, b in itertools.pairwise(bounds)]

    def to(self, device: torch.device, non_blocking: bool = False) -> Batch:
        """The same batch on a device; the views stay on the host until the pixels are rendered."""
        return self._map(lambda t: t.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Batch:
        """Called by the DataLoader."""
        return self._map(Tensor.pin_memory)

    def tensors(self) -> dict[str, Tensor]:
        """The tensors that differ between steps, by name."""
        found = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "cached_images"}
        return {name: value for name, value in found.items() if isinstance(value, Tensor)}

    def _map(self, move: Callable[[Tensor], Tensor]) -> Batch:
        moved: dict[str, Any] = {name: move(tensor) for name, tensor in self.tensors().items()}
        return replace(self, **moved)


@dataclass(frozen=True)
class BatchPlan:
    """Which images are in which step: a function of the seed and the step number."""

    images: int
    batch: int
    seed: int

    @property
    def steps_per_epoch(self) -> int:
        """Number of full batches; each epoch skips different images."""
        return self.images // self.batch

    @classmethod
    def full(cls, images: int, batch: int, seed: int) -> BatchPlan:
        """The plan of a run; UserError if there are too few images for one batch."""
        if images < batch:
            raise UserError(
                f"{images} training images do not fill one batch of {batch}: "
                f"lower --batch-size to {max(2, images // 2)}, or add images"
            )
        return cls(images, batch, seed)

    def members(self, step: int) -> tuple[int, np.ndarray]:
        """(epoch, image indices) of a step."""
        epoch, place = divmod(step, self.steps_per_epoch)
        order = rnd.permutation(self.seed, epoch, self.images)
        return epoch, order[place * self.batch : (place + 1) * self.batch]


class TrainingSet(Dataset[Batch]):
    """Makes the batch of a step. Picklable, so that workers can be spawned."""

    def __init__(
        self,
        images: Images | None,
        captions: CaptionTable,
        plan: BatchPlan,
        augmentation: Augmentation,
        *,
        image_features: FeatureTable | None = None,
        device_images: Tensor | None = None,
        full_length: bool = False,
        identity: np.ndarray | None = None,
        captions_per_image: int = 1,
        patches: int = 0,
    ) -> None:
        """One of `images`, `image_features` and `device_images` is read: features first, then the device.

        `identity[i]` is the id of sample i, where copies of one image share an id. `captions_per_image` captions of
        each image go into a batch. `patches` is the number that the image tower cuts an image into.
        """
        self.images, self.image_features, self.device_images = images, image_features, device_images
        self.captions, self.plan, self.augmentation = captions, plan, augmentation
        self.full_length, self.identity, self.patches = full_length, identity, patches
        self.captions_per_image = captions_per_image
        # Called with the failures and the number of images of each batch.
        self.report: Callable[[tuple[Failure, ...], int], None] | None = None

    def __getitem__(self, step: int) -> Batch:
        epoch, members = self.plan.members(step)
        members, fields = self._images(epoch, members)
        draws = rnd.bits(self.plan.seed, epoch, members, rnd.CAPTION)
        image_index, chosen = self.captions.pick(members, draws, self.captions_per_image)
        if self.captions.features is not None:
            fields["text_features"] = torch.from_numpy(self.captions.features.read(chosen))
        else:
            order, fields["tokens"], fields["lengths"] = self._tokens(epoch, chosen)
            image_index, chosen = image_index[order], chosen[order]
        ids = members if self.identity is None else self.identity[members]
        return Batch(
            sample_ids=torch.from_numpy(ids.astype(np.int64)),
            caption_ids=torch.from_numpy(self.captions.caption_ids[chosen]),
            image_index=torch.from_numpy(image_index),
            **fields,
        )

    def _images(self, epoch: int, members: np.ndarray) -> tuple[np.ndarray, dict[str, Any]]:
        """The images of a batch, where some members may be replaced, and its fields for them."""
        seed, fields = self.plan.seed, dict[str, Any]()
        if self.image_features is not None:
            views = rnd.bits(seed, epoch, members, rnd.VIEW) % np.uint64(self.image_features.views)
            features = self.image_features.read(members, views.astype(np.int64))
            return members, {"image_features": torch.from_numpy(features)}
        if self.device_images is not None:
            fields = {"cached_images": self.device_images, "rows": torch.from_numpy(members.astype(np.int64))}
        else:
            assert self.images is not None
            members, pixels, fields["failed"] = read_or_replace(self.images, members, seed, epoch)
            fields["images"] = torch.from_numpy(pixels)
        fields["views"] = draw_views(self.augmentation, seed, epoch, members)
        dropout = self.augmentation.patch_dropout
        if self.patches and dropout:
            kept = draw_patches(dropout, self.patches, seed, epoch, members)
            fields["kept_patches"] = torch.from_numpy(kept)
        return members, fields

    def _tokens(self, epoch: int, chosen: np.ndarray) -> tuple[np.ndarray, Tensor, tuple[int, ...]]:
        """(order, tokens, lengths) of captions after word dropout; sorted by length unless all get the full length."""
        table, dropout = self.captions, self.augmentation.word_dropout
        tokens, lengths = table.tokens[chosen], table.lengths[chosen]
        context = tokens.shape[1]
        if dropout:
            places = chosen[:, None] * context + np.arange(context)
            dropped = rnd.uniform(self.plan.seed, epoch, places, rnd.WORD) < dropout
            tokens, lengths = drop_tokens(tokens, lengths, dropped, table.pad_id)
        if self.full_length:
            return np.arange(len(chosen)), torch.from_numpy(tokens.astype(np.int64)), ()
        order = np.argsort(lengths, kind="stable")
        tokens = tokens[order, : rounded(int(lengths.max()), context)]
        return order, torch.from_numpy(tokens.astype(np.int64)), tuple(lengths[order].tolist())

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "report": None}  # workers report through the batch


Feed = Generator[Batch, None, None]


def batches(
    data: TrainingSet,
    start: int,
    stop: int,
    workers: int,
    start_method: str,
    pin: bool,
    warn: Callable[[str], None] = lambda text: None,
) -> Feed:
    """The batches of steps start .. stop - 1, in order; `warn` reports that killed workers were restarted."""
    if data.images is not None and data.images.ram_bytes and start_method != "fork":
        workers = 0  # each would receive a copy of all images, which are already decoded
    if data.device_images is not None:
        workers = 0  # only rows and tokens remain to be prepared, and other processes cannot access device memory
    if workers == 0:
        made = (data[step] for step in range(start, stop))
        # Copies from pinned memory are asynchronous.
        return _reported((batch.pin_memory() for batch in made) if pin else made, data)

    def start_workers(step: int) -> _Workers:
        loader = DataLoader(
            data,
            batch_size=None,
            sampler=range(step, stop),
            num_workers=workers,
            multiprocessing_context=start_method,
            pin_memory=pin,
            worker_init_fn=_start_worker,
        )
        return _Workers(loader)

    return _reported(_from_workers(start_workers, start, stop, warn), data)


def _from_workers(start_workers: Callable[[int], _Workers], start: int, stop: int, warn: Callable[[str], None]) -> Feed:
    """Batches from worker processes, which are restarted if one is killed: a batch depends only on its step."""
    step, deaths = start, 0
    while step < stop:
        workers = start_workers(step)
        try:
            while step < stop:
                batch = workers.next_batch()
                step, deaths = step + 1, 0
                yield batch
        except WorkerDied as death:
            deaths += 1
            reason = f"{death} while preparing step {step + 1:,}; the system may be out of memory"
            if deaths > RESTARTS:
                raise UserError(
                    f"{reason}. {RESTARTS} restarts did not help: close other programs, or lower --workers"
                ) from None
            warn(f"{reason}. Restarted the workers")
        finally:
            workers.end()


class WorkerDied(Exception):
    """A data worker ended unexpectedly."""


class _Workers:
    """The worker processes of one DataLoader; a dead worker raises only in `next_batch`."""

    def __init__(self, loader: DataLoader[Batch]) -> None:
        self._in_main_thread = threading.current_thread() is threading.main_thread()
        self._waiting = False
        self._handler_before = signal.getsignal(signal.SIGCHLD)
        feed: Any = iter(loader)
        self._feed, self._processes = feed, list[BaseProcess](feed._workers)
        atexit.register(self.end)
        if self._in_main_thread:
            # torch's handler raises wherever the main thread is, for example in the middle of an optimizer step.
            signal.signal(signal.SIGCHLD, self._on_child_exit)

    def next_batch(self) -> Batch:
        """The next batch, or WorkerDied."""
        self._waiting = True
        try:
            self._check()
            batch: Batch = next(self._feed)
            return batch
        except WorkerDied:
            raise
        except Exception:
            self._check(timeout=1.0)  # torch reports a dead worker with various errors
            raise
        finally:
            self._waiting = False

    def _on_child_exit(self, number: int, frame: FrameType | None) -> None:
        if self._waiting:  # next() would wait forever for a worker that died while writing a batch
            self._check()

    def _check(self, timeout: float = 0.0) -> None:
        dead = wait([process.sentinel for process in self._processes], timeout)
        for process in self._processes:
            if process.sentinel in dead:
                process.join()
                raise WorkerDied(f"data worker {process.pid} was killed (exit code {process.exitcode})") from None

    def end(self) -> None:
        """Kill the workers: they have no state to save, and may be waiting for a lock that a dead one holds."""
        atexit.unregister(self.end)
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        self._feed = None
        if self._in_main_thread and signal.getsignal(signal.SIGCHLD) == self._on_child_exit:
            signal.signal(signal.SIGCHLD, self._handler_before)


def _reported(feed: Feed, data: TrainingSet) -> Feed:
    """Report failed images in the training process, regardless of which process read them."""
    try:
        for batch in feed:
            if data.report is not None:
                data.report(batch.failed, len(batch))
            yield batch
    except UserError as error:
        # A worker's error includes its traceback; the last line is the message.
        raise UserError(str(error).strip().splitlines()[-1].removeprefix("m1clip.errors.UserError: ")) from None
    finally:
        feed.close()  # not left to the garbage collector, which prints a Ctrl-C in it as a traceback


def _start_worker(worker: int) -> None:
    """Ignore signals to the process group: the parent needs batches to finish its step."""
    follow_parent()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    # No traceback if the parent exits first; data errors are raised in the parent.
    sys.excepthook = lambda *error: None
