"""Batches by step number: the same ones for any number of workers, from any step onwards."""

from __future__ import annotations

import atexit
import itertools
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from m1clip.data import randomness as rnd
from m1clip.data.augment import Augmentation, DeviceViews, Views, draw_patches, draw_views
from m1clip.data.cache import ArrayImages, Failure, Images, ResidentImages, read_or_replace, stay_with_parent
from m1clip.data.captions import CaptionTable, drop_tokens, rounded
from m1clip.errors import UserError

TEXT_GROUPS = 4  # of like length in a step; more would save little padding and make products small
SMALLEST_GROUP = 32  # captions
RESTARTS = 3  # of the workers for one batch


@dataclass(frozen=True)
class Batch:
    """One step's worth: raw pixels, tokens, and what says which samples belong together."""

    pixels: Tensor  # (n, side, side, 3) uint8
    tokens: Tensor  # (m, length) int64; short captions first
    images: Tensor  # (n,) number of each image; copies of one have equal numbers
    captions: Tensor  # (m,) key of each caption; equal captions have equal keys
    image_index: Tensor  # (m,) the row of the image that each caption describes
    views: Views | DeviceViews
    patches: Tensor | None = None  # (n, kept) which patches of each image are seen; None: all
    lengths: tuple[int, ...] = ()  # of each caption, on the host; empty: all are to be read at full length
    failed: tuple[Failure, ...] = ()  # images that could not be read; others stand in their place
    store: Tensor | None = None  # where all images lie on the device: `pixels` are then rows of it, (n,)

    def shown(self, rows: slice | Tensor = slice(None)) -> Tensor:
        """Raw pixels of some images, taken from the store where there is one."""
        pixels = self.pixels[rows]
        return pixels if self.store is None else self.store[pixels]

    def texts(self, rows: slice) -> Tensor:
        """Tokens of some captions, cut after the longest of them: they stand by length, so it is the last."""
        tokens = self.tokens[rows]
        longest = max(self.lengths[rows], default=self.tokens.shape[1])
        return tokens[:, : rounded(longest, self.tokens.shape[1])]

    def text_groups(self) -> list[Tensor]:
        """All tokens in a few groups of like length: the padding is work that no caption needs."""
        return [self.texts(rows) for rows in self.text_rows()]

    def text_rows(self) -> list[slice]:
        """The rows of each of these groups; one of all where no caption's length is told."""
        m = len(self.tokens)
        groups = min(TEXT_GROUPS, max(1, m // SMALLEST_GROUP)) if self.lengths else 1
        bounds = np.linspace(0, m, groups + 1).astype(int).tolist()
        return [slice(a, b) for a, b in itertools.pairwise(bounds)]

    def to(self, device: torch.device, non_blocking: bool = False) -> Batch:
        """The same batch on a device; the views stay, they are read when the pixels are rendered."""
        return self._map(lambda t: t.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Batch:
        """Called by the DataLoader where the device's rules ask for pinned memory."""
        return self._map(Tensor.pin_memory)

    def _map(self, move: Callable[[Tensor], Tensor]) -> Batch:
        names = ("pixels", "tokens", "images", "captions", "image_index", "patches")
        tensors = {name: getattr(self, name) for name in names}
        moved: dict[str, Any] = {name: move(t) for name, t in tensors.items() if t is not None}
        return replace(self, **moved)


class Texts(NamedTuple):
    """The captions of a step: tokens, the row of the image of each, its number in the table, and its length."""

    tokens: np.ndarray
    image_index: np.ndarray
    chosen: np.ndarray
    lengths: tuple[int, ...]


@dataclass(frozen=True)
class BatchPlan:
    """Which images are in which step: a function of the seed and the step number."""

    images: int
    batch: int
    seed: int

    @property
    def steps_per_epoch(self) -> int:
        """Full batches only; which images are left over differs from epoch to epoch."""
        return self.images // self.batch

    @classmethod
    def full(cls, images: int, batch: int, seed: int) -> BatchPlan:
        """The plan of a run; data that does not fill one batch is refused."""
        if images < batch:
            raise UserError(
                f"{images} training images do not fill one batch of {batch}: "
                f"lower --batch to {max(2, images // 2)}, or bring more images"
            )
        return cls(images, batch, seed)

    def members(self, step: int) -> tuple[int, np.ndarray]:
        """(epoch, image indices) of a step."""
        epoch, place = divmod(step, self.steps_per_epoch)
        order = rnd.permutation(self.seed, epoch, self.images)
        return epoch, order[place * self.batch : (place + 1) * self.batch]


class TrainingSet(Dataset[Batch]):
    """Makes the batch of a step. It pickles, so that workers may be started by spawn."""

    def __init__(
        self,
        images: Images,
        captions: CaptionTable,
        plan: BatchPlan,
        augmentation: Augmentation,
        full_length: bool,
        identity: np.ndarray | None = None,
        several: int = 1,
        patches: int = 0,
    ) -> None:
        """`identity[i]` says which image index i is, where copies exist; `several` captions of each go in a step.

        `patches` is how many the image tower cuts an image into, of which the augmentation may leave some out.
        """
        self.patches = patches
        self.images, self.captions, self.plan, self.several = images, captions, plan, several
        self.augmentation, self.full_length, self.identity = augmentation, full_length, identity
        self.report: Callable[[tuple[Failure, ...], int], None] | None = None  # told of failures and images asked for

    def __getitem__(self, step: int) -> Batch:
        epoch, planned = self.plan.members(step)
        failed: tuple[Failure, ...] = ()
        store: Tensor | None = None
        if isinstance(self.images, ResidentImages):
            store, members, pixels = self.images.store, planned, planned.astype(np.int64)
        else:
            members, pixels, failed = read_or_replace(self.images, planned, self.plan.seed, epoch)
        texts = self.texts_of(members, epoch)
        return Batch(
            store=store,
            patches=self.shown_of(members, epoch),
            pixels=torch.from_numpy(pixels),
            tokens=torch.from_numpy(texts.tokens),
            images=torch.from_numpy(self._identities(members).astype(np.int64)),
            captions=torch.from_numpy(self.captions.keys[texts.chosen]),
            image_index=torch.from_numpy(texts.image_index),
            lengths=texts.lengths,
            views=draw_views(self.augmentation, self.plan.seed, epoch, members),
            failed=failed,
        )

    def texts_of(self, members: np.ndarray, epoch: int) -> Texts:
        """The captions of some images in this epoch, without the tokens that it leaves out, short ones first."""
        seed, table, share = self.plan.seed, self.captions, self.augmentation.word_dropout
        draws = rnd.bits(seed, epoch, members, rnd.CAPTION)
        image_index, chosen = table.pick(members, draws, self.several)
        tokens, lengths = table.tokens[chosen], table.lengths[chosen]
        if share:
            context = tokens.shape[1]
            places = chosen[:, None] * context + np.arange(context)
            gone = rnd.uniform(seed, epoch, places, rnd.WORD) < share
            tokens, lengths = drop_tokens(tokens, lengths, gone, table.pad_id)
        if self.full_length:
            return Texts(tokens.astype(np.int64), image_index, chosen, ())
        order = np.argsort(lengths, kind="stable")
        tokens = tokens[order, : rounded(int(lengths.max()), tokens.shape[1])]
        return Texts(tokens.astype(np.int64), image_index[order], chosen[order], tuple(lengths[order].tolist()))

    def shown_of(self, members: np.ndarray, epoch: int) -> Tensor | None:
        """Which patches of some images are seen in this epoch; None: all."""
        share = self.augmentation.patch_dropout
        if not self.patches or not share:
            return None
        return torch.from_numpy(draw_patches(share, self.patches, self.plan.seed, epoch, members))

    def _identities(self, members: np.ndarray) -> np.ndarray:
        return members if self.identity is None else self.identity[members]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "report": None}  # workers do not report: the batch carries what failed


class _Steps(Sampler[int]):
    def __init__(self, start: int, stop: int) -> None:
        self.steps = range(start, stop)

    def __iter__(self) -> Iterator[int]:
        return iter(self.steps)

    def __len__(self) -> int:
        return len(self.steps)


def batches(
    data: TrainingSet,
    start: int,
    stop: int,
    workers: int,
    start_method: str,
    pin: bool,
    warn: Callable[[str], None] = lambda text: None,
) -> Iterator[Batch]:
    """The batches of steps start .. stop - 1, in order; `warn` is told when killed workers are restarted."""
    if isinstance(data.images, ArrayImages) and start_method != "fork":
        workers = 0  # each would be sent a copy of all images, to save little: they are decoded already
    if isinstance(data.images, ResidentImages):
        workers = 0  # what is left to prepare are rows and tokens, and other processes cannot see the store
    if workers == 0:
        made = (data[step] for step in range(start, stop))
        # From pinned memory a copy goes its own way; from any other the host waits until the device is free for it.
        return _reported((batch.pin_memory() for batch in made) if pin else made, data)

    def start_workers(step: int) -> _Workers:
        loader = DataLoader(
            data,
            batch_size=None,
            sampler=_Steps(step, stop),
            num_workers=workers,
            multiprocessing_context=start_method,
            pin_memory=pin,
            worker_init_fn=_start_worker,
        )
        return _Workers(loader)

    return _reported(_from_workers(start_workers, start, stop, warn), data)


def _from_workers(
    start_workers: Callable[[int], _Workers], start: int, stop: int, warn: Callable[[str], None]
) -> Iterator[Batch]:
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
                    f"{reason}. {RESTARTS} restarts did not help: close other programs, or lower --data.workers"
                ) from None
            warn(f"{reason}. Restarted the workers")
        finally:
            workers.end()


class WorkerDied(Exception):
    """A data worker ended without being asked to."""


class _Workers:
    """The worker processes of one DataLoader. A dead one is noticed in `next_batch`, and nowhere else."""

    def __init__(self, loader: DataLoader[Batch]) -> None:
        self._in_main_thread = threading.current_thread() is threading.main_thread()
        self._waiting = False
        self._handler_before = signal.getsignal(signal.SIGCHLD)
        feed: Any = iter(loader)
        self._feed, self._processes = feed, list[BaseProcess](feed._workers)
        atexit.register(self.end)
        if self._in_main_thread:
            # torch's handler raises wherever the main thread is, for example halfway through an update.
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
            self._check(timeout=1.0)  # torch reports a dead worker by errors of several types
            raise
        finally:
            self._waiting = False

    def _on_child_exit(self, number: int, frame: FrameType | None) -> None:
        if self._waiting:  # a worker that died while writing a batch would be waited for without end
            self._check()

    def _check(self, timeout: float = 0.0) -> None:
        dead = wait([process.sentinel for process in self._processes], timeout)
        for process in self._processes:
            if process.sentinel in dead:
                process.join()
                raise WorkerDied(f"data worker {process.pid} was killed (exit code {process.exitcode})") from None

    def end(self) -> None:
        """Kill the workers: they hold nothing that must be saved, and may wait for a lock of a dead one."""
        atexit.unregister(self.end)
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        self._feed = None
        if self._in_main_thread and signal.getsignal(signal.SIGCHLD) == self._on_child_exit:
            signal.signal(signal.SIGCHLD, self._handler_before)


def _reported(feed: Iterator[Batch], data: TrainingSet) -> Iterator[Batch]:
    """Tell of failed images in the training process, whichever process read them."""
    try:
        for batch in feed:
            if data.report is not None:
                data.report(batch.failed, len(batch.images))
            yield batch
    except UserError as error:
        # A worker's error arrives with its traceback in front; its last line is the message.
        raise UserError(str(error).strip().splitlines()[-1].removeprefix("m1clip.errors.UserError: ")) from None


def _start_worker(worker: int) -> None:
    """A signal to the process group reaches every worker, and the parent needs batches to finish its step."""
    stay_with_parent()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    # A parent that leaves while it takes a batch: no traceback. Errors of the data travel to the parent.
    sys.excepthook = lambda *error: None
