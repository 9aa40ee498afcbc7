"""Promise 10: files made to harm. Nothing runs, nothing is written outside, memory is bounded, the error is clear."""

from __future__ import annotations

import io
import json
import os
import pickle
import random
import shutil
import struct
import tarfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from bounded import ROOM, Bomb, bounded, files_under
from PIL import Image
from reliability_results import recorded
from small_run import run_small

from m1clip.cli.main import main
from m1clip.config import init_preset, load_config
from m1clip.data.images import MAX_PIXELS, Preprocess, decode
from m1clip.data.sources import open_source
from m1clip.errors import UserError
from m1clip.export.layouts import export
from m1clip.inference.encoder import Model, load, read_model
from m1clip.model.clip import build_clip
from m1clip.model.presets import CLIPConfig, PretrainedTextConfig, with_fields
from m1clip.model.pretrained import check_settings
from m1clip.model.weights import read_checkpoint, write_tensors
from m1clip.runlog import read_log
from m1clip.text.bpe import BpeTokenizer
from m1clip.text.tokenizers import load_tokenizer
from m1clip.training.checkpoint import TrainState, load_latest, save

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained") / "run"
    run_small(folder, {"train.steps": 2})
    return folder


@pytest.fixture
def proof(tmp_path: Path) -> Path:
    """The file that a pickle would make, if anything unpickled it."""
    return tmp_path / "IT-RAN"


def pickled(proof: Path) -> bytes:
    return pickle.dumps(Bomb(proof))


def torch_pickled(proof: Path) -> bytes:
    file = io.BytesIO()
    torch.save({"a": Bomb(proof)}, file)
    return file.getvalue()


def huge_header(proof: Path) -> bytes:
    """A safetensors file that claims a header of 2 GB."""
    return struct.pack("<Q", 2 * 2**30) + b'{"a":{}}'


def header_of_its_size(proof: Path) -> bytes:
    return struct.pack("<Q", 50) + b"[" * 50


def huge_tensor(proof: Path) -> bytes:
    """A header that promises a tensor of 2 TB."""
    head = json.dumps({"a": {"dtype": "F32", "shape": [2**39], "data_offsets": [0, 2**41]}}).encode()
    return struct.pack("<Q", len(head)) + head


def overlapping(proof: Path) -> bytes:
    head = json.dumps({n: {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} for n in "ab"}).encode()
    return struct.pack("<Q", len(head)) + head + bytes(8)


def deep_json(proof: Path) -> bytes:
    return b"[" * 2_000_000


FAKES: tuple[Callable[[Path], bytes], ...] = (
    pickled,
    torch_pickled,
    huge_header,
    header_of_its_size,
    huge_tensor,
    overlapping,
    deep_json,
)


def must_refuse(told: str, proof: Path) -> None:
    assert told.startswith("UserError"), told
    assert "\n" not in told
    assert not proof.exists(), "code from the file was run"


