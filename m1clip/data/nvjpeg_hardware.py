"""The JPEG decoders of a GPU (seven on an H100 or H200), by the library nvJPEG that torchvision brings.

torchvision decodes one batch at a time: while the GPU trains, each image waits for kernels of the
step. Here, threads decode batches at the same time. Colors are interpolated as by libjpeg-turbo,
which torchvision does not ask for: pixels differ by one level at most, and rarely.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

# Of nvjpeg.h.
SUCCESS = 0
BACKEND_HARDWARE = 3
INTERPOLATED_COLORS = 1 << 5  # NVJPEG_FLAGS_UPSAMPLING_WITH_INTERPOLATION
OUTPUT_RGB = 3  # three planes
PLANES = 3
IMAGE_FIELDS = 8  # of nvjpegImage_t: four addresses of planes, then four pitches
FIRST_PITCH = 4
CPU_THREADS = 1
# Calls for each image, of some microseconds: a thread that released Python's lock for them would
# wait longer to get it back.
SHORT_CALLS = {
    "nvjpegJpegStreamParseHeader",
    "nvjpegDecodeBatchedSupported",
    "nvjpegJpegStreamGetFrameDimensions",
}


class NvJpegError(RuntimeError):
    """A call of nvJPEG failed."""


class Library(NamedTuple):
    """nvJPEG, loaded once."""

    releasing: Any  # Python's lock during calls
    holding: Any


class HardwareDecoder:
    """Decodes batches of JPEG, from any number of threads.

    What the hardware does not support, such as progressive JPEG, is left to `others`.
    """

    def __init__(
        self, library: Library, others: Callable[[list[Tensor]], list[Tensor]], device: str = "cuda"
    ) -> None:
        self.library = library
        self.others = others
        self.device = device
        self.handle = ctypes.c_void_p()
        self._idle: list[_State] = []  # those that no thread uses
        flags = ctypes.c_uint(INTERPOLATED_COLORS)
        self._call("nvjpegCreateEx", BACKEND_HARDWARE, None, None, flags, _at(self.handle))

    def __call__(self, batch: list[Tensor]) -> list[Tensor]:
        """Encoded images on the host -> (3, height, width) uint8 on the GPU, each."""
        try:
            state = self._idle.pop()
        except IndexError:
            state = _State(self)
        sizes = [state.size(encoded) for encoded in batch]
        supported = [index for index, size in enumerate(sizes) if size is not None]
        decoded: dict[int, Tensor] = {}
        if supported:
            pixels = state.decode(
                [batch[index] for index in supported],
                [sizes[index] or (0, 0) for index in supported],
            )
            decoded = dict(zip(supported, pixels, strict=True))
        self._idle.append(state)  # not after an error, which may leave it unusable
        rest = [index for index, size in enumerate(sizes) if size is None]
        if rest:
            decoded |= zip(rest, self.others([batch[index] for index in rest]), strict=True)
        return [decoded[index] for index in range(len(batch))]

    def _call(self, name: str, *arguments: Any) -> None:
        """Call a function of the library; NvJpegError if it fails."""
        library = self.library.holding if name in SHORT_CALLS else self.library.releasing
        status = getattr(library, name)(*arguments)
        if status != SUCCESS:
            raise NvJpegError(f"{name} failed with status {status}")


class _State:
    """What nvJPEG needs for one batch at a time."""

    def __init__(self, decoder: HardwareDecoder) -> None:
        self.handle = decoder.handle
        self.device = decoder.device
        self.call = decoder._call
        self.state, self.header = ctypes.c_void_p(), ctypes.c_void_p()
        self.batch = 0  # images that the state is prepared for
        self.call("nvjpegJpegStateCreate", self.handle, _at(self.state))
        self.call("nvjpegJpegStreamCreate", self.handle, _at(self.header))

    def size(self, encoded: Tensor) -> tuple[int, int] | None:
        """(height, width) of an image; None if the hardware does not support it."""
        width, height, unsupported = ctypes.c_uint(), ctypes.c_uint(), ctypes.c_int()
        data, length = _address(encoded), ctypes.c_size_t(encoded.numel())
        self.call("nvjpegJpegStreamParseHeader", self.handle, data, length, self.header)
        self.call("nvjpegDecodeBatchedSupported", self.handle, self.header, _at(unsupported))
        if unsupported.value:
            return None
        self.call("nvjpegJpegStreamGetFrameDimensions", self.header, _at(width), _at(height))
        return height.value, width.value

    def decode(self, batch: Sequence[Tensor], sizes: Sequence[tuple[int, int]]) -> list[Tensor]:
        """The pixels of images with known sizes."""
        count = len(batch)
        stream = torch.cuda.current_stream()
        # Memory that is used again may still be read by what was queued before.
        stream.synchronize()
        planes = [height * width for height, width in sizes]
        starts = np.cumsum([0, *(PLANES * plane for plane in planes)])
        pixels = torch.empty(int(starts[-1]), dtype=torch.uint8, device=self.device)
        images = np.zeros((count, IMAGE_FIELDS), np.uint64)
        for plane in range(PLANES):
            images[:, plane] = pixels.data_ptr() + starts[:-1] + plane * np.array(planes)
            images[:, FIRST_PITCH + plane] = [width for _, width in sizes]
        addresses = np.array([encoded.data_ptr() for encoded in batch], np.uint64)
        lengths = np.array([encoded.numel() for encoded in batch], np.uint64)
        if self.batch != count:
            self.call(
                "nvjpegDecodeBatchedInitialize",
                self.handle, self.state, count, CPU_THREADS, OUTPUT_RGB,
            )  # fmt: skip
            self.batch = count
        self.call(
            "nvjpegDecodeBatched",
            self.handle,
            self.state,
            ctypes.c_void_p(addresses.ctypes.data),
            ctypes.c_void_p(lengths.ctypes.data),
            ctypes.c_void_p(images.ctypes.data),
            ctypes.c_void_p(stream.cuda_stream),
        )
        stream.synchronize()  # another thread may use this state now
        return [
            pixels[start : start + PLANES * height * width].view(PLANES, height, width)
            for start, (height, width) in zip(starts[:-1].tolist(), sizes, strict=True)
        ]


def _at(value: Any) -> Any:
    return ctypes.byref(value)


def _address(tensor: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())


def open_library() -> Library:
    """nvJPEG, which has the version that torchvision was built with; OSError if there is none."""
    name = next(map(str, _library_paths()), None) or ctypes.util.find_library("nvjpeg")
    if name is None:
        raise OSError("the library nvJPEG is not installed")
    return Library(ctypes.CDLL(name), ctypes.PyDLL(name))


def _library_paths() -> Iterator[Path]:
    package = importlib.util.find_spec("torchvision")
    if package is None or package.origin is None:
        return
    packages = Path(package.origin).parents[1]
    yield from sorted((packages / "torchvision.libs").glob("libnvjpeg*"))
    yield from sorted((packages / "nvidia").glob("*/lib/libnvjpeg.so*"))
