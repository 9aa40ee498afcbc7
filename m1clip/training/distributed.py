"""Several processes that train one model, started by torchrun.

The batch is global: each rank encodes its rows of it, features are exchanged, each rank computes
the loss of its rows against all features, and gradients are added. Every rank then makes the same
update, so the weights stay equal.

Rare exchanges (settings, evaluations, checkpoints) wait for as long as another rank works, because
torchrun ends all ranks when one ends. Exchanges within a step have a timeout, after which the rank
that does not answer is named.
"""

import atexit
import contextlib
import os
import socket
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._nn import flatten_dense_tensors, unflatten_dense_tensors

from m1clip.data.loader import Batch
from m1clip.errors import UserError
from m1clip.hardware.memory import MemoryPressure
from m1clip.training.host_ranks import HostRanks, SharedBuckets, connect_host
from m1clip.training.oom import is_out_of_memory

Result = TypeVar("Result")
Sizes = list[list[int]]  # images and captions of each rank
TIMEOUT_VARIABLE, RANK_TIMEOUT = "M1CLIP_RANK_TIMEOUT", 600.0  # seconds
SHARED_MEMORY_VARIABLE = "M1CLIP_SHARED_MEMORY"  # 0: ranks of a host use gloo, too
REPORT_SECONDS = 5.0  # a rank that has lost another one waits at least this long for reports
POLL_SECONDS = 0.02
MAX_CLOCK_SECONDS = 300.0  # files of a run get their times from different machines
BUCKET_VALUES = 1 << 21  # gradient values exchanged at a time: 8 MB of float32
# On CUDA, where each exchange costs the host 0.2 ms, at most about this many buckets: the last one
# is sent when nothing is left to overlap with.
CUDA_BUCKETS = 8
PRESSURE, FAILED = 1, 2  # memory is short; an allocation has failed


def needs_host_copy(device_type: str) -> bool:
    """Whether tensors of a device are exchanged through host memory: gloo and NCCL know only CPU and CUDA.

    On Apple's unified memory this is a copy within the same memory.
    """
    return device_type not in ("cpu", "cuda")


class RankLost(UserError):
    """Another rank has ended, or does not answer."""


class JointBatch(NamedTuple):
    """The features of all ranks, which of them belong together, and the rows of this rank."""

    features: list[Tensor]  # images (n, d), captions (m, d)
    sample_ids: Tensor
    caption_ids: Tensor
    image_index: Tensor
    images: slice
    texts: slice
    mixed: Tensor | None = None  # (n,) the part of each image that shows its partner


