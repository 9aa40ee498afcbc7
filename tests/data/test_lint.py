"""Each fault of an image or caption is found and named by file and row, and nothing else is reported."""

from __future__ import annotations

import json
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from lint_helpers import counts, good, make, of, photo, saved
from PIL import Image, ImageEnhance

from m1clip.data.lint import lint
from m1clip.data.sources import open_source, open_sources

FLICKR8K = Path(__file__).parents[2] / "../shared/data/flickr8k-112"


def bomb() -> bytes:
    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", struct.pack(">IIBBBBB", 50_000, 50_000, 8, 2, 0, 0, 0))
        + chunk(b"IEND", b"")
    )


def test_a_clean_set_is_ok(tmp_path: Path) -> None:
    report = lint(open_source(str(make(tmp_path, good(12)))))
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


def test_any_mode_is_fine_but_blank_images_and_strips_are_not(tmp_path: Path) -> None:
    files = {
        "cmyk.jpg": saved(photo(30).convert("CMYK")),
        "deep.png": saved(Image.fromarray(np.arange(4096, dtype=np.uint16).reshape(64, 64) * 16), "PNG"),
        "alpha.png": saved(photo(33).convert("RGBA"), "PNG"),
        "palette.png": saved(photo(34).quantize(32), "PNG"),
        "flat.jpg": saved(Image.new("RGB", (64, 64), (9, 9, 9))),
        "strip.jpg": saved(photo(37, (400, 20))),
        "last.jpg": saved(photo(38)),
    }
    report = lint(open_source(str(make(tmp_path, files))))
    assert counts(report) == {"near-empty": 1, "extreme-size": 1}
    assert "strip.jpg (captions.jsonl row 6): 400 x 20" in of(report, "extreme-size")[0]
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


def test_captions(tmp_path: Path) -> None:
    rows = [(f"p{n}.jpg", f"a long enough sentence number {n}", "val" if n > 10 else "train") for n in range(12)]
    rows += [("p0.jpg", "A long enough sentence number 0.", "train"), ("p1.jpg", "a dog", "train")]
    rows += [("p2.jpg", "IMG_2041.jpg", "train"), ("p3.jpg", "", "train"), ("p4.jpg", " ".join(["word"] * 20), "train")]
    rows += [("p11.jpg", "a long enough sentence number 5", "val")]
    report = lint(open_source(str(make(tmp_path, good(12), rows))), context_length=12)
    assert counts(report) == {
        **{"skipped-empty-caption": 1, "file-name": 1, "duplicate-caption": 1, "overlong": 1, "shared-caption": 1}
    }
    assert of(report, "skipped-empty-caption")[0].startswith("captions.jsonl row 16")
    assert of(report, "duplicate-caption")[0].startswith("captions.jsonl row 13")
    message = next(found.message for found in report.findings if found.code == "overlong")
    assert message == "captions over 10 tokens (10 tokens are cut off)"
    assert report.facts["captions_per_image"] == {"min": 1, "median": 1, "max": 2}


def test_labels_are_recognized(tmp_path: Path) -> None:
    rows = [(f"p{n}.jpg", ("cat", "dog")[n % 2], "val" if n > 10 else "train") for n in range(12)]
    report = lint(open_source(str(make(tmp_path, good(12), rows))))
    assert counts(report)["labels"] == 12
    assert report.verdict == "warnings"


def test_class_folders_are_classification(tmp_path: Path) -> None:
    for n in range(12):
        folder = tmp_path / ("cat", "dog")[n % 2]
        folder.mkdir(exist_ok=True)
        (folder / f"{n}.jpg").write_bytes(saved(photo(n)))
    report = lint(open_source(str(tmp_path)))
    assert counts(report) == {"labels": 12}
    assert report.verdict == "ok"


def test_a_repeated_part_of_a_mixture_is_not_a_duplicate(tmp_path: Path) -> None:
    one, two = make(tmp_path / "one", good(6)), make(tmp_path / "two", good(6, 20))
    source = open_sources([f"{one}:3", str(two)])
    report = lint(source)
    assert report.images == {"train": 10, "val": 2}
    assert report.findings == ()


def test_missing_splits(tmp_path: Path) -> None:
    rows = [(f"p{n}.jpg", f"a sentence with number {n}", "test") for n in range(5)]
    assert counts(lint(open_source(str(make(tmp_path, good(5), rows))))) == {"no-train": 1, "no-val": 1}


def test_a_sample_of_the_images_is_checked(tmp_path: Path) -> None:
    source = open_source(str(make(tmp_path, {**good(40), "x.jpg": b"", "last.jpg": saved(photo(60))})))
    report = lint(source, 8)
    assert (report.checked, report.captions) == (8, 42)
    assert counts(lint(source, 1000)) == {"empty": 1}


def test_json_and_progress(tmp_path: Path) -> None:
    calls: list[tuple[int, int]] = []
    files = {**good(40), "bad\nname\x1b.jpg": b"x", "last.jpg": saved(photo(60))}
    report = lint(
        open_source(str(make(tmp_path, files))), workers=3, progress=lambda done, total: calls.append((done, total))
    )
    assert calls[-1] == (42, 42)
    loaded = json.loads(report.to_json())
    assert loaded["verdict"] == "problems"
    assert loaded["findings"][0]["count"] == 1
    assert all(line.isprintable() for line in report.to_text().split("\n"))


def test_the_text_shows_a_few_examples_and_counts_the_rest(tmp_path: Path) -> None:
    files = {**good(100), **{f"bad{n}.jpg": b"" for n in range(9)}, "z.jpg": saved(photo(500))}
    text = lint(open_source(str(make(tmp_path, files)))).to_text()
    assert "problem  empty image files (0 bytes), skipped: 9" in text
    assert "... and 6 more" in text
    assert text.count("bad") == 3


def test_flickr8k_as_checked_by_hand() -> None:
    if not FLICKR8K.is_dir():
        pytest.skip("shared/data/flickr8k-112 is not here")
    report = lint(open_source(str(FLICKR8K)))
    # Captions and bytes were counted from the CSV and the files by another script, the looks by eye.
    assert counts(report) == {
        **{"leak-near": 4, "duplicate-near": 2, "duplicate-identical": 1, "duplicate-caption": 19},
        "shared-caption": 221,
    }
    assert "2851198725_37b6027625.jpg" in of(report, "duplicate-identical")[0]
    assert report.facts["captions_per_image"] == {"min": 5, "median": 5, "max": 5}
