"""Values that were read, converted and checked."""

import math
import re
from pathlib import Path
from typing import Any, Literal

import pytest

from m1clip.errors import UserError
from m1clip.schema import convert, format_version


@pytest.mark.parametrize(
    "record", [{"format": 0}, {"format": -1}, {"format": True}, {"format": 1.0}, {"format": "1"}]
)
def test_format_version_is_an_integer_of_at_least_1(record: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="format must be an integer of at least 1"):
        format_version(record)
    assert format_version({"format": 1}) == 1


@pytest.mark.parametrize(
    ("hint", "value", "expected"),
    [
        (str | int, 7, 7),
        (str | int, "7", "7"),
        (int | None, None, None),
        (float | None, 2, 2.0),
        (str, Path("a/b"), "a/b"),
        (tuple[str, ...], "a", ("a",)),
        (tuple[str, ...], ["a", "b", "c"], ("a", "b", "c")),
        (tuple[str, ...], [], ()),
        (tuple[float, float], [1, 2], (1.0, 2.0)),
        (Literal["a", 1], 1, 1),
    ],
)
def test_value_is_converted_to_its_type(hint: Any, value: Any, expected: Any) -> None:
    converted = convert(hint, value, "x")
    assert converted == expected
    assert type(converted) is type(expected)


@pytest.mark.parametrize(
    ("hint", "value", "message"),
    [
        (str | int, 1.5, "x must be text in quotes, not 1.5"),
        (str, 3, "x must be text in quotes, not 3"),
        (int, True, "x must be an integer, not True"),
        (int, 2**63, "x must be a smaller integer, not 9223372036854775808"),
        (float, math.nan, "x must be a finite number, not nan"),
        (tuple[float, float], [1, 2, 3], "x must be 2 numbers, not [1, 2, 3]"),
        (tuple[float, float], 1, "x must be 2 numbers, not 1"),
        (tuple[str, ...], 1, "x must be a list, not 1"),
        (Literal["a", 1], True, "x must be one of a, 1, not True"),
    ],
)
def test_value_of_another_type_is_a_one_line_error(hint: Any, value: Any, message: str) -> None:
    with pytest.raises(UserError, match=f"^{re.escape(message)}$"):
        convert(hint, value, "x")
