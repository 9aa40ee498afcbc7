"""Promise 10: hostile files.

No code runs, nothing is written elsewhere, memory is limited, the error is one line.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import random
import shutil
import struct
import tarfile
import zlib
from pathlib import Path
from typing import Literal

import pytest
import torch
from bounded import Bomb, bounded, files_under
from image_sets import png
from PIL import Image
from small_run import finished_run, prepared, small_config
from tiny_model import tiny_clip

from m1clip.cli.main import main
from m1clip.config import is_clip, load_config
from m1clip.data.images import Preprocess, decode
from m1clip.data.sources import open_source
from m1clip.errors import UserError
from m1clip.export.layouts import convert
from m1clip.inference import load
from m1clip.inference.model import Model
from m1clip.inference.torch_encoder import TorchEncoder
from m1clip.model.folder import read_model
from m1clip.model.presets import PretrainedTextConfig
from m1clip.model.pretrained.transformers import check_settings
from m1clip.model.weights import read_checkpoint, write_tensors
from m1clip.runlog import read_log
from m1clip.text.bpe import BpeTokenizer
from m1clip.text.tokenizers import load_tokenizer
from m1clip.training.checkpoint import TrainState, load_latest, save, sha256

CPU = torch.device("cpu")
HUGE = 10**9


@pytest.fixture(scope="module")
def trained() -> Path:
    return finished_run({"train.steps": 2}) / "model"


@pytest.fixture
def model(trained: Path, tmp_path: Path) -> Path:
    """A copy of a trained model."""
    return Path(shutil.copytree(trained, tmp_path / "model"))


@pytest.fixture
def proof(tmp_path: Path) -> Path:
    """The file that a pickle would create if anything unpickled it."""
    return tmp_path / "IT-RAN"


def torch_pickled(proof: Path) -> bytes:
    file = io.BytesIO()
    torch.save({"a": Bomb(proof)}, file)
    return file.getvalue()


def with_header(header: object, size: int | None = None, data: bytes = b"") -> bytes:
    """A safetensors file; `size` is what it claims for its header."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if size is None else size) + text + data


def fakes(proof: Path) -> dict[str, bytes]:
    """Hostile files in place of weights."""
    overlapping = {name: {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} for name in "ab"}
    huge = {"a": {"dtype": "F32", "shape": [2**39], "data_offsets": [0, 2**41]}}
    return {
        "pickle": pickle.dumps(Bomb(proof)),
        "torch pickle": torch_pickled(proof),
        "header of 2 GB": with_header({"a": {}}, size=2 * 2**30),
        "tensor of 2 TB": with_header(huge),
        "overlapping tensors": with_header(overlapping, data=bytes(8)),
        "nested header": with_header(b"[" * 50),
        "deep JSON": b"[" * 2_000_000,
    }


FAKES = list(fakes(Path()))


def assert_refused(result: str, proof: Path) -> None:
    assert result.startswith("UserError"), result
    assert "\n" not in result
    assert not proof.exists(), "code from the file was run"


@pytest.mark.parametrize("fake", FAKES)
def test_hostile_weights_are_refused(model: Path, tmp_path: Path, proof: Path, fake: str) -> None:
    (model / "model.safetensors").write_bytes(fakes(proof)[fake])
    assert_refused(bounded(lambda: load(model)), proof)
    for name in ("w.safetensors", "w.pt", "w.bin"):
        (tmp_path / name).write_bytes(fakes(proof)[fake])
        assert_refused(bounded(lambda name=name: read_checkpoint(tmp_path / name)), proof)


@pytest.mark.parametrize(
    ("fake", "matching_hash"), [("pickle", False), *((fake, True) for fake in FAKES)]
)
def test_hostile_checkpoint_is_refused(
    tmp_path: Path, proof: Path, fake: str, matching_hash: bool
) -> None:
    save(
        tmp_path,
        TrainState(step=1),
        {"weights": {"a": torch.ones(3)}, "optimizer": {"m": torch.ones(3)}},
        keep=1,
    )
    folder = tmp_path / "checkpoints" / "step-000001"
    (folder / "weights.safetensors").write_bytes(fakes(proof)[fake])
    if matching_hash:
        change_json(
            folder / "manifest.json",
            (("sha256", "weights.safetensors"), sha256(folder / "weights.safetensors")),
        )
    assert_refused(bounded(lambda: load_latest(tmp_path, CPU)), proof)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
