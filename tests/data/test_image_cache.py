"""Cached images of a split: content, reuse, kills, concurrent processes, and disk space."""

import errno
import math
import pickle
import shutil
import time
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from image_sets import break_files, make_set, plan
from PIL import Image
from small_run import SERVER, TIMEOUT

from m1clip import console
from m1clip.config import DataConfig
from m1clip.data import cache, decoding, image_cache
from m1clip.data.images import to_square
from m1clip.data.prepare import Split
from m1clip.data.sources import open_source
from m1clip.errors import UserError

SIDE = 24


def cached(folder: Path, kind: str = "disk", cache_dir: str | None = None) -> Split:
    config = DataConfig(source=(str(folder),), cache=kind, cache_dir=cache_dir)
    images, samples, failures, kind = image_cache.cache_split(
        open_source(str(folder)), "train", SIDE, "shortest", config, plan()
    )
    return Split(images, None, samples, failures, kind)


def squares(split: Split) -> np.ndarray:
    return np.stack([to_square(sample.image.open(SIDE), SIDE) for sample in split.samples])


def test_second_run_decodes_nothing_even_after_a_move(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_set(tmp_path / "set")
    first = cached(folder).images.read(np.arange(40))
    monkeypatch.setattr(decoding, "to_square", None)
    np.testing.assert_array_equal(cached(folder).images.read(np.arange(40)), first)
    monkeypatch.chdir(folder)
    assert len(cached(Path("captions.jsonl")).images) == 40
    monkeypatch.chdir(tmp_path)
    shutil.move(folder, tmp_path / "moved")
    assert len(cached(Path("moved")).images) == 40


def test_changed_image_is_decoded_again(tmp_path: Path) -> None:
    folder = make_set(tmp_path / "set")
    before = cached(folder)
    names = cache.image_keys(before.samples, [str(folder)])
    Image.new("RGB", (SIDE, SIDE), (1, 2, 3)).save(
        folder / "images" / "train-0007.jpg", quality=100
    )
    changed = [
        a != b for a, b in zip(names, cache.image_keys(before.samples, [str(folder)]), strict=True)
    ]
    assert np.flatnonzero(changed).tolist() == [7]
    np.testing.assert_array_equal(cached(folder).images.read(np.arange(40)), squares(before))


def test_bad_images_are_left_out_and_named_in_every_run(tmp_path: Path) -> None:
    folder = make_set(tmp_path / "set")
    break_files(folder, [5, 11])
    first = cached(folder)
    with console.record_warnings() as warnings:
        second = cached(folder)
    assert [failure.index for failure in second.failures] == [5, 11]
    assert first.failures == second.failures
    assert len(second.images) == len(second.samples) == 38
    assert second.samples[5].id == "images/train-0006.jpg"
    np.testing.assert_array_equal(second.images.read(np.arange(38)), squares(second))
    assert len(warnings) == 2
    assert "train-0005.jpg: not an image" in warnings[0]


def test_mapped_images_pickle_by_their_path(tmp_path: Path) -> None:
    images = cached(make_set(tmp_path / "set", train=200)).images
    data = pickle.dumps(images)
    assert len(data) < 3000
    indices = np.array([199, 0, 7])
    np.testing.assert_array_equal(pickle.loads(data).read(indices), images.read(indices))


def build(folder: Path, log: Path, pause: float, hang_after: float = math.inf) -> None:
    """Cache a dataset slowly, with one byte in the log for each decoded image.

    Wait to be killed after some.
    """
    honest, cache.SYNC_SECONDS = decoding.to_square, 0.0

    def slow(*arguments: Any) -> np.ndarray:
        time.sleep(pause)
        while log.exists() and log.stat().st_size >= hang_after:
            time.sleep(0.01)
        with log.open("a") as file:
            file.write("x")
        return honest(*arguments)

    decoding.to_square = slow
    cached(folder)


def building(*arguments: Any) -> BaseProcess:
    process = SERVER.Process(target=build, args=arguments)
    process.start()
    return process


def test_killed_process_leaves_a_cache_that_continues(tmp_path: Path) -> None:
    folder = make_set(tmp_path / "set", train=320)
    killed = building(folder, tmp_path / "first", 0.0, 250)
    deadline, names = time.monotonic() + TIMEOUT, list[Path]()
    while not (names and names[0].stat().st_size >= 2 * 64 * 16):
        assert time.monotonic() < deadline, "nothing was saved"
        time.sleep(0.01)
        names = list((folder / ".m1clip-cache").glob("*/names.bin"))
    killed.kill()
    killed.join()
    done = names[0].stat().st_size // 16
    second = building(folder, tmp_path / "second", 0.0)
    second.join(TIMEOUT)
    assert second.exitcode == 0
    assert (tmp_path / "second").stat().st_size == 320 - done
    split = cached(folder)
    np.testing.assert_array_equal(split.images.read(np.arange(320)), squares(split))


def test_two_processes_decode_each_image_once(tmp_path: Path) -> None:
    folder = make_set(tmp_path / "set", train=320)
    both = [building(folder, tmp_path / "log", 0.003) for _ in range(2)]
    for process in both:
        process.join(TIMEOUT)
    assert [process.exitcode for process in both] == [0, 0]
    assert (tmp_path / "log").stat().st_size == 320


def test_too_little_space_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_set(tmp_path / "set")
    needed = 40 * SIDE * SIDE * 3
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=int(needed * 1.04)))
    with pytest.raises(
        UserError,
        match=r"needs [\d.]+ kB, .* has [\d.]+ kB free: free some space.*--cache-dir.*--cache ram or off",
    ):
        cached(folder)
    assert not list((folder / ".m1clip-cache").glob("*/rows.bin"))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=int(needed * 1.06)))
    assert cached(folder).cache == "disk"


