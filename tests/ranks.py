"""Several ranks without torchrun: processes forked from a server that has imported torch.

This one has their store.
"""

import json
import os
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from small_run import SERVER, TIMEOUT, Command, before_each_step, hold_at
from torch.distributed import TCPStore
from torch.distributed.distributed_c10d import _get_default_group, _set_pg_timeout

from m1clip.data.loader import Batch
from m1clip.training.compose import TrainStep
from m1clip.training.distributed import TIMEOUT_VARIABLE, Ranks, connect

# A step, before which ranks wait until the file exists; beside it they list their samples.
Gate = tuple[int, Path]
SHORT_TIMEOUT = 1  # seconds to wait for a rank that hangs


def join_ranks(
    rank: int,
    size: int,
    port: int,
    timeout: float = 600,
    gate: Gate | None = None,
    hangs_at: int | None = None,
) -> Ranks:
    """Make this process a rank, as torchrun does."""
    if gate is not None:
        _wait_at(*gate)
    if hangs_at is not None:
        _hang_at(hangs_at)
    place(rank, size, port, timeout)
    torch.set_num_threads(1)
    return connect()


def place(rank: int, size: int, port: int, timeout: float = 600) -> None:
    """Set the variables that torchrun sets."""
    ranks = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, TIMEOUT_VARIABLE: timeout}
    store = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": True}
    os.environ |= {name: str(value) for name, value in (ranks | store).items()}


def _wait_at(gate: int, file: Path) -> None:
    hold_at(gate, file)

    def list_samples(train_step: TrainStep, batch: Batch, step: int) -> None:
        with file.with_name(f"{file.name}-seen-{train_step.parts.world.ranks.rank}").open(
            "a"
        ) as sampled:
            sampled.write(f"{json.dumps([step, batch.sample_ids.tolist()])}\n")

    before_each_step(list_samples)


def _hang_at(gate: int) -> None:
    """Before a step, rank 1 hangs, and the others stop waiting for it soon.

    Until then a rank may be as late as it likes: the machine may be busy.
    """

    def hang(train_step: TrainStep, batch: Batch, step: int) -> None:
        ranks = train_step.parts.world.ranks
        if step != gate:
            return
        if ranks.rank == 1:
            threading.Event().wait()
        gloo = _get_default_group()._get_backend(torch.device("cpu"))
        assert gloo.options._timeout == timedelta(seconds=ranks.timeout)
        ranks.timeout = SHORT_TIMEOUT
        if ranks.host is not None:
            ranks.host.timeout = SHORT_TIMEOUT
        _set_pg_timeout(timedelta(seconds=SHORT_TIMEOUT))

    before_each_step(hang)


def new_store() -> TCPStore:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def on_ranks(
    size: int, work: Callable[..., Any], *args: Any, timeout: float = TIMEOUT
) -> list[Any]:
    """`work(ranks, *args)` on each rank; returns the results in order."""
    folder, store = Path(tempfile.mkdtemp(prefix="ranks-")), new_store()
    port = store.port
    processes = [
        SERVER.Process(target=_work, args=(rank, size, port, folder, work, args))
        for rank in range(size)
    ]
    for process in processes:
        process.start()
    deadline = time.monotonic() + timeout
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
    for process in processes:
        process.kill()
    errors = [file.read_text() for file in sorted(folder.glob("error-*"))]
    assert not errors, errors[0]
    assert [process.exitcode for process in processes] == [0] * size
    return [torch.load(folder / f"result-{rank}", weights_only=False) for rank in range(size)]


def _work(
    rank: int, size: int, port: int, folder: Path, work: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    try:
        result = work(join_ranks(rank, size, port), *args)
    except BaseException:
        (folder / f"error-{rank}").write_text(traceback.format_exc())
        raise
    torch.save(result, folder / f"result-{rank}")


def start_ranks(
    commands: list[list[str]],
    *cwd: Path,
    timeout: float = 600,
    gate: Gate | None = None,
    hangs_at: int | None = None,
) -> list[Command]:
    """`m1clip WORDS` on each rank.

    Rank r runs the r-th command, in the r-th folder or all in the same.
    """
    STORES.append(new_store())
    arguments = (len(commands), STORES[-1].port, timeout, gate, hangs_at)
    folders = cwd * len(commands)
    started = zip(commands, folders, range(len(commands)), strict=False)
    return [
        Command(*words, cwd=at, prepare=partial(join_ranks, rank, *arguments))
        for words, at, rank in started
    ]


STORES: list[TCPStore] = []  # needed for as long as their ranks run


if __name__ == "__main__":  # started by torchrun
    from m1clip.cli.main import main

    _wait_at(int(os.environ["GATE_STEP"]), Path(os.environ["GATE_FILE"]))
    main()