@pytest.mark.parametrize("fake", ["pickle", "deep JSON", b'{"a":' * 100_000, b"9" * 100_000])
def test_hostile_json_of_a_model_is_refused(
    model: Path, proof: Path, name: str, fake: str | bytes
) -> None:
    (model / name).write_bytes(fake if isinstance(fake, bytes) else fakes(proof)[fake])
    assert_refused(bounded(lambda: load(model)), proof)


def sparse(path: Path, size: int) -> Path:
    """Zeros that take no space on the disk."""
    path.touch()
    os.truncate(path, size)
    return path


def test_huge_json_and_toml_files_are_not_read(tmp_path: Path, proof: Path) -> None:
    config = sparse(tmp_path / "config.toml", 300 * 2**20)
    sparse(tmp_path / "tokenizer.json", 300 * 2**20)
    table = sparse(tmp_path / "a.json", 2**30 + 1)
    sparse(tmp_path / "run.jsonl", 100 * 2**20)
    assert_refused(bounded(lambda: load_tokenizer(tmp_path)), proof)
    assert_refused(bounded(lambda: load_config(config)), proof)
    assert_refused(bounded(lambda: open_source(f"json:{table}")), proof)
    assert bounded(lambda: list(read_log(tmp_path))) == "ok"


@pytest.mark.parametrize("kind", ["huge", "fifo", "device"])
def test_endless_files_are_refused(model: Path, tmp_path: Path, proof: Path, kind: str) -> None:
    """A gigabyte, a FIFO without a writer, an endless device: an error, and no wait."""

    def replace(path: Path) -> Path:
        path.unlink(missing_ok=True)
        if kind == "huge":
            sparse(path, 2**30)
        elif kind == "fifo":
            os.mkfifo(path)
        else:
            path.symlink_to("/dev/zero")
        return path

    def command(*words: str | Path) -> None:
        with contextlib.redirect_stderr(io.StringIO()) as error, pytest.raises(SystemExit) as end:
            main([str(word) for word in words])
        assert end.value.code == 2
        assert error.getvalue().count("\n") == 1
        assert Path(words[-1]).name in error.getvalue(), "not refused for another reason"

    names = replace(tmp_path / "names.txt")
    assert bounded(lambda: command("train", "--config", names)) == "ok"
    for name in ("a.csv", "b.jsonl", "c.json"):
        data = replace(tmp_path / name)
        assert bounded(lambda data=data: command("data", "lint", data)) == "ok"
    for name in ("config.json", "tokenizer.json"):
        honest = (model / name).read_bytes()
        replace(model / name)
        assert_refused(bounded(lambda: load(model)), proof)
        assert bounded(lambda: is_clip(model)) == "ok"
        (model / name).unlink()
        (model / name).write_bytes(honest)


def change_json(path: Path, *changes: tuple[tuple[str, ...], object]) -> None:
    """Set values by their path of keys."""
    values = json.loads(path.read_text())
    for keys, value in changes:
        parent = values
        for key in keys[:-1]:
            parent = parent[key]
        parent[keys[-1]] = value
    path.write_text(json.dumps(values))


SIZES = [
    *(
        ("image_tower", name)
        for name in ("image_size", "patch_size", "width", "layers", "heads", "mlp_ratio")
    ),
    *(
        ("text_tower", name)
        for name in ("width", "layers", "heads", "context_length", "vocab_size", "mlp_ratio")
    ),
    ("embed_dim",),
]


@pytest.mark.parametrize("size", SIZES, ids=".".join)
def test_sizes_in_config_json_are_checked_before_the_model_is_created(
    model: Path, proof: Path, size: tuple[str, ...]
) -> None:
    """Above all limits, or within them but different from the weights."""
    honest = (model / "config.json").read_text()
    within = {"patch_size": 1, "heads": 64, "mlp_ratio": 64}.get(size[-1], 255)
    for value in (HUGE, 10**400, within):
        (model / "config.json").write_text(honest)
        also = [(("preprocess", "image_size"), value)] if size[-1] == "image_size" else []
        change_json(model / "config.json", (("model", *size), value), *also)
        assert_refused(bounded(lambda: load(model)), proof)


