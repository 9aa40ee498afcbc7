"""JPEG decoding on a CUDA GPU with nvJPEG, where torchvision has it. What it cannot decode is left to the CPU.

nvJPEG rounds differently from libjpeg-turbo, and interpolates colors differently, so its rows are
cached apart.
"""

from __future__ import annotations

import importlib
import io
import struct
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from m1clip.data.decode_worker import Late
from m1clip.data.images import MAX_DECODED_ASPECT, MAX_PIXELS, BadImage, map_with_timeout
from m1clip.data.types import ImageRef

if TYPE_CHECKING:
    import torch
    from torch import Tensor

GPU_BATCH = 256  # images that are decoded together
GPU_THREADS = 3  # one decodes while others copy pixels to the host and write them
READ_THREADS = 4  # threads that read files; more would compete for the GIL
READ_BLOCK = 32  # images that a thread reads at a time
GPU_BLOCKS_AHEAD = 4  # of each thread
TRIED_FILES = 64  # images that are looked at, ...
SUITABLE_FRACTION = 0.9  # ... and the fraction that the GPU must be able to decode
GROUP_PIXELS = 2**26  # decoded together: as float32 they take 0.8 GB
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
    try:
        vision = importlib.import_module("torchvision.io")
    except (ImportError, RuntimeError):  # RuntimeError: of another version of torch
        return None

    def decode(batch: list[Tensor]) -> list[Tensor]:
        return list(vision.decode_jpeg(batch, mode=vision.ImageReadMode.RGB, device="cuda"))

    try:
        pixels = decode([torch.frombuffer(bytearray(_tiny_jpeg()), dtype=torch.uint8)])
    except RuntimeError:  # built without nvJPEG
        return None
    return decode if pixels[0].shape == (3, 8, 8) else None


def _tiny_jpeg() -> bytes:
    stream = io.BytesIO()
    Image.new("RGB", (8, 8)).save(stream, "JPEG")
    return stream.getvalue()


def jpeg_size(data: bytes) -> tuple[int, int] | None:
    """(width, height) of a JPEG that the GPU may decode; None for anything that needs care.

    That is: what is not a complete JPEG in gray or YCbCr, what is rotated, very large or very long.
    """
    if data[:2] != b"\xff\xd8" or data[-64:].rstrip(b"\0")[-2:] != END_OF_IMAGE:
        return None
    place, size = 2, None
    while place + 4 <= len(data) and data[place] == 0xFF:
        marker = data[place + 1]
        if marker == START_OF_SCAN:
            break
        if marker in WITHOUT_LENGTH:
            place += 2
            continue
        (length,) = struct.unpack_from(">H", data, place + 2)
        segment = data[place + 4 : place + 2 + length]
        if marker == 0xEE or (marker == 0xE1 and _is_rotated(segment)):  # 0xEE: Adobe's colors
            return None
        if marker in SIZED_FRAMES and length >= 8:
            depth, height, width, colors = struct.unpack_from(">BHHB", data, place + 4)
            if depth != 8 or colors not in (1, 3):
                return None
            size = width, height
        place += 2 + length
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


def squares(images: Sequence[Tensor], side: int, resize: str) -> Tensor:
    """(n, side, side, 3) uint8 of decoded images, as `to_square` makes them.

    Images of one size together.
    """
    import torch

    device = images[0].device
    found = torch.empty((len(images), side, side, 3), dtype=torch.uint8, device=device)
    by_size: dict[torch.Size, list[int]] = {}
    for place, image in enumerate(images):
        by_size.setdefault(image.shape, []).append(place)
    for shape, places in by_size.items():
        height, width = shape[1:]
        if resize == "squash":
            wide = high = side
        elif width <= height:
            wide, high = side, max(side, int(side * height / width))
        else:
            wide, high = max(side, int(side * width / height)), side
        pixels = torch.stack([images[place] for place in places]).float()
        if (width, height) != (wide, high):
            pixels = torch.nn.functional.interpolate(
                pixels, (high, wide), mode="bicubic", antialias=True, align_corners=False
            )
        halved = (
            int(margin / 2) if resize == "shortest-floor" else round(margin / 2)
            for margin in (high - side, wide - side)
        )
        top, left = halved
        cut = pixels[:, :, top : top + side, left : left + side]
        rows = cut.round_().clamp_(0, 255).to(torch.uint8).permute(0, 2, 3, 1)
        found[torch.tensor(places, device=device)] = rows
    return found


def read_bytes(ref: ImageRef) -> bytes | BadImage:
    """The encoded bytes of an image, or why they cannot be read."""
    try:
        return ref.read()
    except BadImage as error:
        return error


