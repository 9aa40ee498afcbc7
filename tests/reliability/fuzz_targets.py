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
from m1clip.model.folder import _parse_config
from m1clip.model.presets import preset
from m1clip.model.weights import read_json, read_tensors
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


def _read_source(name: str, format_name: str = "") -> Callable[[Path], object]:
    """Read a file or folder as the format named by the user, or as the one that is detected."""
    prefix = f"{format_name}:" if format_name else ""

    def read(folder: Path) -> object:
        source = open_source(f"{prefix}{folder / name}")
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
    refs = []
    for kind in ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF"):
        file = io.BytesIO()
        Image.linear_gradient("L").resize((20, 12)).convert("RGB").save(file, kind)
        refs.append(file.getvalue())
    return tuple(refs)


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


TABLE = b'image,caption,split\na.jpg,a dog,train\nb.jpg,"a cat, sat",val\nc.jpg,fish,test\n'
ROWS = b"""{"image": "a.jpg", "captions": ["a dog", "the dog"], "split": "train"}
{"image":"b.jpg","caption":"x"}
"""
COCO = {
    "images": [{"id": 1, "file_name": "a.jpg"}],
    "annotations": [{"image_id": 1, "id": 2, "caption": "x"}],
}
KARPATHY = {
    "images": [{"filename": "a.jpg", "split": "train", "sentences": [{"raw": "x"}]}],
    "dataset": "d",
}
LISTED = [{"image": "a.jpg", "caption": "x"}, {"image": "b.jpg", "caption": ["y"]}]
LOG = b"""{"v":1,"kind":"step","time":1.5,"step":10,"loss":2.0}
{"v":1,"kind":"eval","step":10,"x":[1,2]}
"""
SHORT_CONFIG = b"""seed = 3
[model]
name = "tiny"
[train]
steps = 5
batch_size = 16
[data]
source = ["a", "b:0.5"]
"""


def _config(folder: Path) -> Target:
    complete = to_toml(Config()).encode()
    seeds = (SHORT_CONFIG, SHORT_CONFIG, complete)
    return Target("config.toml", seeds, lambda f: load_config(f / "config.toml"), 1.5)


def _checkpoint(folder: Path) -> Path:
    tensors = {"weights": {"a": torch.ones(3)}, "optimizer": {"m": torch.ones(3)}}
    save(folder, TrainState(step=7), tensors, keep=1)
    return folder / "checkpoints" / "step-000007"


def _manifest(folder: Path) -> Target:
    checkpoint = _checkpoint(folder)
    manifest = (checkpoint / "manifest.json").read_bytes()
    name = "checkpoints/step-000007/manifest.json"
    return Target(name, (manifest,), lambda f: verify(checkpoint), 1.5)


def _state(folder: Path) -> Target:
    state = (_checkpoint(folder) / "state.json").read_bytes()
    return Target("checkpoints/step-000007/state.json", (state,), _resumed, 0.2)


def _tokenizers(folder: Path) -> Target:
    wordpiece = wordpiece_tokenizer(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "a", "##b"])
    seeds = tuple(saved(tokenizer, folder) for tokenizer in (CharTokenizer("abc .,"), wordpiece))
    return Target("tokenizer.json", seeds, load_tokenizer, 1.5)


def _pruned_bpe(folder: Path) -> Target:
    seed = saved(BpeTokenizer([512, 600, 700]), folder)
    return Target("tokenizer.json", (seed,), load_tokenizer, 0.02)


def _model_config(folder: Path) -> Target:
    shape = preset("tiny")
    preprocess = Preprocess(image_size=shape.image_size).to_dict()
    model = {"format": 1, "model": shape.to_dict(), "preprocess": preprocess}
    seed = json.dumps(model).encode()
    return Target(
        "config.json",
        (seed,),
        lambda f: _parse_config(read_json(f / "config.json"), f / "config.json"),
    )


