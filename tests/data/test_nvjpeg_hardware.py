"""The JPEG hardware of a GPU: the calls of nvJPEG, by a library that is simulated with Pillow."""

import ctypes
import io
import threading
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from m1clip.data.nvjpeg import gpu_decoder
from m1clip.data.nvjpeg_hardware import HardwareDecoder, Library, NvJpegError, open_library

UNSUPPORTED, FAILED = 1, 6


class Simulated:
    """Functions of nvjpeg.h, with their arguments as ctypes passes them."""

    def __init__(self) -> None:
        self.headers: dict[int, bytes] = {}
        self.prepared: list[int] = []
        self.states = 0

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)

    def nvjpegCreateEx(self, backend: int, device: None, pinned: None, flags: Any, out: Any) -> int:
        assert backend == 3
        assert flags.value == 32, "colors are interpolated"
        out._obj.value = 77
        return 0

    def nvjpegJpegStateCreate(self, handle: Any, out: Any) -> int:
        self.states += 1
        out._obj.value = self.states
        return 0

    def nvjpegJpegStreamCreate(self, handle: Any, out: Any) -> int:
        out._obj.value = self.states
        return 0

    def nvjpegJpegStreamParseHeader(self, handle: Any, data: Any, length: Any, out: Any) -> int:
        self.headers[out.value] = ctypes.string_at(data.value, length.value)
        return 0

    def nvjpegDecodeBatchedSupported(self, handle: Any, header: Any, out: Any) -> int:
        with Image.open(io.BytesIO(self.headers[header.value])) as image:
            out._obj.value = UNSUPPORTED if image.info.get("progressive") else 0
        return 0

    def nvjpegJpegStreamGetFrameDimensions(self, header: Any, width: Any, height: Any) -> int:
        with Image.open(io.BytesIO(self.headers[header.value])) as image:
            width._obj.value, height._obj.value = image.size
        return 0

    def nvjpegDecodeBatchedInitialize(
        self, handle: Any, state: Any, count: int, threads: int, output: int
    ) -> int:
        assert output == 3
        self.prepared.append(count)
        return 0

    def nvjpegDecodeBatched(
        self, handle: Any, state: Any, data: Any, lengths: Any, images: Any, stream: Any
    ) -> int:
        count = self.prepared[-1]
        for index in range(count):
            address = (ctypes.c_uint64 * count).from_address(data.value)[index]
            length = (ctypes.c_uint64 * count).from_address(lengths.value)[index]
            encoded = ctypes.string_at(address, length)
            if b"damaged" in encoded:
                return FAILED
            pixels = np.asarray(Image.open(io.BytesIO(encoded)).convert("RGB"))
            fields = (ctypes.c_uint64 * 8).from_address(images.value + 64 * index)
            for plane in range(3):
                assert fields[4 + plane] == pixels.shape[1]
                values = np.ascontiguousarray(pixels[:, :, plane])
                ctypes.memmove(fields[plane], values.ctypes.data, values.nbytes)
        return 0


class Stream:
    """A CUDA stream."""

    cuda_stream = 0

    def synchronize(self) -> None:
        pass


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Simulated:
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    return Simulated()


def encoded(size: tuple[int, int], **options: Any) -> torch.Tensor:
    draw = np.random.default_rng(size[0])
    image = Image.fromarray(draw.integers(0, 256, (size[1], size[0], 3), np.uint8))
    stream = io.BytesIO()
    image.save(stream, "JPEG", **options)
    return torch.frombuffer(bytearray(stream.getvalue()), dtype=torch.uint8)


def decoded(data: torch.Tensor) -> np.ndarray:
    image = Image.open(io.BytesIO(bytes(data.numpy()))).convert("RGB")
    return np.asarray(image).transpose(2, 0, 1)


def by_pillow(batch: list[torch.Tensor]) -> list[torch.Tensor]:
    return [torch.from_numpy(decoded(data).copy()) for data in batch]


def test_images_of_any_size_are_decoded_in_order(library: Simulated) -> None:
    """Progressive ones are left to the other decoder."""
    sent = []

    def others(batch: list[torch.Tensor]) -> list[torch.Tensor]:
        sent.append(len(batch))
        return by_pillow(batch)

    decode = HardwareDecoder(Library(library, library), others, "cpu")
    batch = [encoded((50, 40)), encoded((33, 70), progressive=True), encoded((64, 48))]
    for _ in range(2):
        for pixels, data in zip(decode(batch), batch, strict=True):
            np.testing.assert_array_equal(pixels.numpy(), decoded(data))
    assert sent == [1, 1]
    assert library.prepared == [2], "once for batches of the same length"
    assert library.states == 1, "one state, which is used again"


def test_threads_have_a_state_each(library: Simulated) -> None:
    decode = HardwareDecoder(Library(library, library), by_pillow, "cpu")
    barrier = threading.Barrier(2)
    simulated: Any = library
    batched = simulated.nvjpegDecodeBatched

    def wait_for_the_other(*arguments: Any) -> int:
        barrier.wait(20)
        return batched(*arguments)

    simulated.nvjpegDecodeBatched = wait_for_the_other
    batch = [encoded((50, 40))]
    threads = [threading.Thread(target=decode, args=(batch,)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    assert library.states == 2


def test_failure_is_an_error_that_sends_the_images_to_the_cpu(library: Simulated) -> None:
    decode = HardwareDecoder(Library(library, library), by_pillow, "cpu")
    with pytest.raises(NvJpegError, match="nvjpegDecodeBatched failed with status 6"):
        decode([encoded((50, 40), comment=b"damaged")])
    np.testing.assert_array_equal(decode([encoded((50, 40))])[0], decoded(encoded((50, 40))))
    assert library.states == 2, "the state of a failed call is not used again"


def test_no_library_is_an_os_error() -> None:
    if not torch.cuda.is_available():
        with pytest.raises(OSError, match="nvJPEG"):
            open_library()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_hardware_decodes_as_pillow_does() -> None:
    decode = gpu_decoder()
    if not isinstance(decode, HardwareDecoder):
        pytest.skip("no JPEG hardware, or no nvJPEG")
    batch = [encoded((500, 375)), encoded((640, 480))]
    for own, data in zip(decode(batch), batch, strict=True):
        difference = np.abs(own.cpu().numpy().astype(int) - decoded(data))
        assert difference.max() <= 1
        assert difference.mean() < 0.01
