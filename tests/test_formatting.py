"""Numbers, durations, sizes and tables as text, and quantities as users type them."""

from pathlib import Path

import pytest

from m1clip.bench.doctor import Finding, doctor_text
from m1clip.cli.search import _report_lines
from m1clip.data.lint import LintReport
from m1clip.data.pack import Packed
from m1clip.errors import UserError
from m1clip.formatting import (
    ago,
    amount,
    clock,
    did_you_mean,
    duration,
    number,
    one_line,
    percent,
    plural,
    printable,
    save_interval,
    size,
    table,
)
from m1clip.search.index import Report


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (clock(65), "1:05"),
        (clock(7389), "2:03:09"),
        (clock(273_600), "3d 4h"),
        (duration(6.2e-6), "6.2 µs"),
        (duration(0.085), "85 ms"),
        (duration(2.571), "2.57 s"),
        (duration(99.96), "1:40"),
        (size(0), "0 B"),
        (size(500), "500 B"),
        (size(1500), "1.5 kB"),
        (size(999.6e6), "1 GB"),
        (size(1.421e9), "1.42 GB"),
        (size(1e12), "1 TB"),
        (percent(0.7134), "71.3%"),
        (percent(0.0002), "0.02%"),
        (percent(0.0002, 0), "0%"),
        (number(0.07123), "0.0712"),
        (number(12345), "12,345"),
        (number(5e-5), "5e-5"),
        (number(float("nan")), "nan"),
        (ago(-3), "0 s ago"),
        (ago(89), "89 s ago"),
        (ago(90), "2 min ago"),
        (ago(5399), "90 min ago"),
        (ago(7200), "2 h ago"),
        (ago(172_799), "48 h ago"),
        (ago(172_800), "2 days ago"),
        (plural(1, "image"), "1 image"),
        (plural(2000, "image"), "2,000 images"),
        *((words(None), "-") for words in (clock, duration, size, percent, number)),
    ],
)
def test_number_formats(text: str, expected: str) -> None:
    assert text == expected


@pytest.mark.parametrize(
    ("name", "suggestion"),
    [
        ("orignal", "original"),
        ("ORIGINAL", "original"),
        ("multi", "multi-positive"),
        ("mul", None),  # too short to be a part of a name
        ("elsewhere", None),
    ],
)
def test_suggested_name(name: str, suggestion: str | None) -> None:
    expected = "" if suggestion is None else f": did you mean '--{suggestion}'?"
    assert did_you_mean(name, ["tiny", "original", "multi-positive"], prefix="--") == expected


HOSTILE = "\x1b[31mred\x1b]0;title\x07 \u202egpj.exe\u2066 a\rb\x9b2J é 🐕"


def test_untrusted_text_cannot_control_the_terminal() -> None:
    shown = r"\x1b[31mred\x1b]0;title\x07 \u202egpj.exe\u2066 a\rb\x9b2J é 🐕"
    assert one_line(HOSTILE) == shown
    assert one_line("a\nb") == r"a\nb"
    assert printable(f"{HOSTILE}\nb") == f"{shown}\nb"
    assert table(("run", "n"), [(HOSTILE, "1")]).splitlines()[1].startswith(shown)


def test_table_alignment() -> None:
    rows = [("1st", "running", "12"), (), ("longer", "crashed", "1,234")]
    assert table(("run", "state", "n"), rows).split("\n") == [
        "run     state        n",
        "1st     running     12",
        "",
        "longer  crashed  1,234",
    ]
    assert table(("run", "n"), []) == "run  n"


@pytest.mark.parametrize(
    ("text", "unit", "value"),
    [
        ("8GB", "B", 8e9),
        ("1.5 gib", "B", 1.5 * 2**30),
        (".5M", "B", 5e5),
        ("2.6TFLOP/s", "FLOP", 2.6e12),
    ],
)
def test_valid_quantities(text: str, unit: str, value: float) -> None:
    assert amount(text, unit, "--memory") == pytest.approx(value)


def test_save_interval() -> None:
    assert save_interval(100, "--save-every") == (100, 0.0, 0.0)
    assert save_interval(" 10M ", "--save-every") == (0, 600.0, 0.0)
    assert save_interval("2 epochs", "--save-every") == (0, 0.0, 2.0)
    for invalid in (True, "0s", "-1", "ten", 1.5):
        with pytest.raises(UserError, match="expected an integer number of steps, a time"):
            save_interval(invalid, "--save-every")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "text", ["", "8", "GB", "-1GB", "0GB", "8XB", "8 GB!", "1e9", "8PIB", "8TFLOP"]
)
def test_invalid_quantities_are_rejected(text: str) -> None:
    with pytest.raises(UserError, match=r"--memory .*such as 8GB"):
        amount(text, "B", "--memory")


def test_counts_of_one_are_singular(tmp_path: Path) -> None:
    finding = Finding("warning", "x", "y", "z")
    assert doctor_text([finding]).endswith("0 problems, 1 warning")
    assert doctor_text([finding, finding]).endswith("0 problems, 2 warnings")
    report = Report(tmp_path, tmp_path)
    report.links = report.other = 1
    assert "0 hidden, 1 link, 1 other file, 0 files that cannot be used" in "\n".join(
        _report_lines(report, None)
    )
    assert str(Packed(tmp_path, {"train": 1}, 1, [])) == f"{tmp_path}: 1 image (train 1) in 1 shard"
    lint_report = LintReport("photos", {"train": 1}, 1, 1, 0.0, (), {}, ())
    assert lint_report.to_text().startswith("photos: 1 image (train 1), 1 caption; all checked")
