"""Files of vectors: only committed rows are read, new ones are added to them, and each name is made from numbers."""

import os
from pathlib import Path

import numpy as np
import pytest

from m1clip.errors import UserError
from m1clip.search.vectors import Vectors, create, file_name, generations, open_end, remove_others

DIM = 8
ROWS = np.random.default_rng(0).normal(size=(40, DIM)).astype(np.float16)


def append(folder: Path, committed: int, rows: int) -> None:
    with open_end(folder, 1, 0, DIM, committed) as file:
        file.write(ROWS[committed : committed + rows].data)


def read(vectors: Vectors, rows: int) -> np.ndarray:
    with vectors.open() as file:
        return vectors.read(file, rows)


def test_committed_rows_are_read_and_earlier_results_stay_valid(tmp_path: Path) -> None:
    generation, file = create(tmp_path, 1)
    file.close()
    assert generation == 0
    vectors, earlier = Vectors(tmp_path, tmp_path, 1, 0, DIM), []
    append(tmp_path, 0, 9)
    for committed in (0, 3, 4, 9):
        earlier.append(read(vectors, committed))
    append(tmp_path, 9, 5)
    append(tmp_path, 10, 30)  # four rows were not committed: they are written again
    for committed in (10, 25, 40):
        earlier.append(read(vectors, committed))
    for rows_read in earlier:
        np.testing.assert_array_equal(rows_read, ROWS[: len(rows_read)])
    assert [len(rows_read) for rows_read in earlier] == [0, 3, 4, 9, 10, 25, 40]


@pytest.mark.parametrize("size", [0, 3 * DIM * 2 - 1])
def test_file_with_fewer_rows_than_committed_is_truncated(tmp_path: Path, size: int) -> None:
    create(tmp_path, 1)[1].close()
    append(tmp_path, 0, 9)
    vectors = Vectors(tmp_path, tmp_path, 1, 0, DIM)
    before = read(vectors, 2).copy()
    os.truncate(tmp_path / file_name(1, 0), size)
    with pytest.raises(
        UserError,
        match=rf"truncated \({size // (DIM * 2)} of 9 vectors are left\); run m1clip index",
    ):
        read(vectors, 9)
    append(tmp_path, 0, 9)
    np.testing.assert_array_equal(read(vectors, 9)[:2], before)


def test_new_generation_never_replaces_a_file(tmp_path: Path) -> None:
    for expected in range(3):
        generation, file = create(tmp_path, 7)
        file.close()
        assert generation == expected
    for name in (
        "vectors-8-5.f16",
        "vectors-7-.f16",
        "vectors-7-9.f16.partial",
        "xvectors-7-9.f16",
    ):
        (tmp_path / name).touch()
    assert generations(tmp_path, 7) == [0, 1, 2]
    remove_others(tmp_path, 7, 1)
    assert generations(tmp_path, 7) == [1]
    assert generations(tmp_path, 8) == [5]


@pytest.mark.parametrize("kind", ["missing", "link", "pipe", "folder"])
def test_only_a_regular_file_is_read(tmp_path: Path, kind: str) -> None:
    path = tmp_path / file_name(1, 0)
    if kind == "link":
        path.symlink_to("/dev/zero")
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    with pytest.raises(UserError, match=f"{path.name}: .*run m1clip index"):
        read(Vectors(tmp_path, tmp_path, 1, 0, DIM), 1)