@dataclass
class Ranks:
    """The processes of a run; one, unless torchrun has started more."""

    rank: int = 0
    size: int = 1
    store: dist.Store | None = None
    names: tuple[str, ...] = ()  # process and host of each rank
    timeout: float = RANK_TIMEOUT
    _exchanges: int = 0  # rare ones so far; the same number on every rank
    host: HostRanks | None = None  # if all ranks are on one host: what they exchange on the CPU
    needs_host_copy: Callable[[str], bool] = needs_host_copy  # by type of device
    _last_exchange: float | None = None  # when the last exchange ended
    _longest_gap: float = 0.0  # seconds between two exchanges

    # Exchanges of a step.

    def to_host(self, tensor: Tensor) -> Tensor:
        """The tensor, or a copy in host memory if the ranks cannot exchange tensors of its device."""
        if not self.needs_host_copy(tensor.device.type):
            return tensor
        return tensor.to("cpu", copy=True)

    @property
    def shared_bytes(self) -> int:
        """Memory of this rank that the others can read."""
        return 0 if self.host is None else self.host.own_bytes

    def host_for(self, tensor: Tensor) -> HostRanks | None:
        """The shared memory in which a tensor is exchanged; None: by gloo or NCCL."""
        return self.host if tensor.device.type == "cpu" else None

    def gather(self, values: Tensor) -> Tensor:
        """(ranks, ...) from tensors of equal shape."""
        sent = self.to_host(values.contiguous())
        host = self.host_for(sent)
        with self._watched():
            if host is not None:
                gathered = host.gather(sent)
            else:
                gathered = sent.new_empty((self.size, *sent.shape))
                dist.all_gather(list(gathered), sent)
        return gathered.to(values.device)

    def gather_views(self, values: Tensor) -> list[Tensor]:
        """The tensors of all ranks, which have equal shape.

        To be read before the next exchange: they may be in the memory of the others.
        """
        host = self.host_for(values)
        if host is None:
            return list(self.gather(values))
        with self._watched():
            return host.gather_views(values)

    def all_reduce_max(self, *values: int) -> list[int]:
        """The maximum of each value over all ranks."""
        if self.size == 1:
            return list(values)
        return self.gather(torch.tensor(values, dtype=torch.int64)).amax(dim=0).tolist()

    @contextlib.contextmanager
    def synchronized(self, *facts: int) -> Iterator[Sizes]:
        """Run a block that may run out of memory; if it does on one rank, all raise.

        Yields a list, which has the `facts` of every rank when the block ends.
        """
        if self.size == 1:
            yield [list(facts)]
            return
        sizes: Sizes = []
        problem, used = 0, 0
        try:
            yield sizes
        except MemoryPressure as error:
            problem, used = PRESSURE, error.used
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            problem = FAILED
        table: Sizes = self.gather(
            torch.tensor([problem, used, *facts], dtype=torch.int64)
        ).tolist()
        worst = max(table)
        where = f"on rank {table.index(worst)}"
        if worst[0] == FAILED:
            raise torch.OutOfMemoryError(f"out of memory {where}") from None
        if worst[0] == PRESSURE:
            raise MemoryPressure(
                f"{worst[1] / 1e9:.2f} GB in use {where}, close to its limit", worst[1]
            ) from None
        sizes += [row[2:] for row in table]

    def all_gather(self, batch: Batch, features: Sequence[Tensor], sizes: Sizes) -> JointBatch:
        """The features and ids of all ranks.

        `sizes` are the numbers of their images and captions.
        """
        images, texts = ([row[column] for row in sizes] for column in (0, 1))
        first_image, first_text = sum(images[: self.rank]), sum(texts[: self.rank])
        encoded = [feature.detach() for feature in features]
        ids = [batch.sample_ids, batch.caption_ids, batch.image_index + first_image]
        mixed = batch.mixed
        if self.size > 1:
            encoded, ids = (
                self._rows(encoded, [images, texts]),
                self._rows(ids, [images, texts, texts]),
            )
            mixed = None if mixed is None else self._rows([mixed], [images])[0]
        own_images = slice(first_image, first_image + images[self.rank])
        own_texts = slice(first_text, first_text + texts[self.rank])
        return JointBatch(encoded, ids[0], ids[1], ids[2], own_images, own_texts, mixed)

    def reduce_scatter(self, gradients: Sequence[Tensor], sizes: Sizes) -> list[Tensor]:
        """This rank's rows of the gradients of all features, added over all ranks."""
        if self.size == 1:
            return list(gradients)
        columns = [list(column) for column in zip(*sizes, strict=True)]
        max_counts = [max(column) for column in columns]
        split = [
            gradient.split(column) for gradient, column in zip(gradients, columns, strict=True)
        ]
        parts = [
            torch.cat(list(map(_pad_rows, rows, max_counts))) for rows in zip(*split, strict=True)
        ]
        sent = [self.to_host(part) for part in parts]
        host = self.host_for(sent[0])
        with self._watched():
            if host is not None:
                received = host.reduce_scatter(sent)
            else:
                received = torch.empty_like(sent[0])
                dist.reduce_scatter(received, sent)
        own = received.to(gradients[0].device)
        return [
            part[:count]
            for part, count in zip(own.split(max_counts), sizes[self.rank], strict=True)
        ]

    def concatenate_rows(self, rows: Tensor) -> Tensor:
        """The rows of all ranks in order; their numbers may differ."""
        if self.size == 1:
            return rows
        return self._rows([rows], [self.gather(torch.tensor(len(rows))).tolist()])[0]

    def _rows(self, tensors: Sequence[Tensor], sizes: list[list[int]]) -> list[Tensor]:
        """The rows of all ranks of several tensors, in one exchange.

        `sizes` are the rows of each tensor by rank.
        """
        max_rows = [max(lengths) for lengths in sizes]
        gathered = self.gather(torch.cat(list(map(_pad_rows, tensors, max_rows)))).split(
            max_rows, dim=1
        )
        return [
            torch.cat([rows[:n] for rows, n in zip(g, lengths, strict=True)])
            for g, lengths in zip(gathered, sizes, strict=True)
        ]

    def all_reduce(self, tensors: list[Tensor]) -> None:
        """Add the tensors of all ranks, in place."""
        flat = self.to_host(torch.cat([t.reshape(-1) for t in tensors]))
        host = self.host_for(flat)
        with self._watched():
            if host is not None:
                host.all_reduce(flat)
            else:
                dist.all_reduce(flat)
        parts = flat.to(tensors[0].device).split([t.numel() for t in tensors])
        torch._foreach_copy_(
            tensors, [part.view_as(t) for part, t in zip(parts, tensors, strict=True)]
        )

    def bandwidth(self, device: torch.device) -> float:
        """Bytes per second that each rank sends while gradients are added.

        The median of some exchanges.
        """
        values, seconds = torch.zeros(4 * BUCKET_VALUES, device=device), []
        for _ in range(7):
            self.gather(torch.zeros(1))  # start together
            begin = time.perf_counter()
            self.all_reduce([values])
            float(values[0])  # wait for the device
            seconds.append(time.perf_counter() - begin)
        return 2 * (self.size - 1) / self.size * values.nbytes / statistics.median(seconds[2:])

    def exchange(self, parts: Sequence[Tensor], sizes: Sequence[int]) -> tuple[Tensor, ...]:
        """Send the r-th flat tensor to rank r.

        Returns those received, of which the r-th has `sizes[r]` numbers.
        """
        sent = self.to_host(torch.cat(list(parts)))
        received = sent.new_empty(sum(sizes))
        with self._watched():
            dist.all_to_all_single(received, sent, list(sizes), [part.numel() for part in parts])
        return received.to(parts[0].device).split(list(sizes))

    # Rare exchanges.

    def on_rank0(self, work: Callable[[], Result]) -> Result:
        """Run on rank 0 and give the result to all ranks, which wait for as long as it takes."""
        if self.size == 1:
            return work()
        result_list: list[Any] = [None]
        if self.rank == 0:
            try:
                result_list = [work()]
            except BaseException:
                self._meet([0], "failed")
                raise
        if self._meet([0]) == b"failed":
            raise SystemExit(2)  # rank 0 reports the reason
        with self._watched():
            dist.broadcast_object_list(result_list)
        result: Result = result_list[0]
        return result

    def rank0_first(self, work: Callable[[], Result]) -> Result:
        """Run on rank 0, then on the others, which find what it has cached.

        If one fails, all end.
        """
        results: list[Result] = []
        self.on_rank0(lambda: results.append(work()))
        return self.on_all_ranks(lambda: results[0] if results else work())

    def gather_objects(self, value: Result) -> list[Result]:
        """The values of all ranks, which wait for as long as another rank works."""
        if self.size == 1:
            return [value]
        self._meet(range(self.size))
        gathered: list[Any] = [None] * self.size
        with self._watched():
            dist.all_gather_object(gathered, value)
        return gathered

    def gather_lists(self, values: list[Result]) -> list[Result]:
        return [value for part in self.gather_objects(values) for value in part]

    def on_all_ranks(self, work: Callable[[], Result]) -> Result:
        """Run on all ranks; if it fails on one, all end, and rank 0 reports which."""
        if self.size == 1:
            return work()
        result, error = None, ""
        try:
            result = work()
        except UserError as failure:
            error = str(failure)
        for rank, problem in enumerate(self.gather_objects(error)):
            if problem:
                self.abort(problem if rank == 0 else f"{self.name(rank)}: {problem}")
        return result  # type: ignore[return-value]

    def check_same(self, facts: Mapping[str, Any]) -> None:
        """End all ranks if one of them differs from rank 0, naming the rank and the difference."""
        expected, *others = self.gather_objects(dict(facts))
        for rank, actual in enumerate(others, start=1):
            for name in expected.keys() | actual.keys():
                if actual.get(name) != expected.get(name):
                    self.abort(
                        f"{self.name(rank)}: {name} is {actual.get(name)}, but {expected.get(name)}"
                        " on rank 0; all ranks need the same version, command and data"
                    )

    def check_clocks(self, clocks: Sequence[float]) -> None:
        """End all ranks if the clock of one is far off."""
        for rank, clock in enumerate(clocks):
            if abs(clock - clocks[0]) > MAX_CLOCK_SECONDS:
                self.abort(
                    f"{self.name(rank)}: its clock differs by {clock - clocks[0]:+.0f} s from rank"
                    " 0's; set it"
                )

    def abort(self, reason: str) -> None:
        if self.rank:
            raise SystemExit(2)
        raise UserError(reason)

    @torch.no_grad()
    def broadcast(self, tensors: Sequence[Tensor]) -> None:
        """Copy the values of rank 0 to all ranks, in place."""
        for tensor in tensors if self.size > 1 else ():
            values = self.to_host(tensor)
            with self._watched():
                dist.broadcast(values, 0)
            if values is not tensor:
                tensor.copy_(values)

    def name(self, rank: int) -> str:
        return f"rank {rank} ({self.names[rank]})"

    def _meet(self, ranks: Sequence[int], state: str = "done") -> bytes:
        """Wait until some ranks have called this too, for as long as it takes.

        Returns the state of the first one.
        """
        assert self.store is not None
        self._exchanges += 1
        keys = [f"there/{self._exchanges}/{rank}" for rank in range(self.size)]
        self.store.set(keys[self.rank], state)
        while not self.store.check([keys[rank] for rank in ranks]):
            time.sleep(POLL_SECONDS)
        return bytes(self.store.get(keys[ranks[0]]))

    @contextlib.contextmanager
    def _watched(self) -> Iterator[None]:
        """Name the rank that was lost if an exchange fails."""
        try:
            yield
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise
            raise self.lost(error) from None
        now = time.monotonic()
        if self._last_exchange is not None:
            self._longest_gap = max(self._longest_gap, now - self._last_exchange)
        self._last_exchange = now

    def lost(self, error: Exception) -> Exception:
        """An error that names the lost ranks: those that do not report in time.

        A rank notices the loss at its next exchange, so the others wait for it as long as ranks
        have worked between two exchanges. One rank reports; the others end without a message.
        """
        assert self.store is not None
        report_keys = [f"lost/{rank}" for rank in range(self.size)]
        missing = [rank for rank in range(self.size) if rank != self.rank]
        wait_seconds = min(REPORT_SECONDS + 2 * self._longest_gap, self.timeout)
        deadline = time.monotonic() + wait_seconds
        is_reporter = True
        # The store may have ended too: it runs in rank 0 unless torchrun has started the ranks.
        with contextlib.suppress(RuntimeError):
            self.store.set(report_keys[self.rank], "")
            while len(missing) > 1 and time.monotonic() < deadline:
                time.sleep(POLL_SECONDS)
                missing = [rank for rank in missing if not self.store.check([report_keys[rank]])]
            # The first of the remaining ranks, which is the one with the log if it is rank 0;
            # unless another rank has reported already because this one was late.
            first = min(set(range(self.size)) - set(missing))
            if self.rank == first:
                reporter = self.store.compare_set("lost/reporter", "", str(self.rank))
                is_reporter = reporter == str(self.rank).encode()
            else:
                is_reporter = False
        if not is_reporter:
            return SystemExit(1)  # type: ignore[return-value]
        names = ", ".join(self.name(rank) for rank in missing)
        # gloo says "Timed out waiting ..." or "Application timeout caused pair closure".
        message = str(error).lower()
        timed_out = "timed out" in message or "timeout" in message
        reason = f"did not answer for {self.timeout:g} s" if timed_out else "has ended"
        return RankLost(
            f"{names} {reason}; training continues from the last checkpoint when torchrun"
            " restarts it"
        )


