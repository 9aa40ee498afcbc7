"""Where the images of a split are kept: in RAM, on disk, or decoded each time they are read."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import numpy as np

from m1clip import console
from m1clip.config import DataConfig
from m1clip.data.array_view import ArrayView
from m1clip.data.cache import (
    DISK_MARGIN,
    Computed,
    RowCache,
    RowWriter,
    cache_folder,
    data_folders,
    image_keys,
)
from m1clip.data.decoding import (
    DecodeMethod,
    DecodeOptions,
    Images,
    LazyImages,
    decode_images,
    decode_to_rows,
    gpu_decoder_for,
    processes_for,
)
from m1clip.data.failures import Failure, check_failures
from m1clip.data.synthetic.source import SyntheticImage
from m1clip.data.types import ImageRef, Sample, Source

RAM_FRACTION = 0.3  # of the machine's memory, for decoded images
DISK_FRACTION = 0.5  # of the free disk, unless the user asks for the disk
CACHED_IN_MEMORY = 500  # decoded in seconds, so they need no disk
CHECKED = 256  # training images tried before a run that decodes while it trains
Kind = Literal["ram", "disk", "off"]


def choose_kind(
    requested: str, *, synthetic: bool, images: int, needed: int, total: int, memory: int, free: int
) -> Kind:
    """Where to cache a split that needs `needed` more bytes on disk, of a set of `total` bytes.

    Synthetic images and small datasets stay in RAM. Others go to disk, so that the next run starts
    immediately; if the disk is too small they stay in RAM, and if that is too small they are
    decoded each time.
    """
    if requested not in ("auto", "stream"):
        return requested  # type: ignore[return-value]
    fits_memory = total <= RAM_FRACTION * memory
    if fits_memory and (synthetic or images <= CACHED_IN_MEMORY):
        return "ram"
    if not synthetic and needed * DISK_MARGIN <= DISK_FRACTION * free:
        return "disk"
    return "ram" if fits_memory else "off"


def _unreadable(refs: Sequence[ImageRef], tried: Sequence[int], threads: int) -> dict[int, str]:
    """Which of the images that are tried cannot be read, and why."""
    decoded = LazyImages(refs, side=32).decode(tried, threads)
    return {
        index: reason
        for index, reason in zip(tried, decoded, strict=True)
        if isinstance(reason, str)
    }


def stream_images(
    refs: Sequence[ImageRef],
    side: int,
    resize: str,
    config: DataConfig,
    options: DecodeOptions,
    threads: int,
) -> tuple[LazyImages, tuple[Failure, ...]]:
    """Training images that are read for each batch, and those of a sample that cannot be read."""
    tried = sorted({index * len(refs) // CHECKED for index in range(CHECKED)})
    bad = _unreadable(refs, tried, threads or options.threads)
    failures = check_failures(bad, refs, "train", len(tried), config.max_unreadable)
    return LazyImages(refs, side, resize, threads=threads), failures


def cache_split(
    source: Source, split: str, side: int, resize: str, config: DataConfig, options: DecodeOptions
) -> tuple[Images, Sequence[Sample], tuple[Failure, ...], Kind]:
    """Cache the images of a split as asked: (images, samples that can be read, failures, where they
    are cached).
    """
    samples, folders = source.cached(split), data_folders(source)
    refs = [sample.image for sample in samples]
    synthetic = all(isinstance(ref, SyntheticImage) for ref in refs)
    total = (
        len(samples)
        if source.streamed
        else sum(len(source.samples(name)) for name in source.splits())
    )
    threads = source.threads or options.threads
    options = replace(options, threads=threads)
    bad: dict[int, str] = {}

    def decode(missing: Sequence[int], failed: dict[int, str], writer: RowWriter) -> Computed:
        chosen = [refs[index] for index in missing]
        with console.progress(f"preparing {split} images"):
            yield from decode_to_rows(chosen, side, resize, failed, writer, options, gpu=gpu)

    def kind_for(needed: int, free: int) -> Kind:
        size = {"images": total, "total": total * side * side * 3, "memory": options.memory_bytes}
        return choose_kind(config.cache, synthetic=synthetic, needed=needed, free=free, **size)

    kind = kind_for(0, 0)
    gpu = gpu_decoder_for(refs, options, side) if kind == "disk" else None
    if kind == "disk":
        cache = RowCache(
            cache_folder(config.cache_dir, folders),
            "images",
            f"{side}|{resize}{'|nvjpeg' if gpu else ''}",
            (side, side, 3),
            np.uint8,
        )
        keys = image_keys(samples, folders)
        kind = kind_for(
            len(cache.missing(keys)) * cache.row_bytes, shutil.disk_usage(cache.path.parent).free
        )
    images: Images
    tried: Sequence[int] = range(len(samples))
    if kind == "disk":
        rows, bad = cache.fill(keys, decode)
        images = cache.view(rows[rows >= 0])
    elif kind == "ram":
        array = np.zeros((len(samples), side, side, 3), np.uint8)
        with console.progress(f"preparing {split} images"):
            processes = processes_for(refs, options.cpus)
            decoded = decode_images(refs, side, resize, bad, DecodeMethod(threads, processes))
            for items, pixels in decoded:
                array[items] = pixels
        images = ArrayView(np.delete(array, list(bad), axis=0) if bad else array)
    else:
        # Evaluation images are a fixed set, so try all of them; of the training images, try a
        # sample.
        if split == "train" and len(samples) > CHECKED:
            tried = [index * len(samples) // CHECKED for index in range(CHECKED)]
        bad = _unreadable(refs, tried, threads)
        keep = [ref for index, ref in enumerate(refs) if split == "train" or index not in bad]
        # Processes read the files for the GPU.
        in_processes = split == "train" and all(ref.in_processes for ref in keep)
        decodes_on_gpu = in_processes and gpu_decoder_for(keep, options, side) is not None
        images = LazyImages(keep, side, resize, on_gpu=decodes_on_gpu)
    failures = check_failures(bad, refs, split, len(tried), config.max_unreadable)
    if len(images) < len(samples):
        samples = [sample for index, sample in enumerate(samples) if index not in bad]
    return images, samples, failures, kind
