"""Lint: each fault of an image is found and named by file and row, and nothing else is reported."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from lint_helpers import counts, good, make, of, photo, saved
from PIL import Image, ImageEnhance

from m1clip.data.lint import images as lint_images
from m1clip.data.lint import lint
from m1clip.data.sources import open_source


def bomb() -> bytes:
    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", struct.pack(">IIBBBBB", 50_000, 50_000, 8, 2, 0, 0, 0))
        + chunk(b"IEND", b"")
    )


def test_a_clean_set_is_ok(tmp_path: Path) -> None:
    report = lint(open_source(str(make(tmp_path, good(12)))), image_size=64)
    assert (report.findings, report.verdict, report.advice()) == ((), "ok", [])
    assert report.to_text().endswith("verdict: ok")


def test_faults_are_named_with_file_and_row(tmp_path: Path) -> None:
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64, 3), np.uint8))
    bad = {
        "missing.jpg": b"x",
        "empty.jpg": b"",
        "truncated.jpg": saved(noise)[:1500],
        "text.jpg": b"hello, I am not an image",
        "bomb.png": bomb(),
    }
    source = open_source(str(make(tmp_path, {**good(60), **bad, "last.jpg": saved(photo(99))})))
    (tmp_path / "images/missing.jpg").unlink()
    report = lint(source)
    expected = {
        "missing": "missing",
        "empty": "empty",
        "truncated": "truncated",
        "not-an-image": "text",
        "too-large": "bomb",
    }
    assert counts(report) == dict.fromkeys(expected, 1)
    for row, (code, name) in enumerate(expected.items(), start=61):
        assert name in of(report, code)[0]
        assert f"captions.jsonl row {row}" in of(report, code)[0]
    assert report.verdict == "problems"


def test_too_many_bad_images_come_first(tmp_path: Path) -> None:
    report = lint(
        open_source(str(make(tmp_path, {**good(8), "a.jpg": b"x", "b.jpg": b"y", "z.jpg": saved(photo(50))})))
    )
    assert report.findings[0].code == "too-many-bad"
    assert "10%" in report.findings[0].message


def test_conversions_are_counted(tmp_path: Path) -> None:
    grey16 = Image.fromarray(np.arange(4096, dtype=np.uint16).reshape(64, 64) * 16)
    frames = [photo(n).convert("P") for n in (31, 32)]
    files = {
        "cmyk.jpg": saved(photo(30).convert("CMYK")),
        "deep.png": saved(grey16, "PNG"),
        "alpha.png": saved(photo(33).convert("RGBA"), "PNG"),
        "palette.png": saved(photo(34).quantize(32), "PNG"),
        "moving.gif": saved(frames[0], "GIF", save_all=True, append_images=frames[1:]),
        "grey.jpg": saved(photo(35).convert("L")),
        "named.png": saved(photo(36)),
        "flat.jpg": saved(Image.new("RGB", (64, 64), (9, 9, 9))),
        "strip.jpg": saved(photo(37, (400, 20))),
        "last.jpg": saved(photo(38)),
    }
    report = lint(open_source(str(make(tmp_path, files))), image_size=50)
    assert counts(report) == {**{"converted": 6, "wrong-suffix": 1, "near-empty": 1, "extreme-size": 1, "small": 1}}
    assert [text.split()[-1] for text in of(report, "converted")] == ["CMYK", "I;16", "RGBA", "P", "P", "L"]
    assert "named.png" in of(report, "wrong-suffix")[0]
    assert "JPEG" in of(report, "wrong-suffix")[0]
    assert report.verdict == "warnings"


def test_copies_and_leakage(tmp_path: Path) -> None:
    files = good(10)
    files["copy.jpg"] = files["p0.jpg"]
    files["smaller.jpg"] = saved(photo(1).resize((60, 40)), quality=60)
    files["brighter.png"] = saved(ImageEnhance.Brightness(photo(2)).enhance(1.2), "PNG")
    files["leak.jpg"] = files["p3.jpg"]
    held_out = {"smaller.jpg", "leak.jpg", "p9.jpg"}
    rows = [(n, f"words about {n[:-4]} here", "val" if n in held_out else "train") for n in files]
    report = lint(open_source(str(make(tmp_path, files, rows))))
    assert counts(report) == {"leak-identical": 1, "leak-near": 1, "duplicate-identical": 1, "duplicate-near": 1}
    for code, names in {
        "leak-identical": ("p3.jpg", "leak.jpg"),
        "leak-near": ("p1.jpg", "smaller.jpg"),
        "duplicate-identical": ("p0.jpg", "copy.jpg"),
        "duplicate-near": ("p2.jpg", "brighter.png"),
    }.items():
        assert all(name in of(report, code)[0] for name in names)
    assert report.verdict == "problems"


def test_large_sets_find_copies_by_buckets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lint_images, "MAX_ALL_PAIRS", 2)
    files = {**good(12), "copy.jpg": saved(photo(4), quality=40), "last.jpg": saved(photo(77))}
    assert counts(lint(open_source(str(make(tmp_path, files))))) == {"duplicate-near": 1}
