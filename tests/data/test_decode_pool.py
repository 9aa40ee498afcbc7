"""Decoding in processes: equal pixels, broken images, killed processes, nothing left behind."""

import errno
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import psutil
import pytest
from hanging_reads import TIMEOUT, hang, replace_clock_of_reads
from PIL import Image

from m1clip.data import decode_pool, decode_worker, decoding
from m1clip.data.cache import RowCache, row_key
from m1clip.data.decode_pool import IMAGES_PER_BLOCK, DecodePool, SharedRows, decode_processes
from m1clip.data.decode_worker import Block, Job, Late, answer
from m1clip.data.images import FileImage, _simplejpeg, decode, to_square
from m1clip.data.types import ImageRef
from m1clip.errors import UserError

SIDE = 24
HANGS = 0.2  # seconds after which a read hangs, where no other read could be as late
IMAGES = 3 * IMAGES_PER_BLOCK + 5


@pytest.fixture(scope="module")
def refs(tmp_path_factory: pytest.TempPathFactory) -> list[ImageRef]:
    """JPEG files of several sizes, of which numbers 7 and 70 are broken."""
    folder = tmp_path_factory.mktemp("photos")
    rng = np.random.default_rng(0)
    made: list[ImageRef] = []
    for number in range(IMAGES):
        path = folder / f"{number:03}.jpg"
        size = (30 + number % 13, 30 + number % 7)
        coarse = Image.fromarray(rng.integers(0, 256, (6, 6, 3), np.uint8))
        coarse.resize(size, Image.Resampling.BICUBIC).save(path)
        if number in (7, 70):
            path.write_bytes(path.read_bytes()[:200])
        made.append(FileImage(str(path)))
    return made


@pytest.fixture(scope="module")
def expected(refs: list[ImageRef]) -> np.ndarray:
    """What threads of this process decode."""
    bad: dict[int, str] = {}
    blocks = list(decoding.decode_images(refs, SIDE, "shortest", bad))
    assert sorted(bad) == [7, 70]
    return np.concatenate([pixels for _, pixels in blocks])


@pytest.fixture(autouse=True)
def no_process_is_left() -> Iterator[None]:
    """No test may leave a process."""
    before = {process.pid for process in psutil.Process().children(recursive=True)}
    yield
    left = [
        process
        for process in psutil.Process().children(recursive=True)
        if process.pid not in before
    ]
    assert [process for process in left if "decode_worker" in " ".join(process.cmdline())] == []


def test_processes_pay_only_for_many_images() -> None:
    assert decode_processes(300, 16) == 0
    assert decode_processes(24_000, 1) == 0
    assert decode_processes(600, 16) == 4
    assert decode_processes(decode_pool.FEWEST_ITEMS, 2) == 2
    assert decode_processes(decode_pool.FEWEST_ITEMS - 1, 2) == 0
    assert decode_processes(24_000, 16) == 16


def test_process_imports_neither_torch_nor_the_command() -> None:
    program = (
        "import sys, m1clip.data.decode_worker, m1clip.data.decoding, m1clip.data.sources.shards\n"
        "print([name for name in ('torch', 'datasets', 'pyarrow', 'cyclopts') if name in sys.modules])"
    )
    command = [sys.executable, "-c", program]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.stdout.strip() == "[]", result.stderr


def test_processes_decode_in_order_what_threads_decode(
    refs: list[ImageRef], expected: np.ndarray
) -> None:
    bad: dict[int, str] = {}
    blocks = list(
        decoding.decode_images(refs, SIDE, "shortest", bad, decoding.DecodeMethod(processes=2))
    )
    indices = [index for items, _ in blocks for index in items]
    assert indices == [index for index in range(IMAGES) if index not in (7, 70)]
    assert np.array_equal(np.concatenate([pixels for _, pixels in blocks]), expected)
    assert {index: reason.split(":")[0] for index, reason in bad.items()} == dict.fromkeys(
        (7, 70), "truncated"
    )


