"""The cache on disk: right, found again, continued after a kill, built once by two, refused without room."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from image_sets import break_files, make_set, plan

from m1clip.data import cache
from m1clip.data import cache as cache_place
from m1clip.data import cache as keep
from m1clip.data.cache import CachePlace, CacheSpec, Stored, cache_key, choose_kind, data_folders, store_split
from m1clip.data.images import to_square
from m1clip.data.sources import open_source, open_sources
from m1clip.errors import UserError

SIDE = 24


def stored(
    folder: Path, split: str = "train", wish: str = "disk", cache_dir: str | None = None, **more: object
) -> Stored:
    source = open_source(str(folder))
    place = CachePlace(wish, cache_dir, *data_folders(source), in_all=56)  # type: ignore[arg-type]
    return store_split(source.samples(split), split, SIDE, "shortest", place, 0.1, plan(**more))  # type: ignore[arg-type]


def caches(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / ".m1clip-cache").iterdir())


def test_cached_pixels_are_those_of_the_files(tmp_path: Path) -> None:
    folder = make_set(tmp_path / "set", train=150)
    kept = stored(folder)
    expected = np.stack([to_square(sample.image.open(SIDE), SIDE) for sample in kept.samples])
    assert kept.kind == "disk"
    np.testing.assert_array_equal(kept.images.read(np.arange(150)), expected)
    live, ram = stored(folder, wish="off"), stored(folder, wish="ram")
    np.testing.assert_array_equal(live.images.read(np.arange(150)), expected)
    np.testing.assert_array_equal(ram.images.read(np.arange(150)), expected)


def test_the_file_is_plain_numpy_and_the_rest_plain_json(tmp_path: Path) -> None:
    folder = make_set(tmp_path / "set")
    stored(folder)
    (name,) = caches(folder)
    array = np.load(folder / ".m1clip-cache" / name / "pixels.npy", allow_pickle=False)
    assert array.shape == (40, SIDE, SIDE, 3)
    about = json.loads((folder / ".m1clip-cache" / name / "about.json").read_text())
    assert about == {"format": 1, "count": 40, "side": SIDE, "resize": "shortest", "bad": {}}


def test_a_second_run_decodes_nothing_even_from_another_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_set(tmp_path / "set")
    first = stored(folder)
    monkeypatch.setattr(keep, "cached", _only_open)
    np.testing.assert_array_equal(stored(folder).images.read(np.arange(40)), first.images.read(np.arange(40)))
    monkeypatch.chdir(folder)
    assert len(stored(Path("captions.jsonl")).images) == 40
    monkeypatch.chdir(tmp_path)
    shutil.move(folder, tmp_path / "moved")
    assert len(stored(Path("moved")).images) == 40


def _only_open(spec: CacheSpec, *rest: object) -> object:
    assert spec.is_whole()
    return cache.open_cache(spec)


def test_the_key_changes_with_what_the_pixels_depend_on(tmp_path: Path) -> None:
    folder = make_set(tmp_path / "set")
    samples = open_source(str(folder)).samples("train")
    keys = {cache_key(samples, *rest, [str(folder)]) for rest in ((24, "shortest"), (25, "shortest"), (24, "squash"))}
    keys.add(cache_key(samples[1:], 24, "shortest", [str(folder)]))
    os.utime(folder / "images" / "train-0007.jpg", (1, 1))
    keys.add(cache_key(samples, 24, "shortest", [str(folder)]))
    assert len(keys) == 5


def test_bad_images_are_known_to_the_second_run(tmp_path: Path) -> None:
    folder = make_set(tmp_path / "set")
    break_files(folder, [5, 11])
    said: list[str] = []
    first, second = stored(folder), stored(folder, warn=said.append)
    assert [failure.index for failure in second.failures] == [5, 11]
    assert first.failures == second.failures
    assert len(second.images) == len(second.samples) == 38
    assert second.samples[5].id == "images/train-0006.jpg"
    expected = to_square(second.samples[5].image.open(SIDE), SIDE)
    np.testing.assert_array_equal(second.images.read(np.array([5]))[0], expected)
    assert len(said) == 2
    assert "train-0005.jpg: not an image" in said[0]


def test_a_map_pickles_by_its_path(tmp_path: Path) -> None:
    kept = stored(make_set(tmp_path / "set", train=200))
    data = pickle.dumps(kept.images)
    assert len(data) < 1000
    indices = np.array([199, 0, 7])
    np.testing.assert_array_equal(pickle.loads(data).read(indices), kept.images.read(indices))


BUILD = """
import sys, time
from pathlib import Path
sys.path.insert(0, {tests!r})
from m1clip.data import cache, store
cache.SAVE_SECONDS = 0.0
honest = store.to_square
def slow(*arguments):
    time.sleep({pause})
    with open({log!r}, "a") as file:
        file.write("x")
    return honest(*arguments)
