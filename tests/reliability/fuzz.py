"""Feed every reader with changed files, as many as asked for: nothing but our own one-line errors, and no hang.

    .venv/bin/python tests/reliability/fuzz.py --count 100000 --seed 7

A failure is printed with the input that made it. The counts of docs/reliability.md come from test_fuzz.py.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import signal
import sys
import tempfile
import time
import warnings
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent)]

from fuzz_mutate import mutate  # noqa: E402
from fuzz_targets import ALLOWED, Target, targets  # noqa: E402

SECONDS = 10  # longer for one input is a hang


class Hang(BaseException):
    """An input that takes too long; not an Exception, so that nobody in between catches it."""


def fuzz(name: str, target: Target, folder: Path, count: int, seed: int) -> list[tuple[str, bytes]]:
    """So many changed inputs for one reader; gives (what went wrong, the input) of the first few failures."""
    draw = random.Random(f"{name}{seed}")
    path = folder / target.file
    failures: list[tuple[str, bytes]] = []

    def rang(*_: object) -> None:
        raise Hang

    before = signal.signal(signal.SIGALRM, rang)
    try:
        for _ in range(count):
            data = mutate(target.seeds, draw)
            handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
            os.write(handle, data)
            os.close(handle)
            signal.alarm(SECONDS)
            try:
                target.read(folder)
            except ALLOWED as error:
                if "\n" in str(error):
                    failures.append((f"{name}: more than one line: {error!r}", data))
            except KeyboardInterrupt:
                raise
            except BaseException as error:  # noqa: BLE001  that is what is looked for; a panic of Rust is no Exception
                failures.append((f"{name}: {type(error).__name__}: {str(error)[:200]}", data))
            finally:
                signal.alarm(0)
            if len(failures) >= 5:
                break
    finally:
        signal.signal(signal.SIGALRM, before)
        path.write_bytes(target.seeds[0])
    return failures


def fuzz_all(count: int, seed: int, only: str | None = None) -> tuple[dict[str, int], list[tuple[str, bytes]]]:
    """The inputs shared out over all readers; gives how many each had, and the failures."""
    warnings.simplefilter("ignore")
    done: dict[str, int] = {}
    failures: list[tuple[str, bytes]] = []
    with tempfile.TemporaryDirectory(prefix="m1clip-fuzz-", dir=_fast_place()) as place:
        found = {name: t for name, t in targets(Path(place)).items() if only in (None, name)}
        whole = sum(target.share for target in found.values())
        for name, target in found.items():
            done[name] = math.ceil(count * target.share / whole)
            failures += fuzz(name, target, Path(place), done[name], seed)
    return done, failures


def _fast_place() -> str | None:
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def main() -> None:
    """Parse the words, fuzz, tell."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--count", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--target", help="one reader alone")
    words = parser.parse_args()
    begin = time.monotonic()
    done, failures = fuzz_all(words.count, words.seed, words.target)
    for what, data in failures:
        print(f"FAILED {what}\n       {data[:300]!r}")
    total = sum(done.values())
    print(f"{total:,} inputs in {time.monotonic() - begin:.0f} s, {len(failures)} failures: {done}")
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