@pytest.mark.parametrize("to", ["openclip", "hf"])
def test_sizes_in_third_party_configs_are_checked(
    tmp_path: Path, proof: Path, to: Literal["openclip", "hf"]
) -> None:
    tokenizer = BpeTokenizer()
    # Open_clip's heads have 64.
    widths = {"vision_width": 64, "vision_heads": 1, "text_width": 64, "text_heads": 1}
    clip = tiny_clip(**widths, vocab_size=tokenizer.vocab_size, eot_id=tokenizer.eot_id)
    Model(TorchEncoder(clip, tokenizer, Preprocess(image_size=32))).save(tmp_path / "own")
    convert(read_model(tmp_path / "own"), to, tmp_path / "theirs")
    path = tmp_path / "theirs" / ("config.json" if to == "hf" else "open_clip_config.json")
    honest = path.read_text()
    root = json.loads(honest)["model_cfg"] if to == "openclip" else json.loads(honest)
    prefix: tuple[str, ...] = ("model_cfg",) if to == "openclip" else ()
    load(tmp_path / "theirs")
    sections = ("vision_cfg", "text_cfg") if to == "openclip" else ("vision_config", "text_config")
    sizes = [
        (part, key) for part in sections for key, value in root[part].items() if type(value) is int
    ]

    def check_all() -> None:
        for part, key in sizes:
            if key == "projection_dim" or key.endswith("token_id"):
                continue  # not used
            for value in (HUGE, 0, -1, 77 * 64, None, "x", [HUGE]):
                path.write_text(honest)
                change_json(path, ((*prefix, part, key), value))
                with pytest.raises(UserError):
                    load(tmp_path / "theirs")

    assert bounded(check_all, seconds=100) == "ok"


def test_sizes_in_the_config_of_a_pretrained_tower_are_checked(proof: Path) -> None:
    weights = {f"image.model.{number}": torch.zeros(128, 64) for number in range(4)}

    def check(text: str) -> None:
        check_settings(
            PretrainedTextConfig(kind="transformers", name="bert", settings=text), weights, "x"
        )

    check(
        json.dumps(
            {"hidden_size": 128, "num_hidden_layers": 4, "image_size": 224, "eos_token_id": 50_000}
        )
    )
    for text in ("[]", "{", "", "[" * 100_000):
        assert_refused(bounded(lambda text=text: check(text)), proof)
    for config in (
        {"hidden_size": HUGE},
        {"num_hidden_layers": HUGE},
        {"depths": [2, HUGE]},
        {"image_size": HUGE},
        {"inner": {"intermediate_size": 5000}},
        {"num_labels": HUGE},
    ):
        assert_refused(bounded(lambda config=config: check(json.dumps(config))), proof)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_weights_that_are_not_finite_are_refused(
    model: Path, proof: Path, value: float, dtype: torch.dtype
) -> None:
    weights = {
        name: t.to(dtype) for name, t in read_checkpoint(model / "model.safetensors").items()
    }
    write_tensors(model / "model.safetensors", weights)
    load(model)
    weights["text_tower.tokens.weight"][3, 5] = value
    write_tensors(model / "model.safetensors", weights)
    result = bounded(lambda: load(model))
    assert_refused(result, proof)
    assert "'text_tower.tokens.weight' contains NaN or infinity" in result
    with pytest.raises(
        UserError, match=r"model.safetensors: 'text_tower.tokens.weight' contains NaN or infinity"
    ):
        prepared(small_config({"transfer.init": str(model)}))


