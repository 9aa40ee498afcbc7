"""Batches by step number: the same ones for any number of workers, from any step onwards."""

from __future__ import annotations

import itertools
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from m1clip.data import randomness as rnd
from m1clip.data.augment import Augmentation, Views, draw_patches, draw_views
from m1clip.data.captions import CaptionTable, rounded
from m1clip.data.store import ArrayPictures, Failure, Pictures, read_or_replace
from m1clip.errors import UserError

TEXT_GROUPS = 4  # of like length in a step; more would save little padding and make products small
SMALLEST_GROUP = 32  # captions


@dataclass(frozen=True)
class Batch:
    """One step's worth: raw pixels, tokens, and what says which pairs belong together."""

    pixels: Tensor  # (n, side, side, 3) uint8
    tokens: Tensor  # (m, length) int64; short captions first
    pictures: Tensor  # (n,) number of each picture; copies of one have equal numbers
    captions: Tensor  # (m,) key of each caption; equal captions have equal keys
    owners: Tensor  # (m,) the row of the picture that each caption describes
    views: Views
    patches: Tensor | None = None  # (n, kept) which patches of each picture are seen; None: all
    lengths: tuple[int, ...] = ()  # of each caption, on the host; empty: all are to be read at full length
    failed: tuple[Failure, ...] = ()  # pictures that could not be read; others stand in their place

    def texts(self, rows: slice) -> Tensor:
        """Tokens of some captions, cut after the longest of them: they stand by length, so it is the last."""
        tokens = self.tokens[rows]
        longest = max(self.lengths[rows], default=self.tokens.shape[1])
        return tokens[:, : rounded(longest, self.tokens.shape[1])]

    def text_groups(self) -> list[Tensor]:
        """All tokens in a few groups of like length: the padding is work that no caption needs."""
        m = len(self.tokens)
        if not self.lengths:
            return [self.tokens]
        bounds = np.linspace(0, m, min(TEXT_GROUPS, max(1, m // SMALLEST_GROUP)) + 1).astype(int)
        return [self.texts(slice(a, b)) for a, b in itertools.pairwise(bounds.tolist())]

    def to(self, device: torch.device, non_blocking: bool = False) -> Batch:
        """The same batch on a device; the views stay, they are read when the pixels are rendered."""
        return self._map(lambda t: t.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Batch:
        """Called by the DataLoader where the device's rules ask for pinned memory."""
        return self._map(Tensor.pin_memory)

    def _map(self, move: Callable[[Tensor], Tensor]) -> Batch:
        names = ("pixels", "tokens", "pictures", "captions", "owners", "patches")
        tensors = {name: getattr(self, name) for name in names}
        moved: dict[str, Any] = {name: move(t) for name, t in tensors.items() if t is not None}
        return replace(self, **moved)


@dataclass(frozen=True)
class BatchPlan:
    """Which pictures are in which step: a function of the seed and the step number."""

    pictures: int
    batch: int
    seed: int

    @property
    def steps_per_epoch(self) -> int:
        """Full batches only; which pictures are left over differs from epoch to epoch."""
        return self.pictures // self.batch

    def members(self, step: int) -> tuple[int, np.ndarray]:
        """(epoch, picture indices) of a step."""
        epoch, place = divmod(step, self.steps_per_epoch)
        order = rnd.permutation(self.seed, epoch, self.pictures)
        return epoch, order[place * self.batch : (place + 1) * self.batch]


class TrainingSet(Dataset[Batch]):
    """Makes the batch of a step. It pickles, so that workers may be started by spawn."""

    def __init__(
        self,
        pictures: Pictures,
        captions: CaptionTable,
        plan: BatchPlan,
        augmentation: Augmentation,
        full_length: bool,
        identity: np.ndarray | None = None,
        several: int = 1,
        patches: int = 0,
    ) -> None:
        """`identity[i]` says which picture index i is, where copies exist; `several` captions of each go in a step.

        `patches` is how many the image tower cuts a picture into, of which the augmentation may leave some out.
        """
        self.patches = patches
        self.pictures, self.captions, self.plan, self.several = pictures, captions, plan, several
        self.augmentation, self.full_length, self.identity = augmentation, full_length, identity
        self.report: Callable[[tuple[Failure, ...], int], None] | None = (
            None  # told of failures and pictures asked for
        )

    def __getitem__(self, step: int) -> Batch:
        epoch, planned = self.plan.members(step)
        members, pixels, failed = read_or_replace(self.pictures, planned, self.plan.seed, epoch)
        draws = rnd.bits(self.plan.seed, epoch, members, rnd.CAPTION)
        owners, chosen = self.captions.pick(members, draws, self.several)
        lengths = self.captions.lengths[chosen]
        if not self.full_length:
            by_length = np.argsort(lengths, kind="stable")
            owners, chosen, lengths = owners[by_length], chosen[by_length], lengths[by_length]
        tokens = self.captions.tokens[chosen] if self.full_length else self.captions.rows(chosen)
        shown, seed = None, self.plan.seed
        if self.patches and self.augmentation.patch_dropout:
            drawn = draw_patches(self.augmentation.patch_dropout, self.patches, seed, epoch, members)
            shown = torch.from_numpy(drawn)
        return Batch(
            patches=shown,
            pixels=torch.from_numpy(pixels),
            tokens=torch.from_numpy(tokens.astype(np.int64)),
            pictures=torch.from_numpy(self._identities(members).astype(np.int64)),
            captions=torch.from_numpy(self.captions.keys[chosen]),
            owners=torch.from_numpy(owners),
            lengths=() if self.full_length else tuple(lengths.tolist()),
            views=draw_views(self.augmentation, seed, epoch, members),
            failed=failed,
        )

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
    data: TrainingSet, start: int, stop: int, workers: int, start_method: str, pin: bool
) -> Iterator[Batch]:
    """The batches of steps start .. stop - 1, in order."""
    if isinstance(data.pictures, ArrayPictures) and start_method != "fork":
        workers = 0  # each would be sent a copy of all pictures, to save little: they are decoded already
    if workers == 0:
        return _reported((data[step] for step in range(start, stop)), data)
    loader = DataLoader(
        data,
        batch_size=None,
        sampler=_Steps(start, stop),
        num_workers=workers,
        multiprocessing_context=start_method,
        pin_memory=pin,
        worker_init_fn=_leave_signals_to_the_parent,
    )
    return _reported(iter(loader), data)


def _reported(feed: Iterator[Batch], data: TrainingSet) -> Iterator[Batch]:
    """Tell of failed pictures in the training process, whichever process read them."""
    try:
        for batch in feed:
            if data.report is not None:
                data.report(batch.failed, len(batch.pictures))
            yield batch
    except UserError as error:
        # A worker's error arrives with its traceback in front; its last line is the message.
        raise UserError(
            str(error).strip().splitlines()[-1].removeprefix("m1clip.errors.UserError: ")
        ) from None


def _leave_signals_to_the_parent(worker: int) -> None:
    """Ctrl-C, or SIGTERM to the group, reaches every process; the parent needs a batch to finish its step."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # No orphan comes of it: torch's workers end by an event, and watch for the death of their parent.
    signal.signal(signal.SIGTERM, _ignore_once)


def _ignore_once(number: int, frame: FrameType | None) -> None:
    """A second one ends the worker: torch and multiprocessing send it at shutdown and wait, as a last resort."""
    signal.signal(number, signal.SIG_DFL)