def test_disk_without_locks_is_a_one_line_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unsupported(self: object, **options: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(cache.FileLock, "acquire", unsupported)
    with pytest.raises(
        UserError, match=r"does not support file locks; choose another with --cache-dir"
    ):
        cached(make_set(tmp_path / "set"))


def test_unwritable_data_folder_falls_back_to_the_user_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_set(tmp_path / "set")
    (folder / ".m1clip-cache").write_text("a file, so no folder can be made here, not even by root")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    assert len(cached(folder).images) == 40
    assert len(list((tmp_path / "user" / "m1clip").glob("*/rows.bin"))) == 1
    cached(folder, cache_dir=str(tmp_path / "requested"))
    assert len(list((tmp_path / "requested").glob("*/rows.bin"))) == 1
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="no folder for the cache"):
        cached(folder, cache_dir=str(tmp_path / "file"))


GB = 10**9


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ({}, "disk"),
        ({"requested": "off"}, "off"),
        ({"requested": "disk", "free": 0}, "disk"),
        ({"requested": "ram", "total": 99 * GB}, "ram"),
        ({"synthetic": True}, "ram"),
        ({"synthetic": True, "total": 3 * GB}, "off"),
        ({"images": 500}, "ram"),
        ({"images": 500, "total": 3 * GB}, "disk"),
        ({"free": 2 * GB}, "ram"),
        ({"free": 2 * GB, "total": 3 * GB}, "off"),
        ({"free": 0, "needed": 0}, "disk"),
        ({"total": 99 * GB, "free": 300 * GB}, "disk"),
    ],
)
def test_where_auto_caches_images(facts: dict[str, object], expected: str) -> None:
    usual = {
        "requested": "auto",
        "synthetic": False,
        "images": 100_000,
        "needed": 1 * GB,
        "total": 2 * GB,
    }
    assert (
        image_cache.choose_kind(**{**usual, "memory": 8 * GB, "free": 100 * GB, **facts})
        == expected
    )  # type: ignore[arg-type]
