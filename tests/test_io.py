"""Atomic files and folders, bounded reads."""

import json
import os
from pathlib import Path

import pytest

from m1clip import io
from m1clip.io import read_small, remove_leftovers, restore_folders, write_json, write_text


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
    assert sorted(remove_leftovers(tmp_path)) == ["best.12.partial", "model.old.partial", "run.json.12.partial"]
    assert names(tmp_path) == ["best", "kept", "model"]
    assert (tmp_path / "best" / "weights").read_text() == "old"
    assert (tmp_path / "model" / "weights").read_text() == "new"


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


def test_user_cache_of_each_system(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(io.sys, "platform", "darwin")
    assert io.user_cache() == Path.home() / "Library/Caches/m1clip"
    monkeypatch.setattr(io.sys, "platform", "linux")
    assert io.user_cache() == Path.home() / ".cache/m1clip"
