"""Dataset checks: each fault is reported with file and row, and nothing else is."""

import json
from pathlib import Path

import numpy as np
import pytest
from image_sets import encoded, image
from PIL import Image, ImageEnhance
from small_run import exit_code

from m1clip import console
from m1clip.data import lint as lint_module
from m1clip.data.images import MAX_PIXELS
from m1clip.data.lint import EXAMPLES_IN_JSON, EXAMPLES_SHOWN, LintReport, lint
from m1clip.data.sources import open_source
from m1clip.data.synthetic.source import write_folder
from m1clip.data.types import PROBLEM_KINDS, Problem

FLICKR8K = Path(__file__).parents[2] / "../shared/data/flickr8k-112"


def good(count: int, start: int = 0) -> dict[str, bytes]:
    return {f"p{n}.jpg": encoded(image(n)) for n in range(start, start + count)}


def make(
    folder: Path, files: dict[str, bytes], rows: list[tuple[str, str, str]] | None = None
) -> Path:
    """Write a captions table.

    Without `rows`, each file has its own caption and is in train, the last in val.
    """
    (folder / "images").mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        (folder / "images" / name).write_bytes(data)
    if rows is None:
        rows = [(name, f"a sentence about {name[:-4]} here", "train") for name in files]
        rows[-1] = (*rows[-1][:2], "val")
    lines = [json.dumps({"image": n, "caption": c, "split": s}) for n, c, s in rows]
    (folder / "captions.jsonl").write_text("\n".join(lines))
    return folder


def check(
    folder: Path, files: dict[str, bytes], rows: list[tuple[str, str, str]] | None = None
) -> LintReport:
    return lint(open_source(str(make(folder, files, rows))))


def counts(report: LintReport) -> dict[str, int]:
    return {finding.code: finding.count for finding in report.findings}


def of(report: LintReport, code: str) -> tuple[str, ...]:
    return next(finding.examples for finding in report.findings if finding.code == code)


def test_clean_dataset_is_ok_in_any_image_mode(tmp_path: Path) -> None:
    modes = {
        "cmyk.jpg": encoded(image(30).convert("CMYK")),
        "deep.png": encoded(
            Image.fromarray(np.arange(4096, dtype=np.uint16).reshape(64, 64) * 16), "PNG"
        ),
        "alpha.png": encoded(image(33).convert("RGBA"), "PNG"),
        "palette.png": encoded(image(34).quantize(32), "PNG"),
    }
    report = check(tmp_path, {**modes, **good(12)})
    assert (report.findings, report.verdict, report.advice()) == ((), "ok", [])
    assert report.to_text().endswith("verdict: ok")


