"""Lint: captions, labels, mixtures, the quick form and the report."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from lint_helpers import counts, good, make, of, photo, saved

from m1clip.data.lint import lint
from m1clip.data.sources import open_source, open_sources
from m1clip.data.sources.mixture import MixedSource

FLICKR8K = Path(__file__).parents[3] / "../shared/data/flickr8k-112"


def test_captions(tmp_path: Path) -> None:
    rows = [(f"p{n}.jpg", f"a long enough sentence number {n}", "val" if n > 10 else "train") for n in range(12)]
    rows += [("p0.jpg", "A long enough sentence number 0.", "train"), ("p1.jpg", "a dog", "train")]
    rows += [("p2.jpg", "IMG_2041.jpg", "train"), ("p3.jpg", "", "train"), ("p4.jpg", " ".join(["word"] * 20), "train")]
    rows += [("p11.jpg", "a long enough sentence number 5", "val")]
    source = open_source(str(make(tmp_path, good(12), rows)))
    report = lint(source, context_length=12)
    assert counts(report) == {
        **{"skipped-empty-caption": 1, "file-name": 1, "duplicate-caption": 1, "overlong": 1, "short": 2},
        **{"shared-caption": 1, "shared-between-splits": 1},
    }
    assert of(report, "skipped-empty-caption")[0].startswith("captions.jsonl row 16")
    assert of(report, "duplicate-caption")[0].startswith("captions.jsonl row 13")
    message = next(found.message for found in report.findings if found.code == "overlong")
    assert message == "captions over 10 tokens (10 tokens are cut off)"
    assert report.facts["captions_per_image"] == {"min": 1, "median": 1, "max": 2}
    assert report.facts["images_per_caption"]["max"] == 2


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
    assert isinstance(source, MixedSource)
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
    report = lint(open_source(str(FLICKR8K)), image_size=112)
    # Captions and bytes were counted from the CSV and the files by another script, the looks by eye.
    assert counts(report) == {
        **{"leak-near": 4, "duplicate-near": 2, "duplicate-identical": 1, "duplicate-caption": 19},
        **{"short": 12, "shared-caption": 221, "shared-between-splits": 94},
    }
    assert "2851198725_37b6027625.jpg" in of(report, "duplicate-identical")[0]
    assert report.facts["captions_per_image"] == {"min": 5, "median": 5, "max": 5}