def test_unsafe_tar_members_are_skipped(tmp_path: Path, proof: Path) -> None:
    image = io.BytesIO()
    Image.new("RGB", (8, 8)).save(image, "JPEG")
    with tarfile.open(tmp_path / "x.tar", "w") as tar:
        for name in ("../out.jpg", "/abs.jpg", "a/../../b.jpg", "C:\\x.jpg", "ok.jpg"):
            add(tar, name, image.getvalue())
            add(tar, name.replace(".jpg", ".txt"), b"a caption")
        for kind, name in (
            (tarfile.SYMTYPE, "s.jpg"),
            (tarfile.LNKTYPE, "h.jpg"),
            (tarfile.FIFOTYPE, "f.jpg"),
            (tarfile.CHRTYPE, "c.jpg"),
        ):
            member = tarfile.TarInfo(name)
            member.type, member.linkname = kind, "/etc/passwd"
            tar.addfile(member)
        add(tar, "p.jpg", pickle.dumps(Bomb(proof)))
        add(tar, "p.txt", b"not an image")
        add(tar, "q.pkl", pickle.dumps(Bomb(proof)))
    before = files_under(tmp_path)

    def read() -> None:
        source = open_source(str(tmp_path / "x.tar"))
        ids = {sample.id for split in source.splits() for sample in source.samples(split)}
        assert ids == {"x.tar/ok.jpg", "x.tar/p.jpg"}
        unsafe = [problem for problem in source.problems if problem.kind == "unsafe-member"]
        assert len(unsafe) == 12
        for split in source.splits():
            for sample in source.samples(split):
                if sample.id == "x.tar/p.jpg":
                    with pytest.raises(ValueError, match="not an image"):
                        sample.image.open()

    assert bounded(read) == "ok"
    assert files_under(tmp_path) == before
    assert not proof.exists()


def add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(data)
    tar.addfile(member, io.BytesIO(data))


def zeros(count: int) -> bytes:
    """Zeros, compressed without having all of them in memory."""
    compress, block = zlib.compressobj(1), bytes(2**24)
    return b"".join(
        [*(compress.compress(block) for _ in range(count // len(block))), compress.flush()]
    )


def bombs() -> dict[str, bytes]:
    """Small files of large images."""
    text = struct.pack(">I", 2**31 - 1) + b"iTXt"
    gif = (
        b"GIF89a"
        + struct.pack("<HH", 65535, 65535)
        + b"\x80\0\0"
        + bytes(6)
        + b",\0\0\0\0"
        + b"\xff\xff\xff\xff\0\x02\0;"
    )
    bmp = (
        b"BM"
        + struct.pack("<IHHI", 100, 0, 0, 54)
        + struct.pack("<IiiHHIIiiII", 40, 60000, 60000, 1, 24, 0, 0, 0, 0, 0, 0)
    )
    return {
        "png of 4 gigapixels": png(65535, 65535),
        "png of 100 terapixels": png(2**31 - 1, 50_000),
        "png with a text of 2 GB": png(8, 8)[:33] + text,
        "gif": gif,
        "bmp": bmp,
        "tiff": b"II*\0\x08\0\0\0\x01\0\0\x01\x04\0\xff\xff\xff\x7f\0\0\0\0",
    }


TOO_LARGE = "more than 64 megapixels; reduce its size"
BOMBS = {
    "png of 4 gigapixels": TOO_LARGE,
    "png of 100 terapixels": TOO_LARGE,
    "png with a text of 2 GB": "truncated: the file ends before the end of the image",
    "gif": TOO_LARGE,
    "bmp": TOO_LARGE,
    "tiff": "not an image in a supported format (JPEG, PNG, WebP, GIF, BMP, TIFF, HEIC, AVIF, ...)",
}


@pytest.mark.parametrize("name", BOMBS)
def test_decompression_bombs_are_refused(name: str) -> None:
    assert bounded(lambda: decode(bombs()[name], 32, "bomb")) == f"UserError: bomb: {BOMBS[name]}"


def test_data_after_the_last_pixel_is_not_decompressed() -> None:
    """25 megapixels take 75 MB; the 500 MB that follow in the same stream would not fit."""
    assert bounded(lambda: decode(png(5000, 5000, zeros(2**29)), 32, "bomb")) == "ok"


@pytest.mark.long("Hostile files")
@pytest.mark.parametrize("fake", FAKES[:5])
def test_mutated_hostile_weights(
    model: Path, proof: Path, fake: str, counts: dict[str, float]
) -> None:
    """With a few bytes changed, some are hostile in other ways."""
    original = fakes(proof)[fake]

    def read_all() -> None:
        draw = random.Random(fake)
        for _ in range(200):
            data = bytearray(original)
            for _ in range(draw.randrange(1, 4)):
                data[draw.randrange(len(data))] = draw.randrange(256)
            for name, read in (
                ("model.safetensors", lambda: load(model)),
                ("w.pt", lambda: read_checkpoint(model / "w.pt")),
            ):
                (model / name).write_bytes(data)
                with contextlib.suppress(UserError):
                    read()

    assert bounded(read_all, seconds=300) == "ok"
    assert not proof.exists()
    counts["hostile weight files within 400 MiB"] = 400