def test_bad_images_are_reported_with_file_and_row(tmp_path: Path) -> None:
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64, 3), np.uint8))
    bomb = encoded(Image.new("1", (MAX_PIXELS // 1000, 1001)), "PNG")
    bad = {
        "missing": b"x",
        "empty": b"",
        "truncated": encoded(noise)[:1500],
        "not-an-image": b"text",
        "too-large": bomb,
    }
    odd = {
        "near-empty": encoded(Image.new("RGB", (64, 64), (9, 9, 9))),
        "extreme-size": encoded(image(137, (400, 20))),
    }
    files = {f"{code}.jpg": data for code, data in (bad | odd).items()}
    source = open_source(str(make(tmp_path, {**good(60), **files, "last.jpg": encoded(image(99))})))
    (tmp_path / "images/missing.jpg").unlink()
    report = lint(source)
    assert counts(report) == dict.fromkeys(bad | odd, 1)
    for row, code in enumerate(bad | odd, start=61):
        assert f"{code}.jpg (captions.jsonl row {row}): " in of(report, code)[0]
    assert report.verdict == "problems"


def test_too_many_bad_images_come_first(tmp_path: Path) -> None:
    report = check(
        tmp_path, {**good(8), **{f"bad{n}.jpg": b"" for n in range(9)}, "z.jpg": encoded(image(50))}
    )
    assert report.findings[0].code == "too-many-bad"
    assert "10%" in report.findings[0].message
    text = report.to_text()
    assert "problem  empty image files (0 bytes), skipped: 9" in text
    assert "... and 6 more" in text
    assert text.count("images/bad") == 3


def test_duplicates_and_leakage(tmp_path: Path) -> None:
    files = good(10)
    files["copy.jpg"] = files["p0.jpg"]
    files["smaller.jpg"] = encoded(image(1).resize((60, 40)), quality=60)
    files["brighter.png"] = encoded(ImageEnhance.Brightness(image(2)).enhance(1.2), "PNG")
    files["leak.jpg"] = files["p3.jpg"]
    held_out = {"smaller.jpg", "leak.jpg", "p9.jpg"}
    report = check(
        tmp_path,
        files,
        [(n, f"words about {n[:-4]} here", "val" if n in held_out else "train") for n in files],
    )
    expected = {
        "leak-identical": ("p3.jpg", "leak.jpg"),
        "leak-near": ("p1.jpg", "smaller.jpg"),
        "duplicate-identical": ("p0.jpg", "copy.jpg"),
        "duplicate-near": ("p2.jpg", "brighter.png"),
    }
    assert counts(report) == dict.fromkeys(expected, 1)
    for code, names in expected.items():
        assert all(name in of(report, code)[0] for name in names)


def test_synthetic_scenes_that_look_alike_are_no_duplicates_but_their_copies_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_folder(tmp_path / "scenes", 300, 32, seed=1)
    report = lint(open_source(str(tmp_path / "scenes")))
    assert (report.verdict, counts(report)) == ("ok", {})
    table = tmp_path / "scenes/captions.csv"
    first = next((tmp_path / "scenes/images").glob("train*"))
    with Image.open(first) as scene:
        scene.save(tmp_path / "scenes/images/again.png")
    with table.open("a", encoding="utf-8") as file:
        file.write("images/again.png,the same scene saved again,val\n")
    report = lint(open_source(str(tmp_path / "scenes")))
    (copy,) = [pair for pair in of(report, "leak-near") if first.name in pair]
    assert "again.png" in copy
    monkeypatch.setattr(lint_module, "SYNTHETIC_MARK", ("Software", "another program"))
    assert counts(lint(open_source(str(tmp_path / "scenes"))))["leak-near"] > 1


def test_caption_findings(tmp_path: Path) -> None:
    rows = [
        (f"p{n}.jpg", f"a long enough sentence number {n}", "val" if n > 10 else "train")
        for n in range(12)
    ]
    rows += [("p0.jpg", "A long enough sentence number 0.", "train"), ("p1.jpg", "a dog", "train")]
    rows += [
        ("p2.jpg", "IMG_2041.jpg", "train"),
        ("p3.jpg", "", "train"),
        ("p4.jpg", " ".join(["word"] * 20), "train"),
    ]
    rows += [("p11.jpg", "a long enough sentence number 5", "val")]
    report = lint(open_source(str(make(tmp_path, good(12), rows))), context_length=12)
    codes = (
        "skipped-empty-caption",
        "file-name",
        "duplicate-caption",
        "overlong",
        "shared-caption",
    )
    assert counts(report) == dict.fromkeys(codes, 1)
    assert of(report, "skipped-empty-caption")[0].startswith("captions.jsonl row 16")
    assert of(report, "duplicate-caption")[0].startswith("captions.jsonl row 13")
    assert "captions over 10 tokens (10 tokens cut off)" in [
        finding.message for finding in report.findings
    ]
    assert report.facts["captions_per_image"] == {"min": 1, "median": 1, "max": 2}


def test_every_kind_of_problem_is_reported(tmp_path: Path) -> None:
    source = open_source(str(make(tmp_path, good(3))))
    for kind in PROBLEM_KINDS:
        source.problems += [Problem(f"{kind}.csv row {row}", "odd", kind) for row in range(5)]
    report = lint(source, 1)
    assert counts(report) == {f"skipped-{kind}": 5 for kind in PROBLEM_KINDS}
    assert {len(finding.examples) for finding in report.findings} == {5}
    shown = report.to_text().splitlines()
    more = f"           ... and {5 - EXAMPLES_SHOWN} more; --json lists up to {EXAMPLES_IN_JSON}"
    assert shown.count(more) == len(PROBLEM_KINDS)
    with pytest.raises(ValueError, match="'odd' is not one of unreadable, "):
        Problem("a.csv", "odd", "odd")  # type: ignore[arg-type]


def test_labels_and_class_folders_are_recognized(tmp_path: Path) -> None:
    report = check(
        tmp_path / "set",
        good(12),
        [(f"p{n}.jpg", ("cat", "dog")[n % 2], ("train", "val")[n // 11]) for n in range(12)],
    )
    assert (counts(report)["labels"], report.verdict) == (12, "warnings")
    for n in range(12):
        folder = tmp_path / "classes" / ("cat", "dog")[n % 2]
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{n}.jpg").write_bytes(encoded(image(n)))
    report = lint(open_source(str(tmp_path / "classes")))
    assert (counts(report), report.verdict) == ({"labels": 12}, "ok")


def test_missing_splits(tmp_path: Path) -> None:
    rows = [(f"p{n}.jpg", f"a sentence with number {n}", "test") for n in range(5)]
    assert counts(check(tmp_path, good(5), rows)) == {"no-train": 1, "no-val": 1}


@pytest.mark.parametrize("split", ["", "train"])
def test_few_images_without_val_need_no_advice_on_a_split_column(
    split: str, tmp_path: Path
) -> None:
    rows = [(f"p{n}.jpg", f"a sentence with number {n}", split) for n in range(8)]
    report = check(tmp_path, good(8), rows)
    assert (counts(report), report.verdict) == ({"no-val": 1}, "warnings")
    assert "no validation images" in report.to_text()
    assert "fewer than ten training images hold out none" in report.to_text()
    assert "split column" not in report.to_text()


def test_sample_progress_and_json(tmp_path: Path) -> None:
    source = open_source(
        str(make(tmp_path, {**good(40), "bad\nname\x1b.jpg": b"x", "last.jpg": encoded(image(60))}))
    )
    report = lint(source, 8)
    assert (report.checked, report.captions) == (8, 42)
    calls: list[tuple[int, int]] = []
    with console.on_progress(lambda *count: calls.append(count)):
        report = lint(source, workers=3)
    assert calls[-1] == (42, 42)
    loaded = json.loads(report.to_json())
    assert (loaded["verdict"], loaded["findings"][0]["count"]) == ("problems", 1)
    assert all(line.isprintable() for line in report.to_text().split("\n"))


@pytest.mark.parametrize("options", [(), ("--json",)])
def test_name_of_a_dataset_cannot_control_the_terminal(
    tmp_path: Path, options: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make(tmp_path / "\x1b[2J\x9b31m\u202egpj", {**good(3), "empty\u202e.jpg": b""})
    assert exit_code("data", "lint", folder, *options) == 1
    output = capsys.readouterr().out
    assert "31m\\u202egpj" in output
    assert all(line.isprintable() for line in output.split("\n"))


def test_several_datasets_are_checked_together(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = [make(tmp_path / name, good(3)) for name in ("a", "b")]
    exit_code("data", "lint", *folders, "--json")
    report = json.loads(capsys.readouterr().out)
    assert sum(report["images"].values()) == 6
    # The sets have the same images.
    assert any("identical" in json.dumps(finding) for finding in report["findings"])


def test_flickr8k_as_checked_by_hand() -> None:
    if not FLICKR8K.is_dir():
        pytest.skip("shared/data/flickr8k-112 is not here")
    report = lint(open_source(str(FLICKR8K)))
    # Captions and bytes were counted from the CSV and the files by another script, near-duplicates
    # by eye.
    near = {"leak-near": 4, "duplicate-near": 2, "duplicate-identical": 1}
    assert counts(report) == {**near, "duplicate-caption": 19, "shared-caption": 221}
    assert "2851198725_37b6027625.jpg" in of(report, "duplicate-identical")[0]
