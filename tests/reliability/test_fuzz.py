"""Fuzzing: every reader of untrusted files gets changed files.

Only one-line errors are allowed, and no hangs.
"""

from __future__ import annotations

import math
import random
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest
from fuzz_targets import ALLOWED, NOT_FUZZED, TARGETS, Target

from m1clip.data.sources import FORMATS

SECONDS = 10  # of CPU time: more for one file counts as a hang, also on a busy machine
LONGEST = 1 << 16
MANY = 1_000_000
PARTS = 14
TEXT = r"""{ } [ ] " ' , : = \ \u0000 \ud800 null true false NaN -Infinity 1e999 -1 0 2147483648 18446744073709551616
../ / .. [[ ]] # // http://x 1979-05-27"""
BINARY = (
    b"\n",
    b"\r\n",
    b"\t",
    b"\0",
    b" ",
    b"\xef\xbb\xbf",
    b"\xff\xfe",
    b"\xc3",
    b"\x80",
    b"\xe2\x80\xa8",
)
REPEATED = (
    b"9" * 25,
    b"9" * 5000,
    b"[" * 2000,
    b'{"a":' * 500,
    b'"' * 9,
    b"\xff" * 4,
    b"\0" * 4,
    b"\x7f\xff\xff\xff",
)
TOKENS = (*(token.encode() for token in TEXT.split()), *BINARY, *REPEATED)


def mutate(valid: Sequence[bytes], draw: random.Random) -> bytes:
    """One of the valid files with a few changes; now and then random bytes only."""
    data = bytearray(draw.choice(valid))
    if draw.random() < 0.01:
        return draw.randbytes(draw.randrange(200))
    for _ in range(1 + int(draw.expovariate(0.9))):
        data = change(data, valid, draw)
    return bytes(data[:LONGEST])


def change(data: bytearray, valid: Sequence[bytes], draw: random.Random) -> bytearray:
    kind = draw.randrange(9)
    at = draw.randrange(len(data) + 1)
    if kind == 0 and data:
        data[at % len(data)] ^= 1 << draw.randrange(8)
    elif kind == 1 and data:
        data[at % len(data)] = draw.randrange(256)
    elif kind == 2:
        data[at:at] = draw.choice(TOKENS)
    elif kind == 3:
        token = draw.choice(TOKENS)
        data[at : at + len(token)] = token
    elif kind == 4:
        del data[at : at + 1 + draw.randrange(16)]
    elif kind == 5:
        data[at:at] = data[at : at + 1 + draw.randrange(64)]
    elif kind == 6:
        del data[at:]
    elif kind == 7:
        other = draw.choice(valid)
        data[at:] = other[draw.randrange(len(other) + 1) :]
    else:
        data[at : at + draw.randrange(32)] = bytes(draw.randrange(32))
    return data


class Hang(BaseException):
    """A file that takes too long; not an Exception, so that no reader catches it."""


def on_alarm(*_: object) -> None:
    raise Hang


def fuzz(target: Target, folder: Path, count: int, seed: str) -> list[tuple[str, bytes]]:
    """Pass changed files to a reader; returns the first failures and their files."""
    draw = random.Random(seed)
    failures: list[tuple[str, bytes]] = []
    before = signal.signal(signal.SIGPROF, on_alarm)
    try:
        for _ in range(count):
            data = mutate(target.seeds, draw)
            (folder / target.file).write_bytes(data)
            signal.setitimer(signal.ITIMER_PROF, SECONDS)
            try:
                target.read(folder)
            except ALLOWED as error:
                if "\n" in str(error):
                    failures.append((f"more than one line: {error!r}", data))
            except KeyboardInterrupt:
                raise
            except BaseException as error:  # noqa: BLE001  a panic in Rust is not an Exception
                failures.append((f"{type(error).__name__}: {str(error)[:200]}", data))
            finally:
                signal.setitimer(signal.ITIMER_PROF, 0)
            if len(failures) >= 5:
                break
    finally:
        signal.signal(signal.SIGPROF, before)
        (folder / target.file).write_bytes(target.seeds[0])
    return failures


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz")


@pytest.fixture(scope="module")
def readers(folder: Path) -> dict[str, Target]:
    return {name: make(folder) for name, make in TARGETS.items()}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", TARGETS)
def test_mutated_files_give_one_line_errors(
    name: str, folder: Path, readers: dict[str, Target]
) -> None:
    target = readers[name]
    for valid in target.seeds:  # or only the first check of each reader would be tested
        (folder / target.file).write_bytes(valid)
        target.read(folder)
    assert fuzz(target, folder, max(2, int(250 * min(1, target.fraction))), seed=name) == []


def test_every_data_format_is_fuzzed_or_exempt_for_a_reason() -> None:
    assert set(FORMATS) <= TARGETS.keys() | NOT_FUZZED.keys()
    assert not TARGETS.keys() & NOT_FUZZED.keys()


def test_fuzzer_reports_failures(folder: Path) -> None:
    target = Target("x", (b"abc" * 20,), lambda path: (path / "x").read_bytes().decode("ascii"))
    failures = fuzz(target, folder, 300, seed="0")
    assert "UnicodeDecodeError" in failures[0][0]


@pytest.mark.long("Fuzzing")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("part", range(PARTS))
def test_million_mutated_files(
    part: int, folder: Path, readers: dict[str, Target], counts: dict[str, float]
) -> None:
    fractions = sum(target.fraction for target in readers.values())
    total = 0
    for name, target in readers.items():
        count = math.ceil(MANY / PARTS * target.fraction / fractions)
        assert fuzz(target, folder, count, seed=f"{name} {part}") == []
        total += count
    counts[f"changed files for {len(readers)} readers"] = total
