"""The log of images that cannot be read."""

import pytest

from m1clip import console
from m1clip.data import failures
from m1clip.errors import UserError


def test_each_failure_is_logged_once_and_too_many_stop_the_run() -> None:
    written: list[tuple[str, dict[str, object]]] = []
    log = failures.FailureLog(
        1000, 0.1, lambda kind, **values: written.append((kind, values)), named=["old"]
    )
    with console.record_warnings() as warnings:
        log((failures.Failure(3, "a.jpg", "gone"), failures.Failure(3, "a.jpg", "gone")))
        log((failures.Failure(3, "a.jpg", "gone"), failures.Failure(4, "old", "gone")))
    assert written == [("skipped", {"split": "train", "where": "a.jpg", "reason": "gone"})]
    assert len(warnings) == 2
    many = [failures.Failure(100 + number, f"{number}.jpg", "gone") for number in range(99)]
    log(many[:98])
    with pytest.raises(
        UserError, match=r"101 of 1,000 train images .*such as a.jpg: gone.*--max-unreadable"
    ):
        log(many)
