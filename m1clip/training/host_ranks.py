"""Ranks of one host, which exchange tensors through shared memory.

gloo's loopback TCP copies each byte through the kernel several times, in threads that take the
cores of the backward pass. Here each rank owns memory that the others map: it writes its part,
posts an event, waits for the events of the others, and reads theirs.

An event is one byte on a Unix socket between each pair of ranks. A rank that waits sleeps in the
kernel, and a rank that has ended closes its sockets, which the others notice at once. Sending and
receiving a byte orders memory: what a rank wrote before it posted is visible to those that have
received the event. The memory has no name: its file descriptors travel over the sockets, so nothing
is left behind by ranks that are killed.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import shutil
import socket
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.autograd.profiler import record_function

# Kinds of events. Each rank posts those of a kind in the same order, but kinds may be interleaved
# differently.
TOGETHER, SENT, REDUCED = range(3)
SLICE_UNIT = 64  # numbers: slices and buckets begin at a cache line
MAX_EVENTS = 4096  # bytes received at a time
MAX_DESCRIPTORS = 8  # file descriptors received at a time
MEETING_SECONDS = 60.0
PREFIX = "m1clip-ranks-"  # of temporary names


class HostRanks:
    """The other ranks of this host, and memory that all of them can read."""

    def __init__(self, rank: int, peers: dict[int, socket.socket], timeout: float) -> None:
        self.rank = rank
        self.size = len(peers) + 1
        self.timeout = timeout
        self._peers = peers
        self.posted = Counter[int]()
        self._received = {peer: Counter[int]() for peer in peers}
        self._files: dict[int, list[int]] = {peer: [] for peer in peers}
        # Two areas in turn. A rank that writes to one has seen all others begin the exchange in the
        # other one, so they have read what was in the first.
        self._areas: list[list[Tensor]] = [[], []]
        self.own_bytes = 0  # allocated by this rank

    # Events.

    def post(self, kind: int, file: int | None = None) -> None:
        """Tell all others that this rank is ready, perhaps with a file descriptor for them."""
        self.posted[kind] += 1
        for peer, connection in self._peers.items():
            self._receive(peer, wait=False)  # so that no buffer of events becomes full
            try:
                connection.settimeout(self.timeout)
                if file is None:
                    connection.sendall(bytes([kind]))
                else:
                    socket.send_fds(connection, [bytes([kind])], [file])
            except TimeoutError:
                raise RuntimeError(f"timed out sending to rank {peer}") from None
            except OSError:
                raise RuntimeError(f"connection closed by rank {peer}") from None

    def arrived(self, kind: int, count: int) -> bool:
        """Whether all others have posted `count` events of a kind."""
        for peer, received in self._received.items():
            if received[kind] < count:
                self._receive(peer, wait=False)
            if received[kind] < count:
                return False
        return True

    def wait(self, kind: int, count: int) -> None:
        """Wait until all others have posted `count` events of a kind."""
        deadline = time.monotonic() + self.timeout
        for peer, received in self._received.items():
            while received[kind] < count:
                self._receive(peer, wait=True, deadline=deadline)

    def meet(self, file: int | None = None) -> None:
        """Wait until all others are here too."""
        self.post(TOGETHER, file)
        self.wait(TOGETHER, self.posted[TOGETHER])

    def _receive(self, peer: int, wait: bool, deadline: float = 0.0) -> None:
        """Count the events of a rank that have arrived; if there are none, perhaps wait for one."""
        connection = self._peers[peer]
        connection.settimeout(max(1e-3, deadline - time.monotonic()) if wait else 0.0)
        try:
            events, files, _, _ = socket.recv_fds(connection, MAX_EVENTS, MAX_DESCRIPTORS)
        except BlockingIOError:
            return
        except TimeoutError:
            raise RuntimeError(f"timed out waiting for rank {peer}") from None
        except OSError:
            events, files = b"", []
        if not events:
            raise RuntimeError(f"connection closed by rank {peer}")
        self._received[peer].update(events)
        self._files[peer] += files

    # Memory.

    def allocate(self, size: int) -> list[Tensor]:
        """As many bytes of each rank, zeros; all ranks call this together."""
        size = max(size, 1)
        own = _anonymous_file(size)
        try:
            self.meet(own)
            files = {peer: self._files[peer].pop(0) for peer in self._peers}
            mapped = [
                torch.frombuffer(mmap.mmap(files.get(rank, own), size), dtype=torch.uint8)
                for rank in range(self.size)
            ]
            for file in files.values():
                os.close(file)
        finally:
            os.close(own)
        self.own_bytes += size
        return mapped

    def _area(self, shape: Sequence[int], dtype: torch.dtype) -> list[Tensor]:
        """A tensor of each rank, for one exchange."""
        self._areas.reverse()
        size = math.prod(shape) * dtype.itemsize
        old_size = self._areas[0][0].nbytes if self._areas[0] else 0
        if old_size < max(size, 1):
            self.own_bytes -= old_size
            self._areas[0] = self.allocate(2 * size)
        return [part[:size].view(dtype).view(shape) for part in self._areas[0]]

    # Exchanges.

    def gather(self, values: Tensor) -> Tensor:
        """(ranks, ...) from tensors of equal shape."""
        return torch.stack(self.gather_views(values))

    def gather_views(self, values: Tensor) -> list[Tensor]:
        """The tensors of all ranks in their memory, valid until the next exchange begins."""
        parts = self._area(values.shape, values.dtype)
        parts[self.rank].copy_(values)
        self.meet()
        return parts

    def reduce_scatter(self, parts: Sequence[Tensor]) -> Tensor:
        """The sum over all ranks of the part for this rank; all parts have the same shape."""
        sent = self._area((self.size, *parts[0].shape), parts[0].dtype)
        torch.stack(list(parts), out=sent[self.rank])
        self.meet()
        total = sent[0][self.rank].clone()
        for other in sent[1:]:
            total += other[self.rank]
        return total

    def all_reduce(self, flat: Tensor) -> None:
        """Add the flat tensors of all ranks, in place."""
        parts = self._area(flat.shape, flat.dtype)
        parts[self.rank].copy_(flat)
        self.meet()
        self.sum_own_slice(parts)
        self.meet()
        self.copy_slices(parts, flat)

    def sum_own_slice(self, parts: Sequence[Tensor]) -> None:
        """Add the others' to this rank's slice of its flat tensor.

        Only this rank computes these sums, so all ranks have the same numbers.
        """
        own = self._slice(len(parts[0]), self.rank)
        total = parts[self.rank][own]
        for rank, part in enumerate(parts):
            if rank != self.rank:
                total += part[own]

    def copy_slices(self, parts: Sequence[Tensor], target: Tensor) -> None:
        """Copy the slice that each rank has summed; `target` may be this rank's part."""
        for rank, part in enumerate(parts):
            if part is not target:
                rows = self._slice(len(part), rank)
                target[rows] = part[rows]

    def _slice(self, count: int, rank: int) -> slice:
        """The numbers that a rank adds: whole cache lines."""
        units = count // SLICE_UNIT
        stop = count if rank == self.size - 1 else SLICE_UNIT * (units * (rank + 1) // self.size)
        return slice(SLICE_UNIT * (units * rank // self.size), stop)


class SharedBuckets:
    """Buckets of gradients in shared memory, added while the backward pass computes others.

    A rank writes a bucket and posts it. As soon as all have, each adds a slice of it over all
    ranks, between two of its own buckets or at the end, and reads the slices of the others at the
    end. No thread takes the cores of the layers.
    """

    def __init__(self, host: HostRanks, sizes: Sequence[int], dtype: torch.dtype) -> None:
        """For buckets with these numbers of gradients."""
        self.host = host
        self.dtype = dtype
        starts = [0]
        for size in sizes:
            starts.append(starts[-1] + size + -size % SLICE_UNIT)
        memory = [part.view(dtype) for part in host.allocate(starts[-1] * dtype.itemsize)]
        self.buckets = [
            [part[start : start + size] for part in memory]
            for start, size in zip(starts, sizes, strict=False)
        ]
        self._sent = self._summed = 0  # in this step
        self._before = 0  # events of each kind in earlier steps

    def send(self, number: int, gradients: list[Tensor]) -> Tensor:
        """Let the others read the next bucket; returns its flat gradients.

        After `finish` they are the sums.
        """
        flat = self.buckets[number][self.host.rank]
        torch.cat([gradient.reshape(-1) for gradient in gradients], out=flat)
        self.skip(number)
        return flat

    def skip(self, number: int) -> None:
        """Take part in the next bucket with any numbers, since nobody uses the result."""
        if not self._sent:
            self._before = self.host.posted[SENT]  # in earlier steps, of all ranks alike
        self._sent += 1
        self.host.post(SENT)
        while self._summed < self._sent and self._are_ready(SENT, self._summed):
            self._sum()

    def _are_ready(self, kind: int, number: int) -> bool:
        return self.host.arrived(kind, self._before + number + 1)

    def _wait(self, kind: int, number: int) -> None:
        self.host.wait(kind, self._before + number + 1)

    def _sum(self) -> None:
        with record_function("shared_memory:all_reduce"):
            self.host.sum_own_slice(self.buckets[self._summed])
        self._summed += 1
        self.host.post(REDUCED)

    def finish(self) -> None:
        """Wait until the buckets that were sent are sums."""
        if not self._sent:
            return
        while self._summed < self._sent:
            self._wait(SENT, self._summed)
            self._sum()
        for number, parts in enumerate(self.buckets):
            self._wait(REDUCED, number)
            with record_function("shared_memory:all_reduce"):
                self.host.copy_slices(parts, parts[self.host.rank])
        self._sent = self._summed = 0
        self.host.meet()  # from here on a rank may change its gradients


def connect_host(
    rank: int, size: int, timeout: float, gather: Callable[[str], list[str]]
) -> HostRanks | None:
    """Connect all ranks, if they are on one host; `gather` exchanges a word with all of them.

    None on all ranks if one of them cannot.
    """
    folder = Path(tempfile.mkdtemp(prefix=PREFIX))  # only this user can connect
    peers: dict[int, socket.socket] = {}
    problem = ""
    try:
        with contextlib.ExitStack() as stack:
            try:
                listener = stack.enter_context(socket.socket(socket.AF_UNIX))
                listener.bind(str(folder / "rank"))
                listener.listen(size)
                listener.settimeout(MEETING_SECONDS)
            except OSError as error:
                problem = str(error)
            paths = gather("" if problem else str(folder / "rank"))
            if all(paths):
                try:
                    peers = _connect_pairs(rank, paths, listener)
                except OSError as error:
                    problem = str(error)
            if not all(paths) or any(gather(problem)):
                for peer in peers.values():
                    peer.close()
                return None
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return HostRanks(rank, peers, timeout)


def _connect_pairs(
    rank: int, paths: Sequence[str], listener: socket.socket
) -> dict[int, socket.socket]:
    """A connection to each other rank, by rank."""
    peers = {}
    for other in range(rank):
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(MEETING_SECONDS)
        connection.connect(paths[other])
        connection.sendall(rank.to_bytes(4, "big"))
        peers[other] = connection
    for _ in range(rank + 1, len(paths)):
        connection = listener.accept()[0]
        connection.settimeout(MEETING_SECONDS)
        peers[int.from_bytes(connection.recv(4, socket.MSG_WAITALL), "big")] = connection
    return dict(sorted(peers.items()))


def _anonymous_file(size: int) -> int:
    """The descriptor of a file in memory that no folder lists."""
    if hasattr(os, "memfd_create"):  # Linux
        descriptor = os.memfd_create(PREFIX)
    else:
        descriptor, path = tempfile.mkstemp(prefix=PREFIX)
        Path(path).unlink()
    os.ftruncate(descriptor, size)
    return descriptor
