"""Changed bytes: a fast seeded mutator that knows a little of JSON, TOML and tables."""

from __future__ import annotations

import random
from collections.abc import Sequence

TOKENS = (
    b"{", b"}", b"[", b"]", b'"', b"'", b",", b":", b"=", b"\n", b"\r\n", b"\t", b"\0", b" ", b"\\", b"\\u0000",
    b"\\ud800", b"null", b"true", b"false", b"NaN", b"-Infinity", b"1e999", b"-1", b"0", b"9" * 25, b"9" * 5000,
    b"2147483648", b"18446744073709551616", b"../", b"/", b"..", b"\xef\xbb\xbf", b"\xff\xfe", b"\xff", b"\xc3",
    b"[" * 2000, b'{"a":' * 500, b'"' * 9, b"[[", b"]]", b"#", b"//", b"http://x", b"\xe2\x80\xa8", b"1979-05-27",
    b"\x7f\xff\xff\xff", b"\x80", b"\xff\xff\xff\xff", b"\0\0\0\0",
)  # fmt: skip
LONGEST = 1 << 16


def mutate(seeds: Sequence[bytes], draw: random.Random) -> bytes:
    """One of the seeds with one to five changes; now and then a splice of two, or chance alone."""
    data = bytearray(draw.choice(seeds))
    if draw.random() < 0.01:
        return draw.randbytes(draw.randrange(200))
    for _ in range(1 + int(draw.expovariate(0.9))):
        data = _change(data, seeds, draw)
    return bytes(data[:LONGEST])


def _change(data: bytearray, seeds: Sequence[bytes], draw: random.Random) -> bytearray:
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
        del data[at:]  # cut short
    elif kind == 7:
        other = draw.choice(seeds)
        data[at:] = other[draw.randrange(len(other) + 1) :]
    else:
        data[at : at + draw.randrange(32)] = bytes(draw.randrange(32))
    return data
