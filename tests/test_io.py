"""Atomic files and folders, bounded reads."""

import errno
import json
import os
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from m1clip import io
from m1clip.errors import UserError
from m1clip.io import (
    Owner,
    atomic_folder,
    first_writable,
    lock_content,
    process_start_id,
    read_owner,
    read_small,
    remove_leftovers,
    remove_leftovers_of,
    restore_folders,
    write_json,
    write_text,
)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("link", [os.symlink, os.link])
def test_temporary_file_that_is_a_link_is_not_written_through(
    tmp_path: Path, link: Callable[[Path, Path], None]
) -> None:
    precious = tmp_path / "precious"
    precious.write_text("precious")
    folder = tmp_path / "folder"
    folder.mkdir()
    names_before = (f"a.txt.{os.getpid()}", f"a.txt.{os.getpid()}-{threading.get_ident()}")
    for name in names_before:
        link(precious, folder / f"{name}{io.PARTIAL}")
    write_text(folder / "a.txt", "new")
    assert (folder / "a.txt").read_text() == "new"
    assert precious.read_text() == "precious"


def test_full_disk_is_reported_with_the_name_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)) as error:
        write_text(tmp_path / "a.txt", "new")
    assert error.value.filename == str(tmp_path / "a.txt")
    assert names(tmp_path) == []


def test_write_text_replaces_file_and_leaves_no_temporary_file(tmp_path: Path) -> None:
    path = tmp_path / "new" / "a.txt"
    write_text(path, "old")
    write_text(path, "grün")
    assert path.read_text(encoding="utf-8") == "grün"
    write_json(tmp_path / "new" / "b.json", {"ü": [1]})
    assert json.loads((tmp_path / "new" / "b.json").read_text(encoding="utf-8")) == {"ü": [1]}
    assert names(tmp_path / "new") == ["a.txt", "b.json"]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(errno.ENOSPC, "disk full")])
def test_interrupted_write_keeps_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    write_text(tmp_path / "a.txt", "old")

    def interrupt(handle: int) -> None:
        raise error

    monkeypatch.setattr(io.os, "fsync", interrupt)
    with pytest.raises(type(error)) as caught:
        write_text(tmp_path / "a.txt", "new")
    assert caught.value is error
    assert names(tmp_path) == ["a.txt"]
    assert (tmp_path / "a.txt").read_text() == "old"


def test_folder_is_on_the_disk_before_it_gets_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Contents, then the folder's list of files, then its name in the folder around it."""
    events: list[str] = []
    fsync, rename = os.fsync, Path.rename

    def record_sync(handle: int) -> None:
        events.append(f"sync {Path(os.readlink(f'/proc/self/fd/{handle}')).name}")
        fsync(handle)

    def record_rename(path: Path, target: Path) -> Path:
        events.append(f"rename to {target.name}")
        return rename(path, target)

    if not Path("/proc/self/fd").exists():
        pytest.skip("this system does not name the files of a process")
    monkeypatch.setattr(io.os, "fsync", record_sync)
    monkeypatch.setattr(Path, "rename", record_rename)
    with io.atomic_folder(tmp_path / "model") as temporary:
        (temporary / "weights").write_text("new")
    assert events == [
        "sync weights",
        f"sync {temporary.name}",
        "rename to model",
        f"sync {tmp_path.name}",
    ]


def test_only_a_regular_file_is_replaced(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path, Path("/")):
        with pytest.raises(OSError, match="exists and is not a regular file"):
            write_text(path, "x")
    assert (tmp_path / "pipe").is_fifo()


def made(folder: Path, text: str) -> None:
    folder.mkdir(parents=True)
    (folder / "weights").write_text(text)


def test_restore_folders_after_kill(tmp_path: Path) -> None:
    made(tmp_path / "best.old.partial", "old")  # killed between the two moves
    made(tmp_path / "best.12.partial", "new")
    made(tmp_path / "model", "new")  # killed after both
    made(tmp_path / "model.old.partial", "old")
    (tmp_path / "run.json.12.partial").write_text("half")
    (tmp_path / "kept").write_text("complete")
    assert restore_folders(tmp_path) == ["best"]
    assert restore_folders(tmp_path) == remove_leftovers(tmp_path / "nowhere") == []
    assert sorted(remove_leftovers(tmp_path)) == [
        "best.12.partial",
        "model.old.partial",
        "run.json.12.partial",
    ]
    assert names(tmp_path) == ["best", "kept", "model"]
    assert (tmp_path / "best" / "weights").read_text() == "old"
    assert (tmp_path / "model" / "weights").read_text() == "new"