@pytest.mark.parametrize("fake", FAKES)
def test_in_the_place_of_weights(trained: Path, tmp_path: Path, proof: Path, fake: Callable[[Path], bytes]) -> None:
    shutil.copytree(trained / "model", tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").write_bytes(fake(proof))
    must_refuse(bounded(lambda: load(tmp_path / "model")), proof)
    for name in ("w.safetensors", "w.pt", "w.bin"):
        (tmp_path / name).write_bytes(fake(proof))
        must_refuse(bounded(lambda name=name: read_checkpoint(tmp_path / name)), proof)


@pytest.mark.parametrize("fake", FAKES)
@pytest.mark.parametrize("honest", [False, True], ids=["hash differs", "hash made right"])
def test_in_the_place_of_a_checkpoint(tmp_path: Path, proof: Path, fake: Callable[[Path], bytes], honest: bool) -> None:
    groups = {"weights": {"a": torch.ones(3)}, "optimizer": {"m": torch.ones(3)}}
    save(tmp_path, TrainState(step=1), groups, keep=1)
    folder = tmp_path / "checkpoints" / "step-000001"
    (folder / "weights.safetensors").write_bytes(fake(proof))
    if honest:  # whoever writes the file can write its hash too
        from m1clip.training.checkpoint_list import sha256

        manifest = json.loads((folder / "manifest.json").read_text())
        known = json.dumps(manifest)
        for name in ("weights.safetensors",):
            known = known.replace(_hash_in(manifest, name), sha256(folder / name))
        (folder / "manifest.json").write_text(known)
    must_refuse(bounded(lambda: load_latest(tmp_path, CPU, lambda line: None)), proof)


def _hash_in(manifest: dict[str, Any], name: str) -> str:
    found = manifest["sha256"][name]
    return str(found["sha256"] if isinstance(found, dict) else found)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
@pytest.mark.parametrize("fake", [pickled, deep_json, lambda proof: b'{"a":' * 100_000, lambda proof: b"9" * 100_000])
def test_in_the_place_of_a_models_json(
    trained: Path, tmp_path: Path, proof: Path, name: str, fake: Callable[[Path], bytes]
) -> None:
    shutil.copytree(trained / "model", tmp_path / "model")
    (tmp_path / "model" / name).write_bytes(fake(proof))
    must_refuse(bounded(lambda: load(tmp_path / "model")), proof)


def test_json_of_hundreds_of_megabytes_is_not_read(tmp_path: Path, proof: Path) -> None:
    for name in ("tokenizer.json", "config.toml"):
        with (tmp_path / name).open("wb") as file:
            file.truncate(300 * 2**20)  # zeros that take no room on the disk
    must_refuse(bounded(lambda: load_tokenizer(tmp_path)), proof)
    must_refuse(bounded(lambda: load_config(tmp_path / "config.toml")), proof)
    with (tmp_path / "a.json").open("wb") as file:
        file.truncate(2**30 + 1)
    must_refuse(bounded(lambda: open_source(f"json:{tmp_path / 'a.json'}")), proof)
    with (tmp_path / "run.jsonl").open("wb") as file:
        file.truncate(100 * 2**20)
    assert bounded(lambda: list(read_log(tmp_path))) == "ok"


@pytest.mark.parametrize("kind", ["huge", "fifo", "device"])
def test_small_files_of_a_model_and_of_the_command_line_are_bounded(trained: Path, tmp_path: Path, kind: str) -> None:
    """A gigabyte, a FIFO that nobody writes, a device without end: refused, not read and not waited for."""

    def replace(path: Path) -> Path:
        path.unlink(missing_ok=True)
        if kind == "huge":
            path.touch()
            os.truncate(path, 2**30)  # sparse: no room on the disk
        elif kind == "fifo":
            os.mkfifo(path)
        else:
            path.symlink_to("/dev/zero")
        return path

    def command(*words: str | Path) -> None:
        with pytest.raises(SystemExit) as end:
            main([str(word) for word in words])
        assert end.value.code == 2

    shutil.copytree(trained / "model", tmp_path / "model")
    names = replace(tmp_path / "names.txt")
    classes = ("eval", tmp_path / "model", "--classes", tmp_path, "--class-names", names)
    assert bounded(lambda: command(*classes)) == "ok"
    assert bounded(lambda: command("train", "--config", names)) == "ok"
    for name in ("a.csv", "b.jsonl", "c.json"):
        if kind != "huge":
            data = replace(tmp_path / name)
            assert bounded(lambda data=data: command("check", data)) == "ok"
    for name in ("config.json", "tokenizer.json"):
        shutil.copytree(trained / "model", tmp_path / "model", dirs_exist_ok=True)
        replace(tmp_path / "model" / name)
        told = bounded(lambda: load(tmp_path / "model"))
        assert told.startswith("UserError"), (name, told)
        assert bounded(lambda: init_preset(tmp_path / "model")) == "ok"
        (tmp_path / "model" / name).unlink()


HUGE = 10**9


def change_json(path: Path, *changes: tuple[tuple[str, ...], object]) -> None:
    """Set values by their path of keys."""
    values = json.loads(path.read_text())
    for keys, value in changes:
        place = values
        for key in keys[:-1]:
            place = place[key]
        place[keys[-1]] = value
    path.write_text(json.dumps(values))


SIZES = [
    *(("image_tower", name) for name in ("image_size", "patch_size", "width", "layers", "heads", "mlp_ratio")),
    *(("text_tower", name) for name in ("width", "layers", "heads", "context_length", "vocab_size", "mlp_ratio")),
    ("embed_dim",),
]


@pytest.mark.parametrize("size", SIZES, ids=".".join)
@pytest.mark.parametrize("value", [HUGE, 10**400, 8192, 255], ids=["huge", "400 digits", "large", "other"])
def test_sizes_in_a_config_json_are_checked_before_anything_is_built(
    trained: Path, tmp_path: Path, proof: Path, size: tuple[str, ...], value: int
) -> None:
    """Beyond all bounds, or within them and not those of the weights."""
    shutil.copytree(trained / "model", tmp_path / "model")
    changes: list[tuple[tuple[str, ...], object]] = [(("model", *size), value)]
    if size[-1] == "image_size":
        changes.append((("preprocess", "image_size"), value))
    if value < HUGE and size[-1] in ("patch_size", "heads", "mlp_ratio"):
        changes = [(("model", *size), 1 if size[-1] == "patch_size" else 64)]
    change_json(tmp_path / "model" / "config.json", *changes)
    must_refuse(bounded(lambda: load(tmp_path / "model")), proof)
    must_refuse(bounded(lambda: read_model(tmp_path / "model")), proof)


@pytest.mark.parametrize("to", ["openclip", "hf"])
def test_sizes_in_a_third_party_config_are_checked(tmp_path: Path, proof: Path, to: Literal["openclip", "hf"]) -> None:
    shape = with_fields(
        CLIPConfig(),
        image_size=32,
        patch_size=16,
        vision_width=64,
        vision_layers=1,
        vision_heads=1,
        text_width=64,
        text_layers=1,
        text_heads=1,
        context_length=8,
        embed_dim=16,
    )
    tokenizer = BpeTokenizer()
    bundle = Model(build_clip(with_fields(shape, eot_id=tokenizer.eot_id)), tokenizer, Preprocess(image_size=32))
    bundle.save(tmp_path / "own")
    export(tmp_path / "own", to, tmp_path / "theirs")
    path = tmp_path / "theirs" / ("config.json" if to == "hf" else "open_clip_config.json")
    honest = path.read_text()
    root = json.loads(honest)["model_cfg"] if to == "openclip" else json.loads(honest)
    prefix: tuple[str, ...] = ("model_cfg",) if to == "openclip" else ()
    load(tmp_path / "theirs")
    for part in ("vision_cfg", "text_cfg") if to == "openclip" else ("vision_config", "text_config"):
        for key in [key for key, value in root[part].items() if type(value) is int and not key.endswith("token_id")]:
            for value in (HUGE, 0, -1, 77 * 64, None, "x", [HUGE]):
                if key == "projection_dim":
                    continue  # of the towers alone; the model has its own
                path.write_text(honest)
                change_json(path, ((*prefix, part, key), value))
                must_refuse(bounded(lambda: load(tmp_path / "theirs")), proof)


def test_sizes_in_a_pretrained_towers_config_are_checked(proof: Path) -> None:
    weights = {f"image.model.{number}": torch.zeros(128, 64) for number in range(4)}

    def check(text: str) -> None:
        check_settings(PretrainedTextConfig(kind="transformers", name="bert", settings=text), weights, "x")

    check(json.dumps({"hidden_size": 128, "num_hidden_layers": 4, "image_size": 224, "eos_token_id": 50_000}))
    for text in ("[]", "{", "", "[" * 100_000):
        must_refuse(bounded(lambda text=text: check(text)), proof)
    for config in (
        {"hidden_size": HUGE},
        {"num_hidden_layers": HUGE},
        {"depths": [2, HUGE]},
        {"image_size": HUGE},
        {"inner": {"intermediate_size": 5000}},
        {"num_labels": HUGE},
    ):
        must_refuse(bounded(lambda config=config: check(json.dumps(config))), proof)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_weights_that_are_not_finite_are_refused(
    trained: Path, tmp_path: Path, proof: Path, value: float, dtype: torch.dtype
) -> None:
    shutil.copytree(trained / "model", tmp_path / "model")
    weights = {name: t.to(dtype) for name, t in read_checkpoint(tmp_path / "model" / "model.safetensors").items()}
    write_tensors(tmp_path / "model" / "model.safetensors", weights)
    load(tmp_path / "model")
    weights["text_tower.tokens.weight"][3, 5] = value
    write_tensors(tmp_path / "model" / "model.safetensors", weights)
    for read in (load, read_model):
        told = bounded(lambda read=read: read(tmp_path / "model"))
        must_refuse(told, proof)
        assert "'text_tower.tokens.weight' contains NaN or infinity" in told


def test_members_of_a_tar(tmp_path: Path, proof: Path) -> None:
    good = io.BytesIO()
    Image.new("RGB", (8, 8)).save(good, "JPEG")
    with tarfile.open(tmp_path / "x.tar", "w") as tar:
        for name in ("../out.jpg", "/abs.jpg", "a/../../b.jpg", "C:\\x.jpg", "ok.jpg"):
            add(tar, name, good.getvalue())
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
        add(tar, "p.jpg", pickled(proof))
        add(tar, "p.txt", b"not an image")
        add(tar, "q.pkl", pickled(proof))
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


def png(width: int, height: int, data: bytes = b"") -> bytes:
    """A PNG header of any size, with little behind it."""

    def part(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + part(b"IHDR", head) + part(b"IDAT", data) + part(b"IEND", b"")


def bombs() -> dict[str, bytes]:
    """Small files that would become large."""
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
    zeros = zlib.compress(bytes(90 * 2**20), 9)
    return {
        "png of 4 gigapixels": png(65535, 65535),
        "png of 100 terapixels": png(2**31 - 1, 50_000),
        "png with 90 MiB of zeros": png(5000, 5000, zeros),
        "png with a text of 2 GB": png(8, 8)[:33] + text,
        "gif": gif,
        "bmp": bmp,
        "tiff": b"II*\0\x08\0\0\0\x01\0\0\x01\x04\0\xff\xff\xff\x7f\0\0\0\0",
    }


@pytest.mark.parametrize("name", list(bombs()))
def test_a_image_that_explodes(name: str) -> None:
    told = bounded(lambda: decode(bombs()[name], 32, "bomb"), room=600 * 2**20)
    assert told.startswith("UserError: bomb: ") or told == "ok", told
    assert MAX_PIXELS <= 64 * 2**20


CHANGES = 200
CHANGED: tuple[Callable[[Path], bytes], ...] = (pickled, torch_pickled, huge_header, huge_tensor, overlapping)


def changed_a_little(fake: Callable[[Path], bytes], model: Path, proof: Path) -> None:
    """Hostile files with a few bytes changed: some are then hostile in ways that nobody thought of."""
    draw = random.Random(fake.__name__)
    original = fake(proof)
    for _ in range(CHANGES):
        data = bytearray(original)
        for _ in range(draw.randrange(1, 4)):
            data[draw.randrange(len(data))] = draw.randrange(256)
        for path, read in ((model / "model.safetensors", load), (model / "w.pt", read_checkpoint)):
            path.write_bytes(bytes(data))
            try:
                read(model if read is load else path)
            except UserError:
                continue


@pytest.mark.long
@pytest.mark.parametrize("part", range(1, len(CHANGED) + 1))
def test_two_thousand_more(tmp_path: Path, trained: Path, proof: Path, part: int) -> None:
    with recorded("hostile files", part, len(CHANGED)) as counts:
        shutil.copytree(trained / "model", tmp_path / "model")
        told = bounded(lambda: changed_a_little(CHANGED[part - 1], tmp_path / "model", proof), seconds=300)
        assert told == "ok", told
        assert not proof.exists()
        counts |= {
            "changed files": CHANGES * 2,
            "kinds of file in the fast form": len(FAKES) * 6 + len(bombs()),
            "memory limit in MiB": ROOM // 2**20,
        }
