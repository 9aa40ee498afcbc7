"""Files that are either whole or not there."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PARTIAL = ".partial"  # ends the name of what is still being written
OLD = f".old{PARTIAL}"  # ends the name of a folder moved aside while another takes its place


def write_text(path: Path, text: str) -> None:
    """Replace a file in one move: a reader sees the old text or the new, never half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}{PARTIAL}")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    sync_folder(path.parent)


def write_json(path: Path, value: Any) -> None:
    """The same for a JSON value."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


@contextlib.contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """Fill the folder given; when the block ends well it takes the place of `path` in one move."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}{PARTIAL}")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        yield temporary
        for file in temporary.iterdir():
            with file.open("rb") as handle:
                os.fsync(handle.fileno())
        sync_folder(temporary)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    old = path.with_name(f"{path.name}{OLD}")
    if path.exists():
        shutil.rmtree(old, ignore_errors=True)
        path.rename(old)  # a kill after this line: `restore` brings it back
    temporary.rename(path)
    sync_folder(path.parent)
    shutil.rmtree(old, ignore_errors=True)


def sync_folder(path: Path) -> None:
    """Make a rename in this folder survive a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def restore(folder: Path) -> list[str]:
    """Where a kill fell between the two moves of `whole_folder`, put the old folder back; gives its name."""
    names = []
    for old in sorted(folder.glob(f"*{OLD}")) if folder.is_dir() else ():
        target = old.with_name(old.name.removesuffix(OLD))
        if not target.exists():
            old.rename(target)
            names.append(target.name)
    if names:
        sync_folder(folder)
    return names


def remove_leftovers(folder: Path) -> list[str]:
    """Bring back what a killed process had moved aside, delete what it was writing; names what is deleted."""
    restore(folder)
    names = []
    for item in folder.glob(f"*{PARTIAL}") if folder.is_dir() else ():
        names.append(item.name)
        if item.is_dir():
            shutil.rmtree(item, ignore_errors=True)
        else:
            item.unlink(missing_ok=True)
    return names