def _weights(folder: Path) -> Target:
    seed = safetensors_bytes({"a": torch.ones(3), "b.c": torch.zeros(2, 2).bfloat16()})
    return Target("w.safetensors", (seed,), lambda f: read_tensors(f / "w.safetensors"), 0.5)


def _json(folder: Path) -> Target:
    seeds = tuple(json.dumps(document).encode() for document in (COCO, KARPATHY, LISTED))
    return Target("t.json", seeds, _read_source("t.json"))


def _text_files(folder: Path) -> Target:
    (folder / "txt").mkdir(exist_ok=True)
    (folder / "txt" / "a.jpg").write_bytes(images()[0])
    return Target("txt/a.txt", (b"a dog\nthe dog\n", b"x"), _read_source("txt", "txt"), 0.5)


def _metadata(folder: Path) -> Target:
    """A photo with all kinds of embedded metadata."""
    (folder / "metadata").mkdir(exist_ok=True)
    xmp = (
        b'<x:xmpmeta xmlns:x="adobe:ns:meta/" '
        b'xmlns:rdf="http://www.w3.org/1999/02/22-rdf-syntax-ns#" '
        b'xmlns:dc="http://purl.org/dc/elements/1.1/"><rdf:RDF><rdf:Description>'
        b"<dc:subject><rdf:Bag><rdf:li>dog</rdf:li></rdf:Bag></dc:subject>"
        b"</rdf:Description></rdf:RDF></x:xmpmeta>"
    )
    exif = Image.Exif()
    exif[0x010E] = "a dog on a beach"
    exif[0x9C9E] = "dog;beach".encode("utf-16-le")
    seeds = []
    for options in ({"exif": exif}, {"exif": exif, "xmp": xmp}):
        file = io.BytesIO()
        Image.new("RGB", (8, 8)).save(file, "JPEG", **options)
        seeds.append(file.getvalue())
    read = _read_source("metadata")
    return Target("metadata/a.jpg", tuple(seeds), read, 0.5)


# Each reader; the other files that it needs are written to the folder.
TARGETS: dict[str, Callable[[Path], Target]] = {
    "config": _config,
    "run log": lambda folder: Target(NAME, (LOG,), lambda f: list(read_log(f)), 2.0),
    "manifest": _manifest,
    "state": _state,
    "tokenizers": _tokenizers,
    "clip-bpe-pruned": _pruned_bpe,
    "model config": _model_config,
    "weights": _weights,
    "lock": lambda folder: Target("run.lock", (b"77\nhost\n1700000000.5\n",), _owner, 0.3),
    "images": lambda folder: Target("t.bin", images(), lambda f: decode(f / "t.bin", 16), 1.0),
    # Data formats by their names.
    "webdataset": lambda folder: Target("t.tar", (shard(),), _read_images("t.tar"), 0.3),
    "csv": lambda folder: Target("t.csv", (TABLE,), _read_source("t.csv")),
    "tsv": lambda folder: Target(
        "t.tsv", (TABLE.replace(b",", b"\t"),), _read_source("t.tsv"), 0.5
    ),
    "jsonl": lambda folder: Target("t.jsonl", (ROWS,), _read_source("t.jsonl")),
    "json": _json,
    "parquet": lambda folder: Target("t.parquet", (parquet(),), _read_source("t.parquet"), 0.1),
    "txt": _text_files,
    "metadata": _metadata,
}
NOT_FUZZED = {
    "hf": "its files are read by the datasets library",
    "classes": "only names of files and folders are read",
    "filenames": "only names of files are read",
}


def _resumed(folder: Path) -> object:
    """A changed state with a matching hash."""
    checkpoint = folder / "checkpoints" / "step-000007"
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    manifest["sha256"]["state.json"] = sha256(checkpoint / "state.json")
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))
    return load_latest(folder, torch.device("cpu"))


def _owner(folder: Path) -> object:
    owner = read_owner(folder)
    return owner.process() if owner is not None else None