def test_leftovers_of_killed_processes_are_removed_and_nothing_else(tmp_path: Path) -> None:
    dead = 2**22 + 1  # above the largest process id
    others = [
        f"a.txt.{os.getpid()}-1.partial",  # of a process that writes now
        f"b.txt.{dead}-1.partial",
        f"a.txt.{dead}-1.partial.txt",
        "a.txt.partial",  # of another program, such as a download
        "a.txt.x-1.partial",
        f"a.txt.{'9' * 30}.partial",
    ]
    for name in (*others, f"a.txt.{dead}-1.partial"):
        (tmp_path / name).touch()
    (tmp_path / f"a.txt.{dead}.partial" / "inner").mkdir(parents=True)
    (tmp_path / f"a.txt.{dead}-2.partial").symlink_to(tmp_path)
    remove_leftovers_of(tmp_path / "a.txt")
    assert names(tmp_path) == sorted(others)
    remove_leftovers_of(tmp_path / "missing" / "a.txt")


def test_full_disk_is_reported_with_the_folder_and_not_a_temporary_name(tmp_path: Path) -> None:
    target = tmp_path / "out"

    def write(inner: str | None) -> None:
        with atomic_folder(target) as partial:
            full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            full.filename = None if inner is None else str(partial / inner)
            raise full

    for inner, filename in ((None, target), ("weights", target / "weights")):
        with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)) as error:
            write(inner)
        assert error.value.filename == str(filename)
    assert names(tmp_path) == []


def test_folder_that_replaces_another_removes_what_a_killed_process_left(tmp_path: Path) -> None:
    """An exported model may take gigabytes."""
    (tmp_path / f"out.{2**22 + 1}.partial").mkdir()
    with atomic_folder(tmp_path / "out") as folder:
        (folder / "a").touch()
    assert names(tmp_path) == ["out"]


def test_read_small_reads_only_regular_files_of_bounded_size(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"12345")
    assert read_small(tmp_path / "a", 5) == b"12345"
    with pytest.raises(OSError, match="larger than 4 bytes"):
        read_small(tmp_path / "a", 4)
    with (tmp_path / "huge").open("wb") as file:
        file.truncate(2**40)  # sparse: reading it all would end the process
    with pytest.raises(OSError, match="larger than 4,194,304 bytes"):
        read_small(tmp_path / "huge")
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(OSError, match="not a regular file"):
            read_small(path)
    with pytest.raises(IsADirectoryError):
        read_small(tmp_path)
    with pytest.raises(FileNotFoundError):
        read_small(tmp_path / "nowhere")


def test_read_small_rejects_link_out_of_folder(tmp_path: Path) -> None:
    made(tmp_path / "run", "own")
    made(tmp_path / "elsewhere", "secret")
    (tmp_path / "run" / "file").symlink_to("../elsewhere/weights")
    (tmp_path / "run" / "folder").symlink_to("../elsewhere")
    (tmp_path / "run" / "near").symlink_to("weights")
    run = tmp_path / "run"
    for name in ("file", "folder/weights", "../elsewhere/weights"):
        assert read_small(run / name) == b"secret"
        with pytest.raises(OSError, match="a link out of"):
            read_small(run / name, inside=run)
    assert read_small(run / "near", inside=run) == b"own"
    (run / "loop").symlink_to("loop")
    with pytest.raises(OSError, match="a link in"):
        read_small(run / "loop", inside=run)


def test_process_start_id_is_the_tick_at_which_it_started() -> None:
    start_id = process_start_id(psutil.Process())
    if " " not in start_id:
        pytest.skip("this system measures the start of a process by the clock only")
    boot = next(
        int(line.split()[1])
        for line in Path("/proc/stat").read_text().splitlines()
        if "btime" in line
    )
    started = boot + int(start_id.split()[1]) / os.sysconf("SC_CLK_TCK")
    assert started == pytest.approx(psutil.Process().create_time(), abs=2)


def test_owner_is_this_process_only_with_its_host_and_start(tmp_path: Path) -> None:
    pid, host, start_id = lock_content().splitlines()
    assert Owner(int(pid), host, start_id).process() is not None
    assert Owner(int(pid), host, f"{start_id}0").process() is None
    assert Owner(int(pid), "elsewhere", start_id).process() is None
    assert read_owner(tmp_path) is None


