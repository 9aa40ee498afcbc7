"""Files that are either whole or not there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from m1clip.files import remove_leftovers, whole_folder, write_json, write_text


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_text_is_replaced_and_nothing_is_left_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "new" / "a.txt"
    write_text(path, "old")
    write_text(path, "grün")
    assert path.read_text(encoding="utf-8") == "grün"
    write_json(tmp_path / "new" / "b.json", {"ü": [1]})
    assert json.loads((tmp_path / "new" / "b.json").read_text(encoding="utf-8")) == {"ü": [1]}
    assert names(tmp_path / "new") == ["a.txt", "b.json"]


def test_a_reader_never_sees_half_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_text(tmp_path / "a.txt", "old")
    monkeypatch.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(OSError("power cut")))
    with pytest.raises(OSError, match="power cut"):
        write_text(tmp_path / "a.txt", "new")
    assert (tmp_path / "a.txt").read_text() == "old"


def test_a_folder_appears_whole(tmp_path: Path) -> None:
    target = tmp_path / "model"
    with whole_folder(target) as folder:
        (folder / "a").write_text("1")
        assert not target.exists()
        assert folder.name.endswith(".partial")
    assert names(target) == ["a"]
    with whole_folder(target) as folder:
        (folder / "b").write_text("2")
        assert names(target) == ["a"]
    assert names(target) == ["b"]
    assert names(tmp_path) == ["model"]


@pytest.mark.parametrize("error", [OSError("disk full"), KeyboardInterrupt()])
def test_a_failure_leaves_the_old_folder_and_nothing_else(tmp_path: Path, error: BaseException) -> None:
    target = tmp_path / "model"
    with whole_folder(target) as folder:
        (folder / "a").write_text("1")

    def fail() -> None:
        with whole_folder(target) as folder:
            (folder / "b").write_text("2")
            raise error

    with pytest.raises(type(error)):
        fail()
    assert names(target) == ["a"]
    assert names(tmp_path) == ["model"]


def test_leftovers_of_a_kill_are_removed_and_named(tmp_path: Path) -> None:
    (tmp_path / "a.12.partial").write_text("half")
    (tmp_path / "b.12.partial").mkdir()
    (tmp_path / "b.12.partial" / "x").write_text("half")
    (tmp_path / "kept").write_text("whole")
    assert sorted(remove_leftovers(tmp_path)) == ["a.12.partial", "b.12.partial"]
    assert names(tmp_path) == ["kept"]
    assert remove_leftovers(tmp_path / "nowhere") == []
