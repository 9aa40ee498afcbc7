"""Amounts as people type them."""

from __future__ import annotations

import pytest

from m1clip.errors import UserError
from m1clip.formatting import amount


@pytest.mark.parametrize(
    ("text", "unit", "value"),
    [("8GB", "B", 8e9), ("8gb", "B", 8e9), ("1.5 GiB", "B", 1.5 * 2**30), ("512M", "B", 512e6), ("100B", "B", 100),
     ("2.6TFLOP", "FLOP", 2.6e12), ("2.6TFLOP/s", "FLOP", 2.6e12), (".5G", "B", 5e8)],
)  # fmt: skip
def test_what_is_understood(text: str, unit: str, value: float) -> None:
    assert amount(text, unit, "--memory") == pytest.approx(value)


@pytest.mark.parametrize("text", ["", "8", "GB", "-1GB", "0GB", "8XB", "8 GB!", "1e9", "8PIB", "8TFLOP"])
def test_what_is_not(text: str) -> None:
    with pytest.raises(UserError, match=r"--memory .*such as 8GB"):
        amount(text, "B", "--memory")
