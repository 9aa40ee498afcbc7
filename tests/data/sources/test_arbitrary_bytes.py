"""Any bytes give samples or one clear error: never a traceback, never a hang."""

from __future__ import annotations

import io
import json
import tarfile
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from source_helpers import add_member, everything, image_bytes

from m1clip.data.sources import open_source
from m1clip.errors import UserError

many = settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def check(name: str, data: bytes) -> None:
    """Open the bytes as a file of that name: every sample is valid, or the error is one line with the file name."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name
        path.write_bytes(data)
        try:
            source = open_source(str(path))
        except UserError as error:
            message = str(error)
            if "\n" in message or name not in message or not message.isprintable():
                raise AssertionError(message) from error
            return
        for sample in everything(source).values():
            assert sample.captions
            assert all(text.strip() and text.encode("utf-8") for text in sample.captions)
            assert str(sample.image).isprintable()
            assert sample.image.stamp()
        for problem in source.problems:
            assert str(problem).isprintable()


headers = st.sampled_from(
    [b"image,caption\n", b"image\tcaption\n", b"\xef\xbb\xbfimage;title;split\n", b"\xff\xfei\0m\0", b""]
)
rows = st.lists(
    st.sampled_from([b"a.jpg", b",", b";", b"\t", b'"', b"\n", b"\r", b"\0", b"\xff", b"../x", b"cat", b"train"]),
    max_size=30,
)


@many
@given(headers, st.one_of(st.binary(max_size=300), rows.map(b"".join)))
def test_csv(header: bytes, body: bytes) -> None:
    check("t.csv", header + body)
    check("t.tsv", header + body)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
odd_row = st.fixed_dictionaries(
    {},
    optional={
        key: json_values | st.text()
        for key in ("image", "caption", "captions", "split", "filename", "sentences", "id", "file_name", "image_id")
    },
)


def dumped(value: object) -> bytes:
    return json.dumps(value).encode()


@many
@given(st.lists(st.one_of(odd_row.map(dumped), st.binary(max_size=40), st.just(b"[" * 3000)), max_size=6))
def test_jsonl(lines: list[bytes]) -> None:
    check("t.jsonl", b"\n".join([b'{"image": "a.jpg", "caption": "x"}', *lines]))
    check("t.jsonl", b"\n".join(lines))


objects = st.lists(odd_row | json_values, max_size=4) | json_values
documents = st.one_of(
    st.lists(odd_row, max_size=4),
    st.fixed_dictionaries({"images": objects, "annotations": objects}),
    st.fixed_dictionaries({"images": objects}),
    json_values,
)
large_documents = st.sampled_from([b"[" * 100_000, b'{"images": ' + b"9" * 9000 + b"}"])


@many
@given(st.one_of(documents.map(dumped), st.binary(max_size=200), large_documents))
def test_json(data: bytes) -> None:
    check("t.json", data)


def good_tar() -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name, data in (("a.jpg", image_bytes()), ("a.txt", b"dog"), ("é" * 80 + ".jpg", b"x"), ("b.json", b"{}")):
            add_member(tar, name, data)
    return stream.getvalue()


def fix_checksum(data: bytearray, block: int) -> None:
    """Fix the checksum of a damaged header, so that the damage is parsed."""
    start = block * 512
    header = data[start : start + 512]
    if len(header) == 512:
        total = sum(header[:148]) + 8 * 32 + sum(header[156:])
        data[start + 148 : start + 156] = b"%06o\0 " % total


damages = st.lists(st.tuples(st.integers(0, 12 * 512), st.integers(0, 255)), max_size=12)


@many
@given(damages, st.integers(0, 9000), st.binary(max_size=600))
def test_tar(damage: list[tuple[int, int]], cut: int, tail: bytes) -> None:
    data = bytearray(good_tar())
    for place, value in damage:
        data[place % len(data)] = value
        fix_checksum(data, place % len(data) // 512)
    check("t.tar", bytes(data[: len(data) - cut]) + tail)
    check("t.tar", tail)


@many
@given(damages, st.integers(0, 100), st.binary(max_size=200))
def test_parquet(damage: list[tuple[int, int]], cut: int, other: bytes) -> None:
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    stream = io.BytesIO()
    parquet.write_table(pa.table({"image": ["a.jpg", "b.jpg"], "caption": [["x"], ["y", None]]}), stream)
    data = bytearray(stream.getvalue())
    for place, value in damage:
        data[place % len(data)] = value
    check("t.parquet", bytes(data[: len(data) - cut]))
    check("t.parquet", other)


@pytest.mark.parametrize("byte", [b"\0", b'"', b",", b"\x80"])
@pytest.mark.parametrize("name", ["t.csv", "t.tsv", "t.jsonl", "t.json", "t.txt", "t.tar", "t.parquet"])
def test_large_random_files(byte: bytes, name: str) -> None:
    if name == "t.parquet":
        pytest.importorskip("pyarrow")
    check(name, byte * 200_000)
