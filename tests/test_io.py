"""Atomic files and folders, bounded reads."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from m1clip.io import (
    atomic_folder,
    read_small,
    remove_folder,
    remove_leftovers,
    restore_folders,
    write_json,
    write_text,
)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_write_text_replaces_file_and_leaves_no_temporary_file(tmp_path: Path) -> None:
    path = tmp_path / "new" / "a.txt"
    write_text(path, "old")
    write_text(path, "grün")
    assert path.read_text(encoding="utf-8") == "grün"
    write_json(tmp_path / "new" / "b.json", {"ü": [1]})
    assert json.loads((tmp_path / "new" / "b.json").read_text(encoding="utf-8")) == {"ü": [1]}
    assert names(tmp_path / "new") == ["a.txt", "b.json"]


def test_reader_never_sees_a_partial_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_text(tmp_path / "a.txt", "old")
    monkeypatch.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(OSError("power cut")))
    with pytest.raises(OSError, match="power cut"):
        write_text(tmp_path / "a.txt", "new")
    assert (tmp_path / "a.txt").read_text() == "old"


def test_only_a_regular_file_is_replaced(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path, Path("/")):
        with pytest.raises(OSError, match="exists and is not a regular file"):
            write_text(path, "x")
    assert (tmp_path / "pipe").is_fifo()


def test_atomic_folder_appears_complete(tmp_path: Path) -> None:
    target = tmp_path / "model"
    with atomic_folder(target) as folder:
        (folder / "a").write_text("1")
        assert not target.exists()
        assert folder.name.endswith(".partial")
    assert names(target) == ["a"]
    with atomic_folder(target) as folder:
        (folder / "b").write_text("2")
        assert names(target) == ["a"]
    assert names(target) == ["b"]
    assert names(tmp_path) == ["model"]


@pytest.mark.parametrize("error", [OSError("disk full"), KeyboardInterrupt()])
def test_failed_atomic_folder_keeps_old_folder(tmp_path: Path, error: BaseException) -> None:
    target = tmp_path / "model"
    with atomic_folder(target) as folder:
        (folder / "a").write_text("1")

    def fail() -> None:
        with atomic_folder(target) as folder:
            (folder / "b").write_text("2")
            raise error

    with pytest.raises(type(error)):
        fail()
    assert names(target) == ["a"]
    assert names(tmp_path) == ["model"]


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
    assert sorted(remove_leftovers(tmp_path)) == ["best.12.partial", "model.old.partial", "run.json.12.partial"]
    assert names(tmp_path) == ["best", "kept", "model"]
    assert (tmp_path / "best" / "weights").read_text() == "old"
    assert (tmp_path / "model" / "weights").read_text() == "new"


def test_kill_during_folder_replacement_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made(tmp_path / "best", "old")
    rename = Path.rename

    def killed(self: Path, target: Path) -> Path:
        if target.name == "best":
            raise KeyboardInterrupt
        return rename(self, target)

    def save() -> None:
        with atomic_folder(tmp_path / "best") as folder:
            (folder / "weights").write_text("new")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", killed)
        for _ in range(2):  # the second save, too, must keep the only complete copy
            with pytest.raises(KeyboardInterrupt):
                save()
    remove_leftovers(tmp_path)
    assert names(tmp_path) == ["best"]
    assert (tmp_path / "best" / "weights").read_text() == "old"


def test_remove_folder_renames_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made(tmp_path / "step", "old")
    with monkeypatch.context() as patch:
        patch.setattr("shutil.rmtree", lambda *_, **__: None)  # killed in the middle
        remove_folder(tmp_path / "step")
    assert names(tmp_path) == [f"step.{os.getpid()}.partial"]
    remove_leftovers(tmp_path)
    assert names(tmp_path) == []


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
    with pytest.raises(OSError, match="symbolic links"):
        read_small(run / "loop", inside=run)