class SentBucket(NamedTuple):
    """Gradients that are being added."""

    work: dist.Work
    sent: Tensor  # the gradients, or their copy in host memory
    gradients: Tensor


class ProcessGroupBuckets:
    """Buckets of gradients, added by gloo or NCCL while the backward pass computes others."""

    def __init__(self, ranks: Ranks, sizes: Sequence[int], like: Tensor) -> None:
        """For buckets with these numbers of gradients."""
        self.ranks = ranks
        self.sizes = sizes
        spare = torch.zeros(max(sizes, default=0), dtype=like.dtype, device=like.device)
        self._spare = ranks.to_host(spare)
        self._sent: list[SentBucket] = []

    def send(self, number: int, gradients: list[Tensor]) -> Tensor:
        """Begin to add a bucket; returns its flat gradients."""
        flat = flatten_dense_tensors(gradients)
        sent = self.ranks.to_host(flat)
        work = dist.all_reduce(sent, async_op=True)
        self._sent.append(SentBucket(work, sent, flat))
        return flat

    def skip(self, number: int) -> None:
        """Take part with any numbers, since nobody uses the result, and without new memory."""
        dist.all_reduce(self._spare[: self.sizes[number]])

    def finish(self) -> None:
        """Wait until the buckets that were sent are sums."""
        for work, sent, gradients in self._sent:
            work.wait()
            if sent is not gradients:
                gradients.copy_(sent)
        self._sent = []


