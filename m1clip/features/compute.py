"""Towers over a whole set: pictures are decoded by threads while the tower works, captions are sorted by length."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager

import numpy as np
import torch
from torch import Tensor

from m1clip.data.augment import Views, render
from m1clip.data.pair import ImageRef
from m1clip.data.preprocess import Preprocess
from m1clip.data.store import CHUNK, Progress, decode_chunks

Tower = Callable[[Tensor], Tensor]
Context = Callable[[], AbstractContextManager[object]]
# (left, top, side as a share, mirrored): the whole picture first, then what a look at it from elsewhere shows.
VIEWS = (
    (0.0, 0.0, 1.0, False),
    (0.0, 0.0, 1.0, True),
    (0.0, 0.0, 0.8, False),
    (0.2, 0.2, 0.8, True),
    (0.2, 0.0, 0.8, False),
    (0.0, 0.2, 0.8, True),
)
CAPTIONS = 256  # at once
FLUSH_CAPTIONS = 16  # batches of captions in one write


@torch.inference_mode()
def picture_features(
    tower: Tower, refs: Sequence[ImageRef], preprocess: Preprocess, view: int, device: torch.device,
    autocast: Context, bad: dict[int, str], progress: Progress,
) -> Iterator[tuple[list[int], np.ndarray]]:  # fmt: skip
    """Rows of one view of each picture, chunk by chunk; what cannot be read goes into `bad` with the reason."""
    side, resize = preprocess.image_size, preprocess.resize
    threads = max(2, (os.cpu_count() or 2) // 2)
    progress(0, len(refs))
    for start, block, errors in decode_chunks(refs, range(0, len(refs), CHUNK), side, resize, threads, None):
        bad.update(errors)
        places = [start + offset for offset in range(len(block)) if start + offset not in errors]
        if places:
            pixels = torch.from_numpy(block[[place - start for place in places]]).to(device)
            with autocast():
                made = tower(render(pixels, _view(view, len(pixels)), preprocess))
            yield places, made.float().cpu().numpy()
        progress(start + len(block), len(refs))


@torch.inference_mode()
def caption_features(
    tower: Tower,
    rows: np.ndarray,
    lengths: np.ndarray,
    device: torch.device,
    autocast: Context,
    progress: Progress,
) -> Iterator[tuple[list[int], np.ndarray]]:
    """Rows of width numbers for each row of token ids; short captions first, none padded to the longest of all."""
    order = np.argsort(lengths, kind="stable")
    places: list[int] = []
    made: list[Tensor] = []
    progress(0, len(order))
    for start in range(0, len(order), CAPTIONS):
        chosen = order[start : start + CAPTIONS]
        ids = torch.from_numpy(rows[chosen, : int(lengths[chosen].max())].astype(np.int64)).to(device)
        with autocast():
            made.append(tower(ids).float().cpu())
        places += chosen.tolist()
        if len(made) == FLUSH_CAPTIONS:
            yield places, torch.cat(made).numpy()
            places, made = [], []
        progress(start + len(chosen), len(order))
    if made:
        yield places, torch.cat(made).numpy()


def _view(number: int, count: int) -> Views | None:
    left, top, side, mirrored = VIEWS[number]
    if number == 0:
        return None
    boxes = np.tile(np.array([left, top, side, side], np.float32), (count, 1))
    return Views(boxes, np.full(count, mirrored), np.ones((count, 2), np.float32))
