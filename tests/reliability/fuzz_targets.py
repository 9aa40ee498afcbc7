"""What is fuzzed: every reader of untrusted files, with valid files to start from."""

from __future__ import annotations

import contextlib
import io
import json
import tarfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pyarrow.parquet
import torch
from PIL import Image
from safetensors.torch import save as safetensors_bytes

from m1clip.config import Config, load_config, to_toml
from m1clip.data.images import BadImage, Preprocess, decode
from m1clip.data.sources import open_source
from m1clip.errors import UserError
from m1clip.io import read_owner
from m1clip.model.folder import _read_config
from m1clip.model.presets import preset
from m1clip.model.weights import read_tensors
from m1clip.runlog import NAME, read_log
from m1clip.text.base import Tokenizer
from m1clip.text.bpe import BpeTokenizer
from m1clip.text.tokenizers import CharTokenizer, load_tokenizer, wordpiece_tokenizer
from m1clip.training.checkpoint import TrainState, load_latest, save, sha256, verify

ALLOWED = (UserError, BadImage)  # a one-line error; an image that is skipped and logged


@dataclass(frozen=True)
class Target:
    """A reader, where it expects its file, and valid files."""

    file: str
    seeds: tuple[bytes, ...]
    read: Callable[[Path], object]  # given the folder
    fraction: float = 1.0  # of the changed files: slow readers get fewer


def _read_source(name: str) -> Callable[[Path], object]:
    def read(folder: Path) -> object:
        source = open_source(str(folder / name))
        for split in source.splits():
            for sample in source.samples(split):
                assert sample.captions
                assert all(text.strip() and text.encode("utf-8") for text in sample.captions)
                assert all(map(str.isprintable, (str(sample.image), source.origin(sample.id))))
                assert sample.image.stamp()
        assert all(str(problem).isprintable() for problem in source.problems)
        return source

    return read


def _read_images(name: str) -> Callable[[Path], object]:
    def read(folder: Path) -> object:
        source = open_source(str(folder / name))
        for split in source.splits():
            for sample in source.samples(split):
                with contextlib.suppress(BadImage):  # skipped and logged, as in training
                    sample.image.open(16)
        return source

    return read


def images() -> tuple[bytes, ...]:
    """A small image in each format."""
    found = []
    for kind in ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF"):
        file = io.BytesIO()
        Image.linear_gradient("L").resize((20, 12)).convert("RGB").save(file, kind)
        found.append(file.getvalue())
    return tuple(found)


def shard() -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for number in range(2):
            for suffix, data in (
                ("jpg", images()[0]),
                ("txt", b"a dog"),
                ("json", b'{"captions": ["a", "b"]}'),
            ):
                member = tarfile.TarInfo(
                    f"{'long' * 30}{number}.{suffix}" if number else f"0.{suffix}"
                )
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
    return file.getvalue()


def parquet() -> bytes:
    file = io.BytesIO()
    table = pyarrow.table(
        {"image": ["a.jpg", "b.jpg"], "caption": ["a dog", "a cat"], "split": ["train", "val"]}
    )
    pyarrow.parquet.write_table(table, file)
    return file.getvalue()


def saved(tokenizer: Tokenizer, folder: Path) -> bytes:
    tokenizer.save(folder)
    return (folder / "tokenizer.json").read_bytes()