class GradientExchange:
    """Adds the gradients of all ranks in buckets, each as soon as the backward pass has completed its gradients.

    Not DDP, which averages, and exchanges after each backward pass: a step with micro-batches has
    many. All ranks exchange all buckets in the same order. A rank that runs out of memory does so
    too, so that the others, which cannot know it yet, do not wait for it.
    """

    def __init__(self, ranks: Ranks, parameters: Sequence[Tensor]) -> None:
        """For parameters in the order in which the backward pass completes their gradients."""
        self.ranks = ranks
        self.final = False  # whether the present backward pass is the last one of its parameters
        self.buckets: list[list[Tensor]] = [[]]
        limit = BUCKET_VALUES
        if parameters[0].is_cuda:
            limit = max(limit, sum(map(Tensor.numel, parameters)) // CUDA_BUCKETS)
        for p in parameters:
            last = self.buckets[-1]
            if last and sum(map(Tensor.numel, last)) + p.numel() > limit:
                self.buckets.append([])
            self.buckets[-1].append(p)
            p.register_post_accumulate_grad_hook(partial(self._completed, len(self.buckets) - 1))
        self._transport: ProcessGroupBuckets | SharedBuckets | None = None
        self._begin()

    def _begin(self) -> None:
        self._missing = list(map(len, self.buckets))
        self._sent = 0

    def _make_transport(self) -> ProcessGroupBuckets | SharedBuckets:
        """What adds the buckets, made when all ranks begin to."""
        like = self.buckets[0][0]
        sizes = [sum(map(Tensor.numel, bucket)) for bucket in self.buckets]
        host = self.ranks.host_for(like)
        if host is None:
            return ProcessGroupBuckets(self.ranks, sizes, like)
        return SharedBuckets(host, sizes, like.dtype)

    def _completed(self, number: int, parameter: Tensor) -> None:
        if self.final:
            self._missing[number] -= 1
            while self._sent < len(self.buckets) and not self._missing[self._sent]:
                self._send()

    def _send(self) -> None:
        assert self._transport is not None
        bucket = self.buckets[self._sent]
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in bucket]
        with self.ranks._watched():
            flat = self._transport.send(self._sent, gradients)
        parts = unflatten_dense_tensors(flat, gradients)
        for p, part in zip(bucket, parts, strict=True):
            if p.grad is not None:
                p.grad = part  # instead of a second copy
        self._sent += 1

    def before_pass(self, is_last: bool) -> None:
        """Send the gradients of the next backward pass as soon as they are complete, if it is the last one."""
        self.final = is_last

    @contextlib.contextmanager
    def during(self) -> Iterator[None]:
        """Exchange what the backward passes of a step complete."""
        if self._transport is None:
            with self.ranks._watched():
                self._transport = self._make_transport()
        try:
            yield
            while self._sent < len(self.buckets):  # some parameters had no gradient
                self._send()
        except (RuntimeError, MemoryError, MemoryPressure) as error:
            if isinstance(error, MemoryPressure) or is_out_of_memory(error):
                with self.ranks._watched():
                    for number in range(self._sent, len(self.buckets)):
                        self._transport.skip(number)
            raise
        finally:
            self.final = False

    def finish(self) -> None:
        """Wait for the buckets that were sent: the gradients are then those of all ranks."""
        if self._transport is not None:
            with self.ranks._watched():
                self._transport.finish()
        self._begin()


