"""Ranks of one host exchange through shared memory what gloo would give them."""

import os
import signal
import socket
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import on_ranks
from torch import Tensor

from m1clip.training import distributed, host_ranks
from m1clip.training.distributed import GradientExchange, RankLost, Ranks
from m1clip.training.host_ranks import HostRanks, connect_host

SIZES = (1, 63, 64, 1000, 5, 40_000)  # smaller and larger than before: the memory grows


def pair(timeout: float = 10.0) -> tuple[HostRanks, HostRanks]:
    """Two ranks in this process."""
    first, second = socket.socketpair()
    return HostRanks(0, {1: first}, timeout), HostRanks(1, {0: second}, timeout)


def values_of(rank: int, size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + size)
    return torch.randint(-50, 50, (size,), generator=generator).to(dtype)  # sums are exact


def all_exchanges(ranks: Ranks) -> list[Tensor]:
    results = []
    for size in SIZES:
        for dtype in (torch.float32, torch.float64, torch.int64, torch.bfloat16):
            own = values_of(ranks.rank, size, dtype)
            results.append(ranks.gather(own.view(-1, 1)))
            ranks.all_reduce([own])
            results.append(own)
        rows = [values_of(10 * ranks.rank, 2 * size).view(size, 2) for _ in range(2)]
        parts = [[size - size // 2, size // 2, 0][: ranks.size]] * 2
        sizes = [list(row) for row in zip(*parts, strict=True)]
        rows = [part[: sum(parts[0])] for part in rows]
        results += ranks.reduce_scatter(rows, sizes)
    return results


def both_transports(ranks: Ranks) -> tuple[list[Tensor], list[Tensor]]:
    shared = all_exchanges(ranks)
    host = ranks.host
    assert isinstance(host, HostRanks)
    ranks.host = None
    return shared, all_exchanges(ranks)


@pytest.mark.parametrize("size", [2, 3])
def test_shared_memory_gives_the_same_as_gloo(size: int) -> None:
    for shared, by_gloo in on_ranks(size, both_transports):
        for actual, expected in zip(shared, by_gloo, strict=True):
            assert actual.dtype == expected.dtype
            assert torch.equal(actual, expected)


def two_exchanges(ranks: Ranks) -> list[list[Tensor]]:
    """Gradients of two models that train in turn; the second has a parameter without gradient."""
    distributed.BUCKET_VALUES = 100
    models = []
    for seed in range(2):
        parameters = [values_of(seed, n).requires_grad_() for n in (90, 30, 301, 7)]
        models.append((parameters, GradientExchange(ranks, parameters[::-1])))
    sums = []
    for step in range(3):
        for seed, (parameters, exchange) in enumerate(models):
            trained = parameters if seed == 0 else parameters[1:]
            with exchange.during():
                exchange.before_pass(True)
                if ranks.rank == step % ranks.size:
                    time.sleep(0.02)  # another rank is first each time
                loss = sum((p * values_of(100 * step + ranks.rank, len(p))).sum() for p in trained)
                loss.backward()
            exchange.finish()
            for p in trained:
                assert p.grad is not None
                p.grad *= 2  # as clipping does: in place, at once
            sums.append([p.grad.clone() for p in trained if p.grad is not None])
            for p in parameters:
                p.grad = None
    return sums


def test_gradients_are_summed_in_every_step_whichever_rank_is_first() -> None:
    size = 3
    results = on_ranks(size, two_exchanges)
    steps = [(step, seed) for step in range(3) for seed in range(2)]
    for sums in results:
        for (step, seed), gradients in zip(steps, sums, strict=True):
            numbers = (90, 30, 301, 7)[seed:]
            for n, gradient in zip(numbers, gradients, strict=True):
                expected = 2 * sum(values_of(100 * step + rank, n) for rank in range(size))
                assert torch.equal(gradient, expected)


def test_rank_that_ended_is_noticed_at_once() -> None:
    first, second = pair()  # whose timeout would be another error
    second.post(host_ranks.TOGETHER)
    for peer in second._peers.values():
        peer.close()
    first.wait(host_ranks.TOGETHER, 1)  # it arrived before it ended
    with pytest.raises(RuntimeError, match="connection closed by rank 1"):
        first.wait(host_ranks.TOGETHER, 2)


def test_rank_that_hangs_is_noticed_after_the_timeout() -> None:
    first, _second = pair(timeout=0.05)
    with pytest.raises(RuntimeError, match="timed out waiting for rank 1"):
        first.meet()


def test_events_of_different_kinds_do_not_replace_each_other() -> None:
    first, second = pair()
    second.post(host_ranks.SENT)
    second.post(host_ranks.SENT)
    assert first.arrived(host_ranks.SENT, 2)
    assert not first.arrived(host_ranks.REDUCED, 1)
    second.post(host_ranks.REDUCED)
    assert first.arrived(host_ranks.REDUCED, 1)


def growing(ranks: Ranks) -> list[int]:
    """Bytes of this rank after exchanges of some sizes."""
    used = []
    for count in (1000, 1000, 10, 5000, 5000, 5000):
        ranks.gather(torch.ones(count, dtype=torch.uint8))
        used.append(ranks.shared_bytes)
    return used


def test_memory_that_was_replaced_is_not_counted() -> None:
    assert on_ranks(2, growing) == [[2000, 4000, 4000, 12_000, 20_000, 20_000]] * 2


def killed(ranks: Ranks, folder: Path) -> Any:
    """Rank 1 is killed; the others report it, and no name of shared memory is left."""
    real, made = tempfile.mkdtemp, list[Path]()

    def make(**options: Any) -> str:
        made.append(Path(real(**options)))
        return str(made[-1])

    tempfile.mkdtemp = make  # type: ignore[assignment]
    ranks.host = distributed._connect_host(ranks)
    ranks.gather(torch.ones(1 << 20))
    shared = Path("/dev/shm")
    names = [file.name for file in shared.iterdir()] if shared.is_dir() else []
    assert not any(name.startswith(host_ranks.PREFIX) for name in names)
    # Not all of the folder for temporary files: other tests connect ranks at the same time.
    assert [file.exists() for file in made] == [False]
    ranks.gather(torch.ones(1))
    if ranks.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        ranks.gather(torch.ones(1))
    except RankLost as error:
        (folder / "reported").write_text(str(error))
    except SystemExit:
        pass
    (folder / f"ended-{ranks.rank}").touch()


def test_killed_rank_is_named_and_leaves_no_memory(tmp_path: Path) -> None:
    with pytest.raises(AssertionError):  # rank 1 has ended with SIGKILL
        on_ranks(3, killed, tmp_path)
    assert (tmp_path / "reported").read_text().startswith("rank 1 (process ")
    assert {file.name for file in tmp_path.glob("ended-*")} == {"ended-0", "ended-2"}


def gloo_only(ranks: Ranks) -> bool:
    """Whether ranks use gloo if one of them cannot create a socket."""
    real = socket.socket.bind

    def fail(self: socket.socket, address: Any) -> None:
        if ranks.rank == 1:
            raise OSError("no space")
        real(self, address)

    socket.socket.bind = fail  # type: ignore[method-assign,assignment]
    try:
        return connect_host(ranks.rank, ranks.size, 10.0, ranks.gather_objects) is None
    finally:
        socket.socket.bind = real  # type: ignore[method-assign]


def test_all_ranks_use_gloo_if_one_cannot_share_memory() -> None:
    assert on_ranks(2, gloo_only) == [True, True]


def turned_off(ranks: Ranks) -> tuple[bool, bool]:
    """Whether shared memory is used with and without the variable."""
    os.environ[distributed.SHARED_MEMORY_VARIABLE] = "0"
    without = distributed._connect_host(ranks)
    return ranks.host is not None, without is not None


def test_variable_turns_shared_memory_off() -> None:
    assert on_ranks(2, turned_off) == [(True, False)] * 2