def test_more_blocks_than_are_in_work_at_a_time_are_all_done_in_order(refs: list[ImageRef]) -> None:
    """At the end of a long list, no item may be left."""
    items = [refs[number % 5] for number in range(11)]  # the last block is not full
    work = decoding.DecodeSquare(SIDE, "shortest")
    reports = list(decode_pool.reports_in_order(work, items, 1, 60.0, block=2))
    assert [len(block) for block in reports] == [2, 2, 2, 2, 2, 1]
    assert all(reason is None for block in reports for reason in block)


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="lists open files on Linux")
def test_memory_for_rows_is_given_back(refs: list[ImageRef]) -> None:
    work = decoding.DecodeSquare(SIDE, "shortest")
    before = len(os.listdir("/proc/self/fd"))
    for _, rows in decode_pool.decode_in_order(work, refs[:3], 1, (SIDE, SIDE, 3), 60.0):
        assert rows.shape == (3, SIDE, SIDE, 3)
    del rows
    assert len(os.listdir("/proc/self/fd")) == before


def fill_cache(folder: Path, refs: list[ImageRef], processes: int) -> tuple[np.ndarray, set[int]]:
    """The pixels of a cache that so many processes fill, and the places that failed."""
    cache = RowCache(folder, "images", "test", (SIDE, SIDE, 3), np.uint8)
    options = decoding.DecodeOptions(1, 2**30, processes)

    def compute(missing, failed, writer):
        chosen = [refs[index] for index in missing]
        return decoding.decode_to_rows(chosen, SIDE, "shortest", failed, writer, options)

    rows, bad = cache.fill([row_key(str(ref)) for ref in refs], compute)
    return cache.view(rows[rows >= 0]).read(np.arange(int((rows >= 0).sum()))), set(bad)


@pytest.fixture
def always_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_pool, "FEWEST_ITEMS", 1)
    monkeypatch.setattr(decode_pool, "ITEMS_PER_PROCESS", 1)


@pytest.mark.usefixtures("always_processes")
def test_cache_filled_by_processes_has_the_same_rows(
    tmp_path: Path, refs: list[ImageRef], expected: np.ndarray
) -> None:
    pixels, bad = fill_cache(tmp_path, refs, processes=2)
    assert bad == {7, 70}
    assert np.array_equal(pixels, expected)


@pytest.mark.usefixtures("always_processes")
def test_rows_of_an_interrupted_fill_are_kept_and_free_ones_used(
    tmp_path: Path, refs: list[ImageRef], expected: np.ndarray
) -> None:
    cache = RowCache(tmp_path, "images", "test", (SIDE, SIDE, 3), np.uint8)

    def interrupted(missing, failed, writer):
        for index in (90, 3):  # neither in order nor without gaps
            writer.write([index], expected[index - 2 : index - 1])
            yield [index]
        raise KeyboardInterrupt

    keys = [row_key(str(ref)) for ref in refs]
    with pytest.raises(KeyboardInterrupt):
        cache.fill(keys, interrupted)
    assert set(range(IMAGES)) - set(cache.missing(keys)) == {3, 90}
    pixels, _ = fill_cache(tmp_path, refs, processes=2)
    assert np.array_equal(
        pixels[[row for row in range(len(pixels)) if row not in (3, 88)]],
        np.delete(expected, (3, 88), axis=0),
    )
    size = (cache.path / "rows.bin").stat().st_size
    assert size <= IMAGES * SIDE * SIDE * 3, "free rows are used before new ones"