def _pad_rows(rows: Tensor, size: int) -> Tensor:
    if len(rows) == size:
        return rows
    return torch.cat([rows, rows.new_zeros((size - len(rows), *rows.shape[1:]))])


def rows_of_rank(count: int, rank: int, size: int) -> slice:
    """The rows of a rank if `count` are divided as by torch.chunk."""
    rows_per_rank = -(-count // size)
    return slice(min(rank * rows_per_rank, count), min((rank + 1) * rows_per_rank, count))


def launched() -> bool:
    """Whether torchrun (or another launcher with its variables) has started this process."""
    return {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys()


_connected: list[Ranks] = []


def connect(device: str = "auto") -> Ranks:
    """Connect to the other ranks, for this kind of device.

    The connection stays open until this process ends.
    """
    if not _connected:
        _connected.append(_connect(device))
    return _connected[0]


def _connect(device: str) -> Ranks:
    if not launched() or int(os.environ["WORLD_SIZE"]) == 1:
        return Ranks()
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    seconds = float(os.environ.get(TIMEOUT_VARIABLE, RANK_TIMEOUT))
    backend = "gloo"
    if device in ("auto", "cuda") and torch.cuda.is_available():
        local = int(os.environ.get("LOCAL_RANK", "0"))
        if local >= torch.cuda.device_count():
            raise UserError(
                f"rank {rank}: this machine has {torch.cuda.device_count()} GPUs; lower"
                " --nproc-per-node to that number, or use --device cpu"
            )
        torch.cuda.set_device(local)
        backend = "cpu:gloo,cuda:nccl"
    timeout = timedelta(seconds=seconds)
    store, _, _ = next(dist.rendezvous("env://", rank, size, timeout=timeout))
    # torchrun's store outlives its ranks: after a restart it still has the addresses of the
    # previous ones.
    attempt = f"m1clip/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{size}"
    store = dist.PrefixStore(attempt, store)
    dist.init_process_group(backend, store=store, timeout=timeout, rank=rank, world_size=size)
    atexit.register(dist.destroy_process_group)
    names = tuple(
        Ranks(rank, size, store).gather_objects(f"process {os.getpid()} on {socket.gethostname()}")
    )
    ranks = Ranks(rank, size, store, names, seconds, 1)
    ranks.host = _connect_host(ranks)
    # All ranks have arrived, so these are the same moment.
    ranks.check_clocks(ranks.gather_objects(time.time()))
    return ranks


def _connect_host(ranks: Ranks) -> HostRanks | None:
    """Shared memory of the ranks, if all are on one host and may use it."""
    allowed = os.environ.get(SHARED_MEMORY_VARIABLE, "1") != "0" and hasattr(socket, "AF_UNIX")
    hosts = ranks.gather_objects(socket.gethostname() if allowed else "")
    if not all(hosts) or len(set(hosts)) > 1:
        return None
    return connect_host(ranks.rank, ranks.size, ranks.timeout, ranks.gather_objects)
