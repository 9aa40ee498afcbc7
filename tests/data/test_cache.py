"""The cache: content, reuse, kills, concurrent processes, and disk space."""

import errno
import math
import os
import pickle
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from image_sets import break_files, make_set, plan
from PIL import Image
from small_run import PATIENCE, SERVER, screen, small_config

from m1clip.config import DataConfig
from m1clip.data import cache
from m1clip.data.images import FileImage, to_square
from m1clip.data.loader import batches
from m1clip.data.prepare import Split
from m1clip.data.sources import open_source, open_sources
from m1clip.data.types import ImageRef, Source
from m1clip.errors import UserError
from m1clip.training.progress import decode_plan
from m1clip.training.setup import prepare

SIDE = 24
WIDTH = 5


def row(word: str) -> np.ndarray:
    return np.full(WIDTH, float(word[1:]), np.float16)


def fill(rows: cache.RowCache, words: list[str], stop_after: int | None = None) -> list[str]:
    """Fill two rows at a time and return the computed ones; interrupted after `stop_after` blocks."""
    asked: list[str] = []

    def compute(wanted: list[int], failed: dict[int, str]) -> Iterator[tuple[list[int], np.ndarray]]:
        for number, start in enumerate(range(0, len(wanted), 2)):
            if number == stop_after:
                raise KeyboardInterrupt
            block = [words[item] for item in wanted[start : start + 2]]
            asked.extend(block)
            yield list(range(start, start + len(block))), np.stack([row(word) for word in block])

    try:
        at, _ = rows.fill([cache.row_name(word) for word in words], compute, lambda line: None)
    except KeyboardInterrupt:
        return asked
    table = rows.table(at)
    np.testing.assert_array_equal(table.read(np.arange(len(words))), np.stack([row(word) for word in words]))
    return asked


def row_cache(folder: Path, key: str = "a") -> cache.RowCache:
    made = cache.RowCache(folder, "rows", key, (WIDTH,), np.float16)
    made.path = folder / key
    return made


def test_each_row_is_computed_once_and_only_new_ones_later(tmp_path: Path) -> None:
    assert fill(row_cache(tmp_path), ["w1", "w2", "w1", "w3"]) == ["w1", "w2", "w3"]
    assert fill(row_cache(tmp_path), ["w4", "w2", "w5"]) == ["w4", "w5"]
    assert fill(row_cache(tmp_path), ["w5", "w1", "w1"]) == []
    assert row_cache(tmp_path, "b").missing([cache.row_name("w1")]) == [0], "another key is another cache"


@pytest.mark.parametrize("torn", ["rows.bin", "names.bin"])
def test_partial_row_is_truncated_and_recomputed(tmp_path: Path, torn: str) -> None:
    words = [f"w{i}" for i in range(6)]
    fill(row_cache(tmp_path), words)
    file = tmp_path / "a" / torn
    file.write_bytes(file.read_bytes()[:-3])
    assert fill(row_cache(tmp_path), [*words, "w7"]) == ["w5", "w7"]


@pytest.mark.parametrize("name", ["rows.bin", "names.bin"])
def test_untrusted_link_or_pipe_is_never_written(tmp_path: Path, name: str) -> None:
    """A downloaded dataset may contain a cache folder."""
    (tmp_path / "precious").write_text("mine")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / name).symlink_to(tmp_path / "precious")
    with pytest.raises(UserError, match="is a symbolic link"):
        fill(row_cache(tmp_path), ["w1"])
    assert (tmp_path / "precious").read_text() == "mine"
    (tmp_path / "a" / name).unlink()
    os.mkfifo(tmp_path / "a" / name)
    with pytest.raises(OSError, match=r"No such device|not a regular file"):
        fill(row_cache(tmp_path), ["w1"])


def test_full_disk_is_a_one_line_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cache.os, "fsync", full)
    with pytest.raises(UserError, match=r"the disk is full.*run again to continue"):
        fill(row_cache(tmp_path), ["w1"])
    monkeypatch.undo()
    assert fill(row_cache(tmp_path), ["w1"]) == ["w1"]


def cached(folder: Path, kind: str = "disk", cache_dir: str | None = None, **more: object) -> Split:
    config = DataConfig(source=(str(folder),), cache=kind, cache_dir=cache_dir)
    images, samples, failures, kind = cache.cache_split(
        open_source(str(folder)), "train", SIDE, "shortest", config, plan(**more)
    )
    return Split(images, None, samples, failures, kind)


def squares(split: Split) -> np.ndarray:
    return np.stack([to_square(sample.image.open(SIDE), SIDE) for sample in split.samples])