def read_all(refs: Sequence[ImageRef]) -> list[bytes | BadImage]:
    """The encoded bytes of some images, or why they cannot be read."""
    return [read_bytes(ref) for ref in refs]


def mostly_for_gpu(refs: Sequence[ImageRef]) -> bool:
    """Whether the GPU can decode nearly all of these images, by a sample of them.

    The others are decoded by a few threads, which would be slower than processes for all.
    """
    draw = np.random.default_rng(0)
    sample = [refs[place] for place in draw.permutation(len(refs))[:TRIED_FILES]]
    data = map_with_timeout(sample, read_bytes, threads=READ_THREADS)
    suitable = [isinstance(each, bytes) and jpeg_size(each) is not None for each in data]
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
    write: Callable[[Sequence[int], np.ndarray], None] | None  # gets places and their pixels
    timeout: float

    def __call__(
        self, first: int, refs: Sequence[ImageRef], data: Sequence[bytes | BadImage | Late]
    ) -> tuple[Reports, np.ndarray]:
        """(reports, pixels) of images, whose places begin with `first`."""
        left = set(range(len(refs)))
        on_device: list[tuple[list[int], Tensor]] = []
        for places in _groups(data):
            try:
                made = squares(
                    self.decode([_tensor(data[place]) for place in places]), self.side, self.resize
                )
            except RuntimeError:  # one of them is damaged, or memory is short: the CPU decodes them
                continue
            on_device.append((places, made))
            left -= set(places)
        pixels = _on_host(on_device, len(refs), self.side)
        reports: Reports = [None] * len(refs)
        for place in left:
            here = data[place]
            found = here if isinstance(here, Late) else self.fallback(refs[place])
            if isinstance(found, np.ndarray):
                pixels[place] = found
            else:
                reports[place] = found
        if self.write is not None:
            good = [place for place, report in enumerate(reports) if report is None]
            block = pixels if len(good) == len(refs) else pixels[good]
            self.write([first + place for place in good], block)
        return reports, pixels


def _on_host(groups: list[tuple[list[int], Tensor]], count: int, side: int) -> np.ndarray:
    """(count, side, side, 3) with the squares of groups in their places."""
    if len(groups) == 1 and groups[0][0] == list(range(count)):
        return groups[0][1].cpu().numpy()  # without another copy
    pixels = np.zeros((count, side, side, 3), np.uint8)
    for places, made in groups:
        pixels[places] = made.cpu().numpy()
    return pixels


def _groups(data: Sequence[bytes | BadImage | Late]) -> list[list[int]]:
    """The places of images for the GPU, in groups with a limited number of pixels."""
    groups: list[list[int]] = []
    pixels = GROUP_PIXELS
    for place, each in enumerate(data):
        size = jpeg_size(each) if isinstance(each, bytes) else None
        if size is None:
            continue
        area = size[0] * size[1]
        if pixels + area > GROUP_PIXELS:
            groups.append([])
            pixels = 0
        groups[-1].append(place)
        pixels += area
    return groups


def _tensor(data: bytes | BadImage | Late) -> Tensor:
    import torch

    assert isinstance(data, bytes)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def read_batches(
    refs: Sequence[ImageRef], timeout: float
) -> Generator[list[bytes | BadImage | Late]]:
    """The encoded bytes of batches of images in order.

    In a block of reads that is late, each image has the time for itself.
    """
    blocks = [refs[start : start + READ_BLOCK] for start in range(0, len(refs), READ_BLOCK)]
    reads = map_with_timeout(blocks, read_all, timeout, READ_THREADS, GPU_BLOCKS_AHEAD)
    batch: list[bytes | BadImage | Late] = []
    with closing(reads):
        for block, data in zip(blocks, reads, strict=True):
            if data is not None:
                batch += data
            else:
                alone = map_with_timeout(block, read_bytes, timeout)
                batch += [Late(timeout) if each is None else each for each in alone]
            if len(batch) >= GPU_BATCH:
                yield batch
                batch = []
    if batch:
        yield batch


def decode_on_gpu(
    refs: Sequence[ImageRef], batches: GpuBatches
) -> Generator[tuple[Reports, np.ndarray]]:
    """(reports, pixels) of batches in order.

    Some are in work while one is used.
    """
    reads = read_batches(refs, batches.timeout)
    coming: deque[Future[tuple[Reports, np.ndarray]]] = deque()
    first = 0
    with closing(reads), ThreadPoolExecutor(GPU_THREADS, "nvjpeg") as threads:
        for data in reads:
            coming.append(threads.submit(batches, first, refs[first : first + len(data)], data))
            first += len(data)
            if len(coming) > GPU_THREADS:
                yield coming.popleft().result()
        while coming:
            yield coming.popleft().result()