def decode_while_killing(
    folder: Path, refs: list[ImageRef], kills: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> tuple[np.ndarray, list[str]]:
    """The pixels of a cache whose processes are killed at random answers; and the warnings."""
    warnings: list[str] = []
    draw = random.Random(seed)
    receive = DecodePool._receive
    answers, killed = 0, 0
    due = sorted(draw.sample(range(1, 2 + len(refs) // 2), kills))

    def kill_sometimes(pool: DecodePool, worker):
        nonlocal answers, killed
        answers += 1
        if killed < kills and answers >= due[killed]:
            killed += 1
            os.kill(draw.choice(pool.processes).process.pid, signal.SIGKILL)
        return receive(pool, worker)

    monkeypatch.setattr(DecodePool, "_receive", kill_sometimes)
    monkeypatch.setattr(decoding, "IMAGES_PER_BLOCK", 2)
    monkeypatch.setattr(DecodePool.__init__, "__defaults__", (-1, 0, warnings.append))
    pixels, bad = fill_cache(folder, refs, processes=2)
    assert bad == {7, 70}
    assert killed == kills
    return pixels, warnings


@pytest.mark.usefixtures("always_processes")
def test_killed_processes_are_replaced_and_the_cache_is_equal(
    tmp_path: Path, refs: list[ImageRef], expected: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    pixels, warnings = decode_while_killing(tmp_path, refs, 2, 0, monkeypatch)
    assert np.array_equal(pixels, expected)
    assert any("was killed (exit code -9)" in warning for warning in warnings)


@pytest.mark.long("Killed decoding processes")
@pytest.mark.usefixtures("always_processes")
def test_random_kills_of_decoding_processes(
    tmp_path: Path, refs: list[ImageRef], expected: np.ndarray, counts: dict[str, float]
) -> None:
    for seed in range(4):
        with pytest.MonkeyPatch.context() as patch:
            pixels, _ = decode_while_killing(tmp_path / str(seed), refs, 5, seed, patch)
        assert np.array_equal(pixels, expected)
    counts["SIGKILLs"] = 20


@dataclass(frozen=True)
class Deadly(ImageRef):
    """An image that kills the process that decodes it, as a decoder with a bug or the OOM killer would."""

    in_processes: ClassVar[bool] = True

    path: str

    def read(self) -> bytes:
        os.kill(os.getpid(), signal.SIGKILL)
        return b""

    def __str__(self) -> str:
        return self.path


def test_image_that_kills_its_process_is_named(refs: list[ImageRef]) -> None:
    items = [*refs[:5], Deadly("deadly.jpg"), *refs[8:12]]
    warnings: list[str] = []
    work = decoding.DecodeSquare(SIDE, "shortest")
    with DecodePool(work, 1, 60.0, on_restart=warnings.append) as pool:
        pool.submit(0, items, range(len(items)))
        with pytest.raises(
            UserError, match=r"deadly\.jpg: 5 processes that decoded it were killed"
        ):
            pool.next_done()
    assert "or one of the next 9" in warnings[0]


@dataclass(frozen=True)
class Hanging(ImageRef):
    in_processes: ClassVar[bool] = True

    def read(self) -> bytes:
        time.sleep(60)
        return b""

    def __str__(self) -> str:
        return "hanging.jpg"


class HangingInThread(ImageRef):
    def __init__(self) -> None:
        self.released = threading.Event()

    def read(self) -> bytes:
        hang(self.released)
        raise OSError("released")


def test_images_before_and_after_a_hanging_read_are_decoded(
    refs: list[ImageRef], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the process that decodes; here, in a thread."""
    replace_clock_of_reads(monkeypatch)
    lost = HangingInThread()
    job = Job(decoding.DecodeSquare(SIDE, "shortest"), HANGS, -1, 0)
    done = answer(job, Block(3, [refs[0], lost, refs[1]], range(3)))
    lost.released.set()
    assert (done.number, done.results, done.error) == (3, [None, Late(HANGS), None], None)


def test_hanging_read_is_reported() -> None:
    work = decoding.DecodeSquare(SIDE, "shortest")
    with DecodePool(work, 1, HANGS) as pool:
        pool.submit(0, [Hanging()], range(1))
        assert pool.next_done() == (0, [Late(HANGS)])
    with pytest.raises(UserError, match=r"hanging\.jpg: the read did not finish.*still connected"):
        list(
            decoding.decode_images(
                [Hanging()], SIDE, "shortest", {}, decoding.DecodeMethod(processes=1, timeout=HANGS)
            )
        )


@dataclass(frozen=True)
class OnFullDisk:
    """Work whose write fails, as `write_at` does on a full disk."""

    side: int
    resize: str

    def __call__(self, ref: ImageRef) -> tuple[np.ndarray | None, str | None]:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.usefixtures("always_processes")
def test_full_disk_found_by_a_process_is_a_one_line_error(
    tmp_path: Path, refs: list[ImageRef], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoding, "DecodeSquare", OnFullDisk)
    with pytest.raises(UserError, match=r"the disk is full.*run again to continue"):
        fill_cache(tmp_path, refs, processes=2)


def test_process_that_cannot_start_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_pool, "PROGRAM", "raise SystemExit(3)")
    attempts: list[str] = []
    work = decoding.DecodeSquare(SIDE, "shortest")
    with (
        DecodePool(work, 1, 60.0, on_restart=attempts.append) as pool,
        pytest.raises(UserError, match=r"cannot be started \(exit code 3\)"),
    ):
        pool.next_done()
    assert len(attempts) == decode_pool.MAX_KILLS


def test_processes_end_with_a_killed_parent(tmp_path: Path, refs: list[ImageRef]) -> None:
    program = (
        "import sys, time\n"
        "from m1clip.data.decode_pool import DecodePool\n"
        "from m1clip.data.decoding import DecodeSquare\n"
        "pool = DecodePool(DecodeSquare(8, 'shortest'), 2, 60.0)\n"
        "[pool._receive(each) for each in pool.processes]\n"  # their greetings
        "print(*[each.process.pid for each in pool.processes], flush=True)\n"
        "time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        pids = [int(word) for word in parent.stdout.readline().split()]
        processes = [psutil.Process(pid) for pid in pids]
        parent.kill()
    assert len(processes) == 2
    assert psutil.wait_procs(processes, timeout=TIMEOUT)[1] == []


def test_stopping_wakes_a_waiting_thread() -> None:
    caught: list[BaseException] = []
    pool = DecodePool(decoding.DecodeSquare(SIDE, "shortest"), 1, 60.0)

    def wait() -> None:
        try:
            pool.next_done()
        except decode_pool.PoolStopped as error:
            caught.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    pool.stop()
    thread.join()
    pool.close()
    assert len(caught) == 1


def test_shared_rows_have_no_name() -> None:
    shared = SharedRows(3, (2, 2), np.uint8)
    decode_worker.write_at(shared.file, np.full(4, 9, np.uint8).data, 4)
    shared.close()
    assert shared.array[:, 0, 0].tolist() == [0, 9, 0]


@pytest.mark.skipif(_simplejpeg() is None, reason="simplejpeg is not installed")
@pytest.mark.parametrize("kind", ["4:4:4", "4:2:0", "gray", "progressive", "rotated", "large"])
def test_simplejpeg_decodes_the_pixels_of_pillow(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both are libjpeg-turbo with the same settings: the difference is 0."""
    rng = np.random.default_rng(0)
    coarse = Image.fromarray(rng.integers(0, 256, (12, 16, 3), np.uint8))
    size = (1300, 900) if kind == "large" else (211, 157)
    image = coarse.resize(size, Image.Resampling.BICUBIC)
    options = {"quality": 85, "subsampling": 0 if kind == "4:4:4" else 2}
    if kind == "gray":
        image, options = image.convert("L"), {"quality": 85}
    if kind == "rotated":
        exif = Image.Exif()
        exif[0x0112] = 6
        options["exif"] = exif
    path = tmp_path / "image.jpg"
    image.save(path, progressive=kind == "progressive", **options)
    fast = decode(str(path), 112)
    assert np.array_equal(np.asarray(decode(path.read_bytes(), 112)), np.asarray(fast))
    monkeypatch.setattr("m1clip.data.images._simplejpeg", lambda: None)
    slow = decode(str(path), 112)
    assert fast.size == slow.size
    assert (fast.height > fast.width) == (kind == "rotated")
    assert np.array_equal(np.asarray(fast), np.asarray(slow))
    assert np.array_equal(to_square(fast, 112), to_square(slow, 112))