def test_second_run_decodes_nothing_even_after_a_move(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_set(tmp_path / "set")
    first = cached(folder).images.read(np.arange(40))
    monkeypatch.setattr(cache, "to_square", None)
    np.testing.assert_array_equal(cached(folder).images.read(np.arange(40)), first)
    monkeypatch.chdir(folder)
    assert len(cached(Path("captions.jsonl")).images) == 40
    monkeypatch.chdir(tmp_path)
    shutil.move(folder, tmp_path / "moved")
    assert len(cached(Path("moved")).images) == 40


def test_changed_image_is_decoded_again(tmp_path: Path) -> None:
    folder = make_set(tmp_path / "set")
    before = cached(folder)
    names = cache.image_names(before.samples, [str(folder)])
    Image.new("RGB", (SIDE, SIDE), (1, 2, 3)).save(folder / "images" / "train-0007.jpg", quality=100)
    changed = [a != b for a, b in zip(names, cache.image_names(before.samples, [str(folder)]), strict=True)]
    assert np.flatnonzero(changed).tolist() == [7]
    np.testing.assert_array_equal(cached(folder).images.read(np.arange(40)), squares(before))


def test_bad_images_are_left_out_and_named_in_every_run(tmp_path: Path) -> None:
    folder = make_set(tmp_path / "set")
    break_files(folder, [5, 11])
    warnings: list[str] = []
    first, second = cached(folder), cached(folder, warn=warnings.append)
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
    """Cache a dataset slowly, with one byte in the log for each decoded image; wait to be killed after some."""
    honest, cache.SAVE_SECONDS = cache.to_square, 0.0

    def slow(*arguments: Any) -> np.ndarray:
        time.sleep(pause)
        while log.exists() and log.stat().st_size >= hang_after:
            time.sleep(0.01)
        with log.open("a") as file:
            file.write("x")
        return honest(*arguments)

    cache.to_square = slow
    cached(folder)


def building(*arguments: Any) -> BaseProcess:
    process = SERVER.Process(target=build, args=arguments)
    process.start()
    return process


def test_killed_process_leaves_a_cache_that_continues(tmp_path: Path) -> None:
    folder = make_set(tmp_path / "set", train=320)
    killed = building(folder, tmp_path / "first", 0.0, 250)
    deadline, names = time.monotonic() + PATIENCE, list[Path]()
    while not (names and names[0].stat().st_size >= 2 * 64 * 16):
        assert time.monotonic() < deadline, "nothing was saved"
        time.sleep(0.01)
        names = list((folder / ".m1clip-cache").glob("*/names.bin"))
    killed.kill()
    killed.join()
    done = names[0].stat().st_size // 16
    second = building(folder, tmp_path / "second", 0.0)
    second.join(PATIENCE)
    assert second.exitcode == 0
    assert (tmp_path / "second").stat().st_size == 320 - done
    split = cached(folder)
    np.testing.assert_array_equal(split.images.read(np.arange(320)), squares(split))


def test_two_processes_decode_each_image_once(tmp_path: Path) -> None:
    folder = make_set(tmp_path / "set", train=320)
    both = [building(folder, tmp_path / "log", 0.003) for _ in range(2)]
    for process in both:
        process.join(PATIENCE)
    assert [process.exitcode for process in both] == [0, 0]
    assert (tmp_path / "log").stat().st_size == 320


def test_too_little_space_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_set(tmp_path / "set")
    needed = 40 * SIDE * SIDE * 3
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=int(needed * 1.04)))
    with pytest.raises(UserError, match=r"needs 0\.00 GB.*free some space.*--cache-dir.*--cache ram or off"):
        cached(folder)
    assert not list((folder / ".m1clip-cache").glob("*/rows.bin"))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=int(needed * 1.06)))
    assert cached(folder).cache == "disk"


def test_disk_without_locks_is_a_one_line_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(self: object, **options: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(cache.FileLock, "acquire", unsupported)
    with pytest.raises(UserError, match=r"does not support file locks; choose another with --cache-dir"):
        cached(make_set(tmp_path / "set"))


def test_unwritable_data_folder_falls_back_to_the_user_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_set(tmp_path / "set")
    (folder / ".m1clip-cache").write_text("a file, so no folder can be made here, not even by root")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    assert len(cached(folder).images) == 40
    assert len(list((tmp_path / "user" / "m1clip").glob("*/rows.bin"))) == 1
    cached(folder, cache_dir=str(tmp_path / "asked"))
    assert len(list((tmp_path / "asked").glob("*/rows.bin"))) == 1
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="no folder for the cache"):
        cached(folder, cache_dir=str(tmp_path / "file"))


def test_data_folders_of_a_mixture_and_of_the_hub(tmp_path: Path) -> None:
    one, two = make_set(tmp_path / "one"), make_set(tmp_path / "two")
    assert cache.data_folders(open_sources([str(one), str(two)])) == (str(one), str(two))
    assert cache.data_folders(Source("hub", [Path("hf:owner/name")])) == ()