def test_first_writable_folder_is_tried_by_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    read_only, writable = tmp_path / "read-only", tmp_path / "new" / "folder"
    create = tempfile.TemporaryFile

    def refuse(dir: Path) -> Any:  # as a read-only file system does, also to root
        if dir == read_only:
            raise OSError(errno.EROFS, "Read-only file system")
        return create(dir=dir)

    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    assert (
        first_writable([tmp_path / "file", read_only, writable, tmp_path], "the cache", "set X")
        == writable
    )
    with pytest.raises(UserError, match="Read-only file system"):
        first_writable([read_only], "the cache", "set X")


def test_user_cache_of_each_system(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(io.sys, "platform", "darwin")
    assert io.user_cache() == Path.home() / "Library/Caches/m1clip"
    monkeypatch.setattr(io.sys, "platform", "linux")
    assert io.user_cache() == Path.home() / ".cache/m1clip"


@pytest.fixture(params=[True, False], ids=["descriptors", "compared"])
def beneath(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways to open a file below a folder: the second is for systems without folder descriptors."""
    monkeypatch.setattr(io, "CAN_OPEN_BENEATH", request.param)


@pytest.mark.usefixtures("beneath")
def test_files_beneath_a_folder_are_never_reached_through_links(tmp_path: Path) -> None:
    folder, outside = tmp_path / "folder", tmp_path / "outside"
    made(folder, "own")
    io.write_beneath(folder, "a/b/file", b"inside")
    assert (folder / "a/b/file").read_bytes() == io.read_beneath(folder, "a/b/file") == b"inside"
    made(outside, "secret")
    (folder / "linked").symlink_to(outside)
    (folder / "file").symlink_to(outside / "weights")
    (folder / "new").symlink_to(outside / "new")
    os.mkfifo(folder / "pipe")
    for name in (
        "linked/weights",
        "file",
        "new",
        "../outside/weights",
        str(outside / "weights"),
        "a//b",
        "",
        "pipe",
    ):
        with pytest.raises(
            OSError, match=r"a link in|not a path inside|not a regular file|Not a directory"
        ):
            io.read_beneath(folder, name)
    for name in ("linked/new", "linked/weights", "../outside/new", str(outside / "new")):
        with pytest.raises(OSError, match=r"a link in|not a path inside"):
            io.write_beneath(folder, name, b"overwritten")
    with pytest.raises(OSError, match="a link in"):
        io.open_beneath(folder, "file", os.O_WRONLY | os.O_CREAT)
    # The link itself is replaced, not what it points to.
    io.write_beneath(folder, "file", b"replaced")
    assert {path.name: path.read_text() for path in outside.iterdir()} == {"weights": "secret"}
    assert not list(folder.rglob(f"*{io.PARTIAL}"))
    io.unlink_beneath(folder, "a/b/file")
    io.unlink_beneath(folder, "a/b/file")
    assert not (folder / "a/b/file").exists()


@pytest.mark.usefixtures("beneath")
@pytest.mark.parametrize("swapped", ["a", "a/weights"])
def test_file_replaced_by_a_link_after_the_check_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, swapped: str
) -> None:
    made(tmp_path / "folder/a", "own")
    made(tmp_path / "outside", "secret")
    path, original = tmp_path / "folder/a/weights", os.path.realpath

    def swap_after(name: str | Path) -> str:
        real = original(name)
        if Path(name) == path:  # checked: now it changes
            (tmp_path / "folder" / swapped).rename(tmp_path / "folder/aside")
            target = tmp_path / "outside" / ("weights" if swapped == "a/weights" else "")
            (tmp_path / "folder" / swapped).symlink_to(target)
        return real

    monkeypatch.setattr(io.os.path, "realpath", swap_after)
    with pytest.raises(OSError, match="a link in"):
        read_small(path, inside=tmp_path / "folder")
    assert path.read_text() == "secret"  # it was replaced


@pytest.mark.skipif(not io.CAN_OPEN_BENEATH, reason="no folder descriptors on this system")
def test_folder_replaced_by_a_link_during_a_write_is_not_written_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder becomes a link to another one, which has a file of the temporary name."""
    folder, outside = tmp_path / "folder", tmp_path / "outside"
    made(folder / "a", "own")
    made(outside, "secret")
    fdopen = os.fdopen

    def swap(handle: int, mode: str) -> Any:
        (temporary,) = (folder / "a").glob(f"*{io.PARTIAL}")
        (outside / temporary.name).write_text("not ours")
        (folder / "a").rename(folder / "aside")
        (folder / "a").symlink_to(outside)
        return fdopen(handle, mode)

    monkeypatch.setattr(io.os, "fdopen", swap)
    with pytest.raises(OSError, match="a link in"):
        io.write_beneath(folder, "a/weights", b"overwritten")
    assert (outside / "weights").read_text() == "secret"
