"""JPEG decoding on a CUDA GPU with nvJPEG, where torchvision has it. What it cannot decode is left to the CPU.

Its pixels differ from those of libjpeg-turbo by rounding and by how colors are interpolated, so these rows are
cached apart.
"""

from __future__ import annotations

import importlib.util
import io
import struct
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES, ExtensionFileLoader, FileFinder
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from PIL import Image

from m1clip.data.decode_pool import reports_in_order
from m1clip.data.decode_worker import Late
from m1clip.data.images import MAX_DECODED_ASPECT, MAX_PIXELS, BadImage, map_with_timeout
from m1clip.data.types import ImageRef
from m1clip.formatting import ceil_div

if TYPE_CHECKING:
    from torch import Tensor

GPU_BATCH = 256  # images that are decoded together
GPU_THREADS = 3  # one decodes while others copy pixels to the host and write them
# That read files. In this process each image would take 0.1 ms of the GIL, more than the GPU needs.
READ_PROCESSES = 4
READ_THREADS = 4  # of images that other processes cannot read
READ_BLOCK = 32  # images that one of them reads at a time, ...
BLOCK_BYTES = 2**21  # ... unless they have more bytes than this
GPU_BLOCKS_AHEAD = 4  # of each thread
FILES_WEIGHED = 8  # to find how many bytes images have
TRIED_FILES = 64  # images that are looked at, ...
SUITABLE_FRACTION = 0.9  # ... and the fraction that the GPU must be able to decode
# Shorter side of an image, relative to what it is scaled to. Scaling down hides how the colors,
# which most JPEG files have at half the resolution, were interpolated: here 5% of the values differ
# by more than a level, without scaling 20% (benchmarks/decoding.py --colors).
MIN_REDUCTION = 1.4
TINY_SIZE = 48, 64  # (height, width) of the image that a decoder is tried with
RGB_MODE = 3  # of torchvision.io.ImageReadMode
GROUP_PIXELS = 2**26  # decoded together: they take 0.2 GB, and 0.6 GB more while they are resized
START_OF_SCAN, END_OF_IMAGE = 0xDA, b"\xff\xd9"
SIZED_FRAMES = (0xC0, 0xC1, 0xC2)  # baseline, extended and progressive
WITHOUT_LENGTH = (0x01, *range(0xD0, 0xD8))
# (data of each JPEG, as uint8 tensors on the host) -> (3, height, width) uint8 on the device, each.
DecodeBatch = Callable[[list[Any]], list[Any]]


@cache
def gpu_decoder() -> DecodeBatch | None:
    """The function that decodes JPEG on the GPU.

    None if there is no GPU, or torchvision cannot do it.
    """
    import torch

    if not torch.cuda.is_available():
        return None
    device = torch.device("cuda")

    def decode(batch: list[Tensor]) -> list[Tensor]:
        # Else nvJPEG would overwrite images of the last batch that are still being resized.
        torch.cuda.current_stream().synchronize()
        return list(torch.ops.image.decode_jpegs_cuda(batch, RGB_MODE, device))

    try:
        _load_torchvision_images()
        pixels = decode([torch.frombuffer(bytearray(_tiny_jpeg()), dtype=torch.uint8)])
    # None, of another version of torch, or without nvJPEG
    except (ImportError, OSError, AttributeError, RuntimeError):
        return None
    if pixels[0].shape != (3, *TINY_SIZE):
        return None
    return decode


def _load_torchvision_images() -> None:
    """Load the operators of torchvision.io without the package, which imports torch's compiler: 4 to 6 s.

    As torchvision does it: a library named "image" in its folder.
    """
    import torch

    package = importlib.util.find_spec("torchvision")
    if package is None or not package.submodule_search_locations:
        raise ImportError("torchvision is not installed")
    loader = (ExtensionFileLoader, EXTENSION_SUFFIXES)
    library = FileFinder(package.submodule_search_locations[0], loader).find_spec("image")
    if library is None or library.origin is None:
        raise ImportError("torchvision has no library for images")
    torch.ops.load_library(library.origin)


def _tiny_jpeg() -> bytes:
    stream = io.BytesIO()
    Image.new("RGB", TINY_SIZE[::-1]).save(stream, "JPEG")
    return stream.getvalue()


def jpeg_size(data: bytes) -> tuple[int, int] | None:
    """(width, height) of a JPEG that the GPU may decode; None for anything that needs care.

    That is: what is not a complete JPEG in gray or YCbCr, what is rotated, very large or very long.
    """
    if data[:2] != b"\xff\xd8" or data[-64:].rstrip(b"\0")[-2:] != END_OF_IMAGE:
        return None
    offset, size = 2, None
    while offset + 4 <= len(data) and data[offset] == 0xFF:
        marker = data[offset + 1]
        if marker == START_OF_SCAN:
            break
        if marker in WITHOUT_LENGTH:
            offset += 2
            continue
        (length,) = struct.unpack_from(">H", data, offset + 2)
        segment = data[offset + 4 : offset + 2 + length]
        if marker == 0xEE or (marker == 0xE1 and _is_rotated(segment)):  # 0xEE: Adobe's colors
            return None
        if marker in SIZED_FRAMES and length >= 8:
            depth, height, width, colors = struct.unpack_from(">BHHB", data, offset + 4)
            if depth != 8 or colors not in (1, 3):
                return None
            size = width, height
        offset += 2 + length
    if size is None or min(size) < 1 or size[0] * size[1] > MAX_PIXELS:
        return None
    return None if max(size) > MAX_DECODED_ASPECT * min(size) else size


