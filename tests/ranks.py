"""Several ranks without torchrun: processes forked from a server that has imported torch, connected by a file."""

from __future__ import annotations

import os
import tempfile
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from small_run import SERVER, Command

from m1clip.training import distributed
from m1clip.training.distributed import Ranks, connect


def join_ranks(rank: int, size: int, file: Path) -> Ranks:
    """Make this process a rank, as torchrun would."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "-", "MASTER_PORT": "0"}
    distributed.INIT_METHOD = f"file://{file}"
    torch.set_num_threads(1)
    return connect()


def on_ranks(size: int, work: Callable[..., Any], *args: Any, timeout: float = 300) -> list[Any]:
    """`work(ranks, *args)` on each rank; returns the results in order."""
    folder = Path(tempfile.mkdtemp(prefix="ranks-"))
    processes = [SERVER.Process(target=_work, args=(rank, size, folder, work, args)) for rank in range(size)]
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


def _work(rank: int, size: int, folder: Path, work: Callable[..., Any], args: tuple[Any, ...]) -> None:
    try:
        result = work(join_ranks(rank, size, folder / "store"), *args)
    except BaseException:
        (folder / f"error-{rank}").write_text(traceback.format_exc())
        raise
    torch.save(result, folder / f"result-{rank}")


def start_ranks(size: int, *words: str, cwd: Path, prepare: Callable[[int], object] | None = None) -> list[Command]:
    """`m1clip WORDS` on each rank."""
    file = Path(tempfile.mkdtemp(prefix="ranks-")) / "store"
    return [Command(*words, cwd=cwd, prepare=partial(_prepare, rank, size, file, prepare)) for rank in range(size)]


def _prepare(rank: int, size: int, file: Path, prepare: Callable[[int], object] | None) -> None:
    join_ranks(rank, size, file)
    if prepare is not None:
        prepare(rank)
