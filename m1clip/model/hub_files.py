"""Which files of a repository on the Hugging Face Hub make a model, and where its cache keeps them.

The layout of the cache is the one that huggingface_hub documents, so that a model which another
program has downloaded is found, and the other way round. Reads the disk alone.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Collection, Mapping
from pathlib import Path

from m1clip.io import read_small

# Such as openai/clip-vit-base-patch32.
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
HUB_PREFIX = "hf-hub:"  # as open_clip and timm write it
MAIN = "main"  # the branch that a name means
COMMIT = re.compile(r"[0-9a-f]{40}")
OPENCLIP_CONFIG = "open_clip_config.json"
MODEL_CONFIG = "config.json"  # of transformers, timm and m1clip
# The first that exists is used: safetensors cannot contain code.
OPENCLIP_WEIGHTS = ("open_clip_model.safetensors", "open_clip_pytorch_model.bin")
HF_WEIGHTS = ("model.safetensors", "pytorch_model.bin")
# Files next to the weights that a loader may read: preprocessing, and tokenizers of all kinds.
COMPANIONS = (
    *("preprocessor_config.json", "processor_config.json", "preprocess.json"),
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "vocab.txt", "merges.txt"),
    *("spiece.model", "sentencepiece.bpe.model", "tokenizer.model"),
)


def model_files(names: Collection[str]) -> list[str]:
    """Select the files of a repository to download; [] if it has no model that m1clip can read.

    An open_clip model is preferred where a repository has both: it has the preprocessing too.
    """
    for config, weights in ((OPENCLIP_CONFIG, OPENCLIP_WEIGHTS), (MODEL_CONFIG, HF_WEIGHTS)):
        available = [name for name in weights if name in names]
        if config in names and available:
            companions = [name for name in COMPANIONS if name in names]
            # transformers' tokenizers read their class from the config.json of an open_clip text
            # tower.
            others = [MODEL_CONFIG] if config != MODEL_CONFIG and MODEL_CONFIG in names else []
            return [config, *others, *companions, available[0]]
    return []


def cache_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """The folder of the Hugging Face cache, by the variables that huggingface_hub reads."""

    def variable(name: str) -> str | None:
        value = environment.get(name)
        return os.path.expandvars(os.path.expanduser(value)) if value else None

    cache = variable("HF_HUB_CACHE") or variable("HUGGINGFACE_HUB_CACHE")
    if cache:
        return Path(cache)
    home = variable("HF_HOME")
    if home:
        return Path(home) / "hub"
    return Path(variable("XDG_CACHE_HOME") or Path.home() / ".cache") / "huggingface" / "hub"


def repository_folder(repository: str) -> Path:
    """Where the cache keeps a repository, which need not exist."""
    return cache_folder() / f"models--{repository.replace('/', '--')}"


def cached_snapshot(repository: str) -> Path | None:
    """The folder with the files of a model in the cache, or None if they are not complete there.

    That of the branch main, or else the newest one with a model.
    """
    folder = repository_folder(repository)
    commits = []
    # Not there if it was downloaded by the hash of a commit.
    with contextlib.suppress(OSError, UnicodeDecodeError):
        commits.append(read_small(folder / "refs" / MAIN, 100).decode("ascii").strip())
    snapshots = folder / "snapshots"
    try:
        others = sorted(snapshots.iterdir(), key=lambda path: path.stat().st_mtime, reverse=True)
    except OSError:
        others = []
    commits += [path.name for path in others]
    for commit in commits:
        if COMMIT.fullmatch(commit) and is_complete(snapshots / commit):
            return snapshots / commit
    return None


def is_complete(folder: Path) -> bool:
    """Whether a folder contains a config and weights.

    A link to a file that is gone does not count.
    """
    try:
        names = {path.name for path in folder.iterdir() if path.is_file()}
    except OSError:
        return False
    return bool(model_files(names))