GB = 10**9


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ({}, "disk"),
        ({"asked": "off"}, "off"),
        ({"asked": "disk", "free": 0}, "disk"),
        ({"asked": "ram", "total": 99 * GB}, "ram"),
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
    usual = {"asked": "auto", "synthetic": False, "images": 100_000, "needed": 1 * GB, "total": 2 * GB}
    assert cache.choose_kind(**{**usual, "memory": 8 * GB, "free": 100 * GB, **facts}) == expected  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def refs(tmp_path_factory: pytest.TempPathFactory) -> list[FileImage]:
    """300 images of several sizes, as PNG and JPEG."""
    folder = tmp_path_factory.mktemp("images")
    rng = np.random.default_rng(0)
    made = []
    for number in range(300):
        path = folder / f"{number}.{'jpg' if number % 2 else 'png'}"
        shape = (20 + number % 13, 20 + number % 7, 3)
        Image.fromarray(rng.integers(0, 256, shape, np.uint8)).save(path)
        made.append(FileImage(str(path)))
    return made


def test_threads_decode_in_order(refs: list[FileImage]) -> None:
    shown: list[tuple[int, int]] = []
    blocks = list(cache.decode_images(refs, 16, "shortest", {}, lambda *each: shown.append(each), 2))
    assert [item for items, _ in blocks for item in items] == list(range(300))
    live = cache.LiveImages(refs, 16).read(np.arange(300))
    assert np.array_equal(np.concatenate([pixels for _, pixels in blocks]), live)
    assert shown == sorted(shown)
    assert (shown[0], shown[-1]) == ((0, 300), (300, 300))


@dataclass(frozen=True)
class Absurd:
    """An image whose decoding fails like that of an absurdly large one."""

    error: type[Exception]

    def open(self, want: int | None = None) -> Image.Image:
        raise self.error

    def stamp(self) -> str:
        return "absurd"


@pytest.mark.parametrize("error", [MemoryError, OverflowError])
def test_image_too_large_for_memory_is_a_failure(refs: list[FileImage], error: type[Exception]) -> None:
    mixed: list[ImageRef] = [refs[0], Absurd(error), refs[1]]
    bad: dict[int, str] = {}
    ((items, _),) = cache.decode_images(mixed, 16, "shortest", bad, lambda done, total: None)
    assert (items, bad) == ([0, 2], {1: "too large for memory"})
    members, _, failed = cache.read_or_replace(cache.LiveImages(mixed, 16), np.array([0, 1]), 0, 0)
    assert members[0] == 0
    assert members[1] != 1
    assert {failure.index for failure in failed} == {1}
    with pytest.raises(UserError, match=r"too large for memory; .*continue with --resume"):
        cache.LiveImages(mixed, 16).read(np.array([0, 1]))


HOST = torch.device("cpu")


def test_images_go_to_the_device_if_they_leave_room() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (7, 4, 4, 3), np.uint8)
    for rows in (None, np.array([5, 0, 3])):
        images, wanted = cache.RowTable(pixels, rows), pixels if rows is None else pixels[rows]
        there = images.to_device(HOST, 4 * wanted.nbytes)
        assert there is not None
        assert np.array_equal(there.numpy(), wanted)
        assert images.to_device(HOST, 4 * wanted.nbytes - 4) is None
    assert cache.LiveImages([], 4).to_device(HOST, 10**9) is None


def test_batch_is_the_same_with_images_on_the_device() -> None:
    plain = prepare(small_config({"data.crop_min": 0.5}), lambda line: None, decode_plan(screen())).training
    there = replace(plain, device_images=plain.images.to_device(HOST, 10**9))
    # Workers cannot see the device's memory, so none are started.
    pairs = zip(batches(plain, 0, 3, 0, "fork", False), batches(there, 0, 3, 2, "fork", False), strict=True)
    for one, other in pairs:
        assert other.images is None
        assert torch.equal(other.pixels(), one.images)
        assert torch.equal(other.pixels(slice(2, 5)), one.images[2:5])
        assert torch.equal(other.views, one.views)


def test_each_failure_is_logged_once_and_too_many_stop_the_run() -> None:
    written: list[tuple[str, dict[str, object]]] = []
    warnings: list[str] = []
    log = cache.FailureLog(
        1000, 0.1, lambda kind, **values: written.append((kind, values)), warnings.append, named=["old"]
    )
    log((cache.Failure(3, "a.jpg", "gone"), cache.Failure(3, "a.jpg", "gone")))
    log((cache.Failure(3, "a.jpg", "gone"), cache.Failure(4, "old", "gone")))
    assert written == [("skipped", {"split": "train", "where": "a.jpg", "reason": "gone"})]
    assert len(warnings) == 2
    many = [cache.Failure(100 + number, f"{number}.jpg", "gone") for number in range(99)]
    log(many[:98])
    with pytest.raises(UserError, match=r"101 of 1,000 train images .*such as a.jpg: gone.*--max-unreadable"):
        log(many)
