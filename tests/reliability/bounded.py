"""Run a function on a hostile file in a separate process with limited memory and time."""

from __future__ import annotations

import multiprocessing
import resource
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from m1clip.data.images import BadImage
from m1clip.errors import UserError

FORK = multiprocessing.get_context("fork")
MIB = 2**20
# Beyond what the process has when it begins; an allowed image of 64 megapixels takes 192 MiB.
ROOM = 400 * MIB
SECONDS = 120  # only a test that fails takes so long


def bounded(function: Callable[[], Any], room: int = ROOM, seconds: int = SECONDS) -> str:
    """How the function ended: "ok", "UserError: ...", or the name of what broke.

    Memory and time are limited.
    """
    own_end, there = FORK.Pipe(duplex=False)
    process = FORK.Process(target=_run, args=(function, there, room, seconds))
    process.start()
    there.close()
    try:
        outcome = str(own_end.recv()) if own_end.poll(seconds + 10) else "hangs"
    except EOFError:
        outcome = "crashed"
    process.join(5)
    if process.is_alive():
        process.kill()
        process.join()
    return outcome


def _run(function: Callable[[], Any], answer: Any, room: int, seconds: int) -> None:
    pages = (
        int(Path("/proc/self/statm").read_text().split()[0])
        if Path("/proc/self/statm").exists()
        else 0
    )
    if pages:
        limit = pages * resource.getpagesize() + room
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    signal.signal(signal.SIGALRM, lambda *_: (_ for _ in ()).throw(TimeoutError("too slow")))
    signal.alarm(seconds)
    try:
        function()
        answer.send("ok")
    except (UserError, BadImage) as error:
        answer.send(f"UserError: {error}")
    except BaseException as error:  # noqa: BLE001  the test reports it
        answer.send(f"{type(error).__name__}: {error}")


class Bomb:
    """Creates a file when unpickled, which proves that code was run."""

    def __init__(self, proof: Path) -> None:
        self.proof = proof

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.proof,)


def files_under(folder: Path) -> set[str]:
    """All paths under a folder, to detect new files."""
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}