def _is_rotated(segment: bytes) -> bool:
    """Whether EXIF data or XMP may ask to rotate or mirror the image."""
    if not segment.startswith(b"Exif\0\0"):
        return b"Orientation" in segment  # in XMP
    exif = Image.Exif()
    try:
        exif.load(segment)
        return exif.get(0x0112, 1) != 1
    except Exception:  # noqa: BLE001  whatever damaged EXIF data raises; the CPU decides
        return True


def read_bytes(ref: ImageRef) -> bytes | BadImage:
    """The encoded bytes of an image, or why they cannot be read."""
    try:
        return ref.read()
    except BadImage as error:
        return error


class Encoded(NamedTuple):
    """An image for the GPU."""

    data: Any  # a writable buffer, which torch uses without a copy
    pixels: int  # once decoded


class InSharedRow(NamedTuple):
    """An image for the GPU whose bytes are in its row of the memory that processes share."""

    length: int
    pixels: int


# What is read of an image: for the GPU; its square, if the CPU had to decode it; or why it failed.
Read = Encoded | InSharedRow | np.ndarray | str | Late


@dataclass(frozen=True)
class ReadForGpu:
    """Work for `DecodePool`: reads an image for the GPU, and decodes it if the GPU cannot."""

    fallback: Callable[[ImageRef], np.ndarray | str]  # decodes one image on the CPU
    row_bytes: int = 0  # of shared memory for an image; what does not fit is sent to the caller

    def __call__(self, ref: ImageRef) -> tuple[np.ndarray | None, Read]:
        data = read_bytes(ref)
        size = jpeg_size(data) if isinstance(data, bytes) else None
        if not isinstance(data, bytes) or size is None:
            return None, self.fallback(ref)
        pixels = size[0] * size[1]
        if len(data) <= self.row_bytes:
            return np.frombuffer(data, np.uint8), InSharedRow(len(data), pixels)
        return None, Encoded(bytearray(data), pixels)

    def read_all(self, refs: Sequence[ImageRef]) -> list[Read]:
        """What is read of some images."""
        return [self(ref)[1] for ref in refs]


def mostly_for_gpu(refs: Sequence[ImageRef], side: int) -> bool:
    """Whether the GPU should decode nearly all of these images, by a sample of them.

    The others are decoded by a few threads, which would be slower than processes for all. Images
    that are hardly larger than `side` are left to the CPU: with the GPU's colors, a model from
    random weights is worse on images that a CPU has decoded (docs/recipe.md).
    """
    draw = np.random.default_rng(0)
    sample = [refs[index] for index in draw.permutation(len(refs))[:TRIED_FILES]]
    data = map_with_timeout(sample, read_bytes, threads=READ_THREADS)
    sizes = [jpeg_size(encoded) if isinstance(encoded, bytes) else None for encoded in data]
    suitable = [size is not None and min(size) >= MIN_REDUCTION * side for size in sizes]
    return sum(suitable) >= SUITABLE_FRACTION * len(sample)


# Why each image failed, or None.
Reports = list[str | Late | None]


@dataclass(frozen=True)
class GpuBatches:
    """Decodes batches of encoded images to squares, on the GPU where it can."""

    side: int
    resize: str
    decode: DecodeBatch
    fallback: Callable[[ImageRef], np.ndarray | str]  # decodes one image on the CPU
    write: Callable[[Sequence[int], np.ndarray], None] | None  # gets indices and their pixels

    def __call__(
        self, first: int, refs: Sequence[ImageRef], read: Sequence[Read]
    ) -> tuple[Reports, np.ndarray]:
        """(reports, pixels on the host) of images, whose indices begin with `first`."""
        with on_own_stream():
            reports, on_gpu = self.on_gpu(refs, read)
            pixels = _on_host(on_gpu)
        if self.write is not None:
            readable = [index for index, report in enumerate(reports) if report is None]
            block = pixels if len(readable) == len(refs) else pixels[readable]
            self.write([first + index for index in readable], block)
        return reports, pixels

    def on_gpu(self, refs: Sequence[ImageRef], read: Sequence[Read]) -> tuple[Reports, Tensor]:
        """(reports, (n, side, side, 3) pixels) of images, which are 0 where an image failed."""
        import torch

        from m1clip.data.resample import squares

        squares_of: list[tuple[list[int], Tensor]] = []
        others: dict[int, Read] = {
            index: image for index, image in enumerate(read) if not isinstance(image, Encoded)
        }
        for indices, data in _groups(read):
            try:
                squares_of.append((indices, squares(self.decode(data), self.side, self.resize)))
            except RuntimeError:  # one of them is damaged, or memory is short: the CPU decodes them
                others |= {index: self.fallback(refs[index]) for index in indices}
        if len(squares_of) == 1 and not others:
            return [None] * len(refs), squares_of[0][1]
        device = squares_of[0][1].device if squares_of else torch.device("cpu")
        pixels = torch.zeros((len(refs), self.side, self.side, 3), dtype=torch.uint8, device=device)
        for indices, group in squares_of:
            pixels[torch.tensor(indices, device=device)] = group
        reports: Reports = [None] * len(refs)
        for index, image in others.items():
            if isinstance(image, np.ndarray):
                pixels[index] = torch.from_numpy(np.array(image)).to(device)
            else:
                assert not isinstance(image, Encoded | InSharedRow)
                reports[index] = image
        return reports, pixels


