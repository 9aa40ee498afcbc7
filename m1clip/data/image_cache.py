"""Where the images of a split are kept: in RAM, on disk, or decoded each time they are read."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal, NamedTuple

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
    DecodeBatch,
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
    samples = source.cached(split)
    refs = [sample.image for sample in samples]
    options = replace(options, threads=source.threads or options.threads)
    request = ImageRequest(split, refs, side, resize, options)
    kind = _choose_kind_of(source, request, config.cache, needed=0, free=0)
    if kind == "disk":
        folders = data_folders(source)
        gpu = gpu_decoder_for(refs, options, side)
        cache = _open_cache(cache_folder(config.cache_dir, folders), request, gpu is not None)
        keys = image_keys(samples, folders)
        needed = len(cache.missing(keys)) * cache.row_bytes
        free = shutil.disk_usage(cache.path.parent).free
        kind = _choose_kind_of(source, request, config.cache, needed, free)
    if kind == "disk":
        read = _read_from_disk(request, cache, keys, gpu)
    elif kind == "ram":
        read = _read_into_memory(request)
    else:
        read = _read_in_each_batch(request)
    failures = check_failures(read.failed, refs, split, read.tried, config.max_unreadable)
    if len(read.images) < len(samples):
        samples = [sample for index, sample in enumerate(samples) if index not in read.failed]
    return read.images, samples, failures, kind


class ImageRequest(NamedTuple):
    """The images of a split, and how they are decoded."""

    split: str
    refs: Sequence[ImageRef]
    side: int
    resize: str
    options: DecodeOptions


class ReadImages(NamedTuple):
    """The images that can be read, and why others cannot be, of those that were tried."""

    images: Images
    failed: dict[int, str]
    tried: int


def _choose_kind_of(
    source: Source, request: ImageRequest, requested: str, needed: int, free: int
) -> Kind:
    """Where to cache a split: one of a data set of which all splits are cached alike."""
    total = len(request.refs)
    if not source.streamed:
        total = sum(len(source.samples(name)) for name in source.splits())
    return choose_kind(
        requested,
        synthetic=all(isinstance(ref, SyntheticImage) for ref in request.refs),
        images=total,
        needed=needed,
        total=total * request.side**2 * 3,
        memory=request.options.memory_bytes,
        free=free,
    )


def _open_cache(folder: Path, request: ImageRequest, on_gpu: bool) -> RowCache:
    """The cache of images of this size; a GPU decodes them differently."""
    version = f"{request.side}|{request.resize}{'|nvjpeg' if on_gpu else ''}"
    return RowCache(folder, "images", version, (request.side, request.side, 3), np.uint8)


def _read_from_disk(
    request: ImageRequest, cache: RowCache, keys: Sequence[bytes], gpu: DecodeBatch | None
) -> ReadImages:
    """Images of the cache on disk, which those are added to that it lacks."""

    def decode(missing: Sequence[int], failed: dict[int, str], writer: RowWriter) -> Computed:
        refs = [request.refs[index] for index in missing]
        side, resize = request.side, request.resize
        with console.progress(f"preparing {request.split} images"):
            yield from decode_to_rows(refs, side, resize, failed, writer, request.options, gpu=gpu)

    rows, failed = cache.fill(keys, decode)
    return ReadImages(cache.view(rows[rows >= 0]), failed, len(request.refs))


def _read_into_memory(request: ImageRequest) -> ReadImages:
    refs, side = request.refs, request.side
    failed: dict[int, str] = {}
    array = np.zeros((len(refs), side, side, 3), np.uint8)
    with console.progress(f"preparing {request.split} images"):
        method = DecodeMethod(request.options.threads, processes_for(refs, request.options.cpus))
        for items, pixels in decode_images(refs, side, request.resize, failed, method):
            array[items] = pixels
    readable = np.delete(array, list(failed), axis=0) if failed else array
    return ReadImages(ArrayView(readable), failed, len(refs))


def _read_in_each_batch(request: ImageRequest) -> ReadImages:
    """Images that are decoded whenever they are read.

    Evaluation images are a fixed set, so all of them are tried; of the training images, a sample.
    """
    refs, side = request.refs, request.side
    is_training = request.split == "train"
    tried: Sequence[int] = range(len(refs))
    if is_training and len(refs) > CHECKED:
        tried = [index * len(refs) // CHECKED for index in range(CHECKED)]
    failed = _unreadable(refs, tried, request.options.threads)
    used = [ref for index, ref in enumerate(refs) if is_training or index not in failed]
    # Processes read the files for the GPU.
    in_processes = is_training and all(ref.in_processes for ref in used)
    on_gpu = in_processes and gpu_decoder_for(used, request.options, side) is not None
    return ReadImages(LazyImages(used, side, request.resize, on_gpu=on_gpu), failed, len(tried))