store.to_square = slow
from test_cache import stored
kept = stored(Path({folder!r}), workers={workers})
print(len(kept.images), flush=True)
"""


def build_process(tmp_path: Path, folder: Path, log: str, pause: float, workers: int = 2) -> subprocess.Popen[str]:
    script = BUILD.format(
        tests=str(Path(__file__).parent), folder=str(folder), log=str(tmp_path / log), pause=pause, workers=workers
    )
    return subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for_chunks(folder: Path, count: int) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        for file in (folder / ".m1clip-cache").glob("*.building/progress.jsonl"):
            if file.read_bytes().count(b"chunk") >= count:
                return
        time.sleep(0.01)
    raise AssertionError("the build wrote no progress")


@pytest.mark.slow
def test_a_killed_build_continues(tmp_path: Path) -> None:
    folder = make_set(tmp_path / "set", train=640)
    killed = build_process(tmp_path, folder, "first", pause=0.004)
    wait_for_chunks(folder, 3)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    (building,) = (folder / ".m1clip-cache").glob("*.building")
    with (building / "progress.jsonl").open("ab") as file:
        file.write(b'{"chunk": 576, "bad"')  # a torn line counts for nothing
    done = (building / "progress.jsonl").read_bytes().count(b'"bad": {}')
    out, error = build_process(tmp_path, folder, "second", pause=0.0).communicate(timeout=60)
    assert out == "640\n", error
    assert (tmp_path / "second").stat().st_size == 640 - 64 * done
    kept = stored(folder)
    expected = np.stack([to_square(sample.image.open(SIDE), SIDE) for sample in kept.samples])
    np.testing.assert_array_equal(kept.images.read(np.arange(640)), expected)
    assert len(caches(folder)) == 1


@pytest.mark.slow
def test_two_processes_build_one_cache(tmp_path: Path) -> None:
    folder = make_set(tmp_path / "set", train=320)
    both = [build_process(tmp_path, folder, f"log{n}", pause=0.003) for n in range(2)]
    assert [process.communicate(timeout=90)[0] for process in both] == ["320\n", "320\n"]
    decoded = [(tmp_path / f"log{n}").stat().st_size for n in range(2) if (tmp_path / f"log{n}").exists()]
    assert sum(decoded) == 320
    assert len(caches(folder)) == 1


def test_without_locks_each_builds_and_the_first_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(*arguments: object) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", no_locks)
    folder = make_set(tmp_path / "set")
    first = stored(folder)
    (name,) = caches(folder)
    monkeypatch.setattr(CacheSpec, "is_whole", _late(CacheSpec.is_whole))
    assert len(stored(folder).images) == len(first.images) == 40
    assert caches(folder) == [name]


def _late(honest: object) -> object:
    """As seen by a process that looked before the other was done."""
    calls = []

    def is_whole(spec: CacheSpec) -> bool:
        calls.append(spec)
        return len(calls) > 3 and honest(spec)  # type: ignore[operator]

    return is_whole


def test_too_little_room_is_refused_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_set(tmp_path / "set")
    needed = 64 * SIDE * SIDE * 3
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=int(needed * 1.04)))
    with pytest.raises(UserError, match=r"needs 0\.00 GB.*make room.*--data\.cache-dir.*--data\.cache ram or off"):
        stored(folder)
    assert not list((folder / ".m1clip-cache").glob("*/pixels.npy"))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=int(needed * 1.06)))
    assert stored(folder).kind == "disk"


def test_a_disk_that_fills_up_is_one_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cache, "_save", full)
    with pytest.raises(UserError, match=r"disk became full.*run again: it continues"):
        stored(make_set(tmp_path / "set"))


@pytest.mark.parametrize("damage", [b"", b"\x93NUMPY nonsense", None])
def test_a_damaged_cache_says_what_to_do(tmp_path: Path, damage: bytes | None) -> None:
    folder = make_set(tmp_path / "set")
    stored(folder)
    (name,) = caches(folder)
    file = folder / ".m1clip-cache" / name / ("pixels.npy" if damage is not None else "about.json")
    file.write_bytes(damage or b"")
    with pytest.raises(UserError, match=f"{name}: a damaged cache.*delete this folder"):
        stored(folder)


def test_a_folder_that_cannot_be_written_falls_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_set(tmp_path / "set")
    (folder / ".m1clip-cache").write_text("a file, so no folder can be made here, not even by root")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    stored(folder)
    assert len(list((tmp_path / "user" / "m1clip").glob("*/pixels.npy"))) == 1
    stored(folder, cache_dir=str(tmp_path / "asked"))
    assert len(list((tmp_path / "asked").glob("*/pixels.npy"))) == 1
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="no place for the cache"):
        stored(folder, cache_dir=str(tmp_path / "file"))


def test_the_user_cache_of_each_system(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(cache_place.sys, "platform", "darwin")
    assert cache_place.user_cache() == Path.home() / "Library/Caches/m1clip"
    monkeypatch.setattr(cache_place.sys, "platform", "linux")
    assert cache_place.user_cache() == Path.home() / ".cache/m1clip"


def test_a_mixture_and_the_hub_have_their_places(tmp_path: Path) -> None:
    one, two = make_set(tmp_path / "one"), make_set(tmp_path / "two")
    mixed = open_sources([str(one), f"{two}:0.5"])
    assert data_folders(mixed) == ((str(one), str(two)), one)
    assert data_folders(SimpleNamespace(path=Path("hf:owner/name"))) == ((), None)  # type: ignore[arg-type]


GB = 10**9


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ({}, "disk"),
        ({"wish": "off"}, "off"),
        ({"wish": "disk", "free": 0}, "disk"),
        ({"wish": "ram", "total": 99 * GB}, "ram"),
        ({"drawn": True}, "ram"),
        ({"drawn": True, "total": 3 * GB}, "off"),
        ({"images": 500}, "ram"),
        ({"images": 500, "total": 3 * GB}, "disk"),
        ({"free": 2 * GB}, "ram"),
        ({"free": 2 * GB, "total": 3 * GB}, "off"),
        ({"total": 99 * GB, "free": 300 * GB}, "disk"),
    ],
)
def test_where_auto_keeps_images(facts: dict[str, object], expected: str) -> None:
    usual = {
        "wish": "auto", "drawn": False, "images": 100_000, "needed": 1 * GB, "total": 2 * GB,
        "memory": 8 * GB, "free": 100 * GB,
    }  # fmt: skip
    assert choose_kind(**{**usual, **facts}) == expected  # type: ignore[arg-type]