_streams = threading.local()


@contextmanager
def on_own_stream() -> Iterator[None]:
    """Let this thread use the GPU beside the others, and wait until all that it began is done.

    Memory that a stream has freed is only used again by that stream, and not while the GPU works on
    it: nvJPEG, which has a stream of its own, would not wait for that.
    """
    import torch

    if not torch.cuda.is_available():
        yield
        return
    if not hasattr(_streams, "own"):
        _streams.own = torch.cuda.Stream(priority=-1)  # before the steps of a run
    with torch.cuda.stream(_streams.own):
        yield
        _streams.own.synchronize()


def _groups(read: Sequence[Read]) -> Iterator[tuple[list[int], list[Tensor]]]:
    """The indices and data of images for the GPU, in groups with a limited number of pixels."""
    import torch

    indices: list[int] = []
    data: list[Tensor] = []
    pixels = 0
    for index, encoded in enumerate(read):
        if not isinstance(encoded, Encoded):
            continue
        if data and pixels + encoded.pixels > GROUP_PIXELS:
            yield indices, data
            indices, data, pixels = [], [], 0
        indices.append(index)
        data.append(torch.frombuffer(encoded.data, dtype=torch.uint8))
        pixels += encoded.pixels
    if data:
        yield indices, data


def _on_host(pixels: Tensor) -> np.ndarray:
    """The pixels in pinned memory, which is used again, without mapping new pages for each batch."""
    import torch

    if not pixels.is_cuda:
        return pixels.numpy()
    return torch.empty(pixels.shape, dtype=pixels.dtype, pin_memory=True).copy_(pixels).numpy()


def read_batches(
    refs: Sequence[ImageRef], work: ReadForGpu, processes: int, timeout: float
) -> Generator[list[Read]]:
    """What is read of batches of images in order: in processes, or if there are none in threads."""
    if processes:
        block = images_per_block(refs)
        blocks = reports_in_order(work, refs, min(processes, READ_PROCESSES), timeout, block)
    else:
        blocks = _read_in_threads(refs, work, timeout)
    batch: list[Read] = []
    with closing(blocks):
        for reports in blocks:
            batch += reports
            if len(batch) >= GPU_BATCH:
                yield batch
                batch = []
    if batch:
        yield batch


def images_per_block(refs: Sequence[ImageRef]) -> int:
    """How many images a process sends at a time: fewer if their files are large."""
    return max(1, min(READ_BLOCK, BLOCK_BYTES // max(1, largest_file(refs))))


def largest_file(refs: Sequence[ImageRef]) -> int:
    """Bytes of the largest of a few images."""
    data = [read_bytes(ref) for ref in refs[:: ceil_div(len(refs), FILES_WEIGHED)]]
    return max((len(encoded) for encoded in data if isinstance(encoded, bytes)), default=1)


def _read_in_threads(
    refs: Sequence[ImageRef], work: ReadForGpu, timeout: float
) -> Generator[list[Read]]:
    """What is read of blocks of images in order.

    In a block that is late, each image has the time for itself.
    """
    blocks = [refs[start : start + READ_BLOCK] for start in range(0, len(refs), READ_BLOCK)]
    reads = map_with_timeout(blocks, work.read_all, timeout, READ_THREADS, GPU_BLOCKS_AHEAD)
    with closing(reads):
        for block, read in zip(blocks, reads, strict=True):
            if read is not None:
                yield read
            else:
                alone = map_with_timeout(block, work, timeout)
                yield [Late(timeout) if outcome is None else outcome[1] for outcome in alone]


def decode_on_gpu(
    refs: Sequence[ImageRef], batches: GpuBatches, processes: int, timeout: float
) -> Generator[tuple[Reports, np.ndarray]]:
    """(reports, pixels) of batches in order.

    Some are in work while one is used.
    """
    reads = read_batches(refs, ReadForGpu(batches.fallback), processes, timeout)
    coming: deque[Future[tuple[Reports, np.ndarray]]] = deque()
    first = 0
    with closing(reads), ThreadPoolExecutor(GPU_THREADS, "nvjpeg") as threads:
        for read in reads:
            coming.append(threads.submit(batches, first, refs[first : first + len(read)], read))
            first += len(read)
            if len(coming) > GPU_THREADS:
                yield coming.popleft().result()
        while coming:
            yield coming.popleft().result()
