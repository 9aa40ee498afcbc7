"""On CUDA a step is recorded once and then replayed as one graph.

A small model's step is a thousand short kernels, and the host cannot launch them as fast as the device runs them; a
graph is launched once. It needs shapes that do not change (texts are padded to the longest that their place in the
batch ever held), rates that lie on the device, and nothing that the host reads in the middle.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from m1clip.data.augment import DeviceViews
from m1clip.data.captions import BUCKET, rounded
from m1clip.data.loader import Batch
from m1clip.training.oom import MemoryPressure

if TYPE_CHECKING:  # the update holds one of these
    from m1clip.training.step import TrainStep

WARM = 3  # plain steps before the recording: they make the optimizer's state, and compile what is compiled
MOST = 8  # recordings, before shapes are taken to change for ever: data where images have more or fewer captions
SHARE = 0.25  # of the device's memory that a step may take beside weights: a recording keeps as much a second time
VIEWS = ("boxes", "flips", "gains")
Figures = tuple[Tensor, Tensor]  # loss and gradient norm


class CapturedStep:
    """Makes the steps of an update, from the fourth with the same shapes on by replay."""

    def __init__(self, update: TrainStep) -> None:
        self.update = update
        self.off = ""  # why steps are not recorded any more
        self.recordings = 0
        self._longest: dict[int, list[int]] = {}  # number of captions -> length of each group
        self.forget()

    def forget(self) -> None:
        """Let go of the recording: the tensors that it moves are replaced by others."""
        self._key: tuple[Any, ...] = ()
        self._seen = 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._places: list[Tensor] = []
        self._figures: Figures | None = None

    @property
    def settled(self) -> bool:
        """Whether steps are replayed by now, or will never be."""
        return self._graph is not None or bool(self.off)

    def takes(self, batch: Batch) -> bool:
        """Whether this step can be one: not in chunks, and not one that hooks look at."""
        room = self.update.oom
        chunk = self.update.config.train.micro_batch if room is None else room.chunk
        whole = not 0 < chunk < len(batch)
        return not self.off and whole and not self.update.optimizer.observed

    def __call__(self, batch: Batch, step: int) -> Figures:
        """One step; loss and gradient norm on the device."""
        update = self.update
        batch = self._fixed(batch)
        views = batch.views.on(update.device.torch) if batch.views is not None else None
        shapes = [(name, tuple(t.shape), t.dtype) for name, t in _inputs(batch)]
        key = (*shapes, batch.lengths, views and (views.crops, views.colours))
        if key != self._key:
            self.forget()
            self._key = key
        if self._graph is None:
            self._seen += 1
            if self._seen <= WARM or not self._may_record():
                return update.eager(batch, step)
        update.phases.mark("copy")
        moved = dataclasses.replace(batch.to(update.device.torch, non_blocking=True), views=views)
        given = [t for _, t in _inputs(moved)]
        if self._graph is None and not self._record(moved, step):
            return update.eager(batch, step)
        assert self._graph is not None
        assert self._figures is not None
        torch._foreach_copy_(self._places, given)
        update.phases.mark("step")
        self._graph.replay()
        loss, grad_norm = (figure.clone() for figure in self._figures)  # the next replay writes over them
        update.phases.stop()
        return loss, grad_norm

    def _fixed(self, batch: Batch) -> Batch:
        """The same batch, each group of texts padded to the longest that it has had: no caption sees its padding."""
        if batch.tokens is None or not batch.lengths:
            return batch
        groups, context = batch.text_rows(), self.update.model.config.context_length
        now = [rounded(max(batch.lengths[rows]), context) for rows in groups]
        known = self._longest.get(len(batch.tokens), [0] * len(now))
        # One bucket more than what was seen: each time that one grows the recording has to be made anew.
        longest = [
            most if length <= most else rounded(length + BUCKET, context)
            for length, most in zip(now, known, strict=True)
        ]
        # Texts stand by length, and are cut after the longest of their group: no group may end before the one before.
        longest = list(itertools.accumulate(longest, max))
        self._longest[len(batch.tokens)] = longest
        lengths = tuple(
            length for rows, length in zip(groups, longest, strict=True) for _ in range(rows.start, rows.stop)
        )
        short = longest[-1] - batch.tokens.shape[1]
        tokens = F.pad(batch.tokens, (0, short)) if short else batch.tokens
        if short and batch.tokens.is_pinned():
            tokens = tokens.pin_memory()
        return dataclasses.replace(batch, tokens=tokens, lengths=lengths)

    def _may_record(self) -> bool:
        device = self.update.device
        if self.recordings >= MOST:
            self.off = f"the shapes of the batches changed {MOST} times"
        elif device.peak_bytes() - device.memory_bytes() > SHARE * device.total_bytes():
            self.off = "a step takes too much of the device's memory to keep it twice"
        return not self.off

    def _record(self, batch: Batch, step: int) -> bool:
        """Record a step of these shapes; nothing of it is computed yet. False: it cannot be recorded."""
        update = self.update
        self.recordings += 1
        batch = _copied(batch)
        places = [t for _, t in _inputs(batch)]
        graph = torch.cuda.CUDAGraph()
        update.phases.silent = True
        try:
            # Of this thread alone: another may pin the next batch's memory meanwhile.
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                loss = update.backward(batch, step)
                figures = loss, update.move(loss)
        except (RuntimeError, MemoryPressure) as error:
            # Out of memory, or a kernel that cannot be recorded: the plain step knows what to do.
            self.off = (str(error).strip().splitlines() or [type(error).__name__])[0]
            update.clear()
            return False
        finally:
            update.phases.silent = False
        self._graph, self._places, self._figures = graph, places, figures
        return True


def _inputs(batch: Batch) -> list[tuple[str, Tensor]]:
    """What differs from step to step, by name; the views only where they are on the device."""
    found = list(batch.tensors().items())
    if isinstance(batch.views, DeviceViews):
        found += [(name, getattr(batch.views, name)) for name in VIEWS]
    return found


def _copied(batch: Batch) -> Batch:
    """A batch of its own memory, which a recording reads at each replay."""
    tensors: dict[str, Any] = {name: t.clone() for name, t in _inputs(batch)}
    if isinstance(batch.views, DeviceViews):
        tensors["views"] = dataclasses.replace(batch.views, **{name: tensors.pop(name) for name in VIEWS})
    return dataclasses.replace(batch, **tensors)