def targets(folder: Path) -> dict[str, Target]:
    """All readers; other files that they need are written to the folder."""
    save(
        folder,
        TrainState(step=7),
        {"weights": {"a": torch.ones(3)}, "optimizer": {"m": torch.ones(3)}},
        keep=1,
    )
    checkpoint = folder / "checkpoints" / "step-000007"
    manifest, state = ((checkpoint / name).read_bytes() for name in ("manifest.json", "state.json"))
    weights = safetensors_bytes({"a": torch.ones(3), "b.c": torch.zeros(2, 2).bfloat16()})
    table = b'image,caption,split\na.jpg,a dog,train\nb.jpg,"a cat, sat",val\nc.jpg,fish,test\n'
    rows = b'{"image": "a.jpg", "captions": ["a dog", "the dog"], "split": "train"}\n{"image":"b.jpg","caption":"x"}\n'
    coco = json.dumps(
        {
            "images": [{"id": 1, "file_name": "a.jpg"}],
            "annotations": [{"image_id": 1, "id": 2, "caption": "x"}],
        }
    )
    karpathy = json.dumps(
        {
            "images": [{"filename": "a.jpg", "split": "train", "sentences": [{"raw": "x"}]}],
            "dataset": "d",
        }
    )
    listed = json.dumps([{"image": "a.jpg", "caption": "x"}, {"image": "b.jpg", "caption": ["y"]}])
    log = b'{"v":1,"kind":"step","time":1.5,"step":10,"loss":2.0}\n{"v":1,"kind":"eval","step":10,"x":[1,2]}\n'
    shape = preset("tiny")
    model = {
        "format": 1,
        "model": shape.to_dict(),
        "preprocess": Preprocess(image_size=shape.image_size).to_dict(),
    }
    wordpiece = wordpiece_tokenizer(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "a", "##b"])
    tokenizers = tuple(saved(each, folder) for each in (CharTokenizer("abc .,"), wordpiece))
    cut = saved(BpeTokenizer([512, 600, 700]), folder)
    toml = to_toml(Config()).encode()
    short = b'seed = 3\n[model]\nname = "tiny"\n[train]\nsteps = 5\nbatch_size = 16\n[data]\nsource = ["a", "b:0.5"]\n'
    return {
        "config": Target(
            "config.toml", (short, short, toml), lambda f: load_config(f / "config.toml"), 1.5
        ),
        "run log": Target(NAME, (log,), lambda f: list(read_log(f)), 2.0),
        "manifest": Target(
            "checkpoints/step-000007/manifest.json", (manifest,), lambda f: verify(checkpoint), 1.5
        ),
        "state": Target("checkpoints/step-000007/state.json", (state,), _resumed, 0.2),
        "tokenizers": Target("tokenizer.json", tokenizers, load_tokenizer, 1.5),
        "clip-bpe-pruned": Target("tokenizer.json", (cut,), load_tokenizer, 0.02),
        "model config": Target(
            "config.json", (json.dumps(model).encode(),), lambda f: _read_config(f / "config.json")
        ),
        "weights": Target(
            "w.safetensors", (weights,), lambda f: read_tensors(f / "w.safetensors"), 0.5
        ),
        "lock": Target("run.lock", (b"77\nhost\n1700000000.5\n",), _owner, 0.3),
        "csv": Target("t.csv", (table,), _read_source("t.csv")),
        "tsv": Target("t.tsv", (table.replace(b",", b"\t"),), _read_source("t.tsv"), 0.5),
        "jsonl": Target("t.jsonl", (rows,), _read_source("t.jsonl")),
        "json": Target(
            "t.json", (coco.encode(), karpathy.encode(), listed.encode()), _read_source("t.json")
        ),
        "tar": Target("t.tar", (shard(),), _read_images("t.tar"), 0.3),
        "images": Target("t.bin", images(), lambda f: decode(f / "t.bin", 16), 1.0),
        "parquet": Target("t.parquet", (parquet(),), _read_source("t.parquet"), 0.1),
    }


def _resumed(folder: Path) -> object:
    """A changed state with a matching hash."""
    place = folder / "checkpoints" / "step-000007"
    manifest = json.loads((place / "manifest.json").read_text())
    manifest["sha256"]["state.json"] = sha256(place / "state.json")
    (place / "manifest.json").write_text(json.dumps(manifest))
    return load_latest(folder, torch.device("cpu"), lambda line: None)


def _owner(folder: Path) -> object:
    owner = read_owner(folder)
    return owner.process() if owner is not None else None
