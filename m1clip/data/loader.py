"""Batches by step number: the same for any number of workers, from any step."""

from __future__ import annotations

import atexit
import contextlib
import itertools
import os
import signal
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields, replace
from multiprocessing import get_context, parent_process
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import torch
from torch import Tensor

from m1clip import console
from m1clip.data import randomness as rnd
from m1clip.data.array_view import ArrayView
from m1clip.data.augment import Augmentation, box_areas, draw_boxes, draw_patches, draw_views
from m1clip.data.captions import CaptionTable, LazyCaptions, drop_tokens
from m1clip.data.decoding import Images, LazyImages, read_or_replace
from m1clip.data.failures import Failure
from m1clip.data.nvjpeg import READ_PROCESSES
from m1clip.data.read_ahead import GpuReadAhead, ReadAhead, read_ahead
from m1clip.errors import UserError
from m1clip.system import STOP_SIGNALS, block_signals
from m1clip.text.base import rounded

TEXT_GROUPS = 4  # of similar length; more would save little padding and make matmuls small
SMALLEST_GROUP = 32  # captions
RESTARTS = 3  # of the workers for one batch
AHEAD = 2  # batches that a thread reads in advance
WORKER_AHEAD = 4  # batches that worker processes prepare in advance


@dataclass(frozen=True, kw_only=True)
class Batch:
    """The batch of one step: n images (or features), m captions (or features), and which belong
    together.
    """

    sample_ids: Tensor  # (n,) int64; copies of one image have the same id
    caption_ids: Tensor  # (m,) int64; equal captions have the same id
    image_index: Tensor  # (m,) row of the image that each caption describes
    images: Tensor | None = None  # (n, side, side, 3) uint8
    image_features: Tensor | None = None  # (n, width) float32, from a frozen image tower
    tokens: Tensor | None = None  # (m, length) int64, sorted by length
    text_features: Tensor | None = None  # (m, width) float32, from a frozen text tower
    views: Tensor | None = (
        None  # (n, 7) crop, flip and color of each image (see `draw_views`); None: complete images
    )
    kept_patches: Tensor | None = None  # (n, kept) patches that the image tower sees; None: all
    # (n, 4) box of each image that shows its partner (see `draw_boxes`); None: no image has one
    boxes: Tensor | None = None
    lengths: tuple[
        int, ...
    ] = ()  # of each caption, on the host; empty: every caption has the full length
    failed: tuple[Failure, ...] = ()  # images that could not be read; others replace them
    cached_images: Tensor | None = (
        None  # (all images, side, side, 3) uint8 on the device, instead of `images`
    )
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

    @property
    def mixed(self) -> Tensor | None:
        """(n,) the part of each image that shows its partner; None without CutMix."""
        return None if self.boxes is None else box_areas(self.boxes)

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
        return self._map(lambda t: t.to(device, non_blocking=non_blocking))

    def clone(self) -> Batch:
        """A copy whose tensors are in the memory of this process alone."""
        return self._map(Tensor.clone)

    def pin_memory(self) -> Batch:
        """The same batch in pinned memory, from which copies to CUDA are asynchronous.

        What is on a GPU already stays there.
        """
        return self._map(lambda t: t if t.is_cuda else t.pin_memory())

    def tensors(self) -> dict[str, Tensor]:
        """The tensors that differ between steps, by name."""
        values = {
            field.name: getattr(self, field.name)
            for field in fields(self)
            if field.name != "cached_images"
        }
        return {name: value for name, value in values.items() if isinstance(value, Tensor)}

    def _map(self, move: Callable[[Tensor], Tensor]) -> Batch:
        moved: dict[str, Any] = {name: move(tensor) for name, tensor in self.tensors().items()}
        return replace(self, **moved)


