"""The models of an index: which one makes its vectors, and whether its files have changed."""

from __future__ import annotations

import hashlib
import os
import sqlite3
import time
from pathlib import Path

from m1clip.errors import UserError
from m1clip.model.named import BOXED, boxed_name, default_model, model_name, require_towers, resolve

# One of these is in every model folder.
MODEL_FILES = ("config.json", "open_clip_config.json", "preprocess.json")


def model_stamp(path: str | Path) -> str:
    """Names, sizes and times of a model's files: unchanged files are not hashed again."""
    stats = [(name, os.stat(name)) for name in _model_files(path)]
    return ";".join(
        f"{os.path.basename(name)}|{stat.st_size}|{stat.st_mtime_ns}" for name, stat in stats
    )


def model_hash(path: str | Path) -> str:
    """The sha256 of the hashes of a model's files."""
    digest = hashlib.sha256()
    for name in _model_files(path):
        with open(name, "rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def _model_files(path: str | Path) -> list[str]:
    name = boxed_name(path)
    path = BOXED[name].folder if name is not None else resolve(path)
    if os.path.isfile(path):
        return [str(path)]
    # Of a model folder only: the index of a stranger may name any folder of the disk.
    if any((Path(path) / name).is_file() for name in MODEL_FILES):
        return sorted(str(file) for file in Path(path).rglob("[!.]*") if file.is_file())
    raise UserError(
        f"{path}: the model is no longer there; give another with --model, and index again"
    )


def resolve_model(model: str | Path) -> str:
    """The name of a model, or the absolute path of a model folder or file: best/ or model/ of a
    run.
    """
    name = model_name(model)
    if name in BOXED:
        require_towers(name)
        return name
    if name is not None:
        resolve(name)
        return name  # not the folder of one version: a newer one may be downloaded
    for folder in (Path(model), Path(model) / "best", Path(model) / "model"):
        if folder.is_file() or any((folder / name).is_file() for name in MODEL_FILES):
            return os.path.abspath(folder)
    raise UserError(f"{model}: no model found; give a run or a model folder with --model")


def choose_model(
    db: sqlite3.Connection, requested: str | None, when_done: bool = False
) -> tuple[int, str]:
    """(number of the set of vectors, path of the model), which is by default that of the last call.

    It is the one that is searched from now on, or with `when_done` from `use_model` on.
    """
    last = db.execute("SELECT path FROM models ORDER BY used DESC").fetchone()
    path = requested or (str(last[0]) if last else resolve_model(default_model()))
    stamp = model_stamp(path)
    same_files = "SELECT id FROM models WHERE path = ? AND stamp = ?"
    row = db.execute(same_files, (path, stamp)).fetchone()
    if row is None:
        digest = model_hash(path)
        db.execute("INSERT OR IGNORE INTO models (hash) VALUES (?)", (digest,))
        row = db.execute("SELECT id FROM models WHERE hash = ?", (digest,)).fetchone()
        db.execute("UPDATE models SET path = ?, stamp = ? WHERE id = ?", (path, stamp, row[0]))
    (set_id,) = row
    if not when_done:
        use_model(db, set_id)
    return set_id, path


def use_model(db: sqlite3.Connection, set_id: int) -> None:
    """Search with this model by default, although the clock was set back meanwhile."""
    last = "SELECT max(used) FROM models WHERE typeof(used) = 'real' AND id != ?2"
    latest = f"max(?1, ifnull(({last}), 0) + 1)"
    db.execute(f"UPDATE models SET used = {latest} WHERE id = ?2", (time.time(), set_id))