@dataclass(frozen=True)
class BatchPlan:
    """Which images are in which step: a function of the seed and the step number."""

    images: int
    batch: int
    seed: int
    part: tuple[int, int] = (0, 1)  # of each batch: this rank and the number of ranks
    blocks: np.ndarray | None = (
        None  # of streamed images, whose order keeps neighbours near each other
    )

    @property
    def steps_per_epoch(self) -> int:
        """Number of full batches; each epoch skips different images."""
        return self.images // self.batch

    def __post_init__(self) -> None:
        if self.images < self.batch:
            raise UserError(
                f"{self.images} training images do not fill one batch of {self.batch}: "
                f"lower --batch-size to {max(2, self.images // 2)}, or add images"
            )

    def members(self, step: int) -> tuple[int, np.ndarray]:
        """(epoch, image indices) of a step, or of this rank's part of it."""
        epoch, offset = divmod(step, self.steps_per_epoch)
        rank, ranks = self.part
        first, last = (
            offset * self.batch + self.batch * bound // ranks for bound in (rank, rank + 1)
        )
        if self.blocks is not None:
            return epoch, rnd.windowed_order(self.seed, epoch, self.blocks, first, last)
        return epoch, rnd.permutation(self.seed, epoch, self.images)[first:last]


def pairs_stay_together(batch: int, ranks: int) -> bool:
    """Whether rows 2 k and 2 k + 1 of every batch are on the same rank: CutMix mixes them."""
    return all(batch * rank // ranks % 2 == 0 for rank in range(ranks))


@dataclass
class TrainingSet:
    """Makes the batch of a step, from `image_features`, `device_images` or `images`.

    Picklable, for workers.
    """

    images: Images | ReadAhead | GpuReadAhead | None
    captions: CaptionTable | LazyCaptions
    plan: BatchPlan
    augmentation: Augmentation
    image_features: ArrayView | None = None
    device_images: Tensor | None = None
    full_length: bool = False  # of texts, for fixed shapes
    identity: np.ndarray | None = None  # the id of each sample; copies of one image share an id
    captions_per_image: int = 1  # in a batch
    patches: int = 0  # that the image tower cuts an image into
    mild_after: int = 0  # from this step on, the augmentation is milder; 0: never
    report: Callable[[tuple[Failure, ...]], None] | None = None  # gets the failures of each batch

    def __getitem__(self, step: int) -> Batch:
        return self.join([self.piece(step)])

    def piece(self, step: int, number: int = 0, pieces: int = 1) -> Batch:
        """One of several consecutive pieces of a batch, for `join`: captions in order, with the
        full length.
        """
        epoch, members = self.plan.members(step)
        augmentation = self.augmentation_at(step)
        first, last = (len(members) * bound // pieces for bound in (number, number + 1))
        members, fields = self._images(epoch, members[first:last], augmentation)
        draws = rnd.bits(self.plan.seed, epoch, members, rnd.CAPTION)
        captions, rows = self.captions.of(members)
        image_index, chosen = captions.pick(rows, draws, self.captions_per_image)
        if captions.features is not None:
            fields["text_features"] = torch.from_numpy(captions.features.read(chosen)).float()
        else:
            fields["tokens"], fields["lengths"] = self._tokens(
                epoch, captions, chosen, augmentation.word_dropout
            )
        ids = members if self.identity is None else self.identity[members]
        return Batch(
            sample_ids=torch.from_numpy(ids.astype(np.int64)),
            caption_ids=torch.from_numpy(captions.caption_ids[chosen]),
            image_index=torch.from_numpy(image_index),
            **fields,
        )

    def augmentation_at(self, step: int) -> Augmentation:
        """The augmentation of a step."""
        is_mild = 0 < self.mild_after <= step
        return self.augmentation.milder() if is_mild else self.augmentation

    def _images(
        self, epoch: int, members: np.ndarray, augmentation: Augmentation
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """The images of a batch, where some members may be replaced, and its fields for them."""
        seed, fields = self.plan.seed, dict[str, Any]()
        if self.image_features is not None:
            return members, {
                "image_features": torch.from_numpy(self.image_features.read(members)).float()
            }
        if self.device_images is not None:
            fields = {
                "cached_images": self.device_images,
                "rows": torch.from_numpy(members.astype(np.int64)),
            }
        else:
            assert self.images is not None
            members, pixels, fields["failed"] = read_or_replace(self.images, members, seed, epoch)
            fields["images"] = torch.as_tensor(pixels)
        fields["views"] = draw_views(augmentation, seed, epoch, members)
        dropout = augmentation.patch_dropout
        if self.patches and dropout:
            kept_patches = draw_patches(dropout, self.patches, seed, epoch, members)
            fields["kept_patches"] = torch.from_numpy(kept_patches)
        if self.augmentation.cutmix:  # in all steps or in none: empty boxes at the end
            fields["boxes"] = draw_boxes(augmentation.cutmix, seed, epoch, members)
        return members, fields

    def _tokens(
        self, epoch: int, table: CaptionTable, chosen: np.ndarray, dropout: float
    ) -> tuple[Tensor, tuple[int, ...]]:
        """(tokens, lengths) of captions after word dropout."""
        tokens = table.tokens[chosen]
        lengths = table.lengths[chosen]
        context = tokens.shape[1]
        if dropout:
            numbers = chosen if table.numbers is None else table.numbers[chosen]
            positions = numbers[:, None] * context + np.arange(context)
            dropped = rnd.uniform(self.plan.seed, epoch, positions, rnd.WORD) < dropout
            tokens, lengths = drop_tokens(tokens, lengths, dropped, table.pad_id)
        return torch.from_numpy(tokens.astype(np.int64)), tuple(lengths.tolist())

    def join(self, pieces: Sequence[Batch], pin: bool = False) -> Batch:
        """The batch of all its pieces.

        Captions sorted by length, unless all get the full length.
        """
        batch = _concatenate(pieces, pin)
        if batch.tokens is None:
            return batch
        if self.full_length:
            return replace(batch, lengths=())
        lengths = np.array(batch.lengths)
        order = np.argsort(lengths, kind="stable")
        longest = rounded(int(lengths.max()), batch.tokens.shape[1])
        rows = torch.from_numpy(order)
        tensors = [batch.caption_ids[rows], batch.image_index[rows], batch.tokens[rows, :longest]]
        if pin:
            tensors = [tensor.pin_memory() for tensor in tensors]
        caption_ids, image_index, tokens = tensors
        lengths_in_order = tuple(lengths[order].tolist())
        return replace(
            batch,
            caption_ids=caption_ids,
            image_index=image_index,
            tokens=tokens,
            lengths=lengths_in_order,
        )

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "report": None}  # workers report through the batch


def _concatenate(pieces: Sequence[Batch], pin: bool) -> Batch:
    """The rows of consecutive pieces of a batch, in pinned memory if asked."""
    if len(pieces) == 1:
        return pieces[0].pin_memory() if pin else pieces[0]
    starts = itertools.accumulate((len(piece) for piece in pieces), initial=0)
    pieces = [
        replace(piece, image_index=piece.image_index + start)
        for piece, start in zip(pieces, starts, strict=False)
    ]
    tensors: dict[str, Any] = {}
    for name, first in pieces[0].tensors().items():
        parts = [piece.tensors()[name] for piece in pieces]
        shape = (sum(map(len, parts)), *first.shape[1:])
        tensors[name] = torch.cat(parts, out=torch.empty(shape, dtype=first.dtype, pin_memory=pin))
    lengths = tuple(length for piece in pieces for length in piece.lengths)
    failed = tuple(failure for piece in pieces for failure in piece.failed)
    return replace(pieces[0], **tensors, lengths=lengths, failed=failed)


Feed = Generator[Batch, None, None]
Interruptible = Callable[[], AbstractContextManager[object]]


def batches(
    data: TrainingSet,
    start: int,
    stop: int,
    workers: int,
    start_method: str,
    pin: bool,
    on_restart: Callable[[str], None] = console.warn,
    interruptible: Interruptible = nullcontext,
) -> Feed:
    """The batches of steps start .. stop - 1, in order.

    `on_restart` is called with the reason if killed workers were restarted. The wait for a worker,
    which could hang, is `interruptible()`.
    """
    if data.images is not None and data.images.ram_bytes and start_method != "fork":
        workers = 0  # each would receive a copy of all images, which are already decoded
    if data.device_images is not None:
        # Only rows and tokens remain to be prepared, and other processes cannot access device memory.
        workers = 0
    if data.images is not None and data.images.on_gpu:
        workers = workers or READ_PROCESSES
    if workers and data.images is not None and data.images.in_processes:
        feed = _decoded_ahead(data, start, stop, workers, pin, on_restart, interruptible)
    elif workers:

        def start_workers(step: int) -> _Workers:
            return _Workers(data, range(step, stop), workers, start_method, pin, interruptible)

        feed = _from_workers(start_workers, start, stop, on_restart)
    else:
        feed = (
            batch.pin_memory() if pin else batch
            for batch in _in_this_process(data, start, stop, interruptible)
        )
    # Not left to the garbage collector, which prints a Ctrl-C in it as a traceback.
    with contextlib.closing(feed):
        for batch in feed:
            if data.report is not None:
                data.report(batch.failed)
            yield batch


def _in_this_process(
    data: TrainingSet, start: int, stop: int, interruptible: Interruptible
) -> Feed:
    """Batches without workers.

    A thread reads streamed ones ahead, as reads of remote shards mostly wait.
    """
    if data.plan.blocks is None:
        yield from (data[step] for step in range(start, stop))
        return
    with ThreadPoolExecutor(1) as thread:
        coming = deque(
            thread.submit(data.__getitem__, step) for step in range(start, min(start + AHEAD, stop))
        )
        try:
            for step in range(start, stop):
                with interruptible():
                    batch = coming.popleft().result()
                if step + AHEAD < stop:
                    coming.append(thread.submit(data.__getitem__, step + AHEAD))
                yield batch
        finally:
            thread.shutdown(cancel_futures=True)


def _decoded_ahead(
    data: TrainingSet,
    start: int,
    stop: int,
    processes: int,
    pin: bool,
    on_restart: Callable[[str], None],
    interruptible: Interruptible,
) -> Feed:
    """Batches whose images are decoded by light processes, while a thread puts the next ones
    together.
    """
    assert isinstance(data.images, LazyImages)
    first, slots = data.plan.members(start)[1], AHEAD + 1
    images = read_ahead(data.images, processes, len(first), slots, on_restart)
    ahead = replace(data, images=images)
    coming, requested = deque[Future[Batch]](), start

    def make(step: int) -> Batch:
        nonlocal requested
        while requested < min(step + AHEAD + 1, stop):
            images.request(data.plan.members(requested)[1])
            requested += 1
        batch = ahead[step]
        # Copied once, out of the memory that the processes write.
        return batch.pin_memory() if pin else batch.clone()

    with ThreadPoolExecutor(1) as thread:
        try:
            for step in range(start, stop):
                while len(coming) <= AHEAD and step + len(coming) < stop:
                    coming.append(thread.submit(make, step + len(coming)))
                with interruptible():
                    batch = coming.popleft().result()
                yield batch
        finally:
            images.stop()
            thread.shutdown(wait=True, cancel_futures=True)
            images.close()


def _from_workers(
    start_workers: Callable[[int], _Workers],
    start: int,
    stop: int,
    on_restart: Callable[[str], None],
) -> Feed:
    """Batches from worker processes, which are restarted if one is killed: a batch depends only on
    its step.
    """
    step, deaths = start, 0
    while step < stop:
        workers = start_workers(step)
        try:
            for batch in workers.batches():
                step, deaths = step + 1, 0
                yield batch
        except WorkerDied as death:
            deaths += 1
            reason = f"{death} while preparing step {step + 1:,}; the system may be out of memory"
            if deaths > RESTARTS:
                raise UserError(
                    f"{reason}. {RESTARTS} restarts did not help: close other programs, or lower"
                    " --workers"
                ) from None
            on_restart(f"{reason}. Restarted the workers")
        finally:
            workers.end()


class WorkerDied(Exception):
    """A data worker ended unexpectedly."""


class _Workers:
    """Processes that each make a piece of every batch, so that the first batch is complete soon.

    Each has its own pipe, so a killed one cannot block the others.
    """

    def __init__(
        self,
        data: TrainingSet,
        steps: range,
        count: int,
        start_method: str,
        pin: bool,
        interruptible: Interruptible,
    ) -> None:
        self.data, self.steps, self.pin, self.interruptible = data, steps, pin, interruptible
        self.workers: list[tuple[BaseProcess, Connection]] = []
        self.greetings: list[threading.Thread] = []
        self.pieces = min(count, len(data.plan.members(steps[0])[1]))
        atexit.register(self.end)  # at exit, multiprocessing would wait for them
        context: Any = get_context(start_method)
        if start_method == "forkserver":
            context.set_forkserver_preload([__name__])  # imports torch once, not once per worker
        forked = start_method == "fork"
        # Not for the fork server, from which other code may start processes.
        with block_signals(STOP_SIGNALS) if start_method == "spawn" else nullcontext():
            for number in range(self.pieces):
                pipe, far_end = context.Pipe()
                own_data = data if forked else None
                process = context.Process(
                    target=_make_pieces, args=(far_end, number, self.pieces, own_data)
                )
                process.start()
                far_end.close()  # so that reading ends when the worker does
                self.workers.append((process, pipe))
        # Sending waits until the worker has imported torch: in threads, so that all workers import
        # it at once.
        data_bytes = None if forked else ForkingPickler.dumps(data)
        for _, pipe in self.workers:
            greeting = threading.Thread(target=self._greet, args=(pipe, data_bytes), daemon=True)
            greeting.start()
            self.greetings.append(greeting)

    def batches(self) -> Feed:
        """All batches.

        A thread receives the next one, and pins its memory, while the caller uses the last.
        """
        with ThreadPoolExecutor(1) as thread:
            coming = (thread.submit(self._receive, index) for index in range(len(self.steps)))
            try:
                for future, _ in itertools.pairwise(itertools.chain(coming, [None])):
                    assert future is not None
                    with self.interruptible():
                        batch = future.result()
                    yield batch
            finally:
                self.end()  # first, as the thread may be waiting for a worker

    def _greet(self, pipe: Connection, data_bytes: Any) -> None:
        """Send a worker its data, and the first steps."""
        with contextlib.suppress(OSError):  # the worker crashed, as `_receive` will find out
            if data_bytes is not None:
                pipe.send_bytes(data_bytes)
            for step in self.steps[:WORKER_AHEAD]:
                pipe.send(step)

    def _receive(self, index: int) -> Batch:
        pieces = [self._receive_piece(number, index) for number in range(len(self.workers))]
        return self.data.join(pieces, self.pin)

    def _receive_piece(self, number: int, index: int) -> Batch:
        process, pipe = self.workers[number]
        try:
            piece = pipe.recv()
        except (EOFError, OSError):
            end = time.monotonic() + 1.0
            # Another thread may be joining it.
            while process.exitcode is None and time.monotonic() < end:
                time.sleep(0.01)
            if process.exitcode is None:
                raise
            raise WorkerDied(
                f"data worker {process.pid} was killed (exit code {process.exitcode})"
            ) from None
        if isinstance(piece, Exception):
            raise piece
        self.greetings[number].join()  # two threads must not send at the same time
        if index + WORKER_AHEAD < len(self.steps):
            with contextlib.suppress(OSError):  # the worker crashed, as the next call will find out
                pipe.send(self.steps[index + WORKER_AHEAD])
        # A copy frees the shared memory, whose file descriptors are limited.
        return piece.clone() if len(self.workers) > 1 else piece

    def end(self) -> None:
        """Kill the workers: they have no state to save, and may be stopped."""
        atexit.unregister(self.end)
        for process, _ in self.workers:
            process.kill()
        for process, _ in self.workers:
            process.join()


def _follow_parent() -> None:
    """Initialize a worker process: ignore Ctrl-C, and exit when the parent does."""
    for number in STOP_SIGNALS:
        if number != signal.SIGTERM:
            signal.signal(number, signal.SIG_IGN)
    parent = parent_process()
    assert parent is not None

    def end_with_parent() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()


def _make_pieces(pipe: Connection, number: int, pieces: int, data: TrainingSet | None) -> None:
    """Run a worker: receive the data unless it is forked, then numbers of steps.

    Send its pieces of their batches.
    """
    _follow_parent()
    # Sent to the process group: the parent needs batches for its step.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    torch.set_num_threads(1)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # its threads do not survive a fork
    with contextlib.suppress(EOFError, OSError):  # the parent has ended
        received: TrainingSet = pipe.recv() if data is None else data
        while True:
            step = pipe.recv()
            try:
                result: Batch | Exception = received.piece(step, number, pieces)
            except Exception as error:  # noqa: BLE001  raised again in the parent
                error.add_note(traceback.format_exc())
                result = error
            pipe.send(result)
